"""What a line of llama-server's log tells whoever waits for it to be ready."""

from __future__ import annotations

import re

from llmgw.engines import LogFact, read_progress

# "0.00.014.292 I srv    load_model: loading model …": since the start, then a level, which builds before the middle of
# 2026 do not print.
_LEVEL = re.compile(r"\s*\d+\.\d+\.\d+\.\d+ ([WEDT]) ")

_PROGRESS = (
    (re.compile(r"loading model '(?:.*/)?([^'/]+)'"), "loading {0}"),
    (re.compile(r"loading model tensors, this can take a while"), "loading the weights"),
    (re.compile(r"warming up the model"), "warming up"),
    (re.compile(r"initializing, n_slots = (\d+), n_ctx_slot = (\d+)"), "slots: {0} of {1} tokens"),
    (re.compile(r"initializing slots, n_slots = (\d+)"), "slots: {0}"),
)


def read(line: str) -> LogFact | None:
    """The progress in a line; None for the many without any."""
    return None if _LEVEL.match(line) else read_progress(line, _PROGRESS)
