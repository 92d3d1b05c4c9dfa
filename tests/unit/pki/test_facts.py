from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.pki.authority import Authority, issue_node, issue_server
from llmgw.pki.facts import Kind, Standing, find_standing, is_authority, read_facts

DAY = 86_400


def strange(*usages: x509.ObjectIdentifier, named: bool = True, text: str = "strange") -> x509.Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    kind = NameOID.COMMON_NAME if named else NameOID.ORGANIZATION_NAME
    name = x509.Name([x509.NameAttribute(kind, text)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2026, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2027, 1, 1, tzinfo=UTC))
    )
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(key, hashes.SHA256())


def test_the_facts_of_an_authority(authority: Authority, now: float) -> None:
    facts = read_facts(authority.certificate)
    assert facts.kind is Kind.AUTHORITY
    assert facts.name == facts.issuer
    assert facts.name.startswith("llmgw authority ")
    assert (facts.hosts, facts.usages) == ((), ())
    assert (facts.not_before, facts.not_after) == (now - DAY, now + 3650 * DAY)


def test_the_facts_of_a_server(authority: Authority, now: float) -> None:
    certificate = issue_server(authority, "llmgw-ctl", ("10.0.0.140", "localhost"), now=now).certificate
    facts = read_facts(certificate)
    assert (facts.kind, facts.name) == (Kind.SERVER, "llmgw-ctl")
    assert facts.issuer == read_facts(authority.certificate).name
    assert facts.hosts == ("localhost", "10.0.0.140")
    assert facts.usages == ("serverAuth",)
    assert int(facts.serial, 16) == certificate.serial_number
    assert facts.fingerprint == certificate.fingerprint(hashes.SHA256()).hex()


def test_the_facts_of_a_node(authority: Authority, now: float) -> None:
    facts = read_facts(issue_node(authority, "node01", now=now).certificate)
    assert (facts.kind, facts.name, facts.hosts) == (Kind.NODE, "node01", ("node01",))
    assert facts.usages == ("clientAuth", "serverAuth")


def test_a_certificate_from_elsewhere_has_facts_too() -> None:
    assert read_facts(strange()).kind is Kind.OTHER
    assert read_facts(strange(named=False)).name == "O=strange"
    signing = read_facts(strange(ExtendedKeyUsageOID.CODE_SIGNING))
    assert (signing.kind, signing.usages) == (Kind.OTHER, ("1.3.6.1.5.5.7.3.3",))
    assert not is_authority(strange())


@pytest.mark.parametrize(
    ("days", "standing"),
    [
        (-2, Standing.NOT_YET),
        (-1, Standing.VALID),
        (0, Standing.VALID),
        (334, Standing.VALID),
        (336, Standing.EXPIRING),
        (364, Standing.EXPIRING),
        (365, Standing.EXPIRED),
    ],
)
def test_a_certificate_expires_with_a_warning(days: int, standing: Standing, authority: Authority, now: float) -> None:
    facts = read_facts(issue_node(authority, "node01", now=now, days=365).certificate)
    assert find_standing(facts, now + days * DAY) is standing


def test_a_brief_one_is_not_expiring_from_its_first_day(authority: Authority, now: float) -> None:
    facts = read_facts(issue_node(authority, "node01", now=now, days=3).certificate)
    assert find_standing(facts, now + DAY) is Standing.VALID
    assert find_standing(facts, now + 2.5 * DAY) is Standing.EXPIRING


def test_revoked_comes_before_all_else(authority: Authority, now: float) -> None:
    facts = read_facts(issue_node(authority, "node01", now=now).certificate)
    assert find_standing(facts, now + 9999 * DAY, revoked=True) is Standing.REVOKED


def test_a_name_never_moves_the_cursor() -> None:
    assert read_facts(strange(text="a\x1b[2Jb\nc")).name == "a?[2Jb?c"
