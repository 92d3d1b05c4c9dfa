"""OpenAI's shapes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.model import Lora, Model, ModelName
from llmgw.dialects.openai import (
    MESSAGE_BYTES,
    Usage,
    error_body,
    error_event,
    is_error,
    list_models,
    read_engine_error,
    read_reply_usage,
    read_usage,
    show_model,
)
from llmgw.dialects.refusal import Refusal

MODEL = Model(name=ModelName("org/tiny"), source="x", aliases=("gpt", "small"), context_length=2048)


def test_an_error_is_what_the_sdks_read() -> None:
    refusal = Refusal(status=404, code="model_not_found", message='No "x".', param="model")
    error = {"message": 'No "x".', "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert json.loads(error_body(refusal)) == {"error": error}
    event = error_event(refusal)
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert json.loads(event[6:]) == {"error": error}


@pytest.mark.parametrize(
    ("status", "body", "code", "message"),
    [
        (400, b'{"error":{"message":"bad","type":"invalid_request_error","code":400}}', "invalid_request_error", "bad"),
        (
            400,
            b'{"object":"error","message":"bad","type":"BadRequestError","param":null,"code":400}',
            "BadRequestError",
            "bad",
        ),
        (404, b'{"error":"model not found"}', "invalid_request_error", "model not found"),
        (422, b'{"detail":"wrong"}', "engine_error", "wrong"),
        (
            422,
            b'{"detail":[{"loc":["body"],"msg":"field required"},{"msg":"too long"},7]}',
            "engine_error",
            "field required; too long",
        ),
        (
            503,
            b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}',
            "unavailable_error",
            "Loading model",
        ),
        (429, b'{"error":{"message":"slow down"}}', "rate_limit_error", "slow down"),
        (500, b'{"error":null,"message":"boom"}', "engine_error", "boom"),
        (500, b'{"error":{"message":7,"code":"x"}}', "x", "The engine answered with status 500 and no explanation."),
        (502, b"<html>Bad Gateway</html>", "engine_error", "The engine answered with status 502 and no explanation."),
        (500, b"", "engine_error", "The engine answered with status 500 and no explanation."),
        (500, b'{"error":{"message":"cut of', "engine_error", "cut of…"),
        (500, b'{"error":{"message":"cut \\n of\\u00', "engine_error", "cut \n of…"),
        (500, b'{"error":{"message":"cut \xc3', "engine_error", "cut …"),
        (500, b'{"error":{"message":"odd \\ud800"}} x', "engine_error", "odd ?"),
        (422, b'{"detail":"' + b"y" * 300_000, "engine_error", "y" * MESSAGE_BYTES + "…"),
        (500, b'{"error":{"message":"' + b"\\n" * 300_000, "engine_error", "\n" * (MESSAGE_BYTES // 2) + "…"),
        (500, b'{"error":{"message":"whole"},"input":"' + b"y" * 300_000, "engine_error", "whole"),
        (
            400,
            b'{"error":{"message":"This model\'s maximum context length is 9',
            "context_length_exceeded",
            "This model's maximum context length is 9…",
        ),
        (500, b"[1]", "engine_error", "The engine answered with status 500 and no explanation."),
        (500, b'{"error":[]}', "engine_error", "The engine answered with status 500 and no explanation."),
        (500, b"[" * 100_000, "engine_error", "The engine answered with status 500 and no explanation."),
        (
            500,
            b'{"error":{"message":"\xff"}}',
            "engine_error",
            "The engine answered with status 500 and no explanation.",
        ),
    ],
)
def test_an_engines_error_is_read_whichever_shape_it_has(status: int, body: bytes, code: str, message: str) -> None:
    refusal = read_engine_error(status, body)
    assert (refusal.status, refusal.code, refusal.message) == (status, code, message)
    assert error_body(refusal)


@pytest.mark.parametrize("status", [199, 302, 304, 600, 999])
def test_a_status_that_is_no_errors_is_named_as_it_came(status: int) -> None:
    refusal = read_engine_error(status, b"")
    assert refusal.status == 502
    assert refusal.message.startswith(f"The engine answered with status {status},")
    assert read_engine_error(status, b'{"error":"gone"}').message == "gone"


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (b'{"error":{"message":"x"}}', True),
        (b'{"error":"x"}', True),
        (b'{"error":null}', False),
        (b'{"error":{}}', False),
        (b'{"error":""}', False),
        (b'{"error":7}', False),
        (b'{"a":{"error":"x"}}', False),
        (b'["error"]', False),
        (b'{"error":', False),
        (b"", False),
    ],
)
def test_an_error_is_a_documents_own(document: bytes, error: bool) -> None:
    assert is_error(document) is error


@pytest.mark.parametrize(
    "error",
    [
        {"type": "exceed_context_size_error", "message": "the request exceeds it"},
        {"message": "This model's maximum context length is 2048 tokens."},
        {"message": "The request exceeds the available context size. Try increasing it"},
    ],
)
def test_a_prompt_that_is_too_long_is_called_by_the_name_clients_look_for(error: dict[str, str]) -> None:
    body = json.dumps({"error": error}).encode()
    assert read_engine_error(400, body).code == "context_length_exceeded"
    assert read_engine_error(500, body).code != "context_length_exceeded"


def test_the_parameter_that_is_wrong_is_kept() -> None:
    assert read_engine_error(400, b'{"error":{"message":"x","param":"top_p"}}').param == "top_p"
    assert read_engine_error(400, b'{"error":{"message":"x","param":3}}').param is None


@given(st.binary(max_size=200), st.sampled_from([400, 404, 500]))
def test_no_engine_error_raises(body: bytes, status: int) -> None:
    assert read_engine_error(status, body).message


@pytest.mark.parametrize(
    ("document", "usage", "lone"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}', Usage(3, 4), True),
        (b'{"usage":{"prompt_tokens":3},"choices":[ ]}', Usage(3, 0), True),
        (b'{"choices":[{}],"usage":{"prompt_tokens":3,"completion_tokens":4}}', Usage(3, 4), False),
        (b'{"usage":{"prompt_tokens":3,"total_tokens":3}}', Usage(3, 0), False),
        (b'{"results":[],"usage":{"total_tokens":5}}', Usage(5, 0), False),
        (b'{"usage":{"total_tokens":5,"completion_tokens":2}}', Usage(3, 2), False),
        (b'{"usage":{"total_tokens":5,"completion_tokens":7}}', Usage(0, 7), False),
        (b'{"usage":{"total_tokens":5,"prompt_tokens":0}}', Usage(0, 0), False),
        (b'{"usage":{"total_tokens":true}}', Usage(0, 0), False),
        (b'{"usage":{"total_tokens":"5"}}', Usage(0, 0), False),
        (b'{"usage":{"total_tokens":99999999999999999999999}}', Usage(0, 0), False),
        (b'{"usage":{"prompt_tokens":3,"total_tokens":"odd"}}', Usage(3, 0), False),
        (b'{"choices":[],"usage":null}', None, False),
        (b'{"choices":[]}', None, False),
        (b'{"choices":[],"usage":{"prompt_tokens":null}}', None, True),
        (b'{"choices":[],"usage":{"prompt_tokens":"3"}}', None, True),
        (b'{"usage":{"prompt_tokens":-3}}', None, False),
        (b'{"usage":{"prompt_tokens":99999999999999999999999}}', None, False),
        (b'{"usage":{"prompt_tokens":1.5}}', None, False),
        (b'{"usage":[1]}', None, False),
        (b"[DONE]", None, False),
        (b"", None, False),
        (b"[1]", None, False),
    ],
)
def test_usage_is_read_where_it_makes_sense(document: bytes, usage: Usage | None, lone: bool) -> None:
    assert read_usage(document) == (usage, lone)
    if usage is not None:
        assert read_reply_usage(document) == usage


def test_every_name_that_can_be_asked_for_is_listed() -> None:
    found = json.loads(list_models([MODEL], 17))
    assert found["object"] == "list"
    assert [row["id"] for row in found["data"]] == ["org/tiny", "gpt", "small"]
    first, second, _ = found["data"]
    assert first["aliases"] == ["gpt", "small"]
    assert first["created"] == 17
    assert first["max_model_len"] == first["context_length"] == 2048
    assert second["root"] == "org/tiny"
    assert "aliases" not in second


def test_an_adapter_is_listed_with_the_model_that_it_belongs_to() -> None:
    model = replace(MODEL, loras=(Lora(name=ModelName("sql"), source="/secret/place"),))
    row = json.loads(list_models([model], 17))["data"][-1]
    assert row == {
        "id": "sql",
        "object": "model",
        "created": 17,
        "owned_by": "llmgw",
        "max_model_len": 2048,
        "context_length": 2048,
        "parent": "org/tiny",
    }
    assert json.loads(show_model(model, "sql", 17)) == row
    assert "parent" not in json.loads(show_model(model, "gpt", 17))


def test_a_model_is_shown_under_the_name_that_was_asked_for() -> None:
    assert json.loads(show_model(MODEL, "gpt", 17))["id"] == "gpt"
    plain = json.loads(show_model(Model(name=ModelName("x"), source="x"), "x", 17))
    assert plain == {"id": "x", "object": "model", "created": 17, "owned_by": "llmgw"}
