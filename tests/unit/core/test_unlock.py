from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from machines import (
    A100,
    BROKEN,
    ENGINE,
    H100,
    World,
    a_box,
    a_fabric,
    a_gpu,
    a_host,
    a_model,
    a_need,
    a_profile,
    worlds,
)

from llmgw.core.filters import small_disks
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import ModelName, Profile
from llmgw.core.node import Disk, FabricFound, ForeignUse, Gpu, MigInstance, NodeId
from llmgw.core.placement import Placement, Rejected, explain, place
from llmgw.core.rejection import Reason
from llmgw.core.replica import ReplicaId
from llmgw.core.unlock import EFFORTS, Step, Unlock, find_unlock

R1, R2 = ReplicaId("rep-x-1"), ReplicaId("rep-y-2")
PYTHON = ForeignUse(memory_gb=72.0, pid=4711, name="python")


def the_unlock(
    hosts: Sequence[Host], *profiles: Profile, backing_off: dict[NodeId, float] | None = None, now: float = 0.0
) -> Unlock:
    """The change, which has to be one that helps."""
    world = World(model=a_model(*profiles), hosts=tuple(hosts), backing_off=backing_off or {}, now=now)
    assert isinstance(place(world.model, hosts, world.backing_off, now), Rejected)
    found = find_unlock(world.model, hosts, world.backing_off, now)
    assert found is not None
    assert isinstance(place_after(world, found), Placement)
    return found


# What an operator would do


def place_after(world: World, unlock: Unlock) -> Placement | Rejected:
    hosts = {host.id: host for host in world.hosts}
    profile = next(profile for profile in world.model.profiles if profile.name == unlock.profile)
    now = world.now
    for step in unlock.steps:
        if step.key is not None:
            profile = replace(profile, **{step.key: step.value})
    for step in unlock.steps:
        if step.nodes:
            hosts |= {host.id: host for host in new_hosts(step, profile)}
        elif waits := re.fullmatch(r"wait (\d+) s: the last try on \w+ failed", step.text):
            now += float(waits[1])
        elif step.node is not None:
            hosts[step.node] = change(hosts[step.node], step, profile)
    profiles = tuple(profile if each.name == profile.name else each for each in world.model.profiles)
    return place(replace(world.model, profiles=profiles), list(hosts.values()), world.backing_off, now)


def new_hosts(step: Step, profile: Profile) -> list[Host]:
    fabric = re.search(r" to fabric (\S+) with", step.text)
    named = re.search(r" of class ([^, ]+)", step.text)
    gpu_class = named[1] if named else H100

    def new(name: str) -> Host:
        of_class = range(profile.gpus_per_node)
        return a_host(
            name,
            memory_gb=1000.0,
            disks=(Disk(path="/", free_gb=1000.0, total_gb=1000.0),),
            labels=profile.labels,
            engines=(replace(ENGINE, engine=profile.engine),),
            gpus=tuple(replace(a_gpu(f"{name}-{at}", at, memory_gb=200.0), gpu_class=gpu_class) for at in of_class),
            fabrics=(a_fabric(fabric[1]),) if fabric else (),
        )

    return [new(f"new{number}") for number in range(step.nodes)]


def change(host: Host, step: Step, profile: Profile) -> Host:
    node = host.node
    match step.reasons[0]:
        case Reason.NODE_LOST | Reason.NODE_SILENT:
            return replace(host, standing=Standing.READY)
        case Reason.CORDONED:
            return replace(host, cordoned=False)
        case Reason.LABELS_DIFFER:
            written = dict(pair.split("=") for pair in step.text.removeprefix(f"label {host.id} ").split())
            return replace(host, labels={**host.labels, **written})
        case Reason.AGENT_OUTDATED:
            return replace(host, node=replace(node, outdated=False, fetches=True))
        case Reason.NO_ENGINE | Reason.ENGINE_BROKEN:
            others = tuple(found for found in node.engines if found.engine != profile.engine)
            return replace(host, node=replace(node, engines=(*others, replace(ENGINE, engine=profile.engine))))
        case Reason.NO_FABRIC | Reason.FABRIC_DOWN:
            (name,) = re.findall(r"fabric (\S+)", step.text)
            others_on = tuple(fabric for fabric in node.fabrics if fabric.name != name)
            return replace(host, node=replace(node, fabrics=(*others_on, FabricFound(name=name, address="10.0.0.9"))))
        case Reason.NOT_ENOUGH_MEMORY:
            assert step.gb is not None
            booked = min(host.booked_gb, step.gb)
            foreign = min(node.memory_foreign_gb, step.gb - booked)
            return replace(
                host,
                booked_gb=host.booked_gb - booked,
                node=replace(node, memory_foreign_gb=node.memory_foreign_gb - foreign),
            )
        case Reason.NOT_ENOUGH_DISK:
            assert step.gb is not None
            small = small_disks(a_need(min_disk_gb=profile.min_disk_gb), host)
            disks = tuple(
                replace(disk, free_gb=min(disk.free_gb + step.gb, disk.total_gb)) if disk in small else disk
                for disk in node.disks
            )
            return replace(host, node=replace(node, disks=disks))
        case _:
            assert step.gpus
            gpus = tuple(free(gpu, step.gb) if gpu.uuid in step.gpus else gpu for gpu in node.gpus or ())
            gone = set(step.gpus) if step.gb is None else set()
            booked_by = {uuid: holder for uuid, holder in host.booked.items() if uuid not in gone}
            kept = {uuid: model for uuid, model in host.kept.items() if uuid not in gone}
            return replace(host, node=replace(node, gpus=gpus), booked=booked_by, kept=kept)


def free(gpu: Gpu, gb: float | None) -> Gpu:
    if gb is None:
        return replace(gpu, broken=None, mig=None)
    left = sum(use.memory_gb for use in gpu.foreign) - gb
    return replace(gpu, foreign=(ForeignUse(memory_gb=left),))


# Words and numbers


@pytest.mark.parametrize(
    ("host", "profile", "text"),
    [
        ({"standing": Standing.LOST}, {}, "bring n1 back (silent for its lease)"),
        ({"standing": Standing.SILENT}, {}, "bring n1 back (its link is down)"),
        ({"cordoned": True}, {}, "uncordon n1"),
        ({"labels": {"zone": "b"}}, {"labels": {"zone": "a", "rack": "1"}}, "label n1 rack=1 zone=a"),
        ({"outdated": True}, {"env": {"A": "1"}}, "upgrade llmgw on n1 (it passes over env)"),
        ({"engines": ()}, {}, "install e on n1, or set engines.e.bin in its agent.yaml"),
        ({"engines": (BROKEN,)}, {}, "mend /usr/bin/e on n1 (libe.so.1 is missing)"),
        ({}, {"gpu_class": H100}, "add a node with the engine e, 1 GPU of class h100-80g"),
        (
            {"gpus": a_box(1, A100)},
            {"gpu_class": H100},
            "write gpu_class: a100-40g (there is a100-40g)",
        ),
        (
            {"gpus": a_box(4), "booked": {"GPU-0": R1, "GPU-1": R1, "GPU-2": R2}},
            {"tp": 3},
            "n1 needs 2 more free GPUs: rep-x-1 holds 2",
        ),
        # the smallest replica that holds enough
        (
            {"gpus": a_box(4), "booked": {"GPU-0": R1, "GPU-1": R1, "GPU-2": R1, "GPU-3": R2}},
            {"gpu_class": H100},
            "n1 needs 1 more free GPU: rep-y-2 holds 1",
        ),
        (
            {"gpus": a_box(2), "booked": {"GPU-0": R1, "GPU-1": R2}},
            {"tp": 2},
            "n1 needs 2 more free GPUs: rep-x-1 holds 1, rep-y-2 holds 1",
        ),
        (
            {"gpus": (a_gpu(broken="fell off the bus"),)},
            {"gpu_class": "any"},
            "n1 needs 1 more free GPU: GPU-0 is broken (fell off the bus)",
        ),
        (
            {"gpus": (a_gpu(mig=(MigInstance(uuid="MIG-1", shape="1g.10gb", memory_gb=10.0),)),)},
            {"gpu_class": "any"},
            "n1 needs 1 more free GPU: GPU-0 is cut into instances",
        ),
        (
            {"gpus": (a_gpu("GPU-ab12", foreign=(PYTHON,)),)},
            {"gpu_memory_gb": 14.2},
            "free 6.2 GB on n1's GPU-ab12 (pid 4711 python holds 72 GB)",
        ),
        (
            {"gpus": a_box(1, A100)},
            {"gpu_memory_gb": 42.0},
            "lower gpu_memory_gb to 40 (n1 has 1 GPU of class a100-40g with 40 GB free)",
        ),
        (
            {"booked_gb": 8.0, "memory_foreign_gb": 3.0},
            {"min_memory_gb": 11.15},
            "free 6.2 GB of memory on n1 (replicas have booked 8 GB, other programs hold 3 GB)",
        ),
        ({"memory_foreign_gb": 3.0}, {"min_memory_gb": 16.0}, "free 3 GB of memory on n1 (other programs hold 3 GB)"),
        ({"booked_gb": 1.0}, {"min_memory_gb": 17.0}, "lower min_memory_gb to 15 (n1 has 15 of 16 GB free)"),
        ({"booked_gb": 16.0}, {"min_memory_gb": 17.0}, "add a node with the engine e, 17 GB of memory"),
        (
            {"disks": (Disk(path="/w", free_gb=5.0, total_gb=50.0), Disk(path="/", free_gb=9.0, total_gb=99.0))},
            {"min_disk_gb": 20.0},
            "free 11 GB at / and 15 GB at /w on n1",
        ),
        (
            {"disks": (Disk(path="/", free_gb=15.0, total_gb=19.0), Disk(path="/w", free_gb=18.0, total_gb=99.0))},
            {"min_disk_gb": 20.0},
            "lower min_disk_gb to 15 (n1 has 15 of 19 GB free at /)",
        ),
        ({}, {"min_disk_gb": 20.0}, "take min_disk_gb out (n1 reports no disk)"),
    ],
)
def test_each_reason_has_its_remedy(host: dict[str, Any], profile: dict[str, Any], text: str) -> None:
    unlock = the_unlock([a_host(**host)], a_profile(**profile))
    assert unlock.text == text
    assert unlock.node == (None if text.startswith("add") else "n1")
    assert unlock.profile == "p"


def test_a_node_that_is_left_alone_for_a_while_is_waited_for() -> None:
    backing_off = {NodeId("n1"): 111.2, NodeId("n2"): 400.0}
    unlock = the_unlock([a_host("n1"), a_host("n2")], a_profile(), backing_off=backing_off, now=100.0)
    assert unlock.text == "wait 12 s: the last try on n1 failed"


def test_every_reason_has_a_remedy() -> None:
    # (too few nodes are more nodes, or what has to be done at those that there are)
    assert set(EFFORTS) == set(Reason) - {Reason.NOT_ENOUGH_NODES}


def test_all_that_fails_at_a_node_is_named() -> None:
    host = a_host(cordoned=True, gpus=(a_gpu("GPU-ab12", foreign=(PYTHON,)), a_gpu("GPU-1", 1)), booked={"GPU-1": R1})
    unlock = the_unlock([host], a_profile(tp=2))
    assert unlock.text == (
        "uncordon n1; n1 needs 1 more free GPU: rep-x-1 holds 1; "
        "free 64 GB on n1's GPU-ab12 (pid 4711 python holds 72 GB)"
    )
    assert [step.reasons for step in unlock.steps] == [
        (Reason.CORDONED,),
        (Reason.NOT_ENOUGH_GPUS,),
        (Reason.NOT_ENOUGH_GPU_MEMORY,),
    ]


# Replicas that have to go


def test_one_replica_that_stops_asks_for_less_than_another_class_however_many_gpus_it_has() -> None:
    """ "write gpu_class" was said, although to stop one replica of three GPUs would have done."""
    hosts = [a_host("n1", gpus=a_box(4), booked=dict.fromkeys(["GPU-0", "GPU-1", "GPU-2"], R1))]
    hosts.append(a_host("n2", gpus=a_box(4, A100, name="b")))
    assert the_unlock(hosts, a_profile(gpu_class=H100, tp=4)).text == "n1 needs 3 more free GPUs: rep-x-1 holds 3"


def test_what_stops_anyway_is_waited_for() -> None:
    """A replica was on its way out, and to write another class was told as the smallest change."""
    booked = dict.fromkeys(["GPU-0", "GPU-1", "GPU-2", "GPU-3"], R1)
    going = a_host("n1", gpus=a_box(4), booked=booked, leaving={R1: 0.0})
    other = a_host("n2", gpus=a_box(4, A100, name="b"), cordoned=True)
    unlock = the_unlock([going, other], a_profile(gpu_class="any", tp=4))
    assert (unlock.text, unlock.node) == ("wait until rep-x-1 has stopped", "n1")
    assert unlock.steps[0].gpus == ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


def test_one_that_stops_anyway_is_named_beside_one_that_has_to_be_stopped() -> None:
    booked = {"GPU-0": R1, "GPU-1": R2, "GPU-2": R2}
    host = a_host(gpus=a_box(3), booked=booked, leaving={R1: 0.0})
    assert the_unlock([host], a_profile(tp=3)).text == (
        "wait until rep-x-1 has stopped; n1 needs 2 more free GPUs: rep-y-2 holds 2"
    )
    assert the_unlock([host], a_profile(tp=2)).text == "n1 needs 2 more free GPUs: rep-y-2 holds 2", "one is enough"


def test_a_card_that_comes_free_and_is_broken_has_to_be_mended_as_well() -> None:
    host = a_host(gpus=(a_gpu(broken="fell off the bus"),), booked={"GPU-0": R1}, leaving={R1: 0.0})
    assert the_unlock([host], a_profile(gpu_class="any")).text == (
        "wait until rep-x-1 has stopped; n1 needs 1 more free GPU: GPU-0 is broken (fell off the bus)"
    )


def test_memory_that_comes_free_anyway_is_waited_for() -> None:
    host = a_host(booked_gb=12.0, leaving={R1: 3.0, R2: 8.0})
    assert the_unlock([host], a_profile(min_memory_gb=10.0)).text == "wait until rep-y-2 has stopped"
    assert the_unlock([host], a_profile(min_memory_gb=14.0)).text == (
        "wait until rep-y-2 has stopped; wait until rep-x-1 has stopped"
    )
    assert the_unlock([host], a_profile(min_memory_gb=16.0)).text.startswith("free 12 GB of memory on n1")


def test_memory_and_gpus_of_one_replica_are_waited_for_once() -> None:
    host = a_host(gpus=a_box(1), booked={"GPU-0": R1}, booked_gb=12.0, leaving={R1: 12.0})
    assert the_unlock([host], a_profile(gpu_class="any", min_memory_gb=10.0)).text == "wait until rep-x-1 has stopped"


def test_what_is_kept_for_a_model_is_waited_for() -> None:
    """To stop a replica that had ended already was told."""
    wait = "wait until m runs again, for a minute at most: room on n1 is kept for it"
    booked, kept = dict.fromkeys(["GPU-0", "GPU-1", "GPU-2"], R1), dict.fromkeys(["GPU-0", "GPU-1"], ModelName("m"))
    host = a_host(gpus=a_box(3), booked=booked, kept=kept)
    unlock = the_unlock([host, a_host("n2", cordoned=True, gpus=a_box(3, name="b"))], a_profile(tp=2))
    assert (unlock.text, unlock.node, unlock.steps[0].gpus) == (wait, "n1", ("GPU-0", "GPU-1"))
    assert the_unlock([host], a_profile(tp=3)).text == f"{wait}; n1 needs 1 more free GPU: rep-x-1 holds 1"
    host = a_host(booked_gb=12.0, kept_gb={ModelName("m"): 10.0})
    assert the_unlock([host], a_profile(min_memory_gb=10.0)).text == wait
    assert the_unlock([host], a_profile(min_memory_gb=15.0)).text == (
        "free 11 GB of memory on n1 (replicas have booked 2 GB, "
        "10 GB are kept for m until it runs again, for a minute at most)"
    )


def test_a_replica_of_several_nodes_stops_once() -> None:
    """To buy a node was said, while one replica had all 16 GPUs and a port of its second node was out of service."""

    def host(name: str, holder: ReplicaId, **facts: Any) -> Host:
        gpus = a_box(8, name=name)
        return a_host(name, gpus=gpus, booked={gpu.uuid: holder for gpu in gpus}, **{"fabrics": (a_fabric(),), **facts})

    down = (a_fabric(down="its port is DOWN"),)
    wide = a_profile(tp=16, nodes=2)
    assert the_unlock([host("n1", R1), host("n2", R1, fabrics=down)], wide).text == (
        "n1 needs 8 more free GPUs: rep-x-1 holds 8; put fabric ib-a into service on n2 (its port is DOWN); "
        "n2 needs 8 more free GPUs: rep-x-1 holds 8"
    )
    hosts = [host("n1", R2), host("n2", R1), host("n3", R1), host("n4", ReplicaId("rep-z-1"))]
    assert the_unlock(hosts, wide).text == (
        "n2 needs 8 more free GPUs: rep-x-1 holds 8; n3 needs 8 more free GPUs: rep-x-1 holds 8"
    )


def test_room_is_made_on_several_cards_before_a_replica_is_stopped() -> None:
    held = tuple(a_gpu(f"GPU-{at}", at, foreign=(PYTHON,)) for at in range(2))
    host = a_host(gpus=(*held, a_gpu("GPU-2", 2), a_gpu("GPU-3", 3)), booked={"GPU-2": R1, "GPU-3": R1})
    told = the_unlock([host], a_profile(tp=2)).text
    assert told.count("free 64 GB on n1's GPU-") == 2


def test_cards_of_one_node_are_told_apart() -> None:
    """Each card of a fake inventory was called GPU-a1."""
    cards = tuple(a_gpu(f"GPU-a1-{at}", at, broken="it is hot") for at in range(2))
    assert the_unlock([a_host("a1", gpus=cards)], a_profile(gpu_class="any", tp=2)).text == (
        "a1 needs 2 more free GPUs: GPU-a1-0 is broken (it is hot), GPU-a1-1 is broken (it is hot)"
    )


# Classes


def test_a_class_that_is_written_otherwise_comes_before_another_class() -> None:
    hosts = [a_host("n1", gpus=a_box(2, A100)), a_host("n2", gpus=a_box(2, name="b"), booked={"GPU-b0": R1})]
    for written in ("H100-80G", "h100_80gb"):
        assert the_unlock(hosts, a_profile(gpu_class=written, tp=2)).text == (
            "write gpu_class: h100-80g (there is a100-40g, h100-80g); n2 needs 1 more free GPU: rep-x-1 holds 1"
        )


def test_a_new_node_for_a_profile_that_takes_any_class_may_have_any() -> None:
    hosts = [a_host("n1", gpus=a_box(4, A100)), a_host("n2", gpus=a_box(4, name="b"))]
    assert the_unlock(hosts, a_profile(gpu_class="any", tp=16)).text == "add a node with the engine e, 16 GPUs"
    one = a_host("n1", gpus=a_box(8, A100), fabrics=(a_fabric(),))
    assert the_unlock([one], a_profile(gpu_class="any", tp=16, nodes=2)).text == (
        "add a node to fabric ib-a with the engine e, 8 GPUs of class a100-40g"
    )
    assert the_unlock([], a_profile(gpu_class="any")).text == "add a node with the engine e, 1 GPU"


# Nodes that nothing is known of


@pytest.mark.parametrize(
    ("away", "text"),
    [
        (
            {"n1": Standing.SILENT},
            "wait for n1, or bring back what does not come: it has not come since the server started",
        ),
        (
            {"n2": Standing.LOST, "n1": Standing.SILENT},
            "wait for n1, n2, or bring back what does not come: they have not come since the server started",
        ),
    ],
)
def test_before_a_node_is_bought_those_that_there_were_are_waited_for(away: dict[str, Standing], text: str) -> None:
    names = {NodeId(name): standing for name, standing in away.items()}
    unlock = find_unlock(a_model(a_profile()), [], {}, 0.0, away=names)
    assert unlock is not None
    assert (unlock.text, unlock.node) == (text, "n1" if len(away) == 1 else None)
    assert unlock.steps[0].reasons == (Reason.NODE_SILENT,)


def test_what_asks_for_less_than_to_bring_a_node_back_is_said_all_the_same() -> None:
    hosts = [a_host(cordoned=True)]
    for away in ({NodeId("n2"): Standing.SILENT}, {NodeId("n2"): Standing.LOST}):
        unlock = find_unlock(a_model(a_profile()), hosts, {}, 0.0, away=away)
        assert unlock is not None
        assert unlock.text == "uncordon n1"
    assert find_unlock(a_model(), hosts, {}, 0.0, away=away) is None


def test_gpus_that_are_too_small_are_passed_over_for_booked_ones() -> None:
    gpus = (a_gpu("GPU-0", 0, H100, memory_gb=20.0), a_gpu("GPU-1", 1))
    unlock = the_unlock([a_host(gpus=gpus, booked={"GPU-1": R1})], a_profile(gpu_class=H100, gpu_memory_gb=60.0))
    assert unlock.text == "n1 needs 1 more free GPU: rep-x-1 holds 1"
    assert [step.reasons for step in unlock.steps] == [(Reason.NOT_ENOUGH_GPU_MEMORY,)]


def test_a_class_that_is_there_may_ask_for_more() -> None:
    hosts = [a_host("n1", gpus=a_box(2, A100), cordoned=True), a_host("n2", gpus=a_box(2), booked={"GPU-0": R1})]
    unlock = the_unlock(hosts, a_profile(gpu_class="mi300", tp=2, gpu_memory_gb=38.0))
    assert unlock.text == "write gpu_class: a100-40g (there is a100-40g, h100-80g); uncordon n1"
    assert unlock.node == "n1"


def test_a_smaller_change_is_preferred_whichever_profile_it_is_of() -> None:
    hosts = [a_host("n1", gpus=a_box(1), engines=())]
    unlock = the_unlock([*hosts, a_host("n2", cordoned=True)], a_profile("best", tp=4, priority=1), a_profile("plain"))
    assert (unlock.profile, unlock.node, unlock.text) == ("plain", "n2", "uncordon n2")


def test_of_equal_changes_the_better_profile_and_the_first_node_are_taken() -> None:
    hosts = [a_host("n1", cordoned=True), a_host("n2", cordoned=True)]
    unlock = the_unlock(hosts, a_profile("least"), a_profile("best", priority=1))
    assert (unlock.profile, unlock.node) == ("best", "n1")


def test_a_fabric_lacks_what_its_nodes_lack() -> None:
    def host(name: str, **facts: Any) -> Host:
        return a_host(name, **{"gpus": a_box(8, name=name), "fabrics": (a_fabric(),), **facts})

    pair = a_profile(tp=16, nodes=2)
    one, two = host("n1"), host("n2", cordoned=True)
    assert the_unlock([one, two], pair).text == "uncordon n2"
    down = host("n3", fabrics=(a_fabric(down="mlx5_0 has no port that is ACTIVE"),))
    assert the_unlock([one, down], pair).text == (
        "put fabric ib-a into service on n3 (mlx5_0 has no port that is ACTIVE)"
    )
    no_address = host("n3", fabrics=(a_fabric(address=None),))
    assert the_unlock([one, no_address], pair).text == "put fabric ib-a into service on n3 (it has no address there)"
    elsewhere = host("n3", fabrics=(a_fabric("ib-b"),))
    assert the_unlock([one, elsewhere], pair).text == "declare fabric ib-a in the agent.yaml of n3"
    assert the_unlock([one], pair).text == "add a node to fabric ib-a with the engine e, 8 GPUs of class h100-80g"
    both = the_unlock([host("n1", cordoned=True), host("n2", standing=Standing.SILENT)], pair)
    assert both.text == "uncordon n1; bring n2 back (its link is down)"
    assert both.node is None


def test_without_any_fabric_one_has_to_be_declared() -> None:
    hosts = [a_host(name, gpus=a_box(1, name=name)) for name in ("n1", "n2", "n3")]
    assert the_unlock(hosts, a_profile(tp=2, nodes=2)).text == (
        "declare fabric NAME in the agent.yaml of n1; declare fabric NAME in the agent.yaml of n2"
    )


def test_one_change_to_a_key_suits_all_nodes_of_a_group() -> None:
    def host(name: str, memory_gb: float, **facts: Any) -> Host:
        return a_host(name, memory_gb=memory_gb, fabrics=(a_fabric(),), **facts)

    pair = a_profile(nodes=2, min_memory_gb=16.5)
    for hosts in ([host("n1", 16.0), host("n2", 15.8)], [host("n1", 15.8), host("n2", 16.0)]):
        text = the_unlock(hosts, pair).text
        assert re.fullmatch(r"lower min_memory_gb to 15.8 \(n\d has 15.8 of 15.8 GB free\)", text)
    unlock = the_unlock([host("n1", 15.8), host("n2", 16.0, cordoned=True)], pair)
    assert unlock.text == "lower min_memory_gb to 15.8 (n1 has 15.8 of 15.8 GB free); uncordon n2"


def test_a_new_node_is_told_with_all_that_it_needs() -> None:
    profile = a_profile(tp=4, gpu_memory_gb=70.0, min_memory_gb=64.0, min_disk_gb=200.0, labels={"zone": "a"})
    assert the_unlock([], profile).text == (
        "add a node with the engine e, 4 GPUs with 70 GB, 64 GB of memory, 200 GB on disk, zone=a"
    )
    assert the_unlock([], a_profile(nodes=2)).text == "add 2 nodes to fabric NAME with the engine e"


def test_a_box_with_too_few_gpus_is_not_asked_to_grow() -> None:
    unlock = the_unlock([a_host(gpus=a_box(4))], a_profile(gpu_class=H100, tp=8))
    assert unlock.text == "add a node with the engine e, 8 GPUs of class h100-80g"


def test_a_model_without_profiles_can_not_be_unlocked() -> None:
    assert find_unlock(a_model(), [a_host()], {}, 0.0) is None


# Whatever the world is


@pytest.mark.slow
@given(worlds())
def test_the_change_gives_a_place_and_names_all_that_fails_there(world: World) -> None:
    verdict = place(world.model, world.hosts, world.backing_off, world.now)
    assume(isinstance(verdict, Rejected) and world.model.profiles)
    told = explain(world.model, world.hosts, world.backing_off, world.now)
    unlock = told.unlock
    assert unlock is not None
    assert unlock.text
    assert msgspec.to_builtins(unlock)["text"] == unlock.text
    assert isinstance(place_after(world, unlock), Placement)
    named = {as_told(reason) for step in unlock.steps for reason in step.reasons}
    for candidate in told.candidates:
        if candidate.profile == unlock.profile and candidate.nodes == (unlock.node,) and candidate.fabric is None:
            assert {as_told(rejection.reason) for rejection in candidate.rejections} <= named
    assert unlock == find_unlock(world.model, sorted(world.hosts, key=lambda host: host.id), world.backing_off, 10.0)


def as_told(reason: Reason) -> Reason:
    # Where it may be of any class, too little memory of one is made up for by bookings of another.
    return Reason.NOT_ENOUGH_GPUS if reason is Reason.NOT_ENOUGH_GPU_MEMORY else reason
