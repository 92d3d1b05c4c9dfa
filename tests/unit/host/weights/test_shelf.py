from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from blake3 import blake3

from llmgw.core.weights import (
    LEAST_PIECE_BYTES,
    FileKept,
    FileListed,
    Listing,
    Manifest,
    key_of,
    piece_bytes_of,
)
from llmgw.host.weights import shelf as shelves
from llmgw.host.weights.disk.cache import Cache
from llmgw.host.weights.shelf import KeptShelf, PartialShelf, Spoiled

SOURCE = "hf:org/repo/*"
COMMIT = "c" * 40


@dataclass
class Kept:
    """A whole commit as it lies on a disk."""

    folder: Path
    files: dict[str, bytes]
    manifest: Manifest = field(init=False)

    def __post_init__(self) -> None:
        for name, data in self.files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        described = tuple(
            FileKept(
                name=name,
                size_bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
                pieces=tuple(
                    blake3(data[at : at + piece_bytes_of(len(data))]).hexdigest()
                    for at in range(0, len(data), piece_bytes_of(len(data)))
                ),
            )
            for name, data in self.files.items()
        )
        self.manifest = Manifest(source=SOURCE, commit=COMMIT, files=described, fetched_at=1.0)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    files = {"a.bin": os.urandom(2 * LEAST_PIECE_BYTES + 5), "deep/empty": b"", "deep/b": b"small"}
    return Kept(tmp_path / "whole", files)


def test_a_whole_commit_tells_every_piece_and_gives_each(kept: Kept) -> None:
    shelf = KeptShelf(kept.manifest, kept.folder)
    assert shelf.whole
    assert shelf.files == kept.manifest.files
    assert [(file, piece) for file, piece, _ in shelf.log] == [(0, 0), (0, 1), (0, 2), (2, 0)]
    for file, piece, digest in shelf.log:
        assert blake3(shelf.read(file, piece)).hexdigest() == digest
    assert shelf.read(0, 2) == kept.files["a.bin"][-5:]
    assert KeptShelf(kept.manifest, kept.folder).order == shelf.order


def test_a_piece_of_a_whole_commit_that_has_changed_is_not_given(kept: Kept) -> None:
    noted: list[str] = []
    shelf = KeptShelf(kept.manifest, kept.folder, noted.append)
    data = bytearray(kept.files["a.bin"])
    data[LEAST_PIECE_BYTES + 7] ^= 1
    (kept.folder / "a.bin").write_bytes(data)
    assert shelf.read(0, 0) == kept.files["a.bin"][:LEAST_PIECE_BYTES]
    assert noted == []
    with pytest.raises(Spoiled, match=r"a\.bin of hf:org/repo/\* \(c{12}\) in .*whole is not what was fetched"):
        shelf.read(0, 1)
    assert noted == ["a.bin is not what was fetched (piece 1)"]


def fail(file: int, offset: int, size_bytes: int) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


def lie(file: int, offset: int, size_bytes: int) -> bytes:
    return bytes(size_bytes)


@pytest.mark.parametrize("wrong", [fail, lie])
@pytest.mark.parametrize("times", [1, 2])
def test_one_wrong_read_is_none_and_one_that_fails_is_never_noted(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[int, int, int], bytes], times: int
) -> None:
    noted: list[str] = []
    shelf = KeptShelf(kept.manifest, kept.folder, noted.append)
    reads, right = [wrong] * times, shelves.read_at

    def read(file: int, offset: int, size_bytes: int) -> bytes:
        return (reads.pop() if reads else right)(file, offset, size_bytes)

    monkeypatch.setattr(shelves, "read_at", read)
    if times == 2:
        with pytest.raises(Spoiled, match=r"can't be read \(Input" if wrong is fail else "is not what was fetched"):
            shelf.read(0, 1)
    assert shelf.read(0, 1) == kept.files["a.bin"][LEAST_PIECE_BYTES : 2 * LEAST_PIECE_BYTES]
    assert noted == (["a.bin is not what was fetched (piece 1)"] if (wrong, times) == (lie, 2) else [])


def test_a_file_that_is_cut_off_is_not_noted_for_its_size_says_it(kept: Kept) -> None:
    noted: list[str] = []
    os.truncate(kept.folder / "a.bin", 5)
    with pytest.raises(Spoiled, match="cut off"):
        KeptShelf(kept.manifest, kept.folder, noted.append).read(0, 1)
    assert noted == []


def test_of_a_whole_commit_nothing_is_listed_before_somebody_asks(kept: Kept) -> None:
    class Untold(tuple[str, ...]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("nobody has asked for these")

    files = tuple(replace(file, pieces=Untold(file.pieces)) for file in kept.manifest.files)
    whole = list(KeptShelf(kept.manifest, kept.folder).log)
    log = KeptShelf(replace(kept.manifest, files=files), kept.folder).log
    assert len(log) == len(whole) == 4
    assert [log[index] for index in range(-4, 4)] == whole + whole
    for start in range(5):
        for stop in range(5):
            assert list(log[start:stop]) == whole[start:stop]
    for index in (4, -5):
        with pytest.raises(IndexError):
            log[index]
    assert list(KeptShelf(replace(kept.manifest, files=()), kept.folder).log) == []


@pytest.mark.parametrize("place", [(0, 3), (0, -1), (-1, 0), (3, 0), (1, 0)])
def test_what_is_no_piece_is_not_there(kept: Kept, place: tuple[int, int]) -> None:
    with pytest.raises(LookupError):
        KeptShelf(kept.manifest, kept.folder).read(*place)


def test_what_was_collected_is_not_there_any_more(kept: Kept) -> None:
    shelf = KeptShelf(kept.manifest, kept.folder)
    kept.folder.rename(kept.folder.with_name("gone"))
    with pytest.raises(LookupError, match="is gone") as raised:
        shelf.read(0, 0)
    assert not isinstance(raised.value, Spoiled)


def test_what_is_no_longer_as_it_was_is_told_with_its_folder_and_what_to_do(kept: Kept) -> None:
    shelf = KeptShelf(kept.manifest, kept.folder)
    file = kept.folder / "a.bin"

    def spoiled(piece: int) -> str:
        with pytest.raises(Spoiled, match=r"^a\.bin of hf:org/repo/\* \(c{12}\) in ") as raised:
            shelf.read(0, piece)
        assert raised.value.folder == kept.folder
        text = str(raised.value)
        assert f"in {kept.folder} " in text
        assert "`llmgw ctl weights pull hf:org/repo/*` fetches what is wrong anew" in text
        return text

    size = len(kept.files["a.bin"])
    os.truncate(file, LEAST_PIECE_BYTES + 1)
    assert f"can't be read (it is cut off: it has {LEAST_PIECE_BYTES + 1} of {size} bytes)" in spoiled(1)
    assert shelf.read(0, 0) == kept.files["a.bin"][:LEAST_PIECE_BYTES]
    file.unlink()
    assert "can't be read (No such file or directory)" in spoiled(0)
    file.symlink_to("/etc/passwd")
    assert "can't be read (it is a link" in spoiled(0)


def test_a_commit_on_its_way_gives_what_has_come(tmp_path: Path) -> None:
    data = os.urandom(LEAST_PIECE_BYTES + 7)
    listing = Listing(source=SOURCE, commit=COMMIT, files=(FileListed(name="a.bin", size_bytes=len(data)),))
    (tmp_path / key_of(SOURCE)).mkdir()
    partial = Cache(tmp_path).open_partial(listing)
    shelf = PartialShelf(partial)
    assert (list(shelf.log), shelf.whole, shelf.files) == ([], False, listing.files)
    digest = partial.write(0, 1, data[LEAST_PIECE_BYTES:], None)
    assert list(shelf.log) == [(0, 1, digest)]
    assert shelf.read(0, 1) == data[LEAST_PIECE_BYTES:]
    with pytest.raises(LookupError):
        shelf.read(0, 0)
    os.truncate(partial.folder / "a.bin", 9)
    with pytest.raises(Spoiled, match=rf"^a\.bin of hf:org/repo/\* .* on its way into {partial.folder}, can't be read"):
        shelf.read(0, 1)
    partial.close()
    with pytest.raises(LookupError, match="closed"):
        shelf.read(0, 1)


def test_each_partial_that_is_opened_tells_in_an_order_of_its_own(tmp_path: Path) -> None:
    listing = Listing(source=SOURCE, commit=COMMIT, files=(FileListed(name="a.bin", size_bytes=1),))
    cache = Cache(tmp_path)
    orders = set()
    for _ in range(2):
        partial = cache.open_partial(listing)
        orders.add(PartialShelf(partial).order)
        partial.close()
    assert len(orders) == 2
