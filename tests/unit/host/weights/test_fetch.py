"""One node that fetches, from a real web server that misbehaves, to a real folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, closing
from functools import partial
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from fake_origin import FakeOrigin
from fetchers import MIB, Cluster, Node, check_told, make_weights, open_cluster, read_kept, sha256
from trio.testing import MockClock

from llmgw.core.node import NodeId
from llmgw.core.weights import Fetch, FileListed, Listing, Manifest, Member, Phase, Source, Swarm, key_of, parse_source
from llmgw.host.weights.disk.cache import Cache
from llmgw.host.weights.disk.partial import Partial
from llmgw.host.weights.errors import Broken, FetchFailed, Kind
from llmgw.host.weights.fetch import MEND_TRIES, fetch
from llmgw.host.weights.peers import PeerGone, Told, open_peers
from llmgw.host.weights.retries import MOST_TRIES
from llmgw.reactor.rate import Rate

TEXT = "hf:org/repo/x.bin"
FILE = "org/repo/x.bin"
SIZE = 6 * MIB + 12345
SLOW_DISK = "the disk is slow: what has come is not written yet"


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return make_weights(tmp_path / "files" / FILE, SIZE)


@pytest.fixture
def origin(tmp_path: Path, content: bytes) -> Iterator[FakeOrigin]:
    with FakeOrigin(tmp_path / "files") as server:
        yield server


@asynccontextmanager
async def open_node(folder: Path, origin: FakeOrigin, **more: Any) -> AsyncIterator[tuple[Cluster, Node]]:
    async with open_cluster(folder, origin.url) as cluster:
        yield cluster, await cluster.add("n1", **more)


def leftover(node: Node, text: str = TEXT) -> Path:
    (found,) = (node.cache.folder / key_of(text)).glob("*.part")
    return found


async def until(true: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        # (what is waited for is told by sockets and threads)
        while not true():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_a_source_comes_whole_and_verified_and_is_not_asked_for_twice(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        assert read_kept(node, manifest, "x.bin") == content
        assert [file.sha256 for file in manifest.files] == [sha256(content)]
        check_told(node.told)
        phases = list(dict.fromkeys(told.phase for told in node.told))
        assert phases == [Phase.RESOLVING, Phase.FETCHING, Phase.VERIFYING, Phase.READY]
        assert (node.last.origin_bytes, node.last.peer_bytes) == (SIZE, 0)
        asked = len(origin.requests)
        assert await cluster.fetch(node, TEXT) == manifest
        assert len(origin.requests) == asked


async def test_several_files_and_an_empty_one_come_together(tmp_path: Path, origin: FakeOrigin) -> None:
    sizes = {"a.bin": 3 * MIB, "b/c.bin": 1, "d.bin": 0, "e.bin": MIB}
    contents = {name: make_weights(tmp_path / "files/org/many" / name, size) for name, size in sizes.items()}
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, "hf:org/many/*")
        for name, content in contents.items():
            assert read_kept(node, manifest, name) == content


async def test_a_pull_asks_the_origin_for_the_newest(tmp_path: Path, origin: FakeOrigin) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        first = await cluster.fetch(node, TEXT)
        assert await cluster.fetch(node, TEXT, newest=True) == first
        assert (node.last.phase, node.last.origin_bytes) == (Phase.READY, 0)
        changed = make_weights(tmp_path / "files" / FILE, 2 * MIB)
        assert await cluster.fetch(node, TEXT) == first
        second = await cluster.fetch(node, TEXT, newest=True)
        assert read_kept(node, second, "x.bin") == changed


async def test_a_pull_of_what_is_here_already_makes_it_what_a_launch_takes(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    path, text = tmp_path / "files" / FILE, f"{origin.url}/{FILE}"
    os.utime(path, (1000, 1000))
    async with open_node(tmp_path, origin) as (cluster, node):
        first = await cluster.fetch(node, text, newest=True)
        path.write_bytes(b"a bad upload")
        second = await cluster.fetch(node, text, newest=True)
        assert node.cache.find(text) == second
        path.write_bytes(content)
        os.utime(path, (1000, 1000))
        assert (await cluster.fetch(node, text, newest=True)).commit == first.commit
        assert (node.last.phase, node.last.origin_bytes) == (Phase.READY, 0)
        assert (await cluster.fetch(node, text)).commit == first.commit


def spoil(path: Path, at: int = 77) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))


def place(node: Node, manifest: Manifest, name: str = "x.bin") -> Path:
    return node.cache.folder / key_of(manifest.source) / manifest.commit / name


@pytest.mark.parametrize("pinned", [False, True])
async def test_a_pull_proves_what_is_here_and_fetches_the_wrong_pieces_and_no_other(
    tmp_path: Path, origin: FakeOrigin, content: bytes, pinned: bool
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        text = f"{TEXT}@{manifest.commit}" if pinned else TEXT
        manifest = await cluster.fetch(node, text)
        node.told.clear()
        assert await cluster.fetch(node, text, newest=True) == manifest
        assert Phase.VERIFYING in {each.phase for each in node.told}
        assert (node.last.phase, node.last.origin_bytes, node.last.cause) == (Phase.READY, 0, None)
        check_told(node.told)
        for at in (MIB + 5, 3 * MIB):
            spoil(place(node, manifest), at)
        # (a launch takes it, for its sizes are right)
        assert await cluster.fetch(node, text) == manifest
        node.told.clear()
        origin.forget()
        mended = await cluster.fetch(node, text, newest=True)
        assert mended.commit == manifest.commit
        assert read_kept(node, mended, "x.bin") == content
        assert origin.sent[FILE] == node.last.origin_bytes == 2 * MIB
        assert node.last.cause is not None
        assert "x.bin is not what was fetched in 2 of its 7 pieces" in node.last.cause
        check_told(node.told)
        assert not list(node.cache.folder.glob("*/*.part"))
        assert [each.commit for each in node.cache.set_asides] == [manifest.commit]


async def test_what_is_cut_off_costs_what_is_missing_of_it(tmp_path: Path, origin: FakeOrigin, content: bytes) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        os.truncate(place(node, manifest), 5 * MIB + 3)
        again = await cluster.fetch(node, TEXT)
        assert read_kept(node, again, "x.bin") == content
        assert node.last.origin_bytes == SIZE - 5 * MIB
        assert (node.last.cause or "").startswith("fetched anew, for what lay here of it was damaged: x.bin ")


@pytest.mark.parametrize("newest", [False, True])
async def test_what_somebody_runs_by_is_not_mended_and_who_that_is_is_told(
    tmp_path: Path, origin: FakeOrigin, content: bytes, newest: bool
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        os.truncate(place(node, manifest), 3)
        node.users = lambda commit: ["shd-1"] if commit == manifest.commit else []
        with pytest.raises(
            FetchFailed, match=r"is damaged: x\.bin .*; it stays as it is while shd-1 of this"
        ) as failed:
            await cluster.fetch(node, TEXT, newest=newest)
        assert failed.value.kind is Kind.CORRUPT
        assert "llmgw ctl weights pull" in (failed.value.remedy or "")
        assert place(node, manifest).stat().st_size == 3
        node.users = lambda commit: []
        use = Cache(node.cache.folder).use(manifest)
        assert use is not None
        with pytest.raises(FetchFailed, match="while an engine of another agent"):
            await cluster.fetch(node, TEXT, newest=newest)
        use.close()
        again = await cluster.fetch(node, TEXT, newest=newest)
        assert read_kept(node, again, "x.bin") == content


async def test_a_commit_that_nobody_can_read_stays_while_somebody_runs_by_it(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        place(node, manifest, ".manifest.json").write_text("{")
        node.users = lambda commit: ["shd-1"]
        with pytest.raises(FetchFailed, match=r"its manifest means nothing: .*; it stays as it is while shd-1"):
            await cluster.fetch(node, TEXT)
        node.users = lambda commit: []
        assert read_kept(node, await cluster.fetch(node, TEXT), "x.bin") == content
        shutil.rmtree(place(node, manifest).parent)
        node.users = lambda commit: ["shd-1"]
        # (of what is gone nothing can be spoiled)
        assert read_kept(node, await cluster.fetch(node, TEXT), "x.bin") == content


@pytest.mark.parametrize("is_url", [False, True], ids=["the hub has a hash", "its origin has none"])
async def test_a_pull_finds_a_manifest_that_holds_another_hash_and_fetches_nothing(
    tmp_path: Path, origin: FakeOrigin, content: bytes, is_url: bool
) -> None:
    text = f"{origin.url}/{FILE}" if is_url else TEXT
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, text)
        path = node.cache.folder / key_of(text) / manifest.commit / ".manifest.json"
        path.write_text(path.read_text().replace(sha256(content), "0" * 64))
        again = await cluster.fetch(node, text, newest=True)
        assert (again.files, node.last.origin_bytes) == (manifest.files, 0)
        (told,) = node.cache.set_asides
        assert told.why == "x.bin has another SHA-256 than its manifest says"


def lie(path: Path) -> None:
    """A byte of a manifest changes that leaves it one."""
    path.write_text(path.read_text().replace('"x.bin"', '"z.bin"'))


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 90),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(os.urandom(200)),
        lambda path: path.unlink(),
        lie,
        lambda path: os.truncate(path.with_name(".manifest.hashes"), 40),
        lambda path: (path.unlink(), path.with_name(".manifest.hashes").unlink()),
        lambda path: (path.unlink(), path.with_name(".manifest.hashes").write_bytes(bytes(7 * 32))),
    ],
    ids=["cut off", "empty", "garbage", "gone", "another name", "hashes cut off", "both gone", "hashes of nothing"],
)
async def test_of_a_commit_whose_manifest_is_damaged_nothing_is_fetched_anew(
    tmp_path: Path, origin: FakeOrigin, content: bytes, damage: Callable[[Path], object], newest: bool
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        damage(place(node, manifest, ".manifest.json"))
        node.cache.list()
        (damaged,) = node.cache.list_damaged()
        assert (damaged.manifest.source, damaged.manifest.commit) == (TEXT, manifest.commit)
        use = Cache(node.cache.folder).use(manifest)
        assert use is not None
        before = place(node, manifest).stat().st_ino
        with pytest.raises(FetchFailed, match=r"is damaged: .*while an engine of another agent"):
            await cluster.fetch(node, TEXT, newest=newest)
        assert place(node, manifest).stat().st_ino == before
        assert not list(place(node, manifest).parent.glob(".pieces"))
        use.close()
        again = await cluster.fetch(node, TEXT, newest=newest)
        assert read_kept(node, again, "x.bin") == content
        assert again.files == manifest.files
        assert node.last.origin_bytes == 0
        assert (node.last.cause or "").startswith("fetched anew, for what lay here of it was damaged: ")
        assert node.cache.list() == (again,)
        assert [each.why for each in node.cache.set_asides] == [damaged.why]


async def test_of_a_commit_without_manifest_what_is_wrong_is_fetched_anew_and_no_more(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        place(node, manifest, ".manifest.json").unlink()
        spoil(place(node, manifest), 2 * MIB + 5)
        again = await cluster.fetch(node, TEXT)
        assert read_kept(node, again, "x.bin") == content
        assert node.last.origin_bytes == MIB
        for name in (".manifest.json", ".manifest.hashes"):
            place(node, again, name).unlink()
        spoil(place(node, again), 2 * MIB + 5)
        # (of no piece anybody could say that it is right)
        again = await cluster.fetch(node, TEXT)
        assert read_kept(node, again, "x.bin") == content
        assert node.last.origin_bytes == SIZE


@pytest.mark.parametrize("left", [".manifest.json", ".manifest.hashes"])
async def test_where_the_origin_has_no_hashes_what_is_left_of_them_counts(
    tmp_path: Path, origin: FakeOrigin, content: bytes, left: str
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        text = f"{origin.url}/{FILE}"
        manifest = await cluster.fetch(node, text)
        (gone,) = {".manifest.json", ".manifest.hashes"} - {left}
        place(node, manifest, gone).unlink()
        again = await cluster.fetch(node, text)
        assert read_kept(node, again, "x.bin") == content
        assert (node.last.origin_bytes, again.files) == (0, manifest.files)
        for name in (".manifest.json", ".manifest.hashes"):
            place(node, manifest, name).unlink()
        # (nobody can say what it should be)
        again = await cluster.fetch(node, text)
        assert (node.last.origin_bytes, again.files) == (SIZE, manifest.files)


async def test_a_proof_ends_when_nobody_waits_for_it_and_is_told_when_it_stands(
    tmp_path: Path, origin: FakeOrigin, content: bytes, mock_clock: MockClock
) -> None:
    mock_clock.rate = 1.0
    held = threading.Event()

    class Slow(Cache):
        def prove(self, manifest: Manifest, stop: Callable[[], bool] = bool, tell: Any = None) -> str | None:
            held.set()
            while not stop():
                time.sleep(0.001)
            return None

        async def show_life(self, source: str) -> None:
            pass

    async with open_node(tmp_path, origin) as (cluster, node):
        text = f"{TEXT}@{(await cluster.fetch(node, TEXT)).commit}"
        manifest = await cluster.fetch(node, text)
        node.cache = Slow(node.cache.folder)
        node.told.clear()
        # (its origin is not asked again, which would have to be quicker then)
        mock_clock.rate = 50.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(cluster.fetch, node, text, newest=True))
            await until(lambda: bool(node.told) and node.last.stalled_seconds is not None and held.is_set())
            assert node.last.phase is Phase.VERIFYING
            nursery.cancel_scope.cancel()
        assert place(node, manifest).exists()
        async with Cache(node.cache.folder).hold(text, pytest.fail):
            pass


async def test_the_clusters_commit_is_taken_rather_than_a_newer_one(tmp_path: Path, origin: FakeOrigin) -> None:
    asked = []

    class Noting:
        async def resolve(self, source: Source, commit: str | None) -> Listing:
            asked.append(commit)
            raise FetchFailed("enough", Kind.MISSING)

    async with open_node(tmp_path, origin) as (cluster, node):
        node.origin = Noting()  # type: ignore[assignment]
        swarm = Swarm(source=TEXT, commit="c" * 40)
        for newest in (False, True):
            with pytest.raises(FetchFailed):
                await cluster.fetch(node, TEXT, newest=newest, swarm=lambda: swarm)
    assert asked == ["c" * 40, None]


async def test_what_was_cancelled_goes_on_where_it_was(tmp_path: Path, origin: FakeOrigin, content: bytes) -> None:
    # (one piece by each of four requests, and nothing more: never all of them, however late this is seen)
    origin.fault(FILE, stall_after=MIB + 5000, times=4)
    origin.fault(FILE, stall_after=0)
    async with open_node(tmp_path, origin) as (cluster, node):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.fetch, node, TEXT)
            await until(lambda: node.shelf is not None and len(node.shelf[1].log) >= 3)
            nursery.cancel_scope.cancel()
        there = len((leftover(node) / ".pieces").read_bytes().splitlines())
        assert there >= 3
        origin.clear()
        origin.forget()
        node.told.clear()
        manifest = await cluster.fetch(node, TEXT)
        assert read_kept(node, manifest, "x.bin") == content
        assert origin.sent[FILE] <= SIZE - there * MIB + MIB
        assert max(told.done_bytes for told in node.told if told.phase is not Phase.READY) >= there * MIB
        check_told(node.told)


async def test_a_cancelled_fetch_lets_go_of_the_lock_at_once(tmp_path: Path, origin: FakeOrigin) -> None:
    origin.fault(FILE, stall_after=1000)
    async with open_node(tmp_path, origin) as (cluster, node):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.fetch, node, TEXT)
            await until(lambda: bool(node.told) and node.last.origin_bytes > 0)
            nursery.cancel_scope.cancel()
        with trio.fail_after(30):
            async with Cache(node.cache.folder).hold(TEXT, pytest.fail):
                pass


async def test_a_flipped_byte_costs_its_piece_and_nothing_else(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    origin.fault(FILE, stall_after=10, skip=5)
    async with open_node(tmp_path, origin) as (cluster, node):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.fetch, node, TEXT)
            await until(lambda: node.shelf is not None and len(node.shelf[1].log) >= 4)
            nursery.cancel_scope.cancel()
        there = sorted(int(line.split()[1]) for line in (leftover(node) / ".pieces").read_text().splitlines())
        with closing((leftover(node) / "x.bin").open("r+b")) as file:
            file.seek(there[0] * MIB + 77)
            old = file.read(1)
            file.seek(there[0] * MIB + 77)
            file.write(bytes([old[0] ^ 1]))
        origin.clear()
        origin.forget()
        manifest = await cluster.fetch(node, TEXT)
        assert read_kept(node, manifest, "x.bin") == content
        assert node.last.origin_bytes == SIZE - sum(min(MIB, SIZE - piece * MIB) for piece in there) + MIB


@pytest.mark.slow
async def test_a_line_that_breaks_again_and_again_brings_it_all_the_same(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    origin.fault(FILE, reset_after=700_000, times=3)
    origin.fault(FILE, short_after=300_000, times=2)
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        assert read_kept(node, manifest, "x.bin") == content
        # What had come of a piece is not asked for again.
        assert node.last.origin_bytes == SIZE


@pytest.mark.slow
async def test_what_stalls_is_told_and_goes_on_once_the_origin_does(
    tmp_path: Path, origin: FakeOrigin, mock_clock: MockClock
) -> None:
    mock_clock.rate = 10.0
    origin.fault(FILE, stall_after=100_000)
    async with open_node(tmp_path, origin) as (cluster, node):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.fetch, node, TEXT)
            await until(lambda: bool(node.told) and node.last.stalled_seconds is not None)
            origin.clear()
        assert node.last.phase is Phase.READY
        assert node.last.stalled_seconds is None
        check_told(node.told)


@pytest.mark.slow
async def test_an_origin_that_stalls_for_long_is_asked_anew(tmp_path: Path, origin: FakeOrigin, content: bytes) -> None:
    origin.fault(FILE, stall_after=100_000, times=4)
    async with open_node(tmp_path, origin, read_seconds=0.5) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        assert read_kept(node, manifest, "x.bin") == content


async def test_a_server_without_ranges_is_read_once_in_order(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    origin.fault(FILE, no_ranges=True)
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        assert read_kept(node, manifest, "x.bin") == content
        # Two are asked for a part until one of them has shown that it sends all, and a third in between.
        assert len([seen for seen in origin.requests if seen.path.startswith("/cdn/")]) <= 4


async def test_a_file_that_changes_on_the_way_is_begun_again_as_what_it_is_now(
    tmp_path: Path, origin: FakeOrigin
) -> None:
    text = f"{origin.url}/{FILE}"
    origin.fault(f"/{FILE}", stall_after=MIB + 10, skip=2)
    async with open_node(tmp_path, origin) as (cluster, node):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.fetch, node, text)
            await until(lambda: node.shelf is not None and len(node.shelf[1].log) >= 2)
            changed = make_weights(tmp_path / "files" / FILE, 3 * MIB)
            origin.clear()
        manifest = node.cache.find(text)
        assert manifest is not None
        assert read_kept(node, manifest, "x.bin") == changed
        assert len({told.commit for told in node.told} - {None}) == 2


@pytest.mark.slow
async def test_a_file_that_changes_all_the_time_is_given_up(tmp_path: Path, origin: FakeOrigin) -> None:
    text = f"{origin.url}/{FILE}"
    for number in range(20):
        origin.fault(f"/{FILE}", etag=f'"{number}"', times=1)
    async with open_node(tmp_path, origin) as (cluster, node):
        with pytest.raises(FetchFailed) as failed:
            await cluster.fetch(node, text)
    assert failed.value.kind is Kind.CHANGED
    assert (node.last.phase, node.last.cause) == (Phase.FAILED, failed.value.message)


async def test_a_file_that_is_not_what_the_hub_says_is_fetched_once_more_and_then_given_up(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    fault = origin.fault(FILE, flip=MIB + 5)
    async with open_node(tmp_path, origin) as (cluster, node):
        with pytest.raises(FetchFailed) as failed:
            await cluster.fetch(node, TEXT)
        assert failed.value.kind is Kind.CORRUPT
        assert sha256(content) in failed.value.message
        assert node.last.origin_bytes == 2 * SIZE
        check_told(node.told)
        assert node.cache.find(TEXT) is None
        origin.clear()
        del fault
        manifest = await cluster.fetch(node, TEXT)
        assert read_kept(node, manifest, "x.bin") == content


async def test_what_came_wrong_once_comes_right_the_second_time(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    # (its first piece is asked for at first)
    origin.fault(FILE, flip=5, times=4)
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        assert read_kept(node, manifest, "x.bin") == content
        assert node.last.origin_bytes == 2 * SIZE
        check_told(node.told)


async def test_without_room_nothing_is_begun(tmp_path: Path, origin: FakeOrigin) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):

        class Vast:
            async def resolve(self, source: Source, commit: str | None) -> Listing:
                file = FileListed(name="x.bin", size_bytes=10**18)
                return Listing(source=source.text, commit="c" * 40, files=(file,))

        node.origin = Vast()  # type: ignore[assignment]
        with pytest.raises(FetchFailed) as failed:
            await cluster.fetch(node, TEXT)
    assert failed.value.kind is Kind.DISK
    assert node.last.phase is Phase.FAILED
    assert node.last.origin_bytes == 0


async def test_two_programs_on_one_folder_make_one_download(tmp_path: Path, origin: FakeOrigin, content: bytes) -> None:
    origin.fault(FILE, bytes_per_s=4 * MIB)
    async with open_cluster(tmp_path, origin.url) as cluster:
        nodes = [await cluster.add(name, seeds=False) for name in ("n1", "n2")]
        nodes[1].cache = Cache(nodes[0].cache.folder)
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(lambda node: cluster.fetch(node, TEXT, swarm=lambda: None), node)
        assert origin.sent[FILE] == SIZE
        waiting = next(node for node in nodes if node.last.origin_bytes == 0)
        assert next(told.phase for told in waiting.told if told.phase is not Phase.RESOLVING) is Phase.QUEUED
        assert [node.last.phase for node in nodes] == [Phase.READY] * 2


async def test_whoever_waits_names_the_program_that_hangs(tmp_path: Path, autojump_clock: MockClock) -> None:
    cache, course = Cache(tmp_path / "cache"), Course(0.0)

    async def until_it_waits(*, stalled: bool) -> Fetch:
        # (time flies while a thread looks at the lock)
        while True:
            last = course.told[-1] if course.told else None
            if last is not None and last.phase is Phase.QUEUED and (last.stalled_seconds is not None) is stalled:
                return last
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery, cache.hold(TEXT, pytest.fail):
        nursery.start_soon(course.run, Unseen(cache.folder))
        last = await until_it_waits(stalled=True)
        assert last.cause == f"pid {os.getpid()} on host {socket.gethostname()} holds the lock"
        assert last.remedy
        # As its holder does with each step.
        os.utime(cache.folder / key_of(TEXT) / ".lock", (1, 1))
        last = await until_it_waits(stalled=False)
        assert (last.cause is not None, last.remedy) == (True, None)
    assert course.told[-1].phase is Phase.READY


async def test_those_who_wait_see_its_steps_and_nothing_while_it_stalls(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    class Seen(Cache):
        async def show_life(self, source: str) -> None:
            shown.append(source)

    shown: list[str] = []
    await Course(500.0).run(Seen(tmp_path / "cache"))
    assert 0 < len(shown) < 10
    assert set(shown) == {TEXT}


async def test_it_comes_no_faster_than_it_may(tmp_path: Path, origin: FakeOrigin) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        began = trio.current_time()
        await cluster.fetch(node, TEXT, rate=float(SIZE))
        assert trio.current_time() - began > 0.7


@pytest.mark.slow
async def test_where_the_origin_is_off_the_listing_and_all_pieces_come_from_a_member(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        first, *others = [await cluster.add(name) for name in ("n1", "n2", "n3")]
        await cluster.fetch(first, TEXT)
        origin.fault(status=503)
        for node, newest in zip(others, (False, True), strict=True):
            with trio.fail_after(60):
                manifest = await cluster.fetch(node, TEXT, newest=newest)
            assert read_kept(node, manifest, "x.bin") == content
            assert node.last.origin_bytes == 0


async def test_what_can_never_change_is_not_asked_for_again(tmp_path: Path, origin: FakeOrigin) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        pinned = f"{TEXT}@{manifest.commit}"
        first = await cluster.fetch(node, pinned)
        asked = len(origin.requests)
        assert await cluster.fetch(node, pinned, newest=True) == first
        assert len(origin.requests) == asked


async def test_a_pull_without_its_origin_fails_though_members_have_what_is_here(
    tmp_path: Path, origin: FakeOrigin
) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        nodes = [await cluster.add(name) for name in ("n1", "n2")]
        for node in nodes:
            await cluster.fetch(node, TEXT)

        class Away:
            async def resolve(self, source: Source, commit: str | None) -> Listing:
                raise FetchFailed("nobody knows that host", Kind.DNS)

        nodes[0].origin = Away()  # type: ignore[assignment]
        with pytest.raises(FetchFailed) as failed:
            await cluster.fetch(nodes[0], TEXT, newest=True)
    assert failed.value.kind is Kind.DNS


async def test_the_origin_is_asked_once_it_is_known_who_else_fetches(tmp_path: Path, origin: FakeOrigin) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        listed: list[Member] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                lambda: cluster.fetch(node, TEXT, swarm=lambda: Swarm(source=TEXT, members=tuple(listed)))
            )
            await until(lambda: bool(node.told) and node.last.phase is Phase.FETCHING)
            await trio.sleep(0.3)
            assert FILE not in origin.sent
            listed.append(Member(node=node.id, seed=node.seed))
        assert node.last.phase is Phase.READY


class Unseen(Cache):
    """Nobody waits for what is fetched here. (Time flies while a thread says that it goes on.)"""

    async def show_life(self, source: str) -> None:
        pass


class Dead:
    """An origin of which nothing can be had."""

    def __init__(self, listing: Listing | None) -> None:
        self.listing = listing
        self.asked: list[float] = []

    async def resolve(self, source: Source, commit: str | None) -> Listing:
        if self.listing is not None:
            return self.listing
        self.asked.append(trio.current_time())
        raise Broken("the hub answers 503", remedy="wait")

    @asynccontextmanager
    async def read(self, source: Source, listing: Listing, file: int, start: int, stop: int) -> AsyncIterator[Any]:
        self.asked.append(trio.current_time())
        if start >= 0:
            raise Broken("the hub answers 503", remedy="wait")
        yield


@pytest.mark.parametrize(
    "listing", [None, Listing(source=TEXT, commit="c" * 40, files=(FileListed(name="x", size_bytes=1),))]
)
async def test_after_ten_tries_in_vain_it_says_why(
    tmp_path: Path, autojump_clock: MockClock, listing: Listing | None
) -> None:
    origin, told = Dead(listing), list[Fetch]()
    async with open_peers(NodeId("me"), None) as peers:
        with pytest.raises(FetchFailed, match="the hub answers 503") as failed:
            await fetch(
                parse_source(TEXT),
                cache=Unseen(tmp_path / "cache"),
                origin=origin,  # type: ignore[arg-type]
                peers=peers,
                swarm=lambda: None,
                tell=told.append,
                newest=False,
                limits=Rate(None),
            )
    assert (failed.value.kind, failed.value.remedy) == (Kind.UNREACHABLE, "wait")
    assert len(origin.asked) == MOST_TRIES
    assert origin.asked[-1] - origin.asked[0] >= 1 + 2 + 4 + 8 + 16 + 4 * 30
    assert (told[-1].phase, told[-1].remedy) == (Phase.FAILED, "wait")
    said = dict.fromkeys(each.remedy for each in told if each.phase is not Phase.FAILED and each.remedy)
    again = [f"wait; it is tried again, {left} times more at most" for left in range(9, 1, -1)]
    again += ["wait; it is tried again, 1 time more at most"]
    # (the first of them holds for a second, in which it may not be told)
    assert list(said)[:9] == again or list(said)[:8] == again[1:]


class Course:
    """An origin in a time of its own, and what a fetch from it says. ``pauses``: how long it is silent before each
    read, -1 where that fails; a read brings ``chunk`` bytes at a time."""

    def __init__(self, *pauses: float, resolving: float = 0.0, size: int = 1000, chunk: int = 1000) -> None:
        self.listing = Listing(source=TEXT, commit="c" * 40, files=(FileListed(name="x", size_bytes=size),))
        self.pauses = list(pauses)
        self.resolving = resolving
        self.chunk = chunk
        self.told: list[Fetch] = []

    async def resolve(self, source: Source, commit: str | None) -> Listing:
        await trio.sleep(self.resolving)
        return self.listing

    @asynccontextmanager
    async def read(
        self, source: Source, listing: Listing, file: int, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        pause = self.pauses.pop(0) if self.pauses else 0.0
        if pause < 0:
            raise Broken("the hub answers 503")
        await trio.sleep(pause)
        async with aclosing(self.give(start, stop)) as chunks:
            yield chunks

    async def give(self, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        for at in range(start, stop, self.chunk):
            yield bytes(min(self.chunk, stop - at))

    async def run(
        self, cache: Cache, peers: Any = None, swarm: Swarm | None = None, rate: float | None = None
    ) -> list[tuple[Phase, str | None, str | None]]:
        """What was said of it, each once; but for the disk: time flies here while threads work."""
        async with open_peers(NodeId("me"), None) as nobody:
            await fetch(
                parse_source(TEXT),
                cache=cache,
                origin=self,  # type: ignore[arg-type]
                peers=peers or nobody,
                swarm=lambda: swarm,
                tell=self.told.append,
                newest=False,
                limits=Rate(rate),
            )
        said = dict.fromkeys((each.phase, each.cause, each.remedy) for each in self.told)
        return [each for each in said if not (each[1] or "").startswith("the disk is slow")]


async def test_while_the_origin_is_in_trouble_it_says_which_until_something_comes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    said = await Course(-1, -1, 15.0).run(Unseen(tmp_path / "cache"))
    assert said == [
        (Phase.RESOLVING, None, None),
        (Phase.FETCHING, None, None),
        (Phase.FETCHING, "the hub answers 503", "it is tried again, 9 times more at most"),
        (Phase.FETCHING, "the hub answers 503", "it is tried again, 8 times more at most"),
        (Phase.VERIFYING, None, None),
        (Phase.READY, None, None),
    ]


async def test_while_it_is_not_known_what_a_source_is_it_says_why(tmp_path: Path, autojump_clock: MockClock) -> None:
    class Troubled(Course):
        async def resolve(self, source: Source, commit: str | None) -> Listing:
            if self.pauses:
                raise Broken("the hub answers 429", self.pauses.pop(), remedy="set HF_TOKEN")
            return await super().resolve(source, commit)

    said = await Troubled(3.0, resolving=0.5).run(Unseen(tmp_path / "cache"))
    again = "it is tried again, 9 times more at most"
    assert (Phase.RESOLVING, "the hub answers 429", f"set HF_TOKEN; {again}") in said
    assert said[-1] == (Phase.READY, None, None)


async def test_an_origin_that_says_nothing_is_named(tmp_path: Path, autojump_clock: MockClock) -> None:
    said = await Course(20.0, resolving=20.0).run(Unseen(tmp_path / "cache"))
    assert said == [
        (Phase.RESOLVING, None, None),
        (Phase.RESOLVING, "its origin has not answered yet", None),
        (Phase.FETCHING, None, None),
        (Phase.FETCHING, "nothing comes from its origin, though it was asked for", None),
        (Phase.VERIFYING, None, None),
        (Phase.READY, None, None),
    ]


async def test_what_comes_slowly_because_it_is_told_to_is_in_no_trouble(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    said = await Course(chunk=500).run(Unseen(tmp_path / "cache"), rate=25.0)
    assert {cause for _, cause, _ in said} == {None}
    assert autojump_clock.current_time() > 20


class Members:
    """Other nodes that have all of it, or (``offers`` False) say that they will, and give nothing for a long while."""

    node = NodeId("me")
    can_ask = True

    def __init__(self, files: tuple[FileListed, ...], *, offers: bool) -> None:
        self.files = files
        self.offers = offers

    async def hear(self, member: Member, key: str, commit: str, *, since: Told | None, wait_seconds: int) -> Told:
        if since is not None:
            await trio.sleep(wait_seconds)
        return Told(files=self.files, news=((0, 0, "a" * 64),) if self.offers and since is None else (), next=1)

    async def take(self, *_: Any) -> None:
        await trio.sleep(30.0)
        raise PeerGone("it is silent")


@pytest.mark.parametrize(
    ("offers", "cause"),
    [
        (True, "nothing comes from n2, though it was asked for"),
        (False, "it waits for what n2, n3, n4 and 1 more has or fetches"),
    ],
)
async def test_members_that_bring_nothing_are_named(
    tmp_path: Path, autojump_clock: MockClock, offers: bool, cause: str
) -> None:
    course = Course()
    names = ("n2",) if offers else ("n2", "n3", "n4", "n5")
    members = tuple(Member(node=NodeId(name), seed="10.0.0.1:7000", whole=True) for name in names)
    swarm = Swarm(source=TEXT, members=(Member(node=NodeId("me"), seed="10.0.0.9:7000"), *members))
    said = await course.run(Unseen(tmp_path / "cache"), Members(course.listing.files, offers=offers), swarm)
    assert (Phase.FETCHING, cause, None) in said
    assert said[-1] == (Phase.READY, None, None)


class Beside:
    """A partial whose disk hangs until ``gate`` is open, and that knows which thread looked at what it has."""

    def __init__(self, partial: Partial, gate: threading.Event | None) -> None:
        self.partial = partial
        self.gate = gate
        self.hangs = False
        self.keeps = threading.Event()
        self.looked: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.partial, name)

    @property
    def have(self) -> set[tuple[int, int]]:
        self.looked.add(threading.get_ident())
        return self.partial.have

    def keep(self, now: float, stop: Callable[[], bool]) -> Manifest:
        self.keeps.set()
        while self.hangs and not stop():
            time.sleep(0.01)
        return self.partial.keep(now, stop)

    def write(self, *words: Any) -> str:
        if self.gate is not None:
            assert self.gate.wait(60)
        return self.partial.write(*words)


class Shelved(Cache):
    """A cache that opens such partials."""

    gate: threading.Event | None = None

    def open_partial(self, *words: Any) -> Partial:
        self.opened = Beside(super().open_partial(*words), self.gate)
        return self.opened  # type: ignore[return-value]


async def test_a_disk_that_takes_nothing_is_named(tmp_path: Path, autojump_clock: MockClock) -> None:
    gate = threading.Event()
    cache, course = Shelved(tmp_path / "cache"), Course()
    cache.gate = gate

    class Ear(list[Fetch]):
        def append(self, fetch: Fetch) -> None:
            if fetch.cause == SLOW_DISK:
                gate.set()
            super().append(fetch)

    course.told = Ear()
    said = await course.run(cache)
    assert SLOW_DISK in {each.cause for each in course.told if each.phase is Phase.FETCHING}
    assert said[-1] == (Phase.READY, None, None)


async def test_what_is_here_already_is_counted_beside_the_loop(tmp_path: Path, autojump_clock: MockClock) -> None:
    cache = Shelved(tmp_path / "cache")
    await Course().run(cache)
    assert cache.opened.looked
    assert threading.get_ident() not in cache.opened.looked


async def test_a_fetch_that_only_waits_for_the_disk_at_last_can_be_cancelled_too(tmp_path: Path) -> None:
    class Hanging(Shelved):
        def open_partial(self, *words: Any) -> Partial:
            opened = super().open_partial(*words)
            self.opened.hangs = True
            return opened

    cache = Hanging(tmp_path / "cache")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Course().run, cache)
            await until(lambda: hasattr(cache, "opened") and cache.opened.keeps.is_set())
            nursery.cancel_scope.cancel()
    assert cache.find(TEXT) is None
    assert len(cache.list_partials()) == 1


async def test_what_is_here_already_is_looked_through_before_the_eyes_of_all(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    origin.fault(FILE, bytes_per_s=4 * MIB)
    async with open_node(tmp_path, origin) as (cluster, node):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.fetch, node, TEXT)
            await until(lambda: node.shelf is not None and len(node.shelf[1].log) >= 2)
            nursery.cancel_scope.cancel()
        origin.clear()
        node.told.clear()
        manifest = await cluster.fetch(node, TEXT)
    phases = [Phase.RESOLVING, Phase.VERIFYING, Phase.FETCHING, Phase.VERIFYING, Phase.READY]
    assert [phase for phase, _ in groupby(each.phase for each in node.told)] == phases
    first = next(each for each in node.told if each.phase is Phase.VERIFYING)
    assert (first.commit, first.total_bytes) == (manifest.commit, SIZE)
    check_told(node.told)


class Odd(Members):
    """What they do is no answer at all."""

    def __init__(self, files: tuple[FileListed, ...], *, takes: bool) -> None:
        super().__init__(files, offers=True)
        self.takes = takes

    async def hear(self, member: Member, key: str, commit: str, *, since: Told | None, wait_seconds: int) -> Told:
        if not self.takes:
            raise KeyError("files")
        return await super().hear(member, key, commit, since=since, wait_seconds=wait_seconds)

    async def take(self, *_: Any) -> None:
        raise IndexError("piece")


@pytest.mark.parametrize("takes", [True, False])
async def test_whatever_a_member_does_the_others_bring_it(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, takes: bool
) -> None:
    course = Course()
    odd = Member(node=NodeId("n2"), seed="10.0.0.1:7000", whole=True)
    swarm = Swarm(source=TEXT, members=(Member(node=NodeId("me"), seed="10.0.0.9:7000"), odd))
    said = await course.run(Unseen(tmp_path / "cache"), Odd(course.listing.files, takes=takes), swarm)
    assert said[-1] == (Phase.READY, None, None)
    # (once, or more often: time flies while threads work)
    assert {record.levelname for record in caplog.records if "n2" in record.getMessage()} == {"ERROR"}


async def test_where_a_member_says_nonsense_of_what_there_is_the_origin_is_asked_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    class Troubled(Course):
        async def resolve(self, source: Source, commit: str | None) -> Listing:
            if self.pauses:
                raise Broken("the hub answers 503", self.pauses.pop())
            return await super().resolve(source, commit)

    course = Troubled(0.0)
    odd = Member(node=NodeId("n2"), seed="10.0.0.1:7000", whole=True)
    swarm = Swarm(source=TEXT, commit="c" * 40, members=(odd,))
    said = await course.run(Unseen(tmp_path / "cache"), Odd(course.listing.files, takes=False), swarm)
    assert said[-1] == (Phase.READY, None, None)


async def test_what_is_taken_while_it_comes_is_what_came(tmp_path: Path, origin: FakeOrigin, content: bytes) -> None:
    origin.fault(FILE, bytes_per_s=4 * MIB)
    async with open_node(tmp_path, origin) as (cluster, node):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.fetch, node, TEXT)
            await until(lambda: node.shelf is not None and bool(node.shelf[1].log))
            assert node.shelf is not None
            file, piece, _ = node.shelf[1].log[0]
            assert node.shelf[1].read(file, piece) == content[piece * MIB : piece * MIB + MIB]
        assert node.shelf is None


PROGRAM = Path(__file__).with_name("fetch_program.py")


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_and_what_is_kept_is_right(tmp_path: Path) -> None:
    content = make_weights(tmp_path / "files" / FILE, 48 * MIB)
    folder, random = tmp_path / "cache", Random(7)

    def run(endpoint: str, stop_at: int | str | None) -> tuple[int, int]:
        """How it ended, and how many bytes had come."""
        come = 0
        argv = [sys.executable, str(PROGRAM), endpoint, str(folder), TEXT]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            for line in program.stdout:
                word = line.strip()
                come = int(word) if word.isdecimal() else come
                # (what an earlier run has left is verified before anything comes)
                if (come and word == stop_at) or (isinstance(stop_at, int) and come >= stop_at):
                    program.kill()
            return program.wait(), come

    with FakeOrigin(tmp_path / "files") as origin:
        for _ in range(10):
            # (one piece by each of four lines, and half of the next: no run ends however late it is killed)
            origin.fault(FILE, bytes_per_s=6 * MIB, stall_after=MIB + MIB // 2)
            assert run(origin.url, random.randrange(5 * MIB))[0] == -9
            origin.clear()
        ended, come = run(origin.url, Phase.VERIFYING)
        assert come < 48 * MIB
        assert ended in (0, -9)
        ended, come = run(origin.url, None)
        assert (ended, come) == (0, 0)
    manifest = Cache(folder).find(TEXT)
    assert manifest is not None
    kept = folder / key_of(TEXT) / manifest.commit
    assert (kept / "x.bin").read_bytes() == content
    assert [path.name for path in (folder / key_of(TEXT)).glob("*.part")] == []


class Away:
    """Nobody can be reached."""

    async def resolve(self, source: Source, commit: str | None) -> Listing:
        raise FetchFailed("nobody knows that host", Kind.DNS)


WRONG_READ = "x.bin is not what was fetched (piece 1)"


@pytest.mark.parametrize("newest", [False, True])
async def test_what_is_only_noted_to_be_wrong_is_proven_without_its_origin_and_beside_who_runs_by_it(
    tmp_path: Path, origin: FakeOrigin, newest: bool
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        node.origin, node.users = Away(), lambda commit: ["shd-1"]  # type: ignore[assignment]
        use = Cache(node.cache.folder).use(manifest)
        assert use is not None
        Cache(node.cache.folder).note_wrong(manifest, WRONG_READ)
        node.told.clear()
        if newest:
            # (whether there is a newer one nobody can say)
            with pytest.raises(FetchFailed, match="nobody knows that host"):
                await cluster.fetch(node, TEXT, newest=True)
        else:
            assert await cluster.fetch(node, TEXT) == manifest
            assert (node.last.phase, node.last.origin_bytes, node.last.cause) == (Phase.READY, 0, None)
        assert Phase.VERIFYING in {each.phase for each in node.told}
        assert Cache(node.cache.folder).find(TEXT) == manifest
        assert not place(node, manifest, ".manifest.damaged").exists()
        assert node.cache.set_asides == ()
        use.close()


async def test_what_is_noted_and_wrong_stays_under_who_runs_by_it_and_then_costs_what_is_wrong(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        for at in (MIB + 5, 3 * MIB):
            spoil(place(node, manifest), at)
        node.cache.note_wrong(manifest, WRONG_READ)
        node.users = lambda commit: ["shd-1"]
        with pytest.raises(FetchFailed, match=r"in 2 of its 7 pieces; it stays as it is while shd-1 of this"):
            await cluster.fetch(node, TEXT)
        assert place(node, manifest, ".manifest.damaged").exists()
        node.users = lambda commit: []
        mended = await cluster.fetch(node, TEXT)
        assert read_kept(node, mended, "x.bin") == content
        assert node.last.origin_bytes == 2 * MIB
        assert [each.why for each in node.cache.set_asides] == ["x.bin is not what was fetched in 2 of its 7 pieces"]


async def fetch_two(cluster: Cluster, node: Node, folder: Path) -> tuple[Manifest, Manifest]:
    """Two versions, the older one first."""
    older = await cluster.fetch(node, TEXT)
    make_weights(folder / "files" / FILE, 4 * MIB)
    return older, await cluster.fetch(node, TEXT, newest=True)


async def test_a_note_on_the_newest_version_brings_no_launch_back_to_an_older_one(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        older, newer = await fetch_two(cluster, node, tmp_path)
        node.cache.note_wrong(newer, WRONG_READ)
        node.origin = Away()  # type: ignore[assignment]
        assert await cluster.fetch(node, TEXT) == newer
        # (of several that are noted the newest that is right)
        spoil(place(node, newer), 5)
        for each in (older, newer):
            node.cache.note_wrong(each, WRONG_READ)
        assert await cluster.fetch(node, TEXT) == older
        assert not place(node, older, ".manifest.damaged").exists()


@pytest.mark.parametrize("damage", ["marked", "cut off", "no manifest"])
async def test_of_a_newest_version_that_is_damaged_a_launch_mends_it_or_says_which_older_one_it_takes(
    tmp_path: Path, origin: FakeOrigin, content: bytes, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        older, newer = await fetch_two(cluster, node, tmp_path)
        if damage == "no manifest":
            place(node, newer, ".manifest.json").unlink()
        elif damage == "marked":
            spoil(place(node, newer), 5)
            node.cache.note_wrong(newer, WRONG_READ)
        else:
            os.truncate(place(node, newer), 3 * MIB)
        there, node.origin = node.origin, Away()  # type: ignore[assignment]
        assert await cluster.fetch(node, TEXT) == older
        (told,) = [record.getMessage() for record in caplog.records if "the older" in record.getMessage()]
        assert f"({newer.commit[:12]}) in {place(node, newer).parent} is damaged (" in told
        assert f"can't be mended (nobody knows that host): the older {older.commit[:12]} is taken in its place" in told
        assert place(node, newer).exists()
        node.origin = there
        again = await cluster.fetch(node, TEXT)
        assert (again.commit, again.files) == (newer.commit, newer.files)
        assert node.last.origin_bytes == (0 if damage == "no manifest" else MIB)
        assert await cluster.fetch(node, TEXT) == again


async def test_a_newest_version_that_is_only_half_mended_is_mended_by_the_next_launch(
    tmp_path: Path, origin: FakeOrigin, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        older, newer = await fetch_two(cluster, node, tmp_path)
        os.truncate(place(node, newer), 3 * MIB)
        # (whoever had it set aside was killed)
        Cache(node.cache.folder).set_aside(newer, "x.bin is cut off")
        there, node.origin = node.origin, Away()  # type: ignore[assignment]
        assert await cluster.fetch(node, TEXT) == older
        assert f"the older {older.commit[:12]} is taken" in caplog.text
        node.origin = there
        again = await cluster.fetch(node, TEXT)
        assert (again.commit, node.last.origin_bytes) == (newer.commit, MIB)


async def test_an_origin_in_trouble_is_asked_a_few_times_where_an_older_version_will_do(
    tmp_path: Path, origin: FakeOrigin, content: bytes, autojump_clock: MockClock
) -> None:
    async with open_node(tmp_path, origin, seeds=False) as (cluster, node):
        autojump_clock.autojump_threshold = 0.2
        older, newer = await fetch_two(cluster, node, tmp_path)
        os.truncate(place(node, newer), 3)
        node.cache, dead = Unseen(node.cache.folder), Dead(None)
        node.origin = dead  # type: ignore[assignment]
        assert await cluster.fetch(node, TEXT) == older
        assert len(dead.asked) == MEND_TRIES


@pytest.mark.parametrize("has_older", [False, True])
async def test_what_is_noted_and_can_not_be_read_is_not_set_aside_unproven(
    tmp_path: Path, origin: FakeOrigin, content: bytes, has_older: bool
) -> None:
    class Unreadable(Cache):
        def prove(self, manifest: Manifest, *_: Any) -> str | None:
            raise FetchFailed("x.bin can't be read", Kind.DISK)

    async with open_node(tmp_path, origin) as (cluster, node):
        older, newer = await fetch_two(cluster, node, tmp_path)
        if not has_older:
            node.cache.remove(TEXT, older.commit)
        node.cache.note_wrong(newer, WRONG_READ)
        node.cache = Unreadable(node.cache.folder)
        if has_older:
            assert await cluster.fetch(node, TEXT) == older
        else:
            with pytest.raises(FetchFailed, match=r"x\.bin can't be read"):
                await cluster.fetch(node, TEXT)
        assert place(node, newer).exists()


async def test_what_a_look_has_found_is_told_though_all_of_it_is_read_then(tmp_path: Path, origin: FakeOrigin) -> None:
    async with open_node(tmp_path, origin) as (cluster, node):
        manifest = await cluster.fetch(node, TEXT)
        with place(node, manifest).open("r+b") as file:
            file.write(b"<html>")
        assert node.cache.look(manifest) is not None
        await cluster.fetch(node, TEXT)
        assert node.last.origin_bytes == MIB
        (told,) = node.cache.set_asides
        assert told.why.startswith("x.bin is an HTML page")
