"""Has one source on this node's disk, whole and verified: the lock, what it is, the bytes, the proof."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

import trio

from llmgw.core.weights import Fetch, FileKept, FileListed, Listing, Manifest, Phase, Source, Swarm, key_of
from llmgw.errors import only_ours
from llmgw.host.weights.disk.cache import GONE, Cache
from llmgw.host.weights.disk.damage import Damaged, refuse_used
from llmgw.host.weights.disk.partial import CorruptFile, Partial
from llmgw.host.weights.errors import Broken, FetchFailed, Kind, show_url
from llmgw.host.weights.peers import NotNow, PeerGone, Peers
from llmgw.host.weights.progress_meter import ProgressMeter
from llmgw.host.weights.retries import MOST_TRIES, Retries
from llmgw.host.weights.sources.origin import Origin
from llmgw.host.weights.taking import CUT_OFF, Taking, count_bytes, list_by_wholeness, make_listing, make_pieces
from llmgw.reactor.rate import Rate

log = logging.getLogger(__name__)

Share: TypeAlias = Callable[[Partial | None], None]

TICK_SECONDS = 0.5
# How often those who wait for it in other programs see that it goes on: well within what they take for a stall.
LIFE_SECONDS = 2.0
CLOSE_SECONDS = 5.0
# How often an origin is asked for what was here, where something older is that will do: a launch waits for it.
MEND_TRIES = 3
# How often at most a thread that reads a whole file tells how far it is.
TOLD_EVERY_SECONDS = 0.25


def nobody(commit: str) -> Sequence[str]:
    """No shard runs by it."""
    return ()


async def fetch(
    source: Source,
    *,
    cache: Cache,
    origin: Origin,
    peers: Peers,
    swarm: Callable[[], Swarm | None],
    tell: Callable[[Fetch], None],
    newest: bool,
    limits: Rate,
    share: Share = lambda partial: None,
    users: Callable[[str], Sequence[str]] = nobody,
) -> Manifest:
    """A whole, verified commit of the source: the newest that is here, unless ``newest``; else the cluster's, or the
    newest.

    With ``newest`` what is here of that is proven, piece by piece, and so is always what is only noted to be wrong.
    What is damaged of a commit is fetched anew, where nobody runs by it: ``users`` names the shards that do. Where that
    can't be, one that is older and whole will do. ``tell`` hears how it goes, READY or FAILED at last.
    ``share`` is given what others may take pieces from while it comes, and None before that is closed. Cancelled, it
    ends within a second, and the next one goes on where it was. Raises FetchFailed.
    """
    meter = ProgressMeter(source.text, tell, trio.current_time, paced=limits.bytes_per_second)
    work = _Fetching(
        source, cache=cache, origin=origin, peers=peers, swarm=swarm, meter=meter, rate=limits, share=share, users=users
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_tick, meter)
            nursery.start_soon(work.show_life)
            manifest = await work.obtain(newest=newest)
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error = only_ours(group)
        if not isinstance(error, FetchFailed):
            raise
        meter.fail(error.message, error.remedy)
        raise error from None
    meter.end(manifest.commit, manifest.size_bytes)
    return manifest


async def _run(taking: Taking) -> None:
    try:
        async with trio.open_nursery() as nursery:
            await taking.run(nursery)
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise only_ours(group) from None


async def _tick(meter: ProgressMeter) -> None:
    while True:
        await trio.sleep(TICK_SECONDS)
        meter.tick()


class _Fetching:
    def __init__(
        self,
        source: Source,
        *,
        cache: Cache,
        origin: Origin,
        peers: Peers,
        swarm: Callable[[], Swarm | None],
        meter: ProgressMeter,
        rate: Rate,
        share: Share,
        users: Callable[[str], Sequence[str]],
    ) -> None:
        self._source = source
        self._cache = cache
        self._origin = origin
        self._peers = peers
        self._swarm = swarm
        self._meter = meter
        self._rate = rate
        self._share = share
        self._users = users
        self._holds = False
        # What was found of each commit that was compared with its hashes.
        self._proven: dict[str, str | None] = {}

    async def show_life(self) -> None:
        """Have others that wait for our lock see each step that is made; of one who stands still they see nothing."""
        shown = -math.inf
        while True:
            await trio.sleep(LIFE_SECONDS)
            if self._holds and shown < (came_at := self._meter.came_at):
                shown = came_at
                await self._cache.show_life(self._source.text)

    async def obtain(self, *, newest: bool) -> Manifest:
        find, text = self._cache.find, self._source.text
        proves = newest
        # What can never be another is the newest.
        newest = newest and not self._source.is_pinned
        if not proves and (manifest := await trio.to_thread.run_sync(find, text)) is not None:
            return manifest
        async with self._cache.hold(text, self._meter.queue):
            self._holds = True
            self._meter.enter(Phase.RESOLVING)
            await self._prove_marked()
            manifest = None if newest else await trio.to_thread.run_sync(find, text)
            if manifest is not None and (not proves or await self._prove(manifest) is None):
                return manifest
            older, lost = await trio.to_thread.run_sync(self._cache.tell_apart, text)
            if lost and older is not None and not newest:
                return await self._mend(lost[0], older)
            swarm = self._swarm()
            wanted = swarm.commit if swarm is not None and not newest else None
            try:
                return await self._fetch(wanted, proves=proves)
            except FetchFailed as failure:
                if failure.kind is not Kind.CHANGED:
                    raise
            # It was replaced while it was read: what is there now is another thing, from its first byte on.
            self._meter.enter(Phase.RESOLVING)
            return await self._fetch(None, proves=proves)

    async def _prove_marked(self) -> None:
        """A wrong read is noted for all who share the folder: before anything is done about it, all of it is read.
        Where nothing is wrong it is a copy again, whether or not its origin can be reached, and whoever runs by it."""
        _, lost = await trio.to_thread.run_sync(self._cache.tell_apart, self._source.text)
        for each in filter(lambda each: each.is_marked, lost):
            # (what can't be read may be none that this fetch needs)
            with suppress(FetchFailed):
                wrong = await self._prove(each.manifest)
                if wrong is None:
                    return
                # What its beginning has become says more than that some piece is wrong.
                said = await trio.to_thread.run_sync(self._cache.look, each.manifest)
                self._proven[each.manifest.commit] = said or wrong

    async def _mend(self, lost: Damaged, older: Manifest) -> Manifest:
        """What was the newest here, once more; where that can't be had, the older one that is whole. Never without a
        word: replicas of one model may answer by two versions of it then."""
        try:
            return await self._fetch(lost.manifest.commit, proves=False, most_tries=MEND_TRIES)
        except FetchFailed as failure:
            source, commit = lost.manifest.source, lost.manifest.commit
            log.warning(
                "%s (%s) in %s is damaged (%s) and can't be mended (%s): the older %s is taken in its place",
                *(show_url(source), commit[:12], self._cache.folder / key_of(source) / commit, lost.why),
                *(failure.message, older.commit[:12]),
            )
        return older

    async def _fetch(self, commit: str | None, *, proves: bool, most_tries: int = MOST_TRIES) -> Manifest:
        self._meter.enter(Phase.RESOLVING)
        listing, by_member = await self._resolve(commit, most_tries)
        renew, text = self._cache.renew, self._source.text
        here = await trio.to_thread.run_sync(self._cache.read, text, listing.commit)
        if here is not None:
            proves = proves or await trio.to_thread.run_sync(self._cache.is_marked, here)
            wrong = await (self._prove(here) if proves else trio.to_thread.run_sync(self._cache.judge, here))
            # (what its origin went back to is the newest again)
            if wrong is None and (found := await trio.to_thread.run_sync(renew, text, here.commit, time.time())):
                return found
            if _is_of(here, listing):
                await self._set_aside(here, wrong or GONE)
            else:
                await self._set_unread_aside(Damaged(manifest=here, why=wrong or GONE), listing)
        else:
            unread: Damaged | None = await trio.to_thread.run_sync(self._cache.tell_unread, text, listing.commit)
            if unread is not None:
                await self._set_unread_aside(unread, listing)
        self._meter.know(listing, 0)
        partial = await self._open(listing)
        try:
            self._share(partial)
            self._meter.know(listing, await trio.to_thread.run_sync(count_bytes, partial))
            return await self._complete(partial, by_member=by_member)
        finally:
            self._share(None)
            # Before the lock is let go. It may wait for a file server.
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await trio.to_thread.run_sync(partial.close)

    async def _prove(self, manifest: Manifest) -> str | None:
        """What of a commit is not what was fetched; None where all of it is. Takes as long as the disk needs to read
        it, once."""
        if manifest.commit in self._proven:
            return self._proven[manifest.commit]
        listing = _list_again(manifest)
        hear = self._follow_both(lambda read, right: self._meter.prove(listing, read, right))
        self._meter.enter(Phase.VERIFYING)
        self._meter.know(listing, 0)
        self._meter.prove(listing, 0, 0)
        self._meter.wait_for(lambda: "the disk is slow: what lies here is not read yet")
        try:
            wrong = await trio.to_thread.run_sync(self._cache.prove, manifest, _stop_when_cancelled, hear)
        finally:
            self._meter.wait_for(None)
        self._proven[manifest.commit] = wrong
        return wrong

    async def _set_aside(self, manifest: Manifest, wrong: str) -> None:
        """What is right of it is what the fetch goes on from. Raises FetchFailed while anybody runs by it."""
        self._refuse_used(manifest, wrong)
        await trio.to_thread.run_sync(self._cache.set_aside, manifest, wrong)
        self._meter.mend(wrong)

    async def _set_unread_aside(self, damaged: Damaged, listing: Listing) -> None:
        """The same of a commit whose manifest can't be read whole any more: what it should be is what its origin says,
        and where that has no hash of it, what is left of the manifest, or another node."""
        self._refuse_used(damaged.manifest, damaged.why)
        if any(each.sha256 is None for each in listing.files):
            listing = _add_sums(listing, damaged.manifest.files)
        if any(each.sha256 is None for each in listing.files):
            told = await self._ask_members()
            listing = _add_sums(listing, told.files if told is not None and told.commit == listing.commit else ())
        self._meter.know(listing, 0)
        self._meter.wait_for(lambda: "the disk is slow: what lies here is not read yet")
        hear = self._follow(self._look_through)
        try:
            await trio.to_thread.run_sync(self._cache.set_unread_aside, damaged, listing, _stop_when_cancelled, hear)
        finally:
            self._meter.wait_for(None)
        self._meter.mend(damaged.why)

    def _refuse_used(self, manifest: Manifest, wrong: str) -> None:
        if users := self._users(manifest.commit):
            folder = self._cache.folder / key_of(manifest.source) / manifest.commit
            raise refuse_used(manifest.source, manifest.commit, folder, wrong, users)

    async def _open(self, listing: Listing) -> Partial:
        """What is here already, looked through: that takes as long as the disk needs for it."""
        self._meter.wait_for(lambda: "the disk is slow: it is not known yet what is here already")
        try:
            return await trio.to_thread.run_sync(
                self._cache.open_partial, listing, _stop_when_cancelled, self._follow(self._look_through)
            )
        finally:
            self._meter.wait_for(None)

    def _look_through(self, count: int) -> None:
        self._meter.enter(Phase.VERIFYING)
        self._meter.verify(count)

    async def _complete(self, partial: Partial, *, by_member: bool) -> Manifest:
        pieces = await trio.to_thread.run_sync(make_pieces, self._peers.node, partial)
        taking = Taking(
            self._source,
            partial,
            origin=self._origin,
            peers=self._peers,
            swarm=self._swarm,
            meter=self._meter,
            rate=self._rate,
            by_member=by_member,
            pieces=pieces,
        )
        anew: set[int] = set()
        while True:
            self._meter.enter(Phase.FETCHING)
            await _run(taking)
            self._meter.enter(Phase.VERIFYING)
            try:
                await trio.to_thread.run_sync(partial.verify, self._follow(self._meter.verify), _stop_when_cancelled)
                return await trio.to_thread.run_sync(partial.keep, time.time(), _stop_when_cancelled)
            except CorruptFile as failure:
                if failure.file in anew:
                    raise
                anew.add(failure.file)
                await trio.to_thread.run_sync(partial.forget, failure.file)
                await taking.take_anew(failure.file)

    def _find_commit(self, commit: str) -> Manifest | None:
        found = (each for each in self._cache.list() if each.source == self._source.text and each.commit == commit)
        return next(found, None)

    def _follow(self, hear: Callable[[int], None]) -> Callable[[int], None]:
        """What a thread that reads tells, not too often, in the loop."""
        told_at = 0.0

        def follow(count: int) -> None:
            nonlocal told_at
            now = time.monotonic()
            if now - told_at >= TOLD_EVERY_SECONDS:
                told_at = now
                trio.from_thread.run_sync(hear, count)

        return follow

    def _follow_both(self, hear: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """The same of two figures."""
        right_bytes = 0

        def hear_one(read_bytes: int) -> None:
            hear(read_bytes, right_bytes)

        follow = self._follow(hear_one)

        def follow_both(read: int, right: int) -> None:
            nonlocal right_bytes
            right_bytes = right
            follow(read)

        return follow_both

    async def _resolve(self, commit: str | None, most_tries: int) -> tuple[Listing, bool]:
        """What the source is: by its origin, or (True) by a member of the swarm, where that can't be reached."""
        self._meter.wait_for(lambda: "its origin has not answered yet")
        try:
            return await self._try_resolving(commit, most_tries)
        finally:
            self._meter.wait_for(None)

    async def _try_resolving(self, commit: str | None, most_tries: int) -> tuple[Listing, bool]:
        retries = Retries(most_tries)
        while True:
            failure: FetchFailed
            try:
                return await self._origin.resolve(self._source, commit), False
            except Broken as broken:
                again = retries.note(retries.number, broken.wait_seconds, trio.current_time())
                failure = broken.give_up()
            except FetchFailed as error:
                # A commit that is gone at its origin may still be whole elsewhere.
                if error.kind not in CUT_OFF and not (error.kind is Kind.CHANGED and commit is not None):
                    raise
                again, failure = False, error
            remedy = retries.describe(failure.remedy) if again else failure.remedy or "other nodes are asked for it"
            self._meter.note_trouble(failure.message, remedy)
            listing = await self._ask_members()
            # One that is here already says nothing of whether it is the newest.
            if listing is not None and await trio.to_thread.run_sync(self._find_commit, listing.commit) is None:
                return listing, True
            if not again:
                raise failure
            await trio.sleep_until(retries.rest_until)

    async def _ask_members(self) -> Listing | None:
        swarm = self._swarm()
        if swarm is None or swarm.commit is None or not self._peers.can_ask:
            return None
        key = key_of(self._source.text)
        for member in list_by_wholeness(swarm, self._peers.node):
            try:
                told = await self._peers.hear(member, key, swarm.commit, since=None, wait_seconds=0)
            except (PeerGone, NotNow):
                continue
            except Exception:
                log.exception("What %s tells of %s could not be taken in", member.node, self._source.name)
                continue
            return make_listing(self._source, swarm.commit, told)
        return None


def _list_again(manifest: Manifest) -> Listing:
    """What a commit was when it was fetched."""
    files = tuple(FileListed(name=each.name, size_bytes=each.size_bytes, sha256=each.sha256) for each in manifest.files)
    return Listing(source=manifest.source, commit=manifest.commit, files=files)


def _is_of(manifest: Manifest, listing: Listing) -> bool:
    """Whether its manifest can be right: one that has changed on its disk may have a name that nothing has."""
    kept, listed = ([(each.name, each.size_bytes) for each in all_of.files] for all_of in (manifest, listing))
    # (an earlier version may have taken other files of a repository)
    return kept == listed or len(kept) != len(listed)


def _add_sums(listing: Listing, told: Sequence[FileListed | FileKept]) -> Listing:
    """With what somebody else says of the same files, where the origin says nothing."""
    sums = {(each.name, each.size_bytes): each.sha256 or None for each in told}
    files = (replace(each, sha256=each.sha256 or sums.get((each.name, each.size_bytes))) for each in listing.files)
    return replace(listing, files=tuple(files))


def _stop_when_cancelled() -> bool:
    """Called in a thread: ends what is done there once nobody waits for it."""
    trio.from_thread.check_cancelled()
    return False
