"""What a line of vLLM's log tells: the prefix that each process of it writes, and progress for whoever waits."""

from __future__ import annotations

import re

from llmgw.engines import LogFact, read_progress

# "(EngineCore pid=7214) INFO 11-29 23:40:54 [core.py:133] …"; what a process prints without its logger has the first
# part alone, and releases until 0.10 have the second alone in the process that serves.
PREFIX = re.compile(
    r"(?:\((?P<process>[A-Za-z][\w .=-]{0,40}\bpid=\d+)(?:, ip=[^)]{0,40})?\) ?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[(?P<file>[^\]\n]{1,80})\] ?)?)?"
)

_PROGRESS = (
    (re.compile(r"Resolved architecture: (\w+)"), "architecture {0}"),
    (re.compile(r"Fetching \d+ files: +(\d+)%"), "fetching the weights: {0} %"),
    (re.compile(r"Starting to load model (?:\S*/)?([^/\s]+?)(?:\.\.\.|$)"), "loading {0}"),
    (re.compile(r"Loading [\w .-]*checkpoint shards: +(\d+)% Completed"), "loading the weights: {0} %"),
    (re.compile(r"Loading weights took ([\d.]+) seconds"), "the weights are loaded ({0} s)"),
    (re.compile(r"Model loading took ([\d.]+) Gi?B"), "the weights are loaded ({0} GiB)"),
    (re.compile(r"Dynamo bytecode transform time"), "compiling"),
    (re.compile(r"Compiling a graph for"), "compiling"),
    (re.compile(r"Warming up model for the compilation"), "compiling and warming up"),
    (re.compile(r"torch\.compile (?:took|takes) ([\d.]+) s"), "compiled in {0} s"),
    (re.compile(r"Warming up done"), "warmed up"),
    (re.compile(r"Capturing [\w -]*CUDA graphs?\b.{0,60}?: +(\d+)%"), "capturing graphs: {0} %"),
    (re.compile(r"Graph capturing finished in (\d+) secs"), "graphs are captured ({0} s)"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "KV cache: {0} tokens"),
    (re.compile(r"init engine .* took ([\d.]+) s"), "the engine is up ({0} s)"),
    (re.compile(r"Starting vLLM (?:API )?server"), "starting to listen"),
    (re.compile(r"Launching vLLM .* headless"), "waiting for the other nodes"),
)


def read(line: str) -> LogFact | None:
    """Progress, or None."""
    return read_progress(line, _PROGRESS, PREFIX)
