"""What an operator does with weights, on a real fleet whose nodes say what they are told to."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.admin.management import Refused
from llmgw.admin.views import NodeCollected, NodePull, NodeState
from llmgw.core.events import CatalogChanged, NodeLost, NodeRegistered, WeightsReported
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, Profile
from llmgw.core.node import EngineFound, Node, NodeId
from llmgw.core.weights import Cached, Collected, Fetch, NodeWeights, Phase, WeightsOrder
from llmgw.counters import Counters
from llmgw.server.scheduler import Scheduler
from llmgw.server.supplying import Supplying
from llmgw.server.weights import Weights

SOURCE = "hf:org/repo/a.gguf"
N1, N2, N3, N4 = map(NodeId, ("n1", "n2", "n3", "n4"))
GB = 1_000_000_000


@dataclass
class Bench:
    scheduler: Scheduler
    weights: Weights
    supplying: Supplying
    node: Node
    states: dict[NodeId, NodeState] = field(default_factory=dict)
    told: dict[NodeId, WeightsOrder] = field(default_factory=dict)

    async def bring(self, name: NodeId, *, follows: bool = True, **facts: Any) -> None:
        node = replace(self.node, id=name, **facts)
        await self.scheduler.settle(NodeRegistered(node=node))
        self.weights.heed(NodeRegistered(node=node))
        self.states[name] = NodeState.READY
        if follows:
            self.weights.follow(name, lambda order: self.told.update({name: order}))

    def say(self, name: NodeId, weights: NodeWeights) -> None:
        self.weights.heed(WeightsReported(node=name, weights=weights))

    async def pull(self, source: str, *nodes: str) -> Any:
        return await self.supplying.pull(source, nodes, states=self.states)

    async def refusal(self, source: str, *nodes: str) -> tuple[int, str, str]:
        with pytest.raises(Refused) as caught:
            await self.pull(source, *nodes)
        return caught.value.status, caught.value.code, str(caught.value)


@pytest.fixture
def serving(node: Node, a_model: Callable[..., Model]) -> Callable[..., Any]:
    @asynccontextmanager
    async def begin(*models: Model) -> AsyncIterator[Bench]:
        scheduler = Scheduler(Fleet())
        async with trio.open_nursery() as nursery:
            await nursery.start(scheduler.serve)
            await scheduler.settle(CatalogChanged(models=models or (replace(a_model(), source=SOURCE),)))
            weights = Weights(scheduler, counters=Counters())
            await nursery.start(weights.serve)
            yield Bench(scheduler, weights, Supplying(scheduler, weights), node)
            nursery.cancel_scope.cancel()

    return begin


async def test_it_is_fetched_where_it_is_said_and_told_how_far_it_is(serving: Callable[..., Any]) -> None:
    async with serving() as bench:
        await bench.bring(N1)
        await bench.bring(N2)
        view = await bench.pull("https://h/b.gguf?token=x", "n1", "n2", "n1")
        assert (view.source, view.nodes) == (
            "https://h/b.gguf",
            (NodePull(node=N1, state=NodeState.READY), NodePull(node=N2, state=NodeState.READY)),
        )
        fetch = Fetch(source="https://h/b.gguf?token=x", phase=Phase.FETCHING, done_bytes=5, pull=view.number)
        bench.say(N1, NodeWeights(fetches=(replace(fetch, phase=Phase.READY),)))
        bench.say(N2, NodeWeights(fetches=(fetch,)))
        bench.states[N2] = NodeState.SILENT
        first, second = bench.supplying.find_pull(view.number, states=bench.states).nodes
        assert first.fetch is not None
        assert second.fetch is not None
        assert (first.ended, first.fetch.phase, first.fetch.source) == (True, Phase.READY, "https://h/b.gguf")
        assert (second.ended, second.fetch.done_bytes, second.state) == (False, 5, NodeState.SILENT)
        with pytest.raises(Refused, match="nothing is known of order 1"):
            bench.supplying.find_pull(1, states=bench.states)


async def test_without_a_word_it_is_fetched_where_a_model_of_it_could_run(
    serving: Callable[..., Any], a_model: Callable[..., Model]
) -> None:
    async with serving(replace(a_model(gb=12.0), source=SOURCE)) as bench:
        # n1 gets the replica, and n2 has no room at the moment; n3 has no such engine; n4 is away
        await bench.bring(N1)
        await bench.bring(N2, memory_foreign_gb=10.0)
        await bench.bring(N3, engines=(EngineFound(engine="f", program=("f",)),))
        await bench.bring(N4)
        bench.states[N4] = NodeState.LOST
        assert [each.node for each in (await bench.pull(SOURCE)).nodes] == [N1, N2]
        assert [each.node for each in (await bench.pull("hf:org/repo/other.gguf")).nodes] == [N1, N2, N3]


async def test_where_no_node_can_run_it_somebody_has_to_say_which(
    serving: Callable[..., Any], a_model: Callable[..., Model]
) -> None:
    model = replace(a_model(), source=SOURCE, profiles=(Profile(name="p", engine="none"),))
    async with serving(model) as bench:
        assert await bench.refusal(SOURCE) == (409, "no_node", "no node is ready that could fetch it")
        await bench.bring(N1)
        assert await bench.refusal(SOURCE) == (
            409,
            "no_node",
            "no node that is ready could run tiny: say which are to have it (--node)",
        )
        assert [each.node for each in (await bench.pull(SOURCE, "n1")).nodes] == [N1]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/m.gguf", "is a path: llmgw checks it and never copies it"),
        ("org/repo", "name files of it, as hf:org/repo/FILE or 'hf:org/repo/*'"),
        ("s3://bucket/m.gguf", "s3: is no scheme that is fetched"),
        ("hf:org/repo", "names no file of org/repo"),
        ("", "no source is named: write hf:org/repo/FILE"),
        ("hf:org/repo/" + "x" * 2000, "the source is 2012 characters long, and 2000 are the most"),
        ("hf:org/repo/a\nb.gguf", "hf:org/repo/a\\nb.gguf: holds \\n, which nobody can see"),
        ("/a\nb.gguf", "/a\\nb.gguf is a path"),
        ("https://h:99999/x.gguf?sig=x", "https://h:99999/x.gguf: 99999 is no port"),
    ],
)
async def test_what_nobody_fetches_is_refused(serving: Callable[..., Any], source: str, says: str) -> None:
    async with serving() as bench:
        status, code, text = await bench.refusal(source)
        assert (status, code) == (400, "invalid_source")
        assert says in text


async def test_a_node_that_can_not_be_told_is_refused(serving: Callable[..., Any]) -> None:
    async with serving() as bench:
        await bench.bring(N1, follows=False)
        bench.states[N2] = NodeState.SILENT
        assert await bench.refusal(SOURCE, "n1") == (
            409,
            "agent_outdated",
            "n1 can't be told what to fetch: update llmgw there",
        )
        assert (await bench.refusal(SOURCE, "n2"))[1:] == ("node_away", "n2 is silent: it can't be told anything now")
        assert (await bench.refusal(SOURCE, "n3"))[:2] == (404, "unknown_node")


async def test_what_nobody_wants_is_removed_where_a_node_can_be_told(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        old = Cached(source="hf:org/repo/old.gguf", commit="c1", size_bytes=GB, fetched_at=1.0)
        wanted = replace(old, source=SOURCE)
        for name in (N1, N2, N3):
            await bench.bring(name, follows=name != N3)
            # (fetched at another moment it lies in another folder)
            own = tuple(replace(each, fetched_at=float(name[1:])) for each in (old, wanted))
            bench.say(name, NodeWeights(cached=own))
        bench.states[N2] = NodeState.LOST
        found: list[Any] = []
        ordered = trio.Event()
        bench.weights.follow(N1, lambda order: ordered.set() if order.collect is not None else None)

        async def collect() -> None:
            found.append(await bench.supplying.collect(states=bench.states))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect)
            # (what is free is found in a thread, whose time no clock of a test knows)
            await ordered.wait()
            order = bench.told[N1].collect
            assert order is not None
            assert order.items == ((old.source, "c1"),)
            collected = Collected(number=order.number, freed_bytes=GB, kept=("a link",))
            bench.say(N1, NodeWeights(cached=(wanted,), collected=collected))
        assert found[0].nodes == (
            NodeCollected(node=N1, items=1, bytes=GB, freed_bytes=GB, kept=("a link",)),
            NodeCollected(node=N2, items=1, bytes=GB, why="it is lost: nothing is removed there"),
            NodeCollected(node=N3, items=1, bytes=GB, why="its agent is too old for this"),
        )
        assert bench.told[N2].collect is None


async def test_what_a_model_names_by_the_time_it_was_looked_up_is_not_removed(
    serving: Callable[..., Any], autojump_clock: MockClock, a_model: Callable[..., Model]
) -> None:
    async with serving() as bench:
        old = Cached(source="hf:org/repo/old.gguf", commit="c1", size_bytes=GB, fetched_at=1.0)
        added = CatalogChanged(models=(replace(a_model(), source=old.source),))

        class Kept(tuple[Cached, ...]):
            """While a thread looks at it a model is added."""

            def __iter__(self) -> Iterator[Cached]:
                if threading.current_thread() is not threading.main_thread():
                    trio.from_thread.run(bench.scheduler.settle, added)
                return super().__iter__()

        await bench.bring(N1)
        bench.say(N1, NodeWeights(cached=Kept((old,))))
        assert (await bench.supplying.collect(states=bench.states)).nodes == ()


async def test_who_does_not_answer_is_told_as_such(serving: Callable[..., Any], autojump_clock: MockClock) -> None:
    async with serving() as bench:
        await bench.bring(N1)
        old = Cached(source="hf:org/repo/old.gguf", commit="c1", size_bytes=GB, fetched_at=1.0)
        bench.say(N1, NodeWeights(cached=(old,)))
        (node,) = (await bench.supplying.collect(states=bench.states)).nodes
        assert node.why == "it has not answered within 60 s, and nothing is removed there any more"
        assert node.freed_bytes == 0


@pytest.mark.parametrize(
    ("does", "freed", "why"),
    [
        ({"begin"}, None, "it has not answered within 60 s, and nothing is removed there any more"),
        ({"begin", "go"}, None, "it is lost"),
        ({"go"}, 0, "it is lost: nothing is removed there"),
    ],
)
async def test_of_one_that_had_begun_and_gives_no_answer_it_is_not_known_what_is_gone(
    serving: Callable[..., Any],
    autojump_clock: MockClock,
    does: set[str],
    freed: int | None,
    why: str,
) -> None:
    async with serving() as bench, trio.open_nursery() as nursery:
        await bench.bring(N1)
        bench.say(
            N1, NodeWeights(cached=(Cached(source="hf:org/repo/old.gguf", commit="c1", size_bytes=GB, fetched_at=1.0),))
        )
        ordered = trio.Event()
        bench.weights.follow(N1, lambda order: ordered.set() if order.collect is not None else None)

        async def go_on() -> None:
            await ordered.wait()
            if "begin" in does:
                bench.weights.heed(WeightsReported(node=N1, weights=NodeWeights(asks="m1")))
            if "go" in does:
                bench.weights.heed(NodeLost(node=N1))

        nursery.start_soon(go_on)
        (node,) = (await bench.supplying.collect(states=bench.states)).nodes
        assert (node.freed_bytes, node.why) == (freed, why)
