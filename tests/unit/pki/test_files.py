from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from llmgw.errors import LlmgwError, UsageError
from llmgw.pki.authority import (
    Authority,
    Issued,
    certificate_pem,
    issue_node,
    issue_server,
    key_pem,
    make_authority,
)
from llmgw.pki.files import AuthorityFolder, deliver, read_certificates

Nobody = Callable[[], AbstractContextManager[None]]
DAY = 86_400


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_file()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path, authority: Authority) -> AuthorityFolder:
    place = AuthorityFolder(tmp_path / "pki")
    place.create(authority)
    return place


@pytest.fixture
def node(authority: Authority, now: float) -> Issued:
    return issue_node(authority, "node01", now=now)


# The authority


def test_an_authority_is_kept_and_read_again(folder: AuthorityFolder, authority: Authority, now: float) -> None:
    assert modes(folder.path) == {"ca.pem": 0o644, "ca-key.pem": 0o600}
    loaded = folder.load(now=now)
    assert loaded.certificate == authority.certificate
    assert key_pem(loaded.key) == key_pem(authority.key)


@pytest.mark.parametrize("left", ["ca.pem", "ca-key.pem", "issued"])
def test_an_authority_is_never_overwritten_nor_what_is_left_of_one(
    left: str, tmp_path: Path, authority: Authority
) -> None:
    (tmp_path / left).write_text("precious")
    with pytest.raises(UsageError, match="is there already: an authority is never overwritten"):
        AuthorityFolder(tmp_path).create(authority)
    assert contents(tmp_path) == {left: b"precious"}


def test_a_folder_without_an_authority_says_how_to_make_one(tmp_path: Path, now: float) -> None:
    with pytest.raises(UsageError, match=r"no ca\.pem.*llmgw ctl cert init-ca --dir"):
        AuthorityFolder(tmp_path).load(now=now)
    with pytest.raises(UsageError, match="nowhere is no folder"):
        AuthorityFolder(tmp_path / "nowhere").load(now=now)


def test_a_missing_key_is_told(folder: AuthorityFolder, now: float) -> None:
    folder.key.unlink()
    with pytest.raises(UsageError, match=r"ca-key\.pem is missing"):
        folder.load(now=now)
    assert folder.read_certificate()


def test_a_key_that_everybody_can_read_is_refused(folder: AuthorityFolder, now: float) -> None:
    folder.key.chmod(0o644)
    with pytest.raises(UsageError, match=r"everybody on this machine: chmod 600 \S*ca-key\.pem"):
        folder.load(now=now)


def test_a_key_of_another_authority_is_refused(folder: AuthorityFolder, now: float) -> None:
    folder.key.write_bytes(key_pem(make_authority(now=now).key))
    with pytest.raises(UsageError, match=r"ca-key\.pem is not the key of \S*ca\.pem"):
        folder.load(now=now)


def test_a_key_that_is_none_or_can_not_be_used_is_told(
    folder: AuthorityFolder, authority: Authority, now: float
) -> None:
    encrypted = authority.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    odd = ed25519.Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for data, said in (
        (b"junk", "is not a private key"),
        (certificate_pem(authority.certificate), "is not a private key"),
        (encrypted, "is encrypted"),
        (odd, "of a kind"),
    ):
        folder.key.write_bytes(data)
        with pytest.raises(UsageError, match=said):
            folder.load(now=now)


def test_an_expired_authority_issues_nothing(folder: AuthorityFolder, now: float) -> None:
    with pytest.raises(UsageError, match="expired on 2037-01-12"):
        folder.load(now=now + 3650 * DAY)


def test_a_certificate_that_is_no_authoritys_is_refused(folder: AuthorityFolder, node: Issued, now: float) -> None:
    folder.certificate.write_bytes(certificate_pem(node.certificate))
    with pytest.raises(UsageError, match="is not an authority's certificate"):
        folder.load(now=now)


def test_an_authority_under_another_one_is_refused(folder: AuthorityFolder, authority: Authority, now: float) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(5)
        .not_valid_before(datetime.fromtimestamp(now, UTC))
        .not_valid_after(datetime.fromtimestamp(now + DAY, UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority.key, hashes.SHA256())
    )
    folder.certificate.write_bytes(certificate_pem(certificate))
    with pytest.raises(UsageError, match=r"was issued by another authority .llmgw authority"):
        folder.load(now=now)


def test_what_may_not_be_read_is_told(open_folder: Path, authority: Authority, now: float, as_nobody: Nobody) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a second user, and so root")
    place = AuthorityFolder(open_folder / "pki")
    place.create(authority)
    with as_nobody():
        assert place.read_certificate() == authority.certificate
        with pytest.raises(LlmgwError, match=r"ca-key\.pem can't be read: Permission denied: do it as a user who may"):
            place.load(now=now)
        with pytest.raises(LlmgwError, match=r"revoked\.txt can't be written: Permission denied"):
            place.revoke(["node01"])
    place.path.chmod(0o700)
    with as_nobody(), pytest.raises(LlmgwError, match="can't be read: Permission denied"):
        place.load(now=now)


# What is issued


def test_a_pair_is_delivered_with_the_authoritys_certificate(
    folder: AuthorityFolder, node: Issued, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "node01"
    paths = deliver(folder, node, out, "node", force=False)
    assert [path.name for path in paths] == ["node.pem", "node-key.pem", "ca.pem"]
    assert modes(out) == {"node.pem": 0o644, "node-key.pem": 0o640, "ca.pem": 0o644}
    assert (out / "node.pem").read_bytes() == certificate_pem(node.certificate)
    assert (out / "node-key.pem").read_bytes() == key_pem(node.key)
    assert (out / "ca.pem").read_bytes() == folder.certificate.read_bytes()


def test_what_is_delivered_is_on_record(folder: AuthorityFolder, node: Issued, tmp_path: Path) -> None:
    assert folder.read_issued() == ((), ())
    deliver(folder, node, tmp_path / "out", "node", force=False)
    ((facts,), damaged) = folder.read_issued()
    assert (facts.name, int(facts.serial, 16)) == ("node01", node.certificate.serial_number)
    assert damaged == ()


def test_a_server_and_a_node_fit_into_one_folder_and_even_into_the_authoritys(
    folder: AuthorityFolder, authority: Authority, node: Issued, now: float
) -> None:
    before = contents(folder.path)
    deliver(folder, node, folder.path, "node", force=False)
    deliver(folder, issue_server(authority, "ctl", ("localhost",), now=now), folder.path, "server", force=False)
    after = contents(folder.path)
    assert {name: after[name] for name in before} == before
    assert {"node.pem", "node-key.pem", "server.pem", "server-key.pem"} < set(after)


def test_a_pair_that_is_there_is_not_overwritten(
    folder: AuthorityFolder, node: Issued, authority: Authority, tmp_path: Path, now: float
) -> None:
    out = tmp_path / "out"
    deliver(folder, node, out, "node", force=False)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=r"node\.pem is there already, for node node01: --force replaces it"):
        deliver(folder, issue_node(authority, "node02", now=now), out, "node", force=False)
    assert contents(tmp_path) == before


def test_a_key_without_its_certificate_is_not_overwritten_either(
    folder: AuthorityFolder, node: Issued, tmp_path: Path
) -> None:
    (tmp_path / "node-key.pem").write_text("precious")
    with pytest.raises(UsageError, match=r"node-key\.pem is there already: --force"):
        deliver(folder, node, tmp_path, "node", force=False)
    assert folder.read_issued() == ((), ())


def test_force_replaces_the_pair_and_keeps_its_owner(
    folder: AuthorityFolder, node: Issued, authority: Authority, tmp_path: Path, now: float
) -> None:
    out = tmp_path / "out"
    deliver(folder, node, out, "node", force=False)
    if os.geteuid() == 0:
        os.chown(out / "node-key.pem", 0, 1234)
    fresh = issue_node(authority, "node01", now=now)
    deliver(folder, fresh, out, "node", force=True)
    assert (out / "node.pem").read_bytes() == certificate_pem(fresh.certificate)
    assert modes(out) == {"node.pem": 0o644, "node-key.pem": 0o640, "ca.pem": 0o644}
    if os.geteuid() == 0:
        assert (out / "node-key.pem").stat().st_gid == 1234
    assert len(folder.read_issued()[0]) == 2


@pytest.mark.parametrize("force", [True, False])
def test_another_authoritys_certificate_is_never_overwritten(
    folder: AuthorityFolder, node: Issued, tmp_path: Path, now: float, *, force: bool
) -> None:
    other = AuthorityFolder(tmp_path / "other")
    other.create(make_authority(now=now))
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="another authority's, and is never overwritten"):
        deliver(folder, node, other.path, "node", force=force)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("force", [True, False])
def test_a_folder_in_the_way_stops_it_before_anything_is_written(
    folder: AuthorityFolder, node: Issued, tmp_path: Path, *, force: bool
) -> None:
    (tmp_path / "out" / "node.pem").mkdir(parents=True)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=r"node\.pem is a folder"):
        deliver(folder, node, tmp_path / "out", "node", force=force)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("force", [True, False])
def test_a_full_disk_leaves_what_was_there(
    folder: AuthorityFolder, node: Issued, authority: Authority, tmp_path: Path, now: float, *, force: bool
) -> None:
    out = tmp_path / "out"
    if force:
        deliver(folder, node, out, "node", force=False)
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(LlmgwError, match="out can't be written to: File too large: free some space"):
            deliver(folder, issue_node(authority, "node01", now=now), out, "node", force=force)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == before


def test_a_record_that_can_not_be_kept_stops_it(folder: AuthorityFolder, node: Issued, tmp_path: Path) -> None:
    folder.issued.write_text("in the way")
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="issued is a file, not a folder"):
        deliver(folder, node, tmp_path / "out", "node", force=False)
    assert contents(tmp_path) == before


def test_whoever_comes_first_keeps_the_place(authority: Authority, node: Issued, tmp_path: Path) -> None:
    class Slow(AuthorityFolder):
        """Somebody else is quicker."""

        def record(self, certificate: x509.Certificate) -> Path:
            (tmp_path / "node.pem").write_text("theirs")
            return super().record(certificate)

    folder = Slow(tmp_path / "pki")
    folder.create(authority)
    with pytest.raises(LlmgwError, match="File exists"):
        deliver(folder, node, tmp_path, "node", force=False)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["node.pem", "pki"]
    assert (tmp_path / "node.pem").read_text() == "theirs"
    assert folder.read_issued() == ((), ())


def test_a_damaged_record_hides_no_other(folder: AuthorityFolder, node: Issued) -> None:
    folder.record(node.certificate)
    (folder.issued / "broken.pem").write_text("junk")
    (folder.issued / "notes.txt").write_text("not looked at")
    (facts,), (damaged,) = folder.read_issued()
    assert facts.name == "node01"
    assert "broken.pem is not a certificate" in damaged


# What is revoked


def test_revoked_lines_are_added_and_read(folder: AuthorityFolder) -> None:
    assert folder.read_revoked().nodes == frozenset()
    folder.revoke(["node01", "ab" * 20])
    folder.revoke(["node02"])
    revoked = folder.read_revoked()
    assert (revoked.nodes, revoked.serials) == ({"node01", "node02"}, {int("ab" * 20, 16)})
    assert modes(folder.path)["revoked.txt"] == 0o644


def test_a_list_that_can_not_be_read_is_not_taken_for_an_empty_one(folder: AuthorityFolder) -> None:
    folder.revoked.mkdir()
    with pytest.raises(LlmgwError, match=r"revoked\.txt is a folder"):
        folder.read_revoked()
    folder.revoked.rmdir()
    os.mkfifo(folder.revoked)
    with pytest.raises(LlmgwError, match=r"revoked\.txt can't be read: it is no ordinary file"):
        folder.read_revoked()


def test_pipes_in_the_folder_are_told_and_not_waited_for(folder: AuthorityFolder, node: Issued) -> None:
    record = folder.record(node.certificate)
    os.mkfifo(folder.issued / "pipe.pem")
    issued, (damaged,) = folder.read_issued()
    assert [facts.name for facts in issued] == [record.name.rpartition("-")[0]]
    assert "pipe.pem can't be read: it is no ordinary file" in damaged
    folder.certificate.unlink()
    os.mkfifo(folder.certificate)
    with pytest.raises(LlmgwError, match=r"ca\.pem can't be read: it is no ordinary file"):
        folder.read_certificate()


def test_a_list_or_a_certificate_that_has_no_end_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "long.pem"
    with path.open("wb") as file:
        file.truncate(1024 * 1024 + 1)
    with pytest.raises(UsageError, match="larger than 1024 KiB"):
        read_certificates(path)


# Any certificate


def test_all_certificates_of_a_file_are_read(tmp_path: Path, authority: Authority, node: Issued) -> None:
    path = tmp_path / "both.pem"
    path.write_bytes(certificate_pem(node.certificate) + certificate_pem(authority.certificate))
    assert read_certificates(path) == [node.certificate, authority.certificate]


@pytest.mark.parametrize("data", [b"", b"junk", b"\x00\xff" * 100, b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_what_is_no_certificate_is_said_to_be_none(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pem"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"x\.pem is not a certificate"):
        read_certificates(path)


def test_a_certificate_that_was_cut_or_changed_is_an_error_and_never_a_crash(tmp_path: Path, node: Issued) -> None:
    pem, path = certificate_pem(node.certificate), tmp_path / "x.pem"
    for at in range(30, len(pem) - 30, 7):
        path.write_bytes(pem[:at] + bytes([65 + pem[at] % 26]) + pem[at + 1 :])
        try:
            read_certificates(path)
        except UsageError:
            continue
        path.write_bytes(pem[:at])
        with pytest.raises(UsageError):
            read_certificates(path)


def test_a_missing_file_a_folder_and_a_key_are_told(tmp_path: Path, node: Issued) -> None:
    with pytest.raises(LlmgwError, match="No such file"):
        read_certificates(tmp_path / "none.pem")
    with pytest.raises(UsageError, match="is a folder"):
        read_certificates(tmp_path)
    key = tmp_path / "key.pem"
    key.write_bytes(key_pem(node.key))
    with pytest.raises(UsageError, match="is a private key, not a certificate"):
        read_certificates(key)


def test_a_folder_can_be_copied_and_goes_on(folder: AuthorityFolder, node: Issued, tmp_path: Path, now: float) -> None:
    deliver(folder, node, tmp_path / "out", "node", force=False)
    shutil.copytree(folder.path, tmp_path / "copy")
    copy = AuthorityFolder(tmp_path / "copy")
    assert copy.load(now=now).certificate == folder.load(now=now).certificate
    assert copy.read_issued() == folder.read_issued()
