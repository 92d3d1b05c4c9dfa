"""Everything that an operator sees and does, on a real fleet, with stores in memory."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llmgw.admin.manage import create_app
from llmgw.admin.management import Refused
from llmgw.admin.views import (
    ClassView,
    FabricView,
    HoldingView,
    ModelStatus,
    NodeState,
    Origin,
    StoreView,
    ToolsChecked,
)
from llmgw.config.definition import Definition, parse_definitions
from llmgw.core.events import FactsKnown, NodeRegistered, NodesExpected, ShardChanged, WeightsReported
from llmgw.core.fleet import Fleet
from llmgw.core.learned import Fact, make_key
from llmgw.core.model import Model, ModelName
from llmgw.core.node import FabricFound, Gpu, NodeId
from llmgw.core.replica import ReplicaId, ShardState
from llmgw.core.sizing import Format, Needs
from llmgw.core.weights import Cached, Collected, Fetch, NodeWeights, Phase, WeightsOrder
from llmgw.counters import Counters
from llmgw.dialects.toolcheck import Report, Verdict
from llmgw.engines import READY, Command, EngineInfo, Health, Launch, SourceKind, hookimpl
from llmgw.engines.registry import Engine, Found, open_engine
from llmgw.errors import ConfigError, Problem
from llmgw.server.defining import Defining, Reread
from llmgw.server.history import Histories
from llmgw.server.holding import Holding
from llmgw.server.learning import Learning
from llmgw.server.manage import MAX_WAIT_SECONDS, Manage
from llmgw.server.marking import Marking
from llmgw.server.pages import serve_pages
from llmgw.server.returning import Returning
from llmgw.server.scheduler import Scheduler
from llmgw.server.supplying import Supplying
from llmgw.server.weights import Weights

WHEN = 1_700_000_000.0


class Toy:
    """An engine that reads .gguf files."""

    @hookimpl
    def engine_describe(self) -> EngineInfo:
        return EngineInfo(
            title="E",
            default_binary="e",
            sources=frozenset({SourceKind.FILE}),
            file_suffixes=(".gguf",),
            cpu=True,
            loras=True,
            projector=True,
        )

    @hookimpl
    def engine_build_command(self, launch: Launch) -> Command:
        return Command(argv=launch.program)

    @hookimpl
    def engine_read_health(self, status: int, body: str) -> Health:
        return READY


ENGINES: dict[str, Engine] = {"e": open_engine("e", Toy())}


@dataclass(frozen=True)
class Kept:
    model: Model
    text: str
    added_at: float = WHEN


class Store:
    """Models as a store keeps them, in memory."""

    def __init__(self, *models: Model) -> None:
        self.kept = {model.name: Kept(model, "as it was written") for model in models}

    async def list(self) -> tuple[Kept, ...]:
        return tuple(self.kept.values())

    async def put(self, model: Model, text: str, now: float) -> None:
        self.kept[model.name] = Kept(model, text, now)

    async def remove(self, name: ModelName) -> bool:
        return self.kept.pop(name, None) is not None

    async def forget(self, name: ModelName) -> bool:
        return await self.remove(name)


@dataclass(frozen=True)
class KeptNode:
    node: NodeId
    last_seen: float | None
    cordoned: bool
    labels: Mapping[str, str | None]
    draining: bool = False
    drain_until: float | None = None


class NodeStore:
    """Nodes as a store keeps them, in memory."""

    def __init__(self) -> None:
        self.kept: dict[NodeId, KeptNode] = {}

    async def list_marks(self) -> tuple[KeptNode, ...]:
        return tuple(self.kept.values())

    async def mark(self, node: NodeId, **marks: Any) -> None:
        seen = self.kept[node].last_seen if node in self.kept else None
        self.kept[node] = KeptNode(node, seen, **marks)

    async def forget(self, node: NodeId) -> bool:
        return self.kept.pop(node, None) is not None


@dataclass(frozen=True)
class Link:
    node: NodeId
    connected: bool = True
    peer: str = "10.0.0.2:41000"
    heard_seconds_ago: float = 1.23
    protocol: int = 2
    version: str = "0.1.0"
    trunks: int = 2


def text_of(name: str, *, alias: str | None = None, least: int = 0, source: str = "/m.gguf", more: str = "") -> str:
    aliases = f"aliases: [{alias}]\n" if alias else ""
    return (
        f"name: {name}\n{aliases}source: {source}\nscaling: {{min: {least}, max: 1}}\n"
        f"profiles:\n- name: p\n  engine: e\n{more}"
    )


def declared(name: str, alias: str | None = None) -> tuple[Definition, ...]:
    return parse_definitions(text_of(name, alias=alias), "server.yaml", ENGINES)


class Bench:
    """A Manage with what it stands on."""

    def __init__(self, store: Store, written: tuple[Definition, ...], kept: Any) -> None:
        self.store = store
        self.in_flight: dict[ReplicaId, int] = {}
        self.nodes = NodeStore()
        self.skews: dict[NodeId, float] = {}
        self.scheduler = Scheduler(Fleet())
        self.links: tuple[Link, ...] = ()
        self.rereads = 0
        self.failing: str | None = None
        self.checks_hang = False
        self.check_began, self.check_left = trio.Event(), trio.Event()
        self.marking = Marking(
            self.scheduler, self.nodes, links=lambda: self.links, forgotten=lambda node: None, let_go=lambda node: None
        )
        histories = Histories(kept.history, wall=lambda: WHEN)
        self.defining = Defining(
            self.scheduler,
            engines=ENGINES,
            store=store,
            histories=histories,
            declared=written,
            reread=self._reread,
            wall=lambda: WHEN,
        )
        self.weights = Weights(self.scheduler, counters=Counters())
        self.holds, self.facts = kept.holds, kept.facts
        self.holding = Holding(self.scheduler, kept.holds, defining=self.defining, histories=histories)
        self.returning = Returning(self.scheduler, defining=self.defining, histories=histories, facts=kept.facts)
        self.manage = Manage(
            self.scheduler,
            plugins=Found(
                engines=ENGINES,
                origins={"e": "distribution e 2.0"},
                problems=(Problem(key="engine f", message="plugin f can't be imported: no module g"),),
            ),
            defining=self.defining,
            marking=self.marking,
            holding=self.holding,
            returning=self.returning,
            learning=Learning(self.scheduler, kept.facts, defining=self.defining),
            supplying=Supplying(self.scheduler, self.weights),
            skews=self.skews,
            describe_store=lambda: StoreView(kind="memory", where="here", failing=self.failing),
            check_tools=self._check_tools,
            in_flight=lambda: self.in_flight,
            wall=lambda: WHEN,
        )

    async def _reread(self) -> Reread:
        async def apply() -> None:
            self.rereads += 1
            await trio.lowlevel.checkpoint()

        await trio.lowlevel.checkpoint()
        return Reread(file="server.yaml", declared=(), changed=("models",), needs_restart=(), apply=apply)

    async def _check_tools(self, model: Model, replica: str | None) -> ToolsChecked:
        if self.checks_hang:
            self.check_began.set()
            try:
                await trio.sleep_forever()
            finally:
                self.check_left.set()
        report = Report(verdict=Verdict.WORKS, message="tool calls work", remedy=None, exchanges=())
        return ToolsChecked(model=model.name, replica=replica or "rep-1", node="n1", engine="e", check=report)

    async def settled(self) -> list[str]:
        """The names in the catalog, once the fleet has heard of them."""
        await wait_all_tasks_blocked()
        return [str(model.name) for model in self.scheduler.fleet.catalog]


Make = Callable[..., Any]


@pytest.fixture
def make(nursery: trio.Nursery, a_store: Any) -> Make:
    async def made(store: Store | None = None, written: tuple[Definition, ...] = ()) -> Bench:
        bench = Bench(store or Store(), written, a_store)
        await nursery.start(bench.scheduler.serve)
        await bench.marking.load()
        await bench.defining.load()
        await bench.settled()
        return bench

    return made


async def test_a_program_adds_and_removes_over_the_port(make: Make, nursery: trio.Nursery) -> None:
    bench = await make()
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/models"
    await nursery.start(
        partial(serve_pages, create_app(bench.manage, listen_host="127.0.0.1"), listening, drain_seconds=0)
    )
    body = {"file": "m.yaml", "text": text_of("org/new")}
    async with httpx.AsyncClient(trust_env=False) as client:
        added = await client.post(url, json=body)
        assert (added.status_code, added.json()["models"][0]["name"]) == (200, "org/new")
        again = await client.post(url, json=body)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "name_taken")
        assert "server" not in again.headers
        elsewhere = await client.get(url, headers={"Host": "evil.example"})
        assert elsewhere.status_code == 403
        assert (await client.get(f"{url}/org%2Fnew")).json()["model"]["origin"] == "stored"
        removed = await client.delete(f"{url}/org%2Fnew")
        assert removed.json() == {"name": "org/new"}
        assert (await client.get(f"{url}/org%2Fnew")).status_code == 404


async def test_a_model_is_stopped_loaded_and_rolled_back_over_the_port(make: Make) -> None:
    bench = await make()
    manage = bench.manage
    await manage.add("m.yaml", text_of("m", source="/one.gguf"), replace=False)
    await bench.settled()
    await bench.returning.proven(bench.defining.find_stored("m").model)
    (added,) = await manage.add("m.yaml", text_of("m", source="/two.gguf"), replace=True)
    assert (added.number, added.replaced, added.rolls, added.held) == (2, True, False, False)
    await bench.settled()
    assert (await manage.stop("m")).model == "m"
    await bench.settled()
    (view,) = manage.models()
    assert (view.status, view.held) == (ModelStatus.STOPPED, True)
    assert (await manage.add("m.yaml", text_of("m", source="/three.gguf"), replace=True))[0].held
    assert (await manage.load("m")).held
    assert [each.number for each in (await manage.history("m")).definitions] == [3, 2, 1]
    assert (await manage.rollback("m", None)).to == 1
    await bench.settled()
    assert manage.model("m").definition.source == "/one.gguf"
    text = text_of("m", source="https://h/four.gguf?sig=x")
    await manage.add("m.yaml", text, replace=True)
    await bench.settled()
    shown = manage.model("m")
    # (only that text is edited, and has what opens the address)
    assert (shown.definition.source, shown.text) == ("https://h/four.gguf", text)


async def test_a_model_that_is_removed_leaves_no_hold_and_no_history(make: Make, a_store: Any) -> None:
    bench = await make(a_store.models, written=declared("written"))
    for _ in range(2):
        await bench.manage.add("m.yaml", text_of("m"), replace=False)
        await bench.settled()
        await bench.manage.stop("m")
        await bench.manage.stop("written")
        assert (await bench.manage.remove("m")).declared is None
        await bench.settled()
        assert list(await bench.holds.list()) == ["written"]
    with pytest.raises(Refused, match="is declared at"):
        await bench.manage.remove("written")
    assert list(await bench.holds.list()) == ["written"]
    await bench.manage.add("m.yaml", text_of("m"), replace=False)
    await bench.settled()
    assert [each.number for each in (await bench.manage.history("m")).definitions] == [1]


async def test_a_node_is_drained_over_the_port(make: Make, node: Any) -> None:
    bench = await make()
    bench.links = (Link(node.id),)
    await bench.scheduler.post(NodeRegistered(node=node))
    await bench.settled()
    assert (await bench.manage.drain("n1", deadline_seconds=60.0)).drain_seconds_left is not None
    await bench.settled()
    (view,) = await bench.manage.nodes()
    assert (view.cordoned, view.draining) == (True, True)
    assert not (await bench.manage.cordon("n1", cordoned=False)).draining


async def test_events_are_told_by_number_model_and_node(make: Make, a_model: Any) -> None:
    bench = await make(Store(a_model("tiny")))
    note = bench.scheduler.chronicle.note
    note("ready", "rep-tiny-1 is ready", model=ModelName("tiny"), node=NodeId("n1"), lines=("a", "b"))
    note("node", "n2 is lost", node=NodeId("n2"), warning=True)
    last = bench.scheduler.chronicle.last
    found = await bench.manage.events(after=last - 2)
    assert [(each.number, each.what, each.warning) for each in found.events] == [
        (last - 1, "ready", False),
        (last, "node", True),
    ]
    (first, second) = found.events
    assert (first.model, first.node, first.lines, second.model) == ("tiny", "n1", ("a", "b"), None)
    # by an alias
    (event,) = (await bench.manage.events(after=last - 2, model="gpt")).events
    assert event.text == "rep-tiny-1 is ready"
    (event,) = (await bench.manage.events(after=0, node="n2")).events
    assert event.text == "n2 is lost"
    nothing = await bench.manage.events(after=last)
    assert (nothing.events, nothing.last, nothing.missed) == ((), last, 0)
    assert found.unknown == ()


async def test_of_names_that_there_are_not_it_is_told_and_of_those_that_were_also_what_happened(
    make: Make, a_model: Any, node: Any
) -> None:
    bench = await make(Store(a_model("tiny")))
    await bench.scheduler.post(NodeRegistered(node=node))
    await bench.settled()
    bench.scheduler.chronicle.note("model", "gone is gone", model=ModelName("gone"))
    found = await bench.manage.events(after=0, model="gone")
    assert [event.text for event in found.events] == ["gone is gone"]
    assert found.unknown == ("there is no model gone",)
    found = await bench.manage.events(after=0, model="tiy", node="n11")
    assert found.events == ()
    assert found.unknown == (
        "there is no model tiy; did you mean tiny?",
        "there is no node n11; did you mean n1?",
    )
    assert (await bench.manage.events(after=0, model="gpt", node="n1")).unknown == ()


async def test_what_was_measured_is_shown_and_forgotten_over_the_port(make: Make, node: Any) -> None:
    bench = await make(written=declared("m", alias="c"))
    fact = Fact(
        key=make_key(bench.defining.find("m"), bench.defining.find("m").profiles[0], "1.2", ""), memory_gb=900.0
    )
    await bench.facts.put(fact, WHEN)
    await bench.scheduler.settle(FactsKnown(facts=(fact,)))
    await bench.scheduler.settle(NodeRegistered(node=node))
    client = create_app(bench.manage, listen_host="127.0.0.1").test_client()
    headers = {"Host": "127.0.0.1:9090"}
    shown = {"profiles": ["p"], "engine": "e", "version": "1.2", "memory_gb": 900.0}
    told = await (await client.get("/facts/c", headers=headers)).get_json()
    assert told == {"model": "m", "facts": [shown], "forgotten": False}
    assert (await bench.manage.explain("m")).unfilled, "it fits, were it not for that"
    told = await (await client.delete("/facts/c", headers=headers)).get_json()
    assert told == {"model": "m", "facts": [shown], "forgotten": True}
    assert await bench.facts.list() == ()
    view = await bench.manage.explain("m")
    assert (view.unfilled, view.explanation.placement is not None) == (False, True)


async def test_whoever_follows_is_told_of_what_concerns_him_when_it_happens(
    make: Make, autojump_clock: MockClock
) -> None:
    bench = await make()
    began, after = trio.current_time(), bench.scheduler.chronicle.last

    async def happen() -> None:
        await trio.sleep(2.0)
        bench.scheduler.chronicle.note("node", "n2 is lost", node=NodeId("n2"))
        await trio.sleep(1.0)
        bench.scheduler.chronicle.note("node", "n1 is lost", node=NodeId("n1"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(happen)
        found = await bench.manage.events(after=after, wait_seconds=30.0, node="n1")
    assert [event.text for event in found.events] == ["n1 is lost"]
    assert trio.current_time() - began == 3.0
    found = await bench.manage.events(after=found.last, wait_seconds=30.0, node="n1")
    assert (found.events, trio.current_time() - began) == ((), 33.0)
    await bench.manage.events(after=found.last, wait_seconds=1e9)
    assert trio.current_time() - began == 33.0 + MAX_WAIT_SECONDS


async def test_server_yaml_is_read_again(make: Make) -> None:
    bench = await make(written=declared("old"))
    told = await bench.manage.reload()
    assert (told.file, told.changed, told.needs_restart) == ("server.yaml", ("models",), ())
    assert (bench.rereads, await bench.settled()) == (1, [])


async def test_tools_are_checked_under_any_name_of_a_model(make: Make) -> None:
    bench = await make(written=declared("qwen-coder", alias="coder"))
    assert (await bench.manage.tool_check("coder", None)).model == "qwen-coder"
    assert (await bench.manage.tool_check("qwen-coder", "rep-7")).replica == "rep-7"
    with pytest.raises(Refused, match="there is no model qwen-code; did you mean qwen-coder"):
        await bench.manage.tool_check("qwen-code", None)


async def test_whoever_leaves_the_port_takes_the_check_with_it(make: Make, nursery: trio.Nursery) -> None:
    bench = await make(written=declared("m"))
    bench.checks_hang = True
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    await nursery.start(
        partial(serve_pages, create_app(bench.manage, listen_host="127.0.0.1"), listening, drain_seconds=0)
    )
    with trio.fail_after(60):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            head = "POST /tool-check HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            await stream.send_all(f'{head}Content-Length: 13\r\n\r\n{{"model":"m"}}'.encode())
            await bench.check_began.wait()
        await bench.check_left.wait()


async def test_nodes_models_and_replicas_are_shown_as_they_are(
    make: Make, node: Any, a_model: Any, a_report: Any
) -> None:
    bench = await make(Store(a_model("stored")))
    bench.links = (Link(NodeId("n1")),)
    await bench.scheduler.post(NodeRegistered(node=node))
    await bench.settled()
    desire = await bench.scheduler.desired(NodeId("n1"), 0)
    await bench.scheduler.post(ShardChanged(node=node.id, report=a_report(desire.shards[0], ShardState.READY)))
    await bench.settled()
    manage = bench.manage
    (shown,) = await manage.nodes()
    assert (shown.state, shown.peer, shown.replicas) == (NodeState.READY, "10.0.0.2:41000", ("rep-stored-1",))
    (model,) = manage.models()
    assert (model.status, model.origin, model.ready) == (ModelStatus.READY, Origin.STORED, 1)
    assert [replica.replica for replica in manage.replicas(None)] == ["rep-stored-1"]
    assert manage.replicas("other") == ()
    detail = manage.model("gpt")
    assert (detail.model, detail.text, detail.added_at) == (model, "as it was written", WHEN)
    assert [replica.state for replica in detail.replicas] == ["ready"]
    status = await manage.status()
    assert (status.nodes, status.models, status.replicas) == ({"ready": 1}, {"ready": 1}, {"ready": 1})
    assert (status.memory_gb, status.memory_booked_gb, status.concerns) == (16.0, 1.0, ())
    assert (status.store.where, status.held_up, status.brake) == ("here", None, None)


async def test_what_needs_an_operator_is_in_the_status(make: Make, node: Any) -> None:
    bench = await make()
    bench.links = (Link(NodeId("n1")),)
    bench.skews[NodeId("n1")] = 60.0
    bench.failing = "its disk is full"
    gpus = (Gpu(uuid="GPU-0", index=0, gpu_class="h100-80g", name="H100", memory_gb=85.0, memory_used_gb=0.0),)
    fabrics = (FabricFound(name="ib-a", address="10.1.0.1"),)
    await bench.scheduler.post(NodeRegistered(node=replace(node, gpus=gpus, fabrics=fabrics)))
    await bench.settled()
    status = await bench.manage.status()
    assert status.classes == {"h100-80g": ClassView(free=1, total=1)}
    assert status.fabrics == {"ib-a": FabricView(whole_free=1, down=0, total=1)}
    assert [(each.kind, each.name, each.message) for each in status.concerns] == [
        ("node", "n1", "its clock is more than 2 s ahead of the server's: have both set by NTP"),
        ("store", "here", "its disk is full"),
    ]


async def test_nodes_that_are_not_back_hold_the_fleet_up_and_are_shown(make: Make) -> None:
    bench = await make()
    bench.nodes.kept[NodeId("n1")] = KeptNode(NodeId("n1"), WHEN - 60.0, cordoned=True, labels={})
    await bench.marking.load()
    until = trio.current_time() + 3600.0
    await bench.scheduler.post(NodesExpected(nodes=bench.marking.seen(), until=until))
    await bench.settled()
    (shown,) = await bench.manage.nodes()
    assert (shown.state, shown.heard_seconds_ago, shown.cordoned) == (NodeState.SILENT, 60.0, True)
    status = await bench.manage.status()
    assert "waits for what n1 run" in (status.held_up or "")
    assert [each.message for each in status.concerns] == ["silent: its link is down"]


async def test_nodes_that_are_not_back_are_part_of_every_explanation(make: Make, node: Any, a_model: Any) -> None:
    """Right after a start it was said that a node should be added, and the table had none."""
    bench = await make(Store(a_model("stored")))
    for name in ("n1", "n2"):
        bench.nodes.kept[NodeId(name)] = KeptNode(NodeId(name), WHEN - 60.0, cordoned=False, labels={})
    await bench.marking.load()
    until = trio.current_time() + 3600.0
    await bench.scheduler.post(NodesExpected(nodes=bench.marking.seen(), until=until))
    await bench.settled()
    told = (await bench.manage.explain("stored")).explanation
    assert [(each.nodes, each.rejections[0].reason) for each in told.candidates] == [
        (("n1",), "node_silent"),
        (("n2",), "node_silent"),
    ]
    assert told.unlock is not None
    assert told.unlock.text.startswith("wait for n1, n2, or bring back what does not come")
    (view,) = await bench.manage.explain_what_if("m.yaml", text_of("new", least=1))
    assert view.explanation.unlock is not None
    assert view.explanation.unlock.text == told.unlock.text
    await bench.scheduler.post(NodeRegistered(node=node))
    await bench.settled()
    told = (await bench.manage.explain("stored")).explanation
    assert [(each.nodes, bool(each.rejections)) for each in told.candidates] == [(("n1",), False), (("n2",), True)]


async def test_a_node_is_marked_and_removed_over_the_port(make: Make, nursery: trio.Nursery) -> None:
    bench = await make()
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/nodes"
    app = create_app(bench.manage, listen_host="127.0.0.1")
    await nursery.start(partial(serve_pages, app, listening, drain_seconds=0))
    async with httpx.AsyncClient(trust_env=False) as client:
        cordoned = await client.post(f"{url}/gpu01/cordon", json={"cordoned": True})
        assert cordoned.json()["cordoned"] is True
        labelled = await client.post(f"{url}/gpu01/labels", json={"labels": {"zone": "a", "rack": None}})
        assert (labelled.json()["labels"], labelled.json()["without"]) == ({"zone": "a"}, ["rack"])
        (shown,) = (await client.get(url)).json()["nodes"]
        assert (shown["state"], shown["cordoned"], shown["labels"]) == ("unseen", True, {"zone": "a"})
        bad = await client.post(f"{url}/GPU01/cordon", json={"cordoned": True})
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_node")
        assert (await client.delete(f"{url}/gpu01")).json() == {
            "node": "gpu01",
            "connected": False,
            "known": False,
            "running": [],
        }
        assert (await client.get(url)).json() == {"nodes": []}


async def test_a_model_is_explained_by_any_of_its_names(make: Make, node: Any, a_model: Any) -> None:
    bench = await make(Store(a_model("stored")))
    await bench.scheduler.post(NodeRegistered(node=node))
    await bench.settled()
    view = await bench.manage.explain("gpt")
    assert (view.explanation.model, view.wanted, view.what_if) == ("stored", 1, False)
    # (the first is of before the node came)
    assert [each.replica for each in view.decisions] == ["rep-stored-1", None]
    assert bench.manage.decisions() == view.decisions
    with pytest.raises(Refused, match="there is no model stord; did you mean stored"):
        await bench.manage.explain("stord")


async def test_what_would_become_of_a_definition_is_told_and_nothing_is_stored(make: Make, node: Any) -> None:
    bench = await make(written=declared("written"))
    await bench.scheduler.post(NodeRegistered(node=node))
    await bench.settled()
    for name in ("new", "written"):
        (view,) = await bench.manage.explain_what_if("m.yaml", text_of(name, least=1))
        assert (view.what_if, view.wanted, view.explanation.model) == (True, 1, name)
        assert view.explanation.placement is not None
    assert (bench.store.kept, await bench.settled()) == ({}, ["written"])
    with pytest.raises(ConfigError):
        await bench.manage.explain_what_if("m.yaml", "name: m\n")
    with pytest.raises(Refused, match="'written' is taken already"):
        await bench.manage.explain_what_if("m.yaml", text_of("new", alias="written"))


async def test_a_place_is_planned_for_sizes_alone(make: Make, node: Any) -> None:
    bench = await make()
    await bench.scheduler.post(NodeRegistered(node=node))
    await bench.settled()
    view = await bench.manage.plan(Needs(source="org/m", format=Format.GGUF, memory_gb=1.0))
    assert view.engines == ("e",)
    assert [[fit.node for fit in place.fits] for place in view.places] == [["n1"]]
    assert (await bench.manage.plan(Needs(source="org/m", format=Format.SAFETENSORS, memory_gb=1.0))).engines == ()
    assert (bench.store.kept, await bench.settled()) == ({}, [])


async def test_engines_are_the_servers_plugins_and_the_nodes_binaries(make: Make, node: Any) -> None:
    bench = await make()
    bench.links = (Link(NodeId("n1")), Link(NodeId("n2")))
    ailing = replace(node.engines[0], checked=True, broken="libe.so.1 is missing")
    await bench.scheduler.post(NodeRegistered(node=replace(node, engines=(ailing,))))
    await bench.settled()
    view = await bench.manage.engines()
    assert [(plugin.name, plugin.origin) for plugin in view.plugins] == [("e", "distribution e 2.0")]
    assert [(each.plugin, each.reason) for each in view.left_out] == [
        ("engine f", "plugin f can't be imported: no module g")
    ]
    assert [(each.node, each.engines) for each in view.nodes] == [("n1", (ailing,)), ("n2", None)]
    (concern,) = (await bench.manage.status()).concerns
    assert (concern.name, concern.message) == ("n1", "e can't be used (e): libe.so.1 is missing")


async def test_a_declared_model_shows_where_and_why_it_does_not_run(make: Make, node: Any) -> None:
    (written,) = parse_definitions(text_of("m", least=1, more="  gpu_class: h100-80g\n"), "server.yaml", ENGINES)
    bench = await make(written=(written,))
    await bench.scheduler.post(NodeRegistered(node=node))
    await bench.settled()
    detail = bench.manage.model("m")
    assert (detail.model.where, detail.model.status) == ("server.yaml:1:1", ModelStatus.WAITING)
    assert [no.node for no in detail.rejections] == ["n1"]
    assert (detail.text, detail.added_at) == (None, None)
    with pytest.raises(Refused, match="there is no model n"):
        bench.manage.model("n")


FETCHED = "hf:org/repo/a.gguf"
OLD = Cached(source="hf:org/repo/old.gguf", commit="c1", size_bytes=5, fetched_at=1.0)
FETCH = Fetch(source=FETCHED, phase=Phase.FETCHING, commit="c1", total_bytes=9, stalled_seconds=99.0)


async def test_weights_that_are_there_and_on_their_way_are_shown(make: Make, node: Any, a_model: Any) -> None:
    bench = await make(Store(replace(a_model("tiny"), source=FETCHED)))
    bench.links = (Link(node.id),)
    await bench.scheduler.settle(NodeRegistered(node=node))
    weights = WeightsReported(node=node.id, weights=NodeWeights(cached=(OLD,), fetches=(FETCH,)))
    bench.weights.heed(weights)
    await bench.scheduler.settle(weights)
    status = await bench.manage.status()
    assert status.holdings == {"": HoldingView(nodes=1, models={}, none=("tiny",))}
    assert [(each.source, each.nodes, each.stalled) for each in status.fetching] == [(FETCHED, 1, 1)]
    assert f"nothing of {FETCHED} has come for more than 60 s" in [each.message for each in status.concerns]
    (view,) = (await bench.manage.weights()).nodes
    assert (view.node, view.state, view.free_bytes) == ("n1", NodeState.READY, 5)
    assert view.fetches == (FETCH,)


async def test_weights_are_pulled_and_removed(make: Make, node: Any, nursery: trio.Nursery) -> None:
    bench = await make()
    bench.links = (Link(node.id),)
    await bench.scheduler.settle(NodeRegistered(node=node))
    bench.weights.heed(NodeRegistered(node=node))
    nursery.start_soon(bench.weights.serve)
    orders, send = [], trio.Event()

    def tell(order: WeightsOrder) -> None:
        orders.append(order)
        if order.collect is not None:
            send.set()

    bench.weights.follow(node.id, tell)
    pull = await bench.manage.pull_weights(FETCHED, ())
    assert [each.node for each in pull.nodes] == ["n1"]
    assert await bench.manage.pull(pull.number) == pull
    bench.weights.heed(WeightsReported(node=node.id, weights=NodeWeights(cached=(OLD,))))

    async def answer() -> None:
        await send.wait()
        collected = Collected(number=orders[-1].collect.number, freed_bytes=5)
        bench.weights.heed(WeightsReported(node=node.id, weights=NodeWeights(collected=collected)))

    nursery.start_soon(answer)
    (done,) = (await bench.manage.collect_weights()).nodes
    assert (done.node, done.freed_bytes, done.why) == ("n1", 5, None)
