"""Brings the missing pieces of one listing to the disk: asks members and the origin side by side, tries again what
breaks, and says when that makes no sense any more."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import trio

from llmgw.core.asked import PATIENCE_SECONDS, Run, Take
from llmgw.core.node import NodeId
from llmgw.core.pieces import AWAY_SECONDS, MOST_LINES, SHUNNED_SECONDS, Pieces
from llmgw.core.weights import RELAY, Listing, Member, Source, Swarm, count_pieces, key_of, piece_bytes_of
from llmgw.host.weights.disk.partial import Corrupt, Partial
from llmgw.host.weights.errors import Broken, FetchFailed, Kind, NoRanges
from llmgw.host.weights.peers import NotNow, PeerGone, Peers, PieceMissing, Told
from llmgw.host.weights.progress_meter import ProgressMeter
from llmgw.host.weights.retries import Retries
from llmgw.host.weights.sources.origin import Origin
from llmgw.reactor.rate import Rate

log = logging.getLogger(__name__)

# How often it is looked at what is due, when nothing happens.
TURN_SECONDS = 0.5
SOON_SECONDS = 0.05
# So long at most it is waited, before the origin is asked for anything, to hear who else fetches the same, and what
# they have.
LISTEN_SECONDS = 2.0
# Who had no turn for so long was stopped itself: the others were not silent, and may have fetched its share.
STOPPED_SECONDS = 2.0
# Only who was well for so long since is once more. Where turns come late again and again the machine is slow: if it
# heard the others first each time, and took nobody for silent, the origin would never be asked for anything.
WELL_SECONDS = PATIENCE_SECONDS + LISTEN_SECONDS
# How long a member may hold back its answer until it has news, and what lies between two of its answers at least.
NEWS_SECONDS = 5
NEWS_PAUSE_SECONDS = 0.2
# Where the server hands each answer on.
RELAYED_PAUSE_SECONDS = 1.0
# How soon at last one is asked again that does not know us or the source yet; and by way of the server, while that is
# away, or has no connection to it.
NOT_YET_SECONDS = 1.0
MISSED_SECONDS = 4.0
# So much news is taken in at a time; then others have their turn.
NEWS_AT_ONCE = 200
LOST_AT_ONCE = 100
SHOWN_NAMES = 3
OUR_FAULT = "a fault of llmgw itself, see the log"
WRITERS = 4
# As much of an answer is on its way before anybody reads it: to cut that off would save nothing.
UNDERWAY_BYTES = 8 * 1024 * 1024
# Where others can still bring it, an origin that can't be reached from here is no end.
CUT_OFF = frozenset({Kind.TLS, Kind.DNS, Kind.UNREACHABLE})


class Taking:
    """One fetch's way from nothing, or from what is there already, to every piece on the disk. ``by_member``: it was a
    member of the swarm that has said what there is."""

    def __init__(
        self,
        source: Source,
        partial: Partial,
        *,
        origin: Origin,
        peers: Peers,
        swarm: Callable[[], Swarm | None],
        meter: ProgressMeter,
        rate: Rate,
        by_member: bool,
        pieces: Pieces,
    ) -> None:
        self._source = source
        self._listing = partial.listing
        self._partial = partial
        self._origin = origin
        self._peers = peers
        self._swarm = swarm
        self._meter = meter
        self._rate = rate
        # An origin that does not tell files apart by what it says of them can't be asked for somebody else's.
        self._mended_elsewhere = CUT_OFF | {Kind.CHANGED} if by_member else CUT_OFF
        self._key = key_of(source.text)
        self._pieces = pieces
        self._members: tuple[Member, ...] = ()
        self._watched: dict[NodeId, tuple[str | None, trio.CancelScope]] = {}
        self._transfers: dict[tuple[int, int], dict[NodeId, trio.CancelScope]] = {}
        # What of a piece had come when its line broke: (file, piece) to the bytes, and how many of them.
        self._begun: dict[tuple[int, int], tuple[bytearray, int]] = {}
        self._spare: list[bytearray] = []
        self._lines = 0
        # How many hold back what comes, for the rate that is set.
        self._paced = 0
        # Whether the origin has sent anything from the middle of a file: many that get all of it would be a waste.
        self._knows_ranges = False
        self._retries = Retries()
        # Since and until when it is waited to hear what others have, and who has been heard.
        self._listens_since = self._listens_until = -float("inf")
        self._heard: set[NodeId] = set()
        # When we had a turn last, and the last one that came late.
        self._turned_at = float("inf")
        self._late_at = -float("inf")
        # Since when it goes on after that: nobody was silent, or has refused us, before.
        self._awake_since = -float("inf")
        self._failure: FetchFailed | None = None
        self._bell = trio.Event()
        self._writers = trio.CapacityLimiter(WRITERS)

    async def take_anew(self, file: int) -> None:
        """None of this file is right: it is to come from the origin. Not while it runs."""
        for piece in range(count_pieces(self._listing.files[file].size_bytes)):
            if self._pieces.is_done(file, piece):
                self._meter.lie(-self._measure(file, piece))
            self._pieces.lost(file, piece)
            if piece % LOST_AT_ONCE == LOST_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()

    async def run(self, nursery: trio.Nursery) -> None:
        """Return when every piece is on the disk; what runs in the nursery then is to be cancelled. Raises
        FetchFailed."""
        self._watched.clear()
        self._meter.wait_for(self._name_wait)
        self._turned_at = trio.current_time()
        self._listen(self._turned_at)
        while self._pieces.left:
            now = self._turn()
            self._follow_swarm(nursery, now)
            for node in self._pieces.suspend_silent(now):
                log.info("%s brings nothing of %s: others fetch its share", node, self._source.name)
            while (take := self._pieces.next_take(now)) is not None:
                nursery.start_soon(self._take, take)
            if now >= max(self._retries.rest_until, self._listens_until):
                most = MOST_LINES if self._knows_ranges else 2
                while self._lines < most and (run := self._pieces.next_run(now)) is not None:
                    self._lines += 1
                    nursery.start_soon(self._read, run)
            self._bell = trio.Event()
            with trio.move_on_after(TURN_SECONDS if now >= self._listens_until else SOON_SECONDS):
                await self._bell.wait()
            if self._failure is not None:
                raise self._failure

    def _turn(self) -> float:
        """What time it is; what has gone on without us is heard first where we were stopped. Whichever task has the
        first turn after that finds it, for all: the others are not late any more."""
        now = trio.current_time()
        if now - self._turned_at > STOPPED_SECONDS:
            if self._turned_at - self._late_at > WELL_SECONDS:
                self._awake_since = now
                self._pieces.excuse_all(now)
                self._listen(now)
            self._late_at = now
        self._turned_at = now
        return now

    def _listen(self, now: float) -> None:
        """Before anything more is asked of the origin."""
        if self._peers.can_ask:
            self._heard.clear()
            self._listens_since, self._listens_until = now, now + LISTEN_SECONDS

    def _ring(self) -> None:
        self._bell.set()

    def _name_wait(self) -> str | None:
        """Why nothing has come for long, where nothing has failed."""
        if self._paced:
            return None
        if self._writers.borrowed_tokens:
            return "the disk is slow: what has come is not written yet"
        asked = ["its origin"] if self._lines else []
        asked += sorted({node for transfers in self._transfers.values() for node in transfers})
        if asked:
            return f"nothing comes from {_show_names(asked)}, though it was asked for"
        fetching = [member.node for member in self._pieces.list_there(trio.current_time())]
        return f"it waits for what {_show_names(fetching)} has or fetches" if fetching else None

    # Members

    def _follow_swarm(self, nursery: trio.Nursery, now: float) -> None:
        swarm = self._swarm() if self._peers.can_ask else None
        # Until somebody has told which commit it is, those in it are taken for members all the same: who has another
        # one will say so.
        ours = swarm is not None and swarm.commit in (None, self._listing.commit)
        members = swarm.members if swarm is not None and ours else ()
        if members != self._members:
            self._members = members
            self._pieces.set_members(members, now)
        there = {member.node: member for member in self._pieces.list_there(now)}
        for node, (seed, scope) in list(self._watched.items()):
            if node not in there or there[node].seed != seed:
                scope.cancel()
                del self._watched[node]
        for node, member in there.items():
            if node not in self._watched:
                self._watched[node] = (member.seed, trio.CancelScope())
                nursery.start_soon(self._watch, member, self._watched[node][1])
        if any(member.node == self._peers.node for member in members) and self._heard.issuperset(there):
            self._listens_until = min(self._listens_until, now)

    async def _watch(self, member: Member, scope: trio.CancelScope) -> None:
        """Hear what a member has, as long as it is one."""
        with scope:
            try:
                await self._hear(member)
            except PeerGone as gone:
                self._leave(member.node, AWAY_SECONDS, str(gone))
            except NotNow as refusal:
                self._leave(member.node, AWAY_SECONDS, f"for {PATIENCE_SECONDS:.0f} s {refusal}")
            except Exception:
                # Whatever one of many says, the others can still bring it.
                log.exception("What %s tells of %s could not be taken in", member.node, self._source.name)
                self._leave(member.node, SHUNNED_SECONDS, OUR_FAULT)

    async def _hear(self, member: Member) -> None:
        told: Told | None = None
        answered_at, pause = trio.current_time(), NEWS_PAUSE_SECONDS
        while True:
            asked_at = trio.current_time()
            try:
                new = await self._peers.hear(
                    member, self._key, self._listing.commit, since=told, wait_seconds=NEWS_SECONDS
                )
            except NotNow as refusal:
                # It may not have heard of us, or of this source, so soon as we have of it.
                is_relayed = member.seed == RELAY
                if is_relayed:
                    told = self._miss(member, told, refusal)
                elif self._turn() - max(answered_at, self._awake_since) > PATIENCE_SECONDS:
                    raise
                await trio.sleep(pause)
                pause = min(2 * pause, MISSED_SECONDS if is_relayed else NOT_YET_SECONDS)
                continue
            pause = NEWS_PAUSE_SECONDS
            answered_at = trio.current_time()
            self._pieces.met(member.node, answered_at)
            if [(file.name, file.size_bytes) for file in new.files] != [
                (file.name, file.size_bytes) for file in self._listing.files
            ]:
                raise PeerGone("it has other files by the same commit")
            for start in range(0, len(new.news), NEWS_AT_ONCE):
                self._pieces.hear(member.node, new.news[start : start + NEWS_AT_ONCE], trio.current_time())
                self._ring()
                await trio.lowlevel.checkpoint()
            told = new
            if asked_at >= self._listens_since:
                self._heard.add(member.node)
            self._ring()
            if len(new.news) < NEWS_AT_ONCE:
                # A word for every single piece would cost more than the piece's way.
                least = RELAYED_PAUSE_SECONDS if member.seed == RELAY else NEWS_PAUSE_SECONDS
                await trio.sleep(max(0.0, least - (answered_at - asked_at)))

    def _miss(self, member: Member, told: Told | None, refusal: NotNow) -> Told | None:
        """It can't be asked by way of the server now: that is away, or has no connection to it. What it has told that
        still holds; None: it is to tell all of it anew."""
        if not self._pieces.miss(member.node, trio.current_time(), silent_seconds=refusal.silent_seconds):
            return told
        if told is not None:
            log.info(
                "%s can't be asked for %s, and is passed over until it can: %s", member.node, self._source.name, refusal
            )
        self._ring()
        return None

    def _leave(self, node: NodeId, seconds: float, why: str) -> None:
        log.info("%s is not asked for %s for %.0f s: %s", node, self._source.name, seconds, why)
        self._pieces.leave(node, seconds, trio.current_time())
        self._ring()

    async def _take(self, take: Take) -> None:
        """One piece from a member."""
        scope = trio.CancelScope()
        place = (take.file, take.piece)
        self._transfers.setdefault(place, {})[take.node] = scope
        buffer = self._find_buffer(self._measure(*place))
        try:
            with scope:
                await self._peers.take(take, self._key, self._listing.commit, buffer, self._come_from_peer)
                await self._keep(place, buffer, take)
        except Corrupt:
            log.warning("%s sent a wrong piece of %s", take.node, self._source.name)
            self._leave(take.node, SHUNNED_SECONDS, "it sent a wrong piece")
        except PieceMissing:
            self._pieces.lacks(take)
        except NotNow:
            self._pieces.rest(take.node, trio.current_time())
        except PeerGone as gone:
            self._leave(take.node, AWAY_SECONDS, str(gone))
        except FetchFailed as failure:
            self._failure = failure
        except Exception:
            log.exception("A piece of %s could not be taken from %s", self._source.name, take.node)
            self._leave(take.node, SHUNNED_SECONDS, OUR_FAULT)
        finally:
            transfers = self._transfers[place]
            del transfers[take.node]
            if not transfers:
                del self._transfers[place]
            self._pieces.release(take)
            self._spare.append(buffer)
            self._ring()

    async def _come_from_peer(self, count: int) -> None:
        await self._come(count, peer=True)

    # The origin

    async def _read(self, run: Run) -> None:
        """What of a run is still to be had once it is its turn, in one request."""
        tries = self._retries.number
        try:
            await self._read_run(run)
        except Broken as broken:
            self._try_again(broken, tries)
        except NoRanges:
            self._pieces.read_in_order(run.file)
            if run.ordered:
                self._failure = FetchFailed(
                    f"{self._listing.files[run.file].name} can't be read from its first byte on",
                    Kind.UNSUPPORTED,
                    remedy="see what its server, or a proxy before it, answers to a request without Range",
                )
        except FetchFailed as failure:
            if failure.kind in self._mended_elsewhere and self._pieces.has_others(trio.current_time()):
                self._try_again(Broken(failure.message, kind=failure.kind, remedy=failure.remedy), tries)
            else:
                self._failure = failure
        finally:
            self._pieces.end_run(run)
            self._lines -= 1
            self._ring()

    def _try_again(self, broken: Broken, tries: int) -> None:
        if not self._retries.note(tries, broken.wait_seconds, trio.current_time()):
            self._failure = broken.give_up()
        self._meter.note_trouble(broken.reason, self._retries.describe(broken.remedy))
        log.info("%s: %s", self._source.name, broken.reason)

    async def _read_run(self, run: Run) -> None:
        file, piece = run.file, run.start
        ordered = run.ordered
        if ordered != self._pieces.is_in_order(file):
            return
        wanted = self._pieces.begin(run, piece, trio.current_time())
        while not wanted and not ordered:
            piece += 1
            if piece == run.stop:
                return
            wanted = self._pieces.begin(run, piece, trio.current_time())
        size = self._measure(file, piece)
        begun = self._begun.pop((file, piece)) if (file, piece) in self._begun and not ordered else None
        buffer, at = begun or (self._find_buffer(size), 0)
        length = piece_bytes_of(self._listing.files[file].size_bytes)
        first = piece * length + at
        stop = min(run.stop * length, self._listing.files[file].size_bytes)
        try:
            async with self._origin.read(self._source, self._listing, file, first, stop) as chunks:
                async for chunk in chunks:
                    self._knows_ranges = self._knows_ranges or first > 0
                    left = memoryview(chunk)
                    await self._come(len(left), peer=False)
                    while left:
                        count = min(size - at, len(left))
                        if wanted:
                            buffer[at : at + count] = left[:count]
                        at, left = at + count, left[count:]
                        if at < size:
                            continue
                        if wanted:
                            await self._keep((file, piece), buffer, None)
                        piece, at = piece + 1, 0
                        if piece == run.stop:
                            # (not left at once: who reads to the end has its connection for the next run)
                            break
                        if ordered != self._pieces.is_in_order(file):
                            return
                        if ordered and not self._pieces.goes_on(file, piece):
                            return
                        underway = stop - piece * length <= UNDERWAY_BYTES
                        now = self._turn()
                        may_ask = underway or ordered or now >= self._listens_until
                        wanted = may_ask and self._pieces.begin(run, piece, now, underway=underway)
                        if not wanted and not ordered:
                            return
                        size = self._measure(file, piece)
                        if len(buffer) != size:
                            buffer = self._find_buffer(size)
            if piece == run.stop:
                return
            raise Broken(
                f"{self._listing.files[file].name} ended before its time",
                remedy="see whether its server, or a proxy before it, cuts off what takes long",
            )
        except Broken:
            if at and wanted and not ordered:
                # Where pieces are long and lines are bad, none would ever be whole.
                self._begun[file, piece] = (buffer, at)
                if piece * length + at > first:
                    self._retries.clear()
            raise
        finally:
            if (file, piece) not in self._begun:
                self._spare.append(buffer)

    # Both

    async def _come(self, count: int, *, peer: bool) -> None:
        """Bytes have come. Returns when the next ones may."""
        self._meter.come(count, peer=peer)
        self._paced += 1
        try:
            await self._rate.take(count)
        finally:
            self._paced -= 1

    async def _keep(self, place: tuple[int, int], data: bytearray, take: Take | None) -> None:
        file, piece = place
        node = None if take is None else take.node
        digest = await trio.to_thread.run_sync(
            self._partial.write, file, piece, data, None if take is None else take.expected, limiter=self._writers
        )
        now = trio.current_time()
        liars = self._pieces.compare(file, piece, digest) if take is None else ()
        if not self._pieces.is_done(file, piece):
            self._meter.lie(len(data))
        self._pieces.got(file, piece, node, now)
        self._begun.pop(place, None)
        self._retries.clear()
        for liar in liars:
            log.warning("%s has another piece of %s than the origin", liar, self._source.name)
            self._leave(liar, SHUNNED_SECONDS, "it has other bytes than the origin")
        for other, scope in self._transfers.get(place, {}).items():
            if other != node:
                scope.cancel()
        self._ring()

    def _find_buffer(self, size: int) -> bytearray:
        while self._spare:
            buffer = self._spare.pop()
            if len(buffer) == size:
                return buffer
        return bytearray(size)

    def _measure(self, file: int, piece: int) -> int:
        """How long a piece is."""
        return measure(self._listing.files[file].size_bytes, piece)


def make_pieces(me: NodeId, partial: Partial) -> Pieces:
    """What of a partial is here and missing. Long work for a large one: for a thread."""
    listing = partial.listing
    counts = [count_pieces(file.size_bytes) for file in listing.files]
    return Pieces(me, f"{key_of(listing.source)}/{listing.commit}", counts, partial.have)


def count_bytes(partial: Partial) -> int:
    """How much of it lies on the disk. The same."""
    sizes = [file.size_bytes for file in partial.listing.files]
    found = Counter(file for file, _ in partial.have)
    whole = sum(count * piece_bytes_of(sizes[file]) for file, count in found.items())
    # The last piece of a file is shorter.
    lasts = [(file, count_pieces(size) - 1) for file, size in enumerate(sizes)]
    return whole - sum(
        piece_bytes_of(sizes[file]) - measure(sizes[file], piece)
        for file, piece in lasts
        if (file, piece) in partial.have
    )


def _show_names(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return f"{', '.join(names[:SHOWN_NAMES])}{f' and {more} more' if more > 0 else ''}"


def measure(size_bytes: int, piece: int) -> int:
    """How long a piece of a file of this size is."""
    length = piece_bytes_of(size_bytes)
    return min(length, size_bytes - piece * length)


def list_by_wholeness(swarm: Swarm | None, me: NodeId) -> list[Member]:
    """Who can be asked for a listing, those first that have all of it."""
    members = [member for member in swarm.members if member.node != me and member.seed] if swarm is not None else []
    return sorted(members, key=lambda member: not member.whole)


def make_listing(source: Source, commit: str, told: Told) -> Listing:
    """What a member says that a commit is."""
    return Listing(source=source.text, commit=commit, files=told.files)
