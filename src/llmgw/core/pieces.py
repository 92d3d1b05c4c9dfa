"""Which piece of a source is taken from whom next: from members of the swarm, or from the origin.

Among members that sit close together each piece has one that asks the origin for it, and the others wait for that one
(``shares``). What several have is taken where it is, the rarest piece first.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import islice
from statistics import median
from typing import TypeAlias

from llmgw.core.asked import PATIENCE_SECONDS, Line, Peer, Run, Take
from llmgw.core.holders import MOST_HOLDERS, Holders
from llmgw.core.node import NodeId
from llmgw.core.shares import WEIGHT_BITS, Shares
from llmgw.core.weights import RELAY, Member

# Transfers from members at a time.
MOST_OF_ALL = 8
# With those that have run for PATIENCE_SECONDS: they stand in nobody's way, for who is asked first may be the slowest.
MOST_AT_ONCE = 2 * MOST_OF_ALL
# Who takes so many times as long as others is asked when nobody else is free, and of its line to the origin a new one
# is made.
MUCH_SLOWER = 4
# Requests to the origin at a time, and how long they are: the first ones short, for others may just be coming to share
# in it, and what is cut off then has come in vain.
MOST_LINES = 4
FIRST_RUN_PIECES = 2
MOST_RUN_PIECES = 64

# For how long a member loses its share that brings nothing, one that can't be reached is not asked, and one that lies
# is left alone.
SUSPENDED_SECONDS = 60.0
AWAY_SECONDS = 60.0
SHUNNED_SECONDS = 600.0
# How long a member is left in peace that has too much to do.
REST_SECONDS = 0.5
# For so long a transfer is left to itself before somebody else is asked for the same.
SECOND_ASK_SECONDS = 2.0

# Of so many pieces it is looked up again how rare they are by now, to choose one, and so many are passed over that have
# come from elsewhere.
MOST_LOOKS = 100
MOST_PASSED = 300
# So many keys of those that went are given back to the memory at a time: to free a million is long work too.
MOST_SWEPT = 5000

Place: TypeAlias = tuple[int, int]

# In a heap the place is the last part of a key.
_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1


class Pieces:
    """What of one listing is there, asked for and missing. ``counts``: how many pieces each file has; ``salt`` names
    the listing, and is the same on every node. ``now`` of all methods is in seconds of one clock that only grows."""

    def __init__(self, me: NodeId, salt: str, counts: Sequence[int], done: Iterable[Place] = ()) -> None:
        self._me = me
        self._shares = Shares(me, salt, counts)
        total = self._shares.total
        self._holders = Holders(total)
        self._missing = self._holders.missing
        # Who is asked for a piece, since when; None is the origin.
        self._asked: dict[int, dict[NodeId | None, float]] = {}
        # Which request holds a piece, and how far those are that run.
        self._reserved: dict[int, Run] = {}
        self._lines: dict[Run, Line] = {}
        # How many requests run for each file.
        self._runs: Counter[int] = Counter()
        # The hash of what is missing and was told of.
        self._claims: dict[int, str] = {}
        # Missing pieces that no member is believed in, and what each says of them.
        self._doubted: dict[int, dict[NodeId, str]] = {}
        self._peers: dict[NodeId, Peer] = {}
        self._turns = 0
        self._busy = 0
        # How long members took for a piece.
        self._times: deque[float] = deque(maxlen=16)
        # What everybody holds that has said nothing yet, and heaps that nobody needs.
        self._nothing = bytes(total)
        self._litter: list[list[int]] = []
        self._seeding = False
        self._longest = FIRST_RUN_PIECES
        self._asking_since: float | None = None
        self._gaps: deque[float] = deque(maxlen=8)
        self._holders.take_out(self._shares.place(file, piece) for file, piece in done)
        self._left = self._missing.count(1)

    # What is so

    @property
    def left(self) -> int:
        """How many pieces are missing."""
        return self._left

    def is_done(self, file: int, piece: int) -> bool:
        return not self._missing[self._shares.place(file, piece)]

    def is_in_order(self, file: int) -> bool:
        return self._shares.is_in_order(file)

    def list_there(self, now: float) -> tuple[Member, ...]:
        """The members that can be asked now what they have."""
        return tuple(peer.member for peer in self._peers.values() if peer.is_there(now))

    def has_others(self, now: float) -> bool:
        """Whether any of them is likely to answer."""
        return any(peer.is_there(now) and not peer.passed_over for peer in self._peers.values())

    # What happens

    def set_members(self, members: Iterable[Member], now: float) -> None:
        """Who is in the swarm from now on. Without an entry of our own everybody counts as near: nothing is to be asked
        twice only because the others have not heard of us yet."""
        listed = tuple(members)
        own = next((member for member in listed if member.node == self._me), None)
        self._seeding = own is not None and own.seed is not None and not own.whole
        seeding = (member for member in listed if member.node != self._me and member.seed is not None)
        others = {member.node: member for member in islice(seeding, MOST_HOLDERS)}
        nears = {
            node: own is None or bool(set(own.fabrics or ("",)) & set(member.fabrics or ("",)))
            for node, member in others.items()
        }
        gone = [node for node in self._peers if node not in others]
        self._forget(
            *(self._peers[node] for node in gone),
            *(
                peer
                for node, peer in self._peers.items()
                if node in others and (peer.near, peer.member.seed) != (nears[node], others[node].seed)
            ),
        )
        for node in gone:
            self._busy -= len(self._peers.pop(node).takes)
        for node, member in others.items():
            if (peer := self._peers.get(node)) is None:
                peer = self._peers[node] = Peer(
                    member=member, near=nears[node], brought_at=now, asked=self._draw(node), held=self._nothing
                )
            peer.member, peer.near = member, nears[node]
        self._deal(now)

    def hear(self, node: NodeId, news: Iterable[tuple[int, int, str]], now: float) -> None:
        """A member says that it has these pieces now. What can't be is passed over."""
        peer = self._peers.get(node)
        if peer is None or not peer.is_there(now):
            return
        counts = self._shares.counts
        for file, piece, digest in news:
            if not (0 <= file < len(counts) and 0 <= piece < counts[file]):
                continue
            # Also what is not needed from it shows that it gets on.
            peer.brought_at = max(peer.brought_at, now)
            place = self._shares.place(file, piece)
            if not self._missing[place] or peer.held[place]:
                continue
            claimed = self._claims.setdefault(place, digest)
            if claimed != digest:
                self._doubt(place)
            if place in self._doubted:
                self._doubted[place][node] = digest
                continue
            if not isinstance(peer.held, bytearray):
                peer.held = bytearray(peer.held)
            peer.held[place] = 1
            peer.offers += 1
            if peer.near:
                self._holders.add(place, 1)
                heappush(peer.heap, self._key(place))

    def got(self, file: int, piece: int, node: NodeId | None = None, now: float = 0.0) -> None:
        """A piece is on the disk, from a member or (None) from elsewhere; who else is asked for it is so in vain."""
        place = self._shares.place(file, piece)
        if self._missing[place]:
            self._holders.take_out([place])
            self._left -= 1
            self._doubted.pop(place, None)
            self._claims.pop(place, None)
            for peer in self._peers.values():
                peer.offers -= peer.held[place]
        if node is not None:
            if (bringer := self._peers.get(node)) is not None:
                bringer.brought_at = max(bringer.brought_at, now)
                bringer.refused_since = None
                if (since := bringer.takes.get(place)) is not None:
                    self._rate(bringer, now - since, now)
        elif self._asking_since is not None:
            gap = now - self._asking_since
            self._gaps.append(gap)
            self._asking_since = now
            if gap > PATIENCE_SECONDS / 2:
                # The origin was silent, and so was everybody who asks it.
                self.excuse_all(now)

    def compare(self, file: int, piece: int, digest: str) -> tuple[NodeId, ...]:
        """Which members have said that this missing piece is another one than the origin sent."""
        place = self._shares.place(file, piece)
        told = dict(self._doubted.get(place, {}))
        if (claimed := self._claims.get(place)) is not None:
            told |= {node: claimed for node, peer in self._peers.items() if peer.held[place]}
        return tuple(node for node, said in told.items() if said != digest)

    def lost(self, file: int, piece: int) -> None:
        """A piece that was there is not: its bytes are wrong, though its hash is what was told of it. So it is to come
        from the origin."""
        place = self._shares.place(file, piece)
        if not self._missing[place]:
            self._holders.put_back(place)
            self._left += 1
            for peer in self._peers.values():
                peer.offers += peer.held[place]
        self._doubt(place)

    def release(self, take: Take) -> None:
        """A transfer from a member is over, however it went."""
        place = self._shares.place(take.file, take.piece)
        if (peer := self._peers.get(take.node)) is not None and peer.takes.pop(place, None) is not None:
            self._busy -= 1
        self._unask(place, take.node)

    def lacks(self, take: Take) -> None:
        """The member says that it does not have that piece."""
        place = self._shares.place(take.file, take.piece)
        if (peer := self._peers.get(take.node)) is not None:
            self._disown(peer, place)

    def rest(self, node: NodeId, now: float) -> None:
        """The member has too much to do: it is asked again in a moment, and for a while not at all if that goes on; for
        a short one where it may be the server that has."""
        if (peer := self._peers.get(node)) is not None:
            peer.rests_until = now + REST_SECONDS
            if peer.refused_since is None:
                peer.refused_since = now
            elif now - peer.refused_since > PATIENCE_SECONDS:
                self.leave(node, PATIENCE_SECONDS if peer.member.seed == RELAY else AWAY_SECONDS, now)

    def miss(self, node: NodeId, now: float, *, silent_seconds: float = 0.0) -> bool:
        """It can't be asked now, and that is nobody's fault: what lies between is away, or it begins anew itself. It
        keeps its share, and what it has, for as long as others do that bring nothing; then it is passed over, until it
        is ``met`` again, and whether it is so is returned. ``silent_seconds``: for how long nothing has come already.
        """
        peer = self._peers.get(node)
        if peer is None:
            return False
        peer.refused_since = None
        if peer.missed_since is None:
            peer.missed_since = now - silent_seconds
        if now - peer.missed_since >= PATIENCE_SECONDS and not peer.passed_over:
            peer.passed_over = True
            self._forget(peer)
        return peer.passed_over

    def met(self, node: NodeId, now: float) -> None:
        """It has answered. The time for which it was missed does not count against it."""
        peer = self._peers.get(node)
        if peer is None or peer.missed_since is None:
            return
        if peer.suspended_until - SUSPENDED_SECONDS >= peer.missed_since:
            peer.suspended_until = now
        peer.brought_at = min(now, peer.brought_at + now - peer.missed_since)
        peer.missed_since = peer.refused_since = None
        peer.passed_over = False

    def leave(self, node: NodeId, seconds: float, now: float) -> None:
        """Don't ask this member for so long; what it has it may then tell anew."""
        if (peer := self._peers.get(node)) is not None:
            peer.away_until = max(peer.away_until, now + seconds)
            # Then it has as much time as one that is new.
            peer.brought_at = peer.away_until
            peer.refused_since = None
            # What is running ends by itself, and is given back then.
            self._forget(peer)

    def excuse_all(self, now: float) -> None:
        """That nobody has brought anything was not theirs to mend: their time begins now."""
        for peer in self._peers.values():
            peer.brought_at = max(peer.brought_at, now)
            peer.refused_since = None if peer.refused_since is None else now

    def suspend_silent(self, now: float) -> tuple[NodeId, ...]:
        """Those lose their share that bring nothing: not sooner than pieces come from the origin here, for where it is
        slow, or stalls, nobody brings any."""
        waited = [] if self._asking_since is None else [now - self._asking_since]
        patience = max(PATIENCE_SECONDS, 2 * max([*waited, *self._gaps], default=0.0))
        found = []
        for node, peer in self._peers.items():
            if peer.is_trusted(now) and now - peer.brought_at > patience and not self._is_full(peer):
                peer.suspended_until = peer.brought_at = now + SUSPENDED_SECONDS
                found.append(node)
        return tuple(found)

    def read_in_order(self, file: int) -> None:
        """The origin sends this file only from its first byte on: one node takes all of it."""
        self._shares.read_in_order(file)

    # What is next

    def next_take(self, now: float) -> Take | None:
        """A piece for a member: of those near the rarest first, then of those that are far and whole. Whoever is free
        and has nothing else is asked for what others have been asked for long."""
        self._sweep()
        if self._busy >= MOST_AT_ONCE:
            return None
        if self._busy - sum(peer.count_long(now) for peer in self._peers.values() if peer.takes) >= MOST_OF_ALL:
            return None
        self._deal(now)
        # Those that are equally busy in turn: else some would never be asked, and would pass for silent.
        free = sorted(
            (peer for peer in self._peers.values() if peer.offers and peer.is_free(now)),
            key=lambda peer: (peer.is_second_choice(now), len(peer.takes), peer.asked),
        )
        for peer in free:
            if peer.near and (place := self._pop(peer)) is not None:
                return self._take(peer, place, now)
        far = [peer for peer in free if not peer.near and peer.member.whole]
        if far and next(self._list_own(now), None) is not None:
            for peer in far:
                if (place := self._find_own(peer)) is not None:
                    return self._take(peer, place, now)
        for place, askers in self._asked.items():
            if len(askers) > 1 or not self._missing[place] or now - min(askers.values()) < SECOND_ASK_SECONDS:
                continue
            for peer in free:
                if peer.held[place] and peer.member.node not in askers:
                    return self._take(peer, place, now)
        return None

    def next_run(self, now: float) -> Run | None:
        """What to ask the origin for. It is held for this request until ``end_run``."""
        places = self._list_own(now, origin=True)
        if (start := next(places, None)) is None:
            if not any(None in askers for askers in self._asked.values()):
                self._asking_since = None
                return None
            return self._halve(now)
        file = self._shares.file_of(start)
        first, count = self._shares.places_of(file).start, self._shares.counts[file]
        if self._shares.is_in_order(file):
            return self._hold(Run(file=file, start=0, stop=count, ordered=True), now)
        stop = start + 1
        # What is left is cut small for many requests, so that they end together.
        most = min(self._longest, max(1, self._left // (2 * MOST_LINES)), first + count - start)
        while stop - start < most and next(places, None) == stop:
            stop += 1
        return self._hold(Run(file=file, start=start - first, stop=stop - first), now)

    def begin(self, run: Run, piece: int, now: float, *, underway: bool = False) -> bool:
        """Whether the next piece of a run is still to be had from the origin; it is then asked for. ``underway``: the
        origin is likely to have sent it already."""
        place = self._shares.place(run.file, piece)
        if not self._missing[place] or self._reserved.get(place) != run:
            return False
        line = self._lines[run]
        if not self._shares.is_in_order(run.file) and (
            place in self._asked
            or self._drags(line, now)
            or not (underway or (not self._holders[place] and self._asks(place, now)))
        ):
            return False
        line.next = place + 1
        self._asked.setdefault(place, {})[None] = now
        if self._asking_since is None:
            self._asking_since = now
        return True

    def goes_on(self, file: int, piece: int) -> bool:
        """Whether anything from this piece on in a file that is read in order is not here, and held by nobody near."""
        return self._holders.has_bare(self._shares.places_of(file)[piece:])

    def end_run(self, run: Run) -> None:
        """The request is over, however it went."""
        if self.is_done(run.file, run.stop - 1):
            # Twice as long once all lines have been through.
            self._longest = min(self._longest + (run.stop - run.start + MOST_LINES - 1) // MOST_LINES, MOST_RUN_PIECES)
        self._runs[run.file] -= 1
        del self._lines[run]
        for place in self._shares.places_of(run.file)[run.start : run.stop]:
            if self._reserved.get(place) == run:
                del self._reserved[place]
                self._unask(place, None)

    # How

    def _hold(self, run: Run, now: float) -> Run:
        """Nobody else is to ask for it."""
        places = self._shares.places_of(run.file)[run.start : run.stop]
        self._runs[run.file] += 1
        self._reserved.update(dict.fromkeys(places, run))
        self._lines[run] = Line(start=places.start, next=places.start, stop=places.stop, since=now)
        return run

    def _halve(self, now: float) -> Run | None:
        """The second half of what another line has not begun, where that would take it long: one slow line of several
        would else be waited for at the end."""
        if self._waits_for_near(now) or self._has_whole(now, near=False):
            return None
        waits = [
            ((line.stop - line.next) * line.measure(now), run, line)
            for run, line in self._lines.items()
            if not self._shares.is_in_order(run.file)
        ]
        longest, run, line = max(waits, key=lambda each: each[0], default=(0.0, None, None))
        if run is None or line is None or longest < SECOND_ASK_SECONDS:
            return None
        first = self._shares.places_of(run.file).start
        stop = line.stop
        line.stop -= (stop - line.next + 1) // 2
        return self._hold(Run(file=run.file, start=line.stop - first, stop=stop - first), now)

    def _drags(self, line: Line, now: float) -> bool:
        """Whether it is so much slower than the others that another one is better."""
        if now - line.since < PATIENCE_SECONDS or len(self._lines) < 2 or not self._gaps:
            return False
        usual = len(self._lines) * sum(self._gaps) / len(self._gaps)
        return line.next > line.start and line.measure(now) > MUCH_SLOWER * usual

    def _rate(self, peer: Peer, seconds: float, now: float) -> None:
        """It has brought a piece in so long."""
        if self._times and seconds > max(SECOND_ASK_SECONDS, MUCH_SLOWER * median(self._times)):
            peer.slow_until = now + SUSPENDED_SECONDS
        self._times.append(seconds)

    def _deal(self, now: float) -> None:
        """Among whom the shares are dealt now."""
        rivals = [node for node, peer in self._peers.items() if peer.near and not peer.member.whole]
        owners = tuple(node for node in rivals if self._peers[node].is_trusted(now))
        self._shares.set_owners(owners, tuple(rivals))

    def _has_whole(self, now: float, *, near: bool) -> bool:
        """Whether somebody has all of it, and can be expected to give it."""
        return any(peer.near is near and peer.member.whole and peer.is_trusted(now) for peer in self._peers.values())

    def _waits_for_near(self, now: float) -> bool:
        """Whether what nobody near has will come from them: from one that has all of it, and else from those that
        fetch, where nobody could take it from us."""
        return self._has_whole(now, near=True) or not (self._seeding or self._shares.are_ours)

    def _asks(self, place: int, now: float) -> bool:
        """Whether it is for us to fetch what nobody near has."""
        if place in self._doubted:
            return True
        self._deal(now)
        if self._waits_for_near(now):
            return False
        return self._shares.owns(self._shares.block_of(place))

    def _list_own(self, now: float, *, origin: bool = False) -> Iterator[int]:
        """Missing pieces that nobody is asked for and nobody near has, and that are ours to fetch; ``origin``: that
        nobody far is waited for either."""
        for place in sorted(self._doubted):
            if self._is_open(place) and not (origin and self._is_being_read(place)):
                yield place
        self._deal(now)
        if self._waits_for_near(now) or (origin and self._has_whole(now, near=False)):
            return
        for block in self._shares.list_own():
            places = self._shares.blocks[block]
            if origin and self._is_being_read(places.start):
                continue
            for place in self._holders.list_bare(places):
                if self._is_open(place) and place not in self._doubted:
                    yield place

    def _is_open(self, place: int) -> bool:
        return bool(self._missing[place]) and place not in self._asked and place not in self._reserved

    def _is_being_read(self, place: int) -> bool:
        """Whether its file is read in order, and a request for it runs, or an earlier one that is to end first."""
        file = self._shares.file_of(place)
        return self._shares.is_in_order(file) and self._runs[file] > 0

    def _find_own(self, peer: Peer) -> int | None:
        """A piece of our share for a member far away."""
        for block in self._shares.list_own():
            for place in self._holders.list_bare_of(peer.held, self._shares.blocks[block]):
                if self._is_open(place):
                    return place
        return None

    def _key(self, place: int) -> int:
        """Among those that are equally rare, our own share first: so that members that take from one whole one take
        different pieces, and then have them of one another."""
        block = self._shares.block_of(place)
        order = 0 if self._shares.are_ours else self._shares.mine[block]
        rarity = self._holders[place] << 1 | (not self._shares.owns(block))
        return (rarity << WEIGHT_BITS | order) << _PLACE_BITS | place

    def _pop(self, peer: Peer) -> int | None:
        """The rarest piece of this member that nobody is asked for. Keys in a heap may be old: each is looked at again
        before it is believed, but never so many that others wait for it."""
        heap, looks, passed = peer.heap, 0, 0
        while heap and passed < MOST_PASSED:
            old = heap[0]
            place = old & _PLACE
            if not self._is_offered(peer, place):
                heappop(heap)
                passed += 1
                continue
            looks += 1
            if looks <= MOST_LOOKS and (key := self._key(place)) > old:
                heapreplace(heap, key)
                continue
            heappop(heap)
            return place
        if not heap:
            return None
        # The next call goes on from there; until then any piece will do.
        return next((place for place in self._holders.list_missing_of(peer.held) if place not in self._asked), None)

    def _is_offered(self, peer: Peer, place: int) -> bool:
        return bool(self._missing[place] and peer.held[place]) and place not in self._asked

    def _take(self, peer: Peer, place: int, now: float) -> Take:
        file = self._shares.file_of(place)
        self._asked.setdefault(place, {})[peer.member.node] = now
        self._turns += 1
        peer.asked = self._turns
        peer.takes[place] = now
        self._busy += 1
        return Take(
            node=peer.member.node,
            seed=peer.member.seed or "",
            file=file,
            piece=place - self._shares.places_of(file).start,
            expected=self._claims[place],
        )

    def _unask(self, place: int, node: NodeId | None) -> None:
        askers = self._asked.get(place)
        if askers is None or askers.pop(node, None) is None or askers:
            return
        del self._asked[place]
        self._offer(place)

    def _offer(self, place: int) -> None:
        """It can be asked for again."""
        if self._missing[place]:
            for peer in self._peers.values():
                if peer.near and peer.held[place]:
                    heappush(peer.heap, self._key(place))

    def _doubt(self, place: int) -> None:
        """Nobody's word is taken for it any more: it is had from the origin."""
        suspects = self._doubted.setdefault(place, {})
        for node, peer in self._peers.items():
            if self._disown(peer, place) and (claimed := self._claims.get(place)) is not None:
                suspects[node] = claimed

    def _disown(self, peer: Peer, place: int) -> bool:
        """It does not have this one; whether it was said to."""
        if not isinstance(peer.held, bytearray) or not peer.held[place]:
            return False
        peer.held[place] = 0
        peer.offers -= self._missing[place]
        if peer.near:
            self._holders.add(place, -1)
        return True

    def _forget(self, *peers: Peer) -> None:
        """What they have is unknown."""
        gone = set(peers)
        self._holders.drop(
            [peer.held for peer in peers if peer.near and peer.held is not self._nothing],
            [
                peer.held
                for peer in self._peers.values()
                if peer.near and peer.held is not self._nothing and peer not in gone
            ],
        )
        for peer in peers:
            peer.held, peer.offers = self._nothing, 0
            self._litter.append(peer.heap)
            peer.heap = []

    def _sweep(self) -> None:
        """Free a little of what nobody needs."""
        if self._litter:
            del self._litter[-1][-MOST_SWEPT:]
            if not self._litter[-1]:
                self._litter.pop()

    def _draw(self, node: NodeId) -> int:
        """Whose turn it is of those that were never asked: on each node another one's, for they all begin at once."""
        return -zlib.crc32(f"{self._me}\n{node}".encode()) - 1

    def _is_full(self, peer: Peer) -> bool:
        """Whether it is whole, and has told of all that is missing: then it has nothing more to bring by itself."""
        return peer.member.whole and peer.offers + len(self._doubted) == self._left
