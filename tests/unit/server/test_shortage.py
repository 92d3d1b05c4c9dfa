"""What anybody may be told of a model that has no place."""

from __future__ import annotations

import pytest

from llmgw.core.rejection import Reason
from llmgw.server.shortage import tell_shortage

KINDS = {
    Reason.NOT_ENOUGH_GPUS: "not enough free GPUs",
    Reason.NOT_ENOUGH_GPU_MEMORY: "not enough free GPU memory",
    Reason.NOT_ENOUGH_MEMORY: "not enough free memory",
    Reason.NOT_ENOUGH_DISK: "not enough free disk space",
    Reason.BACKING_OFF: "it failed a short while ago",
}


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_is_told_by_its_kind_and_what_an_operator_did_is_not(reason: Reason) -> None:
    assert tell_shortage([reason]) == KINDS.get(reason, "no machine that can run it is available")


def test_what_is_short_is_told_before_all_else() -> None:
    others = [Reason.CORDONED, Reason.BACKING_OFF, Reason.NO_ENGINE]
    assert tell_shortage([*others, Reason.NOT_ENOUGH_MEMORY]) == "not enough free memory"
    both = [Reason.NOT_ENOUGH_MEMORY, Reason.CORDONED, Reason.NOT_ENOUGH_GPUS]
    assert tell_shortage(both) == "not enough free GPUs or memory"
    assert tell_shortage([*both, Reason.NOT_ENOUGH_GPU_MEMORY]) == "not enough free GPUs, GPU memory or memory"
    assert tell_shortage([]) == "no machine that can run it is available"
