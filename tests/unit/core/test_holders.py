from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.holders import Holders

TOTAL = 40
# Of up to five members what each holds, and whether it goes.
members = st.lists(st.tuples(st.sets(st.integers(0, TOTAL - 1)), st.booleans()), max_size=5)
places = st.sets(st.integers(0, TOTAL - 1))


def mark(held: set[int]) -> bytearray:
    return bytearray(place in held for place in range(TOTAL))


def make(holding: list[set[int]], here: set[int]) -> Holders:
    holders = Holders(TOTAL)
    holders.take_out(here)
    for held in holding:
        for place in held:
            holders.add(place, 1)
    return holders


@given(members, places, places)
def test_whoever_goes_it_is_as_if_they_had_never_been_there(
    told: list[tuple[set[int], bool]], here: set[int], lost: set[int]
) -> None:
    holders = make([held for held, _ in told], here)
    for place in sorted(here & lost):
        holders.put_back(place)
    rest = [held for held, goes in told if not goes]
    holders.drop([mark(held) for held, goes in told if goes], [mark(held) for held in rest])
    missing = set(range(TOTAL)) - (here - lost)
    assert [holders[place] for place in range(TOTAL)] == [sum(place in held for held in rest) for place in range(TOTAL)]
    assert list(holders.list_bare(range(TOTAL))) == sorted(missing - set().union(*rest))
    assert set(holders.list_missing_of(mark(lost))) == missing & lost


@given(members, places, places, st.integers(0, TOTAL), st.integers(0, TOTAL))
def test_what_is_bare_is_found_within_its_bounds(
    told: list[tuple[set[int], bool]], here: set[int], held: set[int], start: int, stop: int
) -> None:
    holding = [each for each, _ in told]
    holders = make(holding, here)
    bare = [place for place in range(start, stop) if place not in here and not any(place in each for each in holding)]
    assert list(holders.list_bare(range(start, stop))) == bare
    assert holders.has_bare(range(start, stop)) == bool(bare)
    assert list(holders.list_bare_of(mark(held), range(start, stop))) == [place for place in bare if place in held]


def test_what_one_no_longer_holds_is_bare_again_unless_it_is_here() -> None:
    holders = make([{0, 1}, {1}], {2})
    for place in (0, 1, 2):
        holders.add(place, 1)
        holders.add(place, -1)
    holders.add(0, -1)
    assert list(holders.list_bare(range(4))) == [0, 3]


def test_what_both_have_is_found_though_neither_has_what_the_other_begins_with() -> None:
    holders = make([], set(range(TOTAL)) - {0, 5, 9})
    assert list(holders.list_missing_of(mark({3, 5, 7}))) == [5]
    assert list(holders.list_missing_of(mark({10}))) == []
