"""What is wrong on the way to the server, in words, and what an agent sees in its own certificate."""

from __future__ import annotations

import datetime
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.link.explain import check_own, explain_dial, find_cause, is_wrong_name, list_names, name_address

NOW = datetime.datetime.now(datetime.UTC)


def unbelieved(code: int, message: str = "") -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, message
    return error


def tls(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] something")
    error.reason = reason
    return error


def broken(cause: Exception) -> trio.BrokenResourceError:
    error = trio.BrokenResourceError()
    error.__cause__ = cause
    return error


def refused() -> OSError:
    error = OSError("all attempts to connect failed")
    error.__cause__ = ExceptionGroup("", [ConnectionRefusedError(111, "Connection refused")])
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            socket.gaierror(-2, "Name or service not known"),
            "the name head can't be resolved (Name or service not known)",
        ),
        (refused(), "head:7443 refuses connections"),
        (OSError(113, "No route to host"), "head:7443 can't be reached: No route to host"),
        (trio.TooSlowError(), "head:7443 does not answer in time"),
        (broken(unbelieved(20)), "comes from another authority than /etc/ca.pem"),
        (broken(unbelieved(19)), "comes from another authority than /etc/ca.pem"),
        (broken(unbelieved(10)), "the server's certificate has expired"),
        (broken(unbelieved(9)), "the server's certificate is not valid yet (it is 2"),
        (broken(unbelieved(26)), "has no server's certificate"),
        (broken(unbelieved(62)), "dialled head, it holds a.test, 10.0.0.1; dial one of those, or issue it again"),
        (broken(unbelieved(64)), "dialled head, it holds a.test, 10.0.0.1; dial one of those, or issue it again"),
        (broken(unbelieved(7, "bad signature")), "can't be believed: bad signature"),
        (
            broken(tls("TLSV13_ALERT_CERTIFICATE_REQUIRED")),
            ": the server closed the connection during TLS (certificate required); its log line names the reason",
        ),
        (broken(tls("SSLV3_ALERT_CERTIFICATE_EXPIRED")), "during TLS (certificate expired); its log line"),
        (broken(tls("WRONG_VERSION_NUMBER")), "head:7443 does not speak TLS as agents do (WRONG_VERSION_NUMBER)"),
        (
            broken(ssl.SSLEOFError(8, "EOF occurred in violation of protocol")),
            "head:7443: the server closed the connection during TLS; its log line names the reason",
        ),
        (broken(ConnectionResetError(104, "Connection reset by peer")), "closed the connection during TLS"),
        (broken(BrokenPipeError(32, "Broken pipe")), "closed the connection during TLS"),
        (ConnectionResetError(), "closed the connection during TLS"),
        (trio.BrokenResourceError("server closed"), "closed the connection during TLS"),
        (ValueError("label too long"), "head:7443: ValueError: label too long"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_failure_has_its_words(error: Exception, words: str) -> None:
    names = ("a.test", "10.0.0.1")
    text = explain_dial(error, host="head", port=7443, ca=Path("/etc/ca.pem"), names=names)
    assert words in text
    assert "head" in text


def test_a_certificate_without_names_is_said_to_have_none() -> None:
    text = explain_dial(broken(unbelieved(62)), host="head", port=7443, ca=Path("ca.pem"))
    assert "it holds no other name" in text


def test_only_a_wrong_name_is_worth_a_second_look() -> None:
    assert is_wrong_name(broken(unbelieved(62)))
    assert is_wrong_name(broken(unbelieved(64)))
    assert not is_wrong_name(broken(unbelieved(20)))
    assert not is_wrong_name(broken(tls("X")))


def test_names_are_read_from_what_openssl_gives() -> None:
    names = {"subjectAltName": (("DNS", "a.test"), ("IP Address", "10.0.0.1"), ("URI", "x:y"))}
    assert list_names(names) == ("a.test", "10.0.0.1")
    assert list_names({}) == ()


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert name_address("fd00::1", 7443) == "[fd00::1]:7443"
    assert name_address("head", 7443) == "head:7443"


def test_the_cause_is_what_the_system_said() -> None:
    assert isinstance(find_cause(refused()), ConnectionRefusedError)
    plain = ValueError("x")
    assert find_cause(plain) is plain


# -- the own certificate


def sign_without_usage(authority: Any, files: Any, common_name: str | None) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    names = [] if common_name is None else [x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(names))
        .issuer_name(authority.name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(NOW - datetime.timedelta(days=1))
        .not_valid_after(NOW + datetime.timedelta(days=1))
        .sign(authority.key, hashes.SHA256())
    )
    files.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def test_a_right_certificate_raises_no_objection(authority: Any) -> None:
    assert check_own(authority.issue("gpu-1"), node="gpu-1", now=NOW) is None


def test_a_certificate_that_says_nothing_of_its_use_may_be_used(authority: Any) -> None:
    files = authority.issue("gpu-1")
    sign_without_usage(authority, files, "gpu-1")
    assert check_own(files, node="gpu-1", now=NOW) is None


def test_one_of_several_authorities_is_enough(authority: Any, make_authority: Any) -> None:
    files = authority.issue("gpu-1")
    files.ca.write_bytes(make_authority("newer").ca.read_bytes() + files.ca.read_bytes())
    assert check_own(files, node="gpu-1", now=NOW) is None


WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "another node's": (lambda own, _: own.issue("gpu-2"), "was issued to gpu-2, but this node is called gpu-1"),
    "expired": (lambda own, _: own.issue("gpu-1", days=(-9, -1)), "expired "),
    "not yet valid": (lambda own, _: own.issue("gpu-1", days=(1, 9)), "is not valid before "),
    "not for clients": (lambda own, _: own.issue("gpu-1", client=False), "may not be used by a client"),
    "another authority's": (
        lambda own, other: replace(other.issue("gpu-1"), ca=own.ca),
        "was issued by another authority than",
    ),
    "another's key": (
        lambda own, _: replace(own.issue("gpu-1"), key=own.issue("gpu-1").key),
        "is not the key of",
    ),
    "missing": (
        lambda own, _: replace(own.issue("gpu-1"), cert=Path("/nowhere/node.pem")),
        "can't be read: [Errno 2] No such file or directory: '/nowhere/node.pem'",
    ),
    "garbage": (lambda own, _: replace(own.issue("gpu-1"), cert=own.issue("gpu-1").key), "can't be read: "),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_server_would_refuse_is_seen_before(authority: Any, make_authority: Any, wrong: str) -> None:
    make, words = WRONG[wrong]
    files = make(authority, make_authority("other"))
    text = check_own(files, node="gpu-1", now=NOW)
    assert text is not None
    assert words in text


def test_a_certificate_of_nobody_is_not_this_nodes(authority: Any) -> None:
    files = authority.issue("gpu-1")
    sign_without_usage(authority, files, None)
    assert "was issued to nobody" in (check_own(files, node="gpu-1", now=NOW) or "")
