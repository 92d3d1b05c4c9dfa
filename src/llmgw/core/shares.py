"""Who of those that fetch the same asks the origin for which part of it, so that all of it is asked for once.

Each part falls to the one whose hash with it is highest. Everybody comes to the same result without a word, and where
one falls away only its own parts move.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import ge

from llmgw.core.node import NodeId

# Parts are blocks of neighbouring pieces, so that one request brings several: so many in a file, of at most so many,
# and longer ones where all files have many together: each is weighed for each node.
BLOCKS = 256
MOST_BLOCK_PIECES = 16
MOST_BLOCKS = 1024
WEIGHT_BITS = 32


class Shares:
    """The pieces of all files of a listing, counted through as places, and which of their blocks are ours. ``salt``
    names the listing, and is the same on every node."""

    def __init__(self, me: NodeId, salt: str, counts: Sequence[int]) -> None:
        self._me = me
        self._salt = salt
        self.counts = tuple(counts)
        # The first place and the first block of each file.
        self._first: list[int] = []
        self._file_block: list[int] = []
        self.blocks: list[range] = []
        self._block_of = array("L")
        self.total = 0
        least = -(-sum(self.counts) // MOST_BLOCKS)
        for count in self.counts:
            self._first.append(self.total)
            self._file_block.append(len(self.blocks))
            step = max(min(count // BLOCKS, MOST_BLOCK_PIECES), least, 1)
            for start in range(self.total, self.total + count, step):
                stop = min(start + step, self.total + count)
                self._block_of.extend(array("L", [len(self.blocks)]) * (stop - start))
                self.blocks.append(range(start, stop))
            self.total += count
        self._weights: dict[NodeId, array[int]] = {}
        self.mine = self._weigh(me)
        self._ordered: set[int] = set()
        self._owners: tuple[NodeId, ...] = ()
        self._rivals: tuple[NodeId, ...] = ()
        # A byte for each block: whether it is ours among the owners, and whether it would be among all rivals.
        self._owned: bytearray | None = None
        self._ours = bytearray()
        self._own_blocks: list[int] | None = None

    def place(self, file: int, piece: int) -> int:
        return self._first[file] + piece

    def file_of(self, place: int) -> int:
        return bisect_right(self._first, place) - 1

    def places_of(self, file: int) -> range:
        return range(self._first[file], self._first[file] + self.counts[file])

    def block_of(self, place: int) -> int:
        return self._block_of[place]

    def blocks_from(self, place: int) -> range:
        """The blocks from this place to the end of its file."""
        file = self.file_of(place)
        end = self._file_block[file + 1] if file + 1 < len(self._file_block) else len(self.blocks)
        return range(self._block_of[place], end)

    def is_in_order(self, file: int) -> bool:
        return file in self._ordered

    def read_in_order(self, file: int) -> None:
        """From now on this file is one part: its origin sends it from its first byte on only."""
        self._ordered.add(file)
        self._deal()

    def set_owners(self, owners: tuple[NodeId, ...], rivals: tuple[NodeId, ...]) -> None:
        """Who, beside us, has shares now; ``rivals``: who has them as soon as it is heard of again."""
        if (owners, rivals) == (self._owners, self._rivals):
            return
        self._owners, self._rivals = owners, rivals
        for node in [node for node in self._weights if node not in owners and node not in rivals]:
            del self._weights[node]
        for node in (*owners, *rivals):
            if node not in self._weights:
                self._weights[node] = self._weigh(node)
        self._deal()

    @property
    def are_ours(self) -> bool:
        """Nobody else has any."""
        return not self._owners

    def owns(self, block: int) -> bool:
        return bool((self._owned or self._compare())[block])

    def list_own(self) -> list[int]:
        """Our blocks, in the order in which to ask for them.

        Each of several begins at another place, so that what one has asked for before it knew of the others is not what
        they begin with. What falls to us because others are silent falls to everybody who finds them so: what is ours
        anyway comes first, and the rest at each in an order of its own.
        """
        if self._own_blocks is None:
            owned = [block for block, is_owned in enumerate(self._owned or self._compare()) if is_owned]
            if self._rivals and self.blocks:
                begin = bisect_left(owned, self.mine[0] % len(self.blocks))
                owned = owned[begin:] + owned[:begin]
            if self._owners != self._rivals:
                ours = [block for block in owned if self._ours[block]]
                adopted = set(owned).difference(ours)
                owned = ours + sorted(adopted, key=self.mine.__getitem__, reverse=True)
            self._own_blocks = owned
        return self._own_blocks

    def _compare(self) -> bytearray:
        """Which blocks are ours. Where two draw the same, both have it: better twice than never."""
        highest = self._highest([], self._owners)
        owned = self._owned = self._choose(highest)
        fallen = tuple(node for node in self._rivals if node not in self._owners)
        self._ours = self._choose(self._highest([highest], fallen)) if fallen else owned
        return owned

    def _highest(self, known: list[Sequence[int]], nodes: tuple[NodeId, ...]) -> Sequence[int]:
        """The highest that any of these draws, for each block; ``known`` are others' already."""
        drawn = [*known, *(self._weights[node] for node in nodes)]
        return list(map(max, *drawn)) if len(drawn) > 1 else drawn[0] if drawn else bytes(len(self.blocks))

    def _choose(self, highest: Sequence[int]) -> bytearray:
        chosen = bytearray(map(ge, self.mine, highest))
        for file in self._ordered:
            blocks = self.blocks_from(self._first[file])
            chosen[blocks.start : blocks.stop] = bytes([chosen[blocks.start]]) * len(blocks)
        return chosen

    def _weigh(self, node: NodeId) -> array[int]:
        drawn = hashlib.shake_256(f"{self._salt}\n{node}".encode()).digest(WEIGHT_BITS // 8 * len(self.blocks))
        return array("I", drawn)

    def _deal(self) -> None:
        self._owned = None
        self._own_blocks = None
