"""What anybody may be told of a model that has no place now: by kind, and not a word on any node or operator."""

from __future__ import annotations

from collections.abc import Collection

from llmgw.core.placement import Rejected, Verdict
from llmgw.core.rejection import Reason

# Of which there would be enough if others did not have it.
_LACKS = {
    Reason.NOT_ENOUGH_GPUS: "GPUs",
    Reason.NOT_ENOUGH_GPU_MEMORY: "GPU memory",
    Reason.NOT_ENOUGH_MEMORY: "memory",
    Reason.NOT_ENOUGH_DISK: "disk space",
}


def find_shortage(verdict: Verdict | None) -> Rejected | None:
    """Why a model has no place now, where that is what it waits for, and not for the next try where it has failed."""
    waits = isinstance(verdict, Rejected) and Reason.BACKING_OFF not in verdict.reasons()
    return verdict if isinstance(verdict, Rejected) and waits else None


def tell_shortage(reasons: Collection[Reason]) -> str:
    """Why no place was found, in words that follow a colon; ``llmgw ctl explain-placement`` tells of each node."""
    lacks = [what for reason, what in _LACKS.items() if reason in reasons]
    if lacks:
        *first, last = lacks
        return f"not enough free {', '.join(first)} or {last}" if first else f"not enough free {last}"
    if Reason.BACKING_OFF in reasons:
        return "it failed a short while ago"
    return "no machine that can run it is available"
