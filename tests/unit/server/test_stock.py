from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llmgw.admin.views import Concern, FetchingView, HoldingView, NodeState, StoredState
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Lora, Model, ModelName
from llmgw.core.node import FabricFound, Node, NodeId
from llmgw.core.picture import FleetStatistics, ModelStatistics, NodeStatistics
from llmgw.core.replica import Replica, ReplicaId, Shard, ShardId, ShardSpec, ShardState
from llmgw.core.weights import Cached, Fetch, NodeWeights, Phase
from llmgw.server.stock import Stock, find_stalls, show_fetch, show_model, sum_fetching, sum_holdings, view_weights

N1, N2, N3 = NodeId("n1"), NodeId("n2"), NodeId("n3")
SOURCE, SECRET = "hf:org/repo/a.gguf", "https://h/b.gguf?token=x"
GB = 1_000_000_000
FETCH = Fetch(
    source=SOURCE,
    phase=Phase.FETCHING,
    commit="c1",
    done_bytes=GB,
    total_bytes=2 * GB,
    rate=100e6,
    left_seconds=10.0,
    origin_bytes=GB,
    peer_bytes=2,
)


def kept(commit: str, at: float, *, source: str = SOURCE, in_use: bool = False) -> Cached:
    return Cached(source=source, commit=commit, size_bytes=GB, fetched_at=at, in_use=in_use)


# What is left of a fetch whose source nobody names any more.
HALF = replace(kept("half", 4.0, source="hf:org/repo/z.gguf"), whole=False)


def test_weights_are_in_use_wanted_or_can_be_freed(a_model: Callable[..., Model]) -> None:
    weights = NodeWeights(
        seed="10.0.0.1:1",
        cached=(
            kept("old", 1.0),
            kept("new", 2.0),
            kept("gone", 3.0, source=SECRET),
            kept("used", 0.5, in_use=True),
            HALF,
        ),
        fetches=(FETCH, replace(FETCH, phase=Phase.READY, source="x"), replace(FETCH, phase=Phase.FAILED, source="y")),
        seen=("/models/c.gguf",),
    )
    stock = Stock(known={N1: weights, N3: NodeWeights()}, wanted=frozenset({SOURCE}))
    view = view_weights(stock, [replace(a_model(), source=SOURCE)], {N1: NodeState.READY, N2: NodeState.LOST})
    first, second, third = view.nodes
    assert first.stored is not None
    assert [(each.source, each.commit, each.state, each.models) for each in first.stored] == [
        (SOURCE, "new", StoredState.WANTED, ("tiny",)),
        (SOURCE, "old", StoredState.FREE, ("tiny",)),
        (SOURCE, "used", StoredState.IN_USE, ("tiny",)),
        ("hf:org/repo/z.gguf", "half", StoredState.FREE, ()),
        ("https://h/b.gguf", "gone", StoredState.FREE, ()),
    ]
    assert [each.whole for each in first.stored] == [True, True, True, False, True]
    assert (first.free_bytes, first.seed, first.shared, first.seen) == (
        3 * GB,
        "10.0.0.1:1",
        False,
        ("/models/c.gguf",),
    )
    assert [fetch.phase for fetch in first.fetches] == [Phase.FETCHING, Phase.FAILED]
    assert (second.node, second.state, second.stored) == (N2, NodeState.LOST, None)
    assert (third.node, third.state, third.stored) == (N3, NodeState.LOST, ())


def test_what_is_damaged_is_told_with_what_to_do(a_model: Callable[..., Model]) -> None:
    damaged = replace(kept("bad", 2.0), whole=False, wrong="a.gguf is missing")
    for in_use, source, remedy in (
        (True, SOURCE, "stop the model that runs by it there (llmgw ctl stop), then `llmgw ctl weights pull "),
        (
            False,
            SOURCE,
            "`llmgw ctl weights pull hf:org/repo/a.gguf --node n1`, or load it: what of it is right is kept",
        ),
        (False, SECRET, None),
    ):
        weights = NodeWeights(cached=(replace(damaged, in_use=in_use, source=source),))
        stock = Stock(known={N1: weights}, wanted=frozenset({SOURCE}))
        ((stored,),) = (node.stored for node in view_weights(stock, [], {N1: NodeState.READY}).nodes)
        assert (stored.wrong, stored.whole) == ("a.gguf is missing", False)
        assert (stored.remedy or "").startswith(remedy or "")
        assert (stored.remedy is None) == (remedy is None)


def test_who_else_has_the_same_folder_is_told_and_one_of_them_frees_it() -> None:
    for is_shared in (True, False):
        one = NodeWeights(cached=(kept("gone", 3.0, source=SECRET),), shared=is_shared)
        other = NodeWeights(cached=(kept("gone", 3.5, source=SECRET),), shared=is_shared)
        stock = Stock(known={N1: one, N2: one, N3: other}, wanted=frozenset())
        view = view_weights(stock, [], dict.fromkeys((N1, N2, N3), NodeState.READY))
        assert [(each.free_bytes, each.shared_with) for each in view.nodes] == [(GB, ("n2",)), (GB, ("n1",)), (GB, ())]
        assert sorted(stock.find_freed({N2, N3})) == ["n2", "n3"]


def test_what_a_shard_runs_by_that_is_not_known_to_have_ended_is_wanted(
    node: Node, a_model: Callable[..., Model]
) -> None:
    here = NodeWeights(cached=(kept("c1", 1.0),))
    model = replace(a_model(), source=SOURCE)
    for state, frees in ((ShardState.STOPPING, []), (ShardState.ENDED, ["n2"])):
        spec = ShardSpec(
            id=ShardId("shd-1"), replica=ReplicaId("rep-1"), epoch=1, node=N1, model=model, profile=model.profiles[0]
        )
        shard = Shard(spec=spec, state=state, since=0.0)
        replica = Replica(
            id=spec.replica, model=model.name, profile="p", epoch=1, shards=(shard,), state=state, since=0.0
        )
        nodes = tuple(
            NodeStatistics(
                host=Host(node=replace(node, id=name), standing=standing), lost_at=None, revision=1, replicas=replicas
            )
            for name, standing, replicas in ((N1, Standing.LOST, (replica,)), (N2, Standing.READY, ()))
        )
        stock = Stock(known={N1: here, N2: here}, wanted=frozenset(), nodes=nodes)
        assert list(stock.find_freed({N2})) == frees


def test_what_opens_an_address_is_not_shown() -> None:
    found = show_fetch(replace(FETCH, source=SECRET))
    assert found is not None
    assert found.source == "https://h/b.gguf"
    assert show_fetch(None) is None


def test_a_definition_is_shown_without_what_opens_its_addresses(a_model: Callable[..., Model]) -> None:
    lora = Lora(name=ModelName("sql"), source=SECRET)
    found = show_model(replace(a_model(), source=SECRET, mmproj=SECRET, loras=(lora,)))
    assert {found.source, found.mmproj, found.loras[0].source} == {"https://h/b.gguf"}
    plain = replace(a_model(), source="hf:org/repo/x-?.gguf")
    assert show_model(plain) == plain


Holds = Callable[..., FleetStatistics]


@pytest.fixture
def holding(node: Node, a_model: Callable[..., Model]) -> Holds:
    """A fleet with models a (fetched), b and c (paths), on nodes that hold this on these fabrics."""

    def make(*nodes: tuple[str, tuple[str, ...], set[str], Standing]) -> FleetStatistics:
        sources = {"a": SOURCE, "b": "/b.gguf", "c": "/c.gguf"}
        models = [replace(a_model(name), name=name, source=source) for name, source in sources.items()]
        return FleetStatistics(
            nodes=tuple(
                NodeStatistics(
                    host=Host(
                        node=replace(node, id=name, fabrics=tuple(FabricFound(name=each) for each in fabrics)),
                        standing=standing,
                        holds=frozenset(holds),
                    ),
                    lost_at=None,
                    revision=1,
                    replicas=(),
                )
                for name, fabrics, holds, standing in nodes
            ),
            models=tuple(ModelStatistics(model=model, replicas=(), verdict=None) for model in models),
        )

    return make


def test_of_each_fabric_it_is_told_what_its_nodes_hold(holding: Holds) -> None:
    fleet = holding(
        ("n1", ("ib-a",), {SOURCE, "/b.gguf"}, Standing.READY),
        ("n2", ("ib-a",), {SOURCE}, Standing.SILENT),
        ("n3", ("ib-b",), set(), Standing.READY),
        ("n4", ("ib-b",), {SOURCE, "/b.gguf"}, Standing.LOST),
    )
    assert sum_holdings(fleet) == {
        "ib-a": HoldingView(nodes=2, models={"a": 2, "b": 1}),
        # (nobody is known to have c, which may lie anywhere)
        "ib-b": HoldingView(nodes=1, models={}, none=("a", "b")),
    }


def test_nodes_without_a_fabric_are_counted_together(holding: Holds) -> None:
    fleet = holding(("n1", (), {"/b.gguf"}, Standing.READY), ("n2", (), set(), Standing.READY))
    assert sum_holdings(fleet) == {"": HoldingView(nodes=2, models={"b": 1}, none=("a",))}


def test_what_is_on_its_way_is_added_up_by_source() -> None:
    slow = replace(FETCH, done_bytes=0, left_seconds=30.0, rate=None, stalled_seconds=61.0)
    known = {
        N1: NodeWeights(fetches=(FETCH, replace(FETCH, source=SECRET, total_bytes=None, left_seconds=None))),
        N2: NodeWeights(fetches=(slow, replace(FETCH, source="x", phase=Phase.FAILED))),
        N3: NodeWeights(fetches=(FETCH,)),
    }
    assert sum_fetching(known, away={N3}) == (
        FetchingView(
            source=SOURCE,
            nodes=2,
            done_bytes=GB,
            total_bytes=4 * GB,
            rate=100e6,
            left_seconds=30.0,
            stalled=1,
            origin_bytes=2 * GB,
            peer_bytes=4,
        ),
        FetchingView(source="https://h/b.gguf", nodes=1, done_bytes=GB, rate=100e6, origin_bytes=GB, peer_bytes=2),
    )


def test_what_has_stood_still_for_a_minute_needs_somebody() -> None:
    def stalled(seconds: float, **facts: Any) -> NodeWeights:
        return NodeWeights(fetches=(replace(FETCH, stalled_seconds=seconds, **facts),))

    known = {N1: stalled(59.0), N2: stalled(61.0), N3: stalled(500.0)}
    expected = [Concern(kind="node", name="n2", message=f"nothing of {SOURCE} has come for more than 60 s")]
    assert list(find_stalls(known, away={N3})) == expected
    assert len(list(find_stalls({N1: stalled(61.0, phase=Phase.QUEUED)}, away=()))) == 1
    assert list(find_stalls({N1: stalled(61.0, phase=Phase.FAILED)}, away=())) == []
    (concern,) = find_stalls({N1: stalled(61.0, cause="h answers 503")}, away=())
    assert concern.message == f"nothing of {SOURCE} has come for more than 60 s: h answers 503"


def test_what_can_be_freed_is_found_without_comparing_each_with_all(a_model: Callable[..., Model]) -> None:
    compared = 0

    class Counted(Cached):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

        __hash__ = Cached.__hash__

    cached = tuple(Counted(source=f"hf:o/r/{number}", commit="c", size_bytes=1, fetched_at=1.0) for number in range(40))
    stock = Stock(known={N1: NodeWeights(cached=cached)}, wanted=frozenset())
    (node,) = view_weights(stock, [a_model()], {N1: NodeState.READY}).nodes
    assert node.free_bytes == 40
    assert compared == 0
