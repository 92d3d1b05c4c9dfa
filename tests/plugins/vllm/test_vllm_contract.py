"""The conformance kit over the vLLM plugin, against the flags of every release since 0.11.1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import llmgw_vllm
from llmgw.engines import Lora, ModelName, Task, Version
from llmgw.engines.testing import EngineContract, read_flags, sample_launches
from llmgw_vllm.flags import OWNED

HERE = Path(__file__).parent
RECORDED = {table.stem: read_flags(table.read_text()) for table in sorted((HERE / "flags").glob("*.txt"))}
# Older ones can't span nodes, and what else they are given is in test_vllm_command.py.
UNABLE = ("0.9.2", "0.10.0", "0.10.1", "0.10.2", "0.11.0")
TABLES = {number: flags for number, flags in RECORDED.items() if number not in UNABLE}
LAUNCH = replace(EngineContract.launch, source="/srv/models/some model")


class TestVllm(EngineContract):
    plugin = llmgw_vllm
    launch = LAUNCH
    flag_tables = TABLES
    owned = tuple(OWNED)
    inherited = ("VLLM_API_KEY", "VLLM_PORT", "VLLM_LOGGING_LEVEL", "VLLM_SERVER_DEV_MODE", "VLLM_DP_SIZE")
    log = tuple(
        line for log in sorted((HERE / "logs").glob("*.log")) for line in log.read_text(encoding="utf-8").splitlines()
    )
    metrics = tuple(text.read_text(encoding="utf-8") for text in sorted((HERE / "metrics").glob("*.txt")))
    contexts = (
        '{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"vllm","root":"/m","max_model_len":512}]}',
    )
    launches = (
        replace(LAUNCH, args=("--max-model-len", "8k", "--no-disable-uvicorn-access-log")),
        replace(LAUNCH, args=("--distributed-executor-backend=mp", "--enable-prompt-tokens-details"), tp=2),
        replace(LAUNCH, version=Version(number="0.32.0+cpu"), gpus=()),
        replace(LAUNCH, task=Task.RERANK, loras=(Lora(name=ModelName("a"), source="org/adapter,with-comma"),)),
    )


def test_there_is_a_table_of_each_release_that_dropped_flags() -> None:
    assert len(RECORDED) == 19
    assert sample_launches(llmgw_vllm.engine_describe(), LAUNCH)


def test_every_owned_flag_is_one_that_vllm_has() -> None:
    """A misspelling here would let the real one through."""
    assert set(OWNED) <= set().union(*RECORDED.values())
