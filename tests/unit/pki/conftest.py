from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmgw.pki.authority import Authority, make_authority

NOW = 1_800_000_000.0


@pytest.fixture
def now() -> float:
    return NOW


@pytest.fixture(scope="session")
def authority() -> Authority:
    return make_authority(now=NOW)


@contextmanager
def nobody() -> Iterator[None]:
    """As a user who may do little; whoever runs the tests as an ordinary user is one already."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def as_nobody() -> object:
    return nobody


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of the machine can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> dict[str, object]:
    """A whole TLS handshake in memory; what the server then knows of the client."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = server.wrap_bio(to_server, to_client, server_side=True)
    there = client.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(10):
        done = 0
        for side in (there, here):
            try:
                side.do_handshake()
                done += 1
            except ssl.SSLWantReadError:
                continue
        if done == 2:
            return dict(here.getpeercert() or {})
    raise AssertionError("the handshake does not end")


@pytest.fixture
def handshake() -> object:
    return shake_hands
