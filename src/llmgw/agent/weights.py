"""The weights of a node: fetched once for all shards that wait for them, kept while one runs by them, and told of."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import trio

from llmgw.agent.bounding import bound
from llmgw.agent.fetches import SHOWN_COMMIT, Fetches, Fetching
from llmgw.agent.hands import Hands, Use
from llmgw.agent.sources import is_file_wanted
from llmgw.core.node import NodeId
from llmgw.core.replica import ShardId
from llmgw.core.weights import (
    Cached,
    Collect,
    Collected,
    Fetch,
    Manifest,
    NodeWeights,
    Phase,
    Pull,
    Swarm,
    WeightsOrder,
    key_of,
    parse_source,
)
from llmgw.engines.registry import Engine
from llmgw.errors import EngineFailed, LlmgwError
from llmgw.host.weights.disk.damage import Damaged
from llmgw.host.weights.errors import FetchFailed, Kind, show_url
from llmgw.units import format_decimal

log = logging.getLogger(__name__)

# What is on its way is told no more often, but for its turns: other nodes wait for those, to share it. And no less
# often, even where nothing seems to change.
TELL_SECONDS = 1.0
STILL_SECONDS = 5.0


class Weights:
    """All that an agent does about weights: one for all of its shards."""

    __slots__ = (
        "_allowed",
        "_asked",
        "_asks",
        "_begin",
        "_changed",
        "_collect",
        "_collected",
        "_collecting",
        "_damaged",
        "_fetches",
        "_hands",
        "_hurried",
        "_kept",
        "_listing",
        "_ordered",
        "_over",
        "_pulls",
        "_seen",
        "_shared",
        "_standing",
        "_swarms",
        "_unfinished",
        "_uses",
    )

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._fetches = Fetches(
            hands.depot,
            begin=lambda *args, name: self._begin(*args, name=name),
            find_swarm=self._find_swarm,
            find_users=self._find_users,
            changed=self._stir,
            turned=self._hurry,
            kept=self._note_kept,
            spoilt=self._list_again,
            over=self._note_over,
        )
        # What each shard runs by, or is about to: by source.
        self._uses: dict[ShardId, dict[str, tuple[str, Use | None]]] = {}
        self._swarms: dict[str, Swarm] = {}
        self._allowed: Mapping[str, Collection[NodeId]] = {}
        # What came of each pull of an operator, None while it is carried out; those that the server still asks for.
        self._pulls: dict[Pull, Fetch | None] = {}
        self._asked: frozenset[Pull] = frozenset()
        # The last order to remove that was begun, the one that the server stands by, and the mark by which it is asked
        # whether it does.
        self._collect: int | None = None
        self._standing: Collect | None = None
        self._asks: str | None = None
        self._ordered = trio.Event()
        self._collected: Collected | None = None
        self._collecting = trio.Lock()
        # None until the folder was looked at: to tell that there is nothing would be a lie.
        self._kept: tuple[Manifest, ...] | None = None
        self._unfinished: tuple[Cached, ...] = ()
        self._damaged: tuple[Damaged, ...] = ()
        self._seen: tuple[str, ...] = ()
        self._shared = False
        self._changed = trio.Event()
        # Some fetch has ended: what is left of it is not what it was.
        self._over = trio.Event()
        self._listing = trio.Lock()
        # It is not to wait for the next time that something is told.
        self._hurried = trio.Event()
        self._begin: Callable[..., None] = _fail_to_begin

    async def serve(
        self,
        nursery: trio.Nursery,
        report: Callable[[NodeWeights], None],
        look_seconds: float,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Tell for ever what is new, and look for what lies here each ``look_seconds``. Started once there can be
        fetches; they, and all else that takes its time, run in the nursery."""
        self._begin = nursery.start_soon
        await nursery.start(self._hands.depot.serve, self.is_allowed)
        nursery.start_soon(self._look, look_seconds)
        nursery.start_soon(self._look_after_fetches)
        task_status.started()
        told = None
        while True:
            with trio.move_on_after(STILL_SECONDS if self._fetches else math.inf):
                await self._changed.wait()
            self._changed = trio.Event()
            self._fetches.tell()
            now = self.tell()
            if now is not None and (now != told or self._fetches):
                report(now)
                told = now
            self._hurried = trio.Event()
            with trio.move_on_after(TELL_SECONDS):
                await self._hurried.wait()

    def _stir(self) -> None:
        self._changed.set()

    def _hurry(self) -> None:
        self._changed.set()
        self._hurried.set()

    def _note_over(self) -> None:
        self._over.set()

    def _find_swarm(self, source: str) -> Swarm | None:
        return self._swarms.get(source)

    def is_allowed(self, node: NodeId, key: str) -> bool:
        """Whether a node may take pieces of the source of this key: the server has to have named it for that."""
        return node in self._allowed.get(key, ())

    # -- what shards need

    async def obtain(self, source: str, engine: Engine, tell: Callable[[Fetch | None], None], *, by: ShardId) -> str:
        """What the engine is pointed at for this source: itself where it is nothing that llmgw fetches, else the path
        of what was fetched. ``tell`` is told how that goes, and None when it is over.

        The newest that is here is taken without asking anybody whether there is newer. Where that is no copy any more,
        or the beginnings of its files show that it is none, it is proven or fetched anew; an older one is taken only
        where that can't be. It stays here until the shard gives it back. Raises EngineFailed; being cancelled, it
        leaves the fetch to others who wait for it.
        """
        parsed, hands = parse_source(source), self._hands
        if not parsed.is_fetched:
            return source
        while True:
            manifest = await hands.run(hands.depot.find, source)
            is_new = manifest is None
            if manifest is None:
                try:
                    fetched = await self._fetches.wait(parsed, by, tell)
                finally:
                    tell(None)
                manifest = fetched.read()
            # Before it is held: several that look at once must not keep each other from having it mended.
            wrong: str | None = await hands.run(hands.depot.look, manifest)
            if wrong is not None:
                self._note_damaged(manifest, wrong)
                if is_new:
                    # Nobody is to fetch it for ever.
                    told = f"{show_url(source)} ({manifest.commit[:SHOWN_COMMIT]}) has just come"
                    remedy = "see whether that disk is well, and what else writes there"
                    raise FetchFailed(f"{told}, and is damaged: {wrong}", Kind.CORRUPT, remedy=remedy)
                continue
            use = await hands.run(hands.depot.use, manifest)
            if use is not None:
                self._keep(by, manifest, use)
                path = await hands.run(_find_path, hands, manifest, is_file_wanted(parsed, engine))
                return str(path)
            log.info("%s (%s) was removed before it was used", show_url(source), manifest.commit[:SHOWN_COMMIT])

    def _keep(self, shard: ShardId, manifest: Manifest, use: Use | None) -> None:
        uses = self._uses.setdefault(shard, {})
        _, earlier = uses.get(manifest.source, (None, None))
        if earlier is not None:
            earlier.close()
        uses[manifest.source] = manifest.commit, use
        if all((each.source, each.commit) != (manifest.source, manifest.commit) for each in self._kept or ()):
            # Another program has fetched it since the last look.
            self._note_kept(manifest)
        self._stir()

    async def resume(self, shard: ShardId, runs_by: Sequence[tuple[str, str]]) -> None:
        """A shard was found running, by these commits of these sources."""
        if not runs_by:
            return
        whole = await self._hands.depot.list()
        # (what was damaged meanwhile it runs by all the same)
        damaged = (each.manifest for each in self._hands.depot.list_damaged())
        kept = {(each.source, each.commit): each for each in (*whole, *damaged)}
        for source, commit in runs_by:
            manifest = kept.get((source, commit))
            use = None
            try:
                if manifest is not None:
                    use = await self._hands.run(self._hands.depot.use, manifest)
            except LlmgwError as error:
                # It runs all the same, and is told to be in use.
                log.warning("shard %s: what it runs by can't be held: %s", shard, error.message)
            self._uses.setdefault(shard, {})[source] = commit, use

    def find_used(self, shard: ShardId) -> tuple[tuple[str, str], ...]:
        """What a shard runs by, as pairs of source and commit."""
        return tuple((source, commit) for source, (commit, _) in self._uses.get(shard, {}).items())

    def _find_users(self, source: str, commit: str) -> tuple[ShardId, ...]:
        """The shards that run by this commit, or are about to."""
        return tuple(shard for shard in self._uses if (source, commit) in self.find_used(shard))

    def give_back(self, shard: ShardId) -> None:
        """It runs by nothing any more."""
        for _, use in self._uses.pop(shard, {}).values():
            if use is not None:
                use.close()
        self._stir()

    # -- what the server says

    def order(self, order: WeightsOrder) -> None:
        """Take all that the server says of weights."""
        # Of several of one source the first is the one of what this node fetches.
        swarms = {swarm.source: swarm for swarm in reversed(order.swarms)}
        # One that is as it was stays the same object: fetches look at theirs all the time.
        self._swarms |= {source: swarm for source, swarm in swarms.items() if swarm != self._swarms.get(source)}
        self._swarms = {source: self._swarms[source] for source in swarms}
        allowed: dict[str, set[NodeId]] = {}
        for swarm in order.swarms:
            allowed.setdefault(key_of(swarm.source), set()).update(member.node for member in swarm.members)
        self._allowed = allowed
        self._hands.depot.note_swarms(order.swarms)
        self._asked = frozenset(order.pulls)
        # One that is carried out goes on: a server that has begun anew knows nothing of it, and an operator waits.
        self._pulls = {pull: ended for pull, ended in self._pulls.items() if ended is None or pull in self._asked}
        for pull in order.pulls:
            if pull not in self._pulls:
                self._pulls[pull] = None
                self._begin(self._pull, pull, name=f"pull {pull.number}")
        # The same one is told again with each link, and is not to be done again.
        self._standing = order.collect
        self._ordered.set()
        self._ordered = trio.Event()
        if order.collect is not None and order.collect.number != self._collect:
            self._collect = order.collect.number
            self._begin(self._remove, order.collect, name=f"collect {order.collect.number}")
        self._stir()

    async def _pull(self, pull: Pull) -> None:
        source = parse_source(pull.source)
        told = Fetch(source=pull.source, phase=Phase.RESOLVING)
        try:
            if not source.is_fetched:
                why = f": {source.why}" if source.why else ""
                raise EngineFailed(f"{show_url(pull.source)} is nothing that llmgw fetches{why}")
            fetched = await self._fetches.wait(source, pull, lambda fetch: None, newest=True)
            told = fetched.told
            manifest = fetched.read()
        except EngineFailed as error:
            ended = replace(told, phase=Phase.FAILED, cause=error.message, remedy=error.remedy)
        else:
            commit, size = manifest.commit, manifest.size_bytes
            ended = replace(told, phase=Phase.READY, commit=commit, done_bytes=size, total_bytes=size)
        if pull in self._asked:
            self._pulls[pull] = replace(ended, pull=pull.number, rate=None, left_seconds=None, stalled_seconds=None)
        else:
            del self._pulls[pull]
        self._hurry()

    async def _remove(self, order: Collect) -> None:
        """Remove what may go. Each is looked at again: what was free when it was ordered may be in use by now."""
        freed, kept = 0, []
        # One order after the other, so that what is told is of the last.
        async with self._collecting:
            until = await self._ask(order.number)

            def stands(item: tuple[str, str]) -> bool:
                standing = self._standing
                in_time = self._hands.boot_seconds() < until
                return in_time and standing is not None and standing.number == order.number and item in standing.items

            for source, commit in order.items:
                name = f"{parse_source(source).name or show_url(source)} ({commit[:SHOWN_COMMIT]})"
                try:
                    freed += await self._remove_one(source, commit, partial(stands, (source, commit)))
                except LlmgwError as why:
                    kept.append(f"{name}: {why.message}")
                except Exception as error:
                    log.exception("%s can't be removed by a fault of llmgw", name)
                    kept.append(f"{name}: a fault of llmgw itself: {type(error).__name__}")
            try:
                await self._list()
            except Exception:
                log.exception("what is left of the weights here can't be listed")
            log.info("removed weights: %s freed, %d kept", format_decimal(freed), len(kept))
            if self._collect == order.number:
                self._collected = Collected(number=order.number, freed_bytes=freed, kept=tuple(kept))
        self._hurry()

    async def _ask(self, number: int) -> float:
        """Ask whether an order stands, which may have lain on the way for long: until when, as ``boot_seconds``. It is
        counted from the question, so whatever stands still meanwhile, here or on the way, makes it no longer."""
        asked_at, mark = self._hands.boot_seconds(), secrets.token_hex(8)
        self._asks = mark
        self._hurry()
        try:
            while (standing := self._standing) is not None and standing.number == number:
                if standing.asked == mark:
                    return asked_at + standing.seconds
                await self._ordered.wait()
            return -math.inf
        finally:
            self._asks = None

    async def _remove_one(self, source: str, commit: str, stands: Callable[[], bool]) -> int:
        if users := self._find_users(source, commit):
            raise EngineFailed(f"in use by {', '.join(users)}")
        return await self._hands.run(self._hands.depot.remove, source, commit, stands)

    # -- what is told

    def _note_kept(self, manifest: Manifest) -> None:
        """At once: that it is here must not be told later than that it is not fetched any more."""
        if self._kept is not None:
            others = (each for each in self._kept if (each.source, each.commit) != (manifest.source, manifest.commit))
            self._kept = (*others, manifest)
        self._fetches.forget_failed(manifest.source)

    def _note_damaged(self, manifest: Manifest, wrong: str) -> None:
        """Nobody is to take it for a copy any more."""
        name, kept = (manifest.source, manifest.commit), self._kept
        if kept is not None:
            self._kept = tuple(each for each in kept if (each.source, each.commit) != name)
        others = (each for each in self._damaged if (each.manifest.source, each.manifest.commit) != name)
        self._damaged = (*others, Damaged(manifest=manifest, why=wrong))
        self._stir()

    async def _list(self) -> None:
        """Look at what is here, and once more where something has come meanwhile."""
        # One look after the other: what is told is that of the last.
        async with self._listing:
            before, found = None, None
            while found is None or self._kept is not before:
                before = self._kept
                found = await self._hands.depot.list()
            known = {(each.source, each.commit) for each in before or ()}
            for each in found:
                if (each.source, each.commit) not in known:
                    self._fetches.forget_failed(each.source)
            self._kept = found
            self._damaged = self._hands.depot.list_damaged()
            self._unfinished = await self._hands.run(self._hands.depot.list_unfinished)

    def tell(self) -> NodeWeights | None:
        """All that there is to be said; None while nobody has looked yet."""
        if self._kept is None:
            return None
        used = {name for shard in self._uses for name in self.find_used(shard)}
        # (what of it is here is told with the fetch itself)
        fetched = {fetching.source.text for fetching in self._fetches}
        # (nor is anything left of the fetch of what is whole: it was looked for before that)
        whole = {(each.source, each.commit) for each in self._kept}
        unfinished = (
            each for each in self._unfinished if each.source not in fetched and (each.source, each.commit) not in whole
        )
        ended = [fetch for fetch in self._pulls.values() if fetch is not None]
        told = {(fetch.source, fetch.pull) for fetch in ended}
        weights = NodeWeights(
            seed=self._hands.depot.seed,
            cached=(
                *(replace(_list_manifest(each), in_use=(each.source, each.commit) in used) for each in self._kept),
                *self._list_damaged(used - whole),
                *unfinished,
            ),
            fetches=(
                *map(self._tell_fetch, self._fetches),
                *ended,
                *(fetch for fetch in self._fetches.list_failed() if (fetch.source, fetch.pull) not in told),
            ),
            seen=self._seen,
            shared=self._shared,
            collected=self._collected,
            set_aside=self._hands.depot.set_asides,
            asks=self._asks,
        )
        return bound(weights)

    def _list_damaged(self, used: Collection[tuple[str, str]]) -> Iterator[Cached]:
        """What is no copy any more, and what is not even there; these are ``used`` of it."""
        whole = {(each.source, each.commit) for each in self._kept or ()}
        gone = set(used)
        for each in self._damaged:
            name = each.manifest.source, each.manifest.commit
            gone.discard(name)
            if name not in whole:
                told = _list_manifest(each.manifest)
                yield replace(told, in_use=name in used, whole=False, wrong=each.why)
        for source, commit in sorted(gone):
            wrong = "its files are gone, or its manifest can't be read"
            yield Cached(
                source=source, commit=commit, size_bytes=0, fetched_at=0.0, in_use=True, whole=False, wrong=wrong
            )

    def _tell_fetch(self, fetching: Fetching) -> Fetch:
        """With the pull that it carries out, or that waits for it."""
        numbers = [
            pull.number for pull, ended in self._pulls.items() if pull.source == fetching.source.text and ended is None
        ]
        return replace(fetching.told, pull=max(numbers, default=None))

    async def _look(self, seconds: float) -> None:
        """Look for ever for what lies here: others may write to the same folders."""
        hands = self._hands
        while True:
            try:
                self._shared = await hands.run(hands.depot.is_shared)
                await self._list()
                self._stir()
                self._seen = await hands.depot.look_around()
                self._stir()
            except Exception as error:
                log.error("the weights on this node can't be listed; trying again", exc_info=error)
            await trio.sleep(seconds)

    async def _look_after_fetches(self) -> None:
        """Look once more, for ever, when a fetch has ended: it may have left something, or nothing."""
        while True:
            await self._over.wait()
            self._over = trio.Event()
            await self._list_again()
            self._stir()

    async def _list_again(self) -> None:
        """What a fetch has found or left is not to be told later than that it has failed."""
        try:
            await self._list()
        except Exception:
            log.exception("what a fetch has left here can't be listed; it will be with the next look")


def _list_manifest(each: Manifest) -> Cached:
    return Cached(source=each.source, commit=each.commit, size_bytes=each.size_bytes, fetched_at=each.fetched_at)


def _find_path(hands: Hands, manifest: Manifest, as_file: bool) -> str:
    return str(hands.depot.path_of(manifest, as_file=as_file))


def _fail_to_begin(*_: object, **__: object) -> None:
    raise RuntimeError("nothing can be fetched before the node is served")
