from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from llmgw.core.node import NodeId
from llmgw.core.replica import ShardAddress, ShardId
from llmgw.link.trunk import Trunks
from llmgw.reactor.loop import Reactor
from llmgw.server.cluster import Cluster, dial_by


def test_a_shard_of_another_machine_is_reached_by_its_trunk_and_never_dialled() -> None:
    reactor = Reactor()
    owner: Any = SimpleNamespace(connected=lambda: None)
    shard = ShardAddress(node=NodeId("n1"), shard=ShardId("shd-m-1-0"), epoch=1)
    with pytest.raises(OSError, match="node n1 has no trunk"):
        dial_by(Trunks(reactor))(reactor, shard, owner)
    transport = dial_by(Trunks(reactor))(reactor, ("127.0.0.1", 9), owner)
    assert transport.peer == "127.0.0.1:9"
    transport.abort()
    reactor.close()


def test_a_cluster_that_is_not_planted_yet_has_no_links_and_can_be_told_everything() -> None:
    nothing: Any = None
    cluster = Cluster(
        agents=nothing,
        agents_at=nothing,
        credentials=nothing,
        revoked=nothing,
        lease_seconds=15.0,
        replace_after_seconds=60.0,
        counters=nothing,
        stir=nothing,
    )
    assert not cluster.reaches(NodeId("n1"))
    cluster.set_lease(20.0)
    cluster.set_replace_after(90.0)
    assert cluster.replace_after_seconds == 90.0
    cluster.goaway("the test")
    assert (cluster.links(), cluster.lease_seconds) == ((), 20.0)


def test_one_machine_by_itself_loads_nothing_of_a_cluster() -> None:
    """Certificates and websockets take longer to load than all the rest of the server's half."""
    words = "import sys, llmgw.standalone.tree; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True, timeout=60)
    found = {name for name in loaded.stdout.split() if name.startswith("llmgw.link") or name in LEFT_OUT}
    assert found == set()


LEFT_OUT = {"trio_websocket", "cryptography", "sqlite_utils", "llmgw.store", "llmgw.admin"}
