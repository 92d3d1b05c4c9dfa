"""What several engines answer in the same form."""

from __future__ import annotations

import json

__all__ = ["read_max_model_len"]


def read_max_model_len(text: str) -> int | None:
    """The ``max_model_len`` that the first model of a ``/v1/models`` list has, as vLLM began it; None where it has
    none."""
    try:
        tokens = json.loads(text)["data"][0]["max_model_len"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return tokens if type(tokens) is int and tokens > 0 else None
