"""What operators have asked nodes to fetch, and what became of it on each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from llmgw.core.node import NodeId
from llmgw.core.weights import Fetch, NodeWeights, Phase, Pull

# Whoever follows one asks every second or two; of those before these nobody asks any more.
KEPT = 64
_ENDS = frozenset({Phase.READY, Phase.FAILED})


@dataclass(slots=True, eq=False)
class Asked:
    """A source that these nodes are to have the newest commit of; ``ended`` says how it went on those where it is
    over."""

    number: int
    source: str
    nodes: tuple[NodeId, ...]
    ended: dict[NodeId, Fetch] = field(default_factory=dict)


class Pulls:
    """The last ones, by number. On a node a later one of the same source takes the place of an earlier one, and its end
    is the end of both."""

    def __init__(self) -> None:
        self._asked: dict[int, Asked] = {}
        self._open: dict[NodeId, dict[str, Pull]] = {}

    def add(self, number: int, source: str, nodes: Iterable[NodeId]) -> Asked:
        asked = self._asked[number] = Asked(number, source, tuple(nodes))
        for node in asked.nodes:
            self._open.setdefault(node, {})[source] = Pull(number=number, source=source)
        # Those that go on can still be asked for, however many there are.
        over = [each for each in self._asked.values() if len(each.ended) == len(each.nodes)]
        for each in over[: max(len(over) - KEPT, 0)]:
            del self._asked[each.number]
        return asked

    def find(self, number: int) -> Asked | None:
        return self._asked.get(number)

    def of(self, node: NodeId) -> tuple[Pull, ...]:
        """Those that a node is still to carry out."""
        return tuple(sorted(self._open.get(node, {}).values(), key=lambda pull: pull.number))

    def sources(self) -> frozenset[str]:
        """What is still to be fetched somewhere."""
        return frozenset(source for pulls in self._open.values() for source in pulls)

    def take(self, node: NodeId, weights: NodeWeights) -> bool:
        """Note what a node says; whether it has less to carry out now."""
        pulls = self._open.get(node)
        ends = []
        for fetch in weights.fetches if pulls else ():
            pull = pulls.get(fetch.source) if pulls is not None else None
            if pull is not None and fetch.pull == pull.number and fetch.phase in _ENDS:
                ends.append(fetch)
        for fetch in ends:
            self._end(node, fetch)
        return bool(ends)

    def forget(self, node: NodeId) -> None:
        """It was removed: what it still had to carry out it never will."""
        for source in tuple(self._open.get(node, ())):
            self._end(node, Fetch(source=source, phase=Phase.FAILED, cause=f"{node} was removed"))

    def _end(self, node: NodeId, fetch: Fetch) -> None:
        pulls = self._open[node]
        number = pulls.pop(fetch.source).number
        if not pulls:
            del self._open[node]
        for asked in self._asked.values():
            if asked.source == fetch.source and asked.number <= number and node in asked.nodes:
                asked.ended.setdefault(node, fetch)
