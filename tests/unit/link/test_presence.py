"""Which nodes are here, over lines that a test holds both ends of, and a clock that jumps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import trio
import trio.testing

from llmgw.core.events import Event, NodeLost, NodeRegistered, NodeSilent
from llmgw.core.node import NodeId
from llmgw.errors import LinkLost
from llmgw.link.agentlink import Pace
from llmgw.link.handshake import Unwelcome
from llmgw.link.presence import Presence
from llmgw.wire import (
    PROTOCOL,
    AgentMessage,
    Hello,
    NodeWord,
    Refused,
    Register,
    ServerMessage,
    Welcome,
    decode_from_server,
    encode,
)

NODE = NodeId("gpu-01")
LEASE = 15.0


@dataclass(frozen=True, kw_only=True)
class Caller:
    node: NodeId = NODE
    serial: int = 7
    peer: str = "10.0.0.1:5000"


class Line:
    """The server's end of a link; the test is the other one."""

    def __init__(self) -> None:
        self.heard_at = trio.current_time()
        self.lost: str | None = None
        self.said: list[ServerMessage] = []
        self.closed: str | None = None
        self._put, self._inbox = trio.open_memory_channel[bytes](100)

    async def say(self, message: AgentMessage) -> None:
        """As the agent."""
        self.heard_at = trio.current_time()
        await self._put.send(encode(message))
        await trio.testing.wait_all_tasks_blocked()

    async def enter(self, node: Any, *, run: str = "a", dial: int = 1) -> None:
        await self.say(Hello(protocol=PROTOCOL, node=node.id, run=run, dial=dial, version="1"))
        await self.say(Register(node=node, running=()))

    async def hang_up(self, why: str = "it broke") -> None:
        self.lost = why
        await self._put.aclose()
        await trio.testing.wait_all_tasks_blocked()

    def send(self, data: bytes) -> None:
        self.said.append(decode_from_server(data))

    async def receive(self) -> bytes:
        try:
            return await self._inbox.receive()
        except trio.EndOfChannel:
            raise LinkLost(self.lost or "it broke") from None

    async def is_alive(self, seconds: float) -> bool:
        return self.lost is None

    def look(self, *, ping_seconds: float, pong_seconds: float) -> None:
        if trio.current_time() - self.heard_at > ping_seconds + pong_seconds and self.lost is None:
            self.lost = "nothing was heard"
            self._put.close()

    async def close(self, reason: str) -> None:
        self.closed = reason

    def give_up(self) -> None:
        self.lost = self.lost or "given up"


class Trunks:
    def __init__(self) -> None:
        self.closed: list[NodeId] = []
        self.left = False

    def close_node(self, node: NodeId, reason: str) -> None:
        self.closed.append(node)

    def goaway(self) -> None:
        self.left = True

    def count(self, node: NodeId) -> int:
        return 3


class Here:
    """A presence and its links."""

    def __init__(self, fleet: Any, nursery: trio.Nursery) -> None:
        self.trunks = Trunks()
        self.lost: list[NodeId] = []
        self.turned: list[str] = []
        self.scopes: list[trio.CancelScope] = []
        self.looks = 0
        self.presence = Presence(
            fleet,
            trunks=self.trunks,
            lease_seconds=LEASE,
            pace=Pace(),
            make_token=lambda: "t0k3n",
            on_look=self._look,
            on_lost=self.lost.append,
        )
        self._nursery = nursery

    def _look(self) -> None:
        self.looks += 1

    def start(self) -> None:
        self._nursery.start_soon(self.presence.watch_leases)
        self._nursery.start_soon(self.presence.tell_silent)

    async def dial(self, node: NodeId = NODE, *, revoked: str | None = None, serial: int = 7) -> Line:
        line = Line()
        self._nursery.start_soon(self._serve, line, Caller(node=node, serial=serial), revoked)
        await trio.testing.wait_all_tasks_blocked()
        return line

    async def _serve(self, line: Line, caller: Caller, revoked: str | None) -> None:
        with trio.CancelScope() as scope:
            self.scopes.append(scope)
            try:
                await self.presence.serve_link(line, caller, revoked=revoked)
            except Unwelcome as no:
                self.turned.append(no.message)


@pytest.fixture
async def here(fleet: Any, nursery: trio.Nursery) -> Here:
    here = Here(fleet, nursery)
    here.start()
    return here


def kinds(events: list[Event]) -> list[type]:
    return [type(event) for event in events]


async def test_a_node_is_shown_with_its_link(autojump_clock: object, here: Here, facts: Any) -> None:
    line = await here.dial()
    await line.enter(facts.node())
    await trio.sleep(2)
    [view] = here.presence.views()
    assert (view.node, view.connected, view.heard_seconds_ago, view.trunks) == (NODE, True, 2.0, 3)
    assert line.said[0] == Welcome(protocol=PROTOCOL, session="t0k3n", lease_seconds=LEASE)
    assert here.presence.refuse_token(NODE, "t0k3n") is None
    assert here.presence.refuse_token(NODE, "another") is not None


@pytest.mark.parametrize("how", ["it breaks", "it is cancelled", "it breaks the protocol", "it is revoked", "silence"])
async def test_however_a_link_ends_its_node_is_silent_at_once(
    autojump_clock: object, here: Here, facts: Any, fleet: Any, how: str
) -> None:
    line = await here.dial()
    await line.enter(facts.node())
    if how == "it breaks":
        await line.hang_up()
    elif how == "it is cancelled":
        # as by the fall of the websocket's reader
        here.scopes[0].cancel()
    elif how == "it breaks the protocol":
        await line.say(NodeWord(node=facts.node("gpu-02"), applied=None))
    elif how == "it is revoked":
        here.presence.cut_revoked(lambda node, serial: f"{node} {serial}")
    if how == "silence":
        await trio.sleep(LEASE - 1)
    await trio.testing.wait_all_tasks_blocked()
    assert fleet.events[1:] == [NodeSilent(node=NODE)]
    assert here.presence.links == {}
    await trio.sleep(2 * LEASE)
    assert fleet.events[2:] == [NodeLost(node=NODE)]
    assert (here.lost, here.trunks.closed) == ([NODE], [NODE])
    assert here.looks > LEASE


async def test_a_node_that_is_back_within_the_lease_was_silent_and_never_lost(
    autojump_clock: object, here: Here, facts: Any, fleet: Any
) -> None:
    line = await here.dial()
    await line.enter(facts.node())
    await line.hang_up()
    await trio.sleep(5)
    line = await here.dial()
    await line.enter(facts.node(), dial=2)
    for _ in range(10):
        await trio.sleep(4)
        await line.say(NodeWord(node=facts.node(), applied=None))
    assert kinds(fleet.events)[:3] == [NodeRegistered, NodeSilent, NodeRegistered]
    assert NodeLost(node=NODE) not in fleet.events


async def test_a_link_that_never_registered_leaves_nobody_silent(
    autojump_clock: object, here: Here, facts: Any, fleet: Any
) -> None:
    line = await here.dial()
    await line.say(Hello(protocol=PROTOCOL, node=NODE, run="a", dial=1, version="1"))
    await line.hang_up()
    await trio.sleep(2 * LEASE)
    assert fleet.events == []


async def test_silence_is_never_told_behind_a_later_registration(
    autojump_clock: object, fleet: Any, nursery: trio.Nursery, facts: Any
) -> None:
    here = Here(fleet, nursery)
    old = await here.dial()
    await old.enter(facts.node(), dial=1)
    # whoever tells the fleet has not had its turn yet
    await old.hang_up()
    new = await here.dial()
    await new.enter(facts.node(), dial=2)
    here.start()
    await trio.sleep(1)
    assert kinds(fleet.events) == [NodeRegistered, NodeRegistered]


async def test_a_registration_that_the_fleet_had_no_time_for_is_followed_by_its_loss(
    autojump_clock: object, here: Here, facts: Any, fleet: Any
) -> None:
    """The fleet may have taken it in the moment in which whoever brought it was stopped."""
    fleet.room = trio.Event()
    line = await here.dial()
    await line.enter(facts.node())
    here.scopes[0].cancel()
    await trio.sleep(1)
    fleet.room.set()
    await trio.sleep(2 * LEASE)
    assert fleet.events == [NodeSilent(node=NODE), NodeLost(node=NODE)]


async def test_what_a_link_says_after_it_was_cut_is_not_reported(
    autojump_clock: object, here: Here, facts: Any, fleet: Any
) -> None:
    async def take(event: Event) -> None:
        """As the scheduler's inbox: at once, while there is room."""
        fleet.events.append(event)

    fleet.report = take
    line = await here.dial()
    await line.enter(facts.node())
    line._put.send_nowait(encode(NodeWord(node=facts.node(free_gb=1.0), applied=None)))
    # (it has come, and its link has not had its turn)
    here.presence.cut_revoked(lambda node, serial: "revoked")
    await trio.testing.wait_all_tasks_blocked()
    assert kinds(fleet.events) == [NodeRegistered, NodeSilent]


async def test_a_fault_of_the_fleet_leaves_the_others_watched(
    autojump_clock: object, here: Here, facts: Any, fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    report = fleet.report

    async def fail_at_losses(event: Event) -> None:
        if isinstance(event, NodeSilent):
            raise ZeroDivisionError("of the fleet")
        await report(event)

    fleet.report = fail_at_losses
    lines = [await here.dial(node) for node in (NodeId("gpu-01"), NodeId("gpu-02"))]
    for line, node in zip(lines, ("gpu-01", "gpu-02"), strict=True):
        await line.enter(facts.node(node))
        await line.hang_up()
    await trio.sleep(2 * LEASE)
    assert fleet.events[2:] == [NodeLost(node=NodeId("gpu-01")), NodeLost(node=NodeId("gpu-02"))]
    assert caplog.text.count("ZeroDivisionError: of the fleet") == 2


async def test_who_is_revoked_or_comes_too_late_is_told_so(autojump_clock: object, here: Here) -> None:
    line = await here.dial(revoked="it is on the list")
    assert line.said == [Refused(code="revoked", reason="it is on the list")]
    here.presence.goaway("the server stops")
    assert here.trunks.left
    late = await here.dial()
    assert late.said == [Refused(code="stopping", reason="the server stops")]
    assert here.turned == ["node gpu-01: it is on the list", "node gpu-01: the server stops"]


async def test_the_lease_can_be_set_anew(
    autojump_clock: object, here: Here, facts: Any, fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    line = await here.dial()
    await line.enter(facts.node())
    here.presence.set_lease(40.0)
    await line.hang_up()
    await trio.sleep(30)
    assert kinds(fleet.events) == [NodeRegistered, NodeSilent]
    with caplog.at_level(logging.WARNING):
        await trio.sleep(12)
    assert kinds(fleet.events) == [NodeRegistered, NodeSilent, NodeLost]
    assert "nothing was heard of node gpu-01 for 40 s: it counts as lost until it is back" in caplog.text


def name_bad(*serials: int) -> Callable[[NodeId, int], str | None]:
    return lambda node, serial: "it is revoked" if serial in serials else None


async def test_the_fleet_is_told_of_a_revoked_node_whether_its_link_is_up_or_down(
    autojump_clock: object, here: Here, fleet: Any, facts: Any
) -> None:
    up, down, good = NodeId("up"), NodeId("down"), NodeId("good")
    for number, node in enumerate((up, down, good)):
        line = await here.dial(node, serial=number)
        await line.enter(facts.node(node))
        if node == down:
            await line.hang_up()
    assert fleet.refused == []
    here.presence.cut_revoked(name_bad(0, 1))
    assert fleet.refused == [up, down]
    await trio.testing.wait_all_tasks_blocked()
    # (once more when the link is over: what was on its way then can change nothing any more)
    assert fleet.refused == [up, down, up]


async def test_a_word_that_was_on_its_way_when_its_node_was_revoked_is_not_the_last_of_it(
    autojump_clock: object, here: Here, fleet: Any, facts: Any
) -> None:
    line = await here.dial()
    await line.enter(facts.node())
    order: list[str] = []
    taken = trio.Event()

    async def report(event: Event) -> None:
        with trio.CancelScope(shield=True):
            await taken.wait()
            order.append("reported")

    fleet.report, fleet.refuse = report, lambda node: order.append("refused")
    await line.say(NodeWord(node=facts.node(), applied=None))
    here.presence.cut_revoked(name_bad(7))
    taken.set()
    await trio.testing.wait_all_tasks_blocked()
    assert order[0] == order[-1] == "refused"
    assert "reported" in order


async def test_an_old_certificate_says_nothing_of_a_node_that_is_here_by_a_new_one(
    autojump_clock: object, here: Here, fleet: Any, facts: Any
) -> None:
    explain = name_bad(7)
    here.presence.note_revoked(NODE, explain)
    assert fleet.refused == [NODE], "of one that was never here nothing else is known"
    line = await here.dial(serial=8)
    await line.enter(facts.node())
    here.presence.note_revoked(NODE, explain)
    here.presence.cut_revoked(explain)
    await line.hang_up()
    here.presence.note_revoked(NODE, explain)
    assert fleet.refused == [NODE]
    here.presence.note_revoked(NODE, name_bad(7, 8))
    assert fleet.refused == [NODE, NODE]
