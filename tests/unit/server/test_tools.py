"""Which replica a check asks, what comes of it, and when it is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.admin.management import Refused
from llmgw.admin.views import encode
from llmgw.core.events import CatalogChanged, ModelsHeld, NodeLost, NodeRegistered, ShardChanged, Wakeup
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, Profile, Task
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import Replica, ReplicaId, ShardState
from llmgw.dialects.toolcheck import CHECK_SECONDS, Verdict
from llmgw.door.http1 import ResponseHead
from llmgw.door.upstream import Pool
from llmgw.engines import READY, Command, EngineInfo, Health, Launch, ParserFlag, SourceKind, hookimpl
from llmgw.engines.registry import open_engine
from llmgw.reactor.loop import Reactor
from llmgw.server.tools import MAX_CHECKS, ToolChecks

HERMES = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


class Toy:
    """An engine whose parser is told by ``tool_parser``."""

    @hookimpl
    def engine_describe(self) -> EngineInfo:
        return EngineInfo(title="Toy", default_binary="e", sources=frozenset({SourceKind.FILE}), tool_parser=True)

    @hookimpl
    def engine_build_command(self, launch: Launch) -> Command:
        return Command(argv=launch.program)

    @hookimpl
    def engine_read_health(self, status: int | None, body: str) -> Health:
        return READY

    @hookimpl
    def engine_name_parser(self, model: Model, profile: Profile) -> ParserFlag:
        return ParserFlag(flag="--parser", given=profile.tool_parser, suggested="hermes")


@dataclass(frozen=True)
class Link:
    node: NodeId
    connected: bool = True
    peer: str = ""
    heard_seconds_ago: float = 0.0
    protocol: int = 1
    version: str = ""
    trunks: int = 1


class Engine:
    """Answers every chat with the same text over HTTP, or not at all."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.text = HERMES
        self.hangs = False
        self.left = 0
        self._changed = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        buffer = b""
        async with stream:
            while data := await stream.receive_some(65536):
                buffer += data
                head, mark, body = buffer.partition(b"\r\n\r\n")
                if not mark or len(body) < int(head.rpartition(b"content-length: ")[2]):
                    continue
                buffer = b""
                await self._answer(stream, json.loads(body))
        self.left += 1
        self._tell_change()

    async def wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _answer(self, stream: trio.SocketStream, body: dict[str, Any]) -> None:
        self.heard.append(body)
        self._tell_change()
        if self.hangs:
            return
        message = {"content": self.text if "tool_choice" in body else "The"}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "delta": message}
        tokens = 50 if "tools" in body else 9
        text = json.dumps({"choices": [choice], "usage": {"prompt_tokens": tokens}})
        answer = (f"data: {text}\n\n" if body.get("stream") else text).encode()
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))


class Setting:
    """A fleet that the test moves by hand, and the engine that every replica of it is."""

    def __init__(self, pool: Pool, port: int, engine: Engine) -> None:
        self.fleet = Fleet()
        self.engine = engine
        self.links = [Link(NodeId("n1"))]
        self.located: list[Replica] = []
        self.pool: Pool | None = pool
        self.port = port
        self.checks = ToolChecks(
            self.fleet,
            engines={"e": open_engine("e", Toy())},
            pool=lambda: self.pool,
            locate=self._locate,
            links=lambda: self.links,
            counted=self._count,
        )
        self.counted: list[ReplicaId] = []

    def _locate(self, replica: Replica) -> tuple[str, int]:
        self.located.append(replica)
        return ("127.0.0.1", self.port)

    @contextmanager
    def _count(self, replica: Replica) -> Iterator[None]:
        self.counted.append(replica.id)
        try:
            yield
        finally:
            self.counted.remove(replica.id)

    def handle(self, *events: Any) -> None:
        for event in events:
            self.fleet.handle(event, 0.0)

    def place(self, node: Node, *models: Model) -> list[Replica]:
        self.handle(CatalogChanged(models=models), NodeRegistered(node=node), *[Wakeup()] * 4)
        return self.replicas()

    def replicas(self) -> list[Replica]:
        return [replica for node in self.fleet.statistics().nodes for replica in node.replicas]


@pytest.fixture
async def setting(nursery: trio.Nursery) -> AsyncIterator[Setting]:
    reactor, engine = Reactor(), Engine()
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, engine.serve, [listener])
    await nursery.start(reactor.serve)
    pool = Pool(reactor, connect_seconds=60)
    yield Setting(pool, listener.socket.getsockname()[1], engine)
    pool.close()
    await trio.sleep(0.01)


Place = Callable[..., list[Replica]]


@pytest.fixture
def place(setting: Setting, node: Node, a_report: Any) -> Place:
    """Have these models run on the node; each replica is ready."""

    def placed(*models: Model) -> list[Replica]:
        for replica in setting.place(node, *models):
            setting.handle(ShardChanged(node=node.id, report=a_report(replica.shard, ShardState.READY)))
        return setting.replicas()

    return placed


async def refused(setting: Setting, model: Model, replica: str | None = None) -> tuple[int, str, str]:
    with pytest.raises(Refused) as caught:
        await setting.checks.check(model, replica)
    assert setting.engine.heard == []
    return caught.value.status, caught.value.code, caught.value.message


async def test_a_check_asks_under_the_served_name_and_names_the_parser(
    setting: Setting, place: Place, a_model: Any
) -> None:
    model = a_model()
    (replica,) = place(model)
    with trio.fail_after(60):
        checked = await setting.checks.check(model, None)
    assert (checked.model, checked.replica, checked.node, checked.engine) == ("tiny", replica.id, "n1", "e")
    assert checked.check.verdict is Verdict.PARSER_MISSED
    assert checked.check.remedy == "set tool_parser: hermes in profile p (--parser of Toy)"
    assert {body["model"] for body in setting.engine.heard} == {"tiny"}
    told = json.loads(encode(checked))
    assert told["check"]["verdict"] == "parser_missed"
    assert told["check"]["exchanges"][0] == {
        "request": "without tools",
        "outcome": "answered",
        "answer": "9 prompt tokens",
    }


async def test_an_engine_whose_plugin_is_gone_is_checked_all_the_same(
    setting: Setting, place: Place, a_model: Any
) -> None:
    place(a_model())
    setting.checks = ToolChecks(
        setting.fleet,
        engines={},
        pool=lambda: setting.pool,
        locate=setting._locate,
        links=lambda: setting.links,
        counted=setting._count,
    )
    with trio.fail_after(60):
        report = (await setting.checks.check(a_model(), None)).check
    assert report.remedy == "look how the engine is told which parser the model's calls need"


async def test_the_replica_that_is_named_is_the_one_that_is_asked(setting: Setting, place: Place, a_model: Any) -> None:
    model = a_model(most=2, least=2)
    first, second = place(model)
    with trio.fail_after(60):
        assert (await setting.checks.check(model, second.id)).replica == second.id
        assert (await setting.checks.check(model, None)).replica == first.id
    assert [replica.id for replica in setting.located] == [second.id, first.id]


async def test_what_is_not_ready_is_refused_with_its_reason(
    setting: Setting, node: Node, a_model: Any, a_report: Any
) -> None:
    model = a_model()
    assert await refused(setting, model) == (503, "no_replica", "tiny has no replica yet: ask again")
    (replica,) = setting.place(node, model)
    loading = a_report(replica.shard, ShardState.LOADING, progress="loading the weights")
    setting.handle(ShardChanged(node=node.id, report=loading))
    told = "tiny has no ready replica: it is loading: loading the weights"
    assert await refused(setting, model) == (503, "no_replica", told)
    told = "rep-tiny-1 is not ready: it is loading (loading the weights)"
    assert await refused(setting, model, replica.id) == (503, "no_replica", told)
    ended = a_report(replica.shard, ShardState.ENDED, cause="out of memory")
    setting.handle(ShardChanged(node=node.id, report=ended))
    told = "tiny has no ready replica: it is failed: rep-tiny-1 ended on n1: out of memory"
    assert await refused(setting, model) == (503, "no_replica", told)
    told = "rep-tiny-1 is not ready: it is ended; out of memory"
    assert await refused(setting, model, replica.id) == (503, "no_replica", told)


async def test_a_replica_that_drains_is_not_asked(setting: Setting, place: Place, a_model: Any) -> None:
    (replica,) = place(a_model())
    setting.handle(ModelsHeld(models=frozenset({a_model().name})))
    status, code, message = await refused(setting, a_model(), replica.id)
    assert (status, code) == (503, "no_replica")
    assert message.startswith("rep-tiny-1 takes nothing new: it is to stop when its requests have ended (")
    assert (await refused(setting, a_model()))[:2] == (503, "no_replica")


async def test_a_model_that_is_not_to_run_says_so(setting: Setting, node: Node, a_model: Any) -> None:
    model = a_model(most=0, least=0)
    setting.place(node, model)
    assert await refused(setting, model) == (503, "no_replica", "tiny has no ready replica: it is stopped")


async def test_a_node_that_is_away_is_named(setting: Setting, place: Place, a_model: Any) -> None:
    model = a_model()
    (replica,) = place(model)
    setting.links = []
    told = "no replica of tiny can be reached: there is no connection to n1"
    assert await refused(setting, model) == (503, "no_replica", told)
    told = "rep-tiny-1 can't be reached: there is no connection to n1"
    assert await refused(setting, model, replica.id) == (503, "no_replica", told)
    setting.links = [Link(NodeId("n1"))]
    setting.handle(NodeLost(node=NodeId("n1")))
    assert (await refused(setting, model))[1] == "no_replica"


async def test_a_replica_that_is_none_of_the_model_is_told(setting: Setting, place: Place, a_model: Any) -> None:
    model, other = a_model(), replace(a_model("other"), aliases=())
    place(model, other)
    told = "tiny has no replica rep-x; there is rep-tiny-1"
    assert await refused(setting, model, "rep-x") == (404, "unknown_replica", told)
    told = "rep-other-1 is no replica of tiny, but of other"
    assert await refused(setting, model, "rep-other-1") == (404, "unknown_replica", told)


async def test_a_model_without_a_chat_has_no_tools(setting: Setting, a_model: Any) -> None:
    told = "tiny is for embed, which knows no tools"
    assert await refused(setting, replace(a_model(), task=Task.EMBED)) == (409, "not_for_chat", told)


async def test_before_the_server_is_open_nobody_is_asked(setting: Setting, place: Place, a_model: Any) -> None:
    place(a_model())
    setting.pool = None
    assert await refused(setting, a_model()) == (503, "no_replica", "the server is not open yet: ask again")


async def test_there_are_a_few_checks_at_most_and_one_that_is_given_up_makes_room(
    setting: Setting, place: Place, a_model: Any
) -> None:
    model = a_model()
    place(model)
    setting.engine.hangs = True
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(MAX_CHECKS):
                nursery.start_soon(setting.checks.check, model, None)
            await setting.engine.wait(lambda: len(setting.engine.heard) == MAX_CHECKS)
            with pytest.raises(Refused) as caught:
                await setting.checks.check(model, None)
            assert (caught.value.status, caught.value.code) == (429, "too_many_checks")
            # none is stopped meanwhile
            assert setting.counted == ["rep-tiny-1"] * MAX_CHECKS
            nursery.cancel_scope.cancel()
        assert setting.counted == []
        # the engine feels it
        await setting.engine.wait(lambda: setting.engine.left == MAX_CHECKS)
        setting.engine.hangs = False
        assert (await setting.checks.check(model, None)).check.verdict is Verdict.PARSER_MISSED


async def test_an_engine_that_goes_silent_ends_the_check_in_time(
    a_model: Any, node: Node, a_report: Any, autojump_clock: MockClock
) -> None:
    """It answers without tools, and says nothing more."""
    reactor = Silent()
    setting = Setting(Pool(reactor, connect_seconds=60), 0, Engine())
    for replica in setting.place(node, a_model()):
        setting.handle(ShardChanged(node=node.id, report=a_report(replica.shard, ShardState.READY)))
    checked = await setting.checks.check(a_model(), None)
    assert trio.current_time() == pytest.approx(CHECK_SECONDS)
    assert checked.check.verdict is Verdict.UNASKED
    assert [each.answer for each in checked.check.exchanges] == [
        "9 prompt tokens",
        "the answer did not begin within 120 s",
        "the answer did not begin within 120 s",
        "the answer did not begin within 60 s",
        "not asked: the check has taken its 300 s",
        "not asked: the check has taken its 300 s",
    ]
    reactor.close()


class Silent(Reactor):
    """Has the first request answered, and lets nothing else begin."""

    answered = False

    def call_soon(self, owner: Any, call: Callable[..., None], *args: Any) -> None:
        if not self.answered:
            self.answered = True
            body = b'{"choices": [{"message": {"content": "The"}}], "usage": {"prompt_tokens": 9}}'
            owner.answered(ResponseHead(200, body=body))
