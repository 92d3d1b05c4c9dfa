"""What is in a certificate: builds those of the authority, of a server and of a node. Touches no file and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.errors import UsageError
from llmgw.pki.names import Address, check_name, read_hosts

AUTHORITY_DAYS = 3650
DAYS = 365
# The clocks of a cluster's machines differ: a certificate is valid from a little before it is made.
_BACK = timedelta(days=1)

SigningKey: TypeAlias = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Whoever holds this can make any node's identity."""

    certificate: x509.Certificate
    key: SigningKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate and the key that goes with it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_authority(*, now: float, days: int = AUTHORITY_DAYS) -> Authority:
    """An authority that signs certificates of servers and nodes, and none of further authorities."""
    key = _new_key()
    serial = x509.random_serial_number()
    # A name of its own: a peer that holds another authority's file then says "unknown issuer", not "bad signature".
    name = _name(f"llmgw authority {serial:040x}"[:24])
    certificate = (
        _builder(name, name, key, serial, _validity(now, days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate=certificate, key=key)


def issue_server(authority: Authority, name: str, hosts: tuple[str, ...], *, now: float, days: int = DAYS) -> Issued:
    """A server's certificate. Only ``hosts`` are names that an agent may dial; ``name`` is for people.

    Raises UsageError for a name or host that can't be in one, and where there is no host.
    """
    if not hosts:
        raise UsageError(
            f"issue-server {name} needs --host: every name and address that agents will dial, each one by itself; "
            "the certificate is good for no other"
        )
    check_name(name, "server name")
    return _issue(authority, name, read_hosts(hosts), (ExtendedKeyUsageOID.SERVER_AUTH,), _validity(now, days))


def issue_node(authority: Authority, node: str, hosts: tuple[str, ...] = (), *, now: float, days: int = DAYS) -> Issued:
    """A node's certificate: its common name is the node's id. Whoever dials the node finds it and ``hosts`` as names.

    Raises UsageError for a name or host that can't be in one.
    """
    check_name(node, "node name")
    usages = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
    return _issue(authority, node, read_hosts((node, *hosts)), usages, _validity(now, days))


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: SigningKey) -> bytes:
    """PKCS 8, not encrypted: a server starts without anybody who types."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _issue(
    authority: Authority,
    name: str,
    hosts: Sequence[str | Address],
    usages: Sequence[x509.ObjectIdentifier],
    validity: tuple[datetime, datetime],
) -> Issued:
    key = _new_key()
    start, end = validity
    # A certificate that outlives its authority would fail on a day that nobody has written down.
    end = min(end, authority.certificate.not_valid_after_utc)
    names = [x509.DNSName(host) if isinstance(host, str) else x509.IPAddress(host) for host in hosts]
    certificate = (
        _builder(_name(name), authority.certificate.subject, key, x509.random_serial_number(), (start, end))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(_issuer_key_id(authority.certificate), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Issued(certificate=certificate, key=key)


def _issuer_key_id(certificate: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    try:
        given = certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except x509.ExtensionNotFound:
        # an authority that was made elsewhere
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(certificate.public_key())  # type: ignore[arg-type]
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(given.value)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    serial: int,
    validity: tuple[datetime, datetime],
) -> x509.CertificateBuilder:
    start, end = validity
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _validity(now: float, days: int) -> tuple[datetime, datetime]:
    made = datetime.fromtimestamp(int(now), UTC)
    return made - _BACK, made + timedelta(days=days)


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )
