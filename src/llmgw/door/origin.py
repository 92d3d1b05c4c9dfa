"""Who may call from a browser: the Host and Origin checks, and the CORS headers of every answer.

While there are no keys, reaching the port is all the permission there is. A page on any web site can make its visitor's
browser send requests to loopback, under its own name (Origin) or under a name that it lets resolve to 127.0.0.1 (Host),
so both are checked before anything else.
"""

from __future__ import annotations

import re

from llmgw.dialects.refusal import Refusal
from llmgw.door.http1 import RequestHead
from llmgw.door.steps import Headers

_LOOPBACK = re.compile(rb"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_LOOPBACK_ORIGIN = re.compile(rb"https?://(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
EXPOSED = b"x-request-id, retry-after"
METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
PREFLIGHT_SECONDS = b"600"
# A page asks for a dozen headers at most; all of it goes back to it.
MAX_WANTED_BYTES = 4096


class Origins:
    """The rule of one door: loopback names only, and of origins the listed ones, by default those of loopback."""

    def __init__(self, host: str, cors_origins: tuple[str, ...] = ()) -> None:
        own = re.escape(f"[{host}]" if ":" in host else host).encode()
        self._own = re.compile(own + rb"(?::\d{1,5})?", re.IGNORECASE)
        self._any = "*" in cors_origins
        self._listed = frozenset(origin.rstrip("/").encode().lower() for origin in cors_origins)
        # the few hosts that clients really use, so that a warm request costs one look into a set
        self._known_hosts: set[bytes] = set()

    def refuse(self, head: RequestHead) -> Refusal | None:
        """None when the request may go on."""
        host = head.authority
        if host not in self._known_hosts and not self._admit_host(host):
            shown = host.decode("latin-1")[:100]
            return Refusal(
                status=403,
                code="host_not_allowed",
                message=f"This server answers only under a loopback name, and the request's Host is {shown!r}. "
                "Call it as http://127.0.0.1 or http://localhost.",
            )
        origin = head.headers.get(b"origin")
        if origin is not None and not self.allows(origin):
            shown = origin.decode("latin-1")[:100]
            return Refusal(
                status=403,
                code="origin_not_allowed",
                message=f"Pages of {shown!r} may not call this server: add the origin to cors_origins.",
            )
        return None

    def _admit_host(self, host: bytes) -> bool:
        # an HTTP/1.0 client (a probe, an old proxy) may send none; a browser always does
        allowed = not host or _LOOPBACK.fullmatch(host) is not None or self._own.fullmatch(host) is not None
        if allowed and len(self._known_hosts) < 100:
            self._known_hosts.add(host)
        return allowed

    def allows(self, origin: bytes) -> bool:
        """May pages of this origin call?"""
        if self._any or origin.lower() in self._listed:
            return True
        return not self._listed and _LOOPBACK_ORIGIN.fullmatch(origin) is not None

    def headers(self, head: RequestHead) -> bytes:
        """The CORS lines of an answer to this request; none when it came from no page, or from a foreign one."""
        origin = head.headers.get(b"origin")
        if origin is None or not self.allows(origin):
            return b""
        lines = b"access-control-allow-origin: %b\r\nvary: origin\r\naccess-control-expose-headers: %b\r\n" % (
            origin,
            EXPOSED,
        )
        wanted = head.headers.get(b"access-control-request-headers") if head.method == "OPTIONS" else None
        if wanted is not None and len(wanted) <= MAX_WANTED_BYTES:
            # here and not among the answer's own headers, which are kept for the next answer
            lines += b"access-control-allow-headers: %b\r\n" % wanted
        return lines

    def preflight(self, head: RequestHead) -> Headers | Refusal:
        """What a browser asks before it sends: any header that it wants to send, it may (``headers`` says which)."""
        if len(head.headers.get(b"access-control-request-headers", b"")) > MAX_WANTED_BYTES:
            message = f"Access-Control-Request-Headers is longer than {MAX_WANTED_BYTES} bytes."
            return Refusal(status=431, code="headers_too_large", message=message)
        return ((b"access-control-allow-methods", METHODS), (b"access-control-max-age", PREFLIGHT_SECONDS))
