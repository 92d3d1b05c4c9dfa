from __future__ import annotations

import os
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "llmgw.db"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program writes to the database and does not come to an end."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        yield
        other.execute("rollback")


@pytest.fixture
def lock() -> Callable[[Path], AbstractContextManager[None]]:
    return locked


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
def as_nobody() -> Callable[[], AbstractContextManager[None]]:
    return nobody


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of the machine can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("needs root, and leave to mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
