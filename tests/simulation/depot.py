"""The weights of a simulated machine, and the origin that all machines fetch them from: bytes are counted, and none are
there.

One ``Origin`` belongs to a world, one ``SimulatedDepot`` to a machine: it is a disk, and outlives the agents on it.
What has come of a fetch that is cancelled, or whose agent is killed, is there for the next one.

- ``origin.down``: nobody is answered; who fetches waits ``PATIENCE_SECONDS``, and gives up. ``origin.slow``: by so many
  times. ``origin.publish`` makes another commit of a source. ``origin.sent`` are the bytes that each fetch has taken,
  and ``origin.begun`` all fetches that there were, in their order.
- ``depot.spoilt`` says of whole commits what the next look at them finds, and ``depot.damaged`` what was found.
- ``depot.spoil`` is how many of the next fetches end with bytes that are not what they should be; ``is_full`` of the
  machine ends those that are on their way.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from llmgw.core.node import NodeId
from llmgw.core.weights import Cached, Fetch, FileKept, Manifest, Phase, SetAside, Source, Swarm, key_of
from llmgw.errors import LlmgwError
from llmgw.host.weights.disk.damage import Damaged
from llmgw.host.weights.errors import FetchFailed, Kind

STEP_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
VERIFIED_PER_SECOND = 2e9
SIZE_BYTES = 20_000_000_000


@dataclass(kw_only=True)
class Origin:
    """Where all weights come from, ``rate`` bytes per second to each node; see the head of this file."""

    rate: float = 1e9
    sizes: Mapping[str, int] = field(default_factory=dict)
    down: bool = False
    slow: float = 1.0
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    begun: list[tuple[str, str]] = field(default_factory=list)
    _published: Counter[str] = field(default_factory=Counter)

    def size_of(self, source: str) -> int:
        return self.sizes.get(source, SIZE_BYTES)

    def commit_of(self, source: str) -> str:
        return hashlib.sha1(f"{source} {self._published[source]}".encode()).hexdigest()

    def publish(self, source: str) -> None:
        """There is a newer commit of it."""
        self._published[source] += 1


class SimulatedUse:
    """Keeps a commit from being removed."""

    def __init__(self, uses: Counter[tuple[str, str]], name: tuple[str, str]) -> None:
        self._uses = uses
        self._name = name
        uses[name] += 1

    def close(self) -> None:
        self._uses[self._name] -= 1


@dataclass(kw_only=True)
class SimulatedDepot:
    """One machine's weights (``agent.hands.Depot``)."""

    node: str
    origin: Origin
    is_full: Callable[[], bool] = lambda: False
    wall: float = 0.0
    seen: tuple[str, ...] = ()
    spoil: int = 0
    seed: str | None = None
    swarms: tuple[Swarm, ...] = ()
    kept: dict[tuple[str, str], Manifest] = field(init=False, default_factory=dict)
    partial: Counter[tuple[str, str]] = field(init=False, default_factory=Counter)
    spoilt: dict[tuple[str, str], str] = field(init=False, default_factory=dict)
    damaged: dict[tuple[str, str], Damaged] = field(init=False, default_factory=dict)
    set_asides: tuple[SetAside, ...] = field(init=False, default=())
    is_served: bool = field(init=False, default=False)
    _uses: Counter[tuple[str, str]] = field(init=False, default_factory=Counter)
    _fetched: set[str] = field(init=False, default_factory=set)

    @property
    def folder(self) -> Path:
        return Path("/simulated") / self.node / "weights"

    def is_whole(self, path: str) -> bool:
        """Whether this is the path of weights that are whole, or none of weights at all."""
        return Path(path) in map(self._place, self.kept.values()) or not Path(path).is_relative_to(self.folder)

    def has(self, source: str) -> bool:
        """Whether there is a whole commit of it."""
        return any(name == source for name, _ in self.kept)

    # What an agent does with them

    def note_swarms(self, swarms: Collection[Swarm]) -> None:
        self.swarms = tuple(swarms)

    async def serve(self, is_allowed: Callable[[NodeId, str], bool], *, task_status: trio.TaskStatus[None]) -> None:
        # Who held anything is dead.
        self._uses.clear()
        self._fetched.clear()
        self.is_served = True
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self.is_served = False

    async def fetch(
        self,
        source: Source,
        *,
        swarm: Callable[[], Swarm | None],
        tell: Callable[[Fetch], None],
        newest: bool,
        users: Callable[[str], Sequence[str]],
    ) -> Manifest:
        text = source.text
        if not self.is_served or text in self._fetched:
            raise AssertionError(f"{text} is fetched on {self.node} twice at once, or by nobody")
        self._fetched.add(text)
        self.origin.begun.append((self.node, text))
        whole = [each for each in self._list_of(text) if (text, each.commit) not in self.damaged]
        older = None if newest else max(whole, key=lambda each: each.fetched_at, default=None)
        try:
            told = Fetch(source=text, phase=Phase.RESOLVING)
            tell(told)
            await self._wait_for_origin(told, tell)
            others = swarm()
            commit = self.origin.commit_of(text) if newest or others is None else others.commit
            if older is not None:
                # (there is a newer one, which is damaged)
                commit = max(self._list_of(text), key=lambda each: each.fetched_at).commit
            commit = commit or self.origin.commit_of(text)
            name = (text, commit)
            if (damaged := self.damaged.get(name)) is not None:
                if users(commit):
                    raise FetchFailed(f"{text} is damaged, and {users(commit)} run by it", Kind.CORRUPT)
                del self.damaged[name], self.kept[name]
                self.spoilt.pop(name, None)
                at = damaged.manifest.fetched_at
                told_of = SetAside(source=text, commit=commit, fetched_at=at, why=damaged.why)
                self.set_asides = (*self.set_asides, told_of)
            return self.kept.get((text, commit)) or await self._fetch(text, commit, tell)
        except FetchFailed:
            if older is None:
                raise
            return older
        finally:
            self._fetched.discard(text)

    async def _fetch(self, source: str, commit: str, tell: Callable[[Fetch], None]) -> Manifest:
        size, name, began_at = self.origin.size_of(source), (source, commit), trio.current_time()
        taken = 0
        while True:
            done = self.partial[name]
            seconds = trio.current_time() - began_at
            told = Fetch(
                source=source,
                phase=Phase.FETCHING,
                commit=commit,
                # (the last of it counts when it was found whole)
                done_bytes=min(done, size - 1),
                total_bytes=size,
                rate=taken / seconds if seconds else None,
                left_seconds=(size - done) * seconds / taken if taken else None,
                origin_bytes=taken,
            )
            tell(told)
            if done >= size:
                break
            await trio.sleep(STEP_SECONDS)
            if self.is_full():
                raise FetchFailed(f"no room for {source} in {self.folder}", Kind.DISK, remedy="free some space")
            await self._wait_for_origin(told, tell)
            some = min(size - done, round(self.origin.rate / self.origin.slow * STEP_SECONDS))
            self.partial[name] += some
            self.origin.sent[self.node, source] += some
            taken += some
        tell(replace(told, phase=Phase.VERIFYING, rate=None, left_seconds=None))
        await trio.sleep(size / VERIFIED_PER_SECOND)
        del self.partial[name]
        if self.spoil:
            self.spoil -= 1
            raise FetchFailed(f"{source} is not what its origin says", Kind.CORRUPT, remedy="try again")
        file = FileKept(name="m.fake", size_bytes=size, sha256=commit, pieces=())
        at = self.wall + trio.current_time()
        manifest = self.kept[name] = Manifest(source=source, commit=commit, files=(file,), fetched_at=at)
        tell(replace(told, phase=Phase.READY, done_bytes=size, rate=None, left_seconds=None))
        return manifest

    async def _wait_for_origin(self, told: Fetch, tell: Callable[[Fetch], None]) -> None:
        since = trio.current_time()
        while self.origin.down:
            waited = trio.current_time() - since
            if waited >= PATIENCE_SECONDS:
                raise FetchFailed(f"nobody answers for {told.source}", Kind.UNREACHABLE, remedy="see where it is")
            tell(replace(told, rate=0.0, left_seconds=None, stalled_seconds=waited))
            await trio.sleep(STEP_SECONDS)

    def find(self, source: str) -> Manifest | None:
        found = max(self._list_of(source), key=lambda each: each.fetched_at, default=None)
        return None if found is None or (source, found.commit) in self.damaged else found

    def _list_of(self, source: str) -> list[Manifest]:
        return [each for each in self.kept.values() if each.source == source]

    async def list(self) -> tuple[Manifest, ...]:
        await trio.lowlevel.checkpoint()
        return tuple(each for name, each in self.kept.items() if name not in self.damaged)

    def list_damaged(self) -> tuple[Damaged, ...]:
        return tuple(self.damaged.values())

    def look(self, manifest: Manifest) -> str | None:
        name = (manifest.source, manifest.commit)
        if (why := self.spoilt.get(name)) is not None:
            self.damaged[name] = Damaged(manifest=manifest, why=why)
        return why

    def list_unfinished(self) -> tuple[Cached, ...]:
        return tuple(
            Cached(source=source, commit=commit, size_bytes=done, fetched_at=self.wall, whole=False)
            for (source, commit), done in sorted(self.partial.items())
        )

    def path_of(self, manifest: Manifest, *, as_file: bool) -> Path:
        return self._place(manifest) if as_file else self._place(manifest).parent

    def _place(self, manifest: Manifest) -> Path:
        return self.folder / key_of(manifest.source) / manifest.commit / manifest.files[0].name

    def use(self, manifest: Manifest) -> SimulatedUse | None:
        name = (manifest.source, manifest.commit)
        return SimulatedUse(self._uses, name) if name in self.kept else None

    def remove(self, source: str, commit: str, stands: Callable[[], bool] = lambda: True) -> int:
        name = (source, commit)
        if not stands():
            raise LlmgwError("the order was taken back, or was over, before its turn came")
        if self._uses[name]:
            raise LlmgwError("it is in use")
        if name not in self.kept and name not in self.partial:
            raise LlmgwError("it is not here")
        whole = self.kept.pop(name, None)
        return self.partial.pop(name, 0) + (0 if whole is None else whole.size_bytes)

    def is_shared(self) -> bool:
        return False

    async def look_around(self) -> tuple[str, ...]:
        await trio.lowlevel.checkpoint()
        return self.seen
