"""The door's questions, answered by the core."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from llmgw.config.node import Limits, Timeouts
from llmgw.core.effects import WakeAt
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Drained,
    ModelsHeld,
    NodeLost,
    NodeRegistered,
    ShardChanged,
    Wakeup,
)
from llmgw.core.fleet import Fleet
from llmgw.core.identity import ANYONE
from llmgw.core.model import Lora, ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import Load, ReplicaId, ShardAddress, ShardState
from llmgw.counters import Counters
from llmgw.dialects.openai import Usage
from llmgw.door.exchange import Route, Wording
from llmgw.door.http1 import RequestHead
from llmgw.door.listener import Door, Listener, bind
from llmgw.door.origin import Origins
from llmgw.door.request import Outcome, Request
from llmgw.engines.types import RequestRules
from llmgw.reactor.loop import Reactor
from llmgw.server.gateway import UNREACHABLE_SECONDS, FleetGateway, locate_by_trunk, locate_here
from llmgw.server.requestlog import RequestLog
from llmgw.server.scheduler import Scheduler

M = ModelName("tiny")


class Setting:
    """A gateway over a real fleet that the test moves by hand."""

    def __init__(
        self,
        *,
        wait_seconds: float = 20.0,
        rules: RequestRules | None = None,
        locate: Any = locate_here,
        reaches: Any = None,
    ) -> None:
        self.fleet = Fleet()
        self.scheduler = Scheduler(self.fleet, clock=lambda: self.now)
        self.counters = Counters()
        self.written: list[str] = []
        self.log = RequestLog(self.written.append)
        self.now = 0.0
        self.asked: list[tuple[Any, Any]] = []

        def build_request(model: Any, profile: Any) -> RequestRules:
            self.asked.append((model, profile))
            return rules or RequestRules()

        self.engine = SimpleNamespace(build_request=build_request)
        self.gateway = self.make_gateway(wait_seconds=wait_seconds, locate=locate, reaches=reaches)

    def make_gateway(self, **facts: Any) -> FleetGateway:
        facts = {"wait_seconds": 20.0, "locate": locate_here, "clock": lambda: self.now, **facts}
        return FleetGateway(
            self.scheduler,
            engines={"e": self.engine},  # type: ignore[dict-item]
            counters=self.counters,
            log=self.log,
            created=17,
            pages=lambda: "/pages",
            **facts,
        )

    def handle(self, *events: Any) -> Setting:
        for event in events:
            effects = self.fleet.handle(event, self.now)
            self.scheduler._carry_out([effect for effect in effects if not isinstance(effect, WakeAt)])
        return self

    def place(self, model: Any, node: Any) -> Setting:
        return self.handle(CatalogChanged(models=(model,)), NodeRegistered(node=node), Wakeup(), Wakeup())

    def report(self, node: Any, report: Any) -> Setting:
        return self.handle(ShardChanged(node=node.id, report=report))

    def shards(self, model: Any) -> list[Any]:
        return [
            replica.shard
            for each in self.fleet.statistics().models
            if each.model.name == model.name
            for replica in each.replicas
        ]


@pytest.fixture
def setting() -> Setting:
    return Setting()


@pytest.fixture
def ready(setting: Setting, a_model: Any, node: Any, a_report: Any) -> Setting:
    """Its one model is served."""
    model = a_model()
    setting.place(model, node)
    (spec,) = setting.shards(model)
    return setting.report(node, a_report(spec, ShardState.READY))


def a_request(**facts: Any) -> Request:
    head = RequestHead("POST", b"/v1/chat/completions", 1, {}, keep_alive=True, content_length=0, chunked=False)
    request = Request("req-1", head, "1.2.3.4", 0.0)
    for name, value in facts.items():
        setattr(request, name, value)
    return request


def test_anybody_may_ask_until_there_are_keys(setting: Setting) -> None:
    assert setting.gateway.identify({}) is ANYONE


def test_models_are_found_by_name_and_alias(ready: Setting) -> None:
    for name in ("tiny", "gpt"):
        model = ready.gateway.resolve(name)
        assert model is not None
        assert model.name == "tiny"
    assert ready.gateway.resolve("none") is None
    assert [model.name for model in ready.gateway.models()] == ["tiny"]
    assert (ready.gateway.created(), ready.gateway.pages()) == (17, "/pages")


def test_a_model_that_is_not_to_run_is_not_listed(setting: Setting, a_model: Any) -> None:
    setting.handle(CatalogChanged(models=(a_model(most=0, least=0),)))
    assert setting.gateway.models() == []
    assert setting.gateway.resolve("tiny") is not None


def test_an_engine_behind_a_trunk_is_named_and_never_dialled(a_model: Any, node: Any, a_report: Any) -> None:
    setting = Setting(locate=locate_by_trunk)
    model = a_model()
    setting.place(model, node)
    (spec,) = setting.shards(model)
    setting.report(node, a_report(spec, ShardState.READY))
    route = setting.gateway.choose(model, frozenset())
    assert route is not None
    assert route.address == ShardAddress(node=node.id, shard=spec.id, epoch=spec.epoch)


def test_a_ready_replica_is_chosen_with_what_its_engine_understands(a_model: Any, node: Any, a_report: Any) -> None:
    setting = Setting(rules=RequestRules(usage_in_streams=False))
    model = a_model()
    setting.place(model, node)
    assert setting.gateway.choose(model, frozenset()) is None
    (spec,) = setting.shards(model)
    setting.report(node, a_report(spec, ShardState.READY))
    route = setting.gateway.choose(model, frozenset())
    assert route is not None
    assert (route.replica, route.address, route.served_name) == (spec.replica, ("127.0.0.1", 18000), "tiny")
    assert not route.usage_in_streams
    assert setting.gateway.choose(model, frozenset({route.replica})) is None


# -- one whose connections fail


@pytest.fixture
def pair(setting: Setting, a_model: Any, node: Any, a_report: Any) -> Setting:
    """Its one model is served twice."""
    model = a_model(least=2, most=2)
    setting.place(model, node)
    for number, spec in enumerate(setting.shards(model)):
        report = a_report(spec, ShardState.READY)
        setting.report(node, replace(report, endpoint=replace(report.endpoint, port=18000 + number)))
    return setting


def take(setting: Setting, without: Any = frozenset()) -> Route:
    """Chosen, and given back."""
    model = setting.gateway.resolve("tiny")
    assert model is not None
    route = setting.gateway.choose(model, without)
    assert route is not None
    setting.gateway.release(route, answered=True)
    return route


def test_a_replica_whose_connection_failed_is_passed_over_for_a_while(
    pair: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    first = take(pair)
    pair.gateway.eject(first, "connection refused\x1b[2J")
    assert "rep-tiny-1 is asked only if no other can be, for 2 s: connection refused\\x1b[2J" in caplog.text
    assert {take(pair).replica for _ in range(3)} == {"rep-tiny-2"}
    pair.now += 2.0
    assert take(pair) is first
    # and for longer when it fails again
    pair.gateway.eject(first, "connection refused")
    pair.now += 3.9
    assert take(pair).replica == "rep-tiny-2"


def test_nobody_is_refused_while_one_that_rests_might_answer(pair: Setting) -> None:
    first = take(pair)
    second = take(pair, {first.replica})
    pair.gateway.eject(first, "x")
    # tried already, so the one that rests is next
    assert take(pair, {second.replica}) is first
    pair.gateway.eject(second, "x")
    assert take(pair) is first
    model = pair.gateway.resolve("tiny")
    assert model is not None
    assert pair.gateway.choose(model, {first.replica, second.replica}) is None


def test_an_only_replica_is_asked_however_it_failed(ready: Setting) -> None:
    route = take(ready)
    ready.gateway.eject(route, "x")
    assert take(ready) is route


def test_an_answer_ends_the_rest(pair: Setting) -> None:
    first = take(pair)
    pair.gateway.eject(first, "x")
    pair.gateway.settle(a_request(model="tiny", replica=first.replica, status=502, outcome=Outcome.ENGINE_FAILED))
    assert take(pair) is not first
    pair.gateway.settle(a_request(model="tiny", replica=first.replica, status=200, outcome=Outcome.DONE))
    assert take(pair) is first


async def test_the_next_try_of_a_replica_does_not_rest_for_the_one_before(
    pair: Setting, node: Any, a_report: Any
) -> None:
    first = take(pair)
    pair.gateway.eject(first, "x")
    model = pair.gateway.resolve("tiny")
    spec = pair.shards(model)[0]
    pair.report(node, a_report(spec, ShardState.ENDED, cause="it fell over"))
    pair.now += 600.0
    pair.gateway.eject(first, "again, while nothing of it runs")
    pair.handle(Wakeup())
    again = next(found for found in pair.shards(model) if found.id == spec.id and found.epoch > spec.epoch)
    pair.report(node, a_report(again, ShardState.READY))
    anew = take(pair)
    assert (anew.replica, anew is first) == (first.replica, False)
    # late news of the try before
    pair.gateway.eject(first, "x")
    assert take(pair) is anew


class Mills:
    """Two engines on ports of this machine, either of which may be closed and opened again."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._open: dict[int, trio.CancelScope] = {}
        self.ports: list[int] = []
        self.asked: list[int] = []

    async def open(self, number: int) -> None:
        port = self.ports[number] if number < len(self.ports) else 0
        sock = trio.socket.socket()
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
        await sock.bind(("127.0.0.1", port))
        sock.listen(10)
        if not port:
            self.ports.append(sock.getsockname()[1])
        self._open[number] = trio.CancelScope()
        self._nursery.start_soon(self._serve, number, trio.SocketListener(sock))

    def close(self, number: int) -> None:
        self._open[number].cancel()

    async def _serve(self, number: int, listener: trio.SocketListener) -> None:
        with self._open[number]:
            async with listener:
                while True:
                    async with await listener.accept() as stream:
                        await stream.receive_some()
                        self.asked.append(number)
                        body = b'{"choices": []}'
                        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
                        await stream.send_all(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))


async def ask(address: tuple[str, int]) -> int:
    """The status of one request."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    async with await trio.open_tcp_stream(*address) as stream:
        await stream.send_all(head % len(body) + body)
        answer = b"".join([part async for part in stream])
    return int(answer.split(b" ", 2)[1])


async def test_requests_go_to_another_replica_at_once_when_an_engine_does_not_answer_and_back_when_it_does(
    setting: Setting, a_model: Any, node: Any, a_report: Any, nursery: trio.Nursery
) -> None:
    """A node that is off is sent requests until its lease is over, and each of them takes its time to fail."""
    mills, reactor = Mills(nursery), Reactor()
    model = a_model(least=2, most=2)
    setting.place(model, node)
    for number, spec in enumerate(setting.shards(model)):
        await mills.open(number)
        report = a_report(spec, ShardState.READY)
        setting.report(node, replace(report, endpoint=replace(report.endpoint, port=mills.ports[number])))
    listening = bind("127.0.0.1", 0)
    await nursery.start(reactor.serve)
    door = Door(
        reactor,
        setting.gateway,
        spawn=nursery.start_soon,
        origins=Origins("127.0.0.1", ()),
        limits=Limits(),
        timeouts=Timeouts(),
    )
    listener = Listener(reactor, listening, door)
    address = listening.getsockname()[:2]
    with trio.fail_after(60):
        assert await ask(address) == 200
        mills.close(0)
        # the first finds out, and is answered all the same; the second does not try
        assert [await ask(address) for _ in range(3)] == [200, 200, 200]
        assert mills.asked == [0, 1, 1, 1]
        await mills.open(0)
        assert await ask(address) == 200
        assert mills.asked[-1] == 1
        setting.now += 2.0
        assert await ask(address) == 200
        assert mills.asked[-1] == 0
    listener.close()
    door.close()


WITH_ADAPTERS = RequestRules(
    loras={
        "sql": {"model": "sql"},
        "poem": {"model": "tiny:poem", "lora_path": None},
        "law": {"lora": [{"id": 0, "scale": 1.0}]},
        "odd": {"model": 7},
        "bad": {"lora": object()},
        "none": None,  # type: ignore[dict-item]
    }
)


def test_what_a_body_needs_for_the_model_itself_is_known(
    a_model: Any, node: Any, a_report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cases: list[tuple[dict[str, object], tuple[tuple[str, bytes], ...]]] = [
        ({"lora": [], "model": "odd"}, (("lora", b"[]"),)),
        ({"lora": object()}, ()),
    ]
    for base, fields in cases:
        setting = Setting(rules=RequestRules(base=base))
        model = a_model()
        setting.place(model, node)
        (spec,) = setting.shards(model)
        setting.report(node, a_report(spec, ShardState.READY))
        route = setting.gateway.choose(model, frozenset())
        assert route is not None
        assert route.base == fields
    assert "requests are passed on as they come" in caplog.text


def test_each_adapter_is_asked_for_as_the_engine_wants_it(
    a_model: Any, node: Any, a_report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    setting = Setting(rules=WITH_ADAPTERS)
    model = a_model()
    setting.place(model, node)
    (spec,) = setting.shards(model)
    setting.report(node, a_report(spec, ShardState.READY))
    route = setting.gateway.choose(model, frozenset())
    assert route is not None
    # under its own name where that is the engine's too; and whichever name is answered is known
    assert route.loras == {
        "sql": Wording((), ("tiny",)),
        "poem": Wording((("model", b'"tiny:poem"'), ("lora_path", b"null")), ("tiny", "tiny:poem")),
        "law": Wording((("model", b'"tiny"'), ("lora", b'[{"id":0,"scale":1.0}]')), ("tiny",)),
    }
    for name in ("odd", "bad", "none"):
        assert f"the adapter {name} can't be asked for" in caplog.text


def test_what_an_engine_understands_is_asked_once_and_of_the_model_that_it_was_started_with(
    a_model: Any, node: Any, a_report: Any
) -> None:
    setting = Setting()
    model = a_model()
    setting.place(model, node)
    (spec,) = setting.shards(model)
    setting.report(node, a_report(spec, ShardState.READY))
    later = replace(model, loras=(Lora(name=ModelName("sql"), source="/sql"),))
    for asked in (later, model, later):
        assert setting.gateway.choose(asked, frozenset()) is not None
    assert setting.asked == [(model, model.profiles[0])]


def test_an_adapter_is_found_by_its_name_and_listed_with_its_model(setting: Setting, a_model: Any) -> None:
    model = replace(a_model(), loras=(Lora(name=ModelName("sql"), source="/sql"),))
    setting.handle(CatalogChanged(models=(model,)))
    assert setting.gateway.resolve("sql") is model
    assert setting.gateway.models() == [model]


def test_an_engine_that_has_gone_from_the_floor_is_treated_as_any(ready: Setting, a_model: Any) -> None:
    ready.gateway._engines = {}
    route = ready.gateway.choose(a_model(), frozenset())
    assert route is not None
    assert route.usage_in_streams


def test_what_is_in_flight_is_counted_up_and_down(ready: Setting, a_model: Any) -> None:
    routes = [ready.gateway.choose(a_model(), frozenset()) for _ in range(3)]
    assert len({id(route) for route in routes}) == 1
    assert ready.gateway._traffic.in_flight == {"rep-tiny-1": 3}
    for route in routes:
        assert route is not None
        ready.gateway.release(route, answered=True)
    assert ready.gateway._traffic.in_flight == {}


def test_nothing_is_kept_of_requests_that_are_over(pair: Setting) -> None:
    model = pair.gateway.resolve("tiny")
    assert model is not None
    for _ in range(10_000):
        first, second = (pair.gateway.choose(model, frozenset()) for _ in range(2))
        assert first is not None
        assert second is not None
        assert first.replica != second.replica
        pair.gateway.release(second, answered=True)
        pair.gateway.release(first, answered=True)
    assert pair.gateway._traffic.in_flight == {}
    assert len(pair.gateway._routes) == 2
    assert told(pair) == []


def test_a_report_that_tells_an_endpoint_anew_changes_nothing(ready: Setting, node: Any, a_report: Any) -> None:
    route = take(ready)
    model = ready.gateway.resolve("tiny")
    report = a_report(ready.shards(model)[0], ShardState.READY)
    assert report.endpoint is not None
    ready.report(node, replace(report, load=Load(running=3)))
    assert take(ready) is route
    assert len(ready.asked) == 1


def test_a_replica_rests_however_often_its_node_reports(pair: Setting, node: Any, a_report: Any) -> None:
    first = take(pair)
    pair.gateway.eject(first, "x")
    model = pair.gateway.resolve("tiny")
    report = a_report(pair.shards(model)[0], ShardState.READY)
    pair.report(node, replace(report, load=Load(running=3)))
    assert take(pair).replica != first.replica


# -- how much a model is asked for


def told(setting: Setting) -> list[Any]:
    """What the scheduler was handed since the last look."""
    found: list[Any] = []
    while True:
        try:
            found.append(setting.scheduler._outbox.receive_nowait())
        except trio.WouldBlock:
            return found


async def test_the_fleet_hears_about_once_a_second_how_busy_a_model_is(
    ready: Setting, a_model: Any, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    nursery.start_soon(ready.gateway.serve_demand)
    route = ready.gateway.choose(a_model(), frozenset())
    assert route is not None
    assert told(ready) == []
    await trio.sleep(1.5)
    assert told(ready) == [Demand(model=M, in_flight={ReplicaId("rep-tiny-1"): 1}, answered=True)]
    await trio.sleep(10)
    assert told(ready) == []
    ready.gateway.release(route, answered=True)
    await trio.sleep(1)
    assert told(ready) == [Demand(model=M, answered_by=frozenset({(ReplicaId("rep-tiny-1"), 1)}))]
    # one that came and went between two looks was answered all the same
    take(ready)
    await trio.sleep(1)
    assert told(ready) == [Demand(model=M, answered=True)]
    await trio.sleep(10)
    assert told(ready) == []
    nursery.cancel_scope.cancel()


async def test_that_somebody_waits_is_told_at_once_and_that_nobody_does(
    setting: Setting, a_model: Any, node: Any, a_report: Any, autojump_clock: trio.testing.MockClock
) -> None:
    model = a_model(least=0)
    setting.handle(CatalogChanged(models=(model,)))
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(setting.gateway.wait_ready, model)
        await trio.testing.wait_all_tasks_blocked()
        # how many there are is told with the rest
        assert told(setting) == [Demand(model=M, waiting=1)]
        setting.gateway._traffic.tell_changes()
        assert told(setting) == [Demand(model=M, waiting=3)]
        setting.place(model, node).handle(Demand(model=M, waiting=3))
        setting.report(node, a_report(setting.shards(model)[0], ShardState.READY))
    # they are about to be answered
    assert told(setting) == [Demand(model=M)]


async def test_who_hangs_up_leaves_no_demand(setting: Setting, a_model: Any) -> None:
    model = a_model(least=0)
    setting.handle(CatalogChanged(models=(model,)))
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(setting.gateway.wait_ready, model)
        await trio.testing.wait_all_tasks_blocked()
        assert told(setting) == [Demand(model=M, waiting=1)]
        nursery.cancel_scope.cancel()
    assert told(setting) == [Demand(model=M)]


async def test_who_is_told_to_come_again_has_asked(
    a_model: Any, node: Any, autojump_clock: trio.testing.MockClock
) -> None:
    setting = Setting(wait_seconds=3.0)
    model = a_model()
    setting.place(model, node)
    assert not await setting.gateway.wait_ready(model)
    assert told(setting) == [Demand(model=M, waiting=1), Demand(model=M, asked=True)]


@pytest.mark.parametrize("why", ["held", "removed", "max 0"])
async def test_a_model_that_is_stopped_is_waited_for_no_longer(
    why: str, setting: Setting, a_model: Any, node: Any, autojump_clock: trio.testing.MockClock
) -> None:
    model = a_model()
    setting.place(model, node)
    began = trio.current_time()
    got: list[bool] = []

    async def wait() -> None:
        got.append(await setting.gateway.wait_ready(model))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        if why == "held":
            setting.handle(ModelsHeld(models=frozenset({M})))
        else:
            setting.handle(CatalogChanged(models=() if why == "removed" else (a_model(least=0, most=0),)))
        setting.scheduler.stir()
    assert (got, trio.current_time()) == ([False], began)
    # nobody was told to come again
    assert told(setting) == [Demand(model=M, waiting=1), Demand(model=M)]
    refusal = setting.gateway.absent(model)
    assert (refusal.status, refusal.retry_after) == (404 if why == "removed" else 503, None)
    assert refusal.code == "model_not_found" if why == "removed" else "model_not_running"


async def test_a_model_that_an_operator_has_stopped_is_not_listed_and_not_waited_for(
    ready: Setting, a_model: Any
) -> None:
    ready.handle(ModelsHeld(models=frozenset({M})))
    assert ready.gateway.models() == []
    # and never unknown
    assert ready.gateway.resolve("tiny") is not None
    with trio.fail_after(10):
        assert not await ready.gateway.wait_ready(a_model())
    refusal = ready.gateway.absent(a_model())
    assert (refusal.status, refusal.code, refusal.retry_after) == (503, "model_not_running", None)
    assert "stopped" in refusal.message
    ready.handle(ModelsHeld(models=frozenset()))
    assert [model.name for model in ready.gateway.models()] == ["tiny"]


# -- a replica that is to go


def drained(epoch: int, number: int, name: str = "rep-tiny-1") -> Drained:
    return Drained(replica=ReplicaId(name), epoch=epoch, number=number)


def test_a_replica_that_nobody_is_answered_by_is_drained_at_once(ready: Setting) -> None:
    ready.gateway.drain(ReplicaId("rep-tiny-1"), 1, 5)
    ready.gateway.drain(ReplicaId("rep-nobody-knows-1"), 3, 6)
    assert told(ready) == [drained(1, 5), drained(3, 6, "rep-nobody-knows-1")]
    take(ready)
    assert told(ready) == []


def test_a_replica_is_drained_when_its_last_request_is_over(ready: Setting, a_model: Any) -> None:
    first, second = (ready.gateway.choose(a_model(), frozenset()) for _ in range(2))
    assert first is not None
    assert second is not None
    ready.gateway.drain(ReplicaId("rep-tiny-1"), 1, 5)
    # a newer number replaces it
    ready.gateway.drain(ReplicaId("rep-tiny-1"), 1, 6)
    ready.gateway.release(first, answered=True)
    ready.gateway.eject(second, "it broke")
    assert told(ready) == []
    ready.gateway.release(second, answered=True)
    assert told(ready) == [drained(1, 6)]
    # said once, whatever comes after
    take(ready)
    assert told(ready) == []


async def test_what_is_in_flight_to_an_earlier_epoch_is_counted_apart(
    ready: Setting, node: Any, a_model: Any, a_report: Any
) -> None:
    old = ready.gateway.choose(a_model(), frozenset())
    assert old is not None
    again = anew(ready, node, a_report)
    new = ready.gateway.choose(a_model(), frozenset())
    assert new is not None
    assert ready.gateway._traffic.in_flight == {"rep-tiny-1": 1}
    ready.gateway.drain(ReplicaId("rep-tiny-1"), 1, 7)
    ready.gateway.drain(ReplicaId("rep-tiny-1"), again.epoch, 8)
    ready.gateway.release(new, answered=True)
    assert told(ready) == [drained(again.epoch, 8)]
    ready.gateway.release(old, answered=True)
    assert told(ready) == [drained(1, 7)]
    assert ready.gateway._traffic.in_flight == {}


def anew(setting: Setting, node: Any, a_report: Any) -> Any:
    """The one shard of ``tiny`` ends, and runs again as its next epoch."""
    (spec,) = setting.shards(setting.gateway.resolve("tiny"))
    setting.report(node, a_report(spec, ShardState.ENDED, cause="it fell over"))
    setting.now += 600.0
    setting.handle(Wakeup())
    (again,) = setting.shards(setting.gateway.resolve("tiny"))
    assert again.epoch > spec.epoch
    setting.report(node, a_report(again, ShardState.READY))
    return again


def test_what_is_asked_past_the_door_counts_as_well(ready: Setting) -> None:
    (replica,) = ready.fleet.ready(M)
    with ready.gateway.counted(replica):
        ready.gateway.drain(replica.id, replica.epoch, 5)
        assert told(ready) == []
    assert told(ready) == [drained(1, 5)]


async def test_nothing_is_kept_of_a_model_that_is_gone_once_its_last_request_is_over(
    ready: Setting, a_model: Any, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    nursery.start_soon(ready.gateway.serve_demand)
    route = ready.gateway.choose(a_model(), frozenset())
    assert route is not None
    ready.gateway.eject(route, "x")
    ready.handle(CatalogChanged(models=()))
    await trio.sleep(2)
    assert len(ready.gateway._routes) == 1
    ready.gateway.release(route, answered=True)
    await trio.sleep(2)
    assert ready.gateway._routes == {}
    assert ready.gateway._traffic.models() == []
    assert len(ready.gateway._breaker) == 0
    # late news of it
    ready.gateway.eject(route, "x")
    assert len(ready.gateway._breaker) == 0
    nursery.cancel_scope.cancel()


async def test_a_model_comes_when_it_is_asked_for_and_goes_when_it_no_longer_is(
    a_model: Any, node: Any, a_report: Any, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """Fleet, scheduler and gateway together, by one clock."""
    setting = Setting()
    setting.scheduler = Scheduler(setting.fleet)
    gateway = setting.make_gateway(clock=trio.current_time)
    setting.scheduler.attend(gateway.drain)
    await nursery.start(setting.scheduler.serve)
    nursery.start_soon(gateway.serve_demand)
    model = a_model(least=0)
    model = replace(model, scaling=replace(model.scaling, idle_timeout_seconds=60.0))
    await setting.scheduler.post(CatalogChanged(models=(model,)))
    await setting.scheduler.settle(NodeRegistered(node=node))
    await trio.sleep(10)
    assert setting.shards(model) == []
    got: list[bool] = []

    async def wait() -> None:
        got.append(await gateway.wait_ready(model))

    nursery.start_soon(wait)
    await trio.sleep(5)
    (spec,) = setting.shards(model)
    await setting.scheduler.settle(ShardChanged(node=node.id, report=a_report(spec, ShardState.READY)))
    await trio.sleep(1)
    assert got == [True]
    route = gateway.choose(model, frozenset())
    assert route is not None
    # one answer takes longer than idle replicas stay
    await trio.sleep(500)
    assert gateway.choose(model, frozenset()) is route
    gateway.release(route, answered=True)
    gateway.release(route, answered=True)
    await trio.sleep(50)
    assert setting.shards(model)
    # and one more keeps it
    again = gateway.choose(model, frozenset())
    assert again is not None
    gateway.release(again, answered=True)
    await trio.sleep(50)
    assert (await setting.scheduler.desired(node.id, 0)).shards
    await trio.sleep(20)
    assert gateway.choose(model, frozenset()) is None
    assert (await setting.scheduler.desired(node.id, 0)).shards == ()
    nursery.cancel_scope.cancel()


class Slow:
    """An engine that begins a stream and ends it when it is told to, or breaks every connection."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.breaks = breaks
        self.asked = trio.Event()
        self.end = trio.Event()

    async def serve(self, *, task_status: trio.TaskStatus[int]) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listener.socket.getsockname()[1])
        async with listener:
            while True:
                async with await listener.accept() as stream:
                    await stream.receive_some()
                    self.asked.set()
                    if not self.breaks:
                        await stream.send_all(STREAM_HEAD)
                        await self.end.wait()
                        await stream.send_all(b"data: [DONE]\n\n")


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


async def test_a_stream_goes_on_while_its_replica_drains_and_a_retry_lets_go_of_the_one_that_broke(
    setting: Setting, a_model: Any, node: Any, a_report: Any, nursery: trio.Nursery
) -> None:
    reactor, broken, slow = Reactor(), Slow(breaks=True), Slow()
    model = a_model(least=2, most=2)
    setting.place(model, node)
    for engine, spec in zip((broken, slow), setting.shards(model), strict=True):
        port = await nursery.start(engine.serve)
        report = a_report(spec, ShardState.READY)
        setting.report(node, replace(report, endpoint=replace(report.endpoint, port=port)))
    await nursery.start(reactor.serve)
    address = open_door(setting, reactor, nursery)
    statuses: list[int] = []
    answered = trio.Event()

    async def wait() -> None:
        statuses.append(await ask(address))
        answered.set()

    with trio.fail_after(60):
        nursery.start_soon(wait)
        await slow.asked.wait()
        assert broken.asked.is_set()
        setting.gateway.drain(ReplicaId("rep-tiny-1"), 1, 1)
        setting.gateway.drain(ReplicaId("rep-tiny-2"), 1, 2)
        # nothing is left on the one that was tried first
        assert told(setting) == [drained(1, 1)]
        slow.end.set()
        assert await setting.scheduler._outbox.receive() == drained(1, 2, "rep-tiny-2")
        await answered.wait()
    assert statuses == [200]
    nursery.cancel_scope.cancel()


async def test_a_client_that_leaves_while_it_waits_leaves_no_demand(
    setting: Setting, a_model: Any, nursery: trio.Nursery
) -> None:
    reactor = Reactor()
    setting.handle(CatalogChanged(models=(a_model(least=0),)))
    await nursery.start(reactor.serve)
    address = open_door(setting, reactor, nursery)
    with trio.fail_after(60):
        with trio.CancelScope() as hung_up:
            async with trio.open_nursery() as client:
                client.start_soon(ask, address)
                assert await setting.scheduler._outbox.receive() == Demand(model=M, waiting=1)
                hung_up.cancel()
        assert await setting.scheduler._outbox.receive() == Demand(model=M)
    nursery.cancel_scope.cancel()


def open_door(setting: Setting, reactor: Reactor, nursery: trio.Nursery) -> tuple[str, int]:
    """Where clients are let in; closed with the nursery."""
    listening = bind("127.0.0.1", 0)
    door = Door(
        reactor,
        setting.gateway,
        spawn=nursery.start_soon,
        origins=Origins("127.0.0.1", ()),
        limits=Limits(),
        timeouts=Timeouts(),
    )
    listener = Listener(reactor, listening, door)

    async def close() -> None:
        try:
            await trio.sleep_forever()
        finally:
            listener.close()
            door.close()

    nursery.start_soon(close)
    host, port = listening.getsockname()[:2]
    return host, port


# -- a model that is not ready


def test_a_model_that_is_not_to_run_is_not_waited_for(setting: Setting, a_model: Any) -> None:
    model = a_model(most=0, least=0)
    setting.handle(CatalogChanged(models=(model,)))
    refusal = setting.gateway.absent(model)
    assert (refusal.status, refusal.code, refusal.retry_after) == (503, "model_not_running", None)


async def test_nor_does_anybody_wait(setting: Setting, a_model: Any) -> None:
    setting.handle(CatalogChanged(models=(a_model(most=0, least=0),)))
    with trio.fail_after(10):
        assert not await setting.gateway.wait_ready(a_model(most=0, least=0))


def test_a_model_that_loads_says_when_to_come_back(setting: Setting, a_model: Any, node: Any) -> None:
    model = a_model()
    setting.place(model, node)
    refusal = setting.gateway.absent(model)
    assert (refusal.status, refusal.code) == (503, "model_loading")
    assert refusal.retry_after is not None
    assert refusal.retry_after >= 1


async def test_a_model_without_a_place_says_why(setting: Setting, a_model: Any, node: Any) -> None:
    model = a_model(gb=500.0)
    setting.place(model, node)
    refusal = setting.gateway.absent(model)
    assert refusal.code == "model_loading"
    # what nodes there are is none of a client's business
    assert "can't be placed now: not enough free memory; try again in " in refusal.message
    nowhere = Setting()
    nowhere.handle(CatalogChanged(models=(model,)), Wakeup())
    assert "no machine that can run it is available" in nowhere.gateway.absent(model).message


async def test_a_model_on_a_silent_node_says_so(ready: Setting, a_model: Any) -> None:
    ready.handle(NodeLost(node=NodeId("n1")))
    refusal = ready.gateway.absent(a_model())
    assert (refusal.status, refusal.code) == (503, "model_unreachable")
    assert refusal.message == f"The model tiny can't be reached now; try again in {refusal.retry_after} s."
    assert refusal.retry_after


async def test_a_node_that_requests_do_not_get_through_to_is_waited_for_a_while(
    a_model: Any, node: Any, a_report: Any, autojump_clock: trio.testing.MockClock
) -> None:
    reached: set[str] = set()
    setting = Setting(reaches=reached.__contains__)
    model = a_model()
    setting.place(model, node)
    (spec,) = setting.shards(model)
    setting.report(node, a_report(spec, ShardState.READY))
    assert setting.gateway.choose(model, frozenset()) is None
    refusal = setting.gateway.absent(model)
    assert (refusal.status, refusal.code) == (503, "model_unreachable")
    assert "n1" not in refusal.message
    began = trio.current_time()
    assert not await setting.gateway.wait_ready(model)
    assert trio.current_time() - began == UNREACHABLE_SECONDS

    async def come_back() -> None:
        await trio.sleep(1)
        reached.add(node.id)
        setting.scheduler.stir()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come_back)
        assert await setting.gateway.wait_ready(model)
    assert setting.gateway.choose(model, frozenset()) is not None


async def test_who_waits_is_told_when_it_is_ready(
    setting: Setting, a_model: Any, node: Any, a_report: Any, autojump_clock: trio.testing.MockClock
) -> None:
    model = a_model()
    setting.place(model, node)
    (spec,) = setting.shards(model)
    got: list[bool] = []

    async def wait() -> None:
        got.append(await setting.gateway.wait_ready(model))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.sleep(5)
        assert got == []
        setting.report(node, a_report(spec, ShardState.LOADING, progress="half"))
        await trio.sleep(5)
        setting.report(node, a_report(spec, ShardState.READY))
    assert got == [True, True]


async def test_who_waits_too_long_is_told_so(a_model: Any, node: Any, autojump_clock: trio.testing.MockClock) -> None:
    setting = Setting(wait_seconds=3.0)
    model = a_model()
    setting.place(model, node)
    start = trio.current_time()
    assert not await setting.gateway.wait_ready(model)
    assert trio.current_time() - start == pytest.approx(3.0)


async def test_what_will_not_be_ready_in_time_is_not_waited_for(
    a_model: Any, node: Any, a_report: Any, autojump_clock: trio.testing.MockClock
) -> None:
    setting = Setting(wait_seconds=2.0)
    model = a_model()
    setting.place(model, node)
    (spec,) = setting.shards(model)
    setting.report(node, a_report(spec, ShardState.ENDED, cause="no"))
    setting.handle(Wakeup())
    start = trio.current_time()
    assert not await setting.gateway.wait_ready(model)
    assert trio.current_time() == start


async def test_what_makes_room_for_its_own_next_definition_is_waited_for(
    a_model: Any, node: Any, a_report: Any, autojump_clock: trio.testing.MockClock
) -> None:
    setting = Setting(wait_seconds=2.0)
    model = a_model(gb=10.0)
    setting.place(model, node)
    (spec,) = setting.shards(model)
    setting.report(node, a_report(spec, ShardState.READY))
    setting.handle(CatalogChanged(models=(replace(model, source="/other.gguf"),)), Wakeup(), Wakeup())
    assert setting.gateway.choose(model, frozenset()) is None
    assert "The model tiny is loading; try again in " in setting.gateway.absent(model).message
    start = trio.current_time()
    assert not await setting.gateway.wait_ready(model)
    assert trio.current_time() - start == 2.0


# -- the last word


def test_a_request_is_counted_and_logged(ready: Setting) -> None:
    ready.gateway.settle(
        a_request(model="tiny", status=200, outcome=Outcome.DONE, usage=Usage(prompt_tokens=3, completion_tokens=4))
    )
    requests = ready.counters.by_name["llmgw_requests_total"].values
    assert requests == {("tiny", "/v1/chat/completions", "200", "done"): 1}
    assert ready.counters.by_name["llmgw_tokens_total"].values == {("tiny", "prompt"): 3, ("tiny", "completion"): 4}
    assert "model=tiny" in ready.log.take()


def test_what_a_client_made_up_is_no_label(ready: Setting) -> None:
    for number in range(10):
        request = a_request(status=404, outcome=Outcome.REFUSED)
        request.path = f"/made/up/{number}"
        ready.gateway.settle(request)
    assert ready.counters.by_name["llmgw_requests_total"].values == {("", "other", "404", "refused"): 10}


def test_a_request_without_an_outcome_crashed(ready: Setting) -> None:
    ready.gateway.settle(a_request())
    ((labels, _),) = ready.counters.by_name["llmgw_requests_total"].values.items()
    assert labels == ("", "other", "0", "crashed")
