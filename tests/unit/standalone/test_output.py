"""Standard output by its descriptor."""

from __future__ import annotations

import os
import threading

import pytest

from llmgw.standalone.output import write_out


def test_all_of_it_is_written_however_little_is_taken_at_once() -> None:
    read, write = os.pipe()
    text = "ü" * 200_000
    writer = threading.Thread(target=write_out, args=(text,), kwargs={"fd": write})
    writer.start()
    got = b""
    while len(got) < 400_000:
        got += os.read(read, 65536)
    writer.join(60)
    os.close(read)
    os.close(write)
    assert got.decode() == text


def test_nobody_who_reads_is_an_error() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        with pytest.raises(BrokenPipeError):
            write_out("x", fd=write)
    finally:
        os.close(write)
