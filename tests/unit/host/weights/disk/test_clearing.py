"""What is removed is looked at first: ours, no link, in nobody's use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from llmgw.core.weights import FileKept, Manifest, key_of
from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.clearing import (
    Leftover,
    find_odd,
    list_leftovers,
    list_set_aside,
    read_source,
    remove_commit,
    remove_leftover,
    set_aside,
    tidy_key,
)
from llmgw.host.weights.disk.damage import write_mark
from llmgw.host.weights.disk.extents import take_room
from llmgw.host.weights.disk.in_use import NotRemoved, use_commit
from llmgw.host.weights.disk.key_lock import try_lock
from llmgw.host.weights.disk.manifest_file import write_manifest

SOURCE = "hf:org/repo/*"
COMMIT = "c" * 40
KEY = key_of(SOURCE)
FILES = tuple(FileKept(name=name, size_bytes=100, sha256="s", pieces=("a" * 64,)) for name in ("f", "a/g"))


@pytest.fixture
def cache(tmp_path):
    with open_folder(tmp_path / "cache", make=True) as cache:
        yield cache


@pytest.fixture
def make(cache):
    """A commit as it is after a fetch."""

    def make(commit=COMMIT, *, source=SOURCE, told=None):
        with cache.enter(key_of(source), make=True) as key, key.enter(commit, make=True) as folder:
            key.write("source", f"{source}\n".encode())
            folder.enter("a", make=True).close()
            for file in FILES:
                folder.write(file.name, bytes(file.size_bytes))
            write_manifest(folder, told or Manifest(source=source, commit=commit, files=FILES, fetched_at=1.0))
            return folder.path

    return make


@pytest.fixture
def precious(tmp_path):
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "f").write_text("mine")
    yield place
    assert {path.name: path.read_text() for path in place.iterdir()} == {"f": "mine"}


def test_a_commit_goes_and_the_last_one_takes_its_source_with_it(cache, make):
    make()
    make("d" * 40)
    assert 200 < remove_commit(cache, SOURCE, COMMIT) < 2000
    with cache.enter(KEY) as key:
        assert key.names() == [".lock", "d" * 40, "source"]
    assert remove_commit(cache, SOURCE, COMMIT) == 0
    assert remove_commit(cache, SOURCE, "d" * 40) > 200
    assert cache.names() == []
    assert remove_commit(cache, SOURCE, COMMIT) == 0


def test_what_is_not_to_go_any_more_stays_as_it_is(cache, make):
    place = make()
    place.parent.joinpath("d" * 40 + ".part").mkdir()
    left = Leftover(key=KEY, source=SOURCE, commit="d" * 40, size_bytes=0, changed_at=0)
    for removes, what in ((remove_commit, (SOURCE, COMMIT)), (remove_leftover, (left,))):
        with pytest.raises(NotRemoved, match="before its turn came"):
            removes(cache, *what, lambda: False)
    assert (place / "f").exists()
    assert place.parent.joinpath("d" * 40 + ".part").exists()


@pytest.mark.parametrize("commit", ["..", "../..", "", ".", "source", ".lock", "a/b", f"{COMMIT}.part", "/etc"])
def test_no_name_leads_out_of_the_cache(cache, make, precious, commit):
    place = make()
    with pytest.raises(NotRemoved, match="can't be a commit"):
        remove_commit(cache, SOURCE, commit)
    with pytest.raises(NotRemoved, match="no names of llmgw's"):
        remove_leftover(cache, Leftover(key=KEY, source=None, commit=commit, size_bytes=0, changed_at=0))
    with pytest.raises(NotRemoved, match="no names of llmgw's"):
        remove_leftover(cache, Leftover(key="..", source=None, commit=COMMIT, size_bytes=0, changed_at=0))
    assert (place / "f").exists()


@pytest.mark.parametrize("planted", ["key", "commit", "a", "f", "manifest"])
def test_a_link_is_never_followed(cache, make, precious, planted):
    place = make()
    target = {
        "key": place.parent,
        "commit": place,
        "a": place / "a",
        "f": place / "f",
        "manifest": place / ".manifest.json",
    }[planted]
    target.rename(precious.parent / "moved")
    target.symlink_to(precious / "f" if planted == "f" else precious.parent / "moved")
    if planted == "key":
        assert remove_commit(cache, SOURCE, COMMIT) == 0
    else:
        with pytest.raises((NotRemoved, OSError), match=r"link|llmgw did not put [af] into"):
            remove_commit(cache, SOURCE, COMMIT)
    assert target.is_symlink()
    assert (precious.parent / "moved").exists()


def test_what_a_person_put_there_keeps_it(cache, make):
    place = make()
    (place / "a" / "mine.txt").touch()
    with pytest.raises(NotRemoved, match=rf"llmgw did not put a/mine\.txt into {place}"):
        remove_commit(cache, SOURCE, COMMIT)
    assert (place / "f").exists()


def spoil_manifest(place, content):
    (place / ".manifest.json").unlink()
    if content is not None:
        (place / ".manifest.json").write_bytes(content)


UNREAD = [
    None,
    b"{",
    b'{"source": "another", "commit": "c", "fetched_at": 1.0, "files": [{"name": "f", '
    b'"size_bytes": 100, "sha256": "s", "pieces": ["a"]}]}',
]


@pytest.mark.parametrize("content", UNREAD, ids=["none", "nothing", "another's"])
def test_what_has_no_manifest_any_more_goes_where_its_source_was_fetched_to(cache, make, content):
    place = make()
    spoil_manifest(place, content)
    (place.parent / "source").rename(place.parent / "away")
    with pytest.raises(NotRemoved, match="holds no manifest of llmgw's"):
        remove_commit(cache, SOURCE, COMMIT)
    (place.parent / "away").rename(place.parent / "source")
    with cache.enter(KEY) as key:
        use = use_commit(key, COMMIT)
    with pytest.raises(NotRemoved, match="it is in use"):
        remove_commit(cache, SOURCE, COMMIT)
    use.close()
    assert (place / "f").exists()
    assert 200 <= remove_commit(cache, SOURCE, COMMIT) < 2000
    assert cache.names() == []


@pytest.mark.parametrize("odd", ["link", "pipe"])
def test_what_has_no_manifest_any_more_stays_where_no_fetch_can_have_put_what_is_in_it(cache, make, precious, odd):
    place = make()
    spoil_manifest(place, None)
    if odd == "link":
        (place / "a" / "odd").symlink_to(precious)
    else:
        os.mkfifo(place / "a" / "odd")
    with cache.enter(KEY) as key, key.enter(COMMIT) as folder:
        assert find_odd(folder) == "a/odd"
    with pytest.raises(NotRemoved, match=rf"llmgw did not put a/odd into {place}"):
        remove_commit(cache, SOURCE, COMMIT)
    assert (place / "f").exists()
    (place / "a" / "odd").unlink()
    with cache.enter(KEY) as key, key.enter(COMMIT) as folder:
        assert find_odd(folder) is None
    assert remove_commit(cache, SOURCE, COMMIT) >= 200


def test_what_was_set_aside_is_told_by_the_manifest_that_it_had(cache, make):
    manifest = Manifest(source=SOURCE, commit=COMMIT, files=FILES, fetched_at=1.0)
    make()
    make("d" * 40)
    with cache.enter(KEY) as key:
        with key.enter(COMMIT) as folder:
            write_mark(folder, "f is wrong")
        assert list_set_aside(key) == []
        set_aside(key, manifest)
        (found,) = list_set_aside(key)
        assert (found.manifest, found.why, found.is_marked) == (manifest, "f is wrong", False)
        (key.path / f"{COMMIT}.part/.manifest.damaged").unlink()
        assert [each.why for each in list_set_aside(key)] == ["it was set aside"]
        # (one that is fetched for the first time has none, and what lies under another name is another's)
        (key.path / f"{COMMIT}.part").rename(key.path / "e.part")
        key.enter("f.part", make=True).close()
        assert list_set_aside(key) == []


def test_what_is_in_use_stays_until_the_last_user_is_gone(cache, make):
    make()
    with cache.enter(KEY) as key:
        first, second = use_commit(key, COMMIT), use_commit(key, COMMIT)
    first.close()
    first.close()
    with pytest.raises(NotRemoved, match="it is in use"):
        remove_commit(cache, SOURCE, COMMIT)
    second.close()
    assert remove_commit(cache, SOURCE, COMMIT) > 200


@pytest.mark.slow
def test_what_another_program_uses_stays(cache, make):
    place = make()
    code = (
        "import pathlib, sys; from llmgw.host.weights.disk.beneath import open_folder\n"
        "from llmgw.host.weights.disk.in_use import use_commit\n"
        "use = use_commit(open_folder(pathlib.Path(sys.argv[1])), sys.argv[2])\n"
        "print('.', flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, place.parent, COMMIT]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        user.stdout.readline()
        with pytest.raises(NotRemoved, match="it is in use"):
            remove_commit(cache, SOURCE, COMMIT)
        user.kill()
    assert remove_commit(cache, SOURCE, COMMIT) > 200


def test_nothing_of_a_source_goes_while_it_is_fetched(cache, make):
    make()
    with cache.enter(KEY) as key:
        key.enter("d.part", make=True).close()
        lock = try_lock(key)
        (leftover,) = list_leftovers(key)
        with pytest.raises(NotRemoved, match=rf"fetched or removed just now \(pid {os.getpid()} on host"):
            remove_commit(cache, SOURCE, COMMIT)
        with pytest.raises(NotRemoved, match="fetched or removed just now"):
            remove_leftover(cache, leftover)
        os.close(lock)
    assert remove_leftover(cache, leftover) == 0
    assert remove_commit(cache, SOURCE, COMMIT) > 200


def test_a_removal_that_was_killed_goes_on_at_the_next(cache, make):
    place = make()
    place.rename(place.with_name(f"{COMMIT}.gone"))
    with cache.enter(KEY) as key:
        (leftover,) = list_leftovers(key)
    assert leftover.commit == COMMIT
    make()
    assert remove_commit(cache, SOURCE, COMMIT) > 200
    assert cache.names() == []


def test_what_never_came_whole_is_listed_and_removed(cache, make, precious):
    make()
    with cache.enter(KEY) as key, key.enter("d.part", make=True) as part:
        part.enter("a", make=True).close()
        part.write("a/f", b"12345")
        (part.path / "l").symlink_to(precious)
        part.write(".pieces", b"xx")
        os.utime(part.path / ".pieces", (77, 77))
        (key.path / "e.part").symlink_to(precious)
        (key.path / "..part").mkdir()
        (key.path / "f.part").touch()
        (leftover,) = list_leftovers(key)
    assert leftover == Leftover(key=KEY, source=SOURCE, commit="d", size_bytes=7, changed_at=77.0)
    assert remove_leftover(cache, leftover) == 7
    assert remove_leftover(cache, leftover) == 0
    assert remove_leftover(cache, Leftover(key="0" * 32, source=None, commit="d", size_bytes=0, changed_at=0)) == 0
    with cache.enter(KEY) as key:
        assert key.names() == ["..part", ".lock", COMMIT, "e.part", "f.part", "source"]


@pytest.mark.parametrize("alone", [True, False])
def test_of_what_was_killed_only_what_never_came_is_tidied_away(cache, make, alone):
    make()
    with cache.enter(KEY) as key, key.enter("d.part", make=True) as part:
        part.write(".pieces", b"xx")
        key.enter("e.part", make=True).close()
        file = part.open("f", os.O_RDWR | os.O_CREAT)
        if not take_room(file, 3_000_000):
            pytest.skip("this filesystem takes no room beforehand")
        os.pwrite(file, b"came", 1_000_000)
        lock = try_lock(key)
        tidy_key(cache, key, alone=True)
        assert os.fstat(file).st_blocks * 512 >= 3_000_000
        os.close(lock)
        tidy_key(cache, key, alone=alone)
        assert (os.fstat(file).st_blocks * 512 < 100_000) is alone
        assert os.pread(file, 4, 1_000_000) == b"came"
        os.close(file)
        assert key.names() == [".lock", COMMIT, "d.part", "source"]


@pytest.mark.parametrize("content", [None, b"another\n", b"\xff"])
def test_a_source_that_is_not_noted_rightly_is_not_known(cache, make, content):
    make()
    with cache.enter(KEY) as key:
        assert read_source(key) == SOURCE
        key.unlink("source")
        if content is not None:
            key.write("source", content)
        assert read_source(key) is None
