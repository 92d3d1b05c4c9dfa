"""The facts that pass between llmgw and a plugin."""

from __future__ import annotations

import pytest

from llmgw import engines
from llmgw.engines import BROKEN, LOADING, READY, HealthState, Load, types


def test_what_an_engine_does_not_say_is_none_and_never_zero() -> None:
    assert Load() == Load(running=None, waiting=None, cache_used=None)
    assert Load() != Load(running=0)


def test_the_three_states_of_health() -> None:
    assert [READY.state, LOADING.state] == [HealthState.READY, HealthState.LOADING]
    broken = BROKEN("no such model")
    assert (broken.state, broken.reason) == (HealthState.BROKEN, "no such model")


@pytest.mark.parametrize("name", types.__all__)
def test_a_plugin_author_imports_every_fact_from_one_place(name: str) -> None:
    assert getattr(engines, name) is getattr(types, name)
    assert name in engines.__all__
