"""Several nodes that fetch the same at once, with real certificates on real sockets, and what can go wrong there."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing
from blake3 import blake3
from fake_origin import FakeOrigin
from fetchers import MIB, Cluster, Node, check_told, make_weights, open_cluster, read_kept
from trio.testing import MockClock

from llmgw.core.asked import PATIENCE_SECONDS, Take
from llmgw.core.node import NodeId
from llmgw.core.weights import RELAY, FileListed, Listing, Manifest, Member, Phase, Source, Swarm, parse_source
from llmgw.host.weights import taking
from llmgw.host.weights.disk.cache import Cache
from llmgw.host.weights.peers import NotNow, Peers, Told
from llmgw.host.weights.progress_meter import ProgressMeter
from llmgw.host.weights.sources.origin import Origin
from llmgw.host.weights.taking import make_pieces
from llmgw.reactor.rate import Rate

TEXT = "hf:org/repo/x.bin"
FILE = "org/repo/x.bin"
SIZE = 12 * MIB + 999


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return make_weights(tmp_path / "files" / FILE, SIZE)


@pytest.fixture
def origin(tmp_path: Path, content: bytes) -> Iterator[FakeOrigin]:
    with FakeOrigin(tmp_path / "files") as server:
        yield server


async def fetch_all(cluster: Cluster, *nodes: Node) -> list[Manifest]:
    found: list[Manifest] = []

    async def one(node: Node) -> None:
        found.append(await cluster.fetch(node, TEXT))

    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(one, node)
    return found


def check(nodes: list[Node], manifest: Manifest, content: bytes) -> None:
    for node in nodes:
        assert read_kept(node, manifest, "x.bin") == content
        check_told(node.told)


async def until(true: object) -> None:
    with trio.fail_after(60):
        # (what is waited for is told by sockets and threads)
        while not true():  # type: ignore[operator] # noqa: ASYNC110
            await trio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 8])
async def test_many_that_fetch_at_once_cost_the_origin_one_copy(
    tmp_path: Path, origin: FakeOrigin, content: bytes, count: int
) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        nodes = [await cluster.add(f"n{number}") for number in range(count)]
        (manifest, *_) = await fetch_all(cluster, *nodes)
        check(nodes, manifest, content)
        assert origin.sent[FILE] <= 1.1 * SIZE
        assert sum(node.last.origin_bytes for node in nodes) <= 1.1 * SIZE
        assert all(node.last.peer_bytes > 0 for node in nodes)


@pytest.mark.slow
async def test_each_fabric_costs_the_origin_about_one_copy(tmp_path: Path, origin: FakeOrigin, content: bytes) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        nodes = [await cluster.add(f"n{number}", fabrics=(f"ib{number % 2}",)) for number in range(4)]
        (manifest, *_) = await fetch_all(cluster, *nodes)
        check(nodes, manifest, content)
        assert origin.sent[FILE] <= 2.2 * SIZE


@pytest.mark.slow
async def test_who_comes_late_takes_all_of_it_from_the_others(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        first = await cluster.add("n0", fabrics=("ib0",))
        await fetch_all(cluster, first)
        origin.forget()
        near = [await cluster.add(f"n{number}", fabrics=("ib0",)) for number in (1, 2)]
        far = [await cluster.add("n3", fabrics=("ib1",)), await cluster.add("n4", seeds=False)]
        (manifest, *_) = await fetch_all(cluster, *near, *far)
        check([*near, *far], manifest, content)
        assert FILE not in origin.sent


@pytest.mark.slow
async def test_those_that_none_can_take_from_wait_for_those_that_can_be(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        seeder = await cluster.add("n0")
        others = [await cluster.add(f"n{number}", seeds=False) for number in (1, 2)]
        (manifest, *_) = await fetch_all(cluster, *others, seeder)
        check([seeder, *others], manifest, content)
        # (whoever begins before the first is known asks for a little of it)
        assert origin.sent[FILE] <= 3 * SIZE


@pytest.mark.slow
async def test_a_seeder_that_dies_in_the_middle_is_replaced(tmp_path: Path, origin: FakeOrigin, content: bytes) -> None:
    origin.fault(FILE, bytes_per_s=2 * MIB)
    async with open_cluster(tmp_path, origin.url) as cluster:
        nodes = [await cluster.add(f"n{number}") for number in range(4)]
        dying = nodes[0]
        scope = trio.CancelScope()

        async def die() -> None:
            with scope:
                await cluster.fetch(dying, TEXT)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(die)
            nursery.start_soon(fetch_all, cluster, *nodes[1:])
            await until(lambda: dying.shelf is not None and len(dying.shelf[1].log) >= 1)
            # The server goes on to tell of it: only those that talk to it see that it is gone.
            cluster.kill(dying)
            scope.cancel()
        manifest = nodes[1].cache.find(TEXT)
        assert manifest is not None
        check(nodes[1:], manifest, content)
        assert dying.last.phase is not Phase.READY
        # What it alone had asked for is asked for once more.
        assert sum(node.last.origin_bytes for node in nodes[1:]) <= 1.1 * SIZE


class Liar:
    """A shelf with other bytes on it, and hashes that are those of these bytes, or of the right ones."""

    def __init__(self, real: object, *, told_truly: bool) -> None:
        from blake3 import blake3

        self._real = real
        self.files = real.files  # type: ignore[attr-defined]
        self.order = "lies"
        self.whole = True
        self.log = [
            (file, piece, digest if told_truly else blake3(self.read(file, piece)).hexdigest())
            for file, piece, digest in real.log  # type: ignore[attr-defined]
        ]

    def read(self, file: int, piece: int) -> bytes:
        return bytes(byte ^ 1 for byte in self._real.read(file, piece))  # type: ignore[attr-defined]


async def add_liar(cluster: Cluster, *, told_truly: bool) -> Node:
    liar = await cluster.add("liar")
    await cluster.fetch(liar, TEXT)
    for place, shelf in liar.kept.items():
        liar.kept[place] = Liar(shelf, told_truly=told_truly)  # type: ignore[assignment]
    return liar


@pytest.mark.slow
async def test_who_sends_wrong_pieces_is_left_alone_and_they_come_from_elsewhere(
    tmp_path: Path, origin: FakeOrigin, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        await add_liar(cluster, told_truly=True)
        node = await cluster.add("n1")
        (manifest,) = await fetch_all(cluster, node)
        check([node], manifest, content)
        # No more than were on their way when the first was seen.
        assert node.last.peer_bytes <= 3 * MIB
        assert "liar sent a wrong piece" in caplog.text


@pytest.mark.slow
async def test_a_file_of_which_somebody_lied_comes_from_the_origin_after_all(
    tmp_path: Path, origin: FakeOrigin, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        await add_liar(cluster, told_truly=False)
        origin.forget()
        node = await cluster.add("n1")
        (manifest,) = await fetch_all(cluster, node)
        check([node], manifest, content)
        assert origin.sent[FILE] == SIZE
        assert "liar has another piece" in caplog.text


@pytest.mark.slow
async def test_where_two_tell_otherwise_the_origin_decides(
    tmp_path: Path, origin: FakeOrigin, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        honest = await cluster.add("n0")
        await cluster.fetch(honest, TEXT)
        await add_liar(cluster, told_truly=False)
        node = await cluster.add("n1")
        (manifest,) = await fetch_all(cluster, node)
        check([node], manifest, content)
        assert read_kept(honest, manifest, "x.bin") == content
        assert node.last.peer_bytes + node.last.origin_bytes <= 3 * SIZE


@pytest.mark.slow
async def test_members_of_another_commit_are_not_asked(tmp_path: Path, origin: FakeOrigin, content: bytes) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        first, second = await cluster.add("n0"), await cluster.add("n1")
        await cluster.fetch(first, TEXT)
        changed = make_weights(tmp_path / "files" / FILE, 3 * MIB)
        manifest = await cluster.fetch(second, TEXT, newest=True)
        assert read_kept(second, manifest, "x.bin") == changed
        assert second.last.peer_bytes == 0


@pytest.mark.slow
async def test_a_member_that_can_not_be_reached_keeps_nobody(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        node = await cluster.add("n1")

        def swarm() -> Swarm:
            commit = node.last.commit
            gone = Member(node=cluster.nodes[node.id].id, seed=node.seed)
            dead = Member(node=type(node.id)("dead"), seed="127.0.0.1:1", whole=True)
            return Swarm(source=TEXT, commit=commit, members=(gone, dead))

        with trio.fail_after(60):
            manifest = await cluster.fetch(node, TEXT, swarm=swarm)
        check([node], manifest, content)
        assert node.last.origin_bytes == SIZE


@pytest.mark.slow
async def test_one_node_asks_an_origin_without_ranges_and_the_others_take_it_from_there(
    tmp_path: Path, origin: FakeOrigin, content: bytes
) -> None:
    origin.fault(FILE, no_ranges=True)
    async with open_cluster(tmp_path, origin.url) as cluster:
        nodes = [await cluster.add(f"n{number}") for number in range(3)]
        (manifest, *_) = await fetch_all(cluster, *nodes)
        check(nodes, manifest, content)


async def test_a_piece_is_as_long_as_what_is_left_of_its_file() -> None:
    assert [taking.measure(2 * MIB + 5, piece) for piece in range(3)] == [MIB, MIB, 5]


@pytest.mark.slow
async def test_who_joins_a_moment_later_costs_the_origin_nothing_more(tmp_path: Path) -> None:
    size = 40 * MIB
    content = make_weights(tmp_path / "files" / FILE, size)
    with FakeOrigin(tmp_path / "files") as origin:
        async with open_cluster(tmp_path, origin.url) as cluster:
            first, second = await cluster.add("n1"), await cluster.add("n2")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cluster.fetch, first, TEXT)
                await until(lambda: first.shelf is not None and len(first.shelf[1].log) >= 4)
                manifest = await cluster.fetch(second, TEXT)
            check([first, second], manifest, content)
            assert origin.sent[FILE] <= 1.1 * size


class Remote:
    """Another member, and the origin, as far as a fetch sees them: what is asked of the origin comes when ``lines`` is
    opened, and what the member has is told at the next question."""

    node = NodeId("me")
    can_ask = True

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []
        self.questions = 0
        self.lines = trio.Event()
        self.news = trio.Event()

    @asynccontextmanager
    async def read(
        self, source: Source, listing: Listing, file: int, first: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        self.asked.append((first // MIB, stop // MIB))

        async def read() -> AsyncGenerator[bytes, None]:
            await self.lines.wait()
            for at in range(first, stop, MIB):
                yield self.content[at : at + MIB]

        async with aclosing(read()) as chunks:
            yield chunks

    async def hear(self, member: Member, key: str, commit: str, *, since: Told | None, wait_seconds: int) -> Told:
        self.questions += 1
        files = (FileListed(name="x.bin", size_bytes=len(self.content)),)
        if since is None:
            return Told(files=files)
        await self.news.wait()
        self.news = trio.Event()
        if self.questions == 2:
            # (it was on its way before)
            return Told(files=files, next=1)
        pieces = range(len(self.content) // MIB)
        told = tuple((0, piece, blake3(self.content[piece * MIB : (piece + 1) * MIB]).hexdigest()) for piece in pieces)
        return Told(files=files, news=told, next=9, whole=True)

    async def take(
        self, take: Take, key: str, commit: str, into: bytearray, come: Callable[[int], Awaitable[None]]
    ) -> None:
        into[:] = self.content[take.piece * MIB : (take.piece + 1) * MIB]
        await come(len(into))


@asynccontextmanager
async def run_taking(folder: Path, remote: Remote, members: tuple[Member, ...]) -> AsyncIterator[trio.Event]:
    """A fetch from these that runs beside the body, with what is set when all is here."""
    listing = Listing(source=TEXT, commit="c" * 40, files=(FileListed(name="x.bin", size_bytes=len(remote.content)),))
    cache = Cache(folder)
    async with cache.hold(TEXT, lambda _: None):
        partial = cache.open_partial(listing)
        fetched = taking.Taking(
            parse_source(TEXT),
            partial,
            origin=cast("Origin", remote),
            peers=cast("Peers", remote),
            swarm=lambda: Swarm(source=TEXT, commit=listing.commit, members=members),
            meter=ProgressMeter(TEXT, lambda _: None, trio.current_time),
            rate=Rate(None),
            by_member=False,
            pieces=make_pieces(NodeId("me"), partial),
        )
        ended = trio.Event()

        async def run(nursery: trio.Nursery) -> None:
            await fetched.run(nursery)
            ended.set()

        try:
            with trio.fail_after(1000):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run, nursery)
                    yield ended
                    nursery.cancel_scope.cancel()
        finally:
            partial.close()


class Relayed(Remote):
    """The member is asked by way of a server, which is ``away`` as soon as it has handed on what the member has."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.away = False

    def check(self) -> None:
        if self.away:
            raise NotNow("by way of the server: nobody listens")

    async def hear(self, member: Member, key: str, commit: str, *, since: Told | None, wait_seconds: int) -> Told:
        self.questions += 1
        self.check()
        self.away = self.questions == 1
        self.news.set()
        told = await super().hear(member, key, commit, since=since or Told(), wait_seconds=0)
        return told if since is None else Told(files=told.files, next=9, whole=True)

    async def take(
        self, take: Take, key: str, commit: str, into: bytearray, come: Callable[[int], Awaitable[None]]
    ) -> None:
        await trio.lowlevel.checkpoint()
        self.check()
        await super().take(take, key, commit, into, come)


@pytest.mark.slow
async def test_while_the_server_between_is_away_the_origin_is_left_alone_and_then_all_goes_on(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    mock_clock.rate = 1.0
    remote = Relayed(random.Random(1).randbytes(16 * MIB))
    members = (Member(node=NodeId("me"), seed=RELAY), Member(node=NodeId("other"), seed=RELAY, whole=True))
    async with run_taking(tmp_path, remote, members) as ended:
        await until(lambda: remote.away and remote.questions > 1)
        gone_at = trio.current_time()
        while trio.current_time() < gone_at + PATIENCE_SECONDS - 2:
            assert remote.asked == []
            mock_clock.jump(1.0)
            await trio.testing.wait_all_tasks_blocked(0.02)
        # what comes from nowhere else is asked of the origin after all (which gives nothing here)
        mock_clock.jump(30.0)
        await until(lambda: remote.asked)
        remote.away = False
        back_at = trio.current_time()
        await ended.wait()
        assert trio.current_time() - back_at < 30


async def test_who_was_stopped_itself_hears_first_what_has_come_to_the_others(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    mock_clock.rate = 1.0
    remote = Remote(random.Random(1).randbytes(32 * MIB))
    members = tuple(Member(node=NodeId(name), seed=f"{name}:1") for name in ("me", "other"))
    async with run_taking(tmp_path, remote, members) as ended:
        await until(lambda: len(remote.asked) == 2 and remote.questions == 2)
        before = list(remote.asked)
        mock_clock.jump(30)
        remote.lines.set()
        remote.news.set()
        await until(lambda: remote.questions == 3)
        remote.news.set()
        await ended.wait()
        assert remote.asked == before


class Refusing(Remote):
    """The member does not know us twice: it was told that our link is down."""

    refused = 0

    async def hear(self, member: Member, key: str, commit: str, *, since: Told | None, wait_seconds: int) -> Told:
        if since is not None and self.refused < 2:
            await self.news.wait()
            self.refused += 1
            raise NotNow("it answers 403")
        return await super().hear(member, key, commit, since=since, wait_seconds=wait_seconds)


async def test_what_refuses_who_has_just_been_stopped_is_asked_again_before_the_origin_is(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    mock_clock.rate = 1.0
    remote = Refusing(random.Random(1).randbytes(32 * MIB))
    members = tuple(Member(node=NodeId(name), seed=f"{name}:1") for name in ("me", "other"))
    async with run_taking(tmp_path, remote, members) as ended:
        await until(lambda: len(remote.asked) == 2 and remote.questions == 1)
        await trio.testing.wait_all_tasks_blocked(0.02)
        before = list(remote.asked)
        mock_clock.jump(30)
        remote.news.set()
        await until(lambda: remote.questions == 3)
        remote.lines.set()
        remote.news.set()
        await ended.wait()
        assert remote.refused == 2
        assert remote.asked == before


class Unknowing(Remote):
    """The member never knows us."""

    async def hear(self, member: Member, key: str, commit: str, *, since: Told | None, wait_seconds: int) -> Told:
        self.questions += 1
        raise NotNow("it answers 403")


@pytest.mark.parametrize("runs_seconds", [0.0, 1.0, 3.0, 8.0])
async def test_where_turns_come_late_again_and_again_the_origin_is_asked_all_the_same(
    tmp_path: Path, mock_clock: MockClock, runs_seconds: float
) -> None:
    mock_clock.rate = 0.0
    remote = Unknowing(random.Random(1).randbytes(32 * MIB))
    remote.lines.set()
    members = tuple(Member(node=NodeId(name), seed=f"{name}:1") for name in ("me", "other"))
    async with run_taking(tmp_path, remote, members) as ended:
        while not ended.is_set() and trio.current_time() < 300:
            mock_clock.jump(3.0)
            for _ in range(round(runs_seconds / 0.5) + 1):
                await trio.testing.wait_all_tasks_blocked(0.01)
                mock_clock.jump(0.5 if runs_seconds else 0.0)
        assert ended.is_set()


async def test_the_next_run_has_the_connection_of_the_last(tmp_path: Path, origin: FakeOrigin, content: bytes) -> None:
    async with open_cluster(tmp_path, origin.url) as cluster:
        nodes = [await cluster.add("n1")]
        (manifest,) = await fetch_all(cluster, *nodes)
        check(nodes, manifest, content)
    assert origin.connections < len(origin.requests) * 3 / 4
