"""Processors and memory, from folders that look like /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os

import pytest

from llmgw.host.cpu import count_cores, read_cpu_flags, read_memory, warn_of_cpu

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total: 0\n"


@pytest.fixture
def proc(tmp_path):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    return proc


@pytest.fixture
def cgroup(tmp_path):
    (tmp_path / "cgroup" / "outer" / "inner").mkdir(parents=True)
    return tmp_path / "cgroup"


def test_the_cores_are_those_of_the_affinity(proc, cgroup):
    assert count_cores(proc, cgroup) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("text", "cores"), [("50000 100000", 1), ("max 100000", None), ("", None), ("100 0", None)])
def test_a_share_of_processor_time_limits_the_cores(proc, cgroup, text, cores):
    (cgroup / "outer" / "cpu.max").write_text(text)
    assert count_cores(proc, cgroup) == (cores or len(os.sched_getaffinity(0)))


def test_the_share_of_the_old_interface_counts_too(proc, cgroup):
    (proc / "self" / "cgroup").write_text("4:cpu,cpuacct:/box\n0::/\n")
    (cgroup / "cpu" / "box").mkdir(parents=True)
    (cgroup / "cpu" / "box" / "cpu.cfs_quota_us").write_text("90000\n")
    (cgroup / "cpu" / "box" / "cpu.cfs_period_us").write_text("100000\n")
    assert count_cores(proc, cgroup) == 1


def test_memory_is_the_machines_without_a_limit(proc, cgroup):
    (cgroup / "outer" / "memory.max").write_text("max\n")
    memory = read_memory(proc, cgroup)
    assert (memory.total_gb, memory.available_gb) == (16.384, 8.192)


def test_the_tightest_limit_of_all_groups_counts(proc, cgroup):
    (cgroup / "outer" / "memory.max").write_text("4000000000")
    (cgroup / "outer" / "memory.current").write_text("3000000000")
    (cgroup / "outer" / "memory.stat").write_text("anon 1\ninactive_file 300000000\nactive_file 200000000\n")
    (cgroup / "outer" / "inner" / "memory.max").write_text("6000000000")
    memory = read_memory(proc, cgroup)
    assert (memory.total_gb, memory.available_gb) == (4.0, 1.5)


def test_the_old_interface_without_a_limit_says_a_huge_number(proc, cgroup):
    (proc / "self" / "cgroup").write_text("7:memory:/box\n")
    (cgroup / "memory" / "box").mkdir(parents=True)
    (cgroup / "memory" / "box" / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert read_memory(proc, cgroup).total_gb == 16.384


def test_a_container_that_can_not_see_its_path_reads_the_root(proc, cgroup):
    (proc / "self" / "cgroup").write_text("7:memory:/docker/0123\n")
    (cgroup / "memory").mkdir()
    (cgroup / "memory" / "memory.limit_in_bytes").write_text("2000000000")
    assert read_memory(proc, cgroup).total_gb == 2.0


def test_a_machine_that_tells_nothing_has_nothing(tmp_path):
    memory = read_memory(tmp_path / "none", tmp_path / "none")
    assert (memory.total_gb, memory.available_gb) == (0, 0)
    assert read_cpu_flags(tmp_path / "none") == frozenset()


@pytest.mark.parametrize("name", ["flags", "Features"])
def test_the_flags_are_read_of_either_architecture(proc, name):
    (proc / "cpuinfo").write_text(f"processor\t: 0\n{name}\t\t: fpu avx2 asimd\n\nprocessor\t: 1\n{name}: other\n")
    assert read_cpu_flags(proc) == {"fpu", "avx2", "asimd"}


def test_a_processor_without_avx2_is_warned_of():
    warning = warn_of_cpu(frozenset({"avx"}), "x86_64") or ""
    assert warning.startswith("this processor has no AVX2: ")
    assert warning.endswith("a virtual machine has it when its CPU type is set to host")
    assert warn_of_cpu(frozenset({"avx2"}), "x86_64") is None
    assert warn_of_cpu(frozenset({"asimd"}), "aarch64") is None
    assert warn_of_cpu(frozenset(), "x86_64") is None


def test_this_machine_has_cores_and_memory():
    memory = read_memory()
    assert count_cores() >= 1
    assert 0 < memory.available_gb <= memory.total_gb
