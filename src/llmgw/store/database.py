"""One SQLite file, open: a connection that writes, one that only reads, and the order in which they come and go."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast
from urllib.parse import quote

import trio

from llmgw.errors import UsageError
from llmgw.store.faults import CLOSED, StoreFailed, explain, explained, place_explained
from llmgw.store.lanes import Lanes, Writer
from llmgw.store.place import Held, discard, hold_file, read_address
from llmgw.store.schema import MIGRATIONS, Migration, check_ours, migrate
from llmgw.store.writing import Write, commit_together

log = logging.getLogger("llmgw.store")

T = TypeVar("T")

# How long another program's lock is waited for.
BUSY_SECONDS = 5.0
# What the end of the program waits for a disk that does not answer.
CLOSE_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class Condition:
    """How the file was when it was last written: its size with what lies beside it, and why that could not be done."""

    size_bytes: int
    failing: str | None = None


class Database:
    """What the tables are read and written through. ``condition`` is there to be looked at."""

    __slots__ = ("_lanes", "_reader", "_writer", "condition", "path")

    def __init__(self, path: str, reader: Reader, writer: Writer, lanes: Lanes, condition: Condition) -> None:
        self.path = path
        self.condition = condition
        self._reader = reader
        self._writer = writer
        self._lanes = lanes

    async def write(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """What ``act`` returned, once that is on the disk; the error of ``act``, and then nothing of it is.

        ``act`` runs inside a transaction and does nothing but SQL: it may be rolled back and run again. A caller that
        is cancelled meanwhile does not stop it. Raises StoreFailed for a fault of the disk or the file.
        """
        write = Write(act)
        await self._writer.put(write)
        if write.error is not None:
            raise explain(write.error, self.path)
        return cast("T", write.value)

    async def read(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """What ``act`` returned, from all that is committed. Raises StoreFailed for a fault of the disk or the file."""

        def run() -> T:
            with explained(self.path):
                return self._reader.read(act)

        return await self._lanes.run(run, may_leave=True)


class Reader:
    """The connection that reads, which is closed only when nobody reads: SQLite would crash the program."""

    __slots__ = ("_closed", "_connection", "_in_use")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._in_use = threading.Lock()
        self._closed = False

    def read(self, act: Callable[[sqlite3.Connection], T]) -> T:
        with self._in_use:
            if self._closed:
                raise StoreFailed(CLOSED)
            return act(self._connection)

    def close(self) -> None:
        with self._in_use:
            self._closed = True
            self._connection.close()


@asynccontextmanager
async def open_database(
    address: str,
    lanes: Lanes,
    *,
    migrations: Sequence[Migration] = MIGRATIONS,
    busy_seconds: float = BUSY_SECONDS,
    close_seconds: float = CLOSE_SECONDS,
) -> AsyncIterator[Database]:
    """The database at ``address``, its tables up to date. Raises UsageError or StoreFailed where that can't be."""
    path = read_address(address)
    stack = ExitStack()

    def enter() -> tuple[sqlite3.Connection, Reader, Held, Condition]:
        entered = stack.enter_context(_connect(path, migrations, busy_seconds))
        return *entered, Condition(size_bytes=_measure(path))

    def commit(writes: Sequence[Write]) -> None:
        try:
            held.check()
        except StoreFailed as error:
            for write in writes:
                write.error = StoreFailed(error.message)
        else:
            commit_together(connection, writes)
        # Here, for a look at a disk may block, and whoever wants to know may not.
        condition.failing = _find_fault(writes, str(path))
        condition.size_bytes = _measure(path)

    def end() -> None:
        try:
            stack.close()
        except Exception:
            log.exception("the store %s did not close in good order", path)

    connection, reader, held, condition = await lanes.run(enter)
    # What ends it is the writer's from now on: even if this were never left, nothing is closed while it is in use.
    writer = lanes.start_writer(commit, end)
    try:
        yield Database(str(path), reader, writer, lanes, condition)
    finally:
        with trio.move_on_after(close_seconds, shield=True) as scope:
            await writer.close()
        if scope.cancelled_caught:
            log.error("the store %s does not answer: what waited to be written may be lost", path)


def _find_fault(writes: Sequence[Write], path: str) -> str | None:
    """What a fault of the disk or the file among them is called; other errors are their callers'."""
    errors = (explain(write.error, path) for write in writes if write.error is not None)
    return next((str(error) for error in errors if isinstance(error, StoreFailed)), None)


def _measure(path: Path) -> int:
    """In bytes. A part that is gone counts nothing: whoever writes next is told."""
    total = 0
    for part in (path, path.with_name(f"{path.name}-wal")):
        with suppress(OSError):
            total += part.stat().st_size
    return total


@contextmanager
def _connect(
    path: Path, migrations: Sequence[Migration], busy_seconds: float
) -> Iterator[tuple[sqlite3.Connection, Reader, Held]]:
    with hold_file(path) as held, ExitStack() as spoilt:
        if held.is_new:
            spoilt.callback(discard, path)
        with (
            closing(_open_file(path, "rw", busy_seconds)) as writer,
            closing(Reader(_open_file(path, "ro", busy_seconds))) as reader,
        ):
            with explained(str(path)):
                _prepare(writer, path, migrations)
                # It opens what lies beside the file when it first reads: now, while that is surely the same.
                reader.read(lambda connection: connection.execute("select 1 from sqlite_master").fetchone())
            with place_explained(path):
                held.learn_log()
            spoilt.pop_all()
            yield writer, reader, held


def _open_file(path: Path, mode: str, busy_seconds: float) -> sqlite3.Connection:
    with explained(str(path)):
        return sqlite3.connect(
            f"file:{quote(str(path))}?mode={mode}",
            uri=True,
            timeout=busy_seconds,
            isolation_level=None,
            check_same_thread=False,
        )


def _prepare(connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration]) -> None:
    # Before anything is changed in a file that may not be ours.
    check_ours(connection, str(path), len(migrations))
    (journal,) = connection.execute("pragma journal_mode = wal").fetchone()
    if journal != "wal":
        raise UsageError(f"the store {path} is on a disk that SQLite can't share there: keep it on a local disk")
    connection.execute("pragma synchronous = normal")
    connection.execute("pragma foreign_keys = on")
    steps = migrate(connection, str(path), migrations)
    if steps:
        log.info("the tables of the store %s are now version %d", path, len(migrations))
