"""The server's end of a control link, over streams in memory and a clock that jumps."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio_websocket import ConnectionClosed, WebSocketConnection

from llmgw.core.events import NodeRegistered, NodeReported, ShardChanged, WeightsReported
from llmgw.core.node import NodeId
from llmgw.core.replica import ShardState
from llmgw.core.weights import NodeWeights, Pull, WeightsOrder
from llmgw.link.agentlink import AgentLink, Pace
from llmgw.link.control import LOOK_SECONDS, Control, Tap, ask_upgrade
from llmgw.link.handshake import Arrival, Floor, Unwelcome, upgrade
from llmgw.link.sessions import Sessions
from llmgw.link.sparing import SparingLog
from llmgw.wire import (
    FETCHES_WEIGHTS,
    PROTOCOL,
    AgentMessage,
    Desired,
    DesiredDelta,
    Goaway,
    Hello,
    NodeWord,
    OrderWord,
    Refused,
    Register,
    Resync,
    ServerMessage,
    ShardWord,
    WeightsWord,
    Welcome,
    decode_from_server,
    encode,
)

NODE = NodeId("gpu-01")
LEASE = 15.0


class Trunks:
    """Remembers what was closed."""

    def __init__(self) -> None:
        self.closed: list[tuple[NodeId, str]] = []

    def close_node(self, node: NodeId, reason: str) -> None:
        self.closed.append((node, reason))


class Peer:
    """The agent's end of one link."""

    def __init__(self, ws: WebSocketConnection, scope: trio.CancelScope) -> None:
        self.ws = ws
        # Cancelled, the peer is dead without a goodbye: it reads nothing more and answers no ping.
        self.life = scope

    async def say(self, message: AgentMessage) -> None:
        await self.ws.send_message(encode(message))

    async def hear(self) -> ServerMessage:
        with trio.fail_after(600):
            return decode_from_server(await self.ws.get_message())

    async def greet(self, run: str = "a", dial: int = 1) -> ServerMessage:
        await self.say(Hello(protocol=PROTOCOL, node=NODE, run=run, dial=dial, version="1.0"))
        return await self.hear()

    async def wait_closed(self) -> None:
        """Whatever comes before it is passed over."""
        with trio.fail_after(600):
            while True:
                try:
                    await self.ws.get_message()
                except ConnectionClosed:
                    return


class World:
    """What the links share."""

    def __init__(self, fleet: Any, nursery: trio.Nursery) -> None:
        self.fleet = fleet
        self.nursery = nursery
        self.sessions = Sessions(lease_seconds=LEASE)
        self.trunks = Trunks()
        self.links: list[AgentLink] = []
        self.turned: list[str] = []
        self.ended = 0

    async def dial(self, address: str = "10.0.0.1:5000") -> Peer:
        here, there = trio.testing.memory_stream_pair()
        arrival = Arrival(stream=cast("Any", there), node=NODE, serial=7, protocol=None, peer=address)
        self.nursery.start_soon(self._serve, arrival)
        return await self.nursery.start(self._live, here)

    async def _live(self, stream: trio.abc.Stream, *, task_status: trio.TaskStatus[Peer]) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                ws = await ask_upgrade(nursery, Tap(stream), host="server", node=NODE)
                task_status.started(Peer(ws, scope))
                await trio.sleep_forever()

    async def _serve(self, arrival: Arrival) -> None:
        floor = Floor(arrival.stream)
        tap = Tap(floor)
        async with trio.open_nursery() as reading:
            ws = await upgrade(reading, tap, floor, lambda request: None)
            link = AgentLink(
                Control(ws, tap, reading, peer="the agent"),
                arrival,
                sessions=self.sessions,
                agents=self.fleet,
                trunks=self.trunks,
                pace=Pace(),
                words=SparingLog(),
            )
            self.links.append(link)
            reading.start_soon(self._look, link)
            try:
                await link.serve()
            except Unwelcome as no:
                self.turned.append(no.message)
            reading.cancel_scope.cancel()
        self.ended += 1
        await arrival.stream.aclose()

    async def _look(self, link: AgentLink) -> None:
        while True:
            await trio.sleep(LOOK_SECONDS)
            link.look()


@pytest.fixture
async def world(fleet: Any, nursery: trio.Nursery) -> World:
    return World(fleet, nursery)


@pytest.fixture
def register(facts: Any) -> Register:
    return Register(node=facts.node(), running=())


async def test_an_agent_is_welcomed_and_its_words_reach_the_fleet(
    autojump_clock: object, world: World, facts: Any
) -> None:
    peer = await world.dial()
    welcome = await peer.greet()
    assert isinstance(welcome, Welcome)
    assert (welcome.protocol, welcome.lease_seconds) == (PROTOCOL, LEASE)
    assert world.sessions.refuse_token(NODE, welcome.session) is None
    spec = facts.spec()
    await peer.say(Register(node=facts.node(), running=((spec, facts.report(spec)),)))
    await peer.say(NodeWord(node=facts.node(free_gb=40.0), applied=None))
    await peer.say(ShardWord(report=facts.report(spec, ShardState.ENDED)))
    assert await world.fleet.wait_events(3) == [
        NodeRegistered(node=facts.node(), running=((spec, facts.report(spec)),)),
        NodeReported(node=facts.node(free_gb=40.0)),
        ShardChanged(node=NODE, report=facts.report(spec, ShardState.ENDED)),
    ]


async def test_the_flags_of_like_processors_are_kept_once(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    peer = await world.dial()
    await peer.greet()
    await peer.say(register)
    await peer.say(NodeWord(node=facts.node(free_gb=40.0), applied=None))
    registered, reported = await world.fleet.wait_events(2)
    assert registered.node.cpu_flags is reported.node.cpu_flags
    assert registered.node.memory_available_gb != reported.node.memory_available_gb


async def test_the_set_comes_whole_and_then_by_what_changes(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    one, two = facts.spec(number=1), facts.spec(number=2)
    world.fleet.desire(NODE, 3, one)
    peer = await world.dial()
    await peer.greet()
    await peer.say(register)
    assert await peer.hear() == Desired(revision=3, shards=(one,))
    world.fleet.desire(NODE, 4, one, two)
    assert await peer.hear() == DesiredDelta(revision=4, base=3, put=(two,), drop=())
    await peer.say(Resync())
    assert await peer.hear() == Desired(revision=4, shards=(one, two))
    world.fleet.desire(NODE, 9, two)
    assert await peer.hear() == DesiredDelta(revision=9, base=4, put=(), drop=(one.id,))


async def test_what_is_said_of_weights_goes_both_ways(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    first, second = (WeightsOrder(pulls=(Pull(number=number, source="hf:o/r/f.gguf"),)) for number in (1, 2))
    world.fleet.order(NODE, first)
    peer = await world.dial()
    await peer.greet()
    await peer.say(register)
    assert await peer.hear() == OrderWord(order=first)
    weights = NodeWeights(seen=("/m.gguf",))
    await peer.say(WeightsWord(weights=weights))
    assert (await world.fleet.wait_events(2))[1] == WeightsReported(node=NODE, weights=weights)
    # what can't be sent leaves the link as it is
    world.fleet.order(NODE, WeightsOrder(pulls=(Pull(number=-1, source="x"),)))
    world.fleet.order(NODE, second)
    assert await peer.hear() == OrderWord(order=second)
    peer.life.cancel()
    await trio.sleep(LEASE)
    assert world.fleet.order_followers == []


async def test_an_agent_that_fetches_no_weights_is_told_nothing_of_them(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    world.fleet.order(NODE, WeightsOrder(pulls=(Pull(number=1, source="hf:o/r/f.gguf"),)))
    peer = await world.dial()
    await peer.say(Hello(protocol=FETCHES_WEIGHTS - 1, node=NODE, run="a", dial=1, version="1.0"))
    assert isinstance(await peer.hear(), Welcome)
    await peer.say(register)
    await world.fleet.wait_events(1)
    world.fleet.desire(NODE, 1, facts.spec())
    assert isinstance(await peer.hear(), Desired)


async def test_nothing_is_desired_of_a_node_that_has_not_registered(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    world.fleet.desire(NODE, 1, facts.spec())
    peer = await world.dial()
    await peer.greet()
    with trio.move_on_after(4) as waited:
        await peer.hear()
    assert waited.cancelled_caught
    await peer.say(register)
    assert isinstance(await peer.hear(), Desired)


async def test_who_registers_again_is_told_the_whole_again(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    world.fleet.desire(NODE, 1, facts.spec())
    peer = await world.dial()
    await peer.greet()
    for _ in range(2):
        await peer.say(register)
        assert await peer.hear() == Desired(revision=1, shards=(facts.spec(),))


async def test_an_agent_that_lags_is_told_the_whole_again(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    world.fleet.desire(NODE, 5, facts.spec())
    peer = await world.dial()
    await peer.greet()
    await peer.say(register)
    assert isinstance(await peer.hear(), Desired)
    for seconds, applied in ((1, None), (1, 4), (20, 5)):
        await trio.sleep(seconds)
        await peer.say(NodeWord(node=facts.node(), applied=applied))
    await world.fleet.wait_events(4)
    with trio.move_on_after(1) as waited:
        await peer.hear()
    assert waited.cancelled_caught
    await peer.say(NodeWord(node=facts.node(), applied=4))
    assert await peer.hear() == Desired(revision=5, shards=(facts.spec(),))


async def test_a_set_that_cant_be_sent_ends_nothing(
    autojump_clock: object, world: World, facts: Any, register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    world.fleet.desire(NODE, 1, facts.spec())
    peer = await world.dial()
    await peer.greet()
    await peer.say(register)
    await peer.hear()
    spec = facts.spec(number=2)
    huge = dataclasses.replace(spec, profile=dataclasses.replace(spec.profile, args=("x" * 300_000,)))
    with caplog.at_level(logging.ERROR):
        world.fleet.desire(NODE, 2, huge)
        await trio.sleep(1)
    assert "node gpu-01 can't be told to run shd-m-2-0" in caplog.text
    # the others are told all the same
    assert await peer.hear() == Desired(revision=2, shards=())
    world.fleet.desire(NODE, 3, facts.spec(), huge, facts.spec(number=3))
    assert await peer.hear() == Desired(revision=3, shards=(facts.spec(), facts.spec(number=3)))
    world.fleet.desire(NODE, 4, facts.spec(number=3))
    assert await peer.hear() == DesiredDelta(revision=4, base=3, put=(), drop=(facts.spec().id,))
    # the whole is asked for, of a set that is too long as a whole
    many = [
        dataclasses.replace(each, profile=dataclasses.replace(each.profile, args=("x" * 250_000,)))
        for each in (facts.spec(number=number) for number in range(20))
    ]
    world.fleet.desire(NODE, 5, *many)
    told = await peer.hear()
    assert isinstance(told, Desired)
    assert 10 < len(told.shards) < 20
    await peer.say(Resync())
    assert await peer.hear() == told


# What an agent of protocol 1 sends, word for word: it knows nothing of ``applied``.
OLD_HELLO = {"type": "hello", "protocol": 1, "node": "gpu-01", "run": "5c0ffee5", "dial": 1, "version": "0.1.0"}
OLD_NODE = {
    "id": "gpu-01",
    "cores": 16,
    "cpu_flags": ["avx2", "f16c"],
    "memory_gb": 128.5,
    "memory_available_gb": 100.25,
    "disks": [{"path": "/var/lib/llmgw-models", "free_gb": 400.0, "total_gb": 900.0}],
    "engines": [{"engine": "llamacpp", "program": ["/usr/bin/llama-server"], "version": "6000"}],
}
OLD_REPORT = {
    "shard": "shd-m-1-0",
    "replica": "rep-m-1",
    "epoch": 2,
    "state": "loading",
    "endpoint": None,
    "pid": 4711,
    "progress": "40 %",
    "cause": None,
    "lines": [],
    "running": None,
    "waiting": None,
}


async def test_an_agent_of_the_protocol_before_is_served(autojump_clock: object, world: World, facts: Any) -> None:
    world.fleet.desire(NODE, 1, facts.spec())
    peer = await world.dial()
    await peer.ws.send_message(json.dumps(OLD_HELLO))
    welcome = await peer.hear()
    assert isinstance(welcome, Welcome)
    assert welcome.protocol == 1
    await peer.ws.send_message(json.dumps({"type": "register", "node": OLD_NODE, "running": []}))
    assert isinstance(await peer.hear(), Desired)
    await peer.ws.send_message(json.dumps({"type": "shard", "report": OLD_REPORT}))
    await trio.sleep(100)
    # it says nothing of what it has applied, and so it never lags
    await peer.ws.send_message(json.dumps({"type": "node", "node": OLD_NODE}))
    registered, changed, reported = await world.fleet.wait_events(3)
    assert isinstance(registered, NodeRegistered)
    assert registered.node.memory_gb == 128.5
    assert isinstance(changed, ShardChanged)
    assert (changed.node, changed.report.progress) == (NODE, "40 %")
    assert isinstance(reported, NodeReported)
    with trio.move_on_after(1) as waited:
        await peer.hear()
    assert waited.cancelled_caught
    assert [view[0].claim.protocol for view in world.sessions.views()] == [1]


@pytest.mark.parametrize(("protocol", "way"), [(PROTOCOL + 1, "upgrade the server"), (0, "upgrade the agent")])
async def test_another_protocol_is_refused_with_what_to_do(
    autojump_clock: object, world: World, protocol: int, way: str
) -> None:
    peer = await world.dial()
    await peer.say(Hello(protocol=protocol, node=NODE, run="a", dial=1, version="9.9"))
    refused = await peer.hear()
    assert isinstance(refused, Refused)
    assert refused.code == "protocol"
    assert way in refused.reason
    await peer.wait_closed()
    await trio.sleep(5)
    assert world.turned == [f"node gpu-01: {refused.reason}"]


async def test_who_says_no_hello_is_refused(autojump_clock: object, world: World) -> None:
    peer = await world.dial()
    assert await peer.hear() == Refused(code="violation", reason="no hello within 10 s")
    await peer.wait_closed()


def words(facts: Any) -> dict[str, tuple[list[Any], str]]:
    """What breaks the protocol after a good hello, and a part of what is said of it."""
    spec = facts.spec()
    register = Register(node=facts.node(), running=())
    hello = Hello(protocol=PROTOCOL, node=NODE, run="a", dial=2, version="1.0")
    return {
        "node before register": ([NodeWord(node=facts.node(), applied=None)], "NodeWord before Register"),
        "shard before register": ([ShardWord(report=facts.report(spec))], "ShardWord before Register"),
        "resync before register": ([Resync()], "Resync before Register"),
        "hello twice": ([hello], "hello is said once"),
        "registers another": ([Register(node=facts.node("other"), running=())], "'other'"),
        "reports another": ([register, NodeWord(node=facts.node("other"), applied=None)], "'other'"),
        "mixes shards": (
            [Register(node=facts.node(), running=((spec, facts.report(facts.spec(number=2))),))],
            "shd-m-2-0",
        ),
        "no JSON": ([register, b"\xff\xfe{"], "can't be read"),
        "no object": ([register, b"[1, 2]"], "can't be read"),
        "unknown word": ([register, b'{"type": "reboot"}'], "can't be read"),
        "a server's word": ([register, b'{"type": "goaway", "reason": "x"}'], "can't be read"),
        "a field that is none": ([register, b'{"type": "node", "node": 7, "applied": 1}'], "can't be read"),
        "deep": ([register, b"[" * 100_000], "can't be read"),
    }


@pytest.mark.parametrize(
    "case",
    [
        "node before register",
        "shard before register",
        "resync before register",
        "hello twice",
        "registers another",
        "reports another",
        "mixes shards",
        "no JSON",
        "no object",
        "unknown word",
        "a server's word",
        "a field that is none",
        "deep",
    ],
)
async def test_a_word_that_breaks_the_protocol_ends_the_link(
    autojump_clock: object, world: World, facts: Any, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    said, part = words(facts)[case]
    peer = await world.dial()
    await peer.greet()
    with caplog.at_level(logging.WARNING):
        for word in said:
            await peer.ws.send_message(word if isinstance(word, bytes) else encode(word))
        refused = await peer.hear()
        await peer.wait_closed()
        await trio.sleep(1)
    assert isinstance(refused, Refused)
    assert refused.code == "violation"
    assert part in refused.reason
    assert f"node gpu-01: the link from 10.0.0.1:5000 has ended: {refused.reason}" in caplog.messages
    # what came before it counts, and it itself does not
    assert len(world.fleet.events) == len(said) - 1
    assert world.ended == 1
    assert world.sessions.list_connected() == ()


@pytest.mark.parametrize(
    ("word", "part"),
    [(b"{}", "can't be read"), (encode(Resync()), "was Resync"), (b"", "can't be read")],
)
async def test_a_first_word_that_is_no_hello_is_refused(
    autojump_clock: object, world: World, word: bytes, part: str
) -> None:
    peer = await world.dial()
    await peer.ws.send_message(word)
    refused = await peer.hear()
    assert isinstance(refused, Refused)
    assert part in refused.reason


async def test_a_hello_in_another_name_is_refused(autojump_clock: object, world: World) -> None:
    peer = await world.dial()
    await peer.say(Hello(protocol=PROTOCOL, node="other", run="a", dial=1, version="1.0"))
    refused = await peer.hear()
    assert refused == Refused(
        code="violation", reason="it speaks of node 'other', and its certificate is of node gpu-01"
    )


async def test_the_higher_dial_of_a_run_replaces_the_lower(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    old = await world.dial("10.0.0.1:1111")
    first = await old.greet(dial=1)
    new = await world.dial("10.0.0.1:2222")
    second = await new.greet(dial=2)
    assert isinstance(first, Welcome)
    assert isinstance(second, Welcome)
    refused = await old.hear()
    assert refused == Refused(code="replaced", reason="node gpu-01 has connected anew, from 10.0.0.1:2222")
    await old.wait_closed()
    # the run is the same: its trunks go on
    assert world.trunks.closed == []
    assert world.sessions.refuse_token(NODE, first.session) is None
    await new.say(register)
    await world.fleet.wait_events(1)


async def test_the_lower_dial_of_a_run_is_refused(autojump_clock: object, world: World) -> None:
    await (await world.dial()).greet(dial=7)
    late = await world.dial()
    refused = await late.greet(dial=6)
    assert isinstance(refused, Refused)
    assert refused.code == "replaced"
    assert len(world.sessions.list_connected()) == 1


async def test_another_run_is_refused_while_the_first_lives(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    there = await world.dial("10.0.0.1:1111")
    await there.greet(run="a")
    other = await world.dial("10.0.0.9:9999")
    refused = await other.greet(run="b", dial=50)
    assert refused == Refused(code="connected", reason="node gpu-01 is already connected from 10.0.0.1:1111")
    await other.wait_closed()
    await there.say(register)
    await world.fleet.wait_events(1)
    await trio.sleep(5)
    assert world.turned == ["node gpu-01: node gpu-01 is already connected from 10.0.0.1:1111"]


async def test_another_run_replaces_one_that_does_not_answer(autojump_clock: object, world: World) -> None:
    dead = await world.dial("10.0.0.1:1111")
    first = await dead.greet(run="a")
    assert isinstance(first, Welcome)
    dead.life.cancel()
    began = trio.current_time()
    new = await world.dial("10.0.0.9:9999")
    assert isinstance(await new.greet(run="b"), Welcome)
    assert trio.current_time() - began == pytest.approx(Pace().answer, abs=0.5)
    assert world.trunks.closed == [(NODE, "the node's agent has started anew")]
    assert world.sessions.refuse_token(NODE, first.session) is not None


async def test_another_run_enters_when_the_first_goes_while_it_is_asked(autojump_clock: object, world: World) -> None:
    dead = await world.dial()
    await dead.greet(run="a")
    dead.life.cancel()
    new = await world.dial("10.0.0.9:9999")
    world.nursery.start_soon(new.greet, "b")
    await trio.sleep(1)
    world.links[0].cut(None, "its cable was pulled")
    await trio.sleep(10)
    assert [session.claim.run for session in world.sessions.list_connected()] == ["b"]


async def test_of_two_that_want_a_dead_ones_place_one_gets_it(autojump_clock: object, world: World) -> None:
    dead = await world.dial()
    await dead.greet(run="a")
    dead.life.cancel()
    answers: list[ServerMessage] = []

    async def greet(run: str) -> None:
        answers.append(await (await world.dial(f"10.0.0.{run}:1")).greet(run=run))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(greet, "2")
        nursery.start_soon(greet, "3")
    assert sorted(type(answer).__name__ for answer in answers) == ["Refused", "Welcome"]


async def test_the_late_words_of_a_replaced_link_have_no_effect(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    old = await world.dial()
    await old.greet(dial=1)
    world.fleet.room = trio.Event()
    await old.say(Register(node=facts.node(free_gb=1.0), running=()))
    await trio.testing.wait_all_tasks_blocked()
    await trio.sleep(1)
    assert world.fleet.waiting == 1
    new = await world.dial()
    await new.greet(dial=2)
    await new.say(register)
    await trio.sleep(1)
    world.fleet.room.set()
    await old.wait_closed()
    assert await world.fleet.wait_events(1) == [NodeRegistered(node=facts.node(), running=())]


async def test_a_full_inbox_makes_an_agent_wait(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    peer = await world.dial()
    await peer.greet()
    world.fleet.room = trio.Event()
    await peer.say(register)
    for _ in range(3):
        await peer.say(NodeWord(node=facts.node(), applied=None))
    await trio.sleep(1)
    assert (world.fleet.waiting, world.fleet.events) == (1, [])
    world.fleet.room.set()
    await world.fleet.wait_events(4)


async def test_an_agent_that_dies_is_found_by_pings(
    autojump_clock: object, world: World, register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await world.dial()
    await peer.greet()
    began = trio.current_time()
    peer.life.cancel()
    with caplog.at_level(logging.INFO):
        while not world.ended:  # noqa: ASYNC110 - there is nothing to wait on but the end itself
            await trio.sleep(0.5)
    assert trio.current_time() - began < 20
    assert "the link from 10.0.0.1:5000 has ended: nothing was heard of" in caplog.text
    assert world.sessions.list_connected() == ()


async def test_goaway_is_told_and_the_link_goes_on(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    peer = await world.dial()
    await peer.greet()
    world.links[0].goaway("the server stops")
    assert await peer.hear() == Goaway(reason="the server stops")
    await peer.say(register)
    await world.fleet.wait_events(1)


async def test_goaway_before_the_hello_is_a_refusal(autojump_clock: object, world: World) -> None:
    peer = await world.dial()
    await trio.sleep(1)
    world.links[0].goaway("the server stops")
    assert await peer.hear() == Refused(code="stopping", reason="the server stops")
    await peer.wait_closed()


async def test_a_cut_link_is_told_why_once(
    autojump_clock: object, world: World, facts: Any, register: Register
) -> None:
    peer = await world.dial()
    await peer.greet()
    world.links[0].cut("revoked", "the certificate is revoked")
    world.links[0].cut("replaced", "too late")
    await peer.say(register)
    assert await peer.hear() == Refused(code="revoked", reason="the certificate is revoked")
    await peer.wait_closed()
    assert world.fleet.events == []


async def test_an_agent_that_goes_before_its_hello_leaves_nothing(autojump_clock: object, world: World) -> None:
    peer = await world.dial()
    await peer.ws.aclose()
    await trio.sleep(1)
    assert (world.ended, world.turned) == (1, [])
