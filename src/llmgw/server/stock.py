"""Which weights lie where and how far others are, as the operator port shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from llmgw.admin.views import (
    Concern,
    FetchingView,
    HoldingView,
    NodeState,
    NodeWeightsView,
    StoredState,
    StoredView,
    WeightsView,
)
from llmgw.core.model import Model
from llmgw.core.node import NodeId
from llmgw.core.picture import FleetStatistics, NodeStatistics
from llmgw.core.replica import ShardState
from llmgw.core.sharing import ACTIVE, count_once, find_copies, find_free
from llmgw.core.weights import Cached, Fetch, NodeWeights, Phase, list_fetched, list_sources, parse_source
from llmgw.host.weights.errors import show_url
from llmgw.server.fetches import STALL_SECONDS, tell_cause

# What somebody waits for, or has to do something about. One that is READY is among what is stored.
_SHOWN = ACTIVE | {Phase.QUEUED, Phase.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """What the nodes have said of weights, the sources that are ``wanted``, and what runs on the ``nodes``: all as it
    was at one moment."""

    known: Mapping[NodeId, NodeWeights]
    wanted: frozenset[str]
    nodes: tuple[NodeStatistics, ...] = ()

    def find_free(self) -> Mapping[NodeId, tuple[Cached, ...]]:
        """What could be freed, by node."""
        return find_free(self.wanted, self.known, _find_running(self.nodes))

    def find_freed(self, able: Collection[NodeId]) -> Mapping[NodeId, tuple[Cached, ...]]:
        """Which node is to free what: of several that have one folder one does, of those that are ``able``."""
        return count_once(self.find_free(), able)


def _find_running(nodes: Iterable[NodeStatistics]) -> Mapping[NodeId, frozenset[str]]:
    """The sources of all shards that are not known to have ended, by node: also where their model was removed, and
    where nobody hears of the node."""
    return {
        each.node.id: frozenset(
            list_fetched(
                shard.spec.model
                for replica in each.replicas
                for shard in replica.shards
                if shard.spec.node == each.node.id and shard.state is not ShardState.ENDED
            )
        )
        for each in nodes
        if each.replicas
    }


def show_fetch(fetch: Fetch | None) -> Fetch | None:
    """A fetch as it may be shown: an address may hold what opens it."""
    return None if fetch is None else replace(fetch, source=show_url(fetch.source))


def show_model(model: Model) -> Model:
    """A definition as it may be shown."""
    return replace(
        model,
        source=show_url(model.source),
        mmproj=None if model.mmproj is None else show_url(model.mmproj),
        loras=tuple(replace(lora, source=show_url(lora.source)) for lora in model.loras),
    )


def view_weights(stock: Stock, models: Iterable[Model], states: Mapping[NodeId, NodeState]) -> WeightsView:
    """The weights on all nodes, by node and source."""
    makes: dict[str, list[str]] = {}
    for model in models:
        for source in list_sources(model):
            makes.setdefault(source, []).append(model.name)
    free, copies = stock.find_free(), find_copies(stock.known)
    return WeightsView(
        nodes=tuple(
            _view_node(
                node,
                states.get(node, NodeState.LOST),
                stock.known.get(node),
                free.get(node, ()),
                makes,
                shared_with=sorted(frozenset[NodeId]().union(*copies.get(node, {}).values())),
            )
            for node in sorted({*states, *stock.known})
        )
    )


def _view_node(
    node: NodeId,
    state: NodeState,
    weights: NodeWeights | None,
    free: Collection[Cached],
    makes: Mapping[str, list[str]],
    *,
    shared_with: Iterable[NodeId],
) -> NodeWeightsView:
    if weights is None:
        return NodeWeightsView(node=node, state=state)
    # (a thousand nodes with two hundred of them each are looked at in one go)
    is_free = frozenset((each.source, each.commit) for each in free)
    return NodeWeightsView(
        node=node,
        state=state,
        stored=tuple(
            StoredView(
                source=show_url(each.source),
                commit=each.commit,
                size_bytes=each.size_bytes,
                state=_judge(each, is_free),
                fetched_at=each.fetched_at,
                whole=each.whole,
                models=tuple(makes.get(each.source, ())),
                wrong=each.wrong,
                remedy=_advise(each, node, is_free),
            )
            for each in sorted(weights.cached, key=lambda each: (each.source, -each.fetched_at))
        ),
        fetches=tuple(fetch for fetch in map(show_fetch, _list_shown(weights)) if fetch is not None),
        free_bytes=sum(each.size_bytes for each in free),
        seed=weights.seed,
        shared=weights.shared,
        shared_with=tuple(shared_with),
        seen=weights.seen,
    )


def _list_shown(weights: NodeWeights) -> Iterator[Fetch]:
    return (fetch for fetch in weights.fetches if fetch.phase in _SHOWN)


def _judge(each: Cached, free: Collection[tuple[str, str]]) -> StoredState:
    if each.in_use:
        return StoredState.IN_USE
    return StoredState.FREE if (each.source, each.commit) in free else StoredState.WANTED


def _advise(each: Cached, node: NodeId, free: Collection[tuple[str, str]]) -> str | None:
    """What to do about a commit that is damaged on its disk."""
    if each.wrong is None:
        return None
    pull = f"`llmgw ctl weights pull {show_url(each.source)} --node {node}`"
    match _judge(each, free):
        case StoredState.IN_USE:
            return f"stop the model that runs by it there (llmgw ctl stop), then {pull}, and load it again"
        case StoredState.WANTED:
            return f"{pull}, or load it: what of it is right is kept, and the rest is fetched anew"
        case StoredState.FREE:
            return None


def sum_holdings(fleet: FleetStatistics) -> Mapping[str, HoldingView]:
    """Of each fabric which models its nodes hold, as far as anybody knows: a model of which nothing is fetched, and
    that no node at all is known to hold, may lie anywhere."""
    made = [(each.model.name, frozenset(list_sources(each.model))) for each in fleet.models]
    counts: dict[str, Counter[str]] = {}
    nodes = Counter[str]()
    anywhere = Counter[str]()
    for each in fleet.nodes:
        if each.lost:
            continue
        held = [name for name, sources in made if sources <= each.host.holds]
        anywhere.update(held)
        for fabric in {found.name for found in each.node.fabrics} or {""}:
            nodes[fabric] += 1
            counts.setdefault(fabric, Counter()).update(held)
    fetched = {name for name, sources in made if any(parse_source(source).is_fetched for source in sources)}
    return {
        fabric: HoldingView(
            nodes=nodes[fabric],
            models={name: counts[fabric][name] for name, _ in made if counts[fabric][name]},
            none=tuple(name for name, _ in made if not counts[fabric][name] and (anywhere[name] or name in fetched)),
        )
        for fabric in sorted(counts)
    }


def sum_fetching(known: Mapping[NodeId, NodeWeights], away: Collection[NodeId]) -> tuple[FetchingView, ...]:
    """What is on its way, by source; without the nodes that are away, which nobody hears of."""
    found: dict[str, list[Fetch]] = {}
    for fetch in _list_active(known, away):
        found.setdefault(fetch.source, []).append(fetch)
    return tuple(_sum(show_url(source), fetches) for source, fetches in sorted(found.items()))


def _sum(source: str, fetches: list[Fetch]) -> FetchingView:
    totals = [fetch.total_bytes for fetch in fetches if fetch.total_bytes is not None]
    rates = [fetch.rate for fetch in fetches if fetch.rate is not None]
    left = [fetch.left_seconds for fetch in fetches if fetch.left_seconds is not None]
    return FetchingView(
        source=source,
        nodes=len(fetches),
        done_bytes=sum(fetch.done_bytes for fetch in fetches),
        total_bytes=sum(totals) if len(totals) == len(fetches) else None,
        rate=sum(rates) if rates else None,
        # (the last of them is what somebody waits for)
        left_seconds=max(left) if len(left) == len(fetches) else None,
        stalled=sum(map(_is_stalled, fetches)),
        origin_bytes=sum(fetch.origin_bytes for fetch in fetches),
        peer_bytes=sum(fetch.peer_bytes for fetch in fetches),
    )


def find_stalls(known: Mapping[NodeId, NodeWeights], away: Collection[NodeId]) -> Iterator[Concern]:
    """The fetches of which nothing has come for a while. No figures that always move."""
    for node, weights in sorted(known.items()):
        for fetch in weights.fetches if node not in away else ():
            if fetch.phase in ACTIVE | {Phase.QUEUED} and _is_stalled(fetch):
                shown, why = show_url(fetch.source), tell_cause(fetch)
                message = f"nothing of {shown} has come for more than {STALL_SECONDS:g} s{why}"
                yield Concern(kind="node", name=node, message=message)


def _list_active(known: Mapping[NodeId, NodeWeights], away: Collection[NodeId]) -> Iterator[Fetch]:
    for node, weights in known.items():
        if node not in away:
            yield from (fetch for fetch in weights.fetches if fetch.phase in ACTIVE)


def _is_stalled(fetch: Fetch) -> bool:
    return fetch.stalled_seconds is not None and fetch.stalled_seconds >= STALL_SECONDS
