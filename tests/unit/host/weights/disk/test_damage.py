"""How it is found, and told, that what was fetched is no longer what it was."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from blake3 import blake3

from llmgw.core.weights import LEAST_PIECE_BYTES, FileKept, FileListed, Listing, Manifest
from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.damage import find_right, find_wrong, read_mark, refuse_used, remove_mark, write_mark
from llmgw.host.weights.errors import Kind

PIECE = LEAST_PIECE_BYTES
CONTENT = {"a.bin": os.urandom(2 * PIECE + 5), "deep/b.bin": b"small", "empty": b""}
SIZE = sum(map(len, CONTENT.values()))


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    files = []
    for name, content in CONTENT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        pieces = tuple(blake3(content[at : at + PIECE]).hexdigest() for at in range(0, len(content), PIECE))
        files.append(FileKept(name=name, size_bytes=len(content), sha256="", pieces=pieces))
    return Manifest(source="https://h/a.bin?sig=secret", commit="c" * 40, files=tuple(files), fetched_at=1.0)


def prove(folder: Path, manifest: Manifest) -> tuple[str | None, tuple[int, int]]:
    told = [(0, 0)]
    with open_folder(folder) as opened:
        wrong = find_wrong(opened, manifest, lambda: False, lambda read, right: told.append((read, right)))
    return wrong, told[-1]


def test_what_is_as_it_was_is_right_and_told_as_it_is_read(tmp_path: Path, manifest: Manifest) -> None:
    assert prove(tmp_path, manifest) == (None, (SIZE, SIZE))


def test_a_flipped_byte_is_found(tmp_path: Path, manifest: Manifest) -> None:
    with (tmp_path / "a.bin").open("r+b") as file:
        file.seek(PIECE + 7)
        file.write(bytes([CONTENT["a.bin"][PIECE + 7] ^ 1]))
    assert prove(tmp_path, manifest) == ("a.bin is not what was fetched in 1 of its 3 pieces", (SIZE, SIZE - PIECE))


def test_what_is_cut_off_too_long_gone_or_another_thing_is_found(tmp_path: Path, manifest: Manifest) -> None:
    os.truncate(tmp_path / "a.bin", PIECE + 1)
    (tmp_path / "deep/b.bin").unlink()
    (tmp_path / "empty").write_bytes(b"x")
    wrong, told = prove(tmp_path, manifest)
    assert wrong == (
        "a.bin is not what was fetched in 2 of its 3 pieces, deep/b.bin is missing, empty has 1 bytes of 0"
    )
    assert told == (PIECE + 1, PIECE)
    (tmp_path / "deep/b.bin").symlink_to("/etc/passwd")
    assert "deep/b.bin is no plain file" in (prove(tmp_path, manifest)[0] or "")


def test_of_many_files_the_first_are_named(tmp_path: Path, manifest: Manifest) -> None:
    files = tuple(FileKept(name=f"{number}", size_bytes=0, sha256="", pieces=()) for number in range(9))
    many = Manifest(source="s", commit="c", files=files, fetched_at=1.0)
    assert prove(tmp_path, many)[0] == "0 is missing, 1 is missing, 2 is missing, and 6 files more"


def test_nobody_waits_for_what_is_stopped(tmp_path: Path, manifest: Manifest) -> None:
    read: list[int] = []
    with open_folder(tmp_path) as opened:
        assert find_wrong(opened, manifest, lambda: bool(read), lambda done, right: read.append(done)) is None
    assert read == [PIECE]


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("spoiled", [True, False])
def test_without_a_manifest_what_is_right_is_found_by_what_is_known_of_it(
    tmp_path: Path, manifest: Manifest, hashes: bool, sums: bool, spoiled: bool
) -> None:
    files = tuple(
        FileListed(name=name, size_bytes=len(each), sha256=hashlib.sha256(each).hexdigest().upper() if sums else None)
        for name, each in CONTENT.items()
    )
    listing = Listing(source=manifest.source, commit=manifest.commit, files=files)
    if hashes:
        digests = "".join(digest for each in manifest.files for digest in each.pieces)
        (tmp_path / ".manifest.hashes").write_bytes(bytes.fromhex(digests))
    else:
        (tmp_path / ".manifest.hashes").write_bytes(b"torn")
    if spoiled:
        with (tmp_path / "a.bin").open("r+b") as file:
            file.write(bytes([CONTENT["a.bin"][0] ^ 1]))
        (tmp_path / "deep/b.bin").unlink()
    told = [0]
    with open_folder(tmp_path) as opened:
        right = list(find_right(opened, listing, lambda: False, told.append))
    expected = [
        (number, piece, digest)
        for number, each in enumerate(manifest.files)
        for piece, digest in enumerate(each.pieces)
        if not spoiled or (hashes and (number, piece) in {(0, 1), (0, 2)})
    ]
    assert right == (expected if hashes or sums else [])
    assert told[-1] == (0 if not hashes and not sums else SIZE - (5 if spoiled else 0))


def test_a_mark_is_there_until_it_is_removed(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        assert read_mark(folder) is None
        write_mark(folder, "a.bin is missing")
        written = (tmp_path / ".manifest.damaged").stat().st_mtime_ns
        write_mark(folder, "a.bin is missing")
        assert (tmp_path / ".manifest.damaged").stat().st_mtime_ns == written
        assert read_mark(folder) == "a.bin is missing"
        write_mark(folder, "b")
        assert read_mark(folder) == "b"
        for _ in range(2):
            remove_mark(folder)
            assert read_mark(folder) is None


def test_who_uses_it_and_what_to_do_is_told(tmp_path: Path, manifest: Manifest) -> None:
    told = refuse_used(manifest.source, manifest.commit, tmp_path, "a.bin is missing", ("shd-1", "shd-2"))
    assert told.kind is Kind.CORRUPT
    assert told.message == (
        f"https://h/a.bin (cccccccccccc) in {tmp_path} is damaged: a.bin is missing; it stays as it is while shd-1, "
        "shd-2 of this node runs by it"
    )
    assert told.remedy is not None
    assert "llmgw ctl stop" in told.remedy
    assert "`llmgw ctl weights pull https://h/a.bin`" in told.remedy
    assert "an engine of another agent on this folder" in refuse_used("s", "c", tmp_path, "x", ()).message
