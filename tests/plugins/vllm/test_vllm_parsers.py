"""Parsers of tool calls and reasoning: what fits a model, and what a binary has."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmgw_vllm
from llmgw.engines import Model, ModelName, ParserFlag, Profile, Task, Version
from llmgw.engines.registry import open_engine
from llmgw_vllm.parsers import FITTING
from llmgw_vllm.probe import read_help

ENGINE = open_engine("vllm", llmgw_vllm)
HELP = (Path(__file__).parent / "help" / "0.32.0-some.txt").read_text(encoding="utf-8")
VERSION = Version(number="0.32.0", flags=read_help(HELP))


def a_definition(source: str, *args: str, name: str = "assistant", **facts: str | None) -> tuple[Model, Profile]:
    profile = Profile(name="only", engine="vllm", args=args, **facts)  # type: ignore[arg-type]
    return Model(name=ModelName(name), source=source, profiles=(profile,)), profile


def problems_of(*args: str, version: Version | None = VERSION, **facts: str | None) -> list[tuple[str, str]]:
    problems = ENGINE.validate(*a_definition("org/llama", *args, **facts), version)
    return [(problem.key, problem.message) for problem in problems]


@pytest.mark.parametrize(
    ("source", "parser"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "hermes"),
        ("Qwen/Qwen3-32B", "hermes"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "hermes"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3_json"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_pythonic"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek_v3"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek_v31"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", None),
        ("openai/gpt-oss-20b", "openai"),
        ("zai-org/GLM-4.6", "glm45"),
        ("/srv/models/kimi_k2 instruct", "kimi_k2"),
        ("ibm-granite/granite-4.0-h-small", "granite4"),
        ("org/unheard-of", None),
    ],
)
def test_a_parser_is_suggested_by_the_name_of_the_model(source: str, parser: str | None) -> None:
    assert ENGINE.name_parser(*a_definition(source)) == ParserFlag(
        flag="--tool-call-parser", suggested=parser, beside="--enable-auto-tool-choice"
    )


def test_the_name_that_clients_use_helps_where_the_source_does_not_tell() -> None:
    parser = ENGINE.name_parser(*a_definition("/srv/models/m1", name="qwen3-8b"))
    assert parser is not None
    assert parser.suggested == "hermes"


def test_what_is_given_is_told_from_the_profile_or_its_args() -> None:
    for definition in (
        a_definition("org/x", tool_parser="mistral"),
        a_definition("org/x", "--tool_call_parser=mistral"),
    ):
        assert ENGINE.name_parser(*definition) == ParserFlag(
            flag="--tool-call-parser", given="mistral", beside="--enable-auto-tool-choice"
        )


def test_a_model_without_a_chat_calls_no_tools() -> None:
    profile = Profile(name="only", engine="vllm")
    model = Model(name=ModelName("e"), source="Qwen/Qwen3-Embedding", task=Task.EMBED, profiles=(profile,))
    assert ENGINE.name_parser(model, profile) is None


def test_every_parser_that_is_suggested_is_in_the_help_of_a_current_release() -> None:
    flag = VERSION.find("--tool-call-parser")
    assert flag is not None
    assert {parser for _, parser in FITTING if parser} <= flag.choices


def test_a_parser_that_the_binary_lacks_is_refused_with_the_one_that_is_near() -> None:
    ((key, message),) = problems_of(tool_parser="herms")
    assert key == "tool_parser"
    assert "did you mean hermes?" in message
    ((key, message),) = problems_of("--tool-call-parser", "zzz")
    assert key == "args"
    assert "it has apertus, " in message


def test_a_parser_is_not_judged_by_a_binary_that_does_not_list_any() -> None:
    assert problems_of(tool_parser="hermes", reasoning_parser="anything") == []
    assert problems_of(tool_parser="herms", version=None) == []
    assert problems_of(tool_parser="herms", version=Version(number="0.32.0")) == []


def test_a_plugin_brings_names_that_no_help_lists() -> None:
    assert problems_of("--tool-parser-plugin", "/srv/ours.py", tool_parser="ours") == []


def test_a_parser_is_given_in_one_place() -> None:
    ((key, message),) = problems_of("--tool-call-parser", "hermes", tool_parser="hermes")
    assert key == "args"
    assert "tool_parser" in message
    assert problems_of("--reasoning_parser=qwen3", reasoning_parser="qwen3")
