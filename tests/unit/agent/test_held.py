"""What a shard holds, taken and given back together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from llmgw.agent.held import OOM_SECONDS, Held, endpoint_of, is_proven
from llmgw.agent.telling import Telling, first_report
from llmgw.engines.types import Launch
from llmgw.errors import EngineFailed
from llmgw.host.process import read_boot_id, read_marker, read_stat


@pytest.fixture
def held(tools, make_spec):
    spec = make_spec()
    held = Held(spec, tools, Telling(first_report(spec), lambda report: None))
    yield held
    held.close()


@pytest.fixture
def launch(tools):
    return Launch(program=("/bin/sh", "-c", "exec sleep 600"), source="s", served_name="m", host="127.0.0.1", port=0)


async def test_a_started_engine_is_known_after_a_crash(held, launch, tools):
    await held.start(launch)
    (record,) = tools.state.read()
    stat = read_stat(record.pid)
    assert (record.spec, record.boot_id, record.start_time) == (held.spec, read_boot_id(), stat.start_time)
    assert record.marker == read_marker(record.pid) == tools.state.marker(held.spec)
    assert held.telling.last.endpoint == endpoint_of(held.spec, record.port)


async def test_what_it_runs_by_is_known_after_a_crash_too(held, launch, tools):
    used = (("hf:org/repo/m.fake", "a" * 40),)
    await tools.weights.resume(held.spec.id, used)
    await held.start(launch)
    (record,) = tools.state.read()
    assert record.weights == used


async def test_clearing_gives_everything_back(held, launch, tools):
    await held.start(launch)
    pid, port = held.process.pid, held.port
    with trio.fail_after(60):
        await held.clear()
        await held.clear()
    assert read_stat(pid) is None
    assert tools.state.read() == []
    assert (held.process, held.port) == (None, None)
    ports = {tools.ports.take() for _ in range(8)}
    assert port in ports


async def test_an_engine_that_can_not_be_started_gives_its_port_back(held, launch, tools):
    with pytest.raises(EngineFailed, match="/nowhere/engine can't be started: No such file"):
        await held.start(replace(launch, program=("/nowhere/engine",)))
    await held.clear()
    assert len({tools.ports.take() for _ in range(8)}) == 8


async def test_a_log_that_can_not_be_opened_is_named(held, launch, tools):
    # A link to itself: nothing is there to be moved away, and nothing can be made there, whoever asks.
    path = tools.state.log_path(held.spec.id)
    path.symlink_to(path)
    with pytest.raises(EngineFailed, match=rf"^/bin/sh can't be started: {path}: Too many levels of symbolic links$"):
        await held.start(launch)
    await held.clear()
    assert len({tools.ports.take() for _ in range(8)}) == 8


def test_a_log_that_is_out_of_reach_is_told_once_and_ends_nothing(held, tools, caplog):
    path = tools.state.log_path(held.spec.id)
    path.mkdir(parents=True)
    assert held.read_log() == held.read_log() == []
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert str(path) in told
    path.rmdir()
    path.write_text("one\n")
    assert held.read_log() == ["one"]


async def test_an_older_log_that_is_in_the_way_is_named(held, launch, tools):
    path = tools.state.log_path(held.spec.id)
    path.touch()
    path.with_name(path.name + ".1").mkdir()
    with pytest.raises(EngineFailed, match=rf"^/bin/sh can't be started: {path}: Is a directory$"):
        await held.start(launch)


async def test_an_engine_that_listens_on_nothing_has_not_lost_its_port(held, launch, listener):
    await held.start(launch)
    assert not await held.has_lost_its_port()
    held.tools.ports.give_back(held.port)
    held.port = listener.getsockname()[1]
    assert await held.has_lost_its_port()


async def test_that_an_engine_has_shown_that_it_answers_is_known_to_the_next_agent(held, launch, tools):
    spec = replace(held.spec, count=2)
    held.spec = spec
    await held.start(launch)
    assert not is_proven(spec, held.record)
    await held.note_proven()
    (record,) = tools.state.read()
    assert is_proven(spec, record)
    assert is_proven(spec, replace(record, proven=False, serves=False))
    assert is_proven(replace(spec, count=1), None)
    assert not is_proven(replace(spec, count=1, on_trial=True), None)
    assert is_proven(replace(spec, count=1, on_trial=True), record)


async def test_a_full_disk_at_that_moment_is_told_and_ends_nothing(held, launch, tools, caplog):
    await held.start(launch)
    (tools.state.shards / f"{held.spec.id}.fresh").symlink_to("/dev/full")
    await held.note_proven()
    assert "can't be written: No space left on device" in caplog.text
    assert held.record.proven


@pytest.mark.parametrize(("before", "now", "so"), [(1, 2, True), (1, 1, False), (None, 2, False), (1, None, False)])
async def test_the_kernel_has_killed_where_it_counts_one_more(held, before, now, so, with_hands):
    held.oom_kills = before
    held.tools = with_hands(count_oom_kills=lambda: now)
    await held.count_kills()
    assert held.has_seen_a_kill() is so


async def test_a_kill_is_no_news_after_a_while_and_the_next_one_is(held, autojump_clock, with_hands):
    counts = iter([2, 2, 3])
    held.oom_kills = 1
    held.tools = with_hands(count_oom_kills=lambda: next(counts))
    await held.count_kills()
    await trio.sleep(OOM_SECONDS)
    await held.count_kills()
    assert held.has_seen_a_kill()
    await trio.sleep(1)
    assert not held.has_seen_a_kill()
    await held.count_kills()
    assert held.has_seen_a_kill()


async def test_a_new_try_knows_of_no_kill_before_it(held, launch):
    held.oom_seen_at = trio.current_time()
    await held.start(launch)
    assert not held.has_seen_a_kill()


async def test_without_an_engine_there_is_no_exit_code(held):
    assert await held.wait_exit() is None
