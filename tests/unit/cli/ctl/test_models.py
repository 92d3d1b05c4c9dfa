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
