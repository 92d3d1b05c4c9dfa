from __future__ import annotations

import ssl
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.errors import UsageError
from llmgw.pki.authority import (
    Authority,
    Issued,
    certificate_pem,
    issue_node,
    issue_server,
    key_pem,
    make_authority,
)

Handshake = Callable[[ssl.SSLContext, ssl.SSLContext, str], dict[str, Any]]
DAY = 86_400


def stamp(moment: datetime) -> float:
    return moment.timestamp()


def extension(certificate: x509.Certificate, kind: type[Any]) -> Any:
    return certificate.extensions.get_extension_for_class(kind)


def names(certificate: x509.Certificate) -> tuple[list[str], list[str]]:
    found = extension(certificate, x509.SubjectAlternativeName).value
    return found.get_values_for_type(x509.DNSName), [str(ip) for ip in found.get_values_for_type(x509.IPAddress)]


def write(folder: Path, stem: str, issued: Issued | Authority) -> tuple[Path, Path]:
    certificate, key = folder / f"{stem}.pem", folder / f"{stem}-key.pem"
    certificate.write_bytes(certificate_pem(issued.certificate))
    key.write_bytes(key_pem(issued.key))
    return certificate, key


def test_an_authority_signs_certificates_and_no_further_authorities(authority: Authority, now: float) -> None:
    certificate = authority.certificate
    constraints, usage = extension(certificate, x509.BasicConstraints), extension(certificate, x509.KeyUsage)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    assert usage.critical
    assert (usage.value.key_cert_sign, usage.value.crl_sign, usage.value.digital_signature) == (True, True, False)
    assert isinstance(authority.key.curve, ec.SECP256R1)  # type: ignore[union-attr]
    certificate.verify_directly_issued_by(certificate)
    assert stamp(certificate.not_valid_before_utc) == now - DAY
    assert stamp(certificate.not_valid_after_utc) == now + 3650 * DAY


def test_two_authorities_have_names_of_their_own(authority: Authority, now: float) -> None:
    assert make_authority(now=now).certificate.subject != authority.certificate.subject


def test_a_servers_certificate_names_what_is_dialled_and_nothing_else(authority: Authority, now: float) -> None:
    issued = issue_server(authority, "llmgw-ctl", ("10.0.0.140", "Llmgw.internal", "::1"), now=now)
    assert names(issued.certificate) == (["llmgw.internal"], ["10.0.0.140", "::1"])
    assert list(extension(issued.certificate, x509.ExtendedKeyUsage).value) == [ExtendedKeyUsageOID.SERVER_AUTH]
    (common_name,) = issued.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert common_name.value == "llmgw-ctl"
    assert stamp(issued.certificate.not_valid_before_utc) == now - DAY
    assert stamp(issued.certificate.not_valid_after_utc) == now + 365 * DAY


def test_a_servers_certificate_without_a_host_is_refused(authority: Authority, now: float) -> None:
    with pytest.raises(UsageError, match="needs --host"):
        issue_server(authority, "llmgw-ctl", (), now=now)


def test_a_nodes_certificate_is_its_id_and_works_both_ways(authority: Authority, now: float) -> None:
    issued = issue_node(authority, "node01", ("10.0.0.141",), now=now)
    assert names(issued.certificate) == (["node01"], ["10.0.0.141"])
    assert set(extension(issued.certificate, x509.ExtendedKeyUsage).value) == {
        ExtendedKeyUsageOID.CLIENT_AUTH,
        ExtendedKeyUsageOID.SERVER_AUTH,
    }
    (common_name,) = issued.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert common_name.value == "node01"


def test_what_is_issued_is_no_authority_and_points_to_the_one_it_is_of(authority: Authority, now: float) -> None:
    certificate = issue_node(authority, "node01", now=now).certificate
    assert not extension(certificate, x509.BasicConstraints).value.ca
    usage = extension(certificate, x509.KeyUsage).value
    assert (usage.digital_signature, usage.key_cert_sign) == (True, False)
    pointed = extension(certificate, x509.AuthorityKeyIdentifier).value.key_identifier
    assert pointed == extension(authority.certificate, x509.SubjectKeyIdentifier).value.digest
    certificate.verify_directly_issued_by(authority.certificate)


@pytest.mark.parametrize("name", ["Node01", "a b", "10.0.0.1"])
def test_a_bad_name_gets_no_certificate(name: str, authority: Authority, now: float) -> None:
    with pytest.raises(UsageError, match="node name"):
        issue_node(authority, name, now=now)
    with pytest.raises(UsageError, match="server name"):
        issue_server(authority, name, ("localhost",), now=now)


def test_no_certificate_outlives_its_authority(now: float) -> None:
    brief = make_authority(now=now, days=10)
    issued = issue_node(brief, "node01", now=now, days=20)
    assert issued.certificate.not_valid_after_utc == brief.certificate.not_valid_after_utc


def test_an_rsa_authority_that_was_made_elsewhere_can_issue(now: float) -> None:
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "elsewhere")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(datetime.fromtimestamp(now, UTC))
        .not_valid_after(datetime.fromtimestamp(now + 1000 * DAY, UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    issued = issue_node(Authority(certificate=certificate, key=key), "node01", now=now)
    issued.certificate.verify_directly_issued_by(certificate)


def test_a_key_is_written_so_that_it_can_be_read_without_a_passphrase(authority: Authority) -> None:
    read = serialization.load_pem_private_key(key_pem(authority.key), password=None)
    assert read.public_key() == authority.key.public_key()


# With the real thing


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of an authority that is valid now, of a server and of a node."""
    folder = tmp_path_factory.mktemp("pki")
    today = time.time()
    made = make_authority(now=today)
    write(folder, "ca", made)
    write(folder, "server", issue_server(made, "llmgw-ctl", ("localhost", "127.0.0.1", "::1"), now=today))
    write(folder, "node", issue_node(made, "node01", ("10.0.0.141",), now=today))
    write(folder, "old", issue_node(made, "node01", now=today - 400 * DAY))
    other = make_authority(now=today)
    write(folder, "foreign", issue_node(other, "node01", now=today))
    return folder


@pytest.mark.needs("openssl", "openssl")
@pytest.mark.parametrize(
    ("purpose", "name", "good"),
    [
        ("sslserver", "server.pem", True),
        ("sslclient", "server.pem", False),
        ("sslclient", "node.pem", True),
        ("sslserver", "node.pem", True),
        ("sslclient", "old.pem", False),
        ("sslclient", "foreign.pem", False),
    ],
)
def test_openssl_agrees(purpose: str, name: str, *, good: bool, pki: Path) -> None:
    done = subprocess.run(
        ["openssl", "verify", "-x509_strict", "-CAfile", "ca.pem", "-purpose", purpose, name],
        cwd=pki,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode == 0) is good, done.stderr


def serving(pki: Path, stem: str = "server") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(pki / "ca.pem")
    context.load_cert_chain(pki / f"{stem}.pem", pki / f"{stem}-key.pem")
    return context


def dialling(pki: Path, stem: str | None = "node") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(pki / "ca.pem")
    if stem:
        context.load_cert_chain(pki / f"{stem}.pem", pki / f"{stem}-key.pem")
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_a_node_and_a_server_prove_themselves_to_each_other(host: str, pki: Path, handshake: Handshake) -> None:
    seen = handshake(serving(pki), dialling(pki), host)
    assert seen["subject"] == ((("commonName", "node01"),),)


def test_a_node_can_be_dialled_by_another_node(pki: Path, handshake: Handshake) -> None:
    for host in ("node01", "10.0.0.141"):
        assert handshake(serving(pki, "node"), dialling(pki), host)


@pytest.mark.parametrize("host", ["llmgw-ctl", "10.0.0.140"])
def test_a_server_is_not_believed_under_a_name_that_it_has_no_host_for(
    host: str, pki: Path, handshake: Handshake
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(serving(pki), dialling(pki), host)


@pytest.mark.parametrize(
    ("stem", "said"),
    [
        (None, "peer did not return a certificate"),
        ("server", "unsuitable certificate purpose"),
        ("old", "certificate has expired"),
        ("foreign", "unable to get local issuer certificate"),
    ],
)
def test_whoever_is_no_node_of_this_authority_is_refused(
    stem: str | None, said: str, pki: Path, handshake: Handshake
) -> None:
    with pytest.raises(ssl.SSLError, match=said):
        handshake(serving(pki), dialling(pki, stem), "localhost")
