"""The conformance kit over the llama.cpp plugin, against the flags of four versions and of the embedded program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import llmgw_llamacpp
from llmgw.engines.testing import EngineContract, read_flags
from llmgw_llamacpp.flags import OWNED
from llmgw_llamacpp.options import OPTIONS

HERE = Path(__file__).parent
EMBEDDED = frozenset(name for option in OPTIONS for name in (*option.names, *option.off))
RECORDED = {table.stem: read_flags(table.read_text()) for table in sorted((HERE / "flags").glob("*.txt"))}


class TestLlamacpp(EngineContract):
    plugin = llmgw_llamacpp
    flag_tables = RECORDED | {"embedded": EMBEDDED}
    owned = tuple(OWNED)
    log = tuple(
        line for log in sorted((HERE / "logs").glob("*.log")) for line in log.read_text(encoding="utf-8").splitlines()
    )
    launches = (
        replace(EngineContract.launch, gpus=(0, 3)),
        replace(EngineContract.launch, args=("--ctx-size", "65536")),
        replace(EngineContract.launch, args=("-np", "4", "--threads", "2")),
    )


def test_the_embedded_program_has_no_flag_of_its_own() -> None:
    """A definition that works with it works with a llama-server of the same llama.cpp."""
    assert len(RECORDED) == 4
    assert not EMBEDDED - RECORDED["llama-server-b11549"]


def test_every_owned_flag_is_one_that_llama_server_has() -> None:
    """A misspelling here would let the real one through."""
    assert set(OWNED) <= set().union(*RECORDED.values())
