from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from sqlite_utils import Database as Tables

from llmgw.errors import LlmgwError, UsageError
from llmgw.store.database import Database, open_database
from llmgw.store.faults import StoreBusy, StoreFailed
from llmgw.store.lanes import Inline, Lanes, Threads

Lock = Callable[[Path], AbstractContextManager[None]]


def make_rows(tables: Tables) -> None:
    tables.create_table("rows", {"n": int, "filling": bytes}, pk="n")


def make_more(tables: Tables) -> None:
    tables.create_table("more", {"n": int}, pk="n")


def fail(tables: Tables) -> None:
    make_more(tables)
    tables.execute("insert into nowhere values (1)")


def opened(path: Path, lanes: Lanes | None = None, **options: Any) -> Any:
    return open_database(str(path), lanes or Threads(), **{"migrations": (make_rows,), "busy_seconds": 0.05} | options)


def insert(n: int, size: int = 0) -> Callable[[sqlite3.Connection], None]:
    def act(connection: sqlite3.Connection) -> None:
        connection.execute("insert into rows values (?, zeroblob(?))", (n, size))

    return act


async def stored(database: Database) -> list[int]:
    return [n for (n,) in await database.read(lambda connection: connection.execute("select n from rows").fetchall())]


def content(path: Path) -> bytes:
    return path.read_bytes()


def set_content(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def fill(path: Path) -> None:
    """Take all the room that is left on the disk."""
    with pytest.raises(OSError, match="No space"):
        path.write_bytes(b"x" * 1_000_000)


async def wait_for(path: Path) -> None:
    """Until the one who has the store has closed it, or this fails."""
    with trio.fail_after(60):
        while True:
            try:
                async with opened(path):
                    return
            except UsageError:
                await trio.sleep(0.01)


def on_disk(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
        return [n for (n,) in connection.execute("select n from rows order by n")]


@pytest.fixture(params=["threads", "inline"])
def lanes(request: pytest.FixtureRequest) -> Lanes:
    return Threads() if request.param == "threads" else Inline()


async def test_what_was_written_is_there_at_once_and_after_a_restart(path: Path, lanes: Lanes) -> None:
    async with opened(path, lanes) as database:
        await database.write(insert(1))
        assert await stored(database) == [1]
    async with opened(path, lanes) as database:
        assert await stored(database) == [1]
        await database.write(insert(2))
    assert on_disk(path) == [1, 2]


async def test_a_write_gives_back_what_it_returned_and_its_own_error(path: Path, lanes: Lanes) -> None:
    async with opened(path, lanes) as database:
        assert await database.write(lambda connection: connection.execute("select 7").fetchone()) == (7,)
        await database.write(insert(1))
        with pytest.raises(sqlite3.IntegrityError):
            await database.write(insert(1))
        with pytest.raises(KeyError):
            await database.write(lambda connection: {}["x"])
        await database.write(insert(2))
        assert await stored(database) == [1, 2]


async def test_only_the_guilty_of_many_is_told(path: Path) -> None:
    refused = []

    async def put(database: Database, n: int) -> None:
        try:
            await database.write(insert(n % 50))
        except sqlite3.IntegrityError:
            refused.append(n)

    async with opened(path) as database:
        async with trio.open_nursery() as nursery:
            for n in range(100):
                nursery.start_soon(put, database, n)
        assert sorted(await stored(database)) == list(range(50))
    assert sorted(n % 50 for n in refused) == list(range(50))


async def test_the_file_is_shared_as_it_should_be(path: Path) -> None:
    async with opened(path) as database:
        await database.write(insert(1))
        modes = {each.name: each.stat().st_mode & 0o777 for each in path.parent.iterdir()}
        assert modes == {"llmgw.db": 0o640, "llmgw.db-wal": 0o640, "llmgw.db-shm": 0o640}

        def pragmas(connection: sqlite3.Connection) -> list[Any]:
            names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            return [connection.execute(f"pragma {name}").fetchone()[0] for name in names]

        assert await database.write(pragmas) == ["wal", 1, 1, 50]
    assert {each.name for each in path.parent.iterdir()} == {"llmgw.db"}


async def test_reading_changes_nothing(path: Path) -> None:
    async with opened(path) as database:
        with pytest.raises(StoreFailed, match="can't be written"):
            await database.read(insert(1))
        assert await stored(database) == []


async def test_a_reader_is_not_held_up_by_another_programs_write(path: Path, lock: Lock) -> None:
    async with opened(path) as database:
        await database.write(insert(1))
        with lock(path):
            assert await stored(database) == [1]


async def test_what_another_program_has_locked_is_told_and_can_be_tried_again(path: Path, lock: Lock) -> None:
    async with opened(path) as database:
        with lock(path), pytest.raises(StoreFailed, match="another program has it locked"):
            await database.write(insert(1))
        await database.write(insert(2))
        assert await stored(database) == [2]


async def test_a_lock_that_goes_in_time_is_waited_for(path: Path, lock: Lock) -> None:
    async with opened(path, busy_seconds=60) as database, trio.open_nursery() as nursery:
        with lock(path):
            nursery.start_soon(database.write, insert(1))
            await trio.testing.wait_all_tasks_blocked()
        # ... and the nursery waits for the write, which fails the test if it is not done
    assert on_disk(path) == [1]


async def test_a_write_whose_caller_is_cancelled_is_done_all_the_same(path: Path, lock: Lock) -> None:
    async with opened(path, busy_seconds=60) as database:
        with lock(path):
            async with trio.open_nursery() as nursery:
                for n in range(5):
                    nursery.start_soon(database.write, insert(n))
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
    assert on_disk(path) == [0, 1, 2, 3, 4]


async def test_the_end_of_the_program_writes_what_was_taken_on(path: Path, lock: Lock) -> None:
    async with trio.open_nursery() as nursery, opened(path, busy_seconds=60) as database:
        with lock(path):
            nursery.start_soon(database.write, insert(1))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert on_disk(path) == [1]


async def test_a_disk_that_does_not_answer_does_not_keep_the_program_from_ending(
    path: Path, lock: Lock, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        database = await stack.enter_async_context(opened(path, busy_seconds=60, close_seconds=0.05))
        with lock(path):
            nursery.start_soon(database.write, insert(1))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            await stack.aclose()
            assert "does not answer: what waited to be written may be lost" in caplog.text
    await wait_for(path)
    assert on_disk(path) == [1]


async def test_a_reading_that_was_left_is_over_before_its_connection_is(path: Path) -> None:
    ready, read = threading.Event(), []

    def slowly(connection: sqlite3.Connection) -> None:
        assert ready.wait(60)
        read.append(connection.execute("select count(*) from rows").fetchone())

    async with trio.open_nursery() as nursery:
        async with opened(path, close_seconds=0.05) as database:
            with trio.move_on_after(0.01):
                await database.read(slowly)
        ready.set()
        nursery.cancel_scope.cancel()
    await wait_for(path)
    assert read == [(0,)]


async def test_too_much_at_once_is_refused_and_not_half_done(path: Path, lock: Lock) -> None:
    async with opened(path, Threads(max_waiting=2), busy_seconds=60) as database, trio.open_nursery() as nursery:
        with lock(path):
            for n in range(2):
                nursery.start_soon(database.write, insert(n))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(StoreBusy):
                await database.write(insert(2))
    assert on_disk(path) == [0, 1]


async def test_after_the_end_nothing_is_taken(path: Path, lanes: Lanes) -> None:
    async with opened(path, lanes) as database:
        pass
    with pytest.raises(StoreFailed, match="closed"):
        await database.write(insert(1))
    with pytest.raises(StoreFailed, match="closed"):
        await stored(database)


# What can be wrong with the file


async def test_a_second_server_is_refused_and_harms_nothing(path: Path) -> None:
    async with opened(path) as database:
        with pytest.raises(UsageError, match="another llmgw server"):
            async with opened(path):
                raise AssertionError
        await database.write(insert(1))
    assert on_disk(path) == [1]


async def test_what_is_no_database_is_refused_and_left_alone(path: Path) -> None:
    data = b"my diary, and nothing that you should write into\n" * 30
    set_content(path, data)
    with pytest.raises(StoreFailed, match="is not an SQLite database"):
        async with opened(path):
            raise AssertionError
    assert content(path) == data


async def test_a_database_of_another_program_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table theirs (n)")
    before = content(path)
    with pytest.raises(UsageError, match="another program's database"):
        async with opened(path):
            raise AssertionError
    assert content(path) == before


async def test_a_newer_database_is_left_alone(path: Path) -> None:
    async with opened(path, migrations=(make_rows, make_more)):
        pass
    before = content(path)
    with pytest.raises(UsageError, match="written by a newer llmgw"):
        async with opened(path):
            raise AssertionError
    assert content(path) == before


async def test_an_older_database_is_brought_up_to_date(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(path) as database:
        await database.write(insert(1))
    with caplog.at_level("INFO", "llmgw.store"):
        async with opened(path, migrations=(make_rows, make_more)) as database:
            assert await stored(database) == [1]
    assert "are now version 2" in caplog.text


async def test_a_migration_that_fails_leaves_an_old_file_as_it_was_and_no_new_one(path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError):
        async with opened(path, migrations=(make_rows, fail)):
            raise AssertionError
    assert [each.name for each in path.parent.iterdir()] == []
    async with opened(path) as database:
        await database.write(insert(1))
    with pytest.raises(sqlite3.OperationalError):
        async with opened(path, migrations=(make_rows, fail)):
            raise AssertionError
    async with opened(path) as database:
        assert await stored(database) == [1]


@pytest.mark.parametrize("lost", ["", "-wal"])
async def test_a_write_to_a_file_that_is_gone_is_not_called_done(path: Path, lanes: Lanes, lost: str) -> None:
    part = path.with_name(path.name + lost)
    away = path.with_name("away")
    async with opened(path, lanes) as database:
        await database.write(insert(1))
        part.rename(away)
        said = rf"{part.name} was removed or replaced while in use\. Put it back, or restart"
        with pytest.raises(StoreFailed, match=said):
            await database.write(insert(2))
        part.touch()
        with pytest.raises(StoreFailed, match=said):
            await database.write(insert(2))
        # what was there can still be looked at, and when it is back it can be written
        assert await stored(database) == [1]
        away.replace(part)
        await database.write(insert(3))
    async with opened(path, lanes) as database:
        assert await stored(database) == [1, 3]


async def test_a_damaged_page_is_told_and_not_answered_as_empty(path: Path) -> None:
    async with opened(path) as database:
        for n in range(20):
            await database.write(insert(n, 2000))
    data = bytearray(content(path))
    data[4096:] = b"\xff" * (len(data) - 4096)
    set_content(path, data)
    with pytest.raises(StoreFailed, match="damaged"):
        async with opened(path) as database:
            await stored(database)


async def test_a_file_that_is_locked_at_the_start_is_told(path: Path) -> None:
    async with opened(path):
        pass
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("pragma locking_mode = exclusive")
        other.execute("begin exclusive")
        with pytest.raises(StoreFailed, match="another program has it locked"):
            async with opened(path):
                raise AssertionError


async def test_a_path_may_hold_any_character(tmp_path: Path) -> None:
    path = tmp_path / "a?b#c%20 d.db"
    async with opened(path) as database:
        await database.write(insert(1))
    assert on_disk(path) == [1]


async def test_a_full_disk_loses_nothing_that_was_stored(small_disk: Path) -> None:
    path = small_disk / "llmgw.db"
    async with opened(path) as database:
        kept = []
        error = ""
        while not error:
            try:
                await database.write(insert(len(kept), 10_000))
            except StoreFailed as failed:
                error = failed.message
            else:
                kept.append(len(kept))
        assert "its disk is full: free some space" in error
        assert kept
        assert await stored(database) == kept
        with pytest.raises(StoreFailed):
            await database.write(insert(1000, 100_000))
    assert on_disk(path) == kept


async def test_a_disk_that_was_full_is_used_again_when_there_is_room(small_disk: Path) -> None:
    filling = small_disk / "filling"
    async with opened(small_disk / "llmgw.db") as database:
        await database.write(insert(1))
        fill(filling)
        with pytest.raises(StoreFailed):
            await database.write(insert(2, 20_000))
        filling.unlink()
        await database.write(insert(3, 20_000))
        assert await stored(database) == [1, 3]


async def test_a_full_disk_at_the_start_leaves_no_file(small_disk: Path) -> None:
    fill(small_disk / "filling")
    with pytest.raises(LlmgwError, match="disk is full: free some space"):
        async with opened(small_disk / "llmgw.db"):
            raise AssertionError
    assert not (small_disk / "llmgw.db").exists()


# With a process that is killed

WRITES = """
import sys, trio
from llmgw.core.node import NodeId
from llmgw.store import open_store

async def main():
    async with open_store(sys.argv[1]) as store, trio.open_nursery() as nursery:
        async def see(first):
            for number in range(first, 10**9, 5):
                await store.nodes.see(NodeId(f"n{number}"), 1.0)
                sys.stdout.write(f"n{number}\\n")
                sys.stdout.flush()
        for first in range(5):
            nursery.start_soon(see, first)

trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("enough", [1, 40, 400])
def test_a_killed_server_keeps_all_that_it_said_it_had_stored(path: Path, enough: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    ) as server:
        assert server.stdout is not None
        said = [server.stdout.readline().strip() for _ in range(enough)]
        server.send_signal(signal.SIGKILL)
        # the last line may be cut off, and then it was not said
        said += [line.strip() for line in server.stdout if line.endswith("\n")]
    assert len(said) >= enough
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
        kept = {node for (node,) in connection.execute("select id from nodes")}
    assert set(said) - kept == set()


MIGRATES = """
import sys, time, trio
from llmgw.store.database import open_database
from llmgw.store.lanes import Threads

def migrate(tables):
    tables.create_table("more", {"n": int}, pk="n")
    tables.execute("insert into more select value from json_each('[1, 2, 3]')")
    print("half", flush=True)
    time.sleep(600)

def first(tables):
    tables.create_table("rows", {"n": int, "filling": bytes}, pk="n")

async def main():
    async with open_database(sys.argv[1], Threads(), migrations=(first, migrate)):
        pass

trio.run(main)
"""


@pytest.mark.slow
async def test_a_server_that_is_killed_in_a_migration_has_not_begun_it(path: Path) -> None:
    async with opened(path) as database:
        await database.write(insert(1))
    kill_when_it_says("half", path)
    async with opened(path, migrations=(make_rows, make_more)) as database:
        assert await stored(database) == [1]
        assert await database.read(lambda connection: connection.execute("select n from more").fetchall()) == []


def kill_when_it_says(word: str, path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", MIGRATES, str(path)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().strip() == word
        server.kill()
