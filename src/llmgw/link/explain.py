"""Why an agent can't reach its server, in the words of whoever has to mend it.

Of the server's certificate the agent knows the fault from its own check. Of its own it may only see the connection go:
in TLS 1.3 a server refuses a client's certificate after the client's handshake is over. So that one is checked before.
"""

from __future__ import annotations

import datetime
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import trio

from llmgw.config.ordinary import read_ordinary
from llmgw.reactor.credentials import TlsFiles

# OpenSSL's numbers of what is wrong with a certificate.
NOT_YET_VALID, EXPIRED, WRONG_PURPOSE = 9, 10, 26
UNKNOWN_ISSUER = frozenset({2, 18, 19, 20, 21})
WRONG_NAME = frozenset({62, 64})
MAX_PEM_BYTES = 1024 * 1024

CLOSED_IN_TLS = "the server closed the connection during TLS; its log line names the reason"


def is_wrong_name(error: BaseException) -> bool:
    """Whether the server's certificate lacks the name that was dialled: then its names are worth a second look."""
    cause = find_cause(error)
    return isinstance(cause, ssl.SSLCertVerificationError) and cause.verify_code in WRONG_NAME


def list_names(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """The alternative names in what ``getpeercert`` gives."""
    return tuple(str(value) for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))


def find_cause(error: BaseException) -> BaseException:
    """The most telling of an error, its causes and its parts: what the system or OpenSSL said."""
    chain = list(_walk(error))
    telling = [one for one in chain if isinstance(one, OSError) and (one.errno is not None or one.args[1:])]
    return telling[-1] if telling else chain[-1]


def _walk(error: BaseException) -> Iterator[BaseException]:
    yield error
    if isinstance(error, BaseExceptionGroup):
        yield from _walk(error.exceptions[0])
    elif error.__cause__ is not None:
        yield from _walk(error.__cause__)


def name_address(host: str, port: int) -> str:
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def explain_dial(error: BaseException, *, host: str, port: int, ca: Path, names: tuple[str, ...] = ()) -> str:
    """What failed between the dial and the upgrade, and what to do. ``names`` are those in the server's certificate."""
    dialled = name_address(host, port)
    cause = find_cause(error)
    match cause:
        case socket.gaierror():
            return f"the name {host} can't be resolved ({cause.strerror}); check `server` in agent.yaml"
        case ConnectionRefusedError():
            return f"{dialled} refuses connections; does the server run, and is that its agent_listen?"
        case ssl.SSLCertVerificationError():
            return _explain_certificate(cause, dialled=dialled, host=host, ca=ca, names=names)
        case ConnectionResetError() | BrokenPipeError() | ssl.SSLEOFError() | ssl.SSLZeroReturnError():
            return f"{dialled}: {CLOSED_IN_TLS}"
        case ssl.SSLError(reason=str(reason)) if "ALERT" in reason:
            alert = reason.rpartition("ALERT_")[2].replace("_", " ").lower()
            return f"{dialled}: the server closed the connection during TLS ({alert}); its log line names the reason"
        case ssl.SSLError():
            return f"{dialled} does not speak TLS as agents do ({cause.reason or cause}); is that agent_listen?"
        case trio.TooSlowError():
            return f"{dialled} does not answer in time; check the address and the firewalls between"
        case OSError():
            return f"{dialled} can't be reached: {cause.strerror or cause}"
        case trio.BrokenResourceError():
            return f"{dialled}: {CLOSED_IN_TLS}"
    return f"{dialled}: {type(cause).__name__}: {cause}"


def _explain_certificate(
    error: ssl.SSLCertVerificationError, *, dialled: str, host: str, ca: Path, names: tuple[str, ...]
) -> str:
    code = error.verify_code
    if code in WRONG_NAME:
        held = ", ".join(names) or "no other name"
        return (
            f"{dialled}: the server's certificate lacks the name that was dialled: dialled {host}, it holds {held}; "
            f"dial one of those, or issue it again with --host {host}"
        )
    if code in UNKNOWN_ISSUER:
        return (
            f"{dialled}: the server's certificate comes from another authority than {ca}; "
            "copy the ca.pem that goes with the server's certificate to this node"
        )
    if code == EXPIRED:
        return f"{dialled}: the server's certificate has expired; issue a new one{_by_this_clock()}"
    if code == NOT_YET_VALID:
        return f"{dialled}: the server's certificate is not valid yet{_by_this_clock()}"
    if code == WRONG_PURPOSE:
        return f"{dialled}: what answers there has no server's certificate; issue it with `llmgw ctl cert issue-server`"
    return f"{dialled}: the server's certificate can't be believed: {error.verify_message}"


def _by_this_clock() -> str:
    return f" (it is {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC by this machine's clock)"


def check_own(files: TlsFiles, *, node: str, now: datetime.datetime) -> str | None:
    """Why the server would refuse this node's certificate, and what to do; None when nothing is seen. Reads files."""
    # Dear to import, and needed by agents only.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415

    try:
        own = x509.load_pem_x509_certificate(read_ordinary(files.cert, MAX_PEM_BYTES))
        authorities = x509.load_pem_x509_certificates(read_ordinary(files.ca, MAX_PEM_BYTES))
        key = load_pem_private_key(read_ordinary(files.key, MAX_PEM_BYTES), password=None)
    except (OSError, ValueError, TypeError) as error:
        return f"the certificate files of this node can't be read: {error}"
    names = [name.value for name in own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [node]:
        holder = str(names[0]) if names else "nobody"
        return f"{files.cert}: was issued to {holder}, but this node is called {node}"
    if key.public_key() != own.public_key():
        return f"{files.key}: is not the key of {files.cert}"
    if now < own.not_valid_before_utc:
        return f"{files.cert}: is not valid before {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC{_by_this_clock()}"
    if now > own.not_valid_after_utc:
        return (
            f"{files.cert}: expired on {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; issue a new one{_by_this_clock()}"
        )
    try:
        usage = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        usage = None
    if usage is not None and ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
        return f"{files.cert}: may not be used by a client; issue it with `llmgw ctl cert issue-node`"
    if not any(_issued(own, authority) for authority in authorities):
        return f"{files.cert}: was issued by another authority than {files.ca}; copy both from the same place"
    return None


def _issued(own: Any, authority: Any) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415

    try:
        own.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
