"""The list of revoked certificates: what its lines mean, and how a change of it is noticed."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import pytest
import trio

from llmgw.core.node import NodeId
from llmgw.errors import UsageError
from llmgw.link.revoked import MAX_LIST_BYTES, Revoked, parse

NODE = NodeId("gpu-01")
SERIAL = 0x0BAD_CAFE_0123


def write(path: Path, text: str) -> None:
    """As an operator's tool does it: beside, then over."""
    beside = path.with_name("new")
    beside.write_text(text)
    beside.replace(path)


def test_lines_are_names_and_serials_in_any_common_spelling() -> None:
    found = parse("# revoked\n\n  GPU-01  # stolen\n0B:AD:CA:FE\n0x0000beef\r\nnot hex, no name\n")
    assert {"gpu-01", "badcafe", "beef"} <= found
    assert "" not in found
    assert not any("#" in entry for entry in found)


@pytest.mark.parametrize("line", ["gpu-01", "GPU-01", "0BADCAFE0123", "bad:caf:e01:23", "badcafe0123 # lost"])
def test_a_certificate_is_revoked_by_its_node_or_its_serial(tmp_path: Path, line: str) -> None:
    path = tmp_path / "revoked.txt"
    path.write_text(f"{line}\n")
    assert Revoked(path).explain(NODE, SERIAL) == "the certificate of node gpu-01 (serial badcafe0123) is revoked"
    assert Revoked(path).explain(NodeId("gpu-02"), SERIAL + 1) is None


def test_a_file_that_is_not_there_revokes_nobody(tmp_path: Path) -> None:
    revoked = Revoked(tmp_path / "revoked.txt")
    assert revoked.explain(NODE, SERIAL) is None
    assert not revoked.read_again()


def test_a_file_that_cant_be_read_at_the_start_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which lists the revoked certificates"):
        Revoked(tmp_path)


def test_bytes_that_are_no_text_revoke_what_the_other_lines_say(tmp_path: Path) -> None:
    path = tmp_path / "revoked.txt"
    path.write_bytes(b"\xff\xfe\x00\ngpu-01\n")
    assert Revoked(path).explain(NODE, SERIAL)


def test_a_change_is_noticed_once(tmp_path: Path) -> None:
    path = tmp_path / "revoked.txt"
    revoked = Revoked(path)
    write(path, "gpu-01\n")
    assert revoked.read_again()
    assert not revoked.read_again()
    assert revoked.explain(NODE, SERIAL)
    write(path, "gpu-02\n")
    assert revoked.read_again()
    assert revoked.explain(NODE, SERIAL) is None


def test_a_new_file_with_the_same_entries_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "revoked.txt"
    write(path, "gpu-01\n")
    revoked = Revoked(path)
    write(path, "# the same\ngpu-01\n")
    assert not revoked.read_again()


def test_a_file_that_goes_lets_nobody_in_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "revoked.txt"
    write(path, "gpu-01\n")
    revoked = Revoked(path)
    path.unlink()
    with caplog.at_level(logging.ERROR):
        assert not revoked.read_again()
        assert not revoked.read_again()
    assert revoked.explain(NODE, SERIAL)
    assert len(caplog.records) == 1
    assert "stays revoked" in caplog.text
    write(path, "gpu-02\n")
    assert revoked.read_again()
    assert revoked.explain(NODE, SERIAL) is None


def test_a_file_that_becomes_unreadable_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "revoked.txt"
    write(path, "gpu-01\n")
    revoked = Revoked(path)
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.ERROR):
        assert not revoked.read_again()
    assert revoked.explain(NODE, SERIAL)
    assert f"can't read {path}" in caplog.text


def test_a_change_of_the_same_size_in_place_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "revoked.txt"
    path.write_text("gpu-02\n")
    revoked = Revoked(path)
    path.write_text("gpu-01\n")
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert revoked.read_again()
    assert revoked.explain(NODE, SERIAL)


async def test_watching_calls_at_each_change(tmp_path: Path) -> None:
    path = tmp_path / "revoked.txt"
    revoked = Revoked(path)
    seen = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(functools.partial(revoked.watch, seen.set, poll_seconds=0.01))
        await trio.sleep(0.03)
        assert not seen.is_set()
        write(path, "gpu-01\n")
        with trio.fail_after(60):
            await seen.wait()
        nursery.cancel_scope.cancel()
    assert revoked.explain(NODE, SERIAL)


def test_what_is_no_file_and_what_has_no_end_is_refused_at_once(tmp_path: Path) -> None:
    pipe, vast = tmp_path / "pipe", tmp_path / "vast"
    os.mkfifo(pipe)
    with vast.open("wb") as file:
        file.truncate(MAX_LIST_BYTES + 1)
    for path in (pipe, vast, tmp_path):
        with pytest.raises(UsageError, match="can't read"):
            Revoked(path)
