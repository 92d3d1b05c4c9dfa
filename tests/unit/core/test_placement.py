from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import Disk, EngineFound, Node, NodeId
from llmgw.core.placement import Placement, Rejected, place
from llmgw.core.rejection import Reason, Rejection

N1, N2 = NodeId("n1"), NodeId("n2")


def a_node(
    name: str = "n1", memory_gb: float = 16.0, engines: tuple[str, ...] = ("e",), disks: tuple[Disk, ...] = ()
) -> Node:
    return Node(
        id=NodeId(name),
        cores=4,
        cpu_flags=frozenset(),
        memory_gb=memory_gb,
        memory_available_gb=memory_gb / 2,
        disks=disks,
        engines=tuple(EngineFound(engine=engine, program=(f"/usr/bin/{engine}",)) for engine in engines),
    )


def a_profile(name: str = "p", **facts: object) -> Profile:
    return Profile(**{"name": name, "engine": "e", **facts})  # type: ignore[arg-type]


def a_model(*profiles: Profile) -> Model:
    return Model(name=ModelName("m"), source="/m.gguf", profiles=profiles)


def the_rejection(profile: Profile, node: Node, booked_gb: float = 0.0, until: float = 0.0) -> Rejection:
    verdict = place(a_model(profile), [node], {node.id: booked_gb}, {node.id: until}, now=100.0)
    assert isinstance(verdict, Rejected)
    (rejection,) = verdict.rejections
    assert (rejection.node, rejection.profile) == (node.id, profile.name)
    return rejection


def test_a_profile_without_demands_goes_to_a_node_that_has_its_engine() -> None:
    profile = a_profile()
    assert place(a_model(profile), [a_node()], {}, {}, 0.0) == Placement(node=N1, profile=profile)


def test_a_profile_with_an_environment_of_its_own_may_find_the_libraries() -> None:
    profile = a_profile(env={"LD_LIBRARY_PATH": "/opt/lib"})
    lacking = replace(BROKEN, missing_libraries=("libe.so.1",))
    assert place(a_model(profile), [replace(a_node(), engines=(lacking,))], {}, {}, 0.0) == Placement(
        node=N1, profile=profile
    )
    assert the_rejection(a_profile(), replace(a_node(), engines=(lacking,))).reason is Reason.ENGINE_BROKEN
    # Nothing else is mended by one.
    assert the_rejection(profile, replace(a_node(), engines=(BROKEN,))).reason is Reason.ENGINE_BROKEN


def test_without_nodes_or_profiles_nothing_is_placed_and_nobody_is_to_blame() -> None:
    assert place(a_model(a_profile()), [], {}, {}, 0.0) == Rejected()
    assert place(a_model(), [a_node()], {}, {}, 0.0) == Rejected()


def test_a_node_without_the_binary_is_told_what_to_do() -> None:
    rejection = the_rejection(a_profile(), a_node(engines=("f",)))
    assert rejection.reason is Reason.NO_ENGINE
    assert rejection.detail == (
        "no binary of the engine 'e' was found: install it where PATH finds it, or set engines.e.bin"
    )


BROKEN = EngineFound(engine="e", program=("/usr/bin/e",), checked=True, broken="libe.so.1 is missing")


def test_a_binary_that_can_not_start_is_told_with_its_path_and_why() -> None:
    rejection = the_rejection(a_profile(), replace(a_node(), engines=(BROKEN,)))
    assert rejection.reason is Reason.ENGINE_BROKEN
    assert rejection.detail == "/usr/bin/e can't run e: libe.so.1 is missing"


def test_another_engine_of_the_same_node_can_still_run() -> None:
    node = replace(a_node(engines=("f",)), engines=(BROKEN, EngineFound(engine="f", program=("/usr/bin/f",))))
    verdict = place(a_model(a_profile("p", priority=1), a_profile("q", engine="f")), [node], {}, {}, 0.0)
    assert isinstance(verdict, Placement)
    assert (verdict.node, verdict.profile.name) == (N1, "q")
    assert [(no.profile, no.reason) for no in verdict.rejections] == [("p", Reason.ENGINE_BROKEN)]


def test_another_node_with_that_engine_can_still_run_it() -> None:
    nodes = [replace(a_node("n1", memory_gb=64.0), engines=(BROKEN,)), a_node("n2", memory_gb=8.0)]
    verdict = place(a_model(a_profile()), nodes, {}, {}, 0.0)
    assert isinstance(verdict, Placement)
    assert verdict.node == N2


@pytest.mark.parametrize(
    "found",
    [
        replace(BROKEN, broken=None),
        replace(BROKEN, broken=None, checked=False),
        replace(BROKEN, broken=None, problems=("--x is deprecated",), version="1.2"),
    ],
)
def test_what_is_not_known_to_be_broken_is_tried(found: EngineFound) -> None:
    assert isinstance(place(a_model(a_profile()), [replace(a_node(), engines=(found,))], {}, {}, 0.0), Placement)


def test_a_class_of_gpu_is_not_found_on_a_node_without_any() -> None:
    rejection = the_rejection(a_profile(gpu_class="h100-80g"), a_node())
    assert rejection.reason is Reason.NO_GPU
    assert "'h100-80g'" in rejection.detail


def test_booked_memory_is_not_free() -> None:
    rejection = the_rejection(a_profile(min_memory_gb=10.0), a_node(memory_gb=16.0), booked_gb=6.5)
    assert rejection.reason is Reason.NOT_ENOUGH_MEMORY
    assert rejection.detail == "needs 10 GB of memory; 9.5 of 16 GB are free, 6.5 GB are booked by replicas"


def test_memory_that_just_fits_fits() -> None:
    verdict = place(a_model(a_profile(min_memory_gb=10.0)), [a_node(memory_gb=16.0)], {N1: 6.0}, {}, 0.0)
    assert isinstance(verdict, Placement)


def test_a_node_that_shrank_has_nothing_free_rather_than_less() -> None:
    rejection = the_rejection(a_profile(min_memory_gb=1.0), a_node(memory_gb=4.0), booked_gb=6.0)
    assert "0 of 4 GB are free" in rejection.detail


def test_the_fullest_disk_must_do() -> None:
    disks = (
        Disk(path="/", free_gb=5.0, total_gb=100.0),
        Disk(path="/data", free_gb=50.0, total_gb=100.0),
    )
    rejection = the_rejection(a_profile(min_disk_gb=20.0), a_node(disks=disks))
    assert rejection.reason is Reason.NOT_ENOUGH_DISK
    assert rejection.detail == "needs 20 GB on disk; 5 of 100 GB are free at /"
    verdict = place(a_model(a_profile(min_disk_gb=5.0)), [a_node(disks=disks)], {}, {}, 0.0)
    assert isinstance(verdict, Placement)


def test_an_unknown_disk_is_not_room() -> None:
    rejection = the_rejection(a_profile(min_disk_gb=1.0), a_node())
    assert rejection.reason is Reason.NOT_ENOUGH_DISK
    assert "reports no disk" in rejection.detail


def test_a_node_that_failed_is_left_alone_until_its_time() -> None:
    rejection = the_rejection(a_profile(), a_node(), until=107.0)
    assert rejection.reason is Reason.BACKING_OFF
    assert rejection.detail.endswith("in 7 s")
    assert isinstance(place(a_model(a_profile()), [a_node()], {}, {N1: 107.0}, 107.0), Placement)


@pytest.mark.parametrize(
    ("demands", "reason"),
    [
        ({"engine": "f", "gpu_class": "x", "min_memory_gb": 99.0, "min_disk_gb": 1.0}, Reason.NO_ENGINE),
        ({"gpu_class": "x", "min_memory_gb": 99.0, "min_disk_gb": 1.0}, Reason.NO_GPU),
        ({"min_memory_gb": 99.0, "min_disk_gb": 1.0}, Reason.NOT_ENOUGH_MEMORY),
        ({"min_disk_gb": 1.0}, Reason.NOT_ENOUGH_DISK),
    ],
)
def test_of_several_reasons_the_most_lasting_is_named(demands: dict[str, object], reason: Reason) -> None:
    assert the_rejection(a_profile(**demands), a_node(), until=107.0).reason is reason


def test_a_broken_engine_is_named_before_what_passes_by_itself() -> None:
    demands = a_profile(gpu_class="x", min_memory_gb=99.0, min_disk_gb=1.0)
    assert the_rejection(demands, replace(a_node(), engines=(BROKEN,)), until=107.0).reason is Reason.ENGINE_BROKEN


def test_the_node_with_the_most_memory_left_is_preferred() -> None:
    nodes = [a_node("n1", memory_gb=16.0), a_node("n2", memory_gb=14.0)]
    one = place(a_model(a_profile()), nodes, {}, {}, 0.0)
    other = place(a_model(a_profile()), nodes, {N1: 4.0}, {}, 0.0)
    assert isinstance(one, Placement)
    assert isinstance(other, Placement)
    assert (one.node, other.node) == (N1, N2)


def test_of_equal_nodes_the_first_by_id_is_taken() -> None:
    verdict = place(a_model(a_profile()), [a_node("n2"), a_node("n1")], {}, {}, 0.0)
    assert isinstance(verdict, Placement)
    assert verdict.node == N1


def test_the_profile_of_the_highest_priority_that_fits_is_taken_and_the_better_ones_say_why_not() -> None:
    best = a_profile("best", priority=2, gpu_class="h100-80g")
    good = a_profile("good", priority=1)
    verdict = place(a_model(a_profile("least"), good, best), [a_node("n1"), a_node("n2")], {}, {}, 0.0)
    assert isinstance(verdict, Placement)
    assert verdict.profile is good
    assert [(no.node, no.profile, no.reason) for no in verdict.rejections] == [
        ("n1", "best", Reason.NO_GPU),
        ("n2", "best", Reason.NO_GPU),
    ]


def test_profiles_of_equal_priority_are_tried_as_written() -> None:
    verdict = place(a_model(a_profile("first"), a_profile("second")), [a_node()], {}, {}, 0.0)
    assert isinstance(verdict, Placement)
    assert verdict.profile.name == "first"


PROFILES = st.builds(
    Profile,
    name=st.sampled_from(["p", "q", "r"]),
    engine=st.sampled_from(["e", "f"]),
    priority=st.integers(0, 2),
    gpu_class=st.sampled_from([None, None, None, "x"]),
    min_memory_gb=st.none() | st.integers(0, 20).map(float),
    min_disk_gb=st.none() | st.integers(0, 20).map(float),
)
NODES = st.lists(
    st.builds(
        a_node,
        name=st.sampled_from(["n1", "n2", "n3", "n4"]),
        memory_gb=st.integers(0, 20).map(float),
        engines=st.sampled_from([("e",), ("e", "f"), ()]),
        disks=st.lists(
            st.builds(Disk, path=st.just("/"), free_gb=st.integers(0, 20).map(float), total_gb=st.just(20.0)),
            max_size=2,
        ).map(tuple),
    ),
    max_size=4,
    unique_by=lambda node: node.id,
)
GB_BY_NODE = st.dictionaries(st.sampled_from([N1, N2, NodeId("n3")]), st.integers(0, 20).map(float))


@given(st.lists(PROFILES, max_size=3).map(tuple), NODES, GB_BY_NODE, GB_BY_NODE)
def test_a_placement_always_fits_and_every_other_candidate_has_its_reason(
    profiles: tuple[Profile, ...], nodes: list[Node], booked: dict[NodeId, float], backing_off: dict[NodeId, float]
) -> None:
    model = a_model(*profiles)
    verdict = place(model, nodes, booked, backing_off, 10.0)
    assert verdict == place(model, list(reversed(nodes)), booked, backing_off, 10.0)
    assert all(rejection.detail for rejection in verdict.rejections)
    if isinstance(verdict, Rejected):
        assert len(verdict.rejections) == len(profiles) * len(nodes)
        return
    (node,) = (node for node in nodes if node.id == verdict.node)
    assert (verdict.profile.min_memory_gb or 0.0) <= max(node.memory_gb - booked.get(node.id, 0.0), 0.0)
    assert verdict.profile.engine in {found.engine for found in node.engines}
    assert verdict.profile.gpu_class is None
    assert backing_off.get(node.id, 0.0) <= 10.0
    assert all(disk.free_gb >= (verdict.profile.min_disk_gb or 0.0) for disk in node.disks)
    better = [profile for profile in profiles if profile.priority > verdict.profile.priority]
    assert len(verdict.rejections) >= len(better) * len(nodes)


def test_an_agent_that_would_pass_over_what_is_asked_for_gets_none_of_it() -> None:
    outdated = replace(a_node(), outdated=True)
    plain, demanding = a_profile(), a_profile("q", env={"A": "1"}, tool_parser="x", priority=1)
    rejection = the_rejection(demanding, outdated)
    assert rejection.reason is Reason.AGENT_OUTDATED
    assert rejection.detail == ("its agent is of an older llmgw, which passes over tool_parser, env: upgrade it")
    # a profile that asks for nothing of the kind runs there, and an agent of now takes the other
    verdict = place(a_model(plain, demanding), [outdated], {}, {}, 0.0)
    assert isinstance(verdict, Placement)
    assert verdict.profile is plain
    assert place(a_model(demanding), [outdated, a_node("n2")], {}, {}, 0.0).node == N2  # type: ignore[union-attr]
