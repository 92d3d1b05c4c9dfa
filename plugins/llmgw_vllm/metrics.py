"""How busy vLLM is, from the text of its /metrics."""

from __future__ import annotations

import re

from llmgw.engines import Load

# Down to 6e-05 for a cache that is hardly used; NaN and what is below 0 is no count.
_METRIC = re.compile(
    r"^vllm:(\w{1,80})(?:\{[^\n]*\})? (\d{1,18}(?:\.\d{0,20})?(?:[eE][+-]?\d{1,2})?)\s*$", re.MULTILINE
)
_MOST = 2**53

# By the names of current releases, then of older ones: until 0.12 with "gpu_" before them, and until 0.16 only the
# hits of the prefix cache are counted, which are tokens too.
_CACHE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
_CACHED = ("prompt_tokens_cached_total", "prefix_cache_hits_total", "gpu_prefix_cache_hits_total")
# The histogram of tokens in a step: its count is that of the steps.
_STEPS = ("iteration_tokens_total_count", "generation_tokens_total")


def read(text: str) -> Load | None:
    """The sums over the engines behind one server, the mean for the cache; None where it is no vLLM's text."""
    found: dict[str, list[float]] = {}
    for name, value in _METRIC.findall(text):
        found.setdefault(name, []).append(float(value))
    running, waiting = _sum(found, "num_requests_running"), _sum(found, "num_requests_waiting")
    if running is None and waiting is None:
        return None
    shares = next((found[name] for name in _CACHE if name in found), None)
    return Load(
        running=running,
        waiting=waiting,
        cache_used=min(1.0, sum(shares) / len(shares)) if shares else None,
        prompt_tokens=_sum(found, "prompt_tokens_total"),
        cached_tokens=_sum(found, *_CACHED),
        steps=_sum(found, *_STEPS),
    )


def _sum(found: dict[str, list[float]], *names: str) -> int | None:
    values = next((found[name] for name in names if name in found), None)
    return min(_MOST, int(sum(values))) if values is not None else None
