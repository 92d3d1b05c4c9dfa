"""What becomes of a folder that is on its way, where partials have no say."""

from __future__ import annotations

import pytest

from llmgw.core.weights import FileKept, FileListed, Listing, Manifest
from llmgw.host.beneath import open_folder
from llmgw.host.manifest_file import read_manifest
from llmgw.host.part_folder import claim_room, clear_after, clear_others, publish
from llmgw.host.reserve import Reservations

MANIFEST = Manifest(
    source="s", commit="c1", files=(FileKept(name="a/b/f", size_bytes=3, sha256="x", pieces=("p",)),), fetched_at=1.0
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
