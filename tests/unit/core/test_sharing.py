"""Who is told of whom, as nodes begin to fetch, have all of it, and go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmgw.core.node import FabricFound, Node, NodeId
from llmgw.core.sharing import (
    MOST_FETCHING,
    MOST_RELAYED,
    MOST_WHOLE,
    MOST_WHOLE_RELAYED,
    Sharing,
    count_once,
    find_copies,
    find_free,
)
from llmgw.core.weights import RELAY, Cached, Fetch, NodeWeights, Phase, Swarm

HUB, OTHER = "hf:org/repo/a.gguf", "hf:org/repo/b.gguf"
URL = "https://models.internal/a.gguf"


def a_node(name: str, *fabrics: str, down: str | None = None) -> Node:
    found = tuple(FabricFound(name=fabric, address="10.1.0.1", down=down) for fabric in fabrics)
    return Node(id=NodeId(name), cores=4, cpu_flags=frozenset(), memory_gb=16.0, memory_available_gb=8.0, fabrics=found)


def has(*commits: str, source: str = HUB, seed: str | None = "10.0.0.1:7444", in_use: bool = False) -> NodeWeights:
    """A node that has these, the last one fetched last."""
    cached = tuple(
        Cached(source=source, commit=commit, size_bytes=10, fetched_at=float(at), in_use=in_use)
        for at, commit in enumerate(commits)
    )
    return NodeWeights(seed=seed, cached=cached)


def fetches(
    commit: str | None = None,
    *,
    source: str = HUB,
    seed: str | None = "10.0.0.2:7444",
    phase: Phase = Phase.FETCHING,
    pull: int | None = None,
    done_bytes: int = 0,
) -> NodeWeights:
    fetch = Fetch(source=source, phase=phase, commit=commit, pull=pull, done_bytes=done_bytes)
    return NodeWeights(seed=seed, fetches=(fetch,))


def share(
    weights: Mapping[str, NodeWeights],
    *,
    seeds: bool = True,
    relays: bool = False,
    on: Mapping[str, str] | None = None,
) -> Sharing:
    """What follows once all of these have spoken; ``on`` says who is on which fabric."""
    sharing = Sharing(seeds=seeds, relays=relays)
    sharing.allow(frozenset({HUB, OTHER, URL}))
    for name, said in weights.items():
        fabric = (on or {}).get(name)
        sharing.see(a_node(name, *([fabric] if fabric else [])))
        sharing.report(NodeId(name), said)
    settle(sharing)
    return sharing


def settle(sharing: Sharing) -> set[str]:
    changed = set()
    while not sharing.settled:
        changed |= set(sharing.settle(1))
    return changed


def told(sharing: Sharing, name: str) -> list[tuple[str | None, list[str]]]:
    """The commit and the members of each swarm; those that have all of it are marked."""
    return [
        (swarm.commit, [f"{member.node}{'*' if member.whole else ''}" for member in swarm.members])
        for swarm in sharing.swarms(NodeId(name))
    ]


def test_nobody_is_told_anything_while_nobody_fetches() -> None:
    sharing = share({"n1": has("c1"), "n2": has("c1")})
    assert told(sharing, "n1") == told(sharing, "n2") == []


def test_who_fetches_and_who_has_all_of_it_know_each_other() -> None:
    sharing = share({"n1": has("c1"), "n2": fetches("c1"), "n3": fetches("c1"), "n4": has("c2", source=OTHER)})
    expected = [("c1", ["n1*", "n2", "n3"])]
    assert [told(sharing, name) for name in ("n1", "n2", "n3", "n4")] == [expected, expected, expected, []]
    (swarm,) = sharing.swarms(NodeId("n2"))
    assert [member.seed for member in swarm.members] == ["10.0.0.1:7444", "10.0.0.2:7444", "10.0.0.2:7444"]


def test_the_end_of_the_last_fetch_ends_the_swarm() -> None:
    sharing = share({"n1": has("c1"), "n2": fetches("c1")})
    sharing.report(NodeId("n2"), has("c1"))
    assert settle(sharing) == {"n1", "n2"}
    assert told(sharing, "n1") == told(sharing, "n2") == []


def test_how_far_a_fetch_is_changes_nothing() -> None:
    sharing = share({"n1": has("c1"), "n2": fetches("c1")})
    sharing.report(NodeId("n2"), fetches("c1", done_bytes=5))
    assert sharing.settled


def test_only_what_has_changed_is_looked_at() -> None:
    sharing = share({"n1": fetches("c1"), "n2": fetches("c9", source=OTHER)})
    sharing.report(NodeId("n2"), fetches("c8", source=OTHER))
    assert sharing.settle(10) == ["n2"]
    assert sharing.settled


def test_so_many_sources_are_looked_at_in_one_turn() -> None:
    sharing = Sharing()
    sharing.allow(frozenset({HUB, OTHER}))
    settle(sharing)
    sharing.see(a_node("n1"))
    sharing.report(NodeId("n1"), NodeWeights(fetches=(*fetches("a").fetches, *fetches("b", source=OTHER).fetches)))
    assert sharing.settle(1) == ["n1"]
    assert len(sharing.swarms(NodeId("n1"))) == 1
    assert not sharing.settled


def test_who_has_none_yet_takes_the_newest_that_a_node_has() -> None:
    sharing = share({"n1": has("c1", "c2"), "n2": fetches(None, phase=Phase.RESOLVING)})
    assert told(sharing, "n2") == [("c2", ["n1*", "n2"])]


def test_else_it_takes_what_most_others_fetch() -> None:
    weights = {"n1": fetches("c1"), "n2": fetches("c2"), "n3": fetches("c2"), "n4": fetches(None)}
    assert told(share(weights), "n4") == [("c2", ["n2", "n3", "n4"])]


def test_while_nobody_knows_the_commit_those_that_ask_for_it_know_each_other() -> None:
    assert told(share({"n1": fetches(None), "n2": fetches(None)}), "n1") == [(None, ["n1", "n2"])]


def test_who_was_told_to_have_the_newest_takes_no_older_one() -> None:
    sharing = share({"n1": has("c1"), "n2": fetches(None, pull=7), "n3": fetches(None, pull=7)})
    assert told(sharing, "n2") == [(None, ["n2", "n3"])]
    sharing.report(NodeId("n3"), fetches("c2", pull=7))
    settle(sharing)
    assert told(sharing, "n2") == [("c2", ["n2", "n3"])]


def test_an_address_gives_only_what_it_has_now() -> None:
    """A commit that only a node without a seed has can't be had from anybody any more."""
    without = {"n1": has("c1", source=URL, seed=None), "n2": fetches(None, source=URL)}
    assert told(share(without), "n2") == [(None, ["n2"])]
    given = {"n1": has("c1", source=URL), "n2": fetches(None, source=URL)}
    assert told(share(given), "n2") == [("c1", ["n1*", "n2"])]


def test_of_two_commits_each_has_its_own_swarm_and_the_one_that_a_node_fetches_comes_first() -> None:
    weights = {
        "n1": NodeWeights(seed="10.0.0.1:1", cached=has("c1").cached, fetches=fetches("c2").fetches),
        "n2": fetches("c1"),
        "n3": fetches("c2"),
    }
    sharing = share(weights)
    assert told(sharing, "n1") == [("c2", ["n1", "n3"]), ("c1", ["n1*", "n2"])]
    assert told(sharing, "n2") == [("c1", ["n1*", "n2"])]


def test_of_two_sources_each_ends_by_itself_and_nothing_of_it_is_left() -> None:
    both = fetches("c1").fetches + fetches("c1", source=OTHER).fetches
    sharing = share({"n1": NodeWeights(seed="10.0.0.1:1", fetches=both)})
    sharing.report(NodeId("n1"), fetches("c1", source=OTHER))
    settle(sharing)
    assert [swarm.source for swarm in sharing.swarms(NodeId("n1"))] == [OTHER]
    sharing.report(NodeId("n1"), NodeWeights())
    settle(sharing)
    assert (sharing.swarms(NodeId("n1")), sharing._on, sharing._of, sharing._swarms) == ((), {}, {}, {})


def test_of_a_node_that_nobody_knows_nothing_is_lost_or_forgotten() -> None:
    sharing = share({"n1": has("c1")})
    sharing.lose(NodeId("n1"))
    settle(sharing)
    sharing.lose(NodeId("n1")), sharing.lose(NodeId("n2")), sharing.forget(NodeId("n2"))
    assert sharing.settled


def test_one_that_is_away_is_nobodys_member_until_it_is_back() -> None:
    sharing = share({"n1": has("c1"), "n2": fetches("c1"), "n3": fetches("c1")})
    sharing.lose(NodeId("n1"))
    sharing.lose(NodeId("n3"))
    settle(sharing)
    assert (told(sharing, "n1"), told(sharing, "n2")) == ([], [("c1", ["n2"])])
    sharing.see(a_node("n1"))
    settle(sharing)
    assert told(sharing, "n2") == [("c1", ["n1*", "n2"])]


def test_one_that_was_removed_is_forgotten() -> None:
    sharing = share({"n1": has("c1"), "n2": fetches("c1")})
    sharing.forget(NodeId("n2"))
    settle(sharing)
    sharing.see(a_node("n2"))
    settle(sharing)
    assert told(sharing, "n1") == told(sharing, "n2") == []


def test_what_waits_for_another_program_takes_and_gives_nothing() -> None:
    sharing = share({"n1": fetches("c1"), "n2": fetches("c1", phase=Phase.QUEUED)})
    assert (told(sharing, "n1"), told(sharing, "n2")) == ([("c1", ["n1"])], [])


def test_only_what_the_catalog_or_an_order_names_is_shared() -> None:
    sharing = share({"n1": has("c1"), "n2": fetches("c1")})
    sharing.allow(frozenset({OTHER}))
    settle(sharing)
    assert told(sharing, "n1") == told(sharing, "n2") == []


def test_without_seeding_nobody_can_be_taken_from() -> None:
    sharing = share({"n1": has("c1"), "n2": fetches("c1")}, seeds=False)
    (swarm,) = sharing.swarms(NodeId("n2"))
    assert (swarm.commit, [(member.node, member.seed) for member in swarm.members]) == ("c1", [("n2", None)])
    assert told(sharing, "n1") == []


def test_who_has_it_and_can_not_be_asked_is_not_told_either() -> None:
    sharing = share({"n1": has("c1", seed=None), "n2": fetches(None)})
    assert (told(sharing, "n1"), told(sharing, "n2")) == ([], [("c1", ["n2"])])


def test_each_fabric_fetches_for_itself_and_takes_from_who_has_it_anywhere() -> None:
    weights = {"a1": fetches("c1"), "a2": fetches("c1"), "b1": fetches("c1"), "b2": has("c1"), "n": fetches("c1")}
    sharing = share(weights, on={"a1": "ib-a", "a2": "ib-a", "b1": "ib-b", "b2": "ib-b"})
    assert told(sharing, "a1") == [("c1", ["a1", "a2", "b2*"])]
    assert told(sharing, "b1") == [("c1", ["b1", "b2*"])]
    assert told(sharing, "n") == [("c1", ["b2*", "n"])]
    assert told(sharing, "b2") == [("c1", ["a1", "a2", "b2*"]), ("c1", ["b1", "b2*"]), ("c1", ["b2*", "n"])]


def test_a_fabric_that_is_out_of_service_is_none() -> None:
    sharing = share({"n1": fetches("c1")})
    sharing.see(a_node("n1", "ib-a", down="no link"))
    settle(sharing)
    assert sharing.swarms(NodeId("n1"))[0].members[0].fabrics == ()
    sharing.see(a_node("n1", "ib-a"))
    settle(sharing)
    assert sharing.swarms(NodeId("n1"))[0].members[0].fabrics == ("ib-a",)


def test_of_very_many_each_is_told_of_some() -> None:
    count = 3 * MOST_FETCHING
    weights = {f"n{number:03}": fetches("c1") for number in range(count)}
    weights |= {f"w{number:03}": has("c1") for number in range(2 * MOST_WHOLE)}
    sharing = share(weights)
    swarms: set[Swarm] = set()
    for name in weights:
        swarms |= set(sharing.swarms(NodeId(name)))
    assert len(swarms) == 3
    for swarm in swarms:
        whole = [member.node for member in swarm.members if member.whole]
        assert (len(swarm.members), len(whole)) == (MOST_FETCHING + MOST_WHOLE, MOST_WHOLE)
        # Who may be asked by a node has been told of it.
        assert all(swarm in sharing.swarms(member.node) for member in swarm.members)


def test_who_fetches_stays_among_the_same_whoever_goes() -> None:
    weights = {f"n{number:03}": fetches("c1") for number in range(2 * MOST_FETCHING)}
    sharing = share(weights)
    last = f"n{2 * MOST_FETCHING - 1:03}"
    before = told(sharing, last)
    sharing.report(NodeId("n000"), NodeWeights())
    changed = settle(sharing)
    assert told(sharing, last) == before
    assert len(changed) == MOST_FETCHING


def test_whole_ones_of_the_own_fabric_are_preferred() -> None:
    weights = {f"b{number:03}": has("c1") for number in range(2 * MOST_WHOLE)} | {"z": has("c1"), "n": fetches("c1")}
    on = dict.fromkeys(weights, "ib-b") | {"z": "ib-a", "n": "ib-a"}
    assert "z*" in told(share(weights, on=on), "n")[0][1]


def test_what_no_source_names_and_nobody_uses_can_be_freed() -> None:
    weights = has("old", "new")
    (free,) = find_free([HUB], {NodeId("n1"): weights})[NodeId("n1")]
    assert free.commit == "old"
    assert [each.commit for each in find_free([], {NodeId("n1"): weights})[NodeId("n1")]] == ["old", "new"]
    assert find_free([], {NodeId("n1"): has("c1", in_use=True)}) == {}


def test_what_a_shard_of_another_machine_uses_is_kept_on_a_folder_that_both_have() -> None:
    one, other = has("c1"), has("c1", in_use=True)
    shared = {
        NodeId("n1"): NodeWeights(cached=one.cached, shared=True),
        NodeId("n2"): NodeWeights(cached=other.cached, shared=True),
    }
    assert find_free([], shared) == {}
    own = NodeWeights(cached=tuple(replace(each, fetched_at=7.0) for each in one.cached))
    assert list(find_free([], {**shared, NodeId("n3"): own})) == ["n3"]


def test_what_a_shard_of_another_agent_uses_is_kept_in_the_folder_of_both_on_one_machine() -> None:
    one, other = has("c1"), has("c1", in_use=True)
    assert find_free([], {NodeId("n1"): one, NodeId("n2"): other}) == {}


def test_what_a_shard_may_run_by_that_is_not_known_to_have_ended_is_kept_in_the_folder_of_its_node() -> None:
    n1, n2, n3 = map(NodeId, ("n1", "n2", "n3"))
    runs = {n1: frozenset({HUB})}
    own = NodeWeights(cached=tuple(replace(each, fetched_at=7.0) for each in has("c1").cached))
    # What it runs by was not told any more: it may be each.
    nodes = {n1: has("c1", "c2"), n2: has("c1", "c2"), n3: own}
    assert list(find_free([], nodes, runs)) == ["n3"]
    assert list(find_free([], nodes)) == ["n1", "n2", "n3"]
    shared = {node: replace(weights, shared=True) for node, weights in nodes.items()}
    assert find_free([], shared, runs) == {}
    # It was told: only that, and what the next launch takes.
    first, second, third = has("c1", "c2", "c3").cached
    nodes[n1] = NodeWeights(cached=(first, replace(second, in_use=True), third))
    assert find_free([], {**nodes, n2: has("c1", "c2", "c3")}, runs) == {n1: (first,), n2: (first,), n3: own.cached}


def test_what_a_shard_runs_by_that_its_node_has_told_nothing_of_is_kept_everywhere() -> None:
    n1, n2 = NodeId("n1"), NodeId("n2")
    runs = {n1: frozenset({HUB})}
    assert find_free([], {n2: has("c1")}, runs) == {}
    assert find_free([], {n1: NodeWeights(), n2: has("c1")}, runs) == {}
    # It was still on its way.
    assert list(find_free([], {n1: fetches(), n2: has("c1")}, runs)) == ["n2"]


def test_what_is_gone_as_far_as_the_node_sees_that_uses_it_is_kept_by_its_commit() -> None:
    (cached,) = has("c1").cached
    gone = replace(cached, size_bytes=0, fetched_at=0.0, in_use=True, whole=False, wrong="its files are gone")
    nodes = {
        NodeId("n1"): NodeWeights(cached=(gone,)),
        NodeId("n2"): NodeWeights(cached=(replace(cached, fetched_at=7.0),)),
    }
    assert find_free([], nodes) == {}


def test_what_several_have_in_one_folder_is_freed_by_one_of_them() -> None:
    names = [NodeId(f"n{number}") for number in range(1, 5)]
    (cached,) = has("c1").cached
    own = NodeWeights(cached=(replace(cached, fetched_at=7.0),))
    for is_shared in (True, False):
        # (two agents of one machine have one on a disk that nobody else writes to)
        here = NodeWeights(cached=(cached,), shared=is_shared)
        nodes = dict(zip(names, (here, here, own, replace(here, cached=has("c2").cached)), strict=True))
        free = find_free([], nodes)
        assert list(count_once(free, names)) == ["n1", "n3", "n4"]
        assert sorted(count_once(free, names[1:])) == ["n2", "n3", "n4"]
        assert sorted(count_once(free, ())) == ["n1", "n3", "n4"]
        copies = {node: list(of.values()) for node, of in find_copies(nodes).items()}
        assert copies == {"n1": [("n2",)], "n2": [("n1",)]}


def test_what_was_fetched_at_another_moment_lies_in_another_folder() -> None:
    (cached,) = has("c1").cached
    later = replace(cached, fetched_at=cached.fetched_at + 0.5)
    nodes = {
        NodeId("n1"): NodeWeights(cached=(cached,), shared=True),
        NodeId("n2"): NodeWeights(cached=(later,), shared=True),
    }
    assert find_copies(nodes) == {}
    assert len(count_once(find_free([], nodes), ())) == 2


def seeds_of(sharing: Sharing, name: str) -> dict[str, str | None]:
    (swarm,) = sharing.swarms(NodeId(name))
    return {member.node: member.seed for member in swarm.members}


def test_by_relay_all_are_taken_from_through_the_server() -> None:
    sharing = share({"n1": has("c1", seed=None), "n2": fetches("c1", seed=None), "n3": fetches("c1")}, relays=True)
    assert seeds_of(sharing, "n2") == {"n1": RELAY, "n2": RELAY, "n3": RELAY}


def test_by_relay_nodes_of_one_fabric_reach_each_other_where_they_have_an_address() -> None:
    weights = {
        "n1": fetches("c1", seed="10.1.0.1:7444"),
        "n2": fetches("c1", seed="10.1.0.2:7444"),
        "n3": fetches("c1", seed=None),
        "n4": has("c1", seed="10.2.0.4:7444"),
        "n5": has("c1", seed="10.1.0.5:7444"),
    }
    sharing = share(weights, relays=True, on={"n1": "ib0", "n2": "ib0", "n3": "ib0", "n4": "ib1", "n5": "ib0"})
    expected = {"n1": "10.1.0.1:7444", "n2": "10.1.0.2:7444", "n3": RELAY, "n4": RELAY, "n5": "10.1.0.5:7444"}
    assert seeds_of(sharing, "n1") == expected


def test_a_node_is_reached_in_one_way_from_its_fabric_and_in_another_from_elsewhere() -> None:
    weights = {"n1": has("c1", seed="10.1.0.1:7444"), "n2": fetches("c1"), "n3": fetches("c1")}
    sharing = share(weights, relays=True, on={"n1": "ib0", "n2": "ib0", "n3": "ib1"})
    assert seeds_of(sharing, "n2")["n1"] == "10.1.0.1:7444"
    assert seeds_of(sharing, "n3")["n1"] == RELAY


def test_by_relay_few_are_told_of_each_other() -> None:
    fetching = {f"n{number:02}": fetches("c1", seed=None) for number in range(3 * MOST_RELAYED)}
    whole = {f"w{number:02}": has("c1", seed=None) for number in range(2 * MOST_WHOLE_RELAYED)}
    sharing = share({**fetching, **whole}, relays=True)
    for name in fetching:
        ((_, members),) = told(sharing, name)
        assert len(members) == MOST_RELAYED + MOST_WHOLE_RELAYED


def test_by_relay_an_address_gives_what_any_node_has() -> None:
    weights = {"n1": has("c1", source=URL, seed=None), "n2": fetches(None, source=URL, seed=None)}
    assert told(share(weights, relays=True), "n2") == [("c1", ["n1*", "n2"])]
