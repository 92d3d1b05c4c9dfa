"""One fetch by llmgw's own rooms, as an agent makes it, in a process of its own; or what such a fetch is made of.

    fetching.py fetch URL FOLDER            into an empty cache
    fetching.py resume URL FOLDER FILE      all of it (the beginning of FILE) lies in the cache already, but not proven
    fetching.py parts URL FOLDER FILE       bare, each by itself: taken from a socket, hashed twice, written and synced

Prints one line of JSON: seconds, CPU seconds and bytes of a fetch, how late its event loop was at most, and how long
after its last byte came it had all of it proven and kept; of parts both kinds of seconds of each.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import trio
from blake3 import blake3

from llmgw.core.node import NodeId
from llmgw.core.weights import Fetch, Phase, count_pieces, parse_source, piece_bytes_of
from llmgw.host.weights.disk.cache import Cache
from llmgw.host.weights.disk.extents import begin_writing, take_room
from llmgw.host.weights.fetch import fetch
from llmgw.host.weights.peers import open_peers
from llmgw.host.weights.sources.origin import Origin, open_origin, read_origin_settings
from llmgw.reactor.rate import Rate

TICK_SECONDS = 0.01
# The first bytes that a machine has not used since its start may cost it several times as much as later ones.
PART_TRIES = 3
TAKEN_BYTES = 64 * 1024
# Longer writes have the kernel take longer stretches of memory, which a virtual machine may have to get from its host.
WRITTEN_BYTES = 64 * 1024


class Stopwatch:
    """Time and CPU time of this process, of all its threads, from now on."""

    def __init__(self) -> None:
        self._began, self._cpu, self._kernel = time.perf_counter(), time.process_time(), os.times().system

    def read(self) -> dict[str, float]:
        return {
            "seconds": time.perf_counter() - self._began,
            "cpu_seconds": time.process_time() - self._cpu,
            "kernel_seconds": os.times().system - self._kernel,
        }


async def bring(url: str, folder: Path, file: Path | None) -> dict[str, float]:
    """A fetch; of what ``file`` holds already, where one is given."""
    source, cache = parse_source(url), Cache(folder)
    late, came_at = 0.0, 0.0

    def hear(told: Fetch) -> None:
        nonlocal came_at
        if told.phase is Phase.VERIFYING and not came_at:
            came_at = time.perf_counter()

    async def watch() -> None:
        nonlocal late
        while True:
            due = time.perf_counter() + TICK_SECONDS
            await trio.sleep(TICK_SECONDS)
            late = max(late, time.perf_counter() - due)

    settings = read_origin_settings({}, token=None, allow_hosts=())
    async with open_origin(settings) as origin, open_peers(NodeId("bench"), None) as peers:
        if file is not None:
            await lay(url, cache, origin, file)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            stopwatch = Stopwatch()
            manifest = await fetch(
                source,
                cache=cache,
                origin=origin,
                peers=peers,
                swarm=lambda: None,
                tell=hear,
                newest=False,
                limits=Rate(None),
            )
            figures = stopwatch.read() | {"end_seconds": time.perf_counter() - came_at}
            nursery.cancel_scope.cancel()
    return {**figures, "bytes": manifest.size_bytes, "late_seconds": late}


async def lay(url: str, cache: Cache, origin: Origin, file: Path) -> None:
    """What a fetch leaves that was killed right before its end, and all of it on the disk."""
    listing = await origin.resolve(parse_source(url), None)
    partial = cache.open_partial(listing)
    for number, piece in enumerate(read_pieces(file, listing.size_bytes)):
        partial.write(0, number, piece, None)
    partial.close()
    for path in cache.folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as written:
                os.fsync(written.fileno())


def read_pieces(file: Path, size_bytes: int) -> Iterator[bytes]:
    length = piece_bytes_of(size_bytes)
    with file.open("rb") as content:
        for number in range(count_pieces(size_bytes)):
            yield content.read(min(length, size_bytes - number * length))


def measure_parts(url: str, folder: Path, file: Path) -> dict[str, dict[str, float]]:
    """Each over all the bytes that the address gives, in pieces that lie in memory; the best of some tries."""
    size = int(urlsplit(url).path.split("/")[1])
    length = piece_bytes_of(size)
    with file.open("rb") as content:
        piece = content.read(min(length, size))
    count = count_pieces(size)
    total = sha256()

    def hash_in_order() -> None:
        for _ in range(count):
            total.update(piece)

    def hash_pieces() -> None:
        for _ in range(count):
            blake3(piece).hexdigest()

    tries = [
        {
            "taken": time_part(lambda: take_bare(url)),
            "sha256": time_part(hash_in_order),
            "blake3": time_part(hash_pieces),
            **write_bare(folder / "bare", memoryview(piece), count),
        }
        for _ in range(PART_TRIES)
    ]
    return {
        part: {kind: min(each[part][kind] for each in tries) for kind in ("seconds", "cpu_seconds")}
        for part in tries[0]
    }


def time_part(act: Callable[[], object]) -> dict[str, float]:
    stopwatch = Stopwatch()
    act()
    return stopwatch.read()


def take_bare(url: str) -> None:
    """All of it into one small buffer, and nowhere else."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", urlsplit(url).path)
    answer = connection.getresponse()
    left, buffer = int(answer.headers["content-length"]), bytearray(TAKEN_BYTES)
    while left:
        left -= answer.readinto(buffer)
    connection.close()


def write_bare(path: Path, piece: memoryview, count: int) -> dict[str, dict[str, float]]:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        take_room(file, len(piece) * count)

        def write() -> None:
            for number in range(count):
                for at in range(0, len(piece), WRITTEN_BYTES):
                    os.pwrite(file, piece[at : at + WRITTEN_BYTES], number * len(piece) + at)
                begin_writing(file, number * len(piece), len(piece))

        return {"written": time_part(write), "synced": time_part(lambda: os.fsync(file))}
    finally:
        os.close(file)
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("fetch", "resume", "parts"))
    parser.add_argument("url")
    parser.add_argument("folder", type=Path, help="of the cache")
    parser.add_argument("file", type=Path, nargs="?", help="what the origin gives")
    options = parser.parse_args()
    if options.mode == "parts":
        figures: object = measure_parts(options.url, options.folder, options.file)
    else:
        file = options.file if options.mode == "resume" else None
        figures = trio.run(bring, options.url, options.folder, file)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
