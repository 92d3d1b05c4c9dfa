"""Says in the server's log which connections were refused and why, without letting one peer fill the disk with it."""

from __future__ import annotations

import logging
import ssl

from llmgw.core.node import NodeId
from llmgw.link.sparing import SparingLog

# Of each address, or node: so many lines in a window, and the rest as a number at its end.
LINES = 3
# Addresses that are told apart; an attacker may have more of them than we have memory.
ADDRESSES = 256
OTHERS = "other addresses"

# What OpenSSL found wrong with the peer's certificate, by a part of its own words.
_CERTIFICATE = {
    "local issuer": "its certificate is not signed by this server's authority",
    "self-signed": "its certificate is not signed by this server's authority",
    "signature failure": "its certificate is not signed by this server's authority",
    "expired": "its certificate has expired",
    "not yet valid": "its certificate is not valid yet; compare the clocks",
    "purpose": "its certificate is not one for agents: clientAuth is missing",
}
# And with the handshake, by a part of the reason's name.
_HANDSHAKE = {
    "PEER_DID_NOT_RETURN": "it showed no certificate",
    "ALERT_UNKNOWN_CA": "it does not believe this server's certificate, which another authority has signed",
    "ALERT_CERTIFICATE_EXPIRED": "it finds this server's certificate expired",
    "ALERT_BAD_CERTIFICATE": "it does not accept this server's certificate",
    "ALERT_CERTIFICATE_UNKNOWN": "it does not accept this server's certificate",
    "HTTP_REQUEST": "it speaks plain HTTP, not TLS",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
    "NO_APPLICATION_PROTOCOL": "it wants another application protocol",
    "WRONG_VERSION": "what it sent is not TLS",
    "UNEXPECTED_EOF": "it closed the connection during the TLS handshake",
}


def explain_tls(error: BaseException) -> str:
    """Why a handshake failed, seen from the server: plain words, then OpenSSL's."""
    if isinstance(error, ssl.SSLCertVerificationError):
        theirs = str(error.verify_message)
        return _add(_find(_CERTIFICATE, theirs) or "its certificate was refused", theirs)
    if isinstance(error, ssl.SSLEOFError):
        return "it closed the connection during the TLS handshake"
    if isinstance(error, ssl.SSLError):
        reason = str(error.reason or error)
        return _add(_find(_HANDSHAKE, reason) or "the TLS handshake failed", reason.replace("_", " ").lower())
    return _add("the connection broke during the TLS handshake", str(error) or type(error).__name__)


def _find(words: dict[str, str], theirs: str) -> str | None:
    return next((ours for part, ours in words.items() if part in theirs), None)


def _add(ours: str, theirs: str) -> str:
    return f"{ours} ({theirs})"


class Refusals:
    """The log of what was refused. ``now`` is in seconds of any one clock."""

    __slots__ = ("_words",)

    def __init__(self) -> None:
        summary = "refused %d more connections from %s within %g s; the last: %s"
        self._words = SparingLog(summary=summary, others=OTHERS, lines=LINES, keys=ADDRESSES)

    def note(
        self,
        peer: tuple[str, int],
        text: str,
        now: float,
        *,
        node: NodeId | None = None,
        fault: BaseException | None = None,
    ) -> None:
        """A connection from ``peer`` was refused for the reason ``text``; with ``fault`` it may be one of ours.

        ``node``: whose certificate it has shown. Then that is who counts: a node may have many addresses, and an
        address many nodes.
        """
        address, port = peer
        key = address if node is None else f"node {node}"
        line = f"refused a connection from {address} port {port}: {text}"
        self._words.say(key, logging.WARNING, line, now, fault=fault, last=text)

    def sweep(self, now: float) -> None:
        """Say of each window that is over how much it withheld; call it now and then."""
        self._words.sweep(now)
