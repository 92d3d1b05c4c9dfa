"""What an operator does with weights: has nodes fetch a source, and remove what nobody wants any more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import trio

from llmgw.admin.management import Refused
from llmgw.admin.views import CollectedView, NodeCollected, NodePull, NodeState, PullView
from llmgw.core.model import Model
from llmgw.core.node import NodeId
from llmgw.core.picture import FleetStatistics
from llmgw.core.placement import explain
from llmgw.core.rejection import Reason
from llmgw.core.sharing import ACTIVE
from llmgw.core.weights import Cached, Fetch, Form, Phase, Source, list_sources, parse_source
from llmgw.host.weights.errors import show_url
from llmgw.server.pulls import Asked
from llmgw.server.scheduler import Scheduler
from llmgw.server.stock import Stock, show_fetch
from llmgw.server.weights import COLLECT_SECONDS, Collecting, Weights

# What may be over in an hour: a node that only lacks this now could run the model.
PASSING = frozenset(
    {
        Reason.NOT_ENOUGH_GPUS,
        Reason.NOT_ENOUGH_GPU_MEMORY,
        Reason.NOT_ENOUGH_MEMORY,
        Reason.NOT_ENOUGH_NODES,
        Reason.FABRIC_DOWN,
        Reason.BACKING_OFF,
    }
)

# More than any address has.
MAX_SOURCE_CHARS = 2000

States = Mapping[NodeId, NodeState]


class Supplying:
    """The acts upon weights. ``states`` of the nodes are those of the moment of the act."""

    def __init__(self, scheduler: Scheduler, weights: Weights) -> None:
        self._scheduler = scheduler
        self._weights = weights

    def look(self, fleet: FleetStatistics | None = None) -> Stock:
        """What is known of weights now; ``fleet``: where the caller has looked at that already."""
        fleet = fleet or self._scheduler.fleet.statistics()
        return Stock(known=dict(self._weights.known), wanted=self._weights.wanted, nodes=fleet.nodes)

    # -- fetch

    async def pull(self, text: str, nodes: Sequence[str], *, states: States) -> PullView:
        """Have these nodes fetch a source, or those that could run a model of it, or all that are ready where there is
        none. Refused for what nobody fetches, and for nodes that can't."""
        _check_length(text)
        source = parse_source(text)
        _check_fetched(source)
        named = tuple(dict.fromkeys(NodeId(node) for node in nodes))
        for node in named:
            self._check_node(node, states)
        asked = self._weights.pull(text, named or await self._choose(text, states))
        return self._view(asked, states)

    def find_pull(self, number: int, *, states: States) -> PullView:
        """How far it is. Refused where there is none of this number: it is long over, or an earlier server's."""
        asked = self._weights.find_pull(number)
        if asked is None:
            message = f"nothing is known of order {number}: `llmgw ctl weights` shows what the nodes have and fetch"
            raise Refused(message, status=404, code="unknown_pull")
        return self._view(asked, states)

    def _check_node(self, node: NodeId, states: States) -> None:
        state = states.get(node)
        if state is None:
            raise Refused(f"there is no node {node}", status=404, code="unknown_node")
        if state is not NodeState.READY:
            raise Refused(f"{node} is {state}: it can't be told anything now", status=409, code="node_away")
        if not self._weights.takes_orders(node):
            message = f"{node} can't be told what to fetch: update llmgw there"
            raise Refused(message, status=409, code="agent_outdated")

    async def _choose(self, source: str, states: States) -> tuple[NodeId, ...]:
        able = {node for node, state in states.items() if state is NodeState.READY and self._weights.takes_orders(node)}
        if not able:
            raise Refused("no node is ready that could fetch it", status=409, code="no_node")
        fleet = self._scheduler.fleet
        models = [model for model in fleet.catalog if source in list_sources(model)]
        if not models:
            return tuple(sorted(able))
        hosts, now = fleet.hosts(), trio.current_time()

        def find() -> set[NodeId]:
            found = (explain(model, hosts, {}, now).candidates for model in models)
            return {
                node
                for candidates in found
                for candidate in candidates
                for node in candidate.nodes
                if all(no.reason in PASSING for no in candidate.rejections if no.node == node)
            }

        # With many nodes it takes longer than a turn may.
        chosen = tuple(sorted(able & await trio.to_thread.run_sync(find)))
        if not chosen:
            message = f"no node that is ready could run {_name_all(models)}: say which are to have it (--node)"
            raise Refused(message, status=409, code="no_node")
        return chosen

    def _view(self, asked: Asked, states: States) -> PullView:
        return PullView(
            number=asked.number,
            source=show_url(asked.source),
            nodes=tuple(
                NodePull(
                    node=node,
                    state=states.get(node, NodeState.LOST),
                    ended=node in asked.ended,
                    fetch=show_fetch(asked.ended.get(node) or self._find_fetch(node, asked)),
                )
                for node in asked.nodes
            ),
        )

    def _find_fetch(self, node: NodeId, asked: Asked) -> Fetch | None:
        """The one that carries it out: what ended before it was asked for is another."""
        weights = self._weights.known.get(node)
        found = weights.fetches if weights is not None else ()
        return next(
            (each for each in found if each.source == asked.source and each.phase in ACTIVE | {Phase.QUEUED}), None
        )

    # -- remove

    async def collect(self, *, states: States) -> CollectedView:
        """Have all nodes remove what nobody wants, and say what became of it; it waits for their answers."""
        all_free: Mapping[NodeId, tuple[Cached, ...]] = {}
        able = frozenset(node for node in states if self._is_asked(node, states))

        async def find() -> Mapping[NodeId, tuple[Cached, ...]]:
            nonlocal all_free
            while True:
                stock = self.look()
                # With many nodes it takes longer than a turn may.
                all_free = await trio.to_thread.run_sync(stock.find_freed, able)
                if self._weights.wanted == stock.wanted:
                    # (what a shard has begun to use meanwhile its node itself keeps)
                    break
            return {node: found for node, found in all_free.items() if node in able}

        collecting = await self._weights.collect(find)
        return CollectedView(
            nodes=tuple(
                _view_collected(node, found, collecting, _tell_silence(node, collecting, states))
                for node, found in sorted(all_free.items())
            )
        )

    def _is_asked(self, node: NodeId, states: States) -> bool:
        return states.get(node) is NodeState.READY and self._weights.takes_orders(node)


def _check_length(text: str) -> None:
    if not text:
        why = "no source is named: write hf:org/repo/FILE, hf:org/repo/GLOB or https://…"
    elif len(text) > MAX_SOURCE_CHARS:
        why = f"the source is {len(text)} characters long, and {MAX_SOURCE_CHARS} are the most: is it one source?"
    else:
        return
    raise Refused(why, status=400, code="invalid_source")


def _check_fetched(source: Source) -> None:
    match source.form:
        case Form.PATH:
            shown = show_url(source.text)
            why = f"{shown} is a path: llmgw checks it and never copies it; put the file on the nodes yourself"
        case Form.REPOSITORY:
            why = (
                f"{source.text} is a repository, which the engine itself fetches when it is launched: name files of "
                f"it, as hf:{source.repo}/FILE or 'hf:{source.repo}/*'"
            )
        case Form.UNKNOWN:
            why = f"{show_url(source.text)}: {source.why}"
        case Form.HUB | Form.URL:
            return
    raise Refused(why, status=400, code="invalid_source")


def _tell_silence(node: NodeId, collecting: Collecting, states: States) -> str:
    if node in collecting.lost:
        # (what it has begun it may go on with for a moment: nobody can take it back)
        return "it is lost" if node in collecting.stands else "it is lost: nothing is removed there"
    if node in collecting.items:
        return f"it has not answered within {COLLECT_SECONDS:g} s, and nothing is removed there any more"
    state = states.get(node, NodeState.LOST)
    return "its agent is too old for this" if state is NodeState.READY else f"it is {state}: nothing is removed there"


def _view_collected(node: NodeId, found: Iterable[Cached], collecting: Collecting, silence: str) -> NodeCollected:
    sizes, answer = [each.size_bytes for each in found], collecting.answers.get(node)
    unanswered = None if node in collecting.stands else 0
    return NodeCollected(
        node=node,
        items=len(sizes),
        bytes=sum(sizes),
        freed_bytes=unanswered if answer is None else answer.freed_bytes,
        kept=() if answer is None else answer.kept,
        why=silence if answer is None else None,
    )


def _name_all(models: Iterable[Model]) -> str:
    return " or ".join(model.name for model in models)
