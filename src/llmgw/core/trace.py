"""What was decided of late, and why: facts that are kept for whoever asks, and that nothing goes by."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from llmgw.core.model import ModelName
from llmgw.core.node import NodeId

KEPT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One answer of ``place``, at ``at`` seconds of the fleet's clock.

    ``replica`` and ``nodes`` are of one that was placed: by ``profile``, and ``why`` there. Of a refusal ``reasons``
    counts the nodes by reason, which ``why`` has in words.
    """

    at: float
    model: ModelName
    why: str
    replica: str | None = None
    profile: str | None = None
    nodes: tuple[NodeId, ...] = ()
    reasons: Mapping[str, int] = field(default_factory=dict)


class Trace:
    """The last decisions, the newest first."""

    __slots__ = ("_kept",)

    def __init__(self, kept: int = KEPT) -> None:
        self._kept: deque[Decision] = deque(maxlen=kept)

    def add(self, decision: Decision) -> None:
        """Keep it; where the last one about its model was the same refusal, in the place of that."""
        if decision.replica is None:
            last = next((each for each in self._kept if each.model == decision.model), None)
            if last is not None and last.replica is None and last.reasons == decision.reasons:
                self._kept.remove(last)
        self._kept.appendleft(decision)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._kept)

    def of(self, name: ModelName) -> tuple[Decision, ...]:
        """Those about one model."""
        return tuple(decision for decision in self._kept if decision.model == name)
