"""How busy SGLang is, from the text of its /metrics (0.5.1 to 0.5.23)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmgw.engines import Load

_METRIC = re.compile(r"^sglang:(\w{1,80})(?:\{([^\n]*)\})? ([0-9.eE+]{1,32})\s*$", re.MULTILINE)
_NUMBER = re.compile(r"\d{1,18}(?:\.\d*)?(?:[eE]\+?\d{1,2})?")
_LABEL = re.compile(r'(?<!\w)(dp_rank|priority)="([^"]{0,80})"')

# Most of them grow at the end of a request. Before it there are the tokens that were computed (0.5.8 has them, 0.5.5
# does not), or the times between two of a stream. All only grow, so their sum does.
_STEPS = (
    *("realtime_tokens_total", "inter_token_latency_seconds_count"),
    *("generation_tokens_total", "prompt_tokens_total"),
)


def read(text: str) -> Load | None:
    """The sums over the schedulers behind one server, the fullest cache; None where it is no SGLang's text."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in _METRIC.findall(text):
        if _NUMBER.fullmatch(value):
            found.setdefault(name, []).append((dict(_LABEL.findall(labels)), float(value)))
    running, waiting = _gauge(found.get("num_running_reqs")), _gauge(found.get("num_queue_reqs"))
    if running is None and waiting is None:
        return None
    shares = [value for _, value in found.get("token_usage", ())]
    counters = {name: int(sum(value for _, value in samples)) for name, samples in found.items()}
    steps = [counters[name] for name in _STEPS if name in counters]
    return Load(
        running=running,
        waiting=waiting,
        cache_used=min(1.0, max(shares)) if shares else None,
        prompt_tokens=counters.get("prompt_tokens_total"),
        # It is there from the first request on that had any.
        cached_tokens=counters.get("cached_tokens_total", 0) if "prompt_tokens_total" in counters else None,
        steps=sum(steps) if steps else None,
    )


def _gauge(samples: list[tuple[dict[str, str], float]] | None) -> int | None:
    """One number for each data parallel rank, summed: its other ranks have it too, and each priority a part of it."""
    if samples is None:
        return None
    ranks: dict[str, float] = {}
    for rank, value in _whole(samples):
        ranks[rank] = max(ranks.get(rank, 0.0), value)
    return int(sum(ranks.values()))


def _whole(samples: list[tuple[dict[str, str], float]]) -> Iterator[tuple[str, float]]:
    return ((labels.get("dp_rank", ""), value) for labels, value in samples if not labels.get("priority"))
