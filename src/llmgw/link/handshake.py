"""The first seconds of a connection to the agents' port: TLS, whose certificate it is, the upgrade to a websocket."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, WebSocketRequest

from llmgw.core.node import NodeId
from llmgw.errors import LinkLost, LlmgwError
from llmgw.link.control import NODE_HEADER, PATH, Tap, read_upgrade
from llmgw.link.refusals import explain_tls
from llmgw.link.words import clean

# After our last word the peer may still be sending; closing on unread bytes resets the connection, and the reset can
# overtake the word.
LINGER_SECONDS = 1.0
LINGER_BYTES = 8 * 1024 * 1024
READ_BYTES = 65536


class Unwelcome(LlmgwError):  # noqa: N818 - named by what it is, like all of them
    """A connection is refused: why, for the server's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A connection that has proved by its certificate which node it comes from. ``peer`` is its address in words."""

    stream: trio.SSLStream[trio.SocketStream]
    node: NodeId
    serial: int
    protocol: str | None
    peer: str


async def shake_hands(
    tcp: trio.SocketStream, context: ssl.SSLContext, *, peer: tuple[str, int], deadline: float
) -> Arrival:
    """Make the TLS handshake. Raises Unwelcome, after the peer was told by an alert where TLS has one for it."""
    stream = trio.SSLStream(tcp, context, server_side=True, https_compatible=True)
    with trio.CancelScope(deadline=deadline) as limit:
        try:
            await stream.do_handshake()
        except trio.BrokenResourceError as error:
            await _send_alert(stream)
            raise Unwelcome(explain_tls(error.__cause__ or error)) from error
    if limit.cancelled_caught:
        raise Unwelcome("it did not finish the TLS handshake in time")
    certificate = stream.getpeercert()
    host, port = peer
    return Arrival(
        stream=stream,
        node=read_name(certificate),
        serial=int(certificate["serialNumber"], 16),
        protocol=stream.selected_alpn_protocol(),
        peer=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
    )


def read_name(certificate: Mapping[str, Any]) -> NodeId:
    """The node that a certificate (as ``getpeercert`` gives it) is of. Raises Unwelcome when it does not name one."""
    names = [value for part in certificate["subject"] for key, value in part if key == "commonName"]
    if len(names) != 1 or not names[0]:
        raise Unwelcome(f"its certificate has {len(names)} common names; it needs one, the node's id")
    if not names[0].isprintable():
        raise Unwelcome(f"its certificate's common name, {names[0]!a}, can't be a node's id")
    return NodeId(names[0])


async def _send_alert(stream: trio.SSLStream[trio.SocketStream]) -> None:
    """A failed handshake leaves its alert unsent, and the peer would only see the connection close."""
    _, outgoing = vars(stream.pending.__self__)["bios"]
    with trio.move_on_after(LINGER_SECONDS):
        try:
            await stream.transport_stream.send_all(outgoing.read())
        except trio.BrokenResourceError:
            return


async def linger(tcp: trio.SocketStream) -> None:
    """Let the peer read our last words: read what it still sends until it closes, for a moment."""
    left = LINGER_BYTES
    with trio.move_on_after(LINGER_SECONDS):
        try:
            await tcp.send_eof()
            while left > 0 and (data := await tcp.receive_some(READ_BYTES)):
                left -= len(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return


class Floor(trio.abc.Stream):
    """What a websocket stands on: notes its closing, and can stop reading for it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._deaf = False
        self.closed = trio.Event()

    def stop_reading(self) -> None:
        """Hand nothing more up: whoever reads waits until it is cancelled."""
        self._deaf = True

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self.closed.is_set():
            raise trio.ClosedResourceError
        data = await self._stream.receive_some(max_bytes)
        if self._deaf:
            await trio.sleep_forever()
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.closed.is_set():
            raise trio.ClosedResourceError
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        self.closed.set()
        await self._stream.aclose()


async def upgrade(
    nursery: trio.Nursery, tap: Tap, floor: Floor, check: Callable[[WebSocketRequest], Rejection | None]
) -> WebSocketConnection:
    """Accept the upgrade request that comes, if ``check`` finds nothing against it.

    Raises Unwelcome when it does, LinkLost when the peer goes before; the websocket's reader runs in ``nursery`` and
    may raise anything at garbage. The caller bounds the time.
    """
    request: WebSocketRequest | None = None
    lost: LinkLost | None = None
    async with trio.open_nursery() as waiting:
        # A request that can't be read is answered and closed by the websocket, which tells nobody.
        waiting.start_soon(_cancel_when, floor.closed, waiting.cancel_scope)
        try:
            request = await read_upgrade(nursery, tap)
        except LinkLost as error:
            lost = error
        waiting.cancel_scope.cancel()
    if lost is not None:
        raise lost
    if request is None:
        raise Unwelcome("its upgrade request is malformed")
    rejection = check(request)
    if rejection is not None:
        # What a websocket hears while it rejects, it rejects as well, and falls over itself.
        floor.stop_reading()
    try:
        if rejection is None:
            return await request.accept()
        body = msgspec.json.encode({"error": {"code": rejection.code, "message": rejection.message}})
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await request.reject(rejection.status, extra_headers=headers, body=body)
    except ConnectionClosed:
        if rejection is None:
            raise LinkLost(tap.why or "the peer closed the connection") from None
    raise Unwelcome(rejection.message)


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """How an upgrade request is answered: both ends get the same ``message``."""

    status: int
    code: str
    message: str


def check_claim(request: WebSocketRequest, node: NodeId) -> Rejection | None:
    """Whether the request is for the link, and by the node that the certificate names."""
    if request.path.partition("?")[0] != PATH:
        return Rejection(status=404, code="not_found", message=f"agents ask for {PATH}")
    claims = [value for name, value in request.headers if name.lower() == NODE_HEADER.encode()]
    if claims == [node.encode()]:
        return None
    claimed = " and ".join(clean(claim[:100].decode("utf-8", "replace")) for claim in claims[:3]) or "none"
    message = f"the certificate is of node {node}, and the agent claims to be {claimed} ({NODE_HEADER})"
    return Rejection(status=403, code="wrong_node", message=message)
