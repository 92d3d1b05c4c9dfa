"""A machine's own GPUs, by both ways to ask: run by name, where there is a driver."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from llmgw.host.gpus import GpuReader, open_gpus
from llmgw.host.nvidia_smi import NvidiaSmi

QUERY = "--query-gpu=uuid,index,pci.bus_id,memory.total,driver_version"


@pytest.fixture(scope="module")
def listed() -> list[list[str]]:
    """What nvidia-smi itself says: UUID, index, address, MiB, driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        pytest.skip("there is no nvidia-smi")
    asked = (program, QUERY, "--format=csv,noheader,nounits")
    said = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    rows = [row.split(", ") for row in said.stdout.splitlines() if row.startswith("GPU-")]
    if not rows:
        pytest.skip("nvidia-smi lists no GPU")
    return rows


@pytest.fixture(params=["the library", "the program"])
def found(request, listed):
    """What is told of this machine when it is asked this way."""
    reader = open_gpus() if request.param == "the library" else GpuReader((NvidiaSmi(),), classes={})
    return reader.read()


def test_every_card_is_told_as_nvidia_smi_tells_it(found, listed):
    assert found.problem is None
    told = [(gpu.uuid, gpu.index, gpu.pci, round(gpu.memory_gb * 1e9 / 2**20)) for gpu in found.gpus]
    expected = sorted(
        (uuid, int(index), address.lower().removeprefix("0000"), int(mib)) for uuid, index, address, mib, _ in listed
    )
    assert sorted(told) == expected
    assert found.driver == listed[0][4]


def test_what_is_told_makes_sense(found):
    for gpu in found.gpus:
        assert gpu.broken is None
        assert gpu.gpu_class.rpartition("-")[2].removesuffix("g").isdigit()
        assert 0 <= gpu.memory_used_gb <= gpu.memory_gb
        assert gpu.temperature_c is None or 0 < gpu.temperature_c < 120
        assert gpu.utilization_percent is None or 0 <= gpu.utilization_percent <= 100
        assert sum(use.memory_gb for use in gpu.foreign) <= gpu.memory_gb
        assert gpu.nvlink_peers is None or set(gpu.nvlink_peers) < {other.uuid for other in found.gpus}


def test_nvlink_joins_both_ways(listed):
    peers = {gpu.uuid: gpu.nvlink_peers for gpu in open_gpus().read().gpus}
    for uuid, others in peers.items():
        for other in others or ():
            assert uuid in (peers[other] or ())
