"""A commit on its way: pieces in any order, nothing believed, nothing lost but what a kill took."""

from __future__ import annotations

import hashlib
import os
import random
import threading

import pytest
from blake3 import blake3
from weight_files import write_gguf

from llmgw.core.weights import LEAST_PIECE_BYTES, FileListed, Listing
from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.faults import NoRoom
from llmgw.host.weights.disk.partial import Corrupt, CorruptFile, Stopped, never, open_partial, read_at
from llmgw.host.weights.disk.reserve import Reservations
from llmgw.host.weights.errors import FetchFailed, Kind

PIECE = LEAST_PIECE_BYTES
KEY = "0123456789abcdef" * 2
COMMIT = "c" * 40


def make_bytes(size, seed=0):
    return random.Random(seed).randbytes(size)


CONTENT = {
    "a/one.bin": make_bytes(3 * PIECE + 12345, 1),
    "two.bin": make_bytes(PIECE, 2),
    "a/b/empty": b"",
    "a/three.bin": make_bytes(777, 3),
}


def listing_of(content, *, known=True, commit=COMMIT):
    files = tuple(
        FileListed(name=name, size_bytes=len(each), sha256=hashlib.sha256(each).hexdigest() if known else None)
        for name, each in content.items()
    )
    return Listing(source="hf:org/repo/*", commit=commit, files=files)


LISTING = listing_of(CONTENT)
PIECES = [
    (number, at // PIECE, each[at : at + PIECE])
    for number, each in enumerate(CONTENT.values())
    for at in range(0, len(each), PIECE)
]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / KEY


@pytest.fixture
def reopen(folder):
    """Open the partial; what is open is closed first."""
    opened = []

    def reopen(listing=LISTING, *, stop=never, reservations=None, tell=lambda done: None):
        for each in opened:
            each.close()
        with open_folder(folder, make=True) as key:
            opened.append(open_partial(key, listing, reservations or Reservations(), stop, tell=tell))
        return opened[-1]

    yield reopen
    for each in opened:
        each.close()


def write_all(partial, pieces=PIECES):
    for file, piece, data in pieces:
        partial.write(file, piece, data, None)


def finish(partial):
    partial.verify(lambda done: None)
    return partial.keep(5.0)


def read_final(folder):
    return {name: (folder / COMMIT / name).read_bytes() for name in CONTENT}


def test_pieces_in_any_order_become_the_commit(reopen, folder):
    shuffled = random.Random(7).sample(PIECES, len(PIECES))
    partial = reopen()
    for file, piece, data in shuffled:
        assert partial.write(file, piece, memoryview(bytearray(data)), None) == blake3(data).hexdigest()
        assert partial.read(file, piece) == data
    assert partial.have == {(file, piece) for file, piece, _ in PIECES}
    assert partial.log == [(file, piece, blake3(data).hexdigest()) for file, piece, data in shuffled]
    assert [path.name for path in folder.iterdir()] == [f"{COMMIT}.part"]
    told = []
    partial.verify(told.append)
    assert told == sorted(told)
    assert told[-1] == LISTING.size_bytes
    manifest = partial.keep(12.5)
    assert (manifest.source, manifest.commit, manifest.fetched_at) == (LISTING.source, COMMIT, 12.5)
    for file, content in zip(manifest.files, CONTENT.values(), strict=True):
        assert file.sha256 == hashlib.sha256(content).hexdigest()
        assert list(file.pieces) == [
            blake3(content[at : at + PIECE]).hexdigest() for at in range(0, len(content), PIECE)
        ]
    assert read_final(folder) == CONTENT
    assert [path.name for path in folder.iterdir()] == [COMMIT]
    assert sorted(path.name for path in (folder / COMMIT).iterdir()) == [
        ".manifest.hashes",
        ".manifest.json",
        "a",
        "two.bin",
    ]
    # who takes pieces from here goes on
    assert partial.read(*PIECES[0][:2]) == PIECES[0][2]


def test_what_is_there_is_found_again(reopen):
    write_all(reopen(), PIECES[1:4])
    partial = reopen()
    assert partial.have == {(file, piece) for file, piece, _ in PIECES[1:4]}
    assert partial.log == [(file, piece, blake3(data).hexdigest()) for file, piece, data in PIECES[1:4]]
    write_all(partial)
    assert len(partial.log) == len(PIECES)
    finish(partial)


def test_a_flipped_byte_costs_its_piece_only(reopen, folder):
    write_all(reopen())
    with (folder / f"{COMMIT}.part" / "a/one.bin").open("r+b") as file:
        file.seek(2 * PIECE + 5)
        byte = file.read(1)[0]
        file.seek(2 * PIECE + 5)
        file.write(bytes([byte ^ 1]))
    partial = reopen()
    assert partial.have == {(file, piece) for file, piece, _ in PIECES} - {(0, 2)}
    write_all(partial, [PIECES[2]])
    finish(partial)
    assert read_final(folder) == CONTENT


@pytest.mark.parametrize("damage", ["cut", "grow", "remove", "empty"])
def test_whatever_becomes_of_a_file_only_what_is_right_counts(reopen, folder, damage):
    write_all(reopen())
    path = folder / f"{COMMIT}.part" / "a/one.bin"
    kept = {(0, 0)}
    if damage == "remove":
        path.unlink()
        kept = set()
    elif damage == "grow":
        os.truncate(path, len(CONTENT["a/one.bin"]) + 9)
        kept = {(0, piece) for piece in range(4)}
    else:
        os.truncate(path, 0 if damage == "empty" else PIECE + 7)
        kept = {(0, 0)} if damage == "cut" else set()
    partial = reopen()
    assert {each for each in partial.have if each[0] == 0} == kept
    write_all(partial)
    finish(partial)
    assert read_final(folder) == CONTENT


def test_a_lost_or_senseless_list_costs_time_and_nothing_else(reopen, folder):
    write_all(reopen())
    notes = folder / f"{COMMIT}.part" / ".pieces"
    notes.write_bytes(b"7 0 " + b"a" * 64 + b"\n0 99 " + b"a" * 64 + b"\n0 1 " + b"a" * 64 + b"\n0 2")
    partial = reopen()
    assert partial.have == set()
    write_all(partial)
    finish(partial)
    assert read_final(folder) == CONTENT


def test_a_piece_that_is_not_what_was_said_is_not_written(reopen):
    partial, digest = reopen(), blake3(PIECES[1][2]).hexdigest()
    with pytest.raises(Corrupt, match=r"piece 1 of a/one\.bin"):
        partial.write(0, 1, PIECES[0][2], digest)
    assert (partial.have, partial.log) == (set(), [])
    with pytest.raises(LookupError):
        partial.read(0, 1)
    assert partial.write(0, 1, PIECES[1][2], digest) == digest


def test_a_piece_that_came_already_stays_as_it_is(reopen):
    partial = reopen()
    first = partial.write(0, 0, PIECES[0][2], None)
    assert partial.write(0, 0, bytes(PIECE), None) == first
    assert partial.read(0, 0) == PIECES[0][2]
    assert len(partial.log) == 1


@pytest.mark.parametrize(
    ("file", "piece", "size"), [(0, 0, 5), (0, 3, PIECE), (0, 4, 1), (4, 0, 1), (-1, 0, 777), (2, 0, 0)]
)
def test_a_piece_that_there_is_not_is_refused(reopen, file, piece, size):
    with pytest.raises(ValueError, match="piece"):
        reopen().write(file, piece, bytes(size), None)


def test_a_whole_file_that_is_wrong_is_named_and_forgotten(reopen):
    partial = reopen()
    partial.write(0, 2, bytes(PIECE), None)
    write_all(partial)
    before = list(partial.log)
    with pytest.raises(
        CorruptFile, match=r"a/one\.bin is not what its origin says: its SHA-256 is \w{64}, not"
    ) as raised:
        partial.verify(lambda done: None)
    assert (raised.value.file, raised.value.kind) == (0, Kind.CORRUPT)
    assert {file for file, _ in partial.have} == {1, 3}
    assert partial.log == before
    partial.forget(0)
    with pytest.raises(ValueError, match="verified first"):
        partial.keep(1.0)
    # nor does the next program take it for something
    partial = reopen()
    assert {file for file, _ in partial.have} == {1, 3}
    write_all(partial)
    assert partial.log[-1] == (0, 3, blake3(PIECES[3][2]).hexdigest())
    finish(partial)


def test_where_nobody_knows_the_sum_it_is_noted(reopen):
    partial = reopen(listing_of(CONTENT, known=False))
    write_all(partial)
    assert finish(partial).files[0].sha256 == LISTING.files[0].sha256


def test_what_is_not_whole_is_neither_verified_nor_kept(reopen, folder):
    partial = reopen()
    write_all(partial, PIECES[:-1])
    with pytest.raises(ValueError, match="to be fetched first"):
        partial.verify(lambda done: None)
    with pytest.raises(ValueError, match="to be verified first"):
        partial.keep(1.0)
    assert [path.name for path in folder.iterdir()] == [f"{COMMIT}.part"]


def test_a_page_in_the_place_of_weights_is_named(reopen):
    content = {"model.gguf": b"<!DOCTYPE html><html><body>Please log in</body></html>"}
    partial = reopen(listing_of(content, known=False))
    partial.write(0, 0, content["model.gguf"], None)
    with pytest.raises(FetchFailed, match=r"^model\.gguf is an HTML page") as raised:
        partial.verify(lambda done: None)
    assert not isinstance(raised.value, CorruptFile)
    assert raised.value.remedy
    with pytest.raises(ValueError, match="verified first"):
        partial.keep(1.0)


def test_parts_that_are_not_of_one_model_are_named(reopen):
    def part(number, name):
        return write_gguf({"split.no": number - 1, "split.count": 2}, ((name, (32, 4), 2),))

    def fetch(*parts):
        content = {f"m-0000{number}-of-00002.gguf": raw for number, raw in enumerate(parts, 1)}
        partial = reopen(listing_of(content, known=False, commit=f"{len(commits):040}"))
        commits.append(1)
        for number, raw in enumerate(content.values()):
            partial.write(number, 0, raw, None)
        partial.verify(lambda done: None)

    commits = []
    fetch(part(1, "a"), part(2, "b"))
    with pytest.raises(FetchFailed, match="holds the same tensors as") as raised:
        fetch(part(1, "a"), part(2, "a"))
    assert (raised.value.kind, bool(raised.value.remedy)) == (Kind.CORRUPT, True)
    with pytest.raises(FetchFailed, match=r"^m-00002-of-00002\.gguf says in its header that it is part 1 of 2"):
        fetch(part(1, "a"), part(1, "a"))


def test_looking_through_verifying_and_keeping_stop_when_told_to(reopen, folder):
    content = {"x": make_bytes(14 * PIECE + 5, 4), "y": b"y"}
    listing = listing_of(content)
    pieces = [(0, at // PIECE, content["x"][at : at + PIECE]) for at in range(0, len(content["x"]), PIECE)]
    # (the last one to come is the first: then not all of the others are taken in at once)
    write_all(reopen(listing), [(1, 0, b"y"), *reversed(pieces)])
    asked = []
    with pytest.raises(Stopped):
        reopen(listing, stop=lambda: len(asked) > 2 or asked.append(1))
    partial = reopen(listing)
    partial.forget(0)
    write_all(partial, list(reversed(pieces)))
    with pytest.raises(Stopped):
        partial.verify(lambda done: None, lambda: True)

    class Cancelled(BaseException):
        pass

    def stop():
        raise Cancelled

    with pytest.raises(Cancelled):
        partial.verify(lambda done: None, stop)
    partial.verify(lambda done: None)
    with pytest.raises(Cancelled):
        partial.keep(1.0, stop)
    asked.clear()
    with pytest.raises(Stopped):
        partial.keep(1.0, lambda: bool(asked) or asked.append(1))
    assert [path.name for path in folder.iterdir()] == [f"{COMMIT}.part"]
    finish(partial)


def test_how_much_is_here_is_counted_as_it_comes_and_goes(reopen):
    partial = reopen()
    write_all(partial)
    write_all(partial, PIECES[:2])
    assert partial.have_bytes == LISTING.size_bytes
    told = []
    partial = reopen(tell=told.append)
    assert partial.have_bytes == LISTING.size_bytes
    assert told == sorted(told)
    assert told[-1] == LISTING.size_bytes
    partial.forget(0)
    assert partial.have_bytes == LISTING.size_bytes - LISTING.files[0].size_bytes


def test_what_has_not_come_takes_no_room_once_nobody_fetches_it(reopen, folder):
    path = folder / f"{COMMIT}.part" / "a/one.bin"
    partial = reopen()
    if path.stat().st_blocks * 512 < 3 * PIECE:
        pytest.skip("this filesystem takes no room beforehand")
    write_all(partial, PIECES[2:3])
    partial.close()
    partial.close()
    assert PIECE <= path.stat().st_blocks * 512 < 2 * PIECE
    # also where it ends before anything comes
    with pytest.raises(Stopped):
        reopen(stop=lambda: True)
    assert PIECE <= path.stat().st_blocks * 512 < 2 * PIECE
    partial = reopen()
    assert partial.have == {PIECES[2][:2]}
    write_all(partial)
    finish(partial)
    partial.close()
    assert read_final(folder) == CONTENT


def test_the_last_to_be_kept_is_the_newest_whatever_the_clock_said(reopen):
    kept = []
    for commit, now in (("c" * 40, 5000.0), ("b" * 40, 100.0)):
        partial = reopen(listing_of({"x": b"x"}, commit=commit))
        partial.write(0, 0, b"x", None)
        partial.verify(lambda done: None)
        kept.append(partial.keep(now).fetched_at)
    assert kept == [5000.0, 5001.0]


def test_many_threads_at_once_make_one_right_file(reopen, folder):
    partial = reopen()
    jobs = [*PIECES, *PIECES]
    random.Random(3).shuffle(jobs)
    lock, failed = threading.Lock(), []

    def work():
        while True:
            with lock:
                if not jobs:
                    return
                file, piece, data = jobs.pop()
            try:
                partial.write(file, piece, data, None)
            except BaseException as error:
                failed.append(error)
                raise

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(partial.log) == len(PIECES)
    finish(partial)
    assert read_final(folder) == CONTENT


def test_after_its_close_it_gives_nothing_and_holds_nothing_open(reopen):
    before = len(os.listdir("/proc/self/fd"))
    partial = reopen()
    write_all(partial)
    partial.close()
    partial.close()
    with pytest.raises(LookupError):
        partial.read(0, 0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", ".pieces", ".manifest.json", "a\nb", "x" * 300, "a", "a/one.bin"]
)
def test_a_hostile_name_is_refused_before_anything_is_made(reopen, folder, name):
    listing = listing_of(CONTENT)
    listing = Listing(source="s", commit=COMMIT, files=(*listing.files, FileListed(name=name, size_bytes=1)))
    with pytest.raises(FetchFailed, match="it can't be kept") as raised:
        reopen(listing)
    assert raised.value.kind is Kind.REFUSED
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("commit", ["../x", "a.part", "", "a/b", "source", ".lock"])
def test_a_hostile_commit_is_refused(reopen, commit):
    with pytest.raises(FetchFailed, match="can't be a commit"):
        reopen(listing_of(CONTENT, commit=commit))


def test_nothing_is_no_commit(reopen):
    with pytest.raises(FetchFailed, match="nothing in") as raised:
        reopen(listing_of({}))
    assert raised.value.kind is Kind.NO_FILE


@pytest.fixture
def precious(tmp_path):
    """What lies elsewhere, and must stay as it is."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "one.bin").write_text("mine")
    yield place
    assert {path.name: path.read_text() for path in place.iterdir()} == {"one.bin": "mine"}


@pytest.mark.parametrize("planted", ["part", "hard"])
def test_what_was_planted_is_not_followed_and_is_named(reopen, folder, precious, planted):
    part = folder / f"{COMMIT}.part"
    folder.mkdir()
    if planted == "part":
        part.symlink_to(precious)
        place = part
    else:
        place = part / "a/one.bin"
        place.parent.mkdir(parents=True)
        os.link(precious / "one.bin", place)
    with pytest.raises(FetchFailed) as raised:
        reopen()
    assert f"{place}: it is " in raised.value.message
    assert raised.value.remedy.startswith(f"remove {place}, or ")
    assert raised.value.kind is Kind.DISK
    if planted == "hard":
        place.unlink()


@pytest.mark.parametrize("planted", ["a", "a/one.bin", ".pieces", ".manifest.json"])
def test_a_link_inside_makes_way_for_what_belongs_there(reopen, folder, precious, planted):
    place = folder / f"{COMMIT}.part" / planted
    place.parent.mkdir(parents=True)
    place.symlink_to(precious if planted == "a" else precious / "one.bin")
    partial = reopen()
    write_all(partial)
    finish(partial)
    assert read_final(folder) == CONTENT
    assert not any(path.is_symlink() for path in folder.rglob("*"))


def test_a_pipe_in_the_place_of_a_file_holds_nobody(reopen, folder):
    part = folder / f"{COMMIT}.part"
    part.mkdir(parents=True)
    os.mkfifo(part / "two.bin")
    write_all(reopen())


def test_what_does_not_belong_there_does_not_become_a_part_of_the_model(reopen, folder, precious):
    part = folder / f"{COMMIT}.part"
    (part / "x/y").mkdir(parents=True)
    (part / "x/y/evil.safetensors").touch()
    (part / "l").symlink_to(precious)
    (part / "a").mkdir()
    (part / "a/.pieces").touch()
    partial = reopen()
    write_all(partial)
    manifest = finish(partial)
    found = {str(path.relative_to(folder / COMMIT)) for path in (folder / COMMIT).rglob("*") if not path.is_dir()}
    assert found == {file.name for file in manifest.files} | {".manifest.json", ".manifest.hashes"}


def test_the_manifest_that_was_written_before_a_kill_is_written_again(reopen, folder):
    partial = reopen()
    write_all(partial)
    (folder / f"{COMMIT}.part" / ".manifest.json").write_text("{half")
    partial = reopen()
    partial.verify(lambda done: None)
    partial.keep(1.0)
    assert read_final(folder) == CONTENT


def test_a_damaged_commit_is_replaced_by_the_whole_one(reopen, folder):
    partial = reopen()
    write_all(partial)
    finish(partial)
    (folder / COMMIT / "two.bin").unlink()
    (folder / f"{COMMIT}.gone").mkdir()
    partial = reopen()
    write_all(partial)
    assert finish(partial).fetched_at == 5.0
    assert read_final(folder) == CONTENT
    assert [path.name for path in folder.iterdir()] == [COMMIT]


def test_a_whole_commit_that_is_there_already_stays(reopen, folder):
    partial = reopen()
    write_all(partial)
    partial.verify(lambda done: None)
    partial.keep(3.0)
    partial = reopen()
    write_all(partial)
    assert finish(partial).fetched_at == 3.0
    assert [path.name for path in folder.iterdir()] == [COMMIT]


def test_what_a_person_put_beside_a_damaged_commit_is_not_removed(reopen, folder):
    (folder / COMMIT).mkdir(parents=True)
    (folder / COMMIT / "notes.txt").write_text("mine")
    partial = reopen()
    write_all(partial)
    with pytest.raises(FetchFailed, match=r"notes\.txt: llmgw did not put it there"):
        finish(partial)
    (folder / COMMIT / "notes.txt").unlink()
    partial = reopen()
    assert len(partial.have) == len(PIECES)
    finish(partial)


def test_other_commits_on_their_way_go_once_this_one_is_whole(reopen, folder):
    write_all(reopen(listing_of(CONTENT, commit="d" * 40)))
    (folder / ("e" * 40)).mkdir()
    (folder / "x.y.part").mkdir()
    partial = reopen()
    write_all(partial)
    assert (folder / f"{'d' * 40}.part").exists()
    finish(partial)
    assert {path.name for path in folder.iterdir()} == {COMMIT, "e" * 40, "x.y.part"}


def test_room_is_claimed_once_and_let_go(reopen):
    reservations = Reservations()
    huge = Listing(source="s", commit=COMMIT, files=(FileListed(name="x", size_bytes=10**17),))
    with pytest.raises(NoRoom, match=r"^100(?:\.\d)?PB are needed in /.*, and .* are free on /"):
        reopen(huge, reservations=reservations)
    partial = reopen(reservations=reservations)
    write_all(partial)
    finish(partial)
    assert partial._claim.left_bytes == 0


def test_a_file_that_ends_early_is_told(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    file = os.open(tmp_path / "f", os.O_RDONLY)
    assert read_at(file, 1, 2) == b"bc"
    with pytest.raises(OSError, match="it ends 2 bytes before it should"):
        read_at(file, 1, 4)
    os.close(file)
