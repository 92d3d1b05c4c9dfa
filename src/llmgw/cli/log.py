"""The program's own log: to stderr, by a thread, so that nobody who stops reading it can stop the program."""

from __future__ import annotations

import atexit
import contextlib
import logging
import logging.handlers
import queue
import threading
from collections.abc import Callable

from llmgw.host.output import write_err

# A terminal that was stopped, or a pager that was left open, reads nothing for as long as it likes.
MAX_WAITING = 10_000
LAST_SECONDS = 1.0
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def start_log(*, verbose: bool) -> None:
    """Log to stderr, so that stdout holds answers and addresses only."""
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING)
    writer = Writer(waiting, write_err)
    threading.Thread(target=writer.write_all, name="log", daemon=True).start()
    atexit.register(writer.wait_written, LAST_SECONDS)
    logging.getLogger().handlers = [Sparing(waiting)]
    logging.getLogger("llmgw").setLevel(logging.INFO if verbose else logging.WARNING)


class Sparing(logging.handlers.QueueHandler):
    """Hands records to the writer; where too many wait they are dropped, and the next that finds room says how many."""

    def __init__(self, waiting: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(waiting)
        self.dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.dropped:
            record.msg = f"{record.msg} ({self.dropped} records before this one were lost)"
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
        else:
            self.dropped = 0


class Writer:
    """Writes what waits, and may be blocked for as long as stderr is."""

    def __init__(self, waiting: queue.Queue[logging.LogRecord], write: Callable[[str], None]) -> None:
        self._waiting = waiting
        self._write = write
        self._formatter = logging.Formatter(FORMAT)

    def write_all(self) -> None:
        """For ever."""
        while True:
            record = self._waiting.get()
            # nobody reads it any more, or its disk is full: that is no reason to stop
            with contextlib.suppress(OSError):
                self._write(self._formatter.format(record) + "\n")
            self._waiting.task_done()

    def wait_written(self, seconds: float) -> None:
        """The end of the program: what waits is written, unless nobody reads it."""
        done = threading.Thread(target=self._waiting.join, daemon=True)
        done.start()
        done.join(seconds)
