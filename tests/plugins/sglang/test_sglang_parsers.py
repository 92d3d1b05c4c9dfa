"""The parsers that are suggested are those of the newest recorded release."""

from __future__ import annotations

from pathlib import Path

from llmgw_sglang.parsers import FITTING, TOOL_FLAG

TABLE = Path(__file__).parent / "flags" / "0.5.23.txt"


def test_every_suggested_parser_is_one_that_sglang_has() -> None:
    rows = [row.split("\t") for row in TABLE.read_text(encoding="utf-8").splitlines() if not row.startswith("#")]
    (choices,) = [row[2].split(",") for row in rows if TOOL_FLAG in row[0].split()]
    assert {parser for _, parser in FITTING if parser is not None} <= set(choices)
