"""The program's log, and nobody who reads it."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from llmgw.cli.log import Sparing, Writer, start_log


@pytest.fixture
def own_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("llmgw")
    before = root.handlers, ours.level
    yield
    root.handlers, ours.level = before
    ours.setLevel(before[1])


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(("verbose", "level"), [(False, logging.WARNING), (True, logging.INFO)])
def test_verbose_logs_what_happens(verbose: bool, level: int) -> None:
    start_log(verbose=verbose)
    assert logging.getLogger("llmgw").level == level


def a_record(text: str) -> logging.LogRecord:
    return logging.LogRecord("llmgw.x", logging.WARNING, __file__, 1, text, None, None)


def test_records_that_find_no_room_are_counted() -> None:
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(2)
    handler = Sparing(waiting)
    for number in range(5):
        handler.handle(a_record(str(number)))
    assert [waiting.get().msg for _ in range(2)] == ["0", "1"]
    handler.handle(a_record("5"))
    assert waiting.get().msg == "5 (3 records before this one were lost)"
    handler.handle(a_record("6"))
    assert waiting.get().msg == "6"


def test_a_log_that_is_gone_stops_nothing() -> None:
    waiting: queue.Queue[logging.LogRecord] = queue.Queue()
    written: list[str] = []

    def write(text: str) -> None:
        if not written:
            written.append("")
            raise BrokenPipeError
        written.append(text)

    writer = Writer(waiting, write)
    threading.Thread(target=writer.write_all, daemon=True).start()
    waiting.put(a_record("lost"))
    waiting.put(a_record("kept"))
    writer.wait_written(60)
    assert written[1].endswith("WARNING llmgw.x: kept\n")


PROGRAM = """
import logging
from llmgw.cli.log import start_log
start_log(verbose=False)
for number in range(5000):
    logging.getLogger("llmgw").warning("x" * 100)
print("through", flush=True)
"""


@pytest.mark.slow
def test_a_program_whose_log_nobody_reads_goes_on_and_ends() -> None:
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=write, text=True, timeout=60, check=False
        )
    finally:
        os.close(read)
        os.close(write)
    assert (done.returncode, done.stdout) == (0, "through\n")
