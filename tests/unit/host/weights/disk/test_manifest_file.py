"""A manifest is believed only as far as it can be ours."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest

from llmgw.core.weights import LEAST_PIECE_BYTES, FileKept, Manifest
from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.manifest_file import (
    find_fault,
    list_foreign,
    read_fetched_at,
    read_manifest,
    renew_manifest,
    write_manifest,
)

MANIFEST = Manifest(
    source="hf:org/repo/*",
    commit="c1",
    files=(
        FileKept(name="a/b", size_bytes=3, sha256="s", pieces=("a" * 64,)),
        FileKept(name="c", size_bytes=0, sha256="s", pieces=()),
        FileKept(name="d", size_bytes=LEAST_PIECE_BYTES + 1, sha256="t", pieces=("b" * 64, "0f" * 32)),
    ),
    fetched_at=12.5,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_text("abc")
    (tmp_path / "c").touch()
    (tmp_path / "d").write_bytes(bytes(LEAST_PIECE_BYTES + 1))
    with open_folder(tmp_path) as folder:
        yield folder


def test_it_is_read_back(folder):
    write_manifest(folder, MANIFEST)
    assert read_manifest(folder) == MANIFEST
    write_manifest(folder, replace(MANIFEST, files=()))
    with pytest.raises(ValueError, match="it names no file"):
        read_manifest(folder)


def test_its_hashes_lie_beside_it_as_bytes(folder):
    write_manifest(folder, MANIFEST)
    assert folder.read(".manifest.hashes", 999) == b"\xaa" * 32 + b"\xbb" * 32 + b"\x0f" * 32
    assert len(folder.read(".manifest.json", 9999)) < 300


def test_one_that_holds_its_hashes_itself_is_read_too(folder):
    files = [{"name": "c", "size_bytes": 3, "sha256": "s", "pieces": ["p"]}]
    text = {"source": "s", "commit": "c", "fetched_at": 1, "files": files}
    folder.write(".manifest.json", json.dumps(text).encode())
    assert read_manifest(folder).files == (FileKept(name="c", size_bytes=3, sha256="s", pieces=("p",)),)


@pytest.mark.parametrize(("content", "fault"), [(None, "is missing"), (bytes(95), "has 95 bytes of 96")])
def test_without_all_of_its_hashes_it_is_none(folder, content, fault):
    write_manifest(folder, MANIFEST)
    folder.unlink(".manifest.hashes")
    if content is not None:
        folder.write(".manifest.hashes", content)
    with pytest.raises(ValueError, match=rf"\.manifest\.hashes {fault}"):
        read_manifest(folder)


def test_what_is_the_newest_again_counts_as_fetched_then(folder):
    write_manifest(folder, MANIFEST)
    before = folder.status(".manifest.json")
    assert read_fetched_at(folder) == 12.5
    renewed = renew_manifest(folder, MANIFEST, 1e9 + 0.1)
    assert renewed == replace(MANIFEST, fetched_at=1e9 + 0.1)
    assert read_manifest(folder) == renewed
    assert read_fetched_at(folder) == 1e9 + 0.1
    # (who uses it holds a lock on that file)
    assert folder.status(".manifest.json") == before


@pytest.mark.parametrize("content", [b"", b"3", b"nan", b"inf", b"\xff", b"-"])
def test_a_moment_that_is_none_changes_nothing(folder, content):
    write_manifest(folder, MANIFEST)
    folder.write(".manifest.renewed", content)
    assert read_manifest(folder) == MANIFEST


def test_what_may_open_an_address_is_not_for_everybody(folder):
    write_manifest(folder, replace(MANIFEST, source="https://host/file?token=x"))
    assert (folder.path / ".manifest.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"[" * 100_000, b'{"source": "x"}'])
def test_nonsense_is_no_manifest(folder, content):
    (folder.path / ".manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match="means nothing"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "file",
    [
        {"name": "../x", "size_bytes": 0, "pieces": []},
        {"name": "/etc/passwd", "size_bytes": 0, "pieces": []},
        {"name": "x", "size_bytes": -1, "pieces": []},
        {"name": "x", "size_bytes": LEAST_PIECE_BYTES + 1, "pieces": ["p"]},
    ],
)
def test_what_we_never_write_is_not_ours(folder, file):
    text = {"source": "s", "commit": "c", "fetched_at": 0, "files": [file | {"sha256": "s"}]}
    (folder.path / ".manifest.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match="not llmgw's own"):
        read_manifest(folder)


@pytest.mark.parametrize("number", ["fetched_at", "size_bytes"])
def test_a_number_that_nothing_has_is_none(folder, number):
    write_manifest(folder, MANIFEST)
    text = (folder.path / ".manifest.json").read_text()
    (folder.path / ".manifest.json").write_text(re.sub(rf'"{number}":[0-9.]+', f'"{number}":179605446272015512', text))
    with pytest.raises(ValueError, match="means nothing"):
        read_manifest(folder)


def test_a_moment_that_no_clock_shows_is_none(folder):
    write_manifest(folder, MANIFEST)
    folder.write(".manifest.renewed", b"1e300\n")
    assert read_fetched_at(folder) == MANIFEST.fetched_at


def test_what_is_missing_or_of_another_size_is_told(folder):
    assert find_fault(folder, MANIFEST) is None
    (folder.path / "a/b").write_text("abcd")
    assert find_fault(folder, MANIFEST) == "a/b has 4 bytes of 3"
    (folder.path / "a/b").unlink()
    assert find_fault(folder, MANIFEST) == "a/b is missing"
    (folder.path / "a/b").symlink_to("../c")
    assert find_fault(folder, MANIFEST) == "a/b is no plain file"


def test_what_others_put_there_is_listed(folder):
    write_manifest(folder, MANIFEST)
    (folder.path / ".pieces").touch()
    names = [file.name for file in MANIFEST.files]
    assert list_foreign(folder, names) == []
    (folder.path / "a/x/y").mkdir(parents=True)
    (folder.path / "a/x/z").touch()
    (folder.path / "C").touch()
    (folder.path / "l").symlink_to("/")
    os.unlink(folder.path / "c")
    (folder.path / "c").mkdir()
    assert list_foreign(folder, names) == ["C", "a/x/y", "a/x/z", "a/x", "c", "l"]
