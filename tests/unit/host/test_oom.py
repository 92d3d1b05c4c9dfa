"""The kernel's count of what it killed for memory."""

from __future__ import annotations

import pytest

from llmgw.host.oom import count_oom_kills

EVENTS = "low 0\nhigh 12\nmax 3\noom 2\noom_kill {}\noom_group_kill 9\n"


@pytest.fixture
def machine(tmp_path):
    """A machine whose groups count so, and where we are in this one."""

    def machine(path, **counts):
        proc, groups = tmp_path / "proc", tmp_path / "groups"
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(f"4:memory:/elsewhere\n{path}\n")
        groups.mkdir()
        for name, count in counts.items():
            folder = groups if name == "root" else groups / name
            folder.mkdir(exist_ok=True)
            (folder / "memory.events").write_text(EVENTS.format(count))
        return count_oom_kills(proc, groups)

    return machine


def test_the_kills_of_our_own_group_are_counted(machine):
    assert machine("0::/agent", root=7, agent=3) == 3


def test_in_a_container_the_root_is_our_group(machine):
    assert machine("0::/", root=7) == 7


def test_a_group_that_lies_outside_of_what_is_mounted_is_the_root_here(machine):
    assert machine("0::/../../agent", root=7) == 7


@pytest.mark.parametrize("path", ["0::/agent", "3:cpu:/only/version/one", ""])
def test_where_nobody_counts_there_is_no_number(machine, path):
    assert machine(path) is None


def test_a_group_without_that_counter_has_no_number(tmp_path):
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\n")
    assert count_oom_kills(tmp_path / "no-proc", tmp_path) is None
