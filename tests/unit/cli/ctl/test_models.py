from __future__ import annotations

from typing import Any

QWEN = {
    "name": "qwen2.5-coder-3b-instruct",
    "status": "ready",
    "serving": True,
    "ready": 1,
    "wanted": 1,
    "origin": "stored",
    "aliases": ["coder", "code"],
}
LARGE = {"name": "large", "status": "on-demand", "serving": False, "ready": 0, "wanted": 0, "aliases": []}


def test_models_are_a_table_with_exactly_these_columns(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/models", {"models": [QWEN, LARGE]})
    assert ctl("models").out == (
        "MODEL                      SERVING  REPLICAS  STATUS     ALIASES\n"
        "qwen2.5-coder-3b-instruct  yes      1/1       ready      coder,code\n"
        "large                      no       0/0       on-demand\n"
    )


def test_what_was_made_of_a_model_stands_below_the_table(port: Any, ctl: Any) -> None:
    held = {**LARGE, "status": "stopped", "held": True, "detail": "an operator has stopped it"}
    rolling = "rolling: rep-qwen-1 runs by the earlier definition"
    rolls = {**QWEN, "rolling": rolling, "detail": rolling}
    failed = {**QWEN, "name": "b", "held": False, "failed": "out of memory", "detail": "the definition failed"}
    loading = {**QWEN, "name": "c", "status": "loading", "detail": "43 %"}
    waits = {**QWEN, "name": "d", "status": "waiting", "detail": "n1: needs 99 GB of memory"}
    unknown = {**QWEN, "name": "e", "status": "waiting"}
    port.will_answer("GET", "/models", {"models": [held, rolls, failed, loading, waits, unknown]})
    assert ctl("models").out.split("\n\n")[1].splitlines() == [
        "large: an operator has stopped it",
        "qwen2.5-coder-3b-instruct: rolling: rep-qwen-1 runs by the earlier definition",
        "b: the definition failed",
        "d: n1: needs 99 GB of memory",
    ]


def test_a_model_whose_weights_are_on_their_way_says_how_far(port: Any, ctl: Any) -> None:
    fetch = {"source": "hf:o/r/f", "phase": "fetching", "done_bytes": 42, "total_bytes": 100}
    port.will_answer("GET", "/models", {"models": [{**LARGE, "status": "loading", "fetch": fetch}]})
    assert "0/0       loading: fetching 42 %" in ctl("models").out
