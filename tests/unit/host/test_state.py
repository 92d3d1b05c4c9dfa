"""The state folder: its files, and the lock that admits one agent."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import NodeId
from llmgw.core.replica import ReplicaId, ShardId, ShardSpec
from llmgw.errors import UsageError
from llmgw.host.state import ShardRecord, StateFolder, hold_state

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


def test_the_lock_is_let_go_when_the_body_fails(tmp_path):
    with pytest.raises(RuntimeError), hold_state(tmp_path):
        raise RuntimeError
    with hold_state(tmp_path):
        pass
