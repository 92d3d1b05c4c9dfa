from __future__ import annotations

from llmgw.core.node import Node, NodeId
from llmgw.core.topology import islands


def a_node(name: str) -> Node:
    return Node(id=NodeId(name), cores=4, cpu_flags=frozenset(), memory_gb=8.0, memory_available_gb=6.0)


def test_each_node_is_an_island_of_its_own() -> None:
    one, two = a_node("n1"), a_node("n2")
    assert islands([two, one]) == [(one,), (two,)]


def test_no_nodes_are_no_islands() -> None:
    assert islands([]) == []
