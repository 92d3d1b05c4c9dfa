"""What was fetched is found, and nothing half-done ever is, wherever a program was killed."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from llmgw.core.weights import LEAST_PIECE_BYTES, FileListed, Listing, key_of
from llmgw.host.weights.disk.cache import Cache
from llmgw.host.weights.disk.faults import NoRoom
from llmgw.host.weights.disk.in_use import NotRemoved
from llmgw.host.weights.disk.partial import Stopped
from llmgw.host.weights.errors import FetchFailed, Kind

SOURCE = "hf:org/repo/*"
PIECE = LEAST_PIECE_BYTES

# What the programs that are killed do: fetch, from a content that is made anew each time.
STORY = """
import hashlib, os, pathlib, random, shutil, sys
from llmgw.core.weights import FileListed, LEAST_PIECE_BYTES as PIECE, Listing
from llmgw.host.weights.disk.cache import Cache

SIZES = {"a/one.bin": 2 * PIECE + 99, "two.bin": PIECE, "a/empty": 0}
CONTENT = {name: random.Random(name).randbytes(size) for name, size in SIZES.items()}
FILES = tuple(
    FileListed(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    for name, content in CONTENT.items()
)
LISTING = Listing(source="hf:org/repo/*", commit="c" * 40, files=FILES)
PIECES = [
    (number, at // PIECE, content[at : at + PIECE])
    for number, content in enumerate(CONTENT.values())
    for at in range(0, len(content), PIECE)
]

def fetch(folder, seed=0):
    partial = Cache(folder).open_partial(LISTING)
    try:
        had = set(partial.have)
        for file, piece, data in random.Random(seed).sample(PIECES, len(PIECES)):
            if (file, piece) not in partial.have:
                partial.write(file, piece, data, None)
        partial.verify(lambda done: None)
        partial.keep(1.0)
        return had
    finally:
        partial.close()

def is_right(folder):
    found = Cache(folder).find(LISTING.source)
    if found is None:
        return False
    path = Cache(folder).path_of(found, as_file=False)
    for name, content in CONTENT.items():
        assert (path / name).read_bytes() == content, name
    return True
"""


def listing_of(content, *, commit="c" * 40, source=SOURCE):
    files = tuple(
        FileListed(name=name, size_bytes=len(each), sha256=hashlib.sha256(each).hexdigest())
        for name, each in content.items()
    )
    return Listing(source=source, commit=commit, files=files)


CONTENT = {"a/one.bin": bytes(range(200)), "two.bin": bytes(PIECE + 5)}


def fetch(cache, listing, content=CONTENT, *, now=1.0):
    partial = cache.open_partial(listing)
    for number, each in enumerate(content.values()):
        for at in range(0, len(each), PIECE):
            partial.write(number, at // PIECE, each[at : at + PIECE], None)
    partial.verify(lambda done: None)
    manifest = partial.keep(now)
    partial.close()
    return manifest


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "models" / ".cache")


def test_a_cache_that_is_not_there_is_empty(cache, caplog):
    assert cache.find(SOURCE) is None
    assert cache.list() == ()
    assert cache.list_partials() == ()
    assert cache.remove(SOURCE, "c" * 40) == 0
    assert caplog.text == ""
    assert not cache.folder.exists()


def test_the_newest_commit_is_found(cache):
    first = fetch(cache, listing_of(CONTENT), now=1.0)
    second = fetch(cache, listing_of(CONTENT, commit="a" * 40), now=2.0)
    other = fetch(cache, listing_of(CONTENT, source="hf:org/other/x"), now=3.0)
    assert cache.find(SOURCE) == second
    assert Cache(cache.folder).find(SOURCE) == second
    assert set(cache.list()) == {first, second, other}
    path = cache.path_of(second, as_file=False)
    assert path == cache.folder / key_of(SOURCE) / ("a" * 40)
    assert (path / "a/one.bin").read_bytes() == CONTENT["a/one.bin"]
    assert (cache.folder / key_of(SOURCE) / "source").read_text() == f"{SOURCE}\n"


def test_what_its_origin_went_back_to_is_the_newest_again(cache):
    first = fetch(cache, listing_of(CONTENT), now=10.0)
    second = fetch(cache, listing_of(CONTENT, commit="a" * 40), now=5000.0)
    assert cache.renew(SOURCE, "b" * 40, 20.0) is None
    assert cache.renew("another", "a" * 40, 20.0) is None
    assert cache.renew(SOURCE, "a" * 40, 20.0) == second
    renewed = cache.renew(SOURCE, "c" * 40, 20.0)
    assert renewed == replace(first, fetched_at=5001.0)
    assert cache.renew(SOURCE, "c" * 40, 6000.0) == renewed
    for each in (cache, Cache(cache.folder)):
        assert each.find(SOURCE) == renewed
        assert set(each.list()) == {renewed, second}
    assert cache.renew(SOURCE, "a" * 40, 6000.0) == cache.find(SOURCE) == replace(second, fetched_at=6000.0)
    use = cache.use(first)
    with pytest.raises(NotRemoved, match="in use"):
        cache.remove(SOURCE, first.commit)
    use.close()
    for commit in ("c" * 40, "a" * 40):
        assert cache.remove(SOURCE, commit) > PIECE
    assert list(cache.folder.iterdir()) == []


def test_that_it_is_the_newest_again_has_to_be_noted(cache):
    fetch(cache, listing_of(CONTENT), now=1.0)
    second = fetch(cache, listing_of(CONTENT, commit="a" * 40), now=2.0)
    (cache.folder / key_of(SOURCE) / ("c" * 40) / ".manifest.renewed").symlink_to("two.bin")
    with pytest.raises(FetchFailed, match=r"\.manifest\.renewed: it is a link") as raised:
        cache.renew(SOURCE, "c" * 40, 3.0)
    assert raised.value.kind is Kind.DISK
    assert Cache(cache.folder).find(SOURCE) == second


def test_an_engine_that_takes_a_file_is_pointed_at_it(cache):
    source = "hf:org/repo/two.bin"
    manifest = fetch(cache, listing_of({"two.bin": b"x"}, source=source), {"two.bin": b"x"})
    assert cache.path_of(manifest, as_file=True) == cache.folder / key_of(source) / ("c" * 40) / "two.bin"


@pytest.mark.parametrize("damage", ["missing", "shorter", "link", "manifest", "no manifest", "moved"])
def test_a_damaged_commit_is_not_there_and_that_is_said_once(cache, caplog, damage):
    manifest = fetch(cache, listing_of(CONTENT))
    path = cache.path_of(manifest, as_file=False)
    if damage == "missing":
        (path / "two.bin").unlink()
    elif damage == "shorter":
        os.truncate(path / "two.bin", 5)
    elif damage == "link":
        (path / "two.bin").rename(path.parent / "x")
        (path / "two.bin").symlink_to("../x")
    elif damage == "manifest":
        (path / ".manifest.json").write_text("{")
    elif damage == "no manifest":
        (path / ".manifest.json").unlink()
    else:
        path = path.rename(path.with_name("d" * 40))
    for _ in range(3):
        assert cache.find(SOURCE) is None
        assert cache.list() == ()
    assert caplog.text.count(f"weights in {path} can't be used: ") == 1


def flip(path, at=7):
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer"])
def test_what_is_damaged_is_listed_and_can_be_removed(cache, damage):
    manifest = fetch(cache, listing_of(CONTENT))
    file = cache.path_of(manifest, as_file=False) / "two.bin"
    if damage == "missing":
        file.unlink()
    else:
        os.truncate(file, 5 if damage == "shorter" else 9 * PIECE)
    assert cache.list() == ()
    (damaged,) = cache.list_damaged()
    assert damaged.manifest == cache.read(SOURCE, manifest.commit) == manifest
    assert damaged.why.startswith("two.bin ")
    assert cache.judge(manifest) == damaged.why
    assert cache.tell_unread(SOURCE, manifest.commit) is None
    cache.remove(SOURCE, manifest.commit)
    assert cache.list() == cache.list_damaged() == ()
    assert cache.read(SOURCE, manifest.commit) is None
    assert cache.judge(manifest) is None
    assert cache.tell_unread(SOURCE, manifest.commit) is None


def test_a_name_that_can_be_no_commit_is_nowhere(cache):
    manifest = fetch(cache, listing_of(CONTENT))
    for name in ("..", f"../{key_of(SOURCE)}/{manifest.commit}", "."):
        assert cache.read(SOURCE, name) is None
        assert cache.tell_unread(SOURCE, name) is None


def test_what_a_look_at_its_beginning_finds_is_no_copy_until_it_is_proven_again(cache, caplog):
    manifest = fetch(cache, listing_of(CONTENT))
    file = cache.path_of(manifest, as_file=False) / "two.bin"
    assert cache.look(manifest) is None
    with file.open("r+b") as opened:
        opened.write(b"<html>")
    assert (
        cache.look(manifest)
        == cache.judge(manifest)
        == "two.bin is an HTML page, and not the file: its address shows a page about it, or asks for a login"
    )
    assert cache.find(SOURCE) is None
    assert cache.list() == ()
    assert [each.why[:7] for each in cache.list_damaged()] == ["two.bin"]
    assert caplog.text.count("two.bin is an HTML page") == 1
    # (a person has put it back)
    file.write_bytes(CONTENT["two.bin"])
    assert cache.prove(manifest) is None
    assert cache.find(SOURCE) == manifest
    assert cache.list_damaged() == ()


def test_what_was_found_wrong_is_known_to_every_program_on_the_folder_until_it_is_mended(cache):
    manifest = fetch(cache, listing_of(CONTENT))
    path = cache.path_of(manifest, as_file=False)
    other = Cache(cache.folder)
    assert other.find(SOURCE) == manifest
    flip(path / "two.bin")
    why = cache.prove(manifest)
    for each in (other, Cache(cache.folder)):
        assert each.find(SOURCE) is None
        assert each.list() == ()
        (damaged,) = each.list_damaged()
        assert (damaged.manifest, damaged.why) == (manifest, why)
        assert each.judge(manifest) == why
        # (its beginnings say nothing of the rest, nor does a proof that was ended)
        assert each.look(manifest) is None
        assert each.prove(manifest, lambda: True) is None
        assert each.find(SOURCE) is None
    assert cache.renew(SOURCE, manifest.commit, 9.0) is None
    # (a person has put it back)
    flip(path / "two.bin")
    assert Cache(cache.folder).prove(manifest) is None
    assert cache.find(SOURCE) == other.find(SOURCE) == manifest
    assert not (path / ".manifest.damaged").exists()
    flip(path / "two.bin")
    other.set_aside(manifest, other.prove(manifest))
    again = fetch(cache, listing_of(CONTENT), now=9.0)
    assert other.find(SOURCE) == cache.find(SOURCE) == again
    assert not (path / ".manifest.damaged").exists()


@pytest.mark.parametrize("torn", [b"", b"\xff\xfe", None])
def test_a_mark_counts_whatever_is_left_of_it(cache, torn):
    manifest = fetch(cache, listing_of(CONTENT))
    mark = cache.path_of(manifest, as_file=False) / ".manifest.damaged"
    if torn is None:
        mark.mkdir()
    else:
        mark.write_bytes(torn)
    assert cache.find(SOURCE) is None
    assert cache.judge(manifest) == "it was found damaged"
    assert cache.prove(manifest) is None
    assert not mark.exists()
    assert cache.find(SOURCE) == manifest


def test_what_is_found_wrong_as_it_is_given_away_is_no_copy_any_more(cache):
    manifest = fetch(cache, listing_of(CONTENT))
    cache.note_wrong(manifest, "two.bin is not what was fetched (piece 1)")
    assert Cache(cache.folder).judge(manifest) == "two.bin is not what was fetched (piece 1)"
    assert cache.find(SOURCE) is None
    cache.note_wrong(manifest, "two.bin is not what was fetched (piece 0)")
    assert cache.judge(manifest) == "two.bin is not what was fetched (piece 1)"
    cache.remove(SOURCE, manifest.commit)
    cache.note_wrong(manifest, "two.bin is not what was fetched (piece 1)")
    assert cache.list() == cache.list_damaged() == ()


def test_only_what_is_all_there_counts_as_marked(cache):
    manifest = fetch(cache, listing_of(CONTENT))
    path = cache.path_of(manifest, as_file=False)
    assert not cache.is_marked(manifest)
    cache.note_wrong(manifest, "two.bin is not what was fetched (piece 1)")
    for each in (cache, Cache(cache.folder)):
        assert each.is_marked(manifest)
        assert [(found.is_marked, found.manifest) for found in each.list_damaged()] == [(True, manifest)]
    os.truncate(path / "two.bin", 3)
    assert not cache.is_marked(manifest)
    (path / ".manifest.json").unlink()
    assert not cache.is_marked(manifest)
    assert [found.is_marked for found in cache.list_damaged()] == [False]


@pytest.mark.parametrize("damage", ["marked", "cut off", "no manifest"])
def test_an_older_version_is_not_found_while_the_newest_is_damaged(cache, damage):
    older = fetch(cache, listing_of(CONTENT), now=1.0)
    newer = fetch(cache, listing_of(CONTENT, commit="e" * 40), now=2.0)
    path = cache.path_of(newer, as_file=False)
    assert cache.find(SOURCE) == newer
    assert cache.tell_apart(SOURCE) == (newer, ())
    if damage == "marked":
        cache.note_wrong(newer, "two.bin is not what was fetched (piece 1)")
    elif damage == "cut off":
        os.truncate(path / "two.bin", 3)
    else:
        (path / ".manifest.json").unlink()
    for each in (cache, Cache(cache.folder)):
        assert each.find(SOURCE) is None
        whole, (lost,) = each.tell_apart(SOURCE)
        assert (whole, lost.manifest.commit, lost.is_marked) == (older, newer.commit, damage == "marked")
    if damage == "cut off":
        # (also once it is set aside: whoever was to fetch it anew may have been killed)
        cache.set_aside(newer, "two.bin is cut off")
        assert Cache(cache.folder).find(SOURCE) is None
        assert [each.manifest.commit for each in cache.tell_apart(SOURCE)[1]] == [newer.commit]
        newer = fetch(cache, listing_of(CONTENT, commit="e" * 40), now=3.0)
        assert cache.find(SOURCE) == newer
    # what is older than one that is whole is in nobody's way
    cache.note_wrong(older, "two.bin is not what was fetched (piece 1)")
    if damage == "marked":
        assert cache.prove(newer) is None
        assert (cache.find(SOURCE), cache.tell_apart(SOURCE)[1]) == (newer, ())
    cache.remove(SOURCE, newer.commit)
    assert cache.find(SOURCE) is None
    assert [each.manifest.commit for each in cache.tell_apart(SOURCE)[1]] == [older.commit]


def test_what_is_told_to_lie_there_can_be_removed_though_its_manifest_says_nothing(cache):
    manifest = fetch(cache, listing_of(CONTENT))
    path = cache.path_of(manifest, as_file=False)
    (path / ".manifest.json").write_text("{}")
    (path / "odd").symlink_to("/etc")
    # (what can't be removed is not promised)
    assert (cache.list(), cache.list_damaged()) == ((), ())
    (path / "odd").unlink()
    cache.list()
    (damaged,) = cache.list_damaged()
    assert damaged.manifest.size_bytes == manifest.size_bytes
    assert cache.remove(SOURCE, manifest.commit) >= manifest.size_bytes
    assert list(cache.folder.iterdir()) == []


def test_a_commit_that_is_marked_can_be_removed(cache):
    manifest = fetch(cache, listing_of(CONTENT))
    flip(cache.path_of(manifest, as_file=False) / "two.bin")
    assert cache.prove(manifest) is not None
    assert cache.remove(SOURCE, manifest.commit) > PIECE
    assert list(cache.folder.iterdir()) == []


def test_what_can_not_be_noted_is_known_as_long_as_the_program_runs(cache, caplog):
    manifest = fetch(cache, listing_of(CONTENT))
    path = cache.path_of(manifest, as_file=False)
    (path / ".manifest.damaged").mkdir()
    flip(path / "two.bin")
    why = cache.prove(manifest)
    assert "can't be changed" in caplog.text
    (path / ".manifest.damaged").rmdir()
    assert cache.find(SOURCE) is None
    assert cache.judge(manifest) == why


def test_a_commit_that_has_no_manifest_is_listed_with_what_lies_there_and_held(cache):
    manifest = fetch(cache, listing_of(CONTENT))
    path = cache.path_of(manifest, as_file=False)
    for name in (".manifest.json", ".manifest.hashes"):
        (path / name).unlink()
        assert cache.list() == ()
        (damaged,) = cache.list_damaged()
        assert damaged == cache.tell_unread(SOURCE, manifest.commit)
        assert damaged.why == "it holds no manifest"
        assert damaged.manifest.size_bytes == manifest.size_bytes
        use = Cache(cache.folder).use(damaged.manifest)
        with pytest.raises(FetchFailed, match="is damaged: it holds no manifest; it stays as it is while an engine"):
            cache.set_unread_aside(damaged, listing_of(CONTENT))
        with pytest.raises(FetchFailed, match="it stays as it is while an engine of another agent"):
            fetch(cache, listing_of(CONTENT))
        assert path.exists()
        use.close()
    with pytest.raises(Stopped):
        cache.set_unread_aside(damaged, listing_of(CONTENT), lambda: True)
    (path / "mine").touch()
    with pytest.raises(FetchFailed, match="llmgw did not put it there"):
        cache.set_unread_aside(damaged, listing_of(CONTENT))
    (path / "mine").unlink()
    assert path.exists()
    cache.set_unread_aside(damaged, listing_of(CONTENT))
    partial = cache.open_partial(listing_of(CONTENT))
    assert partial.have == {(0, 0), (1, 0), (1, 1)}
    partial.close()


def test_what_is_gone_is_not_damaged(cache):
    manifest = fetch(cache, listing_of(CONTENT))
    cache.remove(SOURCE, manifest.commit)
    assert cache.look(manifest) is None
    assert cache.prove(manifest) == "it is gone"
    cache.set_aside(manifest, "it is gone")
    assert cache.list_damaged() == cache.set_asides == ()


def test_what_can_not_be_read_is_told_with_what_to_do(cache, tmp_path):
    manifest = fetch(cache, listing_of(CONTENT))
    key = cache.folder / key_of(SOURCE)
    key.rename(tmp_path / "away")
    key.symlink_to("/etc")
    with pytest.raises(FetchFailed, match="can't be read") as failed:
        cache.look(manifest)
    assert failed.value.kind is Kind.DISK
    assert "dmesg" in failed.value.remedy


def test_of_a_damaged_commit_that_is_set_aside_what_is_right_is_kept(cache, caplog):
    content = {"one.bin": os.urandom(3 * PIECE), "two.bin": os.urandom(PIECE + 5)}
    listing = listing_of(content)
    manifest = fetch(cache, listing, content)
    path = cache.path_of(manifest, as_file=False)
    flip(path / "one.bin", PIECE + 9)
    (path / "two.bin").unlink()
    told = []
    why = cache.prove(manifest, tell=lambda read, right: told.append((read, right)))
    assert why == "one.bin is not what was fetched in 1 of its 3 pieces, two.bin is missing"
    assert told[-1] == (3 * PIECE, 2 * PIECE)
    assert cache.find(SOURCE) is None
    cache.set_aside(manifest, why)
    assert f"in {path} is damaged: {why}" in caplog.text
    (said,) = cache.set_asides
    assert (said.source, said.commit, said.fetched_at, said.why) == (SOURCE, manifest.commit, 1.0, why)
    assert [each.commit for each in cache.list_partials()] == [manifest.commit]
    partial = cache.open_partial(listing)
    assert partial.have == {(0, 0), (0, 2)}
    partial.close()
    again = fetch(cache, listing, content, now=9.0)
    assert cache.find(SOURCE) == again
    assert [(path / name).read_bytes() for name in content] == list(content.values())
    assert cache.prove(again) is None


def test_nothing_is_set_aside_that_somebody_uses_or_put_something_into(cache):
    manifest = fetch(cache, listing_of(CONTENT))
    path = cache.path_of(manifest, as_file=False)
    flip(path / "two.bin")
    why = cache.prove(manifest)
    use = Cache(cache.folder).use(manifest)
    with pytest.raises(FetchFailed, match="an engine of another agent on this folder runs by it") as failed:
        cache.set_aside(manifest, why)
    assert failed.value.kind is Kind.CORRUPT
    use.close()
    (path / "mine").touch()
    with pytest.raises(FetchFailed, match="llmgw did not put it there"):
        cache.set_aside(manifest, why)
    assert cache.set_asides == ()
    assert path.exists()
    (path / "mine").unlink()
    cache.set_aside(manifest, why)
    assert not path.exists()


def test_junk_in_the_folder_is_passed_over(cache, caplog):
    manifest = fetch(cache, listing_of(CONTENT))
    key = cache.folder / key_of(SOURCE)
    (cache.folder / "lost+found").mkdir()
    (cache.folder / "0123456789abcdef0123456789abcdef").touch()
    (cache.folder / ("f" * 32)).symlink_to("/")
    (cache.folder / os.fsdecode(b"\xff\xfe")).mkdir()
    (key / ("d" * 40)).symlink_to(manifest.commit)
    (key / ("e" * 40)).touch()
    (key / "x.y.part").mkdir()
    assert cache.list() == (manifest,)
    assert cache.find(SOURCE) == manifest
    assert cache.list_partials() == ()


def test_what_changed_on_the_disk_is_read_anew(cache):
    manifest = fetch(cache, listing_of(CONTENT))
    assert cache.find(SOURCE) is cache.find(SOURCE)
    fetch_again = Cache(cache.folder)
    assert fetch_again.remove(SOURCE, manifest.commit) > PIECE
    assert cache.find(SOURCE) is None
    assert fetch(fetch_again, listing_of(CONTENT), now=9.0) == cache.find(SOURCE)


def test_what_is_in_use_is_kept_and_what_is_gone_can_not_be_used(cache):
    manifest = fetch(cache, listing_of(CONTENT))
    use = cache.use(manifest)
    with pytest.raises(NotRemoved, match="in use"):
        Cache(cache.folder).remove(SOURCE, manifest.commit)
    use.close()
    assert cache.remove(SOURCE, manifest.commit) > PIECE
    assert cache.use(manifest) is None
    assert Cache(cache.folder / "none").use(manifest) is None


def test_what_was_begun_is_listed_and_can_be_removed(cache):
    partial = cache.open_partial(listing_of(CONTENT))
    partial.write(0, 0, CONTENT["a/one.bin"], None)
    partial.close()
    (leftover,) = cache.list_partials()
    assert (leftover.key, leftover.source, leftover.commit) == (key_of(SOURCE), SOURCE, "c" * 40)
    assert leftover.changed_at == pytest.approx(time.time(), abs=3600)
    assert cache.remove_partial(leftover) > 200
    assert list(cache.folder.iterdir()) == []


def test_an_address_with_a_secret_is_not_for_everybody(cache):
    source = "https://host/two.bin?token=secret"
    fetch(cache, listing_of({"two.bin": b"x"}, source=source), {"two.bin": b"x"})
    key = cache.folder / key_of(source)
    modes = {path.name: path.stat().st_mode & 0o077 for path in (key / "source", key / ("c" * 40) / ".manifest.json")}
    assert modes == {"source": 0, ".manifest.json": 0}


async def test_eight_that_want_one_source_have_it_one_after_another(cache, autojump_clock):
    inside, most, done, told = 0, 0, 0, []

    async def want(nursery_number):
        nonlocal inside, most, done
        async with Cache(cache.folder).hold(SOURCE, told.append):
            inside += 1
            most = max(most, inside)
            await trio.sleep(3)
            inside -= 1
            done += 1

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(want, number)
    assert (most, done) == (1, 8)
    assert set(told) <= {f"pid {os.getpid()} on host {os.uname().nodename}", "another program"}
    assert told


async def test_two_sources_are_held_at_once(cache):
    async with cache.hold(SOURCE, pytest.fail), cache.hold("another", pytest.fail):
        pass


async def test_a_body_that_fails_lets_go(cache):
    with pytest.raises(RuntimeError, match="mine"):
        async with cache.hold(SOURCE, lambda who: None):
            raise RuntimeError("mine")
    async with cache.hold(SOURCE, pytest.fail):
        pass


async def test_of_a_fetch_that_brought_nothing_nothing_stays(cache):
    async with cache.hold(SOURCE, pytest.fail):
        pass
    assert list(cache.folder.iterdir()) == []
    with trio.move_on_after(60) as scope:
        async with cache.hold(SOURCE, pytest.fail):
            scope.cancel()
            await trio.sleep_forever()
    assert list(cache.folder.iterdir()) == []
    async with cache.hold(SOURCE, pytest.fail):
        await trio.to_thread.run_sync(lambda: cache.open_partial(listing_of(CONTENT)).close())
    assert list(cache.folder.iterdir()) == []
    async with cache.hold(SOURCE, pytest.fail):
        partial = cache.open_partial(listing_of(CONTENT))
        partial.write(0, 0, CONTENT["a/one.bin"], None)
        partial.close()
        cache.open_partial(listing_of(CONTENT, commit="d" * 40)).close()
    assert [leftover.commit for leftover in cache.list_partials()] == ["c" * 40]


async def test_what_does_not_fit_leaves_no_folder(small_disk):
    cache = Cache(small_disk / "cache")
    with pytest.raises(NoRoom):
        async with cache.hold(SOURCE, pytest.fail):
            cache.open_partial(listing_of({"x": bytes(7 * PIECE)}))
    assert list(cache.folder.iterdir()) == []
    assert cache.list_partials() == ()


async def test_what_a_killed_fetch_has_left_that_brought_nothing_is_tidied_away(cache):
    cache.open_partial(listing_of(CONTENT)).close()
    assert len(cache.list_partials()) == 1
    cache.tidy(but=SOURCE)
    assert len(cache.list_partials()) == 1
    cache.tidy()
    assert list(cache.folder.iterdir()) == []


async def test_what_is_held_shows_life(cache):
    await cache.show_life(SOURCE)
    assert not cache.folder.exists()
    async with cache.hold(SOURCE, pytest.fail):
        lock = cache.folder / key_of(SOURCE) / ".lock"
        os.utime(lock, (1, 1))
        await cache.show_life(SOURCE)
        assert lock.stat().st_mtime > 1


async def test_whoever_waits_has_it_when_its_folder_goes_with_the_first(cache, autojump_clock):
    seen = trio.Event()
    async with trio.open_nursery() as nursery, cache.hold(SOURCE, pytest.fail):
        nursery.start_soon(wait_and_hold, Cache(cache.folder), seen)
        await seen.wait()
    assert list(cache.folder.iterdir()) == []


async def test_a_folder_that_is_another_programs_by_now_is_left_alone(cache):
    async with cache.hold(SOURCE, pytest.fail):
        shutil.rmtree(cache.folder)
        theirs = cache.hold(SOURCE, pytest.fail)
        await theirs.__aenter__()
    assert (cache.folder / key_of(SOURCE) / ".lock").exists()
    await theirs.__aexit__(None, None, None)
    assert list(cache.folder.iterdir()) == []


async def test_what_killed_fetches_have_left_is_tidied_away(cache):
    cache.tidy()
    await trio.to_thread.run_sync(fetch, cache, listing_of(CONTENT))
    for source in ("left", "emptied", "held"):
        (cache.folder / key_of(source)).mkdir()
    (cache.folder / key_of("left") / ".lock").touch()
    (cache.folder / key_of("left") / "source").touch()
    (cache.folder / "mine").mkdir()
    async with cache.hold("held", pytest.fail):
        cache.tidy()
        assert {path.name for path in cache.folder.iterdir()} == {key_of(SOURCE), key_of("held"), "mine"}
    (cache.folder / key_of("left")).mkdir()
    assert cache.remove(SOURCE, "c" * 40) > PIECE
    assert [path.name for path in cache.folder.iterdir()] == ["mine"]


async def test_a_source_that_goes_away_while_somebody_waits_is_held_anew(cache, autojump_clock):
    manifest = await trio.to_thread.run_sync(fetch, cache, listing_of(CONTENT))
    async with cache.hold(SOURCE, lambda who: None), trio.open_nursery() as nursery:
        seen = trio.Event()
        nursery.start_soon(wait_and_hold, cache, seen)
        await seen.wait()
        with pytest.raises(NotRemoved, match="fetched or removed"):
            cache.remove(SOURCE, manifest.commit)
        nursery.cancel_scope.cancel()
    assert cache.remove(SOURCE, manifest.commit) > PIECE
    assert list(cache.folder.iterdir()) == []
    async with cache.hold(SOURCE, pytest.fail):
        pass


async def wait_and_hold(cache, seen):
    async with cache.hold(SOURCE, lambda who: seen.set()):
        pass


@pytest.mark.parametrize("what", ["file", "link"])
async def test_a_folder_that_can_not_be_used_says_so(cache, what):
    cache.folder.parent.mkdir()
    if what == "file":
        cache.folder.touch()
    else:
        cache.folder.mkdir()
        (cache.folder / key_of(SOURCE)).symlink_to("/")
    with pytest.raises(FetchFailed, match=str(cache.folder)) as raised:
        async with cache.hold(SOURCE, lambda who: None):
            pass
    assert raised.value.kind is Kind.DISK
    assert "weights.cache" in raised.value.remedy
    with pytest.raises(FetchFailed):
        cache.open_partial(listing_of(CONTENT))
    assert cache.find(SOURCE) is None


def run(code, *arguments, **more):
    argv = [sys.executable, "-c", STORY + code, *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, check=True, **more).stdout


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_users_folder_is_told_with_its_remedy(tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o055)
    place = tmp_path / "cache"
    place.mkdir(mode=0o755)
    said = run(
        """
os.setuid(65534)
try:
    fetch(pathlib.Path(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error.kind, error.message, "|", error.remedy)
""",
        place,
    )
    assert said.startswith(f"FetchFailed disk weights can't be kept in {place} ({place}/")
    assert "Permission denied, on /" in said
    assert "as user 65534) | give it to that user or name another folder in weights.cache" in said


@pytest.mark.slow
def test_a_program_that_is_killed_at_ten_moments_goes_on_each_time(tmp_path):
    code = (
        "import time\n"
        "os.write(1, b'.')\n"
        "partial = Cache(pathlib.Path(sys.argv[1])).open_partial(LISTING)\n"
        "for file, piece, data in random.Random(int(sys.argv[2])).sample(PIECES, len(PIECES)):\n"
        "    if (file, piece) not in partial.have:\n"
        "        partial.write(file, piece, data, None)\n"
        "        os.write(1, b'.')\n"
        "        time.sleep(0.005)\n"
        "partial.verify(lambda done: os.write(1, b'.')); partial.keep(1.0); os.write(1, b'!')\n"
    )
    dice = random.Random(11)
    for seed in range(10):
        argv = [sys.executable, "-c", STORY + code, tmp_path, str(seed)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as program:
            # a random number of steps, and a random moment of the next one
            program.stdout.read(dice.randrange(1, 5))
            time.sleep(dice.random() * 0.01)
            program.kill()
        assert len(Cache(tmp_path).list()) <= 1
    assert run("folder = pathlib.Path(sys.argv[1]); fetch(folder); print(is_right(folder), end='')", tmp_path) == "True"


@pytest.fixture
def fast(tmp_path):
    """A folder in memory, where there is one: what is tested does hundreds of syncs."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK | os.X_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield Path(place)


# Each call into the operating system that a fetch makes is one after which it may be killed, or which may fail.
BOUNDARIES = """
HARMLESS = {"close", "getpid", "fspath", "fsencode", "fsdecode", "makedev"}

def count_calls(act, folder, fail=None):
    seen = [0]
    def watch(frame, event, function):
        room = getattr(function, "__module__", None)
        if event == "c_call" and room in ("posix", "fcntl") and function.__name__ not in HARMLESS:
            seen[0] += 1
            if fail is not None:
                fail(seen[0])
    sys.setprofile(watch)
    try:
        act(folder)
    finally:
        sys.setprofile(None)
    return seen[0]

def run_apart(work):
    child = os.fork()
    if child == 0:
        try:
            os._exit(work() or 0)
        except BaseException as error:
            import traceback; traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

KILLED = (
    BOUNDARIES
    + """
root = pathlib.Path(sys.argv[1])
total = count_calls(fetch, root / "whole")
for number in range(1, total + 1):
    folder = root / str(number)
    def die(count):
        if count == number:
            os._exit(77)
    assert run_apart(lambda: count_calls(fetch, folder, die)) == 77, number
    assert run_apart(lambda: is_right(folder) and 5) in (0, 5), number
    assert run_apart(lambda: fetch(folder, 1) and 0) == 0, number
    assert run_apart(lambda: 0 if is_right(folder) else 9) == 0, number
    left = sorted(path.name for path in folder.glob("*/*"))
    assert left == ["c" * 40, "source"], (number, left)
    shutil.rmtree(folder)
print(total, end="")
"""
)


MENDED = (
    BOUNDARIES
    + """
root, damage = pathlib.Path(sys.argv[1]), sys.argv[2]
def spoil(folder):
    fetch(folder)
    path = next(folder.glob("*/*/two.bin"))
    if damage == "flip":
        content = bytearray(path.read_bytes())
        content[9] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()

def mend(folder):
    cache = Cache(folder)
    cache.list()
    found = cache.read(LISTING.source, LISTING.commit)
    if found is not None and (why := cache.prove(found)) is not None:
        cache.set_aside(found, why)
    fetch(folder, 1)

spoil(root / "whole")
total = count_calls(mend, root / "whole")
for number in range(1, total + 1):
    folder = root / str(number)
    spoil(folder)
    def die(count):
        if count == number:
            os._exit(77)
    assert run_apart(lambda: count_calls(mend, folder, die)) == 77, number
    # it is under its name, as it was or mended, or what is left of a fetch
    assert len(list(folder.glob("*/" + "c" * 40 + "*"))) == 1, number
    assert run_apart(lambda: mend(folder) and 0) == 0, number
    assert run_apart(lambda: 0 if is_right(folder) else 9) == 0, number
    left = sorted(path.name for path in folder.glob("*/*"))
    assert left == ["c" * 40, "source"], (number, left)
    shutil.rmtree(folder)
print(total, end="")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "missing"])
def test_a_kill_while_it_is_mended_leaves_what_it_was_or_what_can_be_gone_on_from(fast, damage):
    assert int(run(MENDED, fast, damage)) > 80


@pytest.mark.slow
def test_a_kill_before_any_call_to_the_system_leaves_what_can_be_gone_on_from(fast):
    assert int(run(KILLED, fast)) > 60


FAILED = (
    BOUNDARIES
    + """
from llmgw.host.weights.errors import FetchFailed
root, number_of_error = pathlib.Path(sys.argv[1]), int(sys.argv[2])
total = count_calls(fetch, root / "whole")
told = 0
for number in range(1, total + 1):
    folder = root / str(number)
    def fail(count):
        if count == number:
            raise OSError(number_of_error, os.strerror(number_of_error))
    before = len(os.listdir("/proc/self/fd"))
    try:
        count_calls(fetch, folder, fail)
    except FetchFailed as error:
        assert error.kind == "disk", error.message
        assert "weights can't be kept in " + str(folder) in error.message, error.message
        told += 1
    assert len(os.listdir("/proc/self/fd")) == before, number
    fetch(folder, 1)
    assert is_right(folder), number
    # (who looks for room to be had locks what it looks at)
    left = sorted(path.name for path in folder.glob("*/*") if path.name != ".lock")
    assert left == ["c" * 40, "source"], (number, left)
    shutil.rmtree(folder)
print(told, end="")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [28, 5], ids=["ENOSPC", "EIO"])
def test_any_call_to_the_system_that_fails_is_told_and_can_be_gone_on_from(fast, number):
    # (what a full disk refuses is tried once more, when some room was made)
    assert int(run(FAILED, fast, number)) > 40


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", place]
    if subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_too_little_room_is_told_with_figures_before_the_first_byte(small_disk):
    cache = Cache(small_disk / "cache")
    with pytest.raises(NoRoom) as raised:
        cache.open_partial(replace(listing_of(CONTENT), files=(FileListed(name="x", size_bytes=7 * PIECE),)))
    assert raised.value.message == (f"7.4MB are needed in {cache.folder}, and 6.3MB are free on {small_disk} (tmpfs)")
    assert raised.value.remedy.startswith("free 1.1MB there")


async def test_what_one_fetch_was_promised_another_one_does_not_get(small_disk):
    cache = Cache(small_disk / "cache")
    async with cache.hold(SOURCE, pytest.fail):
        first = cache.open_partial(listing_of({"x": bytes(4 * PIECE)}))
        with pytest.raises(NoRoom):
            cache.open_partial(listing_of({"x": bytes(4 * PIECE)}, source="another"))
        cache.open_partial(listing_of({"x": bytes(PIECE)}, source="another")).close()
        first.close()


KILLED_WITH_ROOM = """
import signal
from dataclasses import replace
more = (FileListed(name="more", size_bytes=3 * PIECE), FileListed(name="two.bin", size_bytes=PIECE))
partial = Cache(pathlib.Path(sys.argv[1])).open_partial(replace(LISTING, files=more))
partial.write(1, 0, CONTENT["two.bin"], None)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_room_that_a_killed_fetch_had_taken_goes_to_one_that_needs_it(small_disk):
    cache = Cache(small_disk / "cache")
    with pytest.raises(subprocess.CalledProcessError):
        run(KILLED_WITH_ROOM, cache.folder)
    (leftover,) = cache.list_partials()
    if leftover.size_bytes < 4 * PIECE:
        pytest.skip("this filesystem takes no room beforehand")
    cache.open_partial(listing_of({"x": bytes(4 * PIECE)}, source="another")).close()
    (left,) = (each for each in cache.list_partials() if each.source == SOURCE)
    assert left.size_bytes < 2 * PIECE
    part = cache.folder / left.key / f"{left.commit}.part"
    assert (part / "two.bin").read_bytes() == random.Random("two.bin").randbytes(PIECE)


def test_a_commit_on_its_way_makes_room_for_the_next_of_its_source(small_disk):
    cache = Cache(small_disk / "cache")
    partial = cache.open_partial(listing_of({"x": bytes(4 * PIECE)}, commit="a" * 40))
    for piece in range(4):
        partial.write(0, piece, bytes(PIECE), None)
    partial.close()
    cache.open_partial(listing_of({"x": bytes(4 * PIECE)}, commit="b" * 40)).close()
    assert [leftover.commit for leftover in cache.list_partials()] == ["b" * 40]


def test_a_disk_that_fills_up_in_the_middle_keeps_what_came(small_disk):
    cache = Cache(small_disk / "cache")
    content = {"x": random.Random(1).randbytes(3 * PIECE)}
    listing = listing_of(content)
    partial = cache.open_partial(listing)
    partial.write(0, 0, content["x"][:PIECE], None)
    # as where room can't be taken beforehand
    path = small_disk / "cache" / key_of(SOURCE) / f"{'c' * 40}.part" / "x"
    os.truncate(path, PIECE)
    os.truncate(path, 3 * PIECE)
    (small_disk / "fill").write_bytes(bytes(int(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize)))
    with pytest.raises(NoRoom, match=r"No space left on device; 0B are free on .*small \(tmpfs\)") as raised:
        partial.write(0, 1, content["x"][PIECE : 2 * PIECE], None)
    assert "what has come is kept" in raised.value.remedy
    assert partial.have == {(0, 0)}
    partial.close()
    (small_disk / "fill").unlink()
    partial = cache.open_partial(listing)
    assert partial.have == {(0, 0)}
    partial.close()


def test_a_filesystem_that_takes_no_file_more_says_so(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=60m,nr_inodes=4", "tmpfs", place]
    if subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        for folder in (place / "cache", place / "none" / "cache"):
            with pytest.raises(NoRoom, match=rf"no file more can be made on {place} \(tmpfs\)") as raised:
                Cache(folder).open_partial(listing_of(CONTENT))
            assert "no inodes left" in raised.value.message
            assert "B are free" not in raised.value.message
            assert "df -i" in raised.value.remedy
    finally:
        subprocess.run(["umount", place], check=True)
