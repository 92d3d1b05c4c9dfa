"""nvidia-smi, by a program that says what a real one says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from llmgw.host.cards import Holder
from llmgw.host.nvidia_smi import NvidiaSmi
from llmgw.host.nvml import FELL_OFF, NOT_RUNNING, UPDATED

FAKE = Path(__file__).parents[2] / "fakes" / "fake_smi.py"

A100 = {
    "index": 0,
    "uuid": "GPU-a",
    "pci.bus_id": "00000000:3B:00.0",
    "name": "NVIDIA A100-SXM4-40GB",
    "memory.total": 40960,
    "memory.used": 10000,
    "memory.reserved": 500,
    "driver_version": "550.54.15",
    "temperature.gpu": 41,
    "utilization.gpu": 7,
    "ecc.errors.uncorrected.volatile.total": 0,
    "mig.mode.current": "Disabled",
}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
    path.chmod(0o755)
    return path


@pytest.fixture
def look(program):
    """Look once at what a program says."""

    def look(limit_seconds=100.0, present=1, **told):
        program.with_name("smi.json").write_text(json.dumps(told))
        return NvidiaSmi(str(program), limit_seconds=limit_seconds, count_present=lambda: present).survey()

    return look


def calls(program):
    return [line.split(maxsplit=1)[1] for line in program.with_name("calls").read_text().splitlines()]


def test_each_card_is_told_by_its_uuid(look):
    found = look(cards=[A100])
    (card,) = found.cards
    assert (found.driver, found.problem, found.lost) == ("550.54.15", None, ())
    assert (card.uuid, card.index, card.pci, card.name) == ("GPU-a", 0, "0000:3b:00.0", "NVIDIA A100-SXM4-40GB")
    assert (card.memory_bytes, card.used_bytes, card.reserve_apart) == (40960 * 2**20, 10000 * 2**20, True)
    assert (card.temperature_c, card.utilization_percent, card.ecc_errors) == (41, 7, 0)
    assert (card.mig, card.holders, card.broken) == (None, (), None)
    # It could only be had from a picture of the machine.
    assert card.nvlink_peers is None


@pytest.mark.parametrize("untold", ["[N/A]", "N/A", "[Not Supported]", "ERR!", "[Unknown Error]", "", "-"])
def test_what_is_not_told_is_unknown(look, untold):
    fields = ("temperature.gpu", "utilization.gpu", "ecc.errors.uncorrected.volatile.total", "memory.reserved")
    (card,) = look(cards=[A100 | dict.fromkeys(fields, untold)]).cards
    assert (card.temperature_c, card.utilization_percent, card.ecc_errors) == (None, None, None)
    assert (card.reserve_apart, card.broken) == (False, None)


def test_a_release_that_does_not_know_a_field_is_asked_without_it_from_then_on(program):
    program.with_name("smi.json").write_text(
        json.dumps({"cards": [A100], "unknown": ["memory.reserved", "mig.mode.current"]})
    )
    smi = NvidiaSmi(str(program))
    for _ in range(2):
        (card,) = smi.survey().cards
        assert (card.temperature_c, card.reserve_apart) == (41, False)
    asked = [call for call in calls(program) if "--query-gpu" in call]
    assert ["mig.mode.current" in call for call in asked] == [True, True, False, False]


def test_a_release_that_does_not_know_what_is_needed_is_a_problem(look, program):
    found = look(cards=[], unknown=["uuid"])
    assert found.problem == f'{program} says: Field "uuid" is not a valid field to query.'


def test_processes_are_told_by_card_with_names_that_hold_commas(look):
    apps = [
        ["GPU-a", "4711", "/usr/bin/python3", "300"],
        ["GPU-b", "4712", "run, and run", "[N/A]"],
        ["GPU-b", "4713", "[Not Found]", "5"],
        ["GPU-b", "[N/A]", "python", "5"],
    ]
    first, second = look(cards=[A100, A100 | {"uuid": "GPU-b", "index": 1}], apps=apps).cards
    assert first.holders == (Holder(pid=4711, memory_bytes=300 * 2**20, name="/usr/bin/python3"),)
    assert second.holders == (
        Holder(pid=4712, memory_bytes=None, name="run, and run"),
        Holder(pid=4713, memory_bytes=5 * 2**20),
    )


def test_the_parts_of_a_cut_card_are_told(look):
    listed = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-a)
  MIG 1g.5gb      Device  0: (UUID: MIG-a)
  MIG 3g.20gb     Device  1: (UUID: MIG-b)
  MIG odd         Device  2: (UUID: MIG-c)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-b)"""
    cards = [A100 | {"mig.mode.current": "Enabled"}, A100 | {"uuid": "GPU-b", "mig.mode.current": "Enabled"}, A100]
    first, second, _ = look(cards=cards, list=listed).cards
    assert [(part.uuid, part.shape, part.memory_gb) for part in first.mig] == [
        ("MIG-a", "1g.5gb", 5.0),
        ("MIG-b", "3g.20gb", 20.0),
        ("MIG-c", "odd", 0.0),
    ]
    assert second.mig == ()


@pytest.mark.parametrize(
    ("line", "index", "pci", "reason"),
    [
        ("GPU3: 0000:5F:00.0: Unknown Error", 3, "0000:5f:00.0", "the driver can't open it: Unknown Error"),
        ("GPU 0000:02:00.0: GPU is lost.  Reboot the system to recover this GPU", None, "0000:02:00.0", FELL_OFF),
        ("gpu 00000000:02:00.0: Not Found", None, "0000:02:00.0", "the driver can't open it: Not Found"),
        ("GPU0000:65:00.0: Unknown Error", None, "0000:65:00.0", "the driver can't open it: Unknown Error"),
        ("GPU2: Unknown Error", 2, None, "the driver can't open it: Unknown Error"),
        ("GPU0", 0, None, "the driver can't open it: it does not say why"),
    ],
)
def test_a_lost_card_does_not_hide_the_others(look, line, index, pci, reason):
    found = look(cards=[A100], stderr=f"Unable to determine the device handle for {line}\n")
    assert [card.uuid for card in found.cards] == ["GPU-a"]
    (lost,) = found.lost
    assert (lost.index, lost.pci, lost.reason) == (index, pci, reason)


def test_a_card_that_is_lost_in_mid_question_is_broken(look):
    lost = A100 | dict.fromkeys(("memory.total", "memory.used", "temperature.gpu"), "[GPU is lost]")
    (card,) = look(cards=[lost]).cards
    assert (card.uuid, card.broken) == ("GPU-a", FELL_OFF)


def test_a_card_that_needs_a_reset_is_broken(look):
    (card,) = look(cards=[A100 | {"utilization.gpu": "[GPU requires reset]"}]).cards
    assert card.broken == "GPU requires reset"


def test_a_card_whose_memory_can_not_be_read_is_broken(look):
    (card,) = look(cards=[A100 | {"memory.total": "ERR!"}]).cards
    assert card.broken == "the driver says of its memory: ERR!"


def test_a_card_without_memory_of_its_own_is_not_broken(look):
    untold = {"memory.total": "[N/A]", "memory.used": "[N/A]", "name": "[N/A]", "index": "[N/A]"}
    (card,) = look(cards=[A100 | untold]).cards
    assert (card.memory_bytes, card.used_bytes, card.broken) == (None, None, None)
    assert (card.name, card.index) == ("NVIDIA GPU", 0)


def test_a_machine_without_cards_is_no_problem(look):
    found = look(say="No devices were found", code=6)
    assert (found.cards, found.problem) == ((), None)


@pytest.mark.parametrize(("present", "problem"), [(0, None), (1, NOT_RUNNING), (None, NOT_RUNNING)])
def test_a_driver_that_does_not_run_is_a_problem_where_there_is_a_card(look, present, problem):
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that it runs."
    assert look(say=said, code=9, present=present).problem == problem


def test_a_driver_that_was_updated_is_told(look):
    assert look(say="Failed to initialize NVML: Driver/library version mismatch", code=18).problem == UPDATED


@pytest.mark.parametrize(
    ("said", "told"),
    [("what\x1b[2J ever\nmore", "says: what\\x1b[2J ever"), ("", "says nothing"), ("a,b,c", "says: a,b,c")],
)
def test_odd_words_are_a_problem_in_one_printable_line(look, program, said, told):
    assert look(say=said).problem == f"{program} {told}"


def test_a_row_that_is_no_card_is_passed_over(look):
    assert [card.uuid for card in look(cards=[A100 | {"uuid": "what"}, A100]).cards] == ["GPU-a"]


@pytest.mark.slow
def test_one_that_hangs_is_killed(look, program):
    found = look(limit_seconds=1.0, hang=True)
    assert found.problem == f"{program} did not end in 1 s: the driver may hang (`dmesg`)"
    # (on a busy machine it may not have come so far as to say so)
    calls = program.with_name("calls")
    pids = [line.split()[0] for line in calls.read_text().splitlines()] if calls.exists() else []
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.slow
def test_one_that_prints_without_an_end_fills_no_memory(look, program):
    assert look(endless=True).problem == f"{program} prints without an end: the driver may hang (`dmesg`)"


@pytest.mark.slow
def test_one_that_can_not_be_killed_is_not_started_again(program, monkeypatch):
    """A process in the kernel, which no signal ends, is played by one that nobody may signal."""
    program.with_name("smi.json").write_text(json.dumps({"hang": True}))
    kill = os.killpg
    spared = []
    monkeypatch.setattr(os, "killpg", lambda pid, signum: spared.append((pid, signum)))
    smi = NvidiaSmi(str(program), limit_seconds=0.5)
    smi.survey()
    (pid, signum) = spared[0]
    assert smi.survey().problem == f"{program} (pid {pid}) hangs in the driver: `dmesg` may say why"
    assert len(spared) == 1
    # Once it is gone there is a next one.
    kill(pid, signum)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.undo()
    assert "hangs in the driver" not in smi.survey().problem


def test_a_program_that_is_not_there_is_told_where_it_was_named(tmp_path):
    assert NvidiaSmi(str(tmp_path / "none")).survey().problem == f"{tmp_path}/none can't be used: it is not there"


def test_a_program_that_does_not_start_is_told(tmp_path):
    path = tmp_path / "nvidia-smi"
    path.write_text("no program")
    path.chmod(0o755)
    assert NvidiaSmi(str(path)).survey().problem == (
        f"{path} can't be started: it is neither a binary nor a script whose first line begins with #!"
    )


def test_without_one_on_the_path_there_is_nothing_to_ask(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert NvidiaSmi().survey() is None


def test_it_is_found_on_the_path_and_told_no_secrets(program, monkeypatch):
    program.with_name("smi.json").write_text(json.dumps({"say": "", "code": 0}))
    program.write_text('#!/bin/sh\necho "$LLMGW_API_KEYS."\n')
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("LLMGW_API_KEYS", "sk-secret")
    assert NvidiaSmi().survey().problem == f"{program} says: ."


def test_when_processes_are_not_told_nobody_is_said_to_hold_nothing(program):
    """It may be gone, or hang, between two questions."""
    program.write_text(f"#!/bin/sh\nrm $0\necho '{', '.join(map(str, in_order(A100)))}'\n")
    (card,) = NvidiaSmi(str(program)).survey().cards
    assert (card.used_bytes, card.holders) == (10000 * 2**20, None)


def in_order(card):
    asked = ("index", "uuid", "pci.bus_id", "name", "memory.total", "memory.used", "driver_version", "temperature.gpu")
    more = ("utilization.gpu", "ecc.errors.uncorrected.volatile.total", "memory.reserved", "mig.mode.current")
    return [card[field] for field in (*asked, *more)]
