"""What is still known after a restart: the models that were added while the server ran and what became of each
definition, the nodes it saw, what an operator said of either, and what launches have shown."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from llmgw.store.database import Condition, open_database
from llmgw.store.facts import Facts
from llmgw.store.faults import StoreBusy, StoreFailed
from llmgw.store.history import History, StoredDefinition
from llmgw.store.holds import Holds
from llmgw.store.lanes import Lanes, Threads
from llmgw.store.models import Models, StoredModel
from llmgw.store.nodes import Nodes, StoredNode

__all__ = [
    "KIND",
    "Condition",
    "Store",
    "StoreBusy",
    "StoreFailed",
    "StoredDefinition",
    "StoredModel",
    "StoredNode",
    "open_store",
]

KIND = "sqlite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The tables of an open store. What a method has returned from is stored, whatever ends the process then.

    All raise StoreFailed when the disk or the file is at fault, and nothing of that call is stored then; StoreBusy,
    which is one of them, when too much waits to be written. ``path`` is that of its file, and ``condition`` how that
    was when it was last written: it changes as the store is used.
    """

    path: str
    condition: Condition
    models: Models
    nodes: Nodes
    history: History
    holds: Holds
    facts: Facts


@asynccontextmanager
async def open_store(address: str, *, lanes: Lanes | None = None) -> AsyncIterator[Store]:
    """The store at ``address``, the path of a file, which is made where there is none.

    It belongs to this process until it is closed; what was accepted until then is written first. Raises UsageError or
    StoreFailed where it can't be opened. ``lanes``: where its blocking work is done; threads, unless a simulation wants
    it done on the spot.
    """
    async with open_database(address, lanes or Threads()) as database:
        yield Store(
            path=database.path,
            condition=database.condition,
            models=Models(database),
            nodes=Nodes(database),
            history=History(database),
            holds=Holds(database),
            facts=Facts(database),
        )
