"""The endpoints over a Management that answers by heart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from quart import typing as quart_typing
from trio.testing import MockClock

from llmgw.admin.manage import MAX_BODY_BYTES, create_app
from llmgw.admin.management import Refused
from llmgw.admin.reading import BODY_SECONDS
from llmgw.admin.views import (
    AddedModel,
    CollectedView,
    DecisionView,
    DefinitionView,
    EnginesView,
    EventsView,
    EventView,
    ExplanationView,
    FactsView,
    FactView,
    HistoryView,
    LeftOut,
    LoadBegun,
    ModelDetail,
    ModelStatus,
    ModelView,
    NodeCollected,
    NodeEngines,
    NodeMarks,
    NodePull,
    NodeState,
    NodeView,
    NodeWeightsView,
    Origin,
    PlanFit,
    PlanPlace,
    PlanView,
    PullView,
    Reloaded,
    Removed,
    RemovedNode,
    ReplicaView,
    RolledBack,
    StatusView,
    Stopped,
    StoreView,
    ToolsChecked,
    WeightsView,
)
from llmgw.core.model import Model, ModelName
from llmgw.core.placement import Explanation
from llmgw.core.sizing import Format, GpuNeed, Needs
from llmgw.dialects.toolcheck import Report, Verdict
from llmgw.errors import ConfigError, LlmgwError, Problem

HERE = {"Host": "127.0.0.1:9090"}
MODEL = ModelView(name="org/m", status=ModelStatus.READY, serving=True, ready=1, wanted=1, origin=Origin.STORED)
REPLICA = ReplicaView(
    replica="rep-m-1",
    model="org/m",
    profile="p",
    engine="e",
    node="n1",
    shard="shd-m-1-0",
    epoch=1,
    state="ready",
    seconds_in_state=2.0,
)

# The rooms of the server that refuse an operator something.
ACTING = ("acts", "defining", "holding", "marking", "names", "returning", "supplying", "tools")
EXPLAINED = ExplanationView(
    explanation=Explanation(model=ModelName("org/m"), placement=None, runner_up=None, candidates=(), unlock=None),
    wanted=1,
    most=2,
)


class Script:
    """Answers, or raises what it was told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.fails: Exception | None = None

    def _note(self, *asked: object) -> None:
        self.asked.append(asked)
        if self.fails is not None:
            raise self.fails

    async def status(self) -> StatusView:
        self._note("status")
        return StatusView(
            version="1.2.3",
            up_seconds=1.0,
            nodes={},
            models={},
            replicas={},
            memory_gb=0.0,
            memory_booked_gb=0.0,
            classes={},
            fabrics={},
            store=StoreView(kind="sqlite", where="/x.db"),
        )

    async def nodes(self) -> tuple[NodeView, ...]:
        self._note("nodes")
        return (NodeView(node="n1", state=NodeState.READY, connected=True),)

    async def engines(self) -> EnginesView:
        self._note("engines")
        return EnginesView(
            plugins=(),
            left_out=(LeftOut(plugin="engine x", reason="it can't be imported"),),
            nodes=(NodeEngines(node="n1", state=NodeState.JOINING),),
        )

    def models(self) -> tuple[ModelView, ...]:
        self._note("models")
        return (MODEL,)

    def replicas(self, model: str | None) -> tuple[ReplicaView, ...]:
        self._note("replicas", model)
        return (REPLICA,)

    def model(self, name: str) -> ModelDetail:
        self._note("model", name)
        return ModelDetail(model=MODEL, definition=Model(name=ModelName("org/m"), source="/m"))

    async def explain(self, name: str) -> ExplanationView:
        self._note("explain", name)
        return EXPLAINED

    async def explain_what_if(self, file: str, text: str) -> tuple[ExplanationView, ...]:
        self._note("explain_what_if", file, text)
        return (EXPLAINED,)

    async def plan(self, needs: Needs) -> PlanView:
        self._note("plan", needs)
        fit = PlanFit(node="n1", engine="e", gpus=2)
        return PlanView(engines=("e",), places=(PlanPlace(tp=1, memory_gb=20.5, gpu_class="h100-80g", fits=(fit,)),))

    def decisions(self) -> tuple[DecisionView, ...]:
        self._note("decisions")
        return (DecisionView(seconds_ago=2.0, model="org/m", why="uncordon n1", reasons={"cordoned": 1}),)

    async def cordon(self, node: str, *, cordoned: bool) -> NodeMarks:
        self._note("cordon", node, cordoned)
        return NodeMarks(node=node, cordoned=cordoned, labels={}, known=True)

    async def drain(self, node: str, *, deadline_seconds: float | None) -> NodeMarks:
        self._note("drain", node, deadline_seconds)
        return NodeMarks(node=node, cordoned=True, draining=True, labels={}, known=True, running=("rep-m-1",))

    async def events(
        self, *, after: int, wait_seconds: float = 0.0, model: str | None = None, node: str | None = None
    ) -> EventsView:
        self._note("events", after, wait_seconds, model, node)
        happened = EventView(number=after + 1, at=1.5, what="ready", text="rep-m-1 is ready", model="org/m")
        return EventsView(events=(happened,), last=after + 1, began=1.0)

    async def history(self, name: str) -> HistoryView:
        self._note("history", name)
        return HistoryView(
            model=name, definitions=(DefinitionView(number=1, at=1.5, origin=Origin.STORED, text="name: m"),)
        )

    async def facts(self, name: str) -> FactsView:
        self._note("facts", name)
        return FactsView(model=name, facts=(FactView(profiles=("p",), engine="e", load_seconds=4.5),))

    async def forget_facts(self, name: str) -> FactsView:
        self._note("forget_facts", name)
        return FactsView(model=name, facts=(), forgotten=True)

    async def rollback(self, name: str, number: int | None) -> RolledBack:
        self._note("rollback", name, number)
        return RolledBack(model=name, number=3, to=number or 1)

    async def stop(self, name: str) -> Stopped:
        self._note("stop", name)
        return Stopped(model=name, running=("rep-m-1",))

    async def load(self, name: str) -> LoadBegun:
        self._note("load", name)
        return LoadBegun(model=name, held=True, wanted=1)

    async def label(self, node: str, changes: Mapping[str, str | None]) -> NodeMarks:
        self._note("label", node, dict(changes))
        return NodeMarks(node=node, cordoned=False, labels={"zone": "a"}, known=False, without=("rack",))

    async def remove_node(self, node: str) -> RemovedNode:
        self._note("remove_node", node)
        return RemovedNode(node=node, connected=False)

    async def add(self, file: str, text: str, *, replace: bool) -> tuple[AddedModel, ...]:
        self._note("add", file, text, replace)
        return (AddedModel(name="m", replaced=replace, runs=True),)

    async def remove(self, name: str) -> Removed:
        self._note("remove", name)
        return Removed(name=name)

    async def weights(self) -> WeightsView:
        self._note("weights")
        return WeightsView(nodes=(NodeWeightsView(node="n1", state=NodeState.READY, stored=(), free_bytes=5),))

    async def pull(self, number: int) -> PullView:
        self._note("pull", number)
        return PullView(number=number, source="hf:o/r/f", nodes=(NodePull(node="n1", state=NodeState.LOST),))

    async def pull_weights(self, source: str, nodes: Sequence[str]) -> PullView:
        self._note("pull_weights", source, tuple(nodes))
        return PullView(number=7, source=source, nodes=())

    async def collect_weights(self) -> CollectedView:
        self._note("collect_weights")
        return CollectedView(nodes=(NodeCollected(node="n1", items=1, bytes=5, kept=("in use",)),))

    async def reload(self) -> Reloaded:
        self._note("reload")
        return Reloaded(file="server.yaml", changed=("models",))

    async def tool_check(self, name: str, replica: str | None) -> ToolsChecked:
        self._note("tool_check", name, replica)
        report = Report(verdict=Verdict.IGNORES, message="it ignores them", remedy=None, exchanges=())
        return ToolsChecked(model=name, replica=replica or "rep-m-1", node="n1", engine="e", check=report)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def client(script: Script) -> quart_typing.TestClientProtocol:
    app = create_app(script, listen_host="127.0.0.1")
    # Whoever served such an app in this process has had its log thinned out.
    app.logger.filters.clear()
    return app.test_client()


Client = quart_typing.TestClientProtocol


async def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status
    assert answer.headers["Content-Type"] == "application/json"
    told: dict[str, Any] = await answer.get_json()
    assert list(told) == ["error"]
    error: dict[str, Any] = told["error"]
    assert {"code", "message"} <= error.keys() <= {"code", "message", "problems"}
    return error


@pytest.mark.parametrize(
    ("path", "key", "asked"),
    [
        ("/nodes", "nodes", ("nodes",)),
        ("/models", "models", ("models",)),
        ("/replicas", "replicas", ("replicas", None)),
        ("/replicas?model=org%2Fm", "replicas", ("replicas", "org/m")),
    ],
)
async def test_lists_are_answered(
    client: Client, script: Script, path: str, key: str, asked: tuple[object, ...]
) -> None:
    answer = await client.get(path, headers=HERE)
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["Cache-Control"] == "no-store"
    told = await answer.get_json()
    assert list(told) == [key]
    assert len(told[key]) == 1
    assert script.asked == [asked]


async def test_the_whole_is_answered(client: Client) -> None:
    told = await (await client.get("/status", headers=HERE)).get_json()
    assert told["version"] == "1.2.3"


@pytest.mark.parametrize("path", ["/models/org/m", "/models/org%2Fm"])
async def test_one_model_is_answered_by_a_name_with_a_slash(client: Client, script: Script, path: str) -> None:
    told = await (await client.get(path, headers=HERE)).get_json()
    assert told["model"]["name"] == "org/m"
    assert told["definition"]["source"] == "/m"
    assert script.asked == [("model", "org/m")]


async def test_models_are_added_removed_and_read_again(client: Client, script: Script) -> None:
    body = {"file": "m.yaml", "text": "name: m", "replace": True}
    added = await client.post("/models", json=body, headers=HERE)
    assert await added.get_json() == {
        "models": [
            {
                "name": "m",
                "replaced": True,
                "runs": True,
                "rolls": False,
                "on_demand": False,
                "held": False,
                "not_in_effect": [],
            }
        ],
    }
    removed = await client.delete("/models/a%2Bb", headers=HERE)
    assert await removed.get_json() == {"name": "a+b"}
    reloaded = await client.post("/reload", headers=HERE)
    assert await reloaded.get_json() == {
        "file": "server.yaml",
        "changed": ["models"],
        "needs_restart": [],
        "failed": [],
    }
    assert script.asked == [("add", "m.yaml", "name: m", True), ("remove", "a+b"), ("reload",)]


async def test_engines_are_answered_with_what_is_left_out(client: Client, script: Script) -> None:
    answer = await client.get("/engines", headers=HERE)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/json")
    assert await answer.get_json() == {
        "plugins": [],
        "left_out": [{"plugin": "engine x", "reason": "it can't be imported"}],
        "nodes": [{"node": "n1", "state": "joining"}],
    }
    assert script.asked == [("engines",)]


async def test_a_model_is_explained_by_a_name_with_a_slash(client: Client, script: Script) -> None:
    told = await (await client.get("/placement/org/m", headers=HERE)).get_json()
    assert told == {
        "explanation": {"model": "org/m", "candidates": []},
        "wanted": 1,
        "most": 2,
        "what_if": False,
        "replicas": [],
        "stops": [],
        "missing": 0,
        "places": 0,
        "decisions": [],
        "numbers": [],
        "unfilled": False,
    }
    await client.get("/placement/org%2Fm", headers=HERE)
    assert script.asked == [("explain", "org/m")] * 2


async def test_a_definition_is_explained_that_is_only_sent(client: Client, script: Script) -> None:
    body = {"file": "m.yaml", "text": "name: m"}
    told = await (await client.post("/placement", json=body, headers=HERE)).get_json()
    assert [view["wanted"] for view in told["models"]] == [1]
    assert script.asked == [("explain_what_if", "m.yaml", "name: m")]


async def test_a_place_is_planned_for_sizes_alone(client: Client, script: Script) -> None:
    body = {"source": "org/m", "format": "gguf", "gpus": [{"tp": 2, "memory_gb": 20.5}], "disk_gb": 40.0}
    told = await (await client.post("/plan", json=body, headers=HERE)).get_json()
    fits = [{"node": "n1", "engine": "e", "gpus": 2}]
    place = {"tp": 1, "memory_gb": 20.5, "gpu_class": "h100-80g", "fits": fits, "others": []}
    assert told == {"engines": ["e"], "places": [place], "unseen": []}
    needs = Needs(source="org/m", format=Format.GGUF, gpus=(GpuNeed(tp=2, memory_gb=20.5),), disk_gb=40.0)
    assert script.asked == [("plan", needs)]


async def test_facts_are_shown_and_forgotten_by_a_name_with_a_slash(client: Client, script: Script) -> None:
    told = await (await client.get("/facts/org/m", headers=HERE)).get_json()
    fact = {"profiles": ["p"], "engine": "e", "load_seconds": 4.5}
    assert told == {"model": "org/m", "facts": [fact], "forgotten": False}
    told = await (await client.delete("/facts/org%2Fm", headers=HERE)).get_json()
    assert told == {"model": "org/m", "facts": [], "forgotten": True}
    assert script.asked == [("facts", "org/m"), ("forget_facts", "org/m")]


async def test_the_last_decisions_are_answered(client: Client) -> None:
    told = await (await client.get("/decisions", headers=HERE)).get_json()
    assert told == {
        "decisions": [
            {"seconds_ago": 2.0, "model": "org/m", "why": "uncordon n1", "nodes": [], "reasons": {"cordoned": 1}}
        ]
    }


async def test_nodes_are_marked_and_removed(client: Client, script: Script) -> None:
    marked = await client.post("/nodes/n1/cordon", json={"cordoned": True}, headers=HERE)
    assert await marked.get_json() == {
        "node": "n1",
        "cordoned": True,
        "labels": {},
        "known": True,
        "draining": False,
        "without": [],
        "running": [],
    }
    labelled = await client.post("/nodes/n1/labels", json={"labels": {"zone": "a", "rack": None}}, headers=HERE)
    assert (await labelled.get_json())["without"] == ["rack"]
    removed = await client.delete("/nodes/n1", headers=HERE)
    assert await removed.get_json() == {"node": "n1", "connected": False, "known": True, "running": []}
    assert script.asked == [("cordon", "n1", True), ("label", "n1", {"zone": "a", "rack": None}), ("remove_node", "n1")]


@pytest.mark.parametrize(
    ("body", "asked"), [({}, None), ({"deadline_seconds": None}, None), ({"deadline_seconds": 600}, 600.0)]
)
async def test_a_node_is_drained_with_a_deadline_or_none(
    client: Client, script: Script, body: dict[str, Any], asked: float | None
) -> None:
    told = await (await client.post("/nodes/n1/drain", json=body, headers=HERE)).get_json()
    assert (told["node"], told["draining"], told["running"]) == ("n1", True, ["rep-m-1"])
    assert script.asked == [("drain", "n1", asked)]


async def test_models_are_stopped_and_loaded_and_have_earlier_definitions_again(client: Client, script: Script) -> None:
    stopped = await client.post("/stop", json={"name": "org/m"}, headers=HERE)
    assert await stopped.get_json() == {
        "model": "org/m",
        "running": ["rep-m-1"],
        "already": False,
        "idle": False,
        "unscaled": False,
    }
    loaded = await client.post("/load", json={"model": "org/m"}, headers=HERE)
    assert (await loaded.get_json())["held"] is True
    back = await client.post("/rollback", json={"model": "org/m", "number": 2}, headers=HERE)
    assert await back.get_json() == {
        "model": "org/m",
        "number": 3,
        "to": 2,
        "rolls": False,
        "on_demand": False,
    }
    await client.post("/rollback", json={"model": "org/m"}, headers=HERE)
    assert script.asked == [("stop", "org/m"), ("load", "org/m"), ("rollback", "org/m", 2), ("rollback", "org/m", None)]


async def test_the_history_of_a_model_with_a_slash_is_answered(client: Client, script: Script) -> None:
    told = await (await client.get("/history/org/history", headers=HERE)).get_json()
    assert told["definitions"] == [
        {"number": 1, "at": 1.5, "origin": "stored", "current": False, "serving": False, "text": "name: m"}
    ]
    assert script.asked == [("history", "org/history")]


async def test_events_are_answered_after_a_number_and_of_what_is_asked_for(client: Client, script: Script) -> None:
    told = await (await client.get("/events", headers=HERE)).get_json()
    assert told == {
        "events": [
            {
                "number": 1,
                "at": 1.5,
                "what": "ready",
                "text": "rep-m-1 is ready",
                "model": "org/m",
                "lines": [],
                "warning": False,
            }
        ],
        "last": 1,
        "began": 1.0,
        "missed": 0,
        "unknown": [],
    }
    await client.get("/events?after=7&wait=60&model=org%2Fm&node=n1", headers=HERE)
    assert script.asked == [("events", 0, 0, None, None), ("events", 7, 60, "org/m", "n1")]


@pytest.mark.parametrize("query", ["after=-1", "after=x", "wait=61", "wait=nan", "node=", "afer=1"])
async def test_a_query_for_events_that_says_something_else_is_refused(
    client: Client, script: Script, query: str
) -> None:
    error = await error_of(await client.get(f"/events?{query}", headers=HERE), 400)
    assert (error["code"], script.asked) == ("invalid_request", [])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/nodes/n1/cordon", b"{}"),
        ("/nodes/n1/cordon", b'{"cordoned": 1}'),
        ("/nodes/n1/cordon", b'{"cordoned": true, "why": "x"}'),
        ("/nodes/n1/drain", b'{"deadline_seconds": "10m"}'),
        ("/nodes/n1/drain", b'{"deadline": 600}'),
        ("/stop", b'{"name": ""}'),
        ("/load", b'{"name": "m"}'),
        ("/rollback", b'{"model": "m", "number": 0}'),
        ("/rollback", b'{"model": "m", "number": "2"}'),
        ("/nodes/n1/labels", b'{"labels": {"zone": 1}}'),
        ("/nodes/n1/labels", b'{"labels": ["zone"]}'),
        ("/placement", b'{"file": "", "text": "name: m"}'),
        ("/placement", b'{"file": "m.yaml"}'),
        ("/plan", b"{}"),
        ("/plan", b'{"source": "m", "format": "zip"}'),
        ("/plan", b'{"source": "m", "gpus": [{"tp": 0, "memory_gb": 1}]}'),
        ("/plan", b'{"source": "m", "gpus": [{"tp": 1, "memory_gb": -1}]}'),
    ],
)
async def test_a_body_that_says_something_else_does_nothing(
    client: Client, script: Script, path: str, body: bytes
) -> None:
    error = await error_of(
        await client.post(path, data=body, headers={**HERE, "Content-Type": "application/json"}), 400
    )
    assert (error["code"], script.asked) == ("invalid_request", [])


async def test_tools_are_checked_at_any_replica_or_the_one_that_is_named(client: Client, script: Script) -> None:
    told = await (await client.post("/tool-check", json={"model": "org/m"}, headers=HERE)).get_json()
    assert told == {
        "model": "org/m",
        "replica": "rep-m-1",
        "node": "n1",
        "engine": "e",
        "check": {"verdict": "ignores", "message": "it ignores them", "exchanges": []},
    }
    named = {"model": "org/m", "replica": "rep-m-2"}
    assert (await (await client.post("/tool-check", json=named, headers=HERE)).get_json())["replica"] == "rep-m-2"
    error = await error_of(await client.post("/tool-check", json={"replica": "x"}, headers=HERE), 400)
    assert (error["code"], "`model`" in error["message"]) == ("invalid_request", True)
    assert script.asked == [("tool_check", "org/m", None), ("tool_check", "org/m", "rep-m-2")]


async def test_nothing_is_replaced_unless_asked(client: Client, script: Script) -> None:
    await client.post("/models", json={"file": "m.yaml", "text": "name: m"}, headers=HERE)
    assert script.asked == [("add", "m.yaml", "name: m", False)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"not json", "JSON"),
        (b"\xff\xfe", ""),
        (b'{"file": "m.yaml"}', "`text`"),
        (b'{"file": "", "text": ""}', "asked for: file is empty"),
        (b'{"file": "' + b"m" * 4097 + b'", "text": ""}', "asked for: file has more than 4096 characters"),
        (b'{"file": 1, "text": ""}', "$.file"),
        (b'{"file": "m.yaml", "text": "", "repalce": true}', "repalce"),
        (b"[]", "object"),
    ],
)
async def test_a_body_of_another_shape_is_refused(client: Client, script: Script, body: bytes, said: str) -> None:
    answer = await client.post("/models", data=body, headers={**HERE, "Content-Type": "application/json"})
    error = await error_of(answer, 400)
    assert error["code"] == "invalid_request"
    assert said in error["message"]
    assert script.asked == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_a_body_that_a_form_could_send_is_refused(client: Client, script: Script, kind: str) -> None:
    body = b'{"file": "m.yaml", "text": ""}'
    error = await error_of(await client.post("/models", data=body, headers={**HERE, "Content-Type": kind}), 415)
    assert error["code"] == "not_json"
    assert script.asked == []


async def test_a_body_that_is_too_large_is_refused(client: Client, script: Script) -> None:
    body = {"file": "m.yaml", "text": "x" * MAX_BODY_BYTES}
    error = await error_of(await client.post("/models", json=body, headers=HERE), 413)
    assert (error["code"], "1024 KiB" in error["message"]) == ("request_too_large", True)
    assert script.asked == []


async def test_a_body_that_does_not_come_is_not_waited_for(client: Client, mock_clock: MockClock) -> None:
    headers = {**HERE, "Content-Type": "application/json", "Content-Length": "10"}
    async with trio.open_nursery() as nursery, client.request("/models", method="POST", headers=headers) as sending:
        await sending.send(b'{"file"')
        nursery.start_soon(_jump, mock_clock)
        answer = await sending.as_response()
    error = await error_of(answer, 408)
    assert error["code"] == "request_timeout"


async def _jump(clock: MockClock) -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)
    clock.jump(BODY_SECONDS + 1)


@pytest.mark.parametrize("path", ["/", "/nothing", "/models/", "/x//nodes", "/Nodes"])
async def test_an_unknown_path_is_told_so(client: Client, path: str) -> None:
    error = await error_of(await client.get(path, headers=HERE), 404)
    assert error["code"] == "unknown_url"


async def test_a_path_as_long_as_a_client_likes_is_not_repeated(client: Client) -> None:
    error = await error_of(await client.get("/" + "x" * 5000, headers=HERE), 404)
    assert len(error["message"]) < 400


@pytest.mark.parametrize(("method", "path"), [("PUT", "/models"), ("DELETE", "/nodes"), ("GET", "/reload")])
async def test_another_method_is_told_which_there_are(client: Client, method: str, path: str) -> None:
    answer = await client.open(path, method=method, headers=HERE)
    error = await error_of(answer, 405)
    assert error["code"] == "method_not_allowed"
    assert answer.headers["Allow"]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example:9090"}, "wrong_host"),
        ({**HERE, "Origin": "https://evil.example"}, "cross_site"),
        ({**HERE, "Origin": "null"}, "cross_site"),
        ({**HERE, "Sec-Fetch-Site": "cross-site"}, "cross_site"),
        ({**HERE, "sec-fetch-site": "same-site"}, "cross_site"),
    ],
)
@pytest.mark.parametrize(
    "ask",
    [
        lambda client, headers: client.get("/status", headers=headers),
        lambda client, headers: client.post("/reload", headers=headers),
        lambda client, headers: client.delete("/models/m", headers=headers),
        lambda client, headers: client.delete("/nodes/n1", headers=headers),
        lambda client, headers: client.post("/nodes/n1/cordon", json={"cordoned": True}, headers=headers),
        lambda client, headers: client.post("/nodes/n1/drain", json={}, headers=headers),
        lambda client, headers: client.post("/stop", json={"name": "m"}, headers=headers),
        lambda client, headers: client.post("/rollback", json={"model": "m"}, headers=headers),
        lambda client, headers: client.get("/events", headers=headers),
        lambda client, headers: client.post("/nodes/n1/labels", json={"labels": {"a": "b"}}, headers=headers),
        lambda client, headers: client.post("/placement", json={"file": "m", "text": ""}, headers=headers),
        lambda client, headers: client.get("/placement/m", headers=headers),
        lambda client, headers: client.get("/nothing", headers=headers),
        lambda client, headers: client.open("/models", method="OPTIONS", headers=headers),
    ],
)
async def test_a_page_of_elsewhere_gets_nothing(
    client: Client, script: Script, ask: Any, headers: dict[str, str], code: str
) -> None:
    answer = await ask(client, headers)
    assert (await error_of(answer, 403))["code"] == code
    assert "access-control" not in str(answer.headers).lower()
    assert script.asked == []


async def test_no_other_origin_is_ever_let_in(client: Client) -> None:
    answer = await client.get("/status", headers={**HERE, "Origin": "http://127.0.0.1:9090"})
    assert answer.status_code == 200
    assert "access-control" not in str(answer.headers).lower()


async def test_a_refusal_is_told_with_its_status_and_problems(client: Client, script: Script) -> None:
    script.fails = Refused(
        "a name is taken",
        status=409,
        code="name_taken",
        problems=(Problem(key="name", message="'m' is taken", where="m.yaml:1:1"), Problem(key="", message="and more")),
    )
    answer = await client.post("/models", json={"file": "m.yaml", "text": ""}, headers=HERE)
    assert await error_of(answer, 409) == {
        "code": "name_taken",
        "message": "a name is taken",
        "problems": [{"key": "name", "where": "m.yaml:1:1", "message": "'m' is taken"}, {"message": "and more"}],
    }


async def test_what_is_written_wrong_is_told_whole(client: Client, script: Script) -> None:
    script.fails = ConfigError([Problem(key="nmae", message="unknown key (name?)", where="m.yaml:1:1")])
    error = await error_of(await client.post("/reload", headers=HERE), 400)
    assert error["code"] == "invalid_config"
    assert error["problems"] == [{"key": "nmae", "where": "m.yaml:1:1", "message": "unknown key (name?)"}]


async def test_a_failure_that_is_meant_for_the_operator_is_told(client: Client, script: Script) -> None:
    script.fails = LlmgwError("the store's disk is full")
    error = await error_of(await client.delete("/models/m", headers=HERE), 500)
    assert error == {"code": "failed", "message": "the store's disk is full"}


def test_every_code_has_its_line_in_the_docs() -> None:
    root = Path(__file__).parents[3]
    server = root / "src/llmgw/server"
    rooms = [*(root / "src/llmgw/admin").glob("*.py"), *(server / f"{name}.py" for name in ACTING)]
    codes = {code for room in rooms for code in re.findall(r'code="([a-z_]+)"', room.read_text())}
    page = (root / "docs/ctl.md").read_text()
    assert codes == set(re.findall(r"^\| [0-9]{3} \| `([a-z_]+)` \|", page, re.MULTILINE))


async def test_any_other_failure_says_so_and_not_why(
    client: Client, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script.fails = RuntimeError("a secret of the house")
    error = await error_of(await client.get("/nodes", headers=HERE), 500)
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    assert "a secret of the house" in caplog.text


async def test_weights_are_shown_fetched_and_removed(client: Client, script: Script) -> None:
    shown = await client.get("/weights", headers=HERE)
    assert await shown.get_json() == {
        "nodes": [
            {
                "node": "n1",
                "state": "ready",
                "stored": [],
                "fetches": [],
                "free_bytes": 5,
                "shared": False,
                "shared_with": [],
                "seen": [],
            }
        ]
    }
    asked = await client.post("/weights/pull", json={"source": "hf:o/r/f", "nodes": ["n1", "n2"]}, headers=HERE)
    assert (await asked.get_json())["number"] == 7
    await client.post("/weights/pull", json={"source": "hf:o/r/f"}, headers=HERE)
    pull = await client.get("/weights/pull/7", headers=HERE)
    assert (await pull.get_json())["nodes"] == [{"node": "n1", "state": "lost", "ended": False}]
    collected = await client.post("/weights/collect", json={}, headers=HERE)
    assert (await collected.get_json())["nodes"] == [
        {"node": "n1", "items": 1, "bytes": 5, "freed_bytes": 0, "kept": ["in use"]}
    ]
    assert script.asked == [
        ("weights",),
        ("pull_weights", "hf:o/r/f", ("n1", "n2")),
        ("pull_weights", "hf:o/r/f", ()),
        ("pull", 7),
        ("collect_weights",),
    ]
    assert (await client.post("/weights/collect", json={"all": True}, headers=HERE)).status_code == 400
    assert (await client.get("/weights/pull/x", headers=HERE)).status_code == 404
