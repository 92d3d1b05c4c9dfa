"""Who may speak on the agents' port: TLS contexts, the files behind them, and the way of a connection into the reactor.

TLS 1.3 only, certificates on both sides, no session tickets (they wake a dialling side that has nothing to read).
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import trio

from llmgw.config.ordinary import read_with_stat
from llmgw.errors import UsageError
from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import Receiver, Tls

log = logging.getLogger(__name__)

CONTROL_ALPN = "llmgw-control/1"
TRUNK_ALPN = "llmgw-trunk/1"

# As much as a TLS record holds.
RECORD_BYTES = 16384

T = TypeVar("T")


class TlsFiles(Protocol):
    """Where the authority, the own certificate and its key are (config has two of these)."""

    @property
    def ca(self) -> Path: ...
    @property
    def cert(self) -> Path: ...
    @property
    def key(self) -> Path: ...


class _Context(ssl.SSLContext):
    """Keeps the memory BIOs with the object that speaks over them: ``hand_over`` needs both."""

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **named: Any) -> ssl.SSLObject:
        spoken = super().wrap_bio(incoming, outgoing, *args, **named)
        vars(spoken)["bios"] = (incoming, outgoing)
        return spoken


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For the agents' port: both protocols, and no peer without a certificate of the authority."""
    context = _load(_Context(ssl.PROTOCOL_TLS_SERVER), files)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0
    context.set_alpn_protocols([CONTROL_ALPN, TRUNK_ALPN])
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientContexts:
    """What an agent dials with: one context per protocol, as the server tells them apart by ALPN.

    ``look`` takes any name in the server's certificate: to tell which names it holds, and for nothing else.
    """

    control: ssl.SSLContext
    trunk: ssl.SSLContext
    look: ssl.SSLContext


def client_contexts(files: TlsFiles) -> ClientContexts:
    """For an agent, which believes a server by its alternative names only."""
    return ClientContexts(
        control=_client_context(files, CONTROL_ALPN),
        trunk=_client_context(files, TRUNK_ALPN),
        look=_client_context(files, CONTROL_ALPN, check_name=False),
    )


def _client_context(files: TlsFiles, alpn: str, *, check_name: bool = True) -> ssl.SSLContext:
    context = _load(_Context(ssl.PROTOCOL_TLS_CLIENT), files)
    context.check_hostname = check_name
    context.hostname_checks_common_name = False
    context.set_alpn_protocols([alpn])
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for file in (files.ca, files.cert, files.key):
        try:
            mode = read_with_stat(file, 1)[1].st_mode
        except OSError as error:
            raise UsageError(f"{file}: can't be read: {error.strerror}") from error
    if mode & stat.S_IROTH:
        raise UsageError(f"{files.key}: the key is readable by everybody; run: chmod o-rwx {files.key}")
    # What OpenSSL raises is an OSError too, and so is a file that went just now.
    try:
        context.load_verify_locations(files.ca)
    except OSError as error:
        raise UsageError(f"{files.ca}: holds no certificate of an authority in PEM") from error
    try:
        # With a password at hand OpenSSL does not ask the terminal for one.
        context.load_cert_chain(files.cert, files.key, password="")
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(f"{files.key}: is not the key of the certificate {files.cert}") from error
        raise UsageError(f"{files.cert}, {files.key}: no certificate and its key, unencrypted, in PEM") from error
    return context


class Credentials(Generic[T]):
    """What is made of certificate files, and made again when one of them changes; open connections keep what they have.

    ``build`` is ``server_context`` or ``client_contexts``. A change that can't be used is logged once, and what worked
    goes on working: files are renewed one after the other, and between two of them they do not fit.
    """

    def __init__(self, files: TlsFiles, build: Callable[[TlsFiles], T]) -> None:
        """Raises UsageError when the files can't be used."""
        self._files = files
        self._build = build
        self._stamp = self._read_stamp()
        self._current = build(files)

    @property
    def current(self) -> T:
        """For the next connection."""
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._current = self._build(self._files)
            except UsageError as error:
                log.warning("the changed certificate files are not used, the former ones stay: %s", error)
            else:
                log.info("%s: the changed certificate is used from now on", self._files.cert)
        return self._current

    def _read_stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, (self._files.ca, self._files.cert, self._files.key)))


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        seen = file.stat()
    except OSError:  # while a file is replaced it may be missing; the next look tells
        return None
    # Of the inode, not of the content: a chmod that makes a key usable is a change as well.
    return seen.st_ctime_ns, seen.st_size, seen.st_ino


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
