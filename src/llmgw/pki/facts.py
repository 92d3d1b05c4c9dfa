"""What a certificate says, as plain facts for people and programs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.pki.names import write_serial

_DAY = 86_400
_SOON = 30 * _DAY
_USAGES = {ExtendedKeyUsageOID.CLIENT_AUTH: "clientAuth", ExtendedKeyUsageOID.SERVER_AUTH: "serverAuth"}


class Kind(StrEnum):
    AUTHORITY = "authority"
    SERVER = "server"
    NODE = "node"
    OTHER = "other"


class Standing(StrEnum):
    VALID = "valid"
    EXPIRING = "expiring"
    EXPIRED = "expired"
    NOT_YET = "not yet valid"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """``serial`` as it is written in revoked.txt; times in seconds since 1970; ``fingerprint`` is SHA-256 in hex."""

    kind: Kind
    name: str
    issuer: str
    serial: str
    hosts: tuple[str, ...]
    usages: tuple[str, ...]
    not_before: int
    not_after: int
    fingerprint: str


def read_facts(certificate: x509.Certificate) -> CertificateFacts:
    """Of any certificate, ours or not. Raises ValueError for one that can't be understood."""
    try:
        return _read(certificate)
    except (x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ValueError(str(error)) from error


def _read(certificate: x509.Certificate) -> CertificateFacts:
    usages = _usages(certificate)
    return CertificateFacts(
        kind=_kind(certificate, usages),
        name=_common_name(certificate.subject),
        issuer=_common_name(certificate.issuer),
        serial=write_serial(certificate.serial_number),
        hosts=_hosts(certificate),
        usages=usages,
        not_before=int(certificate.not_valid_before_utc.timestamp()),
        not_after=int(certificate.not_valid_after_utc.timestamp()),
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def find_standing(facts: CertificateFacts, now: float, *, revoked: bool = False) -> Standing:
    """Revoked counts first; "expiring" is the last third of a life, and no more than its last 30 days."""
    if revoked:
        return Standing.REVOKED
    if now >= facts.not_after:
        return Standing.EXPIRED
    if now < facts.not_before:
        return Standing.NOT_YET
    soon = min(_SOON, (facts.not_after - facts.not_before) / 3)
    return Standing.EXPIRING if facts.not_after - now < soon else Standing.VALID


def _kind(certificate: x509.Certificate, usages: tuple[str, ...]) -> Kind:
    if is_authority(certificate):
        return Kind.AUTHORITY
    if "clientAuth" in usages:
        return Kind.NODE
    return Kind.SERVER if "serverAuth" in usages else Kind.OTHER


def is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _usages(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(_USAGES.get(usage, usage.dotted_string) for usage in found)


def _hosts(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = (str(address) for address in found.get_values_for_type(x509.IPAddress))
    return (*map(_printable, found.get_values_for_type(x509.DNSName)), *addresses)


def _common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return _printable(str(found[0].value) if found else name.rfc4514_string())


def _printable(text: str) -> str:
    # A stranger's certificate may hold what moves a terminal's cursor.
    return "".join(each if each.isprintable() else "?" for each in text)
