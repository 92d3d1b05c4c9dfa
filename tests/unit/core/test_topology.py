from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import PAIRS, QUADS, SWITCH, a_box, a_fabric, a_host

from llmgw.core.hosts import Host
from llmgw.core.replica import ReplicaId
from llmgw.core.topology import Pick, islands, pick_gpus


def test_nodes_of_one_fabric_are_an_island() -> None:
    one, two = a_host("n1", fabrics=(a_fabric("ib-a"),)), a_host("n2", fabrics=(a_fabric("ib-a"), a_fabric("ib-b")))
    assert islands([one, two, a_host("n3")]) == {"ib-a": (one, two), "ib-b": (two,)}


def test_a_node_where_the_fabric_is_down_is_not_on_the_island() -> None:
    down = a_host("n1", fabrics=(a_fabric("ib-a", down="no port is ACTIVE"),))
    no_address = a_host("n2", fabrics=(a_fabric("ib-a", address=None),))
    assert islands([down, no_address]) == {}


def test_no_nodes_are_no_islands() -> None:
    assert islands([]) == {}


def pick(host: Host, count: int, tp: int | None = None) -> Pick:
    return pick_gpus(host.links, (1 << len(host.free)) - 1, count, count if tp is None else tp)


def a_host_with(count: int, joined: tuple[tuple[int, ...], ...] | None, booked: tuple[int, ...] = ()) -> Host:
    gpus = a_box(count, joined=joined)
    return a_host(gpus=gpus, booked={gpus[index].uuid: ReplicaId("r") for index in booked})


def indices(host: Host, found: Pick) -> list[int]:
    return [host.free[place].index for place in found.places]


@pytest.mark.parametrize(
    ("joined", "booked", "asked", "taken", "straddling"),
    [
        # behind a switch the lowest will do
        (SWITCH, (), (2, 2), [0, 1], 0),
        (SWITCH, (0, 3), (4, 4), [1, 2, 4, 5], 0),
        # a pair that lost one card is no place for two, and the right one for one
        (PAIRS, (0,), (2, 2), [2, 3], 0),
        (PAIRS, (2,), (1, 1), [3], 0),
        # the smallest part that is enough: quads stay whole
        (((0, 1, 2, 3), (4, 5)), (), (2, 2), [4, 5], 0),
        (QUADS, (0, 1), (2, 2), [2, 3], 0),
        (QUADS, (0,), (4, 4), [4, 5, 6, 7], 0),
        # each TP group by itself
        (PAIRS, (0,), (4, 2), [2, 3, 4, 5], 0),
        (QUADS, (), (8, 4), [0, 1, 2, 3, 4, 5, 6, 7], 0),
        (QUADS, (0, 4), (6, 3), [1, 2, 3, 5, 6, 7], 0),
        # of groups that end elsewhere the whole shard is one
        (QUADS, (), (4, 8), [0, 1, 2, 3], 0),
        (SWITCH, (), (6, 4), [0, 1, 2, 3, 4, 5], 0),
        # no part is enough: whole ones rather than halves
        (PAIRS, (1,), (4, 4), [2, 3, 4, 5], 1),
        (PAIRS, (1, 5), (3, 3), [0, 2, 3], 1),
        (((0, 1, 2), (3, 4), (5, 6)), (7,), (4, 4), [3, 4, 5, 6], 1),
        # where that does not come out, one is halved: the smallest
        (PAIRS, (), (3, 3), [0, 1, 2], 1),
        (((0, 1, 2, 3), (4, 5, 6)), (7,), (5, 5), [0, 1, 2, 3, 4], 1),
        ((), (), (2, 2), [0, 1], 1),
        ((), (), (2, 1), [0, 1], 0),
        # nobody knows: the lowest
        (None, (0,), (4, 2), [1, 2, 3, 4], 0),
    ],
)
def test_which_gpus_a_shard_takes(
    joined: tuple[tuple[int, ...], ...] | None,
    booked: tuple[int, ...],
    asked: tuple[int, int],
    taken: list[int],
    straddling: int,
) -> None:
    host = a_host_with(8, joined, booked)
    found = pick(host, *asked)
    assert (indices(host, found), found.straddling) == (taken, straddling)


def test_only_what_is_usable_is_taken() -> None:
    host = a_host_with(8, PAIRS)
    assert pick_gpus(host.links, 0b11100110, 2, 2) == Pick((6, 7), 0)


def test_a_group_is_not_cut_out_of_the_middle_of_a_chain() -> None:
    # 2 - 0 - 1 - 3: the two that look nearest would leave both ends alone
    chain = (0b0110, 0b1001, 0b0001, 0b0010)
    assert pick_gpus(chain, 0b1111, 4, 2) == Pick((0, 2, 1, 3), 0)


def test_a_group_has_as_many_links_as_can_be() -> None:
    # A ring of four with one that hangs on it: 0-1-2-3-0 and 0-4; and 1-3 are joined across.
    links = (0b11010, 0b01101, 0b01010, 0b00111, 0b00001)
    assert set(pick_gpus(links, 0b11111, 3, 3).places) == {0, 1, 3}


BOXES = st.sampled_from([SWITCH, PAIRS, QUADS, (), ((0, 1, 2, 3), (4, 5), (6, 7)), None])


def is_joined(host: Host, group: tuple[int, ...]) -> bool:
    """By the book: from the first one all others are reached without leaving the group."""
    assert host.links is not None
    reached, edge = {group[0]}, [group[0]]
    while edge:
        here = edge.pop()
        new = {other for other in group if host.links[here] >> other & 1} - reached
        reached |= new
        edge += new
    return reached == set(group)


def most_joined(host: Host, free: tuple[int, ...], size: int, count: int) -> int:
    """How many joined groups can be had at once, by trying all."""
    if count == 0:
        return 0
    best = 0
    for group in combinations(free, size):
        if is_joined(host, group):
            rest = tuple(place for place in free if place > group[0] and place not in group)
            best = max(best, 1 + most_joined(host, rest, size, count - 1))
            if best == count:
                break
    return best


@pytest.mark.slow
@given(BOXES, st.sets(st.integers(0, 7), max_size=6), st.integers(1, 4), st.integers(1, 3), st.data())
def test_no_group_straddles_where_a_joined_one_could_be_had(
    joined: tuple[tuple[int, ...], ...] | None, booked: set[int], tp: int, groups: int, data: st.DataObject
) -> None:
    host = a_host_with(8, joined, tuple(booked))
    count = tp * groups
    free = len(host.free)
    if count > free:
        count = groups = tp = data.draw(st.integers(1, free))
        groups = 1
    found = pick(host, count, tp)
    assert len(set(found.places)) == count
    assert all(place < free for place in found.places)
    if host.links is None:
        assert found == Pick(tuple(range(count)), 0)
        return
    taken = [found.places[at : at + tp] for at in range(0, count, tp)]
    straddling = sum(not is_joined(host, group) for group in taken)
    assert straddling == found.straddling
    assert groups - straddling == most_joined(host, tuple(range(free)), tp, groups)


@pytest.mark.slow
@given(st.lists(st.integers(0, 63), min_size=6, max_size=6), st.integers(1, 63), st.data())
def test_one_group_is_joined_in_whatever_box_has_such_a_one(rows: list[int], usable: int, data: st.DataObject) -> None:
    links = [0] * 6
    for one in range(6):
        for other in range(6):
            if one != other and (rows[one] >> other & 1 or rows[other] >> one & 1):
                links[one] |= 1 << other
    count = data.draw(st.integers(1, usable.bit_count()))
    found = pick_gpus(tuple(links), usable, count, count)
    host = a_host_with(6, ())
    object.__setattr__(host, "links", tuple(links))
    assert all(usable >> place & 1 for place in found.places)
    free = tuple(place for place in range(6) if usable >> place & 1)
    assert (found.straddling == 0) == any(is_joined(host, group) for group in combinations(free, count))
    assert is_joined(host, found.places) == (found.straddling == 0)
