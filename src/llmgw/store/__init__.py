"""What is still known after a restart: the models that were added while the server ran, and the nodes it saw."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from llmgw.store.database import open_database
from llmgw.store.faults import StoreBusy, StoreFailed
from llmgw.store.lanes import Lanes, Threads
from llmgw.store.models import Models, StoredModel
from llmgw.store.nodes import Nodes

__all__ = ["Store", "StoreBusy", "StoreFailed", "StoredModel", "open_store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The tables of an open store. What a method has returned from is stored, whatever ends the process then.

    All raise StoreFailed when the disk or the file is at fault, and nothing of that call is stored then; StoreBusy,
    which is one of them, when too much waits to be written.
    """

    models: Models
    nodes: Nodes


@asynccontextmanager
async def open_store(address: str, *, lanes: Lanes | None = None) -> AsyncIterator[Store]:
    """The store at ``address``, the path of a file, which is made where there is none.

    It belongs to this process until it is closed; what was accepted until then is written first. Raises UsageError or
    StoreFailed where it can't be opened. ``lanes``: where its blocking work is done; threads, unless a simulation wants
    it done on the spot.
    """
    async with open_database(address, lanes or Threads()) as database:
        yield Store(models=Models(database), nodes=Nodes(database))
