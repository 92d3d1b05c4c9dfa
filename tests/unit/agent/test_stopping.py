"""Every engine of a node is stopped by its state folder alone."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import trio

from llmgw.agent.held import Held
from llmgw.agent.stopping import stop_all
from llmgw.agent.telling import Telling, first_report
from llmgw.core.effects import Desire
from llmgw.core.node import NodeId
from llmgw.engines.types import Launch
from llmgw.errors import UsageError
from llmgw.host.process import read_stat
from llmgw.host.state import StateFolder, hold_state


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def is_gone(pid):
    stat = read_stat(pid)
    return stat is None or stat.state in "ZX"


@pytest.fixture
def leave(tools, engines):
    """Start an engine and let go of it, as an agent that stopped would."""

    async def leave(spec):
        held = Held(spec, tools, Telling(first_report(spec), lambda report: None))
        program = (sys.executable, "-m", "fake_engine")
        launch = Launch(program=program, source="s", served_name="m", host="127.0.0.1", port=0, args=spec.profile.args)
        await held.start(launch)
        with trio.fail_after(60):
            while True:
                if any("listening on" in line for line in held.log.read_last(400)):
                    break
                await trio.sleep(0.02)
        held.close()
        (record,) = (record for record in tools.state.read() if record.spec == spec)
        return record

    return leave


@pytest.fixture
def stop(tools, engines):
    """Whether all are gone, and what was said."""

    async def stop(*, engines=engines, force=False):
        said = []
        with trio.fail_after(100):
            done = await stop_all(tools.state, engines, say=said.append, force=force)
        return done, said

    return stop


def desire(*specs):
    return Desire(node=NodeId("n1"), revision=1, shards=specs)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [None, desire()], ids=["never told", "nothing"])
async def test_engines_that_nobody_wants_are_stopped_one_by_one(leave, stop, make_spec, tools, wanted):
    if wanted is not None:
        tools.state.write_desired(wanted)
    first, second = await leave(make_spec()), await leave(make_spec(number=2))
    done, said = await stop()
    assert done
    assert said == [
        f"shd-m-1-0: stopping pid {first.pid}",
        "shd-m-1-0: stopped",
        f"shd-m-2-0: stopping pid {second.pid}",
        "shd-m-2-0: stopped",
    ]
    assert is_gone(first.pid)
    assert is_gone(second.pid)
    assert tools.state.read() == []
    assert await stop() == (True, [f"nothing runs here: there is no engine of {tools.state.path}"])


@pytest.mark.slow
async def test_engines_that_the_server_wants_are_left_alone_unless_forced(leave, stop, make_spec, tools):
    spec = make_spec()
    record = await leave(spec)
    tools.state.write_desired(desire(spec))
    with pytest.raises(UsageError) as refused:
        await stop()
    assert refused.value.message.startswith(
        "the server wants engines on n1: shd-m-1-0 (model m). Remove the model there"
    )
    assert "--force" in refused.value.message
    assert not is_gone(record.pid)
    done, said = await stop(force=True)
    assert done
    assert said[1:] == [
        "shd-m-1-0: stopped",
        "the server still wants m here: the next agent of this node starts them again",
    ]
    assert is_gone(record.pid)


@pytest.mark.slow
async def test_forced_beside_an_agent_it_is_said_that_they_come_back(leave, stop, make_spec, tools):
    spec = make_spec()
    record = await leave(spec)
    tools.state.write_desired(desire(spec))
    with hold_state(tools.state.path):
        done, said = await stop(force=True)
    assert done
    assert said[-1] == f"another llmgw (pid {os.getpid()}) works here: if it is the agent, it starts m again"
    assert is_gone(record.pid)
    # The agent sees the end, and may have written the next try's file already.
    assert tools.state.read() == [record]


@pytest.mark.slow
async def test_no_agent_starts_while_engines_are_being_stopped(leave, tools, engines, make_spec):
    await leave(make_spec())
    tried = []

    def say(line):
        with pytest.raises(UsageError, match=f"another llmgw \\(pid {os.getpid()}\\)"), hold_state(tools.state.path):
            pass
        tried.append(line)

    with trio.fail_after(100):
        assert await stop_all(tools.state, engines, say=say)
    assert len(tried) == 2
    with hold_state(tools.state.path):
        pass


@pytest.mark.slow
async def test_an_engine_that_does_not_listen_is_killed(leave, stop, make_spec):
    record = await leave(make_spec("--deaf-to-term"))
    done, said = await stop()
    assert (done, said[-1]) == (True, "shd-m-1-0: stopped")
    assert is_gone(record.pid)


@pytest.mark.slow
async def test_an_engine_whose_plugin_is_gone_is_stopped_as_any_program(leave, stop, make_spec):
    record = await leave(make_spec())
    assert await stop(engines={}) == (True, [f"shd-m-1-0: stopping pid {record.pid}", "shd-m-1-0: stopped"])


@pytest.mark.slow
async def test_an_engine_whose_file_is_damaged_is_stopped(leave, stop, make_spec, tools):
    record = await leave(make_spec())
    (path,) = tools.state.shards.glob("*.json")
    path.write_text("{")
    assert await stop() == (True, [f"shd-m-1-0: stopping pid {record.pid}", "shd-m-1-0: stopped"])
    assert is_gone(record.pid)


@pytest.mark.slow
async def test_the_children_of_a_leader_that_died_are_stopped(leave, stop, make_spec, tools):
    record = await leave(make_spec("--spawn-child"))
    child = int(tools.state.log_path(record.spec.id).read_text().partition("child: ")[2].split()[0])
    kill(record.pid)
    assert not is_gone(child)
    assert await stop() == (True, [f"shd-m-1-0: stopping pid {child}", "shd-m-1-0: stopped"])
    assert is_gone(child)
    assert tools.state.read() == []


@pytest.mark.slow
async def test_an_engine_that_ended_by_itself_is_told_and_forgotten(leave, stop, make_spec, tools):
    record = await leave(make_spec())
    kill(record.pid)
    assert await stop() == (True, ["shd-m-1-0: had ended before"])
    assert tools.state.read() == []


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"boot_id": "another boot"}, {"start_time": 1}])
async def test_a_strangers_process_of_the_same_number_is_left_alone(leave, stop, make_spec, tools, change):
    record = await leave(make_spec())
    kill(record.pid)
    mine = os.getpid()
    change = {"start_time": read_stat(mine).start_time} | change
    tools.state.write(replace(record, pid=mine, **change))
    assert await stop() == (True, ["shd-m-1-0: had ended before"])


@pytest.mark.parametrize("force", [False, True])
async def test_a_desired_set_that_can_not_be_read_is_no_empty_one(stop, tools, force):
    tools.state.desired.write_text("{")
    expected = pytest.raises(UsageError, match=re.escape(f"{tools.state.desired}: "))
    with nullcontext() if force else expected as caught:
        assert await stop(force=force) == (True, [f"nothing runs here: there is no engine of {tools.state.path}"])
    if not force:
        assert caught.value.message.endswith("; to stop the engines all the same, add --force")


async def test_where_nothing_ever_ran_nothing_is_made(tmp_path):
    said = []
    folder = tmp_path / "none"
    assert await stop_all(StateFolder(folder), {}, say=said.append)
    assert said == [f"nothing runs here: there is no state folder {folder}"]
    assert not folder.exists()


async def test_a_path_that_is_no_folder_is_refused(tmp_path):
    file = tmp_path / "state"
    file.touch()
    with pytest.raises(UsageError, match=re.escape(str(file))):
        await stop_all(StateFolder(file), {}, say=[].append)
    with pytest.raises(UsageError, match="can't be looked into: Not a directory"):
        await stop_all(StateFolder(file / "below"), {}, say=[].append)


@pytest.mark.skipif(os.geteuid() == 0, reason="this user may read everything")
async def test_another_users_folder_is_told_to_be_one(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir(mode=0o000)
    with pytest.raises(UsageError, match="is another user's: run this as the one that the agent runs as"):
        await stop_all(StateFolder(folder), {}, say=[].append)
