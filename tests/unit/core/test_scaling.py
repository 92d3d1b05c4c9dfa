from __future__ import annotations

import pytest

from llmgw.core.model import Model, ModelName, Scaling
from llmgw.core.scaling import Failures, backoff_seconds, fail, wanted


@pytest.mark.parametrize(
    ("least", "most", "used", "settled", "replicas"),
    [
        (0, 0, False, 0, 0),
        (0, 0, True, 3, 0),
        (0, 1, False, 0, 0),
        (0, 3, False, 2, 0),
        (0, 1, True, 0, 1),
        (0, 3, True, 2, 2),
        (0, 3, True, 9, 3),
        (1, 1, False, 0, 1),
        (1, 3, True, 0, 1),
        (1, 3, False, 2, 2),
        (2, 3, True, 9, 3),
        (3, 2, False, 0, 2),
    ],
)
def test_how_many_replicas_are_wanted(least: int, most: int, used: bool, settled: int, replicas: int) -> None:
    model = Model(name=ModelName("m"), source="/m.gguf", scaling=Scaling(min=least, max=most))
    assert wanted(model, used=used, settled=settled) == replicas


def test_the_wait_doubles_from_five_seconds_to_five_minutes() -> None:
    assert [backoff_seconds(count) for count in range(1, 9)] == [5, 10, 20, 40, 80, 160, 300, 300]
    assert backoff_seconds(1_000_000) == 300


def test_failures_in_a_row_are_counted() -> None:
    first = fail(None, 0.0, 100.0)
    assert first == Failures(count=1, until=105.0)
    assert fail(first, 599.0, 200.0) == Failures(count=2, until=210.0)


def test_ten_minutes_of_health_begin_a_new_row() -> None:
    assert fail(Failures(count=6, until=50.0), 600.0, 1000.0) == Failures(count=1, until=1005.0)
