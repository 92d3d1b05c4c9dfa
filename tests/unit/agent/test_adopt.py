"""What ran before this agent started."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace

import pytest
import trio

from llmgw.agent.adopt import adopt
from llmgw.agent.held import Held
from llmgw.agent.telling import Telling, first_report
from llmgw.agent.weights import Weights
from llmgw.core.replica import ShardState
from llmgw.engines.types import Launch
from llmgw.host.ports import Ports
from llmgw.host.process import read_stat

pytestmark = pytest.mark.slow


@pytest.fixture
def leave(tools, engines):
    """Start an engine and let go of it, as an agent that died would."""
    argv = (sys.executable, "-m", "fake_engine")

    async def leave(spec):
        held = Held(spec, tools, Telling(first_report(spec), lambda report: None))
        launch = Launch(
            program=argv,
            source="s",
            served_name="m",
            host="127.0.0.1",
            port=0,
            rank=spec.rank,
            count=spec.count,
            args=spec.profile.args,
        )
        await held.start(launch)
        with trio.fail_after(60):
            while True:
                if any("listening on" in line or "waiting for" in line for line in held.log.read_last(400)):
                    break
                await trio.sleep(0.02)
        held.close()
        (record,) = (record for record in tools.state.read() if record.spec == spec)
        return record

    return leave


@pytest.fixture
async def adopt_again(tools):
    """Adopt as a new agent does, and let go of the engines at the end."""
    adopted = []

    async def adopt_again(**changes):
        fresh = replace(tools, ports=Ports(*tools.settings.engine_ports), **changes)
        with trio.fail_after(100):
            found = await adopt(fresh)
        adopted.extend(found.running)
        return found, fresh

    yield adopt_again
    for each in adopted:
        each.process.close()


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def is_gone(pid):
    stat = read_stat(pid)
    return stat is None or stat.state in "ZX"


async def test_a_running_engine_is_taken_over_with_its_port(leave, adopt_again, make_spec):
    record = await leave(make_spec())
    found, fresh = await adopt_again()
    (adopted,) = found.running
    assert adopted.record == record
    assert (adopted.report.state, adopted.report.pid) == (ShardState.READY, record.pid)
    assert adopted.report.endpoint.port == record.port
    assert fresh.ports.take() != record.port


async def test_what_a_running_engine_runs_by_stays_in_use(leave, adopt_again, make_spec, tools):
    used = (("hf:org/repo/m.fake", "a" * 40),)
    spec = make_spec()
    await tools.weights.resume(spec.id, used)
    await leave(spec)
    _, fresh = await adopt_again(weights=Weights(tools.hands))
    assert fresh.weights.find_used(spec.id) == used


async def test_an_engine_that_still_loads_is_taken_over_as_loading(leave, adopt_again, make_spec):
    await leave(make_spec("--never-ready"))
    found, _ = await adopt_again()
    assert [adopted.report.state for adopted in found.running] == [ShardState.LOADING]


async def test_an_engine_that_ended_unseen_is_told_with_its_last_lines(leave, adopt_again, make_spec, tools):
    record = await leave(make_spec("--print-line", "last words"))
    kill(record.pid)
    found, _ = await adopt_again()
    ((_, report),) = found.ended
    assert (report.state, report.cause) == (ShardState.ENDED, "ended while no agent was watching it")
    assert "last words" in report.lines
    assert tools.state.read() == []


async def test_the_cause_that_its_log_names_is_told_of_one_that_ended_unseen(leave, adopt_again, make_spec):
    record = await leave(make_spec("--print-line", "fatal: the weights are corrupt"))
    kill(record.pid)
    found, _ = await adopt_again()
    ((_, report),) = found.ended
    assert report.cause == "ended while no agent was watching it: the weights are corrupt"
    assert report.remedy == "fetch the weights again"


async def test_one_that_serves_nobody_is_taken_over_as_ready(leave, adopt_again, make_spec):
    record = await leave(replace(make_spec(), rank=1, count=2))
    assert not record.serves
    found, _ = await adopt_again()
    (adopted,) = found.running
    assert (adopted.report.state, adopted.report.endpoint) == (ShardState.READY, None)


async def test_the_first_of_a_group_is_taken_over_as_ready_only_when_it_has_shown_that_it_is(
    leave, adopt_again, make_spec, tools
):
    record = await leave(replace(make_spec(), count=2))
    found, _ = await adopt_again()
    assert [adopted.report.state for adopted in found.running] == [ShardState.LOADING]
    tools.state.write(replace(record, proven=True))
    found, _ = await adopt_again()
    assert [adopted.report.state for adopted in found.running] == [ShardState.READY]


async def test_the_child_of_a_leader_that_died_unseen_is_stopped(leave, adopt_again, make_spec, tools):
    record = await leave(make_spec("--spawn-child"))
    child = int(tools.state.log_path(record.spec.id).read_text().partition("child: ")[2].split()[0])
    kill(record.pid)
    assert not is_gone(child)
    await adopt_again()
    assert is_gone(child)


@pytest.mark.parametrize("change", [{"boot_id": "another boot"}, {"start_time": 1}])
async def test_a_process_that_is_not_the_one_of_the_file_is_not_taken_over(
    leave, adopt_again, make_spec, tools, change
):
    record = await leave(make_spec())
    tools.state.write(replace(record, **change))
    found, _ = await adopt_again()
    assert found.running == ()
    assert len(found.ended) == 1


async def test_a_strangers_process_of_the_same_number_is_left_alone(leave, adopt_again, make_spec, tools):
    record = await leave(make_spec())
    mine = os.getpid()
    tools.state.write(replace(record, pid=mine, start_time=read_stat(mine).start_time - 1))
    found, _ = await adopt_again()
    assert found.running == ()
    assert not is_gone(mine)


async def test_an_engine_whose_file_is_damaged_is_stopped(leave, adopt_again, make_spec, tools):
    record = await leave(make_spec())
    (path,) = tools.state.shards.glob("*.json")
    path.write_text(json.dumps({"pid": record.pid}))
    found, _ = await adopt_again()
    assert found.running == ()
    assert is_gone(record.pid)


async def test_an_engine_whose_plugin_is_gone_is_stopped(leave, adopt_again, make_spec):
    record = await leave(make_spec())
    found, _ = await adopt_again(engines={})
    assert "no engine plugin is called fake" in found.ended[0][1].cause
    assert is_gone(record.pid)
