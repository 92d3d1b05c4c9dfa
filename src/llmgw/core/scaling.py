"""How many replicas a model is to have, and how long a place that failed is left alone."""

from __future__ import annotations

from dataclasses import dataclass

from llmgw.core.model import Model

FIRST_WAIT_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 300.0

# An engine that served this long and then ended is a new fault, not the next of a row.
HEALTHY_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How often in a row a model failed on a node, until when it is not tried there again, and why it last failed."""

    count: int
    until: float
    cause: str = ""


def wanted(model: Model, *, used: bool, settled: int) -> int:
    """How many replicas there should be: as many as the load is worth (``settled``), within what the model says. One
    that loads on demand has none unless it is ``used``: somebody asks for it, or has of late."""
    scaling = model.scaling
    if scaling.on_demand:
        return min(max(1, settled), scaling.max) if used else 0
    return min(max(scaling.min, settled), scaling.max)


def fail(earlier: Failures | None, ready_seconds: float, now: float) -> Failures:
    """One more failure, of a replica that had been ready for ``ready_seconds`` (0 when it never was)."""
    again = earlier is not None and ready_seconds < HEALTHY_SECONDS
    count = earlier.count + 1 if earlier is not None and again else 1
    return Failures(count=count, until=now + backoff_seconds(count))


def backoff_seconds(count: int) -> float:
    """The wait after the ``count``-th failure in a row, from 1 up: doubling to a ceiling."""
    # The exponent is bounded first: a model that fails for a year must not overflow a float.
    return min(FIRST_WAIT_SECONDS * 2.0 ** min(count - 1, 10), LONGEST_WAIT_SECONDS)
