"""What is read from logs that llama-server b8672 to b11549 really wrote, for whoever waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.engines import LogFact
from llmgw_llamacpp.logs import read

LOGS = Path(__file__).parent / "logs"


@pytest.mark.parametrize("version", ["b8672", "b10434", "b11549"])
def test_a_start_that_works_shows_its_progress(version: str) -> None:
    lines = (LOGS / f"{version}-good.log").read_text(encoding="utf-8").splitlines()
    said = [fact.progress for fact in map(read, lines) if fact is not None]
    assert said[0] == "loading smollm2.gguf"
    assert said[-1].startswith("slots: 2")


def test_the_name_of_a_model_is_shown_without_its_folder() -> None:
    line = "0.00.003.558 I srv    load_model: loading model '/var/lib/models/smol 2.gguf'"
    assert read(line) == LogFact(progress="loading smol 2.gguf")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "/usr/lib/python3/site.py:12: UserWarning: odd",
        "0.01.0.0 I srv  update_slots: all slots are idle",
        "0.00.003.231 W srv  llama_server: -----------------",
        "0.00.003.231 E srv  x: loading model 'x' failed",
    ],
)
def test_most_lines_tell_nothing(line: str) -> None:
    assert read(line) is None
