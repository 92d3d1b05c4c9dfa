"""GPUs and fabrics of a node, from sources that a test makes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import trio

from llmgw.agent.devices import FABRIC_SILENT, Devices, Ours
from llmgw.agent.troubles import Troubles
from llmgw.config.agent import Discovery, FabricConfig
from llmgw.core.node import FabricFound, Gpu
from llmgw.host.gpus import GpusFound
from llmgw.host.inventory_file import InventoryFile
from llmgw.host.process import MARKER

NEVER = 1000.0
GPU = Gpu(uuid="GPU-1", index=0, gpu_class="a-1g", name="A", memory_gb=1.0, memory_used_gb=0.0, temperature_c=40.0)
UP = FabricFound(name="ib-a", interface="ib0", address="10.0.0.1", hcas=("mlx5_0",))


class Cards:
    """A source of GPUs that says what a test sets; while it is held nobody gets an answer."""

    def __init__(self, **found):
        self.found = GpusFound(**found)
        self.error = None
        self.ours = None
        self.free = threading.Event()
        self.free.set()

    def read(self, ours):
        self.ours = ours
        self.free.wait()
        if self.error is not None:
            raise self.error
        return self.found

    @contextmanager
    def held(self):
        self.free.clear()
        try:
            yield
        finally:
            self.free.set()


@pytest.fixture
def make(settings, caplog):
    """Devices that are waited for as long as they take, unless a test says otherwise."""
    caplog.set_level(logging.INFO)

    def make(fabrics=None, discovery=None, **what):
        told = replace(settings, fabrics=fabrics or {}, discovery=discovery)
        usual = {"patience_seconds": NEVER, "slow_seconds": NEVER, "marker_prefix": "/no/such/state:"}
        return Devices(told, troubles=Troubles(), **usual | what)

    return make


async def test_what_our_processes_held_at_the_last_look_is_remembered(make):
    cards = Cards(gpus=(GPU,), held_gb={"GPU-1": {5: 0.25, 6: 0.5}})
    devices = make(gpus=cards)
    assert devices.recall_held_gb({5, 6}) is None
    await devices.look_at_gpus()
    cards.error = OSError("no")
    await devices.look_at_gpus()
    assert devices.recall_held_gb({5, 6}) == 0.75
    assert devices.recall_held_gb({7}) is None


async def test_what_the_source_says_is_what_there_is(make):
    cards = Cards(gpus=(GPU,), driver="580.1")
    devices = make(gpus=cards)
    assert devices.looks_for_gpus
    assert await devices.look_at_gpus() == cards.found


async def test_where_nobody_looks_there_are_none(make):
    devices = make()
    assert not devices.looks_for_gpus
    assert await devices.look_at_gpus() == GpusFound(problem="this agent looks for no GPUs")


async def test_a_machine_is_looked_at_as_agent_yaml_says(make, tmp_path):
    devices = make(discovery=Discovery(nvidia_smi=tmp_path / "none"))
    assert devices.looks_for_gpus
    # Whatever this machine has: it is an answer.
    assert isinstance(await devices.look_at_gpus(), GpusFound)


async def test_a_driver_that_hangs_takes_its_gpus_out_of_service_and_holds_nobody_up(make, caplog):
    """xinference#608: what a node does must not make it look dead."""
    cards = Cards(gpus=(GPU,), driver="580.1")
    devices = make(gpus=cards, patience_seconds=0.05, slow_seconds=0.05)
    while not (await devices.look_at_gpus(Ours())).gpus:
        pass
    with cards.held(), trio.fail_after(60):
        while (found := await devices.look_at_gpus(Ours())).problem is None:
            pass
        assert found.driver == "580.1"
        (gpu,) = found.gpus
        assert gpu == replace(GPU, broken=gpu.broken, temperature_c=None)
        assert gpu.broken.startswith("the driver does not answer (for ")
        assert found.problem == "the GPUs can't be looked at: the driver does not answer"
        for _ in range(10):
            await devices.look_at_gpus(Ours())
    with trio.fail_after(60):
        while (await devices.look_at_gpus(Ours())).gpus != (GPU,):
            await trio.lowlevel.checkpoint()
    told = [record.message for record in caplog.records if "GPU" in record.message]
    assert told[:2] == [
        "GPU 0 (GPU-1) is out of service on this node: the driver does not answer",
        "GPU 0 (GPU-1) is in service again",
    ]


async def test_a_look_that_fails_takes_them_out_of_service_until_one_succeeds(make, caplog):
    cards = Cards(gpus=(GPU,))
    devices = make(gpus=cards)
    await devices.look_at_gpus()
    cards.error = ValueError("the test made it fail")
    found = await devices.look_at_gpus()
    assert found.gpus[0].broken == "the look at it failed: ValueError: the test made it fail"
    assert found.problem == "the GPUs can't be looked at: the look at it failed: ValueError: the test made it fail"
    cards.error = None
    assert await devices.look_at_gpus() == cards.found
    assert "GPU 0 (GPU-1) is in service again" in caplog.text


async def test_a_card_that_breaks_is_told_once(make, caplog):
    cards = Cards(gpus=(replace(GPU, broken="it has fallen off the bus"),))
    devices = make(gpus=cards)
    for _ in range(3):
        await devices.look_at_gpus()
    assert caplog.messages == ["GPU 0 (GPU-1) is out of service on this node: it has fallen off the bus"]


@pytest.fixture
def engine():
    """A process of ours that holds some memory, and how its marker begins."""
    prefix = f"/state/of/{os.getpid()}:"
    code = "held = bytearray(50_000_000); print('up', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {MARKER: f"{prefix}shd-m-1-0:1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        process.stdout.readline()
        yield process.pid, prefix
        process.stdin.close()


@pytest.mark.slow
async def test_our_engines_are_known_by_their_marker_and_their_memory_is_ours(make, engine):
    pid, prefix = engine
    cards = Cards()
    devices = make(gpus=cards, marker_prefix=prefix)
    ours = await devices.find_ours()
    assert ours.pids == {pid}
    assert 0.05 < ours.held_gb < 10
    await devices.look_at_gpus()
    assert cards.ours == {pid}


@pytest.fixture
def fake(tmp_path):
    """A fake inventory that a test writes."""
    return InventoryFile(tmp_path / "fake.yaml", "n1")


async def test_a_fake_inventory_says_what_gpus_there_are_and_how_they_change(make, fake):
    fake.path.write_text("driver: '1.0'\ngpus: [{class: h100-80g, count: 2}]")
    devices = make(file=fake)
    found = await devices.look_at_gpus()
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-n1-0", "GPU-n1-1"]
    assert (found.driver, found.problem) == ("1.0", None)
    fake.path.write_text("gpus: [{class: h100-80g, broken: it is lost}]")
    assert [gpu.broken for gpu in (await devices.look_at_gpus()).gpus] == ["it is lost"]


async def test_a_fake_inventory_that_is_wrong_is_a_problem_and_changes_nothing(make, fake):
    fake.path.write_text("gpus: [{class: h100-80g}]\nproblem: one card is missing")
    devices = make(file=fake)
    assert (await devices.look_at_gpus()).problem == "one card is missing"
    fake.path.write_text("gpus: [{class: h100-80g, cuont: 2}]")
    found = await devices.look_at_gpus()
    assert len(found.gpus) == 1
    assert found.problem.startswith("the fake inventory can't be used, and what it said before holds: ")
    assert "gpus[0].cuont: unknown key (count?)" in found.problem


class Network:
    """What is found of each fabric."""

    def __init__(self, found=UP):
        self.found = found
        self.asked = []
        self.free = threading.Event()
        self.free.set()

    def read(self, name, hcas, interface):
        self.free.wait()
        self.asked.append((name, hcas, interface))
        if isinstance(self.found, OSError):
            raise self.found
        return self.found


IB = {"ib-a": FabricConfig(hcas=("mlx5_0",), interface="ib0")}


async def test_what_is_declared_is_looked_for(make):
    network = Network()
    devices = make(IB, read_fabric=network.read)
    assert await devices.look_at_fabrics() == (UP,)
    assert network.asked == [("ib-a", ("mlx5_0",), "ib0")]
    assert await make().look_at_fabrics() == ()


async def test_a_fabric_that_goes_down_is_told_once_and_once_when_it_is_back(make, caplog):
    network = Network()
    devices = make(IB, read_fabric=network.read)
    for down in (None, "port 1 of mlx5_0 is DOWN", "port 1 of mlx5_0 is DOWN", None, None):
        network.found = replace(UP, down=down)
        assert (await devices.look_at_fabrics())[0].down == down
    assert caplog.messages == [
        "fabric ib-a is out of service on this node: port 1 of mlx5_0 is DOWN",
        "fabric ib-a is in service again",
    ]


async def test_a_fabric_that_can_not_be_looked_at_is_down(make):
    devices = make(IB, read_fabric=Network(PermissionError(13, "Permission denied")).read)
    (found,) = await devices.look_at_fabrics()
    assert (found.interface, found.hcas, found.address) == ("ib0", ("mlx5_0",), None)
    assert found.down == "it can't be looked at: Permission denied"


async def test_adapters_that_hang_take_their_fabric_out_of_service(make):
    network = Network()
    network.free.clear()
    devices = make(IB, read_fabric=network.read, patience_seconds=0.05, slow_seconds=0.05)
    try:
        with trio.fail_after(60):
            while (found := (await devices.look_at_fabrics())[0]).down is None:
                pass
            assert (found.name, found.hcas, found.down) == ("ib-a", ("mlx5_0",), FABRIC_SILENT)
    finally:
        network.free.set()


async def test_a_fake_inventory_stands_in_for_the_fabrics_that_it_names_and_adds_others(make, fake):
    fake.path.write_text(
        "fabrics: {ib-a: {interface: lo, address: 127.0.0.1}, ib-c: {down: no cable}, ib-d: {hcas: [x]}}"
    )
    network = Network(replace(UP, name="ib-b"))
    devices = make(IB | {"ib-b": FabricConfig(interface="ib1")}, file=fake, read_fabric=network.read)
    assert await devices.look_at_fabrics() == (
        FabricFound(name="ib-a", interface="lo", address="127.0.0.1", hcas=("mlx5_0",)),
        replace(UP, name="ib-b"),
        FabricFound(name="ib-c", down="no cable"),
        FabricFound(name="ib-d", hcas=("x",)),
    )
    assert [name for name, _, _ in network.asked] == ["ib-b"]


async def test_no_more_fabrics_are_told_than_a_report_may_hold(make, fake):
    fake.path.write_text(f"fabrics: {{{', '.join(f'f{number}: {{}}' for number in range(16))}}}")
    found = await make(IB, file=fake, read_fabric=Network().read).look_at_fabrics()
    assert [each.name for each in found] == ["ib-a", *(f"f{number}" for number in range(15))]
