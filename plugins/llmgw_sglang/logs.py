"""What a line of SGLang's log tells: the prefix that each process of it writes, and progress for whoever waits."""

from __future__ import annotations

import re

from llmgw.engines import LogFact, read_progress

# "[2026-11-29 23:43:12 DP0 TP1] …"; the ranks are there where there is more than one.
PREFIX = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?(?: [A-Z_]{1,10}\d{1,6})*\] ")

# As 0.5.23 has them, and before the comma what 0.5.1 does.
_PROGRESS = (
    (re.compile(r"Fetching \d+ files: +(\d+)%"), "fetching the weights: {0} %"),
    (re.compile(r"Init torch distributed begin"), "waiting for all cards"),
    (re.compile(r"Load weight begin"), "loading the weights"),
    (re.compile(r"(?:Loading|Multi-thread loading) [\w .-]*shards: +(\d+)%"), "loading the weights: {0} %"),
    (re.compile(r"Load weight end\..*?mem usage=([\d.]+) GB"), "the weights are loaded ({0} GB)"),
    (re.compile(r"KV Cache is allocated\..*?#tokens: (\d+)"), "KV cache: {0} tokens"),
    (re.compile(r"Memory pool end"), "the KV cache is there"),
    (re.compile(r"Capture [\w -]*cuda graph begin", re.IGNORECASE), "capturing graphs"),
    (re.compile(r"Capturing batches[^%\n]{0,80}?: +(\d+)%"), "capturing graphs: {0} %"),
    (re.compile(r"Capture [\w -]*cuda graph end", re.IGNORECASE), "graphs are captured"),
    (re.compile(r"max_total_num_tokens=(\d+), "), "KV cache: {0} tokens"),
    (re.compile(r"Uvicorn running on|Application startup complete"), "warming up"),
    (re.compile(r"The server is fired up and ready to roll"), "warmed up"),
    (re.compile(r"Dummy health check server started"), "waiting for the other nodes"),
)


def read(line: str) -> LogFact | None:
    """Progress, or None."""
    return read_progress(line, _PROGRESS, PREFIX)
