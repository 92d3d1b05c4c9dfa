"""Who of those that fetch the same asks the origin for which part of it, so that all of it is asked for once.

Each part falls to the one whose hash with it is highest. Everybody comes to the same result without a word, and where
one falls away only its own parts move.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from llmgw.core.node import NodeId

# Parts are blocks of neighbouring pieces, so that one request brings several: so many in a file, of at most so many.
BLOCKS = 256
MOST_BLOCK_PIECES = 16


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
        for count in self.counts:
            self._first.append(self.total)
            self._file_block.append(len(self.blocks))
            step = min(max(count // BLOCKS, 1), MOST_BLOCK_PIECES)
            for start in range(self.total, self.total + count, step):
                stop = min(start + step, self.total + count)
                self._block_of.extend([len(self.blocks)] * (stop - start))
                self.blocks.append(range(start, stop))
            self.total += count
        self._weights: dict[NodeId, array[int]] = {}
        self.mine = self._weigh(me)
        self._ordered: set[int] = set()
        self._owners: tuple[NodeId, ...] = ()
        self._rivals: tuple[NodeId, ...] = ()
        self._owned: dict[int, bool] = {}
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
        known = self._owned.get(block)
        if known is None:
            known = self._owned[block] = self._is_highest(self._part_of(block), self._owners)
        return known

    def list_own(self) -> list[int]:
        """Our blocks, in the order in which to ask for them.

        Each of several begins at another place, so that what one has asked for before it knew of the others is not what
        they begin with. What falls to us because others are silent falls to everybody who finds them so: what is ours
        anyway comes first, and the rest at each in an order of its own.
        """
        if self._own_blocks is None:
            owned = [block for block in range(len(self.blocks)) if self.owns(block)]
            if self._rivals and self.blocks:
                begin = bisect_left(owned, self.mine[0] % len(self.blocks))
                owned = owned[begin:] + owned[:begin]
            if self._owners != self._rivals:
                ours = [block for block in owned if self._is_highest(self._part_of(block), self._rivals)]
                adopted = set(owned).difference(ours)
                owned = ours + sorted(adopted, key=self.mine.__getitem__, reverse=True)
            self._own_blocks = owned
        return self._own_blocks

    def _is_highest(self, part: int, others: tuple[NodeId, ...]) -> bool:
        mine = (self.mine[part], self._me)
        return all((self._weights[node][part], node) < mine for node in others)

    def _part_of(self, block: int) -> int:
        """The block that decides whose this one is."""
        if self._ordered and (file := self.file_of(self.blocks[block].start)) in self._ordered:
            return self._file_block[file]
        return block

    def _weigh(self, node: NodeId) -> array[int]:
        drawn = hashlib.shake_256(f"{self._salt}\n{node}".encode()).digest(8 * len(self.blocks))
        return array("Q", drawn)

    def _deal(self) -> None:
        self._owned.clear()
        self._own_blocks = None
