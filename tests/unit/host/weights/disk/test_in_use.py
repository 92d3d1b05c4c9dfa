"""Who runs by a commit keeps it, whatever is left of what says what it is."""

from __future__ import annotations

import fcntl
import os

import pytest

from llmgw.core.weights import FileKept, Manifest
from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.in_use import InUse, hold_alone, use_commit
from llmgw.host.weights.disk.manifest_file import write_manifest

COMMIT = "c" * 40
FILES = (FileKept(name="f", size_bytes=100, sha256="s", pieces=("a" * 64,)),)


@pytest.fixture
def key(tmp_path):
    with open_folder(tmp_path / "key", make=True) as key:
        with key.enter(COMMIT, make=True) as folder:
            folder.write("f", bytes(100))
            write_manifest(folder, Manifest(source="x", commit=COMMIT, files=FILES, fetched_at=1.0))
        yield key


def is_free(key):
    with key.enter(COMMIT) as folder:
        try:
            with hold_alone(folder):
                return True
        except InUse:
            return False


@pytest.mark.parametrize("name", [".manifest.json", ".manifest.hashes"])
def test_what_is_being_removed_can_not_be_used(key, name):
    removing = os.open(key.path / COMMIT / name, os.O_RDWR)
    fcntl.flock(removing, fcntl.LOCK_EX)
    assert use_commit(key, COMMIT) is None
    os.close(removing)
    with pytest.raises(FileNotFoundError):
        use_commit(key, "d" * 40)


@pytest.mark.parametrize(
    "gone", [(), (".manifest.json",), (".manifest.hashes",), (".manifest.json", ".manifest.hashes")]
)
@pytest.mark.parametrize("before", [False, True])
def test_it_is_held_whatever_goes_of_what_says_what_it_is(key, gone, before):
    assert is_free(key)
    use = None if before else use_commit(key, COMMIT)
    for name in gone:
        (key.path / COMMIT / name).unlink()
    first, second = use or use_commit(key, COMMIT), use_commit(key, COMMIT)
    assert not is_free(key)
    first.close()
    first.close()
    assert not is_free(key)
    second.close()
    assert is_free(key)


def test_while_it_is_held_alone_nobody_begins_to_run_by_it(key):
    with key.enter(COMMIT) as folder, hold_alone(folder):
        assert use_commit(key, COMMIT) is None
        assert not is_free(key)
    assert is_free(key)


def test_what_can_not_be_opened_to_be_held_is_not_taken_for_free(key):
    os.link(key.path / COMMIT / ".manifest.json", key.path / "other")
    with key.enter(COMMIT) as folder, pytest.raises(OSError, match="hard link"), hold_alone(folder):
        pytest.fail("it was held")
