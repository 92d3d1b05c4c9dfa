"""Whose the memory of a card is, with processes that really run, and names in folders like the kernel's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.host.cards import Card, Holder
from llmgw.host.foreign import find_foreign, is_ours, name_process
from llmgw.host.process import read_stat

GB = 10**9
# No process has such a number.
NOBODY = 2**22 + 7


def a_card(*holders: Holder, used_gb: float = 0.0, told: bool = True, apart: bool = True) -> Card:
    return Card(
        uuid="GPU-a",
        index=0,
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=80 * GB,
        used_bytes=int(used_gb * GB),
        reserve_apart=apart,
        holders=holders if told else None,
    )


def put_process(proc: Path, pid: int, comm: str, *arguments: str) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "comm").write_text(f"{comm}\n")
    (proc / str(pid) / "cmdline").write_bytes("".join(f"{argument}\0" for argument in arguments).encode())


def told(card, ours=(), proc=Path("/nowhere")):
    return [(use.memory_gb, use.pid, use.name) for use in find_foreign(card, ours, proc)]


def test_another_program_that_fills_the_card_is_named(tmp_path):
    """gpustack#2852: a launch that ends for want of memory, on a card that someone else filled."""
    put_process(tmp_path, NOBODY, "python3", "/usr/bin/python3", "train.py", "--token=secret")
    card = a_card(Holder(pid=NOBODY, memory_bytes=72 * GB), used_gb=72)
    assert told(card, proc=tmp_path) == [(72.0, NOBODY, "python3 train.py")]


def test_a_process_that_can_not_be_seen_has_the_drivers_name_or_none():
    card = a_card(
        Holder(pid=NOBODY, memory_bytes=2 * GB), Holder(pid=NOBODY + 1, memory_bytes=GB, name="/opt/run"), used_gb=3
    )
    assert told(card) == [(2.0, NOBODY, None), (1.0, NOBODY + 1, "run")]


def test_our_engines_are_not_foreign():
    card = a_card(Holder(pid=os.getpid(), memory_bytes=70 * GB), used_gb=70)
    assert told(card, ours={os.getpid()}) == []


@pytest.mark.parametrize(
    ("used_gb", "apart", "rest"), [(0.1, True, []), (0.5, True, [0.5]), (0.5, False, []), (0.7, False, [0.7])]
)
def test_what_nobody_holds_is_foreign_beyond_what_a_driver_needs(used_gb, apart, rest):
    assert told(a_card(used_gb=used_gb, apart=apart)) == [(size, None, None) for size in rest]


def test_what_an_ended_process_has_not_given_back_is_foreign_without_a_name():
    assert told(a_card(Holder(pid=os.getpid(), memory_bytes=10 * GB), used_gb=40), ours={os.getpid()}) == [
        (30.0, None, None)
    ]


def test_a_driver_that_lists_nobody_says_not_whose_it_is():
    assert told(a_card(used_gb=40, told=False), ours={os.getpid()}) == [(40.0, None, None)]


def test_more_than_the_card_has_in_use_is_nothing_foreign():
    assert told(a_card(Holder(pid=os.getpid(), memory_bytes=10 * GB), used_gb=9), ours={os.getpid()}) == []


def test_of_one_stranger_of_unknown_size_the_rest_is_its():
    card = a_card(Holder(pid=os.getpid(), memory_bytes=10 * GB), Holder(pid=NOBODY, memory_bytes=None), used_gb=30)
    assert told(card, ours={os.getpid()}) == [(20.0, NOBODY, None)]


def test_of_two_strangers_of_unknown_size_nobody_is_blamed():
    card = a_card(Holder(pid=NOBODY, memory_bytes=None), Holder(pid=NOBODY + 1, memory_bytes=None), used_gb=30)
    assert told(card) == [(30.0, None, None)]


def test_where_our_engine_is_of_unknown_size_the_rest_is_ours():
    card = a_card(Holder(pid=os.getpid(), memory_bytes=None), Holder(pid=NOBODY, memory_bytes=GB), used_gb=30)
    assert told(card, ours={os.getpid()}) == [(1.0, NOBODY, None)]


def test_a_card_of_which_nothing_is_known_has_nothing_foreign():
    assert find_foreign(Card(uuid="GPU-a", index=0, name="x"), ()) == ()


@pytest.fixture
def child():
    """A process in a session of its own, and one that it started in another."""
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], start_new_session=True, stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "input()"
    )
    with subprocess.Popen(
        (sys.executable, "-c", code), start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as leader:
        yield leader.pid, int(leader.stdout.readline())
        leader.stdin.close()


def test_what_an_engine_started_is_ours_whatever_session_it_is_in(child):
    leader, descendant = child
    assert is_ours(leader, {leader})
    assert is_ours(descendant, {leader})
    assert is_ours(descendant, {read_stat(descendant).session})
    assert not is_ours(leader, {descendant})


def test_what_a_dead_leader_left_in_its_session_is_ours():
    stat = read_stat(os.getpid())
    assert is_ours(os.getpid(), {stat.session} - {os.getpid()} or {stat.group})


@pytest.mark.parametrize("pid", [0, 1, NOBODY])
def test_the_first_process_and_none_are_not_ours(pid):
    assert not is_ours(pid, {2**22 + 1})


@pytest.mark.parametrize(
    ("comm", "arguments", "name"),
    [
        ("vllm", ("VLLM::EngineCore",), "VLLM::EngineCore"),
        ("python3", ("/usr/bin/python3.12", "-u", "/srv/a/train.py", "--key", "k"), "python3.12 train.py"),
        ("python3", ("python3", "-m", "vllm.entrypoints.api", "--api-key", "k"), "python3 -m vllm.entrypoints.api"),
        ("python3", ("python3", "-c", "print('secret')"), "python3"),
        ("python3", ("python3", "-X", "dev", "run.py"), "python3"),
        ("python3", ("python3", "-m"), "python3 -m"),
        ("python3", ("python3",), "python3"),
        ("java", ("java", "-jar", "/opt/app.jar", "secret"), "java -jar app.jar"),
        ("bash", ("/bin/bash", "./start.sh", "secret"), "bash start.sh"),
        ("llama-server", ("/opt/llama/llama-server", "--api-key", "secret"), "llama-server"),
        ("chrome", ("/opt/google/chrome --type=gpu --token=secret",), "chrome"),
        ("Xorg", (), "Xorg"),
        ("kworker", ("",), "kworker"),
        ("a", ("\x1b[2J",), "\\x1b[2J"),
        ("a", ("x" * 500,), "x" * 80),
    ],
)
def test_a_process_is_called_by_its_program_and_nothing_secret(tmp_path, comm, arguments, name):
    put_process(tmp_path, 1, comm, *arguments)
    assert name_process(1, tmp_path) == name


def test_a_process_that_is_gone_has_no_name(tmp_path):
    assert name_process(1, tmp_path) is None
