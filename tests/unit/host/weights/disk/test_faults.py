"""A disk's refusal, in words that say where and what to do."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from llmgw.host.weights.disk.faults import NoRoom, explain, explain_lock, read_free
from llmgw.host.weights.errors import Kind


@pytest.mark.parametrize(
    ("number", "words", "remedy"),
    [
        (errno.ENOSPC, "No space left on device", "free some space there or name another folder in weights.cache"),
        (errno.EDQUOT, "quota exceeded, on / .*, as user", "raise that user's quota"),
        (errno.EFBIG, "File too large", "ulimit -f"),
        (errno.EACCES, f"Permission denied, on / .*, as user {os.geteuid()}", "give it to that user"),
        (errno.EROFS, "Read-only", "mount it so that it can be written to"),
        (errno.ELOOP, "links", "remove /nowhere/x, or"),
        (errno.EIO, "Input/output error", "dmesg"),
    ],
)
def test_each_says_where_and_what_to_do(number, words, remedy):
    error = explain(OSError(number, os.strerror(number), "/nowhere/x"), Path("/nowhere"))
    assert error.kind is Kind.DISK
    assert error.message.startswith("weights can't be kept in /nowhere (/nowhere/x: ")
    assert remedy in error.remedy
    assert re.search(words, error.message)
    assert isinstance(error, NoRoom) == (number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def test_what_is_free_is_told_with_its_filesystem(tmp_path):
    message = explain(OSError(errno.ENOSPC, "No space left on device"), tmp_path).message
    assert "B are free on /" in message
    assert message.endswith("))")


def test_a_filesystem_without_locks_is_told():
    error = explain_lock(OSError(errno.ENOLCK, "No locks available"), Path("/nowhere"))
    assert error.message.startswith("nothing can be locked in /nowhere (on /")
    assert "this node's own" in error.remedy
    assert explain_lock(OSError(errno.EIO, "x"), Path("/nowhere")).message.startswith("weights can't be kept")


def test_nobody_knows_what_is_free_nowhere(tmp_path):
    assert read_free(tmp_path) > 0
    assert read_free(tmp_path / "none") is None
