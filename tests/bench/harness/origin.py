"""Where the bench's weights come from: one large file, and the web server that gives parts of it (``origin.py``)."""

from __future__ import annotations

import http.client
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.programs import SOURCES, free_port, started, wait_until
from harness.servers import START_SECONDS, Site, StartError, tail

HOST = "127.0.0.1"
CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The server, and the file that it gives parts of."""

    file: Path
    port: int

    def url(self, name: str, size_bytes: int, *, rate: int | None = None) -> str:
        """The source NAME: the file's first bytes; ``rate`` is how many a second all who fetch it get together."""
        paced = f"{rate}/" if rate else ""
        return f"http://{HOST}:{self.port}/{size_bytes}/{paced}{name}"

    def ask_sent(self, url: str) -> int:
        """How many bytes of it have gone out, to whomever."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        try:
            connection.request("GET", "/sent")
            sent = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return int(sent.get(url.partition(str(self.port))[2], 0))


def show_size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:g} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:g} MB"


def write_random(path: Path, size_bytes: int) -> Path:
    """Bytes that nothing makes smaller, the same each time."""
    source = random.Random(size_bytes)
    with path.open("wb") as file:
        while (left := size_bytes - file.tell()) > 0:
            file.write(source.randbytes(min(left, CHUNK_BYTES)))
    return path


@contextmanager
def run_origin(site: Site, file: Path) -> Iterator[Origin]:
    """On all cpus, as whoever fetches from it."""
    origin = Origin(file=file, port=free_port())
    argv = [sys.executable, str(SOURCES / "origin.py"), "--file", str(file), "--port", str(origin.port)]
    log = site.log("origin")
    with started(argv, log=log, cpus=site.cpus.every) as process:

        def serves() -> bool:
            if process.poll() is not None:
                raise StartError(f"the origin ended with {process.returncode}:\n{tail(log)}")
            try:
                origin.ask_sent("")
            except OSError:
                return False
            return True

        wait_until(serves, seconds=START_SECONDS)
        yield origin
