"""A whole agent over a link in memory, and agents as processes that are killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import trio

from llmgw.agent.tree import serve_node
from llmgw.core.events import NodeReported
from llmgw.core.replica import ShardState
from llmgw.errors import UsageError
from llmgw.host.process import find_marked, read_stat
from llmgw.host.state import StateFolder, hold_state

pytestmark = pytest.mark.slow

READY, ENDED, STOPPING = ShardState.READY, ShardState.ENDED, ShardState.STOPPING


@asynccontextmanager
async def serving(link, engines, settings):
    """An agent that is cancelled outright at the end."""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(100):
            await nursery.start(
                lambda task_status: serve_node(link, engines=engines, settings=settings, task_status=task_status)
            )
        yield
        nursery.cancel_scope.cancel()


def is_gone(pid):
    stat = read_stat(pid)
    return stat is None or stat.state in "ZX"


async def test_an_agent_registers_reports_and_runs_what_is_desired(link, engines, settings, make_spec):
    spec = make_spec()
    async with serving(link, engines, settings):
        await link.wait(link.registrations)
        assert link.registrations()[0].running == ()
        link.desire(spec)
        ready = await link.wait_state(spec, READY)
        await link.wait(lambda: any(isinstance(event, NodeReported) for event in link.events))
        link.desire()
        await link.wait_state(spec, ENDED)
    assert is_gone(ready.pid)
    assert len(link.registrations()) == 1


@pytest.fixture
def slow_program(tmp_path):
    """A fake engine that tells its version when there is a file, and can be launched all the same."""
    path = tmp_path / "engine"
    path.write_text(
        "#!/bin/sh\n"
        f"case $1 in --version|--help) while ! [ -e {tmp_path}/tell ]; do sleep 0.05; done;; esac\n"
        f'exec {sys.executable} -m fake_engine "$@"\n'
    )
    path.chmod(0o755)
    return path


async def test_an_engine_that_is_slow_to_tell_its_version_delays_nothing_but_its_own_launch(
    link, engines, settings, make_spec, slow_program
):
    spec = make_spec()
    pace = replace(settings.pace, inventory=0.1)
    slow = replace(settings, binaries={"fake": str(slow_program)}, pace=pace)

    def told(checked):
        for event in link.events:
            for found in event.node.engines if isinstance(event, NodeReported) else ():
                if found.engine == "fake" and found.checked is checked:
                    return found
        return None

    async with serving(link, engines, slow):
        await link.wait(link.registrations)
        (found,) = (each for each in link.registrations()[0].node.engines if each.engine == "fake")
        assert (found.checked, found.version) == (False, None)
        link.desire(spec)
        await link.wait_state(spec, ShardState.PREPARING)
        await link.wait(lambda: told(False))
        assert ShardState.LOADING not in [report.state for report in link.reports(spec)]
        slow_program.with_name("tell").touch()
        found = await link.wait(lambda: told(True))
        assert (found.version, found.broken) == ("1.0", None)
        await link.wait_state(spec, READY)


async def test_an_end_that_was_told_to_nobody_comes_with_the_next_registration(
    link, engines, settings, make_spec, caplog
):
    caplog.set_level(logging.INFO, "llmgw")
    spec = make_spec()
    async with serving(link, engines, settings):
        link.desire(spec)
        ready = await link.wait_state(spec, READY)
        link.lose(True)
        os.kill(ready.pid, signal.SIGKILL)
        with trio.fail_after(60):
            while f"shard {spec.id} ended" not in caplog.text:  # noqa: ASYNC110 - that is all that it tells anybody
                await trio.sleep(0.01)
        # what was said into the dead link is taken for said
        link.events.clear()
        link.lose(False)
        await link.wait(link.registrations)
        ((shard, report),) = link.registrations()[0].running
        assert (shard, report.state) == (spec, ENDED)
        assert report.cause
        link.desire()
        await link.wait_applied()
        await link.wait_lost_by_agent()
        await link.wait(lambda: len(link.registrations()) == 2)
        assert link.registrations()[1].running == ()


async def test_the_end_of_what_was_to_stop_is_not_told_to_a_server_that_has_begun_anew(
    link, engines, settings, make_spec, caplog
):
    caplog.set_level(logging.INFO, "llmgw")
    spec = make_spec("--deaf-to-term")
    async with serving(link, engines, settings):
        link.desire(spec)
        await link.wait_state(spec, READY)
        link.desire()
        await link.wait_state(spec, STOPPING)
        link.lose(True)
        with trio.fail_after(60):
            while f"shard {spec.id} is stopped" not in caplog.text:  # noqa: ASYNC110 - that is all that it tells anybody
                await trio.sleep(0.01)
        link.events.clear()
        link.lose(False)
        await link.wait(link.registrations)
        assert link.registrations()[0].running == ()
        # that server gives the same number
        link.desire(spec)
        await link.wait_state(spec, READY)
    assert ENDED not in [report.state for report in link.reports(spec)]


async def test_what_ended_without_an_agent_is_not_begun_again_by_a_server_that_has_not_heard_of_it(
    link, engines, settings, make_spec
):
    spec = make_spec()
    async with serving(link, engines, settings):
        link.desire(spec)
        ready = await link.wait_state(spec, READY)
    os.kill(ready.pid, signal.SIGKILL)
    said = len(link.reports(spec))
    # a set that was sent before this registration was read
    async with serving(link, engines, settings):
        await link.wait(lambda: len(link.registrations()) == 2)
        ((shard, report),) = link.registrations()[1].running
        assert (shard, report.state) == (spec, ENDED)
        link.desire(spec)
        again = replace(make_spec(), epoch=2)
        other = make_spec(number=2)
        link.desire(spec, other)
        await link.wait_state(other, READY)
        assert len(link.reports(spec)) == said
        link.desire(again, other)
        await link.wait_state(again, READY)
        link.desire()
        await link.wait_state(again, ENDED)
        await link.wait_state(other, ENDED)


async def test_a_shard_that_ended_is_not_started_again_in_the_same_epoch(link, engines, settings, make_spec):
    spec = make_spec("--crash-at-start")
    other = make_spec(number=2)
    async with serving(link, engines, settings):
        link.desire(spec)
        await link.wait_state(spec, ENDED)
        said = len(link.reports(spec))
        link.desire(spec, other)
        await link.wait_state(other, READY)
        assert len(link.reports(spec)) == said
        again = replace(make_spec(), epoch=2)
        link.desire(again, other)
        await link.wait_state(again, READY)


async def test_a_shard_that_was_stopped_may_be_desired_again_by_a_server_that_counts_anew(
    link, engines, settings, make_spec
):
    spec = make_spec()
    async with serving(link, engines, settings):
        link.desire(spec)
        first = await link.wait_state(spec, READY)
        link.desire()
        await link.wait_state(spec, ENDED)
        link.events.clear()
        link.desire(spec)
        again = await link.wait_state(spec, READY)
        assert again.pid != first.pid


async def test_a_higher_epoch_waits_until_the_older_one_has_ended(link, engines, settings, make_spec):
    old, new = make_spec("--deaf-to-term"), make_spec(epoch=2)
    async with serving(link, engines, settings):
        link.desire(old)
        await link.wait_state(old, READY)
        link.desire(new)
        await link.wait_state(new, READY)
    told = [(event.report.epoch, event.report.state) for event in link.events if hasattr(event, "report")]
    assert told.index((1, ENDED)) < min(at for at, (epoch, _) in enumerate(told) if epoch == 2)


async def test_shards_outlive_the_link_and_are_registered_anew(link, engines, settings, make_spec):
    spec, other = make_spec(), make_spec("--load-seconds", "0.5", number=2)
    async with serving(link, engines, settings):
        link.desire(spec)
        ready = await link.wait_state(spec, READY)
        link.desire(spec, other)
        await link.wait(lambda: link.reports(other))
        link.lose(True)
        await trio.sleep(1)
        assert link.reports(other)[-1].state is not READY
        link.lose(False)
        await link.wait(lambda: len(link.registrations()) == 2)
        running = {shard.id: report for shard, report in link.registrations()[1].running}
        assert running[spec.id].state is READY
        assert running[spec.id].pid == ready.pid
        # (what it has become meanwhile is told with the registration, and by itself where it came after that)
        if running[other.id].state is not READY:
            await link.wait_state(other, READY)
        link.desire(other)
        await link.wait_state(spec, ENDED)


async def test_an_agent_that_is_cancelled_leaves_engines_to_the_next_one(link, engines, settings, make_spec, caplog):
    spec = make_spec()
    async with serving(link, engines, replace(settings, stop_on_exit=True)):
        link.desire(spec)
        ready = await link.wait_state(spec, READY)
    assert not is_gone(ready.pid)
    (warning,) = (record for record in caplog.records if "go on running" in record.message)
    assert str(ready.pid) in warning.message
    assert warning.levelno == logging.WARNING
    next_link = type(link)()
    async with serving(next_link, engines, settings):
        await next_link.wait(next_link.registrations)
        ((shard, report),) = next_link.registrations()[0].running
        assert (shard, report.state, report.pid) == (spec, READY, ready.pid)
        next_link.desire()
        await next_link.wait_state(spec, ENDED)
    assert is_gone(ready.pid)


async def test_an_engine_that_ended_unseen_is_told_with_the_registration(link, engines, settings, make_spec):
    spec = make_spec()
    async with serving(link, engines, settings):
        link.desire(spec)
        ready = await link.wait_state(spec, READY)
    os.killpg(ready.pid, signal.SIGKILL)
    with trio.fail_after(60):
        while not is_gone(ready.pid):  # noqa: ASYNC110 - nobody here watches it any more
            await trio.sleep(0.01)
    next_link = type(link)()
    async with serving(next_link, engines, settings):
        await next_link.wait(next_link.registrations)
        ((shard, report),) = next_link.registrations()[0].running
        assert (shard, report.state) == (spec, ENDED)
        # the next try has a number of its own, and no word of this one ends it
        again = replace(spec, epoch=spec.epoch + 1)
        next_link.desire(again)
        await next_link.wait_state(again, READY)
        assert ENDED not in [said.state for said in next_link.reports(again)]
        next_link.desire()
        await next_link.wait_state(again, ENDED)


async def test_a_second_agent_over_the_same_state_is_refused(link, engines, settings):
    with hold_state(settings.state), pytest.raises(UsageError, match=f"pid {os.getpid()}"):
        await serve_node(link, engines=engines, settings=settings)


async def test_a_state_file_that_can_not_be_written_ends_that_shard_only(link, engines, settings, make_spec):
    spec, other = make_spec(), make_spec(number=2)
    StateFolder(settings.state).make()
    # The state file of the first can't be written or removed: its place is taken by a folder.
    (settings.state / "shards" / f"{spec.id}.fresh").mkdir()
    async with serving(link, engines, settings):
        link.desire(spec, other)
        await link.wait_state(other, READY)
        end = await link.wait_state(spec, ENDED)
        assert end.cause == f"state file {settings.state}/shards/{spec.id}.fresh can't be written: Is a directory"
        assert link.reports(other)[-1].state is READY
        prefix = StateFolder(settings.state).marker_prefix()
        markers = {marker for marker in find_marked(prefix).values() if "probe" not in marker.removeprefix(prefix)}
        assert markers == {StateFolder(settings.state).marker(other)}


async def test_a_full_disk_at_a_launch_is_its_cause(link, engines, settings, make_spec):
    spec = make_spec()
    StateFolder(settings.state).make()
    (settings.state / "shards" / f"{spec.id}.fresh").symlink_to("/dev/full")
    async with serving(link, engines, settings):
        link.desire(spec)
        end = await link.wait_state(spec, ENDED)
    path = settings.state / "shards" / f"{spec.id}.json"
    assert end.cause == f"state file {path} can't be written: No space left on device"
    assert end.remedy == f"make room on the disk of {path}"
    assert not find_marked(StateFolder(settings.state).marker_prefix())


async def test_a_state_folder_that_can_not_be_made_is_refused(link, engines, settings):
    settings.state.mkdir()
    (settings.state / "shards").touch()
    with pytest.raises(UsageError, match="shards: it is a file, not a folder"):
        await serve_node(link, engines=engines, settings=settings)


async def test_an_engine_that_was_just_killed_is_not_said_to_go_on(link, engines, settings, make_spec, caplog):
    spec, other = make_spec(), make_spec(number=2)
    async with serving(link, engines, replace(settings, stop_on_exit=True)):
        link.desire(spec, other)
        killed = await link.wait_state(spec, READY)
        ready = await link.wait_state(other, READY)
        # No checkpoint between this and the farewell: the agent has not heard of the end.
        os.killpg(killed.pid, signal.SIGKILL)
    (said,) = (record.message for record in caplog.records if "go on running" in record.message)
    assert said.endswith(f"pids {ready.pid}")


async def test_nothing_goes_on_when_the_only_engine_was_killed(link, engines, settings, make_spec, caplog):
    spec = make_spec()
    async with serving(link, engines, replace(settings, stop_on_exit=True)):
        link.desire(spec)
        ready = await link.wait_state(spec, READY)
        os.killpg(ready.pid, signal.SIGKILL)
    assert "go on running" not in caplog.text


async def test_a_shard_that_can_not_even_be_forgotten_ends(link, engines, settings, make_spec, caplog):
    spec = make_spec()
    async with serving(link, engines, settings):
        link.desire(spec)
        ready = await link.wait_state(spec, READY)
        path = settings.state / "shards" / f"{spec.id}.json"
        path.unlink()
        path.mkdir()
        link.desire()
        end = await link.wait_state(spec, ENDED)
        assert end.cause is None
        assert f"{path} can't be removed" in caplog.text
        assert is_gone(ready.pid)
        again = make_spec(number=2)
        link.desire(again)
        await link.wait_state(again, READY)


async def test_a_link_with_a_fault_of_its_own_is_tried_again(link, engines, settings, make_spec, caplog):
    class Faulty:
        failed = frozenset()
        give_up_seconds = None

        async def report(self, event):
            self.fail_once(type(event).__name__)
            await link.report(event)

        async def desired(self, after):
            self.fail_once("desired")
            return await link.desired(after)

        async def order(self, after):
            self.fail_once("order")
            return await link.order(after)

        async def wait_open(self):
            self.fail_once("open")
            await link.wait_open()

        async def wait_lost(self):
            await link.wait_lost()

        def fail_once(self, what):
            if what not in self.failed:
                self.failed |= {what}
                raise ZeroDivisionError(what)

    spec = make_spec()
    link.desire(spec)
    async with serving(Faulty(), engines, settings):
        await link.wait_state(spec, READY)
        link.desire()
        await link.wait_state(spec, ENDED)
    raised = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert {"NodeRegistered", "ShardChanged", "WeightsReported", "desired", "open", "order"} <= set(raised)


AGENT = """
import sys
import msgspec, trio
from dataclasses import dataclass
from pathlib import Path
from llmgw.agent.settings import AgentSettings, WeightsSettings
from llmgw.agent.tree import serve_node
from llmgw.core.effects import Desire
from llmgw.core.replica import ShardSpec
from llmgw.engines.registry import load_engines

spec = msgspec.json.decode(sys.argv[1], type=ShardSpec)

class Link:
    give_up_seconds = None
    async def desired(self, after):
        if after >= 1:
            await trio.sleep_forever()
        return Desire(node=spec.node, revision=1, shards=(spec,))
    async def report(self, event):
        report = getattr(event, "report", None)
        if report is not None:
            print(report.state, report.pid, flush=True)
    async def wait_open(self):
        pass
    async def wait_lost(self):
        await trio.sleep_forever()

    async def order(self, after):
        await trio.sleep_forever()

state = Path(sys.argv[2])
ports = tuple(map(int, sys.argv[3:5]))
weights = WeightsSettings(cache=state / "weights")
settings = AgentSettings(node_id=spec.node, state=state, weights=weights, engine_ports=ports)
trio.run(lambda: serve_node(Link(), engines=load_engines(), settings=settings))
"""


async def test_engines_of_an_agent_killed_with_9_are_adopted_by_the_next(link, engines, settings, make_spec):
    spec = make_spec()
    with start_agent(spec, settings) as first:
        pid = await trio.to_thread.run_sync(wait_ready, first)
        first.send_signal(signal.SIGKILL)
    assert not is_gone(pid)
    async with serving(link, engines, settings):
        await link.wait(link.registrations)
        ((shard, report),) = link.registrations()[0].running
        assert (shard, report.state, report.pid) == (spec, READY, pid)
        link.desire(spec)
        # It is watched from now on, though it is nobody's child here.
        os.kill(pid, signal.SIGKILL)
        end = await link.wait_state(spec, ENDED)
    assert "unknown" in end.cause


def start_agent(spec, settings):
    ports = map(str, settings.engine_ports)
    argv = [sys.executable, "-c", AGENT, msgspec.json.encode(spec), str(settings.state), *ports]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "fakes")}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, env=env, text=True)


def wait_ready(agent):
    for line in agent.stdout:
        state, pid = line.split()
        if state == "ready":
            return int(pid)
    raise AssertionError("the agent ended before its engine was ready")
