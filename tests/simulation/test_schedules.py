"""Schedules of faults that hypothesis draws: one that breaks something is shrunk, and printed as a story's code."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from simulator.drawing import scenario
from simulator.faults import Scenario
from simulator.world import World


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(scenario)
def test_no_schedule_of_faults_breaks_anything(scenario: Scenario) -> None:
    World(scenario).play()
