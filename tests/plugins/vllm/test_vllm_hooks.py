"""What vLLM is, what its health means, and how requests reach its adapters."""

from __future__ import annotations

import pytest

import llmgw_vllm
from llmgw.engines import LOADING, READY, HealthState, Lora, Model, ModelName, Profile, RequestRules, SourceKind, Task
from llmgw.engines.registry import open_engine

ENGINE = open_engine("vllm", llmgw_vllm)
PROFILE = Profile(name="only", engine="vllm")


def test_it_reads_repositories_and_spans_nodes() -> None:
    info = ENGINE.info
    assert info.sources == {SourceKind.REPOSITORY}
    assert info.tasks == set(Task)
    assert info.tensor_parallel
    assert info.pipeline_parallel
    assert info.span_nodes
    assert info.loras
    assert not info.projector
    assert {"/v1/embeddings", "/v1/rerank", "/v1/responses", "/v1/messages"} <= info.api_paths
    assert info.owned_by == "vllm"
    assert ENGINE.embedded is None


def test_a_connection_that_is_refused_is_a_load_that_goes_on() -> None:
    assert ENGINE.read_health(None, "") == LOADING


def test_an_empty_answer_is_ready() -> None:
    assert ENGINE.read_health(200, "") == READY


@pytest.mark.parametrize(
    ("status", "body"), [(503, ""), (404, "{}"), (401, ""), (403, ""), (200, "<html>It works!</html>")]
)
def test_a_dead_engine_or_another_program_is_broken(status: int, body: str) -> None:
    health = ENGINE.read_health(status, body)
    assert health.state is HealthState.BROKEN
    assert health.reason


def test_another_fault_may_pass() -> None:
    assert ENGINE.read_health(500, "") == LOADING


def test_an_adapter_is_asked_for_by_its_name() -> None:
    loras = (Lora(name=ModelName("sql"), source="/srv/loras/sql"), Lora(name=ModelName("it"), source="org/it"))
    model = Model(name=ModelName("llama"), source="org/llama", loras=loras, profiles=(PROFILE,))
    rules = ENGINE.build_request(model, PROFILE)
    assert rules == RequestRules(usage_in_streams=True, loras={"sql": {"model": "sql"}, "it": {"model": "it"}})


def test_what_a_request_may_have_is_read() -> None:
    assert ENGINE.info.context_path == "/v1/models"
    assert ENGINE.read_context('{"object":"list","data":[{"id":"m","root":"/m","max_model_len":512}]}') == 512
    assert ENGINE.read_context("") is None
