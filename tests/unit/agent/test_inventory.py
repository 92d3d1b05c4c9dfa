"""What a node reports of itself."""

from __future__ import annotations

import platform
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from llmgw.agent.inventory import (
    DETAIL_CHARS,
    FLAG_CHARS,
    SHOWN_FLAGS,
    SHOWN_USES,
    Inventory,
    serve_checks,
    serve_inventory,
    tell_engine,
)
from llmgw.agent.preflight import Preflight
from llmgw.agent.settings import WeightsSettings
from llmgw.config.agent import Discovery, FabricConfig
from llmgw.core.node import Disk, FabricFound, FlagFound, ForeignUse, Gpu
from llmgw.engines.check import FlagFinding, FlagState
from llmgw.engines.registry import open_engine
from llmgw.host.gpus import GpusFound
from llmgw.wire import PROTOCOL, NodeWord, decode_from_agent, encode


@pytest.mark.slow
async def test_a_node_tells_what_it_has(tools, tmp_path):
    weights = WeightsSettings(cache=tmp_path / "models")
    tools = replace(tools, settings=replace(tools.settings, weights=weights))
    node = await tools.hands.survey(tools)
    assert node.id == "n1"
    assert node.cores >= 1
    assert 0 < node.memory_available_gb <= node.memory_gb
    assert [disk.path for disk in node.disks] == [str(tools.settings.state)]
    found = {engine.engine: engine for engine in node.engines}
    assert found["fake"].program[1:] == ("-m", "fake_engine")
    assert (found["fake"].checked, found["fake"].version) == (False, None)
    assert 0 < node.memory_foreign_gb <= node.memory_gb - node.memory_available_gb
    assert (node.gpus, node.gpu_driver, node.fabrics, node.labels) == (None, None, (), {})


async def test_a_node_tells_its_labels_and_its_time(tools):
    tools = replace(tools, engines={}, settings=replace(tools.settings, labels={"rack": "r7"}))
    node = await Inventory(wall=lambda: 1234.5).survey(tools)
    assert (node.labels, node.clock) == ({"rack": "r7"}, 1234.5)


class Cards:
    """GPUs that a test sets."""

    def __init__(self, **found):
        self.found = GpusFound(**found)

    def read(self, ours):
        return self.found


async def test_of_very_many_that_use_a_gpu_the_largest_are_named(tools):
    uses = tuple(ForeignUse(memory_gb=float(number), pid=number) for number in range(1, 101))
    inventory = Inventory(gpus=Cards(gpus=(replace(GPU, foreign=uses),)))
    (gpu,) = (await inventory.survey(replace(tools, engines={}))).gpus
    assert [use.pid for use in gpu.foreign] == [*range(100, 100 - SHOWN_USES + 1, -1), None]
    assert sum(use.memory_gb for use in gpu.foreign) == sum(use.memory_gb for use in uses)


@pytest.mark.slow
async def test_a_node_reports_while_its_gpu_driver_hangs(tools):
    """Else work on the node would make the node look dead."""
    free, cards = threading.Event(), Cards(gpus=(GPU,))

    def hang(ours):
        free.wait()
        return cards.found

    inventory, tools = Inventory(gpus=cards), replace(tools, engines={})
    assert (await inventory.survey(tools)).gpus == (GPU,)
    cards.read = hang
    try:
        with trio.fail_after(60):
            assert (await inventory.survey(tools)).id == "n1"
    finally:
        free.set()


EXAMPLE = Path(__file__).parents[3] / "examples" / "fake-inventory.yaml"
GPU = Gpu(uuid="GPU-1", index=0, gpu_class="a-1g", name="A", memory_gb=1.0, memory_used_gb=0.0)


async def test_a_node_tells_its_gpus_and_what_is_the_matter_with_them_once_in_the_log(tools, caplog):
    cards = Cards(gpus=(GPU,), driver="580.1", problem="a card is lost")
    inventory, tools = Inventory(gpus=cards), replace(tools, engines={})
    for _ in range(3):
        node = await inventory.survey(tools)
    assert (node.gpus, node.gpu_driver) == ((GPU,), "580.1")
    assert "a card is lost" in node.warnings
    assert caplog.text.count("a card is lost") == 1
    assert await inventory.look_at_gpus(tools) == cards.found
    cards.found = GpusFound()
    node = await inventory.survey(tools)
    assert (node.gpus, node.gpu_driver) == ((), None)
    assert "a card is lost" not in node.warnings


FAKE = """
gpus: [{class: h100-80g, count: 8, nvlink: all}]
driver: "580.1"
cores: 128
cpu_flags: [sse2]
memory_gb: 2000
memory_foreign_gb: 50
disks: [{path: /srv, free_gb: 1, total_gb: 2}]
fabrics: {ib-a: {address: 127.0.0.1, interface: lo}}
"""


def with_a_fake(tools, tmp_path, text):
    (tmp_path / "fake.yaml").write_text(text)
    settings = replace(
        tools.settings,
        discovery=Discovery(fake=tmp_path / "fake.yaml"),
        fabrics={"ib-a": FabricConfig(hcas=("mlx5_0",))},
    )
    return replace(tools, engines={}, settings=settings)


async def test_a_fake_inventory_stands_in_for_the_whole_machine(tools, tmp_path):
    tools = with_a_fake(tools, tmp_path, FAKE)
    node = await tools.hands.survey(tools)
    assert [(gpu.uuid, gpu.gpu_class) for gpu in node.gpus] == [(f"GPU-n1-{index}", "h100-80g") for index in range(8)]
    assert (node.gpu_driver, node.cores, node.cpu_flags) == ("580.1", 128, {"sse2"})
    assert (node.memory_gb, node.memory_available_gb, node.memory_foreign_gb) == (2000, 1950, 50)
    assert node.disks == (Disk(path="/srv", free_gb=1, total_gb=2),)
    fabric = FabricFound(name="ib-a", interface="lo", address="127.0.0.1", hcas=("mlx5_0",))
    assert node.fabrics == await tools.hands.look_at_fabrics(tools) == (fabric,)
    assert len((await tools.hands.look_at_gpus(tools)).gpus) == 8


async def test_all_that_a_node_says_of_itself_can_be_sent(tools, tmp_path):
    tools = with_a_fake(tools, tmp_path, EXAMPLE.read_text())
    tools = replace(tools, settings=replace(tools.settings, labels={"rack": "r7"}))
    node = await tools.hands.survey(tools)
    said = decode_from_agent(encode(NodeWord(node=node, applied=None)), PROTOCOL)
    assert said == NodeWord(node=node, applied=None)


async def test_a_fake_inventory_may_change_while_the_agent_runs(tools, tmp_path):
    tools = with_a_fake(tools, tmp_path, "memory_foreign_gb: 7\ngpus: [{class: h100-80g}]")
    node = await tools.hands.survey(tools)
    assert (node.memory_foreign_gb, node.gpus[0].foreign) == (7, ())
    assert node.memory_gb > 0
    (tmp_path / "fake.yaml").write_text("gpus: [{class: h100-80g, foreign: [{memory_gb: 72, pid: 47, name: other}]}]")
    (gpu,) = (await tools.hands.survey(tools)).gpus
    assert gpu.foreign == (ForeignUse(memory_gb=72.0, pid=47, name="other"),)


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="of processors of this kind alone")
async def test_a_processor_without_avx2_is_warned_of_in_the_report_and_once_in_the_log(tools, tmp_path, caplog):
    tools = with_a_fake(tools, tmp_path, "cpu_flags: [sse2]")
    for _ in range(2):
        node = await tools.hands.survey(tools)
    (warning,) = node.warnings
    assert "no AVX2" in warning
    assert caplog.text.count(warning) == 1


async def find_fake(tools):
    return next(found for found in (await tools.hands.survey(tools)).engines if found.engine == "fake")


@pytest.mark.slow
async def test_what_came_of_trying_a_program_is_told(tools, nursery):
    tools = replace(tools, engines={"fake": tools.engines["fake"]})
    nursery.start_soon(serve_checks, tools)
    with trio.fail_after(100):
        await tools.programs.wait_changed(0)
    found = await find_fake(tools)
    assert (found.checked, found.version, found.broken) == (True, "1.0", None)


@pytest.mark.slow
async def test_why_a_program_is_broken_is_told_with_what_to_do(tools, tmp_path):
    program = tmp_path / "engine"
    text = "libnuma.so.1: cannot open shared object file: No such file or directory"
    program.write_text(f"#!/bin/sh\necho 'error while loading shared libraries: {text}' >&2\nexit 127\n")
    program.chmod(0o755)
    tools = replace(tools, settings=replace(tools.settings, binaries={"fake": str(program)}))
    await tools.programs.check(tools.engines["fake"], (str(program),))
    found = await find_fake(tools)
    assert found.broken == ("the shared library libnuma.so.1 is missing; on Debian and Ubuntu: apt install libnuma1")
    assert (found.checked, found.version, found.missing_libraries) == (True, None, ("libnuma.so.1",))


@pytest.mark.slow
async def test_news_of_a_program_are_reported_at_once(tools, nursery):
    pace = replace(tools.settings.pace, inventory=1e9)
    tools = replace(tools, settings=replace(tools.settings, pace=pace), engines={"fake": tools.engines["fake"]})
    send, receive = trio.open_memory_channel(10)
    nursery.start_soon(serve_inventory, tools, send.send_nowait)
    await trio.testing.wait_all_tasks_blocked(0.05)
    nursery.start_soon(serve_checks, tools)
    with trio.fail_after(100):
        node = await receive.receive()
    assert [(found.checked, found.version) for found in node.engines] == [(True, "1.0")]


@pytest.mark.slow
async def test_programs_that_can_not_be_tried_now_are_tried_again(tools, nursery, caplog):
    class FailsOnce:
        failed = False

        def items(self):
            if not self.failed:
                self.failed = True
                raise OSError("the test made it fail")
            return tools.engines.items()

    nursery.start_soon(serve_checks, replace(tools, engines=FailsOnce()))
    with trio.fail_after(100):
        await tools.programs.wait_changed(0)
    assert "the test made it fail" in caplog.text


class Faulty(dict):
    """Configured programs; to look for that of ``bad`` fails, this many times."""

    def __init__(self, times):
        self.left = times

    def get(self, name, default=None):
        if name == "bad" and self.left:
            self.left -= 1
            raise ZeroDivisionError("the test made it fail")
        return default


def with_a_bad_engine(tools, times):
    import llmgw_fake

    engines = {"bad": open_engine("bad", llmgw_fake), "fake": tools.engines["fake"]}
    return replace(tools, engines=engines, settings=replace(tools.settings, binaries=Faulty(times)))


@pytest.mark.slow
async def test_an_engine_that_can_not_be_tried_is_told_of_once_and_the_others_are_tried(tools, nursery, caplog):
    tools = with_a_bad_engine(tools, 3)
    nursery.start_soon(serve_checks, tools)
    with trio.fail_after(100):
        # Of both in the end.
        await tools.programs.wait_changed(1)
    assert tools.settings.binaries.left == 0
    assert caplog.text.count("engine bad can't be tried") == 1
    assert caplog.text.count("ZeroDivisionError: the test made it fail") == 1


async def test_an_engine_that_can_not_be_looked_for_keeps_no_node_from_reporting(tools):
    node = await tools.hands.survey(with_a_bad_engine(tools, 1))
    assert [engine.engine for engine in node.engines] == ["fake"]


@pytest.mark.slow
async def test_of_its_flags_those_that_are_not_ok_are_told_the_worst_first(tools, tmp_path):
    program = tmp_path / "engine"
    flags = ["--host H", "--port N", "--alias A"]
    text = "\n".join(["usage: x", *(f"  {flag}" for flag in flags), "  --weights W", ""])
    program.write_text(f"#!/bin/sh\n[ $1 = --help ] && printf '{text}' || echo fake_engine 1.0\n")
    program.chmod(0o755)
    tools = replace(tools, settings=replace(tools.settings, binaries={"fake": str(program)}))
    await tools.programs.check(tools.engines["fake"], (str(program),))
    found = await find_fake(tools)
    assert found.flags == (
        FlagFound(flag="--model", given_by="llmgw", state="renamed", detail="this release calls it --weights"),
    )
    assert found.flags_ok == 3


def test_of_many_flags_the_worst_are_told_and_none_of_them_at_length():
    def a_flag(name, state, detail=None):
        return FlagFinding(flag=name, given_by="llmgw", state=state, detail=detail)

    findings = (
        a_flag("--fine", FlagState.OK),
        *(a_flag(f"--{number}", FlagState.UNCHECKED) for number in range(SHOWN_FLAGS)),
        a_flag("--old", FlagState.DEPRECATED, "x" * 5000),
        a_flag("--" + "y" * 5000, FlagState.REMOVED),
    )
    tried = Preflight(
        engine="e",
        program=("/e",),
        version=None,
        broken=None,
        remedy=None,
        problems=(),
        missing_libraries=(),
        findings=findings,
    )
    found = tell_engine("e", ("/e",), tried)
    assert found.flags_ok == 1
    assert [flag.state for flag in found.flags] == ["removed", "deprecated", *["unchecked"] * (SHOWN_FLAGS - 2)]
    assert len(found.flags[0].flag) == FLAG_CHARS + 1
    assert len(found.flags[1].detail) == DETAIL_CHARS + 1
    assert found.flags[2] == FlagFound(flag="--0", given_by="llmgw", state="unchecked")


@pytest.mark.slow
async def test_an_engine_without_a_program_is_not_reported(tools, alter, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    altered = alter(embedded=None)
    assert "fake" not in {engine.engine for engine in (await altered.hands.survey(altered)).engines}


def spoil(path, how):
    path.write_text("#!/bin/sh\necho fake_engine 1.0\n")
    path.chmod(0o755)
    if how == "not executable":
        path.chmod(0o644)
    else:
        path.unlink()
    if how == "a folder":
        path.mkdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("not executable", "it may not be executed; `chmod +x` it, or give the program itself"),
        ("gone", "it is not there; give the path of the engine's program"),
        ("a folder", "it is a folder; give the program in it"),
    ],
)
async def test_a_configured_binary_that_can_not_be_used_is_told_with_the_reason(tools, nursery, caplog, how, why):
    path = tools.settings.state.parent / "engine"
    spoil(path, how)
    settings = replace(tools.settings, binaries={"fake": str(path)})
    tools = replace(tools, settings=settings, engines={"fake": tools.engines["fake"]})
    found = await find_fake(tools)
    assert (found.program, found.checked, found.starts) == ((str(path),), True, False)
    assert found.broken == f"engines.fake.bin: {path}: {why}"
    nursery.start_soon(serve_checks, tools)
    # Several looks, and the first of them has told it.
    for _ in range(5000):
        await trio.sleep(tools.settings.pace.inventory)
        if found.broken in caplog.text:
            break
    await trio.sleep(3 * tools.settings.pace.inventory)
    assert caplog.text.count(found.broken) == 1


@pytest.mark.slow
async def test_a_node_reports_again_and_again_and_past_a_failure(tools, nursery, caplog):
    class FailsOnce:
        failed = False

        def items(self):
            if not self.failed:
                self.failed = True
                raise OSError("the test made it fail")
            return ()

    send, receive = trio.open_memory_channel(10)
    nursery.start_soon(serve_inventory, replace(tools, engines=FailsOnce()), send.send_nowait)
    with trio.fail_after(60):
        for _ in range(2):
            assert (await receive.receive()).id == "n1"
    assert "the test made it fail" in caplog.text
