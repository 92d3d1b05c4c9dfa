from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import (
    A100,
    BROKEN,
    H100,
    PAIRS,
    SOURCE,
    World,
    a_box,
    a_fabric,
    a_gpu,
    a_host,
    a_model,
    a_profile,
    worlds,
)

from llmgw.core.costs import Score
from llmgw.core.filters import Need, describe, find_reasons, is_blind
from llmgw.core.hosts import Host, Standing, spare_gb
from llmgw.core.model import ANY_CLASS, ModelName, Profile
from llmgw.core.node import Disk, ForeignUse, NodeId
from llmgw.core.placement import (
    Assignment,
    Candidate,
    Explanation,
    Placement,
    Refusals,
    Rejected,
    Verdict,
    explain,
    place,
)
from llmgw.core.rejection import Reason, Rejection
from llmgw.core.replica import ReplicaId

N1, N2, N3 = NodeId("n1"), NodeId("n2"), NodeId("n3")
M = ModelName("m")
R1 = ReplicaId("rep-x-1")
HOLDS = frozenset([SOURCE])


def ask(hosts: Sequence[Host], *profiles: Profile) -> Verdict:
    return place(a_model(*profiles), hosts, {}, 0.0)


def ask_why(hosts: Sequence[Host], *profiles: Profile) -> Explanation:
    return explain(a_model(*profiles), hosts, {}, 0.0)


def test_nodes_that_nothing_is_known_of_are_told_for_each_profile() -> None:
    away = {N3: Standing.SILENT, N2: Standing.LOST}
    told = explain(a_model(a_profile("a"), a_profile("b", nodes=2)), [a_host("n1", cordoned=True)], {}, 0.0, away=away)
    assert [(each.profile, each.nodes, [no.reason for no in each.rejections]) for each in told.candidates] == [
        ("a", (N1,), [Reason.CORDONED]),
        ("a", (N2,), [Reason.NODE_LOST]),
        ("a", (N3,), [Reason.NODE_SILENT]),
        ("b", (N1,), [Reason.CORDONED, Reason.NO_FABRIC]),
        ("b", (N2,), [Reason.NODE_LOST]),
        ("b", (N3,), [Reason.NODE_SILENT]),
    ]
    assert told.unlock is not None
    assert told.unlock.text == "uncordon n1"


def the_placement(hosts: Sequence[Host], *profiles: Profile) -> Placement:
    verdict = ask(hosts, *profiles)
    assert isinstance(verdict, Placement)
    return verdict


def the_reasons(hosts: Sequence[Host], *profiles: Profile) -> list[tuple[str, Reason]]:
    verdict = ask(hosts, *profiles)
    assert isinstance(verdict, Rejected)
    return [(rejection.node, rejection.reason) for rejection in verdict.rejections]


def on_fabric(name: str, count: int = 8, **facts: Any) -> Host:
    return a_host(name, **{"gpus": a_box(count, name=f"{name}-"), "fabrics": (a_fabric(),), **facts})


# Where


def test_a_profile_without_demands_goes_to_a_node_that_has_its_engine() -> None:
    profile = a_profile()
    assert ask([a_host()], profile) == Placement(
        profile=profile,
        shards=(Assignment(node=N1),),
        score=Score(seconds=600.0, fetch_seconds=600.0),
    )


@pytest.mark.parametrize(("gpus", "given_to_it"), [(None, None), ((), None), (a_box(1), ())])
def test_a_node_has_its_gpus_hidden_from_what_needs_none(gpus: Any, given_to_it: Any) -> None:
    assert the_placement([a_host(gpus=gpus)], a_profile()).shards == (Assignment(node=N1, gpus=given_to_it),)


def test_gpus_are_given_by_uuid_in_the_order_of_their_indices() -> None:
    host = a_host(gpus=tuple(reversed(a_box(4))), booked={"GPU-0": R1})
    placement = the_placement([host], a_profile(gpu_class=H100, tp=2))
    assert placement.shards == (Assignment(node=N1, gpus=("GPU-1", "GPU-2")),)
    assert placement.node == N1


def test_two_full_nodes_of_a_fabric_carry_one_replica() -> None:
    hosts = [on_fabric("n2"), on_fabric("n3", booked={"n3-0": R1}), on_fabric("n1")]
    placement = the_placement(hosts, a_profile(tp=16, nodes=2))
    assert placement.fabric == "ib-a"
    assert [(shard.node, shard.gpus) for shard in placement.shards] == [
        ("n1", tuple(f"GPU-n1-{at}" for at in range(8))),
        ("n2", tuple(f"GPU-n2-{at}" for at in range(8))),
    ]
    assert the_placement(hosts, a_profile(tp=8, pp=2, nodes=2)).shards == placement.shards


def test_a_replica_never_spans_fabrics() -> None:
    hosts = [on_fabric("n1"), on_fabric("n2", fabrics=(a_fabric("ib-b"),)), a_host("n3", gpus=a_box(8))]
    verdict = ask(hosts, a_profile(tp=16, nodes=2))
    assert [(each.node, each.reason, each.detail) for each in verdict.rejections] == [
        ("n3", Reason.NO_FABRIC, "asks for 2 nodes of one fabric; none is declared in the agent.yaml of this one"),
        ("n1", Reason.NOT_ENOUGH_NODES, "needs 2 nodes of fabric ib-a; only n1 would do"),
        ("n2", Reason.NOT_ENOUGH_NODES, "needs 2 nodes of fabric ib-b; only n2 would do"),
    ]


def test_nodes_of_different_classes_are_not_a_group() -> None:
    hosts = [on_fabric("n1", 1), on_fabric("n2", gpus=(a_gpu("GPU-a", 0, A100),))]
    verdict = ask(hosts, a_profile(gpu_class=ANY_CLASS, tp=2, nodes=2))
    assert [each.detail for each in verdict.rejections] == [
        "needs 2 nodes of fabric ib-a; 2 would do, of different classes (a100-40g, h100-80g)"
    ] * 2


def test_several_nodes_may_carry_what_needs_no_gpu() -> None:
    hosts = [a_host("n1", fabrics=(a_fabric(),)), a_host("n2", fabrics=(a_fabric(),))]
    assert [shard.gpus for shard in the_placement(hosts, a_profile(nodes=2)).shards] == [None, None]
    assert the_reasons(hosts[:1], a_profile(nodes=2)) == [("n1", Reason.NOT_ENOUGH_NODES)]


def test_of_two_fabrics_the_one_is_taken_where_it_costs_less() -> None:
    hosts = [
        on_fabric("n1", fabrics=(a_fabric("ib-a"), a_fabric("ib-b"))),
        on_fabric("n2"),
        on_fabric("n3", fabrics=(a_fabric("ib-b"),), holds=HOLDS),
    ]
    placement = the_placement(hosts, a_profile(tp=16, nodes=2))
    assert (placement.fabric, [shard.node for shard in placement.shards]) == ("ib-b", ["n1", "n3"])
    # and a node that is on both is told of both
    verdict = ask([hosts[0]], a_profile(tp=16, nodes=2))
    assert [each.detail for each in verdict.rejections] == [
        "needs 2 nodes of fabric ib-a; only n1 would do; needs 2 nodes of fabric ib-b; only n1 would do"
    ]


def test_of_equal_nodes_the_first_by_id_is_taken() -> None:
    assert the_placement([a_host("n2"), a_host("n1")], a_profile()).node == N1


def test_the_profile_of_the_highest_priority_that_fits_is_taken_and_the_better_ones_say_why_not() -> None:
    best, good = a_profile("best", priority=2, gpu_class=H100), a_profile("good", priority=1)
    placement = the_placement([a_host("n2"), a_host("n1")], a_profile("least"), good, best)
    assert placement.profile is good
    assert [(no.node, no.profile, no.reason) for no in placement.rejections] == [
        ("n1", "best", Reason.NO_GPU),
        ("n2", "best", Reason.NO_GPU),
    ]


def test_profiles_of_equal_priority_are_tried_as_written() -> None:
    assert the_placement([a_host()], a_profile("first"), a_profile("second")).profile.name == "first"


def test_without_nodes_or_profiles_nothing_is_placed_and_nobody_is_to_blame() -> None:
    assert ask([], a_profile()) == Rejected()
    assert ask([a_host()]) == Rejected()


def test_a_node_that_failed_is_left_alone_until_its_time() -> None:
    verdict = place(a_model(a_profile()), [a_host()], {N1: 107.0}, 100.0)
    assert [each.detail for each in verdict.rejections] == ["the last try here failed; the next one is in 7 s"]
    assert isinstance(place(a_model(a_profile()), [a_host()], {N1: 107.0}, 107.0), Placement)


# What is known to go wrong elsewhere, by its symptom


def test_memory_that_another_program_holds_is_not_given_away_and_that_is_said() -> None:
    taken = a_gpu("GPU-ab12", foreign=(ForeignUse(memory_gb=72.0, pid=4711, name="python"),))
    other = a_gpu("GPU-cd34", 1)
    assert the_placement([a_host(gpus=(taken, other))], a_profile(gpu_class=H100)).shards[0].gpus == ("GPU-cd34",)
    verdict = ask([a_host(gpus=(taken,))], a_profile(gpu_class=H100))
    assert [(each.reason, each.detail) for each in verdict.rejections] == [
        (
            Reason.NOT_ENOUGH_GPU_MEMORY,
            "needs 72 GB on a GPU: GPU-ab12 has 8 of 80 GB: pid 4711 python holds 72 GB",
        )
    ]


def test_a_second_replica_of_two_nodes_is_not_put_on_those_of_the_first() -> None:
    hosts = [on_fabric(f"n{number}", 1) for number in range(1, 5)]
    profile = a_profile(tp=2, nodes=2)
    first = the_placement(hosts, profile)
    booked = {uuid: R1 for shard in first.shards for uuid in shard.gpus or ()}
    assert len(booked) == 2
    left = [replace(host, booked=booked) for host in hosts]
    second = the_placement(left, profile)
    assert not {shard.node for shard in first.shards} & {shard.node for shard in second.shards}
    booked |= {uuid: ReplicaId("rep-x-2") for shard in second.shards for uuid in shard.gpus or ()}
    full = [replace(host, booked=booked) for host in hosts]
    assert {reason for _, reason in the_reasons(full, profile)} == {Reason.NOT_ENOUGH_GPUS}


def test_a_model_that_is_pinned_to_a_lost_node_goes_nowhere_else_and_says_so() -> None:
    hosts = [a_host("n1", labels={"host": "n1"}), a_host("n4", labels={"host": "n4"}, standing=Standing.LOST)]
    told = ask_why(hosts, a_profile(labels={"host": "n4"}))
    assert told.placement is None
    assert [(each.nodes, each.rejections[0].reason) for each in told.candidates] == [
        (("n1",), Reason.LABELS_DIFFER),
        (("n4",), Reason.NODE_LOST),
    ]
    assert told.candidates[1].rejections[0].detail == (
        "the node is lost: see whether its agent runs and reaches the server; it has what is asked for, host=n4"
    )
    assert told.unlock is not None
    assert told.unlock.text == "bring n4 back (silent for its lease)"


@pytest.mark.parametrize("min_disk_gb", [None, 1.0, 500.0])
@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_weights_are_not_fetched_to_a_third_node_while_one_that_holds_them_fits(
    min_disk_gb: float | None, replicas: int
) -> None:
    disks = (Disk(path="/", free_gb=900.0, total_gb=1000.0),)
    profile = a_profile(gpu_class=H100, tp=3, min_disk_gb=min_disk_gb)
    holder: dict[str, Any] = {"disks": disks, "holds": HOLDS, "replicas": {M: replicas}}
    # everything else speaks for the empty one
    hosts = [
        a_host("n1", disks=disks, gpus=a_box(3)),
        a_host("n2", gpus=a_box(8, joined=PAIRS), **holder),
        a_host("n3", gpus=a_box(8, joined=PAIRS), **holder),
    ]
    assert the_placement(hosts, profile).node == N2
    hosts[1] = replace(hosts[1], cordoned=True)
    assert the_placement(hosts, profile).node == N3
    hosts[2] = replace(hosts[2], cordoned=True)
    assert the_placement(hosts, profile).node == N1


def test_gpus_that_change_their_indices_stay_booked_by_uuid() -> None:
    before = a_box(4)
    after = tuple(replace(gpu, index=3 - gpu.index) for gpu in before)
    booked = {"GPU-0": R1, "GPU-1": R1}
    for gpus in (before, after):
        (shard,) = the_placement([a_host(gpus=gpus, booked=booked)], a_profile(gpu_class=H100, tp=2)).shards
        assert set(shard.gpus or ()) == {"GPU-2", "GPU-3"}


A_GPU_HELD = a_gpu("GPU-ab12", foreign=(ForeignUse(memory_gb=72.0, pid=4711, name="python"),))
GOLDEN: list[tuple[dict[str, Any], dict[str, Any], Reason, str, str]] = [
    (
        {"standing": Standing.LOST},
        {},
        Reason.NODE_LOST,
        "the node is lost: see whether its agent runs and reaches the server",
        "bring n1 back (silent for its lease)",
    ),
    (
        {"standing": Standing.SILENT},
        {},
        Reason.NODE_SILENT,
        "the node is silent: its link is down, and its lease still runs",
        "bring n1 back (its link is down)",
    ),
    (
        {"cordoned": True},
        {},
        Reason.CORDONED,
        "an operator has cordoned it: llmgw ctl uncordon n1",
        "uncordon n1",
    ),
    (
        {"labels": {"zone": "b"}},
        {"labels": {"zone": "a"}},
        Reason.LABELS_DIFFER,
        "asks for zone=a; the node has zone=b",
        "label n1 zone=a",
    ),
    (
        {"outdated": True},
        {"tool_parser": "x", "env": {"A": "1"}},
        Reason.AGENT_OUTDATED,
        "its agent is of an older llmgw, which passes over tool_parser, env: upgrade it",
        "upgrade llmgw on n1 (it passes over tool_parser, env)",
    ),
    (
        {"engines": ()},
        {},
        Reason.NO_ENGINE,
        "no binary of the engine 'e' was found: install it where PATH finds it, or set engines.e.bin",
        "install e on n1, or set engines.e.bin in its agent.yaml",
    ),
    (
        {"engines": (BROKEN,)},
        {},
        Reason.ENGINE_BROKEN,
        "/usr/bin/e can't run e: libe.so.1 is missing",
        "mend /usr/bin/e on n1 (libe.so.1 is missing)",
    ),
    (
        {"gpus": ()},
        {"gpu_class": H100},
        Reason.NO_GPU,
        "asks for a GPU of class 'h100-80g'; the node reports no GPU",
        "add a node with the engine e, 1 GPU of class h100-80g",
    ),
    (
        {"gpus": (a_gpu("GPU-0", 0, A100), a_gpu("GPU-1", 1, H100))},
        {"gpu_class": "h100-94g"},
        Reason.WRONG_CLASS,
        "asks for a GPU of class 'h100-94g'; the node has a100-40g, h100-80g",
        "write gpu_class: a100-40g (there is a100-40g, h100-80g)",
    ),
    (
        {},
        {"nodes": 2},
        Reason.NO_FABRIC,
        "asks for 2 nodes of one fabric; none is declared in the agent.yaml of this one",
        "declare fabric NAME in the agent.yaml of n1; add a node to fabric NAME with the engine e",
    ),
    (
        {"fabrics": (a_fabric(down="mlx5_0 has no port that is ACTIVE"),)},
        {"nodes": 2},
        Reason.FABRIC_DOWN,
        "fabric ib-a is out of service here: mlx5_0 has no port that is ACTIVE",
        "put fabric ib-a into service on n1 (mlx5_0 has no port that is ACTIVE); "
        "add a node to fabric ib-a with the engine e",
    ),
    (
        {"gpus": a_box(4), "booked": {"GPU-0": R1, "GPU-1": R1}},
        {"gpu_class": H100, "tp": 4},
        Reason.NOT_ENOUGH_GPUS,
        "needs 4 GPUs of class h100-80g; 2 of 4 are free: rep-x-1 holds 2",
        "n1 needs 2 more free GPUs: rep-x-1 holds 2",
    ),
    (
        {"gpus": (A_GPU_HELD,)},
        {"gpu_class": H100, "gpu_memory_gb": 14.2},
        Reason.NOT_ENOUGH_GPU_MEMORY,
        "needs 14.2 GB on a GPU: GPU-ab12 has 8 of 80 GB: pid 4711 python holds 72 GB",
        "free 6.2 GB on n1's GPU-ab12 (pid 4711 python holds 72 GB)",
    ),
    (
        {"booked_gb": 6.5, "memory_foreign_gb": 2.0},
        {"min_memory_gb": 10.0},
        Reason.NOT_ENOUGH_MEMORY,
        "needs 10 GB of memory; 7.5 of 16 GB are free, 6.5 GB are booked by replicas, 2 GB are held by other programs",
        "free 2.5 GB of memory on n1 (replicas have booked 6.5 GB, other programs hold 2 GB)",
    ),
    (
        {"disks": (Disk(path="/", free_gb=5.0, total_gb=100.0),)},
        {"min_disk_gb": 20.0},
        Reason.NOT_ENOUGH_DISK,
        "needs 20 GB on disk; 5 of 100 GB are free at /",
        "free 15 GB at / on n1",
    ),
    (
        {"fabrics": (a_fabric(),)},
        {"nodes": 2},
        Reason.NOT_ENOUGH_NODES,
        "needs 2 nodes of fabric ib-a; only n1 would do",
        "add a node to fabric ib-a with the engine e",
    ),
    (
        {"backing_off": 12.0},
        {},
        Reason.BACKING_OFF,
        "the last try here failed; the next one is in 12 s",
        "wait 12 s: the last try on n1 failed",
    ),
]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: str(row[2]))
def test_a_refusal_names_its_cause_and_its_remedy(
    row: tuple[dict[str, Any], dict[str, Any], Reason, str, str],
) -> None:
    facts, demands, reason, detail, remedy = row
    backing_off = {N1: facts["backing_off"]} if "backing_off" in facts else {}
    host = a_host(**{key: value for key, value in facts.items() if key != "backing_off"})
    model = a_model(a_profile(**demands))
    verdict = place(model, [host], backing_off, 0.0)
    assert verdict.rejections == (Rejection(node="n1", profile="p", reason=reason, detail=detail),)
    told = explain(model, [host], backing_off, 0.0)
    assert [each.rejections for each in told.candidates] == [verdict.rejections]
    assert told.unlock is not None
    assert told.unlock.text == remedy


def test_there_is_a_golden_row_for_each_reason() -> None:
    assert [reason for _, _, reason, _, _ in GOLDEN if reason not in set(Reason)] == []
    assert {reason for _, _, reason, _, _ in GOLDEN} == set(Reason)


# Rejections


def test_reasons_are_counted_without_their_words_and_the_first_are_told_alone() -> None:
    hosts = [a_host("n1", cordoned=True), a_host("n2", cordoned=True), a_host("n3", engines=())]
    verdict = ask(hosts, a_profile())
    assert isinstance(verdict, Rejected)
    assert verdict.reasons() == {Reason.CORDONED: 2, Reason.NO_ENGINE: 1}
    assert verdict.first(2) == verdict.rejections[:2]
    assert verdict.rejections is verdict.rejections


def test_verdicts_of_the_same_facts_are_the_same() -> None:
    hosts = [a_host("n1", cordoned=True), a_host("n2", engines=())]
    assert ask(hosts, a_profile()) == ask(list(reversed(hosts)), a_profile())
    assert ask(hosts, a_profile()) != ask(hosts[:1], a_profile())
    assert Refusals() != ()


# Explained


def test_the_winner_and_the_runner_up_are_told_with_what_they_cost() -> None:
    hosts = [a_host("n1", replicas={M: 1}), a_host("n2", holds=HOLDS), a_host("n3", cordoned=True)]
    told = ask_why(hosts, a_profile())
    assert told.model == "m"
    assert told.placement == Placement(profile=a_profile(), shards=(Assignment(node=N2),))
    assert told.runner_up == Candidate(
        profile="p",
        nodes=(N1,),
        score=Score(seconds=660.0, fetch_seconds=600.0, crowding_seconds=60.0),
        gpus=(None,),
    )
    assert [(each.nodes, [no.reason for no in each.rejections]) for each in told.candidates] == [
        ((N1,), []),
        ((N2,), []),
        ((N3,), [Reason.CORDONED]),
    ]
    assert told.unlock is None


def test_the_runner_up_may_be_of_a_worse_profile_and_is_never_the_same_place() -> None:
    host = a_host("n1", gpus=(a_gpu("GPU-0", 0, H100), a_gpu("GPU-1", 1, A100)))
    best, worse = a_profile("best", priority=1, gpu_class=ANY_CLASS), a_profile("worse")
    told = ask_why([host, a_host("n2")], best, worse)
    assert told.placement is not None
    assert told.placement.shards[0].gpus == ("GPU-1",)
    assert told.runner_up is not None
    assert (told.runner_up.profile, told.runner_up.nodes) == ("worse", (N2,))
    assert ask_why([host], best, worse).runner_up is None


def test_each_fabric_is_told_with_the_group_that_would_do_or_with_all_that_is_lacking() -> None:
    hosts = [
        on_fabric("n1"),
        on_fabric("n2", cordoned=True, outdated=True),
        on_fabric("n3", holds=HOLDS),
        on_fabric("n4", fabrics=(a_fabric("ib-b"),)),
        on_fabric("n5", fabrics=(a_fabric("ib-b", down="no port is ACTIVE"),)),
        on_fabric("n6", fabrics=()),
    ]
    told = ask_why(hosts, a_profile(tp=16, nodes=2))
    assert told.placement is not None
    assert [(each.nodes, each.fabric, [no.reason for no in each.rejections]) for each in told.candidates] == [
        (("n1", "n3"), "ib-a", []),
        (("n2",), "ib-a", [Reason.CORDONED]),
        (("n4", "n5"), "ib-b", [Reason.NOT_ENOUGH_NODES, Reason.FABRIC_DOWN]),
        (("n6",), None, [Reason.NO_FABRIC]),
    ]
    assert told.candidates[0].score == told.placement.score == Score(seconds=600.0, fetch_seconds=600.0)
    assert told.candidates[0].gpus == tuple(shard.gpus for shard in told.placement.shards)
    assert told.runner_up is None


def test_the_runner_up_of_a_group_has_one_node_other() -> None:
    hosts = [on_fabric("n1"), on_fabric("n2"), on_fabric("n3", replicas={M: 1})]
    told = ask_why(hosts, a_profile(tp=16, nodes=2))
    assert told.runner_up is not None
    assert (told.runner_up.nodes, told.runner_up.fabric) == (("n1", "n3"), "ib-a")


def test_an_explanation_is_plain_data() -> None:
    for hosts in ([a_host("n1"), a_host("n2", cordoned=True)], [a_host("n1", cordoned=True)]):
        plain = msgspec.to_builtins(ask_why(hosts, a_profile()))
        assert msgspec.json.decode(msgspec.json.encode(plain))["model"] == "m"


# Whatever the world is


@pytest.mark.slow
@given(worlds(), st.randoms(use_true_random=False))
def test_a_placement_is_within_what_there_is_and_every_other_node_has_a_true_reason(world: World, random: Any) -> None:
    verdict = place(world.model, world.hosts, world.backing_off, world.now)
    shuffled = random.sample(world.hosts, len(world.hosts))
    assert verdict == place(world.model, shuffled, world.backing_off, world.now)
    hosts = {host.id: host for host in world.hosts}
    if isinstance(verdict, Rejected):
        assert len(verdict.rejections) == len(world.model.profiles) * len(hosts)
    else:
        check_placement(verdict, world, hosts)
    for rejection in verdict.rejections:
        host = hosts[NodeId(rejection.node)]
        profile = next(profile for profile in world.model.profiles if profile.name == rejection.profile)
        blind = is_blind(world.hosts)
        need = Need(model=world.model, profile=profile, backing_off=world.backing_off, now=world.now, blind=blind)
        found = find_reasons(need, host)
        assert rejection.detail
        if rejection.reason is Reason.NOT_ENOUGH_NODES:
            assert found == ()
        else:
            assert rejection.reason is found[0]
            assert rejection.detail == describe(found[0], need, host)


def check_placement(placement: Placement, world: World, hosts: dict[NodeId, Host]) -> None:
    profile = placement.profile
    nodes = [shard.node for shard in placement.shards]
    assert len(set(nodes)) == len(nodes) == profile.nodes
    assert nodes == sorted(nodes)
    classes = set()
    for shard in placement.shards:
        host = hosts[shard.node]
        gpus = {gpu.uuid: gpu for gpu in host.node.gpus or ()}
        assert host.standing is Standing.READY
        assert not host.cordoned
        assert profile.labels.items() <= host.labels.items()
        assert world.backing_off.get(host.id, 0.0) <= world.now
        assert (profile.min_memory_gb or 0.0) <= host.node.memory_gb - host.booked_gb
        assert profile.engine in {found.engine for found in host.node.engines}
        if profile.gpus == 0 or is_blind(world.hosts):
            assert shard.gpus == (() if gpus else None)
            continue
        assert shard.gpus is not None
        assert len(set(shard.gpus)) == len(shard.gpus) == profile.gpus_per_node
        for uuid in shard.gpus:
            gpu = gpus[uuid]
            assert uuid not in host.booked
            assert gpu.broken is None
            assert gpu.mig is None
            assert spare_gb(gpu) + 1e-6 >= (profile.gpu_memory_gb or 0.9 * gpu.memory_gb)
            classes.add(gpu.gpu_class)
    if profile.gpus and not is_blind(world.hosts):
        assert len(classes) == 1
        assert profile.gpu_class in (None, ANY_CLASS, *classes)
    if profile.nodes > 1:
        assert all(placement.fabric in hosts[node].fabrics for node in nodes)
    else:
        assert placement.fabric is None


@pytest.mark.slow
@given(worlds())
def test_what_is_explained_is_what_is_decided(world: World) -> None:
    verdict = place(world.model, world.hosts, world.backing_off, world.now)
    told = explain(world.model, world.hosts, world.backing_off, world.now)
    msgspec.json.encode(told)
    assert (told.placement is None) == isinstance(verdict, Rejected)
    assert (told.unlock is None) == (isinstance(verdict, Placement) or not world.model.profiles)
    if not isinstance(verdict, Placement):
        assert told.runner_up is None
        assert all(candidate.rejections for candidate in told.candidates)
        return
    assert told.placement == replace(verdict, _refusals=None)
    would_do = [
        candidate
        for candidate in told.candidates
        if candidate.score is not None and candidate.profile == verdict.profile.name
    ]
    assert all(candidate.rejections == () for candidate in would_do)
    nodes = tuple(shard.node for shard in verdict.shards)
    assert (nodes, verdict.score) in [(candidate.nodes, candidate.score) for candidate in would_do]
    assert verdict.score.seconds == min(candidate.score.seconds for candidate in would_do if candidate.score)
    if told.runner_up is not None and told.runner_up.profile == verdict.profile.name:
        assert told.runner_up.score is not None
        assert told.runner_up.score.seconds >= verdict.score.seconds


def test_where_nobody_looks_for_gpus_a_profile_that_takes_any_runs_with_what_is_there() -> None:
    profiles = (a_profile(tp=2), a_profile("q", gpu_class="any"))
    for profile in profiles:
        verdict = place(a_model(profile), [a_host(gpus=None)], {}, 0.0)
        assert isinstance(verdict, Placement)
        assert verdict.shards == (Assignment(node=NodeId("n1"), gpus=None),)
        told = explain(a_model(profile), [a_host(gpus=None)], {}, 0.0)
        assert told.placement is not None
        # but not beside nodes where somebody has
        verdict = place(a_model(profile), [a_host(gpus=None), a_host("n2", gpus=())], {}, 0.0)
        assert isinstance(verdict, Rejected)
        assert verdict.reasons() == {Reason.NO_GPU: 2}
    for profile in (a_profile(gpu_class="h100-80g"), a_profile(gpu_memory_gb=8.0)):
        verdict = place(a_model(profile), [a_host(gpus=None)], {}, 0.0)
        assert isinstance(verdict, Rejected)
