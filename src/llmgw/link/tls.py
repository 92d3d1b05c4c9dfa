"""Who may speak on the agents' port: TLS contexts of both its ends, and the way of a connection into the reactor.

TLS 1.3 only, certificates on both sides, no session tickets (they wake a dialling side that has nothing to read).
"""

from __future__ import annotations

import os
import socket
import ssl
from dataclasses import dataclass

import trio

from llmgw.reactor.credentials import Context, TlsFiles, load_files
from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import Receiver, Tls

CONTROL_ALPN = "llmgw-control/1"
TRUNK_ALPN = "llmgw-trunk/1"
# Weights through the server: over the one it asks a node for them, over the other a node asks it, by plain HTTP.
GIVE_ALPN = "llmgw-give/1"
TAKE_ALPN = "http/1.1"

# As much as a TLS record holds.
RECORD_BYTES = 16384


def server_context(files: TlsFiles, *, relays: bool = False) -> ssl.SSLContext:
    """For the agents' port: its protocols, those of weights where it ``relays`` them, and no peer without a certificate
    of the authority."""
    context = load_files(Context(ssl.PROTOCOL_TLS_SERVER), files)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0
    context.set_alpn_protocols([CONTROL_ALPN, TRUNK_ALPN, *([GIVE_ALPN, TAKE_ALPN] if relays else [])])
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientContexts:
    """What an agent dials with: one context per protocol, as the server tells them apart by ALPN.

    ``look`` takes any name in the server's certificate: to tell which names it holds, and for nothing else.
    """

    control: ssl.SSLContext
    trunk: ssl.SSLContext
    give: ssl.SSLContext
    look: ssl.SSLContext


def client_contexts(files: TlsFiles) -> ClientContexts:
    """For an agent, which believes a server by its alternative names only."""
    return ClientContexts(
        control=_client_context(files, CONTROL_ALPN),
        trunk=_client_context(files, TRUNK_ALPN),
        give=_client_context(files, GIVE_ALPN),
        look=_client_context(files, CONTROL_ALPN, check_name=False),
    )


def _client_context(files: TlsFiles, alpn: str, *, check_name: bool = True) -> ssl.SSLContext:
    context = load_files(Context(ssl.PROTOCOL_TLS_CLIENT), files)
    context.check_hostname = check_name
    context.hostname_checks_common_name = False
    context.set_alpn_protocols([alpn])
    return context


class QuietTls(trio.abc.Stream):
    """A TLS stream that hears a word now and then, and mostly waits. A thousand agents have one each, and trio's own
    takes three times as long over a word."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        """``stream`` has done its handshake, with a context of this room."""
        self._stream = stream
        self._spoken: ssl.SSLObject = stream.getpeercert.__self__
        self._incoming: ssl.MemoryBIO = vars(self._spoken)["bios"][0]
        self._fd = stream.transport_stream.socket.fileno()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has come, a record at most; empty at the end, be it with a goodbye or without."""
        spoken, incoming = self._spoken, self._incoming
        while True:
            # Asking when nothing is there costs an exception.
            if incoming.pending or incoming.eof or spoken.pending():
                try:
                    return spoken.read(max_bytes or RECORD_BYTES)
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLEOFError, ssl.SSLSyscallError):
                    return b""
                except ssl.SSLError as error:
                    raise trio.BrokenResourceError from error
            await trio.lowlevel.wait_readable(self._fd)
            try:
                data = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError from error
            if data:
                incoming.write(data)
            else:
                incoming.write_eof()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """End whoever reads. The socket is left open: who closes it lets the peer read the last words first."""
        trio.lowlevel.notify_closing(self._fd)
        await trio.lowlevel.checkpoint()


def hand_over(reactor: Reactor, stream: trio.SSLStream[trio.SocketStream], owner: Receiver) -> Tls:
    """Move a connection, its handshake done with a context of this room, from trio into the reactor.

    ``stream`` is of no use afterwards. Nothing may be reading or writing it. OSError when no descriptor is left.
    """
    spoken = stream.getpeercert.__self__
    below = stream.transport_stream.socket
    sock = socket.socket(fileno=os.dup(below.fileno()))
    sock.setblocking(False)
    try:
        transport = Tls.adopt(reactor, sock, spoken, vars(spoken)["bios"], owner)
    except BaseException:
        sock.close()
        raise
    below.close()
    return transport
