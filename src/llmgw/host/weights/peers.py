"""Asks other nodes for weights: what they have of a source, and one piece after the other; over mutual TLS, and by way
of the server where they can't be reached."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import httpcore
import httpx
import msgspec
import trio

from llmgw.config.agent import ServerAddress
from llmgw.core.asked import Take
from llmgw.core.node import NodeId
from llmgw.core.pieces import MOST_AT_ONCE
from llmgw.core.weights import RELAY, RELAY_FROM, FileListed, Member
from llmgw.host.weights.sources.connections import open_pool
from llmgw.units import printable

CONNECT_SECONDS = 5.0
# Without a byte for so long a node counts as gone; beyond the time that it was told to wait for news. Less than so many
# bytes of a piece in that time are none.
SILENT_SECONDS = 10.0
LEAST_BYTES = 16 * 1024
# All that a node says at a time; a list of files is the longest part of it.
TOLD_BYTES = 16 * 1024 * 1024
# Connections that were not used for so long are closed.
IDLE_SECONDS = 60.0
CLOSE_SECONDS = 1.0
DIGEST_CHARS = 64

_FAILURES = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    httpcore.UnsupportedProtocol,
    httpcore.ConnectionNotAvailable,
)
# Of these, on the way to the server, nobody can tell whether they are its own, or come from the node that it asks.
_BREAKS = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, ssl.SSLError)


class PeerGone(Exception):  # noqa: N818 - named by what happens next, like all errors of ours
    """A node can't be asked for anything now: it can't be reached, is another one, or talks nonsense."""


class NotNow(Exception):  # noqa: N818
    """A node does not know the source yet, or us, or has too much to do, or what lies between is away: the same may
    work in a moment. ``silent_seconds``: for how long nothing has come already."""

    def __init__(self, why: str, *, silent_seconds: float = 0.0) -> None:
        super().__init__(why)
        self.silent_seconds = silent_seconds


class PieceMissing(Exception):  # noqa: N818
    """The node does not have that piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a node has. ``news``: file, piece and BLAKE3 of what came to it, in the order that ``log`` names, from where
    it was asked on; ``next`` is where to go on."""

    files: tuple[FileListed, ...] = ()
    news: tuple[tuple[int, int, str], ...] = ()
    next: int = 0
    whole: bool = False
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a node says. ``headers`` by their names in lower case."""

    status: int
    headers: dict[bytes, bytes]
    body: AsyncIterator[bytes]


@dataclass(slots=True)
class _Road:
    """The connections to one node by one certificate, and how many requests are under way on them."""

    context: ssl.SSLContext
    pool: httpcore.AsyncConnectionPool
    users: int = 0
    used_at: float = 0.0


class Peers:
    """All that is taken from other nodes by this one, whatever it is of."""

    def __init__(
        self, node: NodeId, context: Callable[[], ssl.SSLContext] | None, server: ServerAddress | None = None
    ) -> None:
        self.node = node
        self._context = context
        self._server = server
        self._roads: dict[NodeId, _Road] = {}
        self._old: list[_Road] = []
        self._transfers = trio.CapacityLimiter(MOST_AT_ONCE)

    @property
    def can_ask(self) -> bool:
        return self._context is not None

    async def hear(self, member: Member, key: str, commit: str, *, since: Told | None, wait_seconds: int) -> Told:
        """What a member has of a commit beyond what it told before; waits so long for any. Raises PeerGone, NotNow."""
        query: dict[str, str | int] = {"after": since.next if since else 0, "wait": wait_seconds}
        if since and since.log:
            query["log"] = since.log
        path = f"/llmgw/weights/{key}/{commit}"
        said = bytearray()
        async with self._ask(member, path, query, read_seconds=wait_seconds + SILENT_SECONDS) as answer:
            if answer.status in (403, 404, 503):
                raise NotNow(f"it answers {answer.status}")
            _check(answer)
            async for chunk in answer.body:
                said += chunk
                if len(said) > TOLD_BYTES:
                    raise PeerGone(f"it tells more than {TOLD_BYTES} bytes")
        try:
            told = msgspec.json.decode(said, type=Told)
        except msgspec.MsgspecError as error:
            raise PeerGone(f"what it tells can't be read: {error}") from error
        if any(len(digest) != DIGEST_CHARS for _, _, digest in told.news):
            raise PeerGone("it names pieces by something else than their BLAKE3")
        return told

    async def take(
        self, take: Take, key: str, commit: str, into: bytearray, come: Callable[[int], Awaitable[None]]
    ) -> None:
        """Fill ``into``, which is exactly as long, with a piece; ``come`` is told of bytes that have come, and may hold
        back the next ones. Raises PeerGone, NotNow, PieceMissing."""
        path = f"/llmgw/weights/{key}/{commit}/{take.file}/{take.piece}"
        at = 0
        async with self._transfers, self._ask(take, path, {}, read_seconds=SILENT_SECONDS) as answer:
            if answer.status == 404:
                raise PieceMissing
            if answer.status in (403, 503):
                raise NotNow(f"it answers {answer.status}")
            _check(answer)
            length = answer.headers.get(b"content-length", b"of unknown").decode(errors="replace")
            if length != str(len(into)):
                raise PeerGone(f"its piece is {printable(length)} bytes long, not {len(into)}")
            # (the time for which what comes is held back is not the node's)
            waited, before, since = 0.0, 0, trio.current_time()
            async for chunk in answer.body:
                waited += trio.current_time() - since
                into[at : at + len(chunk)] = chunk
                at += len(chunk)
                if waited >= SILENT_SECONDS:
                    if at - before < LEAST_BYTES and at < len(into):
                        raise PeerGone(f"it has sent {at - before} bytes in {waited:.0f} s")
                    waited, before = 0.0, at
                await come(len(chunk))
                since = trio.current_time()

    @asynccontextmanager
    async def _ask(
        self, whom: Member | Take, path: str, query: dict[str, str | int], *, read_seconds: float
    ) -> AsyncIterator[_Answer]:
        """An answer of that node and no other: its certificate is checked for the node's id, not for the address; or
        the server's for the server, which asks that node for us."""
        node = whom.node
        headers: dict[str | bytes, str | bytes] = {"accept": "*/*"}
        extensions: dict[str, str] = {}
        if whom.seed != RELAY:
            base = f"https://{whom.seed}"
            extensions["sni_hostname"] = node
        elif self._server is not None:
            base = self._server.url
            headers[RELAY_FROM] = node
        else:
            raise PeerGone("there is no server to ask it by")
        limits = {"connect": CONNECT_SECONDS, "read": read_seconds, "write": SILENT_SECONDS, "pool": SILENT_SECONDS}
        try:
            address = httpx.URL(base + path, params=query or None)
            request = httpcore.Request(
                "GET",
                httpcore.URL(
                    scheme=address.raw_scheme, host=address.raw_host, port=address.port, target=address.raw_path
                ),
                headers={"host": address.netloc, **headers},
                extensions={"timeout": limits, **extensions},
            )
            with self._use_road(node) as road:
                answer = await road.pool.handle_async_request(request)
                body = _iterate(answer)
                try:
                    yield _Answer(status=answer.status, headers=_lower(answer), body=body)
                finally:
                    with trio.move_on_after(CLOSE_SECONDS, shield=True):
                        await _end(answer, body)
        except (*_FAILURES, httpx.InvalidURL, ssl.SSLError, UnicodeError) as error:
            if whom.seed == RELAY and isinstance(error, _BREAKS):
                silent = SILENT_SECONDS if isinstance(error, httpcore.ReadTimeout) else 0.0
                raise NotNow(f"by way of the server: {_explain(error)}", silent_seconds=silent) from error
            raise PeerGone(_explain(error)) from error

    @contextmanager
    def _use_road(self, node: NodeId) -> Iterator[_Road]:
        """Connections to this node, by the certificate as it is now; what began by an earlier one goes on. Never those
        to another node: its former address may be this one's."""
        if self._context is None:
            raise PeerGone("this node has no certificate to ask others with")
        context = self._context()
        road = self._roads.get(node)
        if road is None or road.context is not context:
            if road is not None:
                self._old.append(road)
            road = self._roads[node] = _Road(context, open_pool(context, None))
        road.users += 1
        try:
            yield road
        finally:
            road.users -= 1
            road.used_at = trio.current_time()

    async def _leave_roads(self) -> None:
        """Close what nobody has used for a while."""
        late = trio.current_time() - IDLE_SECONDS
        for node, road in list(self._roads.items()):
            if not road.users and road.used_at < late:
                self._old.append(self._roads.pop(node))
        # Before anything is waited for: others take roads, and leave them, while one is closed.
        left = [road for road in self._old if not road.users]
        self._old = [road for road in self._old if road.users]
        for road in left:
            await road.pool.aclose()

    async def leave_idle(self) -> None:
        """Close what nobody uses any more, as long as this runs: else connections would stay after the last fetch, of
        which other nodes have so many and no more."""
        while True:
            await trio.sleep(IDLE_SECONDS / 2)
            await self._leave_roads()

    async def close(self) -> None:
        for road in (*self._old, *self._roads.values()):
            await road.pool.aclose()


@asynccontextmanager
async def open_peers(
    node: NodeId, context: Callable[[], ssl.SSLContext] | None, server: ServerAddress | None = None
) -> AsyncIterator[Peers]:
    """What asks others in the name of this node. ``context`` gives TLS 1.3 with the node's certificate, as it is by
    now; without it nobody is asked. ``server`` is whom those are asked by that are to be RELAYed."""
    peers = Peers(node, context, server)
    try:
        yield peers
    finally:
        with trio.move_on_after(CLOSE_SECONDS, shield=True):
            await peers.close()


def _lower(answer: httpcore.Response) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in answer.headers}


async def _iterate(answer: httpcore.Response) -> AsyncIterator[bytes]:
    stream = answer.stream
    if not isinstance(stream, AsyncIterable):
        raise TypeError(f"{type(stream)} is not what a pool for trio answers with")
    async for chunk in stream:
        yield chunk


async def _end(answer: httpcore.Response, body: AsyncIterator[bytes]) -> None:
    """The answer is needed no more, whole or not. What reads it is several generators, one in the other, of which the
    inner ones would be left to the garbage collector: so they are read to the end, of a connection that is closed."""
    await answer.aclose()
    with suppress(*_FAILURES):
        async for _ in body:
            pass


def _explain(error: BaseException) -> str:
    """What it comes from: what stands before that only says that something broke."""
    said = type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):
            # (one for each address of a name; how many they were says nothing)
            cause = cause.exceptions[0]
        said = str(cause) or said
        cause = cause.__cause__ or cause.__context__
    return printable(said)


def _check(answer: _Answer) -> None:
    if answer.status != 200:
        raise PeerGone(f"it answers {answer.status}")
