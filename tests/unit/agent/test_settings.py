"""The agent's defaults."""

from __future__ import annotations

from pathlib import Path

from llmgw.agent.settings import AgentSettings, WeightsSettings
from llmgw.core.node import NodeId


def settings() -> AgentSettings:
    weights = WeightsSettings(cache=Path("/w/.cache"), model_dirs=(Path("/w"), Path("/mnt")), hub_token="sekret")
    return AgentSettings(node_id=NodeId("n"), state=Path("/s"), weights=weights)


def test_engine_ports_stay_below_those_the_kernel_gives_to_connections():
    first, last = settings().engine_ports
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 < first < last < max(lowest, 32768)


def test_the_disks_of_all_that_is_written_and_of_all_models_are_looked_at():
    assert settings().folders == (Path("/s"), Path("/w/.cache"), Path("/w"), Path("/mnt"))


def test_a_token_is_shown_to_nobody():
    assert "sekret" not in repr(settings())
