"""What it costs to bring weights to a machine: one fetch beside curl's, and what of it is hashing, reading, writing."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from harness.arriving import measure_gap, measure_sharing, measure_start
from harness.origin import Origin, run_origin, show_size, write_random
from harness.programs import SOURCES, on_cpus
from harness.servers import Site, StartError

GB = 1e9
FETCH_SECONDS = 900.0
# Beside what is fetched: lists of pieces, logs, and what others write meanwhile.
SPARE_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is fetched, in bytes: beside curl (so many times), by several agents (so many each time, from an origin
    that gives ``rate`` bytes a second), while reports are watched, and before a model is ready (so many times)."""

    alone: int
    alone_tries: int
    shared: int
    rate: int
    agents: tuple[int, ...]
    watched: int
    started: int
    start_tries: int

    @property
    def largest(self) -> int:
        return max(self.alone, self.shared, self.watched, self.started)

    @property
    def needed(self) -> int:
        """The file itself, and what lies beside it at most."""
        most = max(2 * self.alone, sum(self.agents) * self.shared, self.watched + self.start_tries * self.started)
        return self.largest + most + SPARE_BYTES


FULL_SIZES = Sizes(
    alone=1_000_000_000,
    alone_tries=5,
    shared=64_000_000,
    rate=8_000_000,
    agents=(1, 4, 8),
    watched=2_000_000_000,
    started=1_000_000_000,
    start_tries=3,
)
QUICK_SIZES = Sizes(
    alone=100_000_000,
    alone_tries=1,
    shared=16_000_000,
    rate=8_000_000,
    agents=(1, 4),
    watched=200_000_000,
    started=50_000_000,
    start_tries=1,
)


def measure_weights(site: Site, sizes: Sizes) -> dict[str, float]:
    """All of it, where the disk has room for it."""
    free = shutil.disk_usage(site.folder).free
    if free < sizes.needed:
        need = f"{sizes.needed / GB:.1f} GB are needed in {site.folder}, and {free / GB:.1f} GB are free"
        print(f"bench: fetching weights is left out: {need} (TMPDIR names another folder)", flush=True)
        return {}
    file = write_random(site.folder / "weights.random", sizes.largest)
    try:
        with run_origin(site, file) as origin:
            figures = measure_alone(site, origin, sizes.alone, sizes.alone_tries)
            figures |= measure_resume(site, origin, sizes.alone)
            for count in sizes.agents:
                figures |= measure_sharing(site, origin, sizes.shared, count, rate=sizes.rate)
            figures |= measure_gap(site, origin, sizes.watched)
            figures |= measure_start(site, origin, sizes.started, sizes.start_tries)
    finally:
        file.unlink()
    return figures


@dataclass(slots=True, kw_only=True)
class Tries:
    """Of one fetch by curl and by llmgw each: seconds, curl's with and without its sync, and CPU seconds; of ours also
    those in the kernel, how late the event loop was at most, and how long it took after its last byte."""

    curl: list[float] = field(default_factory=list)
    synced: list[float] = field(default_factory=list)
    curl_cpu: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    ours_cpu: list[float] = field(default_factory=list)
    ours_kernel: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)


def measure_alone(site: Site, origin: Origin, size_bytes: int, tries: int) -> dict[str, float]:
    """llmgw's fetch and curl's in turn, to the same filesystem, in a new order each time."""
    has_curl = shutil.which("curl") is not None
    if not has_curl:
        print("bench: curl is left out: not installed (Debian: apt-get install curl)", flush=True)
    found, url = Tries(), origin.url("alone.bench", size_bytes)
    acts: list[Callable[[], None]] = [lambda: _try_ours(site, url, found)]
    acts += [lambda: _try_curl(site, url, found)] if has_curl else []
    for number in range(tries):
        for act in random.sample(acts, len(acts)):
            act()
        told = f"; curl {found.curl[-1]:.2f} s, {found.synced[-1]:.2f} s with its sync" if has_curl else ""
        print(f"bench: {show_size(size_bytes)}, {number + 1} of {tries}: {found.ours[-1]:.2f} s{told}", flush=True)
    return _tell_alone(found, size_bytes) | measure_parts(site, origin, url, median(found.ours_cpu), size_bytes)


def _try_ours(site: Site, url: str, found: Tries) -> None:
    cache = site.folder / "cache"
    told = run_fetching(site, "fetch", url, cache)
    shutil.rmtree(cache)
    found.ours.append(told["seconds"])
    found.ours_cpu.append(told["cpu_seconds"])
    found.ours_kernel.append(told["kernel_seconds"])
    found.late.append(told["late_seconds"])
    found.end.append(told["end_seconds"])


def _try_curl(site: Site, url: str, found: Tries) -> None:
    path = site.folder / "curl.out"
    argv = ["curl", "--silent", "--show-error", "--fail", "--noproxy", "*", "--output", str(path), url]
    begin = time.perf_counter()
    with _start(site, argv) as process:
        _, status, usage = os.wait4(process.pid, 0)
        found.curl.append(time.perf_counter() - begin)
        process.returncode = os.waitstatus_to_exitcode(status)
        said = process.stderr.read() if process.stderr else ""
    if process.returncode != 0:
        raise StartError(f"curl ended with {process.returncode}: {said}")
    with path.open("rb") as written:
        os.fsync(written.fileno())
    found.synced.append(time.perf_counter() - begin)
    found.curl_cpu.append(usage.ru_utime + usage.ru_stime)
    path.unlink()


def _tell_alone(found: Tries, size_bytes: int) -> dict[str, float]:
    name, size = f"{show_size(size_bytes)} fetched over loopback", size_bytes / GB
    figures: dict[str, float] = {}
    if found.curl:
        figures |= {
            f"{name}: bytes/s, against curl, x": middle_ratio(found.curl, found.ours),
            f"{name}: bytes/s, against curl and a sync of its file, x": middle_ratio(found.synced, found.ours),
            f"{name} by curl, MB/s": size * 1e3 / median(found.curl),
            f"{name} by curl and synced, MB/s": size * 1e3 / median(found.synced),
            f"{name} by curl: CPU per GB, s": median(found.curl_cpu) / size,
        }
    return figures | {
        f"{name}, MB/s": size * 1e3 / median(found.ours),
        f"{name}: the event loop is late by at most, ms": median(found.late) * 1e3,
        f"{name}: from its last byte until it is proven and kept, s": median(found.end),
        f"{name}: CPU per GB, s": median(found.ours_cpu) / size,
        f"{name}: CPU per GB in the kernel, s": median(found.ours_kernel) / size,
    }


def middle_ratio(theirs: list[float], ours: list[float]) -> float:
    """Of the seconds of each try, so that more is faster: what slows a whole try cancels out."""
    return median(their / our for their, our in zip(theirs, ours, strict=True))


def measure_parts(site: Site, origin: Origin, url: str, ours: float, size_bytes: int) -> dict[str, float]:
    """What a fetch can't do without, each bare: a fetch of ``ours`` CPU seconds that is slow explains itself by them.

    The sum of a file is made by one thread at a time, so that no fetch is faster than that.
    """
    told = run_fetching(site, "parts", url, site.folder, origin.file)
    names = {"taken": "reading", "sha256": "SHA-256", "blake3": "BLAKE3", "written": "writing", "synced": "syncing"}
    size = size_bytes / GB
    spent = {part: told[part]["cpu_seconds"] / size for part in names}
    took = {part: told[part]["seconds"] / size for part in names}
    return {
        **{f"bare {name}: CPU per GB, s": spent[part] for part, name in names.items()},
        "a fetch beyond these five: CPU per GB, s": ours / size - sum(spent.values()),
        "bare SHA-256: time per GB, s": took["sha256"],
        "bare BLAKE3: time per GB, s": took["blake3"],
        "bare reading: time per GB, s": took["taken"],
        "bare writing and syncing: time per GB, s": took["written"] + took["synced"],
    }


def measure_resume(site: Site, origin: Origin, size_bytes: int) -> dict[str, float]:
    """All of it is here and nothing of it is proven, as after a kill at the last moment."""
    cache, url = site.folder / "cache", origin.url("resumed.bench", size_bytes)
    told = run_fetching(site, "resume", url, cache, origin.file)
    shutil.rmtree(cache)
    if (sent := origin.ask_sent(url)) > size_bytes / 100:
        raise StartError(f"a fetch that had all of its {size_bytes} bytes took {sent} from the origin")
    return {f"{show_size(size_bytes)} resumed that are here already, GB/s": size_bytes / GB / told["seconds"]}


def run_fetching(site: Site, *words: object) -> dict[str, Any]:
    """What the program says, which works on all cpus."""
    process = _start(site, [sys.executable, str(SOURCES / "fetching.py"), *map(str, words)])
    try:
        out, errors = process.communicate(timeout=FETCH_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise StartError(f"fetching.py {words[0]} took more than {FETCH_SECONDS:.0f} s") from None
    if process.returncode != 0:
        raise StartError(f"fetching.py {words[0]} ended with {process.returncode}:\n{errors[-3000:]}")
    found: dict[str, Any] = json.loads(out)
    return found


def _start(site: Site, argv: list[str]) -> subprocess.Popen[str]:
    with on_cpus(site.cpus.every):
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
