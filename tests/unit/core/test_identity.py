from __future__ import annotations

from llmgw.core.identity import ANYONE, Caller


def test_callers_are_told_apart_by_their_id() -> None:
    assert Caller(id="anyone") == ANYONE
    assert Caller(id="somebody") != ANYONE
