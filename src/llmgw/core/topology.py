"""Which nodes one replica may use together."""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.core.node import Node


def islands(nodes: Iterable[Node]) -> list[tuple[Node, ...]]:
    """The groups of nodes that one replica may span, by id: each node by itself, since no fabric is declared yet."""
    return [(node,) for node in sorted(nodes, key=lambda node: node.id)]
