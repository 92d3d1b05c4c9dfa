"""Gives pieces of weights to other nodes of the cluster, over mutual TLS (HTTP/1.1), and to nobody else.

A node is known by its certificate, and is asked for nothing but that: what it may have, ``giver`` knows. What a
connection does ends that connection and nothing else.
"""

from __future__ import annotations

import logging
import ssl
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import trio

from llmgw.config.addresses import show_listen
from llmgw.config.server import Listen
from llmgw.core.node import NodeId
from llmgw.host.weights.giver import Giver
from llmgw.host.weights.strangers import Stranger, Strangers
from llmgw.reactor.credentials import Credentials, TlsFiles, load_files
from llmgw.reactor.talk import Over
from llmgw.units import printable

log = logging.getLogger(__name__)

BACKLOG = 128
# Those of all nodes; those of one.
MAX_CONNECTIONS = 512
MAX_OF_ONE_NODE = 32
ACCEPT_AGAIN_SECONDS = 0.5


async def serve_seed(
    listen: Listen,
    tls: TlsFiles,
    giver: Giver,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Give pieces at this address, for ever; started with ``host:port`` once it can be reached there.

    UsageError when the certificate's files can't be used. An address that can't be had (yet) is tried again and again.
    """
    seed = _Seed(Credentials(tls, seed_context), giver)
    async with await seed.bind(listen) as listener, trio.open_nursery() as nursery:
        host, port = listener.socket.getsockname()[:2]
        shown = show_listen(Listen(host=str(host), port=int(port)))
        log.info("other nodes may take weights at %s", shown)
        task_status.started(shown)
        await seed.accept(listener, nursery)


def seed_context(files: TlsFiles) -> ssl.SSLContext:
    """No peer without a certificate of the authority."""
    context = load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
    context.verify_mode = ssl.CERT_REQUIRED
    # They would come after the handshake, to a node that has nothing to read yet.
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    return context


class _Seed:
    """All connections."""

    def __init__(self, credentials: Credentials[ssl.SSLContext], giver: Giver) -> None:
        self._credentials = credentials
        self._giver = giver
        self._pace = giver.pace
        self._strangers = Strangers()
        self._open: Counter[NodeId] = Counter()
        self._complaints = giver.complaints

    async def bind(self, listen: Listen) -> trio.SocketListener:
        told = None
        while True:
            try:
                (listener,) = await trio.open_tcp_listeners(listen.port, host=listen.host, backlog=BACKLOG)
            except OSError as error:
                why = error.strerror or str(error)
                if why != told:
                    log.warning(
                        "seed_listen: no node can take weights at %s: %s (tried again every %g s)",
                        *(show_listen(listen), why, self._pace.bind),
                    )
                told = why
                await trio.sleep(self._pace.bind)
            else:
                return listener

    async def accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        while True:
            try:
                tcp = await listener.accept()
            except OSError as error:
                # No descriptor is left, mostly, or no memory: what keeps it from working will not be over at once.
                self._complaints.tell("no node can connect to take weights: %s", error.strerror)
                await trio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            stranger = self._admit(tcp)
            if stranger is None:
                tcp.socket.close()
            else:
                nursery.start_soon(self._receive, tcp, stranger)

    def _admit(self, tcp: trio.SocketStream) -> Stranger | None:
        if self._open.total() >= MAX_CONNECTIONS:
            self._complaints.tell("too many connections to take weights: %s is turned away", _name_peer(tcp))
            return None
        stranger, evicted = self._strangers.admit(_find_address(tcp), trio.current_time())
        if stranger is None or evicted is not None:
            self._complaints.tell(
                "too many connections to take weights that have not shown whose they are: %s",
                f"{_name_peer(tcp)} is turned away" if evicted is None else f"the oldest of {evicted.address} ends",
            )
        return stranger

    async def _receive(self, tcp: trio.SocketStream, stranger: Stranger) -> None:
        """One connection from its first byte to its last. No exception leaves: it ends this connection and no other."""
        peer = _name_peer(tcp)
        try:
            await self._serve(tcp, stranger)
        except Over as over:
            self._complaints.tell("%s wanted weights, and was cut off: %s", peer, over)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("%s went away", peer)
        except Exception as error:
            self._complaints.tell("a connection of %s that took weights failed: %r", peer, error, fault=error)
        finally:
            tcp.socket.close()

    async def _serve(self, tcp: trio.SocketStream, stranger: Stranger) -> None:
        met = None
        try:
            with stranger.scope:
                met = await self._meet(tcp)
        finally:
            self._strangers.free(stranger)
        if met is None:
            raise Over("it had not shown whose it is, and its place was needed")
        stream, node = met
        with self._count(node):
            if self._open[node] > MAX_OF_ONE_NODE:
                raise Over(f"node {node} has {MAX_OF_ONE_NODE} connections already")
            await self._giver.talk(stream, node)

    async def _meet(self, tcp: trio.SocketStream) -> tuple[trio.SSLStream[trio.SocketStream], NodeId]:
        """The connection, once its other end has shown whose it is."""
        stream = trio.SSLStream(tcp, self._credentials.current, server_side=True, https_compatible=True)
        with trio.move_on_after(self._pace.handshake) as limit:
            try:
                await stream.do_handshake()
            except trio.BrokenResourceError as error:
                raise Over(f"TLS: {printable(str(error.__cause__ or error))}") from error
        if limit.cancelled_caught:
            raise Over("it did not finish the TLS handshake in time")
        return stream, _read_name(stream.getpeercert())

    @contextmanager
    def _count(self, node: NodeId) -> Iterator[None]:
        self._open[node] += 1
        try:
            yield
        finally:
            self._open[node] -= 1
            if not self._open[node]:
                del self._open[node]


def _read_name(certificate: Mapping[str, Any]) -> NodeId:
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    if len(names) != 1 or not names[0].isprintable():
        raise Over(f"its certificate has {len(names)} common names that can be read; it needs one, the node's id")
    return NodeId(names[0])


def _find_address(tcp: trio.SocketStream) -> str:
    try:
        return str(tcp.socket.getpeername()[0])
    except OSError:  # it has reset the connection already
        return "an address that is gone"


def _name_peer(tcp: trio.SocketStream) -> str:
    try:
        host, port = tcp.socket.getpeername()[:2]
    except OSError:  # it has reset the connection already
        return "an address that is gone"
    return show_listen(Listen(host=str(host), port=int(port)))
