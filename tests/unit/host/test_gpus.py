"""What is told of the GPUs, over ways to ask that say what a test has them say."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from llmgw.core.node import ForeignUse
from llmgw.host.cards import Card, Holder, LostCard, Survey
from llmgw.host.gpus import NO_ANSWER, GpuReader, GpusFound, Machine, open_gpus

GB = 10**9


class Told:
    """One way to ask; ``says`` is the next answer."""

    def __init__(self, says: Survey | None = None) -> None:
        self.says = says

    def survey(self) -> Survey | None:
        return self.says


def a_card(number: int, **facts: object) -> Card:
    card = {
        "uuid": f"GPU-{number}",
        "index": number,
        "name": "NVIDIA H100 80GB HBM3",
        "pci": f"0000:{number:02x}:00.0",
        "memory_bytes": 81559 * 2**20,
        "used_bytes": 0,
        "reserve_apart": True,
        "holders": (),
    }
    return Card(**(card | facts))


def a_reader(*sources, classes=None, driven=None, memory_bytes=0, clock=lambda: 0.0):
    machine = Machine(list_driven=lambda: driven or {}, count_memory_bytes=lambda: memory_bytes)
    return GpuReader(sources, classes=classes or {}, machine=machine, clock=clock)


def broken(found: GpusFound) -> dict[str, str | None]:
    return {gpu.uuid: gpu.broken for gpu in found.gpus}


def test_what_processes_hold_of_a_card_is_told_by_pid():
    cards = (
        a_card(
            1, used_bytes=70 * GB, holders=(Holder(pid=5, memory_bytes=40 * GB), Holder(pid=6, memory_bytes=20 * GB))
        ),
        a_card(
            2, used_bytes=50 * GB, holders=(Holder(pid=5, memory_bytes=45 * GB), Holder(pid=7, memory_bytes=1 * GB))
        ),
    )
    found = a_reader(Told(Survey(cards=cards))).read({5, 6})
    assert found.held_gb == {"GPU-1": {5: 40.0, 6: 20.0}, "GPU-2": {5: 45.0, 7: 1.0}}
    assert found.find_most_held_gb({5, 6}) == 60.0
    assert found.find_most_held_gb({5}) == 45.0
    assert found.find_most_held_gb({9}) is None


@pytest.mark.parametrize(
    ("sizes", "used_gb", "held"),
    [
        ((None, 10), 50, {1: 40.0, 2: 10.0}),
        ((None, 10), 5, {1: 0.0, 2: 10.0}),
        ((None, None), 50, {}),
        ((None,), None, {}),
    ],
)
def test_one_whose_size_the_driver_does_not_tell_has_what_is_left(sizes, used_gb, held):
    holders = (Holder(pid=pid, memory_bytes=size and size * GB) for pid, size in enumerate(sizes, start=1))
    card = a_card(1, used_bytes=used_gb and used_gb * GB, holders=tuple(holders))
    assert a_reader(Told(Survey(cards=(card,)))).read({1}).held_gb == {"GPU-1": held}


def test_a_card_is_told_as_the_server_wants_it():
    card = a_card(
        1,
        used_bytes=40 * GB,
        temperature_c=41.0,
        utilization_percent=7.0,
        ecc_errors=2,
        nvlink_peers=("GPU-2",),
        holders=(Holder(pid=2**22 + 7, memory_bytes=30 * GB), Holder(pid=os.getpid(), memory_bytes=10 * GB)),
    )
    found = a_reader(Told(Survey(cards=(card,), driver="550.54.15"))).read({os.getpid()})
    (gpu,) = found.gpus
    assert (found.driver, found.problem) == ("550.54.15", None)
    assert (gpu.uuid, gpu.index, gpu.pci, gpu.gpu_class) == ("GPU-1", 1, "0000:01:00.0", "h100-80g")
    assert (gpu.memory_gb, gpu.memory_used_gb) == (85.521, 40.0)
    assert (gpu.temperature_c, gpu.utilization_percent, gpu.ecc_errors) == (41.0, 7.0, 2)
    assert (gpu.nvlink_peers, gpu.mig, gpu.broken) == (("GPU-2",), None, None)
    assert gpu.foreign == (ForeignUse(memory_gb=30.0, pid=2**22 + 7),)


def test_a_machine_without_any_way_to_ask_has_no_gpus_and_no_problem():
    assert a_reader(Told(), Told()).read() == GpusFound()


def test_the_second_way_is_gone_where_the_first_shows_only_trouble():
    trouble = Told(Survey(problem="the driver was updated"))
    assert broken(a_reader(trouble, Told(Survey(cards=(a_card(0),)))).read()) == {"GPU-0": None}
    assert a_reader(trouble, Told(Survey(problem="it hangs"))).read().problem == "the driver was updated"
    assert a_reader(trouble, Told()).read().problem == "the driver was updated"


def test_indices_count_in_the_order_of_the_bus_whatever_the_driver_counts():
    """gpustack#5784, #6032, #1633: index of the driver, of CUDA and of a page disagree after a reboot."""
    cards = (a_card(0, pci="0000:86:00.0"), a_card(1, pci="0000:3b:00.0"), a_card(2, pci=None))
    found = a_reader(Told(Survey(cards=cards))).read()
    assert [(gpu.uuid, gpu.index) for gpu in found.gpus] == [("GPU-1", 0), ("GPU-0", 1), ("GPU-2", 2)]


def test_a_lost_card_leaves_its_index_free():
    survey = Survey(cards=(a_card(0), a_card(2)), lost=(LostCard(reason="gone", index=1),))
    found = a_reader(Told(survey)).read()
    assert [(gpu.uuid, gpu.index) for gpu in found.gpus] == [("GPU-0", 0), ("GPU-2", 2)]
    assert found.problem == "GPU 1: gone"


@pytest.mark.parametrize(
    "lost",
    [
        LostCard(reason="gone", index=1),
        LostCard(reason="gone", pci="0000:01:00.0"),
        LostCard(reason="gone", uuid="GPU-1"),
    ],
)
def test_a_card_that_was_known_and_is_lost_is_broken_and_stays(lost):
    told = Told(Survey(cards=(a_card(0), a_card(1, temperature_c=90.0))))
    reader = a_reader(told)
    before = reader.read()
    told.says = Survey(cards=(a_card(0),), lost=(lost,))
    for _ in range(2):
        found = reader.read()
        assert (broken(found), found.problem) == ({"GPU-0": None, "GPU-1": "gone"}, None)
        assert (found.gpus[1].memory_gb, found.gpus[1].temperature_c) == (85.521, None)
    told.says = Survey(cards=(a_card(0), a_card(1, temperature_c=90.0)))
    assert reader.read() == before


def test_a_card_that_was_taken_out_is_no_longer_told():
    told = Told(Survey(cards=(a_card(0), a_card(1))))
    reader = a_reader(told)
    reader.read()
    told.says = Survey(cards=(a_card(0),))
    assert broken(reader.read()) == {"GPU-0": None}


def test_what_a_broken_card_was_is_remembered():
    told = Told(Survey(cards=(a_card(0),)))
    reader = a_reader(told)
    reader.read()
    told.says = Survey(cards=(a_card(0, memory_bytes=None, used_bytes=None, broken="it needs a reset"),))
    (gpu,) = reader.read().gpus
    assert (gpu.gpu_class, gpu.memory_gb, gpu.broken) == ("h100-80g", 85.521, "it needs a reset")


def test_a_card_that_was_broken_from_the_first_has_the_kind_and_no_memory():
    card = a_card(0, memory_bytes=None, used_bytes=None, holders=None, broken="it needs a reset")
    (gpu,) = a_reader(Told(Survey(cards=(card,))), memory_bytes=64 * GB).read().gpus
    assert (gpu.gpu_class, gpu.memory_gb, gpu.broken) == ("h100", 0.0, "it needs a reset")


def test_when_the_driver_goes_its_cards_are_broken_and_not_gone():
    told = Told(Survey(cards=(a_card(0), a_card(1)), driver="550"))
    reader = a_reader(told)
    reader.read()
    told.says = Survey(problem="not running")
    found = reader.read()
    assert (broken(found), found.problem) == ({"GPU-0": "not running", "GPU-1": "not running"}, "not running")
    assert found.driver == "550"


DRIVEN = {
    "0000:01:00.0": LostCard(reason="the log says why", pci="0000:01:00.0", uuid="GPU-1", name="NVIDIA L40S"),
    "0000:02:00.0": LostCard(reason="the log says why", pci="0000:02:00.0", name="NVIDIA L40S"),
}


def test_a_card_that_the_kernel_has_and_the_driver_does_not_list_is_told():
    """gpustack#3581: all was well, and cards were missing."""
    found = a_reader(Told(Survey(cards=(a_card(0),))), driven=DRIVEN).read()
    assert broken(found) == {"GPU-0": None, "GPU-1": "the log says why"}
    assert (found.gpus[1].gpu_class, found.gpus[1].memory_gb) == ("l40s", 0.0)
    assert found.problem == "the GPU at 0000:02:00.0: the log says why"


def test_a_lost_card_that_only_has_a_number_is_found_by_the_kernel():
    survey = Survey(cards=(a_card(0), a_card(2)), lost=(LostCard(reason="gone", index=1),))
    found = a_reader(Told(survey), driven={"0000:01:00.0": DRIVEN["0000:01:00.0"]}).read()
    assert broken(found) == {"GPU-0": None, "GPU-1": "gone", "GPU-2": None}
    assert found.problem is None


def test_a_lost_card_that_only_has_an_address_is_found_by_the_kernel():
    survey = Survey(cards=(a_card(0),), lost=(LostCard(reason="gone", pci="0000:01:00.0"),))
    found = a_reader(Told(survey), driven={"0000:01:00.0": DRIVEN["0000:01:00.0"]}).read()
    assert broken(found) == {"GPU-0": None, "GPU-1": "gone"}


def test_a_lost_card_is_not_told_twice():
    survey = Survey(cards=(a_card(0),), lost=(LostCard(reason="gone", index=1),))
    found = a_reader(Told(survey), driven=DRIVEN).read()
    assert (broken(found), found.problem) == ({"GPU-0": None}, "GPU 1: gone")


def test_where_a_card_has_no_address_the_kernels_are_not_compared():
    survey = Survey(cards=(a_card(0, pci=None),), lost=(LostCard(reason="gone"),))
    found = a_reader(Told(survey), driven=DRIVEN).read()
    assert (broken(found), found.problem) == ({"GPU-0": None}, "a GPU: gone")


def test_a_class_of_the_operator_goes_before_the_rule():
    told = Told(Survey(cards=(a_card(0), a_card(1), a_card(2, name="NVIDIA L40S"))))
    reader = a_reader(told, classes={"nvidia h100 80gb hbm3 ": "big", "gpu-1": "mine"})
    assert [gpu.gpu_class for gpu in reader.read().gpus] == ["big", "mine", "l40s-80g"]


def test_a_card_without_memory_of_its_own_has_the_machines():
    holders = (Holder(pid=os.getpid(), memory_bytes=20 * GB), Holder(pid=2**22 + 7, memory_bytes=5 * GB))
    card = a_card(0, name="NVIDIA GB10", memory_bytes=None, used_bytes=None, holders=holders)
    (gpu,) = a_reader(Told(Survey(cards=(card,))), memory_bytes=128.5 * GB).read({os.getpid()}).gpus
    assert (gpu.gpu_class, gpu.memory_gb, gpu.memory_used_gb) == ("gb10-128g", 128.5, 25.0)
    assert gpu.foreign == (ForeignUse(memory_gb=5.0, pid=2**22 + 7),)


class Hanging(Told):
    """Answers when it is let go."""

    def __init__(self, says: Survey) -> None:
        super().__init__(says)
        self.asked = threading.Event()
        self.let_go = threading.Event()
        self.let_go.set()

    def survey(self) -> Survey | None:
        self.asked.set()
        assert self.let_go.wait(100)
        return super().survey()


def test_while_a_driver_hangs_others_are_told_what_is_known():
    now = [0.0]
    source = Hanging(Survey(cards=(a_card(0),), driver="550"))
    reader = a_reader(source, clock=lambda: now[0])
    before = reader.read()
    source.asked.clear()
    source.let_go.clear()
    first = threading.Thread(target=reader.read)
    first.start()
    assert source.asked.wait(100)
    # A moment is nothing.
    assert reader.read() == before == reader.recall()
    now[0] = 42.0
    found = reader.read()
    assert found.problem == NO_ANSWER
    assert (broken(found), found.driver) == ({"GPU-0": found.problem}, "550")
    source.let_go.set()
    first.join()
    assert reader.recall() == before


@pytest.mark.slow
def test_nothing_is_loaded_or_started_where_there_is_no_driver(tmp_path):
    code = """
import sys
from llmgw.host.gpus import GpusFound, open_gpus
reader = open_gpus()
assert reader.read() == GpusFound()
assert "pynvml" not in sys.modules
"""
    environ = {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        (sys.executable, "-W", "error", "-c", code),
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("this machine has a driver")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_program_that_the_operator_named_and_is_not_there_is_told_where_there_is_no_library(tmp_path):
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("this machine has a driver")
    assert open_gpus(str(tmp_path / "none")).read().problem == f"{tmp_path}/none can't be used: it is not there"
