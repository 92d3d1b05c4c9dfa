"""The state folder: its files, and the lock that admits one agent."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial

import pytest

from llmgw.core.effects import Desire
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import NodeId
from llmgw.core.replica import ReplicaId, ShardId, ShardSpec
from llmgw.errors import UsageError
from llmgw.host.state import ShardRecord, StateFolder, StateTaken, hold_state

SPEC = ShardSpec(
    id=ShardId("shd-a-1-0"),
    replica=ReplicaId("rep-a-1"),
    epoch=3,
    node=NodeId("n1"),
    model=Model(name=ModelName("org/a"), source="/m.gguf", profiles=(Profile(name="p", engine="fake", args=("-x",)),)),
    profile=Profile(name="p", engine="fake"),
)
RECORD = ShardRecord(
    spec=SPEC, pid=4242, start_time=17, boot_id="b", argv_hash="a", port=18000, log="/l", marker="m:shd-a-1-0:3"
)


@pytest.fixture
def state(tmp_path):
    state = StateFolder(tmp_path / "state")
    state.make()
    return state


def test_what_was_written_is_read_back(state):
    other = replace(RECORD, spec=replace(SPEC, id=ShardId("shd-b-1-0")))
    state.write(RECORD)
    state.write(replace(RECORD, pid=4243))
    state.write(other)
    assert state.read() == [replace(RECORD, pid=4243), other]
    state.remove(SPEC.id)
    state.remove(SPEC.id)
    assert state.read() == [other]


@pytest.mark.parametrize("name", ["../../etc/x", "..", "a/b", "ü ?*"])
def test_an_odd_id_stays_inside_the_folder(state, name):
    record = replace(RECORD, spec=replace(SPEC, id=ShardId(name)))
    state.write(record)
    assert state.read() == [record]
    assert len(list(state.shards.iterdir())) == 1
    assert state.log_path(record.spec.id).parent == state.logs


@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"pid": 1}',
        b'{"spec": null, "pid": "x"}',
        b"null",
    ],
)
def test_a_damaged_file_is_set_aside_with_a_word_in_the_log(state, octets, caplog):
    state.write(RECORD)
    (state.shards / "shd-z.json").write_bytes(octets)
    assert state.read() == [RECORD]
    assert (state.shards / "shd-z.damaged").read_bytes() == octets
    assert "shd-z.json" in caplog.text


@pytest.mark.parametrize("record", [replace(RECORD, pid=1), replace(RECORD, pid=0), replace(RECORD, pid=-1)])
def test_a_file_that_would_have_init_or_everybody_stopped_is_set_aside(state, record):
    state.write(record)
    assert state.read() == []


def test_a_file_under_another_shards_name_is_set_aside(state):
    state.write(RECORD)
    (state.shards / "shd-a-1-0.json").rename(state.shards / "shd-other.json")
    assert state.read() == []
    assert (state.shards / "shd-other.damaged").exists()


def test_a_half_written_file_is_not_read(state):
    state.write(RECORD)
    (state.shards / "shd-a-1-0.fresh").write_bytes(b'{"spec"')
    assert state.read() == [RECORD]


def test_the_markers_of_one_folder_begin_alike(state):
    assert state.marker(SPEC) == f"{state.path}:shd-a-1-0:3"
    assert state.marker(SPEC).startswith(state.marker_prefix())


@pytest.mark.slow
def test_a_second_program_is_refused_with_the_pid_of_the_first(tmp_path):
    code = (
        "import pathlib, sys; from llmgw.host.state import hold_state\n"
        "with hold_state(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=rf"pid {first.pid}\).*stop it first"), hold_state(tmp_path):
            raise AssertionError("two hold the same folder")
        first.kill()
        first.wait()
    with hold_state(tmp_path):
        pass


def test_a_folder_that_can_not_be_made_is_a_usage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="can't be used"), hold_state(tmp_path / "file" / "state"):
        raise AssertionError("held a folder inside a file")


@pytest.mark.parametrize("name", ["shards", "logs"])
def test_a_file_in_the_place_of_a_folder_is_a_usage_error(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(UsageError, match=rf"{tmp_path / name}: it is a file, not a folder\): mend that"):
        StateFolder(tmp_path).make()


@pytest.mark.slow
def test_a_lock_file_that_can_not_be_written_is_a_usage_error(tmp_path):
    # A limit on what a process may write stands for the full disk: both fail at the write, with the lock held.
    code = (
        "import pathlib, resource, sys; from llmgw.errors import UsageError; from llmgw.host.state import hold_state\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try:\n"
        "    with hold_state(pathlib.Path(sys.argv[1])): print('held')\n"
        "except UsageError as error: print(error)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True).stdout
    assert f"{tmp_path / 'lock'}: File too large" in said
    assert "free some space" in said


def test_a_folder_without_rights_is_a_usage_error(tmp_path):
    StateFolder(tmp_path).make()
    (tmp_path / "shards").chmod(0o500)
    if os.access(tmp_path / "shards", os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(UsageError, match="may not be read and written"):
        StateFolder(tmp_path).make()


def test_a_full_disk_is_told_with_its_file_and_leaves_no_half_of_it(state):
    fresh = state.shards / "shd-a-1-0.fresh"
    fresh.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as raised:
        state.write(RECORD)
    assert raised.value.filename == str(state.shards / "shd-a-1-0.json")
    assert list(state.shards.iterdir()) == []


def test_a_file_that_can_not_be_removed_is_said_in_the_log(state, caplog):
    (state.shards / "shd-a-1-0.json").mkdir()
    state.remove(SPEC.id)
    assert "shd-a-1-0.json can't be removed" in caplog.text


def test_the_lock_is_let_go_when_the_body_fails(tmp_path):
    with pytest.raises(RuntimeError), hold_state(tmp_path):
        raise RuntimeError
    with hold_state(tmp_path):
        pass


def test_what_was_desired_is_read_back_and_replaced_as_a_whole(state):
    assert state.read_desired() is None
    desire = Desire(node=NodeId("n1"), revision=7, shards=(SPEC,))
    state.write_desired(desire)
    assert state.read_desired() == desire
    # it may hold somebody's token
    assert state.desired.stat().st_mode & 0o077 == 0
    state.write_desired(replace(desire, revision=8, shards=()))
    assert state.read_desired() == Desire(node=NodeId("n1"), revision=8, shards=())
    assert sorted(path.name for path in state.path.iterdir()) == ["desired.json", "logs", "shards"]
    assert state.read() == []


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"node": "n1", "revision": 1}'])
def test_a_desired_set_that_can_not_be_understood_is_not_an_empty_one(state, content):
    state.desired.write_bytes(content)
    with pytest.raises(UsageError, match=rf"^what is to run here can't be read from {re.escape(str(state.desired))}: "):
        state.read_desired()


def test_a_desired_set_that_can_not_be_written_leaves_the_old_one(state):
    desire = Desire(node=NodeId("n1"), revision=7, shards=(SPEC,))
    state.write_desired(desire)
    # A folder in the way is what a full disk is: the new file does not get there.
    state.desired.with_suffix(".fresh").mkdir()
    with pytest.raises(OSError, match=r"desired\.fresh") as caught:
        state.write_desired(replace(desire, revision=8))
    assert caught.value.filename is not None
    assert state.read_desired() == desire


def test_who_holds_the_folder_is_told_by_pid(tmp_path):
    with hold_state(tmp_path), pytest.raises(StateTaken) as taken, hold_state(tmp_path):
        pass
    assert taken.value.holder == str(os.getpid())


def test_the_cache_is_for_the_agent_alone_and_made_again_when_somebody_cleared_it(state):
    for _ in range(2):
        path = state.make_cache()
        assert path == state.path / "cache"
        assert path.stat().st_mode & 0o777 == 0o700
        path.rmdir()


def test_a_record_of_a_version_before_serves_and_is_unproven(state):
    state.write(RECORD)
    (path,) = state.shards.glob("*.json")
    written = json.loads(path.read_bytes())
    del written["serves"], written["proven"], written["weights"]
    path.write_text(json.dumps(written))
    (read,) = state.read()
    assert (read.serves, read.proven, read.weights) == (True, False, ())


def test_a_folder_that_is_held_admits_no_second_program(state):
    with state.hold(), pytest.raises(StateTaken), hold_state(state.path):
        pass


def test_logs_of_engines_that_run_are_kept(state):
    for number in range(60):
        (state.logs / f"{number}.log").touch()
        os.utime(state.logs / f"{number}.log", (number, number))
    state.prune_logs({state.logs / "0.log"})
    left = {path.name for path in state.logs.iterdir()}
    assert "0.log" in left
    assert "1.log" not in left
    assert "59.log" in left


@pytest.fixture
def leave_lock(tmp_path):
    """The lock, held for somebody whose pid this is. Gives what lets go of it."""
    files = []

    def leave_lock(holder):
        file = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
        files.append(file)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.pwrite(file, f"{holder}\n".encode(), 0)
        return partial(fcntl.flock, file, fcntl.LOCK_UN)

    yield leave_lock
    for file in files:
        os.close(file)


@pytest.fixture
def dead():
    with subprocess.Popen(["true"]) as child:
        pass
    return child.pid


def test_a_lock_that_outlives_its_holder_by_a_moment_is_waited_for(tmp_path, leave_lock, dead):
    later = threading.Timer(0.1, leave_lock(dead))
    later.start()
    with hold_state(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    later.join()


@pytest.mark.slow
def test_a_lock_that_stays_is_somebodys(tmp_path, leave_lock, dead):
    leave_lock(dead)
    with pytest.raises(StateTaken) as taken, hold_state(tmp_path):
        pass
    assert taken.value.holder == str(dead)
