"""Connections to the outside: whom they believe, by which proxy they lead, and how much is taken of them at once.

Of what comes, httpcore takes 64 KiB at a time, and does so much around each that it costs more than hashing them.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpcore
import httpx
import trio

from llmgw.errors import ConfigError, Problem

READ_BYTES = 512 * 1024
# What a stream of ours says when it is asked so: the address that it was connected to.
PEER = "llmgw.peer"
MAX_CONNECTIONS = 32
KEPT_CONNECTIONS = 8
KEPT_SECONDS = 30.0
CLOSE_SECONDS = 1.0

# Raises where nobody may be connected to this address, which a host has now: host, address.
Check = Callable[[str, str], None]


def make_tls(ca_file: str | None) -> ssl.SSLContext:
    """Whom we believe: the authorities in ``ca_file``, else those of this machine and those that come with httpx. Reads
    files. ConfigError where ``ca_file`` holds none."""
    if ca_file is None:
        context = httpx.create_ssl_context(trust_env=False)
        # A company's own authority is installed on its machines, and in no bundle.
        context.load_default_certs()
        return context
    try:
        return ssl.create_default_context(cafile=str(Path(ca_file)))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError([Problem(key="SSL_CERT_FILE", message=f"{ca_file} can't be read: {error}")]) from None


def open_pool(tls: ssl.SSLContext, proxy: str | None, *, check: Check | None = None) -> httpcore.AsyncConnectionPool:
    """Connections that are kept for a while, all by ``proxy`` or all straight. Before a byte goes over one ``check`` is
    told to where it leads; what it raises comes out of the request."""
    return httpcore.AsyncConnectionPool(
        ssl_context=tls,
        max_connections=MAX_CONNECTIONS,
        max_keepalive_connections=KEPT_CONNECTIONS,
        keepalive_expiry=KEPT_SECONDS,
        network_backend=_Wide(check),
        proxy=None if proxy is None else _read_proxy(proxy, tls),
    )


def _read_proxy(text: str, tls: ssl.SSLContext) -> httpcore.Proxy:
    """With the name and password that stand in its address."""
    url = httpx.URL(text)
    return httpcore.Proxy(
        url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=b"/"),
        auth=(url.username, url.password) if url.userinfo else None,
        ssl_context=tls if url.scheme == "https" else None,
    )


class _WideStream(httpcore.AsyncNetworkStream):
    """A connection of which as much is taken at once as is there."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, peer: str | None = None) -> None:
        self._stream = stream
        self._peer = peer
        found = stream.get_extra_info("ssl_object")
        self._tls = found if isinstance(found, ssl.SSLObject) else None

    async def read(
        self,
        max_bytes: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore asks for it
    ) -> bytes:
        first = await self._stream.read(max(max_bytes, READ_BYTES), timeout)
        return first if self._tls is None or not first else first + _read_on(self._tls)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - httpcore asks for it
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore asks for it
    ) -> httpcore.AsyncNetworkStream:
        try:
            return _WideStream(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._peer)
        except BaseException:
            # Who is cancelled in a handshake has nobody else to close it.
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await self._stream.aclose()
            raise

    def get_extra_info(self, info: str) -> Any:
        if info == PEER:
            return self._peer
        return self._stream.get_extra_info(info)


def _read_on(tls: ssl.SSLObject) -> bytes:
    """What was received already. A read ends with a record, and those of TLS are of 16 KiB."""
    found = []
    with contextlib.suppress(ssl.SSLError):
        # Until no whole record is here; whatever else is wrong, the next read meets it again.
        while record := tls.read(READ_BYTES):
            found.append(record)
    return b"".join(found)


class _Wide(httpcore.AsyncNetworkBackend):
    """Connections by trio."""

    def __init__(self, check: Check | None) -> None:
        self._trio = httpcore.TrioBackend()
        self._check = check

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore asks for it
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._trio.connect_tcp(host, port, timeout, local_address, socket_options)
        try:
            peer = str(stream.get_extra_info("server_addr")[0])
            if self._check is not None:
                self._check(host, peer)
        except BaseException as error:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await stream.aclose()
            if isinstance(error, OSError):
                # (it was reset at once)
                raise httpcore.ConnectError(str(error)) from error
            raise
        return _WideStream(stream, peer)

    async def sleep(self, seconds: float) -> None:
        await self._trio.sleep(seconds)
