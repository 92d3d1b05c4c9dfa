from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from machines import (
    A100,
    BROKEN,
    ENGINE,
    H100,
    SOURCE,
    a_box,
    a_fabric,
    a_gpu,
    a_host,
    a_model,
    a_need,
    a_profile,
)

from llmgw.core.filters import Need, describe, find_cards, find_reason, find_reasons, shorten, tell_lack
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import ModelName
from llmgw.core.node import Disk, ForeignUse, MigInstance, NodeId
from llmgw.core.rejection import Reason
from llmgw.core.replica import ReplicaId

R1, R2 = ReplicaId("rep-x-1"), ReplicaId("rep-y-2")
PYTHON = ForeignUse(memory_gb=72.0, pid=4711, name="python")


def test_nothing_speaks_against_a_node_that_has_what_is_asked_for() -> None:
    need = a_need(
        gpu_class=H100,
        tp=2,
        nodes=2,
        labels={"zone": "a"},
        min_memory_gb=16.0,
        min_disk_gb=5.0,
        backing_off={NodeId("n1"): 5.0},
        now=5.0,
    )
    host = a_host(
        gpus=a_box(1),
        fabrics=(a_fabric(),),
        labels={"zone": "a", "rack": "7"},
        disks=(Disk(path="/", free_gb=5.0, total_gb=9.0),),
    )
    assert find_reason(need, host) is None
    assert find_reasons(need, host) == ()


def test_the_first_reason_is_the_most_lasting_and_all_are_found_in_that_order() -> None:
    need = a_need(
        gpu_class=H100,
        tp=8,
        nodes=2,
        labels={"zone": "a"},
        env={"A": "1"},
        min_memory_gb=99.0,
        min_disk_gb=5.0,
        backing_off={NodeId("n1"): 5.0},
    )
    host = a_host(
        gpus=(a_gpu(foreign=(PYTHON,)),),
        engines=(),
        standing=Standing.LOST,
        cordoned=True,
        outdated=True,
    )
    assert find_reason(need, host) is Reason.NODE_LOST
    assert find_reasons(need, host) == (
        Reason.NODE_LOST,
        Reason.CORDONED,
        Reason.LABELS_DIFFER,
        Reason.AGENT_OUTDATED,
        Reason.NO_ENGINE,
        Reason.NO_FABRIC,
        Reason.NOT_ENOUGH_GPUS,
        Reason.NOT_ENOUGH_GPU_MEMORY,
        Reason.NOT_ENOUGH_MEMORY,
        Reason.NOT_ENOUGH_DISK,
        Reason.BACKING_OFF,
    )


@pytest.mark.parametrize(
    ("gpus", "reason"), [(None, Reason.NO_GPU), ((), Reason.NO_GPU), (a_box(8, A100), Reason.WRONG_CLASS)]
)
def test_that_there_is_no_such_gpu_is_not_told_twice(gpus: Any, reason: Reason) -> None:
    assert find_reasons(a_need(gpu_class=H100, gpu_memory_gb=60.0), a_host(gpus=gpus)) == (reason,)


def test_any_class_is_enough_where_none_is_named() -> None:
    host = a_host(gpus=(*a_box(2, A100), a_gpu("GPU-9", 9, H100)))
    for need in (a_need(tp=2), a_need(gpu_class="any", tp=2)):
        assert find_reason(need, host) is None
        assert find_cards(need, host) == [(A100, 0b011)]


def test_gpus_of_two_classes_do_not_make_up_for_one_another() -> None:
    host = a_host(gpus=(*a_box(2, A100), a_gpu("GPU-9", 9, H100)))
    assert find_reason(a_need(tp=3), host) is Reason.NOT_ENOUGH_GPUS
    # two are free, and one is large enough: of another class
    assert find_reason(a_need(tp=2, gpu_memory_gb=60.0), host) is Reason.NOT_ENOUGH_GPU_MEMORY


def test_where_too_few_are_free_those_that_are_must_have_the_memory() -> None:
    one, other = a_box(2)
    need = a_need(gpu_class=H100, tp=2)
    booked = {one.uuid: R1}
    assert find_reasons(need, a_host(gpus=(one, other), booked=booked)) == (Reason.NOT_ENOUGH_GPUS,)
    full = replace(other, foreign=(PYTHON,))
    assert find_reasons(need, a_host(gpus=(one, full), booked=booked)) == (
        Reason.NOT_ENOUGH_GPUS,
        Reason.NOT_ENOUGH_GPU_MEMORY,
    )
    all_booked = a_host(gpus=(one, full), booked={one.uuid: R1, full.uuid: R1})
    assert find_reasons(need, all_booked) == (Reason.NOT_ENOUGH_GPUS,)
    # one that is full and can't be had is nobody's matter
    without = a_host(gpus=(one, other, a_gpu("GPU-9", 9, A100, foreign=(PYTHON,))), booked={one.uuid: R1, "GPU-1": R1})
    assert find_reasons(need, without) == (Reason.NOT_ENOUGH_GPUS,)


def test_memory_that_just_fits_fits() -> None:
    assert find_reason(a_need(min_memory_gb=0.3), a_host(memory_gb=0.4, booked_gb=0.1)) is None
    assert find_reason(a_need(gpu_memory_gb=8.0), a_host(gpus=(a_gpu(foreign=(PYTHON,)),))) is None


def test_a_profile_with_an_environment_of_its_own_may_find_the_libraries() -> None:
    lacking = a_host(engines=(replace(BROKEN, missing_libraries=("libe.so.1",)),))
    assert find_reason(a_need(env={"LD_LIBRARY_PATH": "/opt/lib"}), lacking) is None
    assert find_reason(a_need(), lacking) is Reason.ENGINE_BROKEN
    # nothing else is mended by one
    assert find_reason(a_need(env={"A": "1"}), a_host(engines=(BROKEN,))) is Reason.ENGINE_BROKEN


@pytest.mark.parametrize(
    "found",
    [
        replace(BROKEN, broken=None),
        replace(BROKEN, broken=None, checked=False),
        replace(BROKEN, broken=None, problems=("--x is deprecated",), version="1.2"),
    ],
)
def test_what_is_not_known_to_be_broken_is_tried(found: Any) -> None:
    assert find_reason(a_need(), a_host(engines=(found,))) is None


def test_an_old_agent_still_runs_what_it_understands() -> None:
    assert find_reason(a_need(), a_host(outdated=True)) is None
    assert find_reason(a_need(env={"A": "1"}), a_host(outdated=True)) is Reason.AGENT_OUTDATED


def test_an_agent_that_fetches_no_weights_is_given_none_to_fetch() -> None:
    old = a_host(fetches=False)
    assert find_reason(a_need(), old) is None
    fetched = replace(a_model(a_profile()), source="hf:org/repo/x.gguf")
    need = Need(model=fetched, profile=fetched.profiles[0], backing_off={}, now=0.0)
    assert find_reason(need, old) is Reason.AGENT_OUTDATED
    assert "which fetches no weights: upgrade it" in describe(Reason.AGENT_OUTDATED, need, old)
    assert find_reason(need, a_host()) is None
    asks = replace(need, profile=a_profile(env={"A": "1"}))
    assert tell_lack(asks, a_host(fetches=False, outdated=True)) == "passes over env and fetches no weights"


def test_what_an_earlier_fetch_has_left_needs_no_room_again() -> None:
    disks = (Disk(path="/", free_gb=5.0, total_gb=100.0),)
    begun = a_host(disks=disks, begun={SOURCE: 45.0})
    assert find_reason(a_need(min_disk_gb=50.0), begun) is None
    assert find_reason(a_need(min_disk_gb=51.0), begun) is Reason.NOT_ENOUGH_DISK
    assert "needs 6 GB on disk" in describe(Reason.NOT_ENOUGH_DISK, a_need(min_disk_gb=51.0), begun)
    assert find_reason(a_need(min_disk_gb=1.0), a_host(disks=disks, begun={SOURCE: 45.0})) is None


def test_weights_that_are_there_need_no_room_on_disk() -> None:
    assert find_reason(a_need(min_disk_gb=50.0), a_host(holds=frozenset([SOURCE]))) is None
    assert find_reason(a_need(min_disk_gb=50.0), a_host(holds=frozenset(["another"]))) is Reason.NOT_ENOUGH_DISK


def test_the_fullest_disk_must_do() -> None:
    disks = (Disk(path="/", free_gb=5.0, total_gb=100.0), Disk(path="/data", free_gb=50.0, total_gb=100.0))
    assert find_reason(a_need(min_disk_gb=20.0), a_host(disks=disks)) is Reason.NOT_ENOUGH_DISK
    assert find_reason(a_need(min_disk_gb=5.0), a_host(disks=disks)) is None


def test_one_fabric_is_looked_at_by_itself() -> None:
    host = a_host(gpus=a_box(1), fabrics=(a_fabric("ib-a"), a_fabric("ib-b", down="no port is ACTIVE")))
    need = a_need(tp=2, nodes=2)
    assert find_reason(need, host) is None
    of = {name: find_reason(replace_fabric(need, name), host) for name in ("ib-a", "ib-b", "ib-c")}
    assert of == {"ib-a": None, "ib-b": Reason.FABRIC_DOWN, "ib-c": Reason.NO_FABRIC}
    assert find_reason(replace_fabric(need, "ib-a"), a_host(gpus=a_box(1))) is Reason.NO_FABRIC


def replace_fabric(need: Any, name: str) -> Any:
    return type(need)(model=need.model, profile=need.profile, backing_off={}, now=0.0, fabric=name)


# What is said of each


def told(reason: Reason, host: Host, **facts: Any) -> str:
    need = a_need(**facts)
    assert reason in find_reasons(need, host)
    return describe(reason, need, host)


def test_a_lost_node_is_told_with_its_pin() -> None:
    lost = a_host(standing=Standing.LOST, labels={"zone": "a"})
    plain = "the node is lost: see whether its agent runs and reaches the server"
    assert told(Reason.NODE_LOST, lost) == plain
    assert told(Reason.NODE_LOST, lost, labels={"zone": "a"}) == plain + "; it has what is asked for, zone=a"
    assert told(Reason.NODE_LOST, lost, labels={"zone": "b"}) == plain
    silent = replace(lost, standing=Standing.SILENT)
    assert told(Reason.NODE_SILENT, silent, labels={"zone": "a"}) == (
        "the node is silent: its link is down, and its lease still runs; it has what is asked for, zone=a"
    )


@pytest.mark.parametrize(
    ("labels", "detail"),
    [
        ({}, "asks for rack=1, zone=a; the node has no label zone, rack"),
        ({"zone": "b", "rack": "1"}, "asks for rack=1, zone=a; the node has zone=b"),
        ({"zone": "b"}, "asks for rack=1, zone=a; the node has zone=b and has no label rack"),
    ],
)
def test_labels_that_differ_are_told(labels: dict[str, str], detail: str) -> None:
    assert told(Reason.LABELS_DIFFER, a_host(labels=labels), labels={"zone": "a", "rack": "1"}) == detail


def test_gpus_that_can_not_be_had_are_told_with_the_reason() -> None:
    gpus = [*a_box(6), a_gpu("GPU-a100", 7, A100)]
    gpus[2] = replace(gpus[2], broken="fell off the bus")
    gpus[3] = replace(gpus[3], mig=(MigInstance(uuid="MIG-1", shape="1g.10gb", memory_gb=10.0),))
    host = a_host(gpus=tuple(gpus), booked={"GPU-0": R1, "GPU-1": R2, "GPU-4": R2})
    holders = "rep-x-1 holds 1; rep-y-2 holds 2; GPU-2 is broken (fell off the bus); GPU-3 is cut into instances"
    assert told(Reason.NOT_ENOUGH_GPUS, host, gpu_class=H100, tp=2) == (
        f"needs 2 GPUs of class h100-80g; 1 of 6 is free: {holders}"
    )
    # of any class: that with the most
    assert told(Reason.NOT_ENOUGH_GPUS, host, tp=2).startswith("needs 2 GPUs of class h100-80g; 1 of 6 is free: rep")
    assert told(Reason.NOT_ENOUGH_GPUS, a_host(gpus=a_box(4)), gpu_class=H100, tp=8) == (
        "needs 8 GPUs of class h100-80g; 4 of 4 are free"
    )


@pytest.mark.parametrize(
    ("uuids", "short"),
    [
        (("GPU-8f3e12ab-6a72-4c", "GPU-9f3e12ab-6a72-4c"), "GPU-8f3e12ab"),
        (("GPU-8f3e12ab-6a72-4c", "GPU-8f3e12ab-7b83-4c"), "GPU-8f3e12ab-6a72"),
        (("GPU-8f3e12ab-6a72-4c", "GPU-8f3e12ab-6a72-5d"), "GPU-8f3e12ab-6a72-4c"),
        # those of a fake inventory
        (("GPU-a1-1", "GPU-a1-10"), "GPU-a1-1"),
        (("GPU-a1-1-x",), "GPU-a1-1"),
    ],
)
def test_a_card_is_called_by_as_much_of_its_name_as_tells_it_apart(uuids: tuple[str, ...], short: str) -> None:
    cards = tuple(a_gpu(uuid, index) for index, uuid in enumerate(uuids))
    assert shorten(cards[0], a_host(gpus=cards)) == short


def test_memory_that_comes_free_by_itself_is_told() -> None:
    for leaving, said in (({"r1": 2.0}, " (r1 is stopping)"), ({"r1": 2.0, "r2": 1.0}, " (r1, r2 are stopping)")):
        host = a_host(booked_gb=16.0, leaving=leaving)
        assert describe(Reason.NOT_ENOUGH_MEMORY, a_need(min_memory_gb=4.0), host).endswith(f"by replicas{said}")


def test_what_is_kept_is_not_told_as_a_replicas() -> None:
    """A replica that had ended was named as the one that holds them."""
    kept = dict.fromkeys(["GPU-0", "GPU-1"], ModelName("m")) | {"GPU-2": ModelName("x")}
    host = a_host(gpus=a_box(4), booked=dict.fromkeys(["GPU-0", "GPU-1", "GPU-2", "GPU-3"], R1), kept=kept)
    assert told(Reason.NOT_ENOUGH_GPUS, host, gpu_class=H100) == (
        "needs 1 GPU of class h100-80g; 0 of 4 are free: rep-x-1 holds 1; "
        "2 are kept for m until it runs again, for a minute at most; "
        "1 is kept for x until it runs again, for a minute at most"
    )
    host = a_host(booked_gb=16.0, leaving={R2: 1.0}, kept_gb={ModelName("m"): 10.0, ModelName("x"): 0.0})
    assert describe(Reason.NOT_ENOUGH_MEMORY, a_need(min_memory_gb=4.0), host).endswith(
        "6 GB are booked by replicas (rep-y-2 is stopping), "
        "10 GB are kept for m until it runs again, for a minute at most"
    )


def test_of_many_the_first_few_are_told() -> None:
    gpus = a_box(8)
    host = a_host(gpus=gpus, booked={gpu.uuid: ReplicaId(f"r{gpu.index}") for gpu in gpus})
    assert told(Reason.NOT_ENOUGH_GPUS, host, gpu_class=H100) == (
        "needs 1 GPU of class h100-80g; 0 of 8 are free: r0 holds 1; r1 holds 1; r2 holds 1; r3 holds 1; and 4 more"
    )


def test_who_holds_the_memory_of_a_gpu_is_named() -> None:
    uses = (ForeignUse(memory_gb=4.0, pid=12), ForeignUse(memory_gb=50.0), PYTHON, ForeignUse(memory_gb=1.5, name="X"))
    host = a_host(gpus=(a_gpu("GPU-8f3e12ab-77c1-4d02", foreign=uses[:2]), a_gpu("GPU-1", 1, foreign=uses[2:])))
    assert told(Reason.NOT_ENOUGH_GPU_MEMORY, host, gpu_class=H100, gpu_memory_gb=33.25) == (
        "needs 33.25 GB on a GPU: GPU-8f3e12ab has 26 of 80 GB: an unknown program holds 50 GB, pid 12 holds "
        "4 GB; GPU-1 has 6.5 of 80 GB: pid 4711 python holds 72 GB, X holds 1.5 GB"
    )


def test_a_gpu_that_is_too_small_is_told_so() -> None:
    assert told(Reason.NOT_ENOUGH_GPU_MEMORY, a_host(gpus=a_box(1, A100)), gpu_memory_gb=60.0) == (
        "needs 60 GB on a GPU: GPU-0 has 40 GB"
    )


def test_a_gpu_that_is_overfull_has_nothing_rather_than_less() -> None:
    host = a_host(gpus=(a_gpu(foreign=(PYTHON, PYTHON)),))
    assert "GPU-0 has 0 of 80 GB: pid" in told(Reason.NOT_ENOUGH_GPU_MEMORY, host, gpu_class=H100)


def test_a_node_that_shrank_has_nothing_free_rather_than_less() -> None:
    host = a_host(memory_gb=4.0, booked_gb=6.0)
    assert told(Reason.NOT_ENOUGH_MEMORY, host, min_memory_gb=1.0) == (
        "needs 1 GB of memory; 0 of 4 GB are free, 6 GB are booked by replicas"
    )


def test_an_unknown_disk_is_not_room() -> None:
    assert told(Reason.NOT_ENOUGH_DISK, a_host(), min_disk_gb=1.0) == "needs 1 GB on disk; the node reports no disk"


def test_each_fabric_of_a_node_is_told_that_is_out_of_service() -> None:
    fabrics = (a_fabric("ib-a", down="mlx5_0 has no port that is ACTIVE"), a_fabric("ib-b", address=None))
    need = a_need(nodes=2)
    host = a_host(fabrics=fabrics)
    assert describe(Reason.FABRIC_DOWN, need, host) == (
        "fabric ib-a is out of service here: mlx5_0 has no port that is ACTIVE; fabric ib-b is out of service here: "
        "the node has no address on it"
    )
    assert describe(Reason.FABRIC_DOWN, replace_fabric(need, "ib-b"), host) == (
        "fabric ib-b is out of service here: the node has no address on it"
    )


def test_an_engine_of_several_is_found_by_its_name() -> None:
    host = a_host(engines=(replace(BROKEN, engine="f"), ENGINE))
    assert find_reason(a_need(), host) is None
    assert find_reason(a_need(engine="f"), host) is Reason.ENGINE_BROKEN
