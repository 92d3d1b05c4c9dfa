"""A web server that weights come from: so many bytes of one file as a path says, by sendfile, counted as they go out.

    GET /BYTES/NAME         the first BYTES of the file, whole or a range of them
    GET /BYTES/RATE/NAME    the same; all who ask for that get RATE bytes a second together
    GET /sent               JSON: how many bytes of bodies went out, by path

Each NAME is a file of its own to whoever fetches it. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import threading
import time
from collections import defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

AT_ONCE = 8 * 1024 * 1024
PACED_BYTES = 64 * 1024
BURST_SECONDS = 0.1

PATH = re.compile(r"/(\d+)/(?:(\d+)/)?[\w.-]+")
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Pace:
    """So many bytes a second for all who take."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Return when that many may go."""
        with self._lock:
            earliest = time.monotonic() - BURST_SECONDS
            self._free_at = max(self._free_at, earliest) + count / self._bytes_per_second
            left = self._free_at - time.monotonic()
        if left > 0:
            time.sleep(left)


class Origin(ThreadingHTTPServer):
    """``sent``: bytes of bodies by path."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, file: Path, port: int) -> None:
        self.file = os.open(file, os.O_RDONLY)
        self.size = os.fstat(self.file).st_size
        self.lock = threading.Lock()
        self.sent: dict[str, int] = defaultdict(int)
        self._paces: dict[str, Pace] = {}
        super().__init__(("127.0.0.1", port), Exchange)

    def pace_of(self, path: str, bytes_per_second: int) -> Pace:
        """The one that all requests of this path share."""
        with self.lock:
            return self._paces.setdefault(path, Pace(bytes_per_second))

    def count(self, path: str, count: int) -> None:
        with self.lock:
            self.sent[path] += count


class Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Origin

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/sent":
            with self.server.lock:
                body = json.dumps(self.server.sent).encode()
            self._begin(200, len(body))
            self.wfile.write(body)
            return
        named = PATH.fullmatch(self.path)
        if named is None or int(named[1]) > self.server.size:
            self._begin(404, 0)
            return
        size, asked = int(named[1]), RANGE.fullmatch(self.headers.get("range", ""))
        start, stop = (int(asked[1]), min(size, int(asked[2] or size) + 1)) if asked else (0, size)
        if start >= stop:
            self._begin(416, 0, f"content-range: bytes */{size}")
            return
        marks = [f'etag: "{size}-{self.path.rpartition("/")[2]}"', "accept-ranges: bytes"]
        if asked:
            self._begin(206, stop - start, *marks, f"content-range: bytes {start}-{stop - 1}/{size}")
        else:
            self._begin(200, size, *marks)
        pace = self.server.pace_of(self.path, int(named[2])) if named[2] else None
        # Who has enough of it hangs up in the middle, and is counted so far.
        with suppress(ConnectionError):
            self._send(start, stop, pace)
            return
        self.close_connection = True

    def _begin(self, status: int, length: int, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} {self.responses[status][0]}", *headers, f"content-length: {length}", "", ""]
        self.wfile.write("\r\n".join(lines).encode())

    def _send(self, start: int, stop: int, pace: Pace | None) -> None:
        out, file = self.connection.fileno(), self.server.file
        while start < stop:
            count = min(stop - start, AT_ONCE if pace is None else PACED_BYTES)
            if pace is not None:
                pace.take(count)
            sent = os.sendfile(out, file, start, count)
            self.server.count(self.path, sent)
            start += sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True, help="on 127.0.0.1")
    options = parser.parse_args()
    Origin(options.file, options.port).serve_forever()


if __name__ == "__main__":
    main()
