"""One GET to somebody else's web server, straight or by a proxy, with each way that it can fail named.

By what is below httpx's client, and not by that: a client logs whole addresses, whose query may be what opens them,
keeps cookies, and reads the environment when nobody looks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial

import httpcore
import httpx
import trio

from llmgw.host.weights.errors import Broken, FetchFailed, Kind
from llmgw.host.weights.sources.answers import BETWEEN, read_count
from llmgw.host.weights.sources.asker import AGENT, Asker
from llmgw.host.weights.sources.connections import PEER, READ_BYTES, open_pool
from llmgw.host.weights.sources.redirects import (
    Place,
    Proxies,
    check_dialled,
    find_place,
    name_dns,
    port_of,
    read_place,
)

CLOSE_SECONDS = 2.0
# What is longer leaves its connection unfit for another request (see ``_read_on``), which costs little beside it.
KEPT_BYTES = 8 * 1024 * 1024
# How many times as long as for its next byte is waited for what is of no use before all of it is there: the head of an
# answer, with all that is sent ahead of it. With 30 s this is more than the minute for which a proxy may hold one back.
PATIENCE = 3
HELD_UP = "see what holds it up: that server, or what lies in between"
# Httpcore's names for what an answer comes from, and for the moment at which it is waited for.
STREAM = "network_stream"
_WAITING = "http11.receive_response_headers.started"

# What OpenSSL calls a server's word on our certificate, which in TLS 1.3 comes only with the first read.
_REFUSED = re.compile("_ALERT_.*(CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED|HANDSHAKE_FAILURE)")
_FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol)


class _Body(httpx.AsyncByteStream):
    """The body of an answer, as it comes."""

    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    def __aiter__(self) -> AsyncIterator[bytes]:
        stream = self._answer.stream
        if not isinstance(stream, AsyncIterable):
            raise TypeError(f"{type(stream)} is not what a pool for trio answers with")
        return aiter(stream)

    async def aclose(self) -> None:
        await self._answer.aclose()


class Web:
    """All connections to the outside, each kept for a while."""

    def __init__(
        self,
        tls: ssl.SSLContext,
        proxies: Proxies,
        *,
        connect_seconds: float,
        read_seconds: float,
        user_agent: str,
        asker: Asker = AGENT,
    ) -> None:
        self._tls = tls
        self._proxies = proxies
        # No limit for a connection of the pool: those who hold the others have limits of their own.
        limits = {"connect": connect_seconds, "read": read_seconds, "write": read_seconds, "pool": None}
        self._extensions = {"timeout": limits}
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self.patience_seconds = PATIENCE * read_seconds
        self._headers = {"user-agent": user_agent, "accept": "*/*", "accept-encoding": "identity"}
        self._asker = asker
        self._roads: dict[tuple[str | None, frozenset[Place] | None], httpcore.AsyncConnectionPool] = {}

    async def close(self) -> None:
        """All connections; the caller has the deadline."""
        for road in self._roads.values():
            await road.aclose()

    def _road_of(self, proxy: str | None, allowed: frozenset[Place] | None) -> httpcore.AsyncConnectionPool:
        """Connections that were made for whom a source names are not for whom a redirect leads there."""
        # (a proxy may be on this machine, and dials by itself)
        allowed = allowed if proxy is None else None
        if (proxy, allowed) not in self._roads:
            check = None if allowed is None else partial(check_dialled, allowed)
            self._roads[proxy, allowed] = open_pool(self._tls, proxy, check=check)
        return self._roads[proxy, allowed]

    def find_places(self, url: httpx.URL, response: httpx.Response) -> frozenset[Place]:
        """Where the answer of ``url`` has come from. By the connection, and not by the name: that may have had another
        address then."""
        if self._proxies.find(url) is not None:
            place = read_place(url.host)
        else:
            place = find_place(ipaddress.ip_address(response.extensions[PEER]))
        return frozenset() if place is None else frozenset({place})

    @asynccontextmanager
    async def get(
        self, url: httpx.URL, headers: Mapping[str, str], *, allowed: frozenset[Place] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """The answer, whatever it is, with its body still to come; its failures inside the block are named as well.
        ``allowed``: a redirect has led here, and of the places where nobody is led to it may be in these; None: the
        source itself names it."""
        proxy = self._proxies.find(url)
        told = httpx.Request("GET", url, headers={**self._headers, **headers}, extensions=self._extensions)
        request = httpcore.Request(
            "GET",
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=told.headers.raw,
        )
        with self.naming(url, proxy):
            answer = await self._send(request, self._road_of(proxy, allowed))
            if answer is None:
                host = _name_host(url if proxy is None else httpx.URL(proxy), url)
                raise Broken(f"{host} has sent no whole answer for {self.patience_seconds:g} s", remedy=HELD_UP)
            try:
                stream = answer.extensions[STREAM]
                found = {PEER: stream.get_extra_info(PEER), STREAM: stream}
                yield httpx.Response(
                    answer.status, headers=answer.headers, stream=_Body(answer), request=told, extensions=found
                )
            finally:
                with trio.move_on_after(CLOSE_SECONDS, shield=True):
                    await answer.aclose()

    async def _send(self, request: httpcore.Request, road: httpcore.AsyncConnectionPool) -> httpcore.Response | None:
        """The answer, once its head is here. None: it never ends, or others are sent ahead of it all the time."""
        with trio.CancelScope() as scope:

            async def watch(event: str, _: object) -> None:
                # (not before: who waits for a connection does so for as long as others hold them)
                if event == _WAITING:
                    scope.deadline = trio.current_time() + self.patience_seconds

            request.extensions = {**self._extensions, "trace": watch}
            return await road.handle_async_request(request)
        return None

    @contextlib.contextmanager
    def naming(self, url: httpx.URL, proxy: str | None) -> Iterator[None]:
        """What goes wrong on the way, as FetchFailed or Broken. Never in a library's own words, which may hold an
        address with all that is in it."""
        near = url if proxy is None else httpx.URL(proxy)
        host = _name_host(near, url)
        try:
            yield
        except httpcore.ConnectTimeout:
            told = f"{host} does not answer on port {port_of(near)} ({self._connect_seconds:g} s)"
            raise Broken(told, remedy=_tell_way(near, url, self._asker)) from None
        except httpcore.TimeoutException:
            told = f"{host} has sent nothing for {self._read_seconds:g} s"
            raise Broken(told, remedy=_tell_way(near, url, self._asker)) from None
        except httpcore.ProxyError as error:
            raise _name_proxy(host, url.host, str(error), self._asker) from None
        except _FAILURES as error:
            raise _name_failure(error, near, url, self._asker) from None


@asynccontextmanager
async def read_body(response: httpx.Response) -> AsyncIterator[AsyncIterator[bytes]]:
    """The bytes of an answer, as they come. Who leaves before the end of it leaves the connection too."""
    stream = response.stream
    if not isinstance(stream, httpx.AsyncByteStream):
        raise TypeError(f"{type(stream)} is no stream of a transport's")
    body = aiter(stream)
    try:
        async with aclosing(_read_on(response, body)) as chunks:
            yield chunks
    finally:
        with trio.move_on_after(CLOSE_SECONDS, shield=True):
            await response.aclose()
            # What reads the body is several generators, one in the other, and closing the outer leaves the others to
            # the garbage collector. So the outer one reads on, from a connection that is closed, until all have ended.
            with contextlib.suppress(httpcore.TimeoutException, *_FAILURES):
                async for _ in body:
                    pass


async def _read_on(response: httpx.Response, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """All of a body; of a long one only its beginning by way of httpcore, and the rest from its connection at once: on
    that way each byte is copied four times, which costs as much as hashing it."""
    left = read_count(response.headers.get("content-length")) or 0
    # Any other framing is httpcore's, and h11's, to read.
    direct = left > KEPT_BYTES and response.status_code in (200, 206) and "transfer-encoding" not in response.headers
    async for chunk in body:
        yield chunk
        left -= len(chunk)
        if direct:
            # (of what they have received nothing is held back)
            break
    stream, seconds = response.extensions[STREAM], response.request.extensions["timeout"]["read"]
    while direct and left:
        chunk = (await stream.read(READ_BYTES, seconds))[:left]
        if not chunk:
            raise httpcore.RemoteProtocolError(f"{left} bytes of the body are missing")
        yield chunk
        left -= len(chunk)


def _name_host(near: httpx.URL, url: httpx.URL) -> str:
    return near.host if near is url else f"the proxy {near.host}"


def _tell_way(near: httpx.URL, url: httpx.URL, asker: Asker) -> str:
    """What to do where nothing comes."""
    if near is not url:
        return _tell_proxies(asker)
    return (
        f"see whether curl -I {url.scheme}://{url.netloc.decode()} answers; if only a proxy leads out, name it as "
        f"HTTPS_PROXY in {asker.environment}"
    )


def _tell_proxies(asker: Asker) -> str:
    return f"check HTTPS_PROXY, HTTP_PROXY and NO_PROXY in {asker.environment}"


def _name_proxy(proxy: str, host: str, told: str, asker: Asker) -> FetchFailed | Broken:
    status = told[:3]
    remedy = _tell_proxies(asker)
    if status.isdecimal() and status.startswith("4"):
        why = "wants a name and password" if status == "407" else f"does not let us through to {host}"
        return FetchFailed(f"{proxy} {why} (it answers {status})", Kind.REFUSED, remedy=remedy)
    return Broken(f"{proxy} can't reach {host}", 1.0, remedy=remedy)


def _name_failure(error: Exception, near: httpx.URL, url: httpx.URL, asker: Asker) -> FetchFailed | Broken:
    host, remedy = _name_host(near, url), _tell_way(near, url, asker)
    for cause in _list_causes(error):
        if isinstance(cause, socket.gaierror):
            return name_dns(near.host, cause)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _name_certificate(url.host, cause, asker)
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            if not isinstance(error, httpcore.ConnectError) and not _REFUSED.search(cause.reason or ""):
                # They had agreed, and what came since was changed on its way.
                return Broken(f"the connection to {host} broke: {_words(cause)}", remedy=BETWEEN)
            return FetchFailed(
                f"{url.host} and this machine find no common TLS on port {port_of(url)}: {_words(cause)}",
                Kind.TLS,
                remedy="check the port, and whether the address should begin with http://",
            )
        if isinstance(cause, ConnectionRefusedError):
            return Broken(f"nobody listens on port {port_of(near)} of {host}", 1.0, remedy=remedy)
    if isinstance(error, httpcore.ConnectError):
        return Broken(f"{host} can't be reached on port {port_of(near)}", 1.0, remedy=remedy)
    if isinstance(error, httpcore.RemoteProtocolError):
        return Broken(f"{host} ended its answer early, or does not speak HTTP", remedy=remedy)
    return Broken(f"the connection to {host} broke", remedy=remedy)


def _name_certificate(host: str, cause: ssl.SSLCertVerificationError, asker: Asker) -> FetchFailed:
    # OpenSSL's numbers: 9 and 10 are time, 18 to 21 an authority that nobody here knows, 62 and 64 another name.
    match cause.verify_code:
        case 9 | 10:
            remedy = "it has to be renewed there, or the clock of this machine is wrong"
        case 18 | 19 | 20 | 21:
            remedy = f"if you trust it, name its authority's file (PEM) in SSL_CERT_FILE in {asker.environment}"
        case _:
            remedy = "use the name that its certificate is for"
    return FetchFailed(f"{host}'s certificate is not valid: {cause.verify_message}", Kind.TLS, remedy=remedy)


def _words(error: ssl.SSLError) -> str:
    return (error.reason or "it ended").replace("_", " ").lower()


def _list_causes(error: BaseException) -> list[BaseException]:
    """All that an error came from, however it is packed."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or each in found:
            continue
        found.append(each)
        left += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions
    return found
