from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.node import NodeId
from llmgw.core.shares import MOST_BLOCKS, Shares

NAMES = [NodeId(f"n{number}") for number in range(6)]
groups = st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True)
counts = st.lists(st.integers(0, 600), min_size=1, max_size=4)


def deal(nodes: list[NodeId], files: list[int], *, ordered: tuple[int, ...] = ()) -> dict[NodeId, set[int]]:
    """The blocks of each."""
    found = {}
    for node in nodes:
        shares = Shares(node, "salt", files)
        for file in ordered:
            shares.read_in_order(file)
        others = tuple(other for other in nodes if other != node)
        shares.set_owners(others, others)
        found[node] = set(shares.list_own())
    return found


@given(groups, counts)
def test_each_block_is_exactly_ones(nodes: list[NodeId], files: list[int]) -> None:
    dealt = deal(nodes, files)
    blocks = [block for each in dealt.values() for block in each]
    assert sorted(blocks) == list(range(len(Shares(NAMES[0], "salt", files).blocks)))


@given(groups, counts)
def test_where_one_falls_away_only_its_blocks_move(nodes: list[NodeId], files: list[int]) -> None:
    before, after = deal(nodes, files), deal(nodes[1:], files)
    for node in nodes[1:]:
        assert after[node] >= before[node]
        assert after[node] - before[node] <= before[nodes[0]]


@given(counts)
def test_blocks_cover_all_places_once(files: list[int]) -> None:
    shares = Shares(NAMES[0], "salt", files)
    places = [place for block in shares.blocks for place in block]
    assert places == list(range(sum(files)))
    for file, count in enumerate(files):
        assert len(shares.places_of(file)) == count
        for piece in range(0, count, 37):
            place = shares.place(file, piece)
            assert shares.file_of(place) == file
            assert place in shares.blocks[shares.block_of(place)]
            assert shares.blocks_from(place)[-1] == shares.block_of(shares.places_of(file)[-1])


@given(st.integers(1, 40), st.integers(0, 400))
def test_however_many_files_there_are_the_blocks_are_not_many_more(files: int, pieces: int) -> None:
    shares = Shares(NAMES[0], "salt", [pieces] * files)
    assert len(shares.blocks) <= MOST_BLOCKS + files
    assert [place for block in shares.blocks for place in block] == list(range(files * pieces))


def test_a_file_that_is_read_in_order_is_one_nodes() -> None:
    dealt = deal(NAMES, [300, 300], ordered=(1,))
    blocks = set(Shares(NAMES[0], "salt", [300, 300]).blocks_from(300))
    assert sorted(len(each & blocks) for each in dealt.values()) == [0, 0, 0, 0, 0, len(blocks)]


def test_shares_are_about_equal() -> None:
    dealt = deal(NAMES, [2048])
    assert max(len(each) for each in dealt.values()) < 2 * min(len(each) for each in dealt.values())


def test_another_listing_is_dealt_otherwise() -> None:
    own = []
    for salt in ("one", "two"):
        shares = Shares(NAMES[0], salt, [256])
        shares.set_owners((NAMES[1],), (NAMES[1],))
        own.append(shares.list_own())
    assert own[0] != own[1]


def test_what_is_adopted_comes_after_what_is_ours_and_at_each_in_another_order() -> None:
    orders = []
    for node, other in ((NAMES[0], NAMES[1]), (NAMES[1], NAMES[0])):
        shares = Shares(node, "salt", [256])
        shares.set_owners((other,), (other,))
        ours = list(shares.list_own())
        shares.set_owners((), (other,))
        assert shares.are_ours
        assert shares.list_own()[: len(ours)] == ours
        orders.append(shares.list_own()[len(ours) :])
    assert sorted(orders[0] + orders[1]) == list(range(256))
    assert orders[0] != sorted(orders[0])


def test_each_begins_at_another_place() -> None:
    firsts = set()
    for node in NAMES:
        shares = Shares(node, "salt", [2048])
        others = tuple(other for other in NAMES if other != node)
        shares.set_owners(others, others)
        firsts.add(shares.list_own()[0] // 16)
    assert len(firsts) >= len(NAMES) - 2
    assert Shares(NAMES[0], "salt", [2048]).list_own() == list(range(256))
