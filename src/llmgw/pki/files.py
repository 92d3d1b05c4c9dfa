"""Where certificates and keys are kept: the authority's folder, and the folder that a machine's are written to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from llmgw.config.ordinary import read_ordinary
from llmgw.errors import LlmgwError, UsageError
from llmgw.pki.atomic import append_lines, explained, make_folder, stage
from llmgw.pki.authority import Authority, Issued, SigningKey, certificate_pem, key_pem
from llmgw.pki.facts import CertificateFacts, is_authority, read_facts
from llmgw.pki.names import write_serial
from llmgw.pki.revocation import Revoked, read_revoked

PUBLIC, OWNER_ONLY, OWNER_AND_GROUP = 0o644, 0o600, 0o640
# No certificate is as long as this, and a wrong file may be.
_MAX_BYTES = 1024 * 1024
# revoked.txt only grows, by some 60 bytes for each certificate.
_MAX_LIST_BYTES = 64 * 1024 * 1024


class AuthorityFolder:
    """The folder with ca.pem and ca-key.pem, a copy of each certificate issued, and revoked.txt.

    Its methods raise UsageError or LlmgwError with the file, what is wrong with it, and what to do.
    """

    __slots__ = ("certificate", "issued", "key", "path", "revoked")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.certificate = path / "ca.pem"
        self.key = path / "ca-key.pem"
        self.issued = path / "issued"
        self.revoked = path / "revoked.txt"

    def create(self, authority: Authority) -> None:
        """Keep a new authority. An older one, or what is left of it, is never overwritten."""
        for path in (self.certificate, self.key, self.issued):
            if os.path.lexists(path):
                raise UsageError(
                    f"{path} is there already: an authority is never overwritten, for nothing that it issued would be "
                    "believed any more; use another folder, or move that one away first"
                )
        make_folder(self.path)
        with stage() as staged, explained(self.path, "written"):
            # The key first: where two come at once, one of them ends here and the other has both files.
            staged.add(self.key, key_pem(authority.key), OWNER_ONLY)
            staged.add(self.certificate, certificate_pem(authority.certificate), PUBLIC)
            staged.place_new()

    def read_certificate(self) -> x509.Certificate:
        """The authority's own, which everybody may read."""
        if not _is_there(self.path) or not self.path.is_dir():
            raise UsageError(f"{self.path} is no folder: give the one that init-ca --dir made")
        if not _is_there(self.certificate):
            raise UsageError(
                f"there is no authority in {self.path} (no ca.pem): give the folder that holds it, or make one with "
                f"llmgw ctl cert init-ca --dir {self.path}"
            )
        certificate = read_certificates(self.certificate)[0]
        _check_authority(certificate, self.certificate)
        return certificate

    def load(self, *, now: float) -> Authority:
        """The authority with its key, fit to issue."""
        certificate = self.read_certificate()
        if not _is_there(self.key):
            raise UsageError(
                f"{self.key} is missing: certificates are issued where the authority's key is kept; "
                "if it is lost, make a new authority in another folder"
            )
        key = _read_key(self.key)
        if _public_bytes(key) != _public_bytes(certificate):
            raise UsageError(f"{self.key} is not the key of {self.certificate}: find the two that belong together")
        if now >= certificate.not_valid_after_utc.timestamp():
            raise UsageError(
                f"the authority in {self.path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}: make a new one "
                "in another folder, and issue the server's and the nodes' certificates anew from there"
            )
        return Authority(certificate=certificate, key=key)

    def record(self, certificate: x509.Certificate) -> Path:
        """Keep a copy, by which the certificate can be listed and revoked later."""
        facts = read_facts(certificate)
        path = self.issued / f"{facts.name}-{write_serial(certificate.serial_number)}.pem"
        make_folder(self.issued)
        with stage() as staged, explained(path, "written"):
            staged.add(path, certificate_pem(certificate), PUBLIC)
            staged.place_new()
        return path

    def read_issued(self) -> tuple[tuple[CertificateFacts, ...], tuple[str, ...]]:
        """All that were issued here, the oldest first; and a line for each file that can't be read."""
        found, damaged = [], []
        with explained(self.issued, "read"):
            paths = sorted(self.issued.glob("*.pem"))
        for path in paths:
            try:
                found.append(read_facts(read_certificates(path)[0]))
            except LlmgwError as error:
                damaged.append(error.message)
        return tuple(sorted(found, key=lambda facts: (facts.not_before, facts.name))), tuple(damaged)

    def read_revoked(self) -> Revoked:
        """What revoked.txt says; nothing where there is none."""
        try:
            return read_revoked(_read(self.revoked, _MAX_LIST_BYTES).decode(errors="replace"))
        except LlmgwError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return Revoked()
            raise

    def revoke(self, lines: list[str]) -> None:
        """Add lines to revoked.txt."""
        with explained(self.revoked, "written"):
            append_lines(self.revoked, lines, PUBLIC)


def deliver(folder: AuthorityFolder, issued: Issued, out: Path, stem: str, *, force: bool) -> tuple[Path, ...]:
    """Record the certificate and write it to ``out`` as STEM.pem and STEM-key.pem, beside a copy of ca.pem.

    Returns the three paths. With ``force`` an older pair is replaced, and its owner and group stay; another authority's
    ca.pem never is. When this fails, what was there before is there still.
    """
    certificate, key, ca = out / f"{stem}.pem", out / f"{stem}-key.pem", out / "ca.pem"
    ca_pem = _read(folder.certificate)
    make_folder(out)
    _check_same_authority(ca, ca_pem)
    _check_free(certificate, key, force=force)
    with stage() as staged, explained(out, "written to"):
        if not ca.exists():
            staged.add(ca, ca_pem, PUBLIC)
        for path, data, mode in (
            (key, key_pem(issued.key), OWNER_AND_GROUP),
            (certificate, certificate_pem(issued.certificate), PUBLIC),
        ):
            staged.add(path, data, mode, like=path.stat() if path.exists() else None)
        # Before anybody can use it: a certificate that is not on record can't be revoked by its node's name.
        record = folder.record(issued.certificate)
        try:
            staged.place() if force else staged.place_new()
        except OSError:
            record.unlink(missing_ok=True)
            raise
    return certificate, key, ca


def read_certificates(path: Path) -> list[x509.Certificate]:
    """All certificates of a PEM file, at least one. UsageError where it holds none, or something else."""
    data = _read(path)
    try:
        found = x509.load_pem_x509_certificates(data)
        for certificate in found:
            read_facts(certificate)
    except (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        if b"PRIVATE KEY-----" in data:
            raise UsageError(f"{path} is a private key, not a certificate: give the .pem beside it") from error
        raise UsageError(f"{path} is not a certificate that can be read (PEM is expected): {error}") from error
    return found


def _read(path: Path, most: int = _MAX_BYTES) -> bytes:
    with explained(path, "read"):
        if path.is_dir():
            raise UsageError(f"{path} is a folder: give a file in it")
        data = read_ordinary(path, most + 1)
    if len(data) > most:
        raise UsageError(f"{path} is larger than {most // 1024} KiB: it is another file")
    return data


def _read_key(path: Path) -> SigningKey:
    with explained(path, "read"):
        mode = path.stat().st_mode
    if mode & stat.S_IRWXO:
        raise UsageError(
            f"{path} may be read or written by everybody on this machine: chmod 600 {path}, and if others did use this "
            "machine, make a new authority"
        )
    try:
        key = load_pem_private_key(_read(path), password=None)
    except TypeError as error:
        raise UsageError(f"{path} is encrypted: llmgw asks for no passphrase, so keep it as a plain PEM key") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is not a private key that can be read (PEM is expected): {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise UsageError(f"{path} is a key of a kind that llmgw doesn't sign with: EC and RSA keys can be used")
    return key


def _check_authority(certificate: x509.Certificate, path: Path) -> None:
    if not is_authority(certificate):
        raise UsageError(f"{path} is not an authority's certificate: give the folder that init-ca --dir made")
    try:
        certificate.verify_directly_issued_by(certificate)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{path} was issued by another authority ({read_facts(certificate).issuer}), and an agent believes only "
            "one that stands for itself: make one with llmgw ctl cert init-ca"
        ) from error


def _check_same_authority(path: Path, ca_pem: bytes) -> None:
    if os.path.lexists(path) and _read(path) != ca_pem:
        raise UsageError(
            f"{path} is another authority's, and is never overwritten: choose another --out, "
            "or move it away first if nothing needs it any more"
        )


def _check_free(certificate: Path, key: Path, *, force: bool) -> None:
    for path in (certificate, key):
        if path.is_dir():
            raise UsageError(f"{path} is a folder: choose another --out")
        if os.path.lexists(path) and not force:
            raise UsageError(
                f"{path} is there already{_whose(certificate)}: --force replaces it, or choose another --out"
            )


def _whose(path: Path) -> str:
    try:
        facts = read_facts(read_certificates(path)[0])
    except LlmgwError:
        # There is something, and it is not for this command to judge.
        return ""
    return f", for {facts.kind} {facts.name}"


def _is_there(path: Path) -> bool:
    with explained(path, "read"):
        return path.exists()


def _public_bytes(owner: SigningKey | x509.Certificate) -> bytes:
    return owner.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
