"""Weights on their way to nodes: what the origin gives for several of them, and what else suffers meanwhile."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from harness.cluster import HOST
from harness.fetchers import Fetchers, run_fetchers
from harness.origin import Origin, show_size
from harness.servers import MODEL, Site, StartError
from llmgw.errors import LlmgwError

LOOK_SECONDS = 0.1
ASK_SECONDS = 0.05
REPLY_SECONDS = 60.0
# A few reports of the node with nothing else to do.
STILL_SECONDS = 16.0
# What of a node changes with a report of it, and with nothing else.
TOLD = ("memory_available_gb", "memory_foreign_gb", "disks")


def measure_sharing(site: Site, origin: Origin, size_bytes: int, count: int, *, rate: int) -> dict[str, float]:
    """Nodes that need the same at the same moment, and an origin that gives so many bytes a second to all of them."""
    name = f"{show_size(size_bytes)} for {count} agent{'s' if count > 1 else ''}"
    print(f"bench: {name}", flush=True)
    url = origin.url(f"shared-{count}.bench", size_bytes, rate=rate)
    with run_fetchers(site, count) as fetchers:
        began = fetchers.add(MODEL, url, count)
        seconds = fetchers.wait_ready(MODEL, count) - began
        have = sum(any(cache.glob("*/*/*.bench")) for cache in fetchers.caches)
        if have != count:
            raise StartError(f"{have} of {count} nodes have fetched the weights: the model is not on all of them")
        fetchers.clear()
    return {
        f"{name}: bytes from the origin, x": origin.ask_sent(url) / size_bytes,
        f"{name}, from an origin that gives {rate / 1e6:g} MB/s: until all are ready, s": seconds,
    }


@contextmanager
def asking(port: int, model: str) -> Iterator[list[float]]:
    """How many seconds each reply took to one small completion every 50 ms, on one connection and from a thread; one
    that is late delays those behind it."""
    replies: list[float] = []
    problems: list[str] = []
    over = threading.Event()

    def ask_all() -> None:
        body = json.dumps({"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]})
        connection = http.client.HTTPConnection(HOST, port, timeout=REPLY_SECONDS)
        due = time.monotonic()
        try:
            while not over.wait(max(0.0, due - time.monotonic())):
                began = time.monotonic()
                connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    problems.append(f"answered with {answer.status}")
                    return
                replies.append(time.monotonic() - began)
                due = max(due + ASK_SECONDS, time.monotonic())
        except (OSError, http.client.HTTPException) as error:
            problems.append(f"not answered: {error!r}")
        finally:
            connection.close()

    thread = threading.Thread(target=ask_all)
    thread.start()
    try:
        yield replies
    finally:
        over.set()
        thread.join()
    if problems:
        raise StartError(f"a completion was {problems[0]}")


@dataclass(slots=True)
class Reports:
    """When reports of a node came, as the operator port shows it, and how long its link was silent at most."""

    told: object = None
    came_at: list[float] = field(default_factory=list)
    silent_seconds: float = 0.0
    problem: str = ""

    @property
    def longest_seconds(self) -> float:
        """Between two of them."""
        return max(later - earlier for earlier, later in pairwise(self.came_at))

    def look(self, node: Mapping[str, Any]) -> None:
        told = [node.get(key) for key in TOLD]
        if self.told is not None and told != self.told:
            self.came_at.append(time.monotonic())
        self.told = told
        self.silent_seconds = max(self.silent_seconds, node.get("heard_seconds_ago") or 0.0)


@contextmanager
def watching(fetchers: Fetchers) -> Iterator[Reports]:
    """From the first report of the one node that there is to the first one after the end of it."""
    reports, over = Reports(), threading.Event()

    def look_on() -> None:
        try:
            while not over.wait(LOOK_SECONDS):
                (node,) = fetchers.look("nodes")["nodes"]
                reports.look(node)
        except LlmgwError as error:
            reports.problem = error.message

    def wait_for(count: int) -> None:
        fetchers.wait(lambda: bool(reports.problem) or len(reports.came_at) >= count, "a report of the node")
        if reports.problem:
            raise StartError(f"the node can't be looked at: {reports.problem}")

    thread = threading.Thread(target=look_on)
    thread.start()
    try:
        wait_for(1)
        reports.silent_seconds = 0.0
        yield reports
        wait_for(len(reports.came_at) + 1)
    finally:
        over.set()
        thread.join()


def measure_gap(
    site: Site, origin: Origin, size_bytes: int, *, still_seconds: float = STILL_SECONDS
) -> dict[str, float]:
    """One agent that answers requests, still at first, and then while it fetches and hashes as fast as it can."""
    print(f"bench: reports and replies of an agent that fetches {show_size(size_bytes)}", flush=True)
    with run_fetchers(site, 1) as fetchers:
        fetchers.add(MODEL, make_local(site))
        fetchers.wait_ready(MODEL)
        port = fetchers.server.port
        with watching(fetchers) as still, asking(port, MODEL) as still_replies:
            time.sleep(still_seconds)
        with watching(fetchers) as busy, asking(port, MODEL) as replies:
            began = fetchers.add("fetched", origin.url("watched.bench", size_bytes))
            seconds = fetchers.wait_ready("fetched") - began
        fetchers.clear()
    name = f"{show_size(size_bytes)} fetched and hashed"
    return {
        f"{name}: the longest time between two reports of the node, s": busy.longest_seconds,
        f"{name}: the longest silence of its link, s": busy.silent_seconds,
        f"{name}: from `ctl model add` to ready, s": seconds,
        f"{name}: a reply through the agent meanwhile, median, ms": median(replies) * 1e3,
        f"{name}: a reply through the agent meanwhile, slowest, ms": max(replies) * 1e3,
        "nothing fetched: the longest time between two reports of the node, s": still.longest_seconds,
        "nothing fetched: a reply through the agent, median, ms": median(still_replies) * 1e3,
        "nothing fetched: a reply through the agent, slowest, ms": max(still_replies) * 1e3,
    }


def make_local(site: Site) -> str:
    """A source that lies on the node already."""
    path = site.folder / "weights.bench"
    path.write_text("no weights: the mock needs none\n")
    return str(path)


def measure_start(site: Site, origin: Origin, size_bytes: int, tries: int) -> dict[str, float]:
    """A model is added, removed, and added again: the second time its weights are here."""
    print(f"bench: {show_size(size_bytes)} that are fetched first, and that are here", flush=True)
    without: list[float] = []
    within: list[float] = []
    with run_fetchers(site, 1) as fetchers:
        for number in range(tries):
            url = origin.url(f"started-{number}.bench", size_bytes)
            for found in (without, within):
                began = fetchers.add(MODEL, url)
                found.append(fetchers.wait_ready(MODEL) - began)
                fetchers.remove(MODEL)
            if origin.ask_sent(url) > 1.5 * size_bytes:
                raise StartError("weights that were here were fetched again")
        fetchers.clear()
    name = f"from `ctl model add` to ready with {show_size(size_bytes)}"
    added = median(cold - warm for cold, warm in zip(without, within, strict=True))
    return {
        f"{name} to be fetched, s": median(without),
        f"{name} in the cache, s": median(within),
        f"{name}: what the fetch adds, s": added,
    }
