"""What only the shapes themselves decide; how they are refused is told of the endpoints."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.admin.reading import MOST_WAIT_SECONDS, Rollback, Since


def test_a_query_is_numbers_though_it_comes_as_text() -> None:
    since = msgspec.convert({"after": "12", "wait": "20", "model": "7"}, Since, strict=False)
    assert since == Since(after=12, wait=20, model="7")


@pytest.mark.parametrize("wait", ["-1", str(MOST_WAIT_SECONDS + 1), "1.5", "inf"])
def test_nobody_waits_for_ever(wait: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="wait"):
        msgspec.convert({"wait": wait}, Since, strict=False)


def test_definitions_are_numbered_from_1() -> None:
    with pytest.raises(msgspec.ValidationError, match="number"):
        msgspec.json.decode(b'{"model": "m", "number": 0}', type=Rollback)
