"""The agent's defaults."""

from __future__ import annotations

from pathlib import Path

from llmgw.agent.settings import AgentSettings
from llmgw.core.node import NodeId


def test_engine_ports_stay_below_those_the_kernel_gives_to_connections():
    first, last = AgentSettings(node_id=NodeId("n"), state=Path("/s")).engine_ports
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 < first < last < max(lowest, 32768)
