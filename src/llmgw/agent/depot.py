"""The weights of a real machine: its cache, and the origin and the other nodes that more of them come from."""

from __future__ import annotations

import os
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

from llmgw.agent.settings import WeightsSettings
from llmgw.agent.troubles import Troubles
from llmgw.agent.watch import Watch
from llmgw.core.node import NodeId
from llmgw.core.weights import RELAY, Cached, Fetch, Manifest, SetAside, Source, Swarm, key_of
from llmgw.host.disks import is_shared
from llmgw.host.weights.disk.cache import Cache
from llmgw.host.weights.disk.damage import Damaged
from llmgw.host.weights.disk.in_use import Use
from llmgw.host.weights.disk.partial import Partial
from llmgw.host.weights.fetch import fetch
from llmgw.host.weights.giver import Giver
from llmgw.host.weights.model_dirs import MOST_FOUND, find_models
from llmgw.host.weights.peers import Peers, open_peers
from llmgw.host.weights.seed import serve_seed
from llmgw.host.weights.shelf import KeptShelf, PartialShelf, Shelf
from llmgw.host.weights.sources.origin import Origin, open_origin, read_origin_settings
from llmgw.reactor.credentials import Credentials, TlsFiles, load_files
from llmgw.reactor.rate import Rate


class Giving(Protocol):
    """Connections to the server over which weights are given to nodes that can't reach this one
    (``link.giving.Giving``)."""

    def want(self, is_wanted: bool) -> None:
        """Whether there is anybody to give to."""

    async def serve(self) -> None:
        """For ever: keep connections while that is wanted."""


# Answers on one such connection, and tells whether it is busy with that.
Answer = Callable[[trio.abc.Stream, Callable[[bool], None]], Awaitable[None]]
MakeGiving = Callable[[Answer], Giving]


class Depot:
    """This machine's weights (see ``hands.Depot``)."""

    __slots__ = (
        "_cache",
        "_credentials",
        "_giver",
        "_giving",
        "_node",
        "_origin",
        "_origin_settings",
        "_peers",
        "_rate",
        "_settings",
        "_shelves",
        "_troubles",
        "_watches",
        "seed",
    )

    def __init__(
        self,
        node: NodeId,
        settings: WeightsSettings,
        *,
        make_giving: MakeGiving | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """``make_giving``: None where there is no server to give through. Raises ConfigError where a setting can't be
        used, UsageError where the certificate can't."""
        self.seed: str | None = None
        self._node = node
        self._settings = settings
        self._origin_settings = read_origin_settings(
            environ, token=settings.hub_token, allow_hosts=settings.allow_hosts, asker=settings.asker
        )
        self._credentials = None if settings.tls is None else Credentials(settings.tls, _build_context)
        self._cache = Cache(settings.cache)
        # What others may take pieces of, by key and commit: found without a look at the disk.
        self._shelves: dict[tuple[str, str], Shelf] = {}
        self._rate = Rate(settings.download_rate)
        self._watches: Mapping[Path, Watch[tuple[str, ...]]] = {folder: Watch(()) for folder in settings.model_dirs}
        self._troubles = Troubles()
        self._origin: Origin
        self._peers: Peers
        self._giver: Giver
        self._giving = make_giving(self._answer) if make_giving is not None else None

    async def _answer(self, stream: trio.abc.Stream, busy: Callable[[bool], None]) -> None:
        # The server says for whom it asks.
        await self._giver.talk(stream, None, busy)

    async def serve(self, is_allowed: Callable[[NodeId, str], bool], *, task_status: trio.TaskStatus[None]) -> None:
        credentials = self._credentials
        context = None if credentials is None else lambda: credentials.current
        self._giver = Giver(self._find_shelf, is_allowed)
        async with (
            open_origin(self._origin_settings) as self._origin,
            open_peers(self._node, context, self._settings.server) as self._peers,
            trio.open_nursery() as nursery,
        ):
            task_status.started()
            # (left to itself where a file server does not answer)
            nursery.start_soon(partial(trio.to_thread.run_sync, self._cache.tidy, abandon_on_cancel=True))
            nursery.start_soon(self._peers.leave_idle)
            if self._giving is not None:
                nursery.start_soon(self._giving.serve)
            listen, tls = self._settings.seed_listen, self._settings.tls
            if listen is not None and tls is not None:
                await serve_seed(listen, tls, self._giver, task_status=_Started(self))
            await trio.sleep_forever()

    def note_swarms(self, swarms: Collection[Swarm]) -> None:
        members = (member for swarm in swarms for member in swarm.members)
        if self._giving is not None:
            self._giving.want(any(member.node == self._node and member.seed == RELAY for member in members))

    def _find_shelf(self, key: str, commit: str) -> Shelf | None:
        return self._shelves.get((key, commit))

    async def fetch(
        self,
        source: Source,
        *,
        swarm: Callable[[], Swarm | None],
        tell: Callable[[Fetch], None],
        newest: bool,
        users: Callable[[str], Sequence[str]],
    ) -> Manifest:
        def share(opened: Partial | None) -> None:
            if opened is None:
                self._keep_shelves(lambda name, shelf: name[0] != key or shelf.whole)
            else:
                self._shelves[key, opened.listing.commit] = PartialShelf(opened)

        key = key_of(source.text)
        manifest = await fetch(
            source,
            cache=self._cache,
            origin=self._origin,
            peers=self._peers,
            swarm=swarm,
            tell=tell,
            newest=newest,
            limits=self._rate,
            share=share,
            users=users,
        )
        self._put(manifest)
        return manifest

    def _put(self, manifest: Manifest) -> None:
        key = key_of(manifest.source)
        folder = self._settings.cache / key / manifest.commit
        self._shelves[key, manifest.commit] = KeptShelf(manifest, folder, partial(self._cache.note_wrong, manifest))

    def _keep_shelves(self, is_kept: Callable[[tuple[str, str], Shelf], bool]) -> None:
        self._shelves = {name: shelf for name, shelf in self._shelves.items() if is_kept(name, shelf)}

    def find(self, source: str) -> Manifest | None:
        return self._cache.find(source)

    async def list(self) -> tuple[Manifest, ...]:
        found = await trio.to_thread.run_sync(self._cache.list)
        self._keep_shelves(lambda name, shelf: not shelf.whole)
        for each in found:
            # By the very manifest that the cache keeps: that is long, and one of each is enough.
            self._put(each)
        return found

    def list_damaged(self) -> tuple[Damaged, ...]:
        return self._cache.list_damaged()

    @property
    def set_asides(self) -> tuple[SetAside, ...]:
        return self._cache.set_asides

    def look(self, manifest: Manifest) -> str | None:
        return self._cache.look(manifest)

    def list_unfinished(self) -> tuple[Cached, ...]:
        return tuple(
            Cached(
                source=each.source,
                commit=each.commit,
                size_bytes=each.size_bytes,
                fetched_at=each.changed_at,
                whole=False,
            )
            for each in self._cache.list_partials()
            # (of another key nobody could say whether it is wanted)
            if each.source is not None
        )

    def path_of(self, manifest: Manifest, *, as_file: bool) -> Path:
        return self._cache.path_of(manifest, as_file=as_file)

    def use(self, manifest: Manifest) -> Use | None:
        return self._cache.use(manifest)

    def remove(self, source: str, commit: str, stands: Callable[[], bool] = lambda: True) -> int:
        freed = self._cache.remove(source, commit, stands)
        for each in self._cache.list_partials():
            if (each.source, each.commit) == (source, commit):
                freed += self._cache.remove_partial(each, stands)
        return freed

    def is_shared(self) -> bool:
        return is_shared(self._settings.cache)

    async def look_around(self) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for folder, watch in self._watches.items():
            seen = await watch.look(partial(find_models, folder, besides=self._settings.cache))
            # What an engine could not read either is not here.
            silent = seen.silent_seconds > 0
            self._troubles.note(f"{folder} of model_dirs", "its filesystem does not answer" if silent else None)
            found |= {} if silent else dict.fromkeys(seen.value)
        return tuple(found)[:MOST_FOUND]


class _Started:
    """Takes the address that pieces are given at, once there is one."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot

    def started(self, value: str | None = None) -> None:
        self._depot.seed = value


def _build_context(files: TlsFiles) -> ssl.SSLContext:
    return load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
