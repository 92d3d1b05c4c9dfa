"""What is made of a certificate's files: those that can't be used, and those that change."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from llmgw.errors import UsageError
from llmgw.pki.authority import certificate_pem, issue_node, key_pem, make_authority
from llmgw.reactor.credentials import Context, Credentials, TlsFiles, load_files


@dataclass(frozen=True, kw_only=True)
class Files:
    ca: Path
    cert: Path
    key: Path


Issue = Callable[..., Files]


@pytest.fixture
def issue(tmp_path: Path) -> Issue:
    """The files of a node's certificate; over ``into`` where that is given."""
    authority = make_authority(now=time.time())
    ca = tmp_path / "ca.pem"
    ca.write_bytes(certificate_pem(authority.certificate))

    def write(name: str = "gpu-1", into: Files | None = None) -> Files:
        issued = issue_node(authority, name, now=time.time())
        files = into or Files(ca=ca, cert=tmp_path / f"{name}.pem", key=tmp_path / f"{name}-key.pem")
        files.key.touch(mode=0o600)
        files.key.write_bytes(key_pem(issued.key))
        files.cert.write_bytes(certificate_pem(issued.certificate))
        return files

    return write


def server(files: TlsFiles) -> ssl.SSLContext:
    return load_files(Context(ssl.PROTOCOL_TLS_SERVER), files)


def client(files: TlsFiles) -> ssl.SSLContext:
    return load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)


def test_nothing_older_than_the_newest_tls_is_spoken(issue: Issue) -> None:
    assert server(issue()).minimum_version == client(issue()).minimum_version == ssl.TLSVersion.TLSv1_3


def test_the_ends_of_what_is_spoken_over_memory_are_kept_with_it(issue: Issue) -> None:
    ends = ssl.MemoryBIO(), ssl.MemoryBIO()
    assert vars(server(issue()).wrap_bio(*ends, server_side=True))["bios"] == ends


def test_files_that_can_not_be_used_are_named(issue: Issue) -> None:
    good = issue()
    other = issue("gpu-2")
    garbage = good.ca.with_name("garbage.pem")
    garbage.write_text("-----BEGIN NONSENSE-----\n")
    garbage.chmod(0o600)
    missing = good.ca.with_name("missing.pem")
    for files, words in (
        (replace(good, ca=missing), f"{missing}: can't be read: No such file"),
        (replace(good, cert=missing), f"{missing}: can't be read: No such file"),
        (replace(good, key=missing), f"{missing}: can't be read: No such file"),
        (replace(good, ca=garbage), f"{garbage}: holds no certificate of an authority"),
        (replace(good, cert=garbage), f"{garbage}, {good.key}: no certificate and its key"),
        (replace(good, key=garbage), f"{good.cert}, {garbage}: no certificate and its key"),
        (replace(good, key=other.key), f"{other.key}: is not the key of the certificate {good.cert}"),
    ):
        for build in (server, client):
            with pytest.raises(UsageError) as caught:
                build(files)
            assert caught.value.message.startswith(words)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(issue: Issue) -> None:
    files = issue()
    key = load_pem_private_key(files.key.read_bytes(), password=None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(UsageError, match="unencrypted"):
        client(files)


def test_a_key_that_everybody_can_read_is_refused(issue: Issue) -> None:
    files = issue()
    files.key.chmod(0o644)
    with pytest.raises(UsageError, match=f"chmod o-rwx {files.key}"):
        server(files)
    files.key.chmod(0o640)
    server(files)


def test_files_that_did_not_change_are_not_read_again(issue: Issue) -> None:
    credentials = Credentials(issue(), server)
    assert credentials.current is credentials.current


def test_a_change_for_the_worse_is_not_taken_and_told_once(issue: Issue, caplog: pytest.LogCaptureFixture) -> None:
    files = issue()
    credentials = Credentials(files, server)
    good = credentials.current
    key = files.key.read_bytes()
    files.key.write_text("half a fi")
    with caplog.at_level(logging.INFO):
        assert credentials.current is credentials.current is good
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "the former ones stay" in caplog.text
        files.key.unlink()
        assert credentials.current is good
        files.key.write_bytes(key)
        files.key.chmod(0o600)
        assert credentials.current is not good
        assert caplog.records[-1].levelname == "INFO"


def test_a_key_that_is_made_private_after_a_change_is_taken_then(issue: Issue) -> None:
    files = issue()
    credentials = Credentials(files, server)
    good = credentials.current
    issue(into=files)
    files.key.chmod(0o644)
    assert credentials.current is good
    files.key.chmod(0o600)
    assert credentials.current is not good
