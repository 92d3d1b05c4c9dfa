"""What becomes of a folder that is on its way, where partials have no say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.core.weights import FileKept, FileListed, Listing, Manifest
from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.manifest_file import read_manifest, renew_manifest, write_manifest
from llmgw.host.weights.disk.part_folder import (
    claim_room,
    clear_after,
    clear_others,
    come_after,
    give_room_back,
    publish,
)
from llmgw.host.weights.disk.reserve import Reservations

MANIFEST = Manifest(
    source="s",
    commit="c1",
    files=(FileKept(name="a/b/f", size_bytes=3, sha256="x", pieces=("a" * 64,)),),
    fetched_at=1.0,
)
LISTING = Listing(source="s", commit="c1", files=(FileListed(name="a/b/f", size_bytes=3),))


@pytest.fixture
def key(tmp_path):
    with open_folder(tmp_path) as key:
        yield key


@pytest.fixture
def part(key):
    with key.enter("c1.part", make=True) as part:
        yield part


def test_its_files_have_their_length_before_anything_comes(key, part):
    claim = claim_room(part, key, LISTING, Reservations())
    assert part.status("a/b/f").st_size == 3
    claim.close()


def test_it_gets_its_name_with_its_manifest_in_it(key, part):
    claim_room(part, key, LISTING, Reservations())
    assert publish(key, part, MANIFEST) == MANIFEST
    assert key.names() == ["c1"]
    assert part.path == key.path / "c1"
    with key.enter("c1") as folder:
        assert read_manifest(folder) == MANIFEST


def test_a_file_in_the_place_of_its_name_is_not_touched(key, part):
    claim_room(part, key, LISTING, Reservations())
    key.write("c1", b"mine")
    with pytest.raises(NotADirectoryError, match=f"'{key.path}/c1'"):
        publish(key, part, MANIFEST)
    assert key.read("c1", 9) == b"mine"
    assert part.status("a/b/f").st_size == 3


def test_only_what_never_became_whole_is_cleared(key, part):
    for name in ("d.part", "e.gone", "f", "..part", "source.part"):
        key.enter(name, make=True).close()
    with key.enter("d.part") as other:
        other.write("x", b"12345")
    assert clear_others(key, "c1") == 5
    assert key.names() == ["..part", "c1.part", "f", "source.part"]


def test_what_can_not_be_cleared_does_no_harm(key, part, caplog):
    part.enter(".pieces/x", make=True).close()
    clear_after(key, part, "c1")
    assert "c1.part/.pieces can't be removed: Is a directory" in caplog.text


def test_the_newest_comes_after_all_others_whatever_the_clock_says(key):
    assert come_after(key, "c1", 5.0) == 5.0
    for commit, at in (("d1", 100.0), ("d2", 50.0)):
        with key.enter(commit, make=True) as folder:
            write_manifest(folder, replace(MANIFEST, commit=commit, fetched_at=at))
    assert come_after(key, "c1", 5.0) == 101.0
    assert come_after(key, "c1", 200.0) == 200.0
    assert come_after(key, "d1", 5.0) == 51.0
    with key.enter("d2") as folder:
        renew_manifest(folder, MANIFEST, 300.0)
    assert come_after(key, "c1", 5.0) == 301.0


def test_what_is_no_commit_has_no_say_in_that(key, tmp_path):
    for name in ("d1", "d2.part", "source"):
        key.enter(name, make=True).close()
    with key.enter("d3", make=True) as folder:
        folder.write(".manifest.json", b"{")
    (key.path / "d4").touch()
    (key.path / "d5").symlink_to("/")
    assert come_after(key, "c1", 5.0) == 5.0


def test_what_was_taken_for_what_never_came_is_given_back(key, part):
    listing = replace(LISTING, files=(FileListed(name="a/b/f", size_bytes=3_000_000),))
    claim = claim_room(part, key, listing, Reservations())
    if claim.left_bytes:
        pytest.skip("this filesystem takes no room beforehand")
    assert part.status("a/b/f").st_blocks * 512 >= 3_000_000
    give_room_back(part)
    assert part.status("a/b/f").st_blocks * 512 < 10_000
    assert part.status("a/b/f").st_size == 3_000_000


def test_where_room_can_not_be_given_back_that_is_said(key, part, tmp_path, caplog):
    (part.path / "f").write_bytes(b"mine")
    (part.path / "g").hardlink_to(part.path / "f")
    give_room_back(part)
    assert f"the room of {part.path}/f can't be given back: it is a hard link to another file" in caplog.text
