"""Why weights can't be had, and what to do about it: errors that end a fetch, and those that another try may mend."""

from __future__ import annotations

import re
from enum import StrEnum

from llmgw.errors import EngineFailed
from llmgw.units import printable

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<place>[^?#]*)(?:[?#].*)?", re.DOTALL)


class Kind(StrEnum):
    """What is wrong, for whoever decides what happens next.

    MISSING: there is no such repository, revision or address. NO_FILE: the repository has no such file. GATED: its
    licence must be accepted first. UNAUTHORIZED: a token is missing or is not enough. TLS, DNS, UNREACHABLE: nobody can
    be talked to. DISK: no room, or the disk fails. CORRUPT: the bytes are not what they should be. CHANGED: it is
    another file than the one that was begun. REFUSED: our own rules forbid it. UNSUPPORTED: no way to fetch it.
    """

    MISSING = "missing"
    NO_FILE = "no_file"
    GATED = "gated"
    UNAUTHORIZED = "unauthorized"
    TLS = "tls"
    DNS = "dns"
    UNREACHABLE = "unreachable"
    DISK = "disk"
    CORRUPT = "corrupt"
    CHANGED = "changed"
    REFUSED = "refused"
    UNSUPPORTED = "unsupported"


class FetchFailed(EngineFailed):
    """This fetch is over: trying again at once would end the same way."""

    def __init__(self, message: str, kind: Kind, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.kind = kind


class Broken(Exception):  # noqa: N818 - named by what happens next, like all errors of ours
    """This try ended early, and another may do better, not before ``wait_seconds``. Where none does, ``kind`` and
    ``remedy`` are those of the failure that it then is."""

    def __init__(
        self,
        reason: str,
        wait_seconds: float = 0.0,
        *,
        kind: Kind = Kind.UNREACHABLE,
        remedy: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_seconds = wait_seconds
        self.kind = kind
        self.remedy = remedy

    def give_up(self) -> FetchFailed:
        """What it is once it was tried often enough."""
        return FetchFailed(self.reason, self.kind, remedy=self.remedy)


class NoRanges(Exception):  # noqa: N818
    """This server sends only whole files from the start on: ask for it from its first byte, and in order."""


def show_url(url: str) -> str:
    """A source, or any address, as it may be told to people, in one line. What opens an address stands in its query, or
    before the host's @; anything else (a path, a pattern of the hub's with its ?) is told whole."""
    address = _ADDRESS.fullmatch(url)
    if address is None:
        return printable(url)
    host, slash, path = address["place"].partition("/")
    return printable(f"{address['scheme']}{host.rpartition('@')[2]}{slash}{path}")
