"""Nodes that fetch and seed as agents do, several in one process: real caches, sockets and certificates, and a stand-in
for the server, which tells everybody who else is there."""

from __future__ import annotations

import hashlib
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from llmgw.config.server import Listen
from llmgw.core.node import NodeId
from llmgw.core.weights import Fetch, Manifest, Member, Phase, Swarm, key_of, parse_source
from llmgw.host.weights.disk.cache import Cache
from llmgw.host.weights.disk.partial import Partial
from llmgw.host.weights.fetch import fetch
from llmgw.host.weights.giver import Giver
from llmgw.host.weights.peers import Peers, open_peers
from llmgw.host.weights.seed import serve_seed
from llmgw.host.weights.shelf import KeptShelf, PartialShelf, Shelf
from llmgw.host.weights.sources.origin import Origin, OriginSettings, open_origin
from llmgw.pki.authority import Authority, certificate_pem, issue_node, key_pem, make_authority
from llmgw.reactor.credentials import load_files
from llmgw.reactor.rate import Rate

MIB = 1024 * 1024


def make_weights(path: Path, size_bytes: int) -> bytes:
    """A file that is the same at each run, and the bytes in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = random.Random(size_bytes).randbytes(size_bytes)
    path.write_bytes(content)
    return content


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Files:
    ca: Path
    cert: Path
    key: Path


@dataclass
class Node:
    """One agent, as far as weights go. ``told`` is all that its fetches have said."""

    id: NodeId
    cache: Cache
    origin: Origin
    peers: Peers
    files: Files
    fabrics: tuple[str, ...] = ()
    seed: str | None = None
    told: list[Fetch] = field(default_factory=list)
    shelf: tuple[str, Shelf] | None = None
    kept: dict[tuple[str, str], KeptShelf] = field(default_factory=dict)
    seeding: trio.CancelScope = field(default_factory=trio.CancelScope)
    users: Callable[[str], list[str]] = lambda commit: []

    @property
    def last(self) -> Fetch:
        return self.told[-1]

    def find(self, key: str, commit: str) -> Shelf | None:
        if (kept := self.kept.get((key, commit))) is not None:
            return kept
        return self.shelf[1] if self.shelf is not None and self.shelf[0] == f"{key}/{commit}" else None

    def share(self, partial: Partial | None) -> None:
        self.shelf = None
        if partial is not None:
            listing = partial.listing
            self.shelf = (f"{key_of(listing.source)}/{listing.commit}", PartialShelf(partial))


class Cluster:
    """The nodes, and what a server would tell each: who has a source, and who fetches it."""

    def __init__(self, folder: Path, endpoint: str, nursery: trio.Nursery, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.endpoint = endpoint
        self.nursery = nursery
        self.stack = stack
        self.nodes: dict[NodeId, Node] = {}
        self.gone: set[NodeId] = set()
        self.authority: Authority = make_authority(now=time.time())
        (folder / "ca.pem").write_bytes(certificate_pem(self.authority.certificate))

    async def add(
        self, name: str, *, seeds: bool = True, fabrics: tuple[str, ...] = (), read_seconds: float = 30.0
    ) -> Node:
        node = NodeId(name)
        files = self._issue(name)
        context = load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
        settings = OriginSettings(endpoint=self.endpoint, read_seconds=read_seconds)
        origin = await self.stack.enter_async_context(open_origin(settings))
        peers = await self.stack.enter_async_context(open_peers(node, lambda: context))
        cache = Cache(self.folder / name / "cache")
        self.nodes[node] = Node(node, cache, origin, peers, files, fabrics)
        if seeds:
            self.nodes[node].seed = await self.nursery.start(self._seed, self.nodes[node])
        return self.nodes[node]

    async def _seed(self, node: Node, task_status: trio.TaskStatus[str]) -> None:
        with node.seeding:
            await serve_seed(
                Listen(host="127.0.0.1", port=0),
                node.files,
                Giver(node.find, lambda asking, key: asking in self.nodes and asking not in self.gone),
                task_status=task_status,
            )

    def _issue(self, name: str) -> Files:
        issued = issue_node(self.authority, name, now=time.time())
        files = Files(self.folder / "ca.pem", self.folder / f"{name}.pem", self.folder / f"{name}-key.pem")
        files.cert.write_bytes(certificate_pem(issued.certificate))
        files.key.touch(mode=0o600)
        files.key.write_bytes(key_pem(issued.key))
        return files

    def swarm(self, source: str) -> Swarm | None:
        members, commit = [], None
        for node in self.nodes.values():
            last = next((each for each in reversed(node.told) if each.source == source), None)
            if node.id in self.gone or last is None or last.phase in (Phase.QUEUED, Phase.FAILED):
                continue
            commit = commit or last.commit
            members.append(Member(node=node.id, seed=node.seed, fabrics=node.fabrics, whole=last.phase is Phase.READY))
        return Swarm(source=source, commit=commit, members=tuple(members)) if members else None

    async def fetch(
        self,
        node: Node,
        text: str,
        *,
        newest: bool = False,
        rate: float | None = None,
        swarm: Callable[[], Swarm | None] | None = None,
    ) -> Manifest:
        manifest = await fetch(
            parse_source(text),
            cache=node.cache,
            origin=node.origin,
            peers=node.peers,
            swarm=swarm or (lambda: self.swarm(text)),
            tell=node.told.append,
            newest=newest,
            limits=Rate(rate),
            share=node.share,
            users=node.users,
        )
        folder = node.cache.path_of(manifest, as_file=False)
        node.kept[key_of(text), manifest.commit] = KeptShelf(manifest, folder)
        return manifest

    def kill(self, node: Node) -> None:
        """Its seeding ends as if it had died, and the server takes it out some time later (``gone``)."""
        node.seeding.cancel()


@asynccontextmanager
async def open_cluster(folder: Path, endpoint: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        yield Cluster(folder, endpoint, nursery, stack)
        nursery.cancel_scope.cancel()


def read_kept(node: Node, manifest: Manifest, name: str) -> bytes:
    return (node.cache.folder / key_of(manifest.source) / manifest.commit / name).read_bytes()


def check_told(told: list[Fetch]) -> None:
    """What is said of a fetch is never more than the truth, never falls, and is all only at the end."""
    done = 0
    for each in told:
        assert each.done_bytes >= done
        done = each.done_bytes
        if each.total_bytes is not None and each.phase is not Phase.READY:
            assert each.done_bytes < max(each.total_bytes, 1)
        if each.phase is Phase.READY:
            assert each.done_bytes == each.total_bytes
