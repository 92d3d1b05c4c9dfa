"""GPUs and fabrics that were booked: found by their names, refused with a reason, seen given back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from llmgw.agent.booked import (
    GIVEN_BACK_SECONDS,
    GpuInUse,
    RendezvousTaken,
    check_rendezvous,
    find_fabric,
    find_gpus,
    wait_given_back,
)
from llmgw.core.node import FabricFound, ForeignUse, Gpu, MigInstance
from llmgw.engines.types import Fabric
from llmgw.errors import EngineFailed
from llmgw.host.gpus import GpusFound

NOTEBOOK = ForeignUse(memory_gb=72.0, pid=4711, name="jupyter")
NAMELESS = ForeignUse(memory_gb=72.0)


def card(index, uuid, **changes):
    gpu = Gpu(uuid=uuid, index=index, gpu_class="h100-80g", name="H100", memory_gb=80.0, memory_used_gb=0.0)
    return replace(gpu, **changes)


A, B = card(0, "GPU-a"), card(1, "GPU-b")


@pytest.fixture
def with_gpus(with_hands):
    """Tools that see these GPUs at the first look, those at the second, and so on; the last for ever."""

    def with_gpus(*looks):
        left = [*looks]

        async def look_at_gpus(tools):
            found = left.pop(0) if len(left) > 1 else left[0]
            return GpusFound(gpus=found)

        return with_hands(look_at_gpus=look_at_gpus)

    return with_gpus


@pytest.fixture
def with_fabrics(with_hands):
    def with_fabrics(*found):
        async def look_at_fabrics(tools):
            return found

        return with_hands(look_at_fabrics=look_at_fabrics)

    return with_fabrics


@pytest.fixture
def spec(make_spec):
    return replace(make_spec(), gpus=("GPU-b",))


async def test_gpus_are_found_by_uuid_and_in_the_order_of_the_ranks(spec, with_gpus):
    found = await find_gpus(replace(spec, gpus=("GPU-b", "GPU-a")), with_gpus((A, B)))
    assert [gpu.index for gpu in found] == [1, 0]
    # after a reboot
    found = await find_gpus(replace(spec, gpus=("GPU-b", "GPU-a")), with_gpus((replace(B, index=0), card(1, "GPU-a"))))
    assert [gpu.index for gpu in found] == [0, 1]


async def test_nobody_looks_where_none_are_booked(spec, with_hands):
    blind = with_hands(look_at_gpus=None)
    assert await find_gpus(replace(spec, gpus=None), blind) is None
    assert await find_gpus(replace(spec, gpus=()), blind) == ()
    await wait_given_back(replace(spec, gpus=()), blind, ())
    await wait_given_back(replace(spec, gpus=None), blind, ())


@pytest.mark.parametrize(
    ("found", "cause", "remedy"),
    [
        (GpusFound(gpus=(A,)), "GPU GPU-b is not among those that this node has: 0: GPU-a", "dmesg"),
        (
            GpusFound(problem="no driver"),
            "GPU GPU-b is not among those that this node has: none (no driver)",
            "nvidia-smi",
        ),
        (
            GpusFound(gpus=(A, replace(B, broken="it has fallen off the bus"))),
            "GPU 1 (H100, GPU-b) can't be used: it has fallen off the bus",
            "reboot",
        ),
        (
            GpusFound(gpus=(A, replace(B, mig=(MigInstance(uuid="MIG-1", shape="1g.10gb", memory_gb=10.0),)))),
            "GPU 1 (H100, GPU-b) is cut into MIG instances, and an engine takes whole GPUs",
            "nvidia-smi -i 1 -mig 0",
        ),
    ],
)
async def test_one_that_can_not_be_used_is_named_with_what_to_do(spec, with_hands, found, cause, remedy):
    async def look_at_gpus(tools):
        return found

    with pytest.raises(EngineFailed) as raised:
        await find_gpus(spec, with_hands(look_at_gpus=look_at_gpus))
    assert raised.value.message == cause
    assert remedy in raised.value.remedy


async def test_a_launch_that_would_run_out_of_memory_beside_another_program_is_refused(spec, with_gpus):
    with pytest.raises(GpuInUse) as raised:
        await find_gpus(spec, with_gpus((A, replace(B, memory_used_gb=72.0, foreign=(NOTEBOOK,)))))
    assert raised.value.message == (
        "GPU 1 (H100, GPU-b) has 8.0 GB left of 80.0, and 72.0 are needed: in use by pid 4711 (jupyter): 72.0 GB"
    )
    assert raised.value.remedy == "end what uses it"


async def test_all_that_hold_its_memory_are_told_the_greatest_first(spec, with_gpus):
    uses = (ForeignUse(memory_gb=2.0, pid=5), ForeignUse(memory_gb=50.0))
    with pytest.raises(GpuInUse, match=r"in use by a process that the device does not name .*: 50.0 GB, pid 5 \(its"):
        await find_gpus(spec, with_gpus((A, replace(B, foreign=uses))))


@pytest.mark.parametrize(("memory_gb", "fits"), [(8.0, True), (8.1, False), (81.0, False)])
async def test_what_the_profile_says_that_it_takes_is_what_has_to_fit(spec, with_gpus, memory_gb, fits):
    spec = replace(spec, profile=replace(spec.profile, gpu_memory_gb=memory_gb))
    tools = with_gpus((A, replace(B, foreign=(NOTEBOOK,))))
    if fits:
        assert len(await find_gpus(spec, tools)) == 1
    else:
        with pytest.raises(GpuInUse):
            await find_gpus(spec, tools)


async def test_a_gpu_that_is_smaller_than_the_profile_says_is_in_use_by_nobody(spec, with_gpus):
    spec = replace(spec, profile=replace(spec.profile, gpu_memory_gb=100.0))
    with pytest.raises(GpuInUse) as raised:
        await find_gpus(spec, with_gpus((A, B)))
    assert raised.value.message == "GPU 1 (H100, GPU-b) has 80.0 GB left of 80.0, and 100.0 are needed"
    assert "gpu_memory_gb" in raised.value.remedy


async def test_a_fabric_is_what_this_node_has_of_it(spec, with_fabrics):
    other = FabricFound(name="ib-b", interface="ib1", address="10.1.0.1")
    here = FabricFound(name="ib-a", interface="ib0", address="10.0.0.1", hcas=("mlx5_0",))
    found = await find_fabric(replace(spec, fabric="ib-a"), with_fabrics(other, here))
    assert found == Fabric(address="10.0.0.1", interface="ib0", hcas=("mlx5_0",))
    assert await find_fabric(spec, with_fabrics(other, here)) is None


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        ((), "fabric ib-a is not declared on this node; declared: none"),
        ((FabricFound(name="ib-b"),), "fabric ib-a is not declared on this node; declared: ib-b"),
        (
            (FabricFound(name="ib-a", interface="ib0", address="10.0.0.1", down="mlx5_0: no port is active"),),
            "fabric ib-a is out of service on this node: mlx5_0: no port is active",
        ),
        (
            (FabricFound(name="ib-a", interface="ib0"),),
            "fabric ib-a is out of service on this node: its interface has no address",
        ),
        (
            (FabricFound(name="ib-a", address="10.0.0.1"),),
            "fabric ib-a is out of service on this node: its interface is not known",
        ),
    ],
)
async def test_a_fabric_that_engines_would_hang_on_is_refused_with_its_reason(spec, with_fabrics, found, cause):
    with pytest.raises(EngineFailed) as raised:
        await find_fabric(replace(spec, fabric="ib-a"), with_fabrics(*found))
    assert raised.value.message == cause
    assert "agent.yaml" in raised.value.remedy


def used(gb, *foreign):
    return (A, replace(B, memory_used_gb=gb, foreign=foreign))


async def test_memory_is_waited_for_until_the_device_says_that_it_is_free(spec, with_gpus, autojump_clock, caplog):
    # What is left without a name is what the shard had: its processes are gone.
    tools = with_gpus(used(72.0, NAMELESS), used(72.0, NAMELESS), used(30.0, NAMELESS), used(0.6))
    began = trio.current_time()
    await wait_given_back(spec, tools, ())
    assert 0.4 < trio.current_time() - began < 0.6
    assert not caplog.records


async def test_what_others_hold_is_not_waited_for(spec, with_gpus, autojump_clock):
    began = trio.current_time()
    await wait_given_back(spec, with_gpus(used(72.5, NOTEBOOK)), ())
    # One of a container, that was there before the launch already.
    await wait_given_back(spec, with_gpus(used(72.0, NAMELESS)), used(72.0, NAMELESS))
    # The device says nothing of it.
    await wait_given_back(spec, with_gpus((A,)), ())
    await wait_given_back(spec, with_gpus((A, replace(B, broken="lost", memory_used_gb=70.0))), ())
    assert trio.current_time() == began


async def test_memory_that_does_not_come_back_is_told_of_and_not_waited_for_for_ever(
    spec, with_gpus, autojump_clock, caplog
):
    began = trio.current_time()
    await wait_given_back(spec, with_gpus(used(70.0)), ())
    assert GIVEN_BACK_SECONDS <= trio.current_time() - began <= GIVEN_BACK_SECONDS + 1.0
    (told,) = caplog.records
    assert "70.0 GB of GPU-b are not given back after 10 s" in told.getMessage()


@pytest.mark.parametrize(("rank", "is_refused"), [(0, True), (1, False)])
def test_where_shards_meet_has_to_be_free_on_the_first_of_their_nodes(make_spec, tools, listener, rank, is_refused):
    place = f"127.0.0.1:{listener.getsockname()[1]}"
    spec = replace(make_spec(), rank=rank, count=2, rendezvous=place)
    if is_refused:
        with pytest.raises(RendezvousTaken, match=place) as caught:
            check_rendezvous(spec, tools)
        assert "the next try takes another port" in caught.value.remedy
    else:
        check_rendezvous(spec, tools)
    check_rendezvous(replace(spec, rendezvous=None), tools)
