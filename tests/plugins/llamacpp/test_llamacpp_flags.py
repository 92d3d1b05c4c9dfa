"""Flags that a profile may not give, and words that llama-server would not take."""

from __future__ import annotations

import pytest

from llmgw_llamacpp.flags import check, is_given, spell, value_of


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("-m", "--model"),
        ("--model", "--model"),
        ("--model=/x", "--model"),
        ("--model_url", "--model-url"),
        ("-hf", "-hf"),
        ("--host", "--host"),
        ("--port=1", "--port"),
        ("-a", "-a"),
        ("--api-key", "--api-key"),
        ("--rpc", "--rpc"),
        ("--gpt-oss-20b-default", "--gpt-oss-20b-default"),
        ("--fim-qwen-7b-spec", "--fim-qwen-7b-spec"),
    ],
)
def test_a_flag_of_the_house_is_refused_by_name(word: str, flag: str) -> None:
    (problem,) = check(("--mlock", word))
    assert problem.key == "args"
    assert spell(word) in problem.message
    assert "llmgw sets" in problem.message
    assert flag.lstrip("-")[0] in problem.message


def test_ordinary_flags_and_values_pass() -> None:
    args = ("--ctx-size", "65536", "-ngl", "all", "--parallel", "-1", "--temp", "0.2", "--spec-default")
    assert check(args) == []
    assert check(("--chat-template-kwargs", '{"a": "--port"}', "--override-kv", "a=int:1", "-", "--")) == []


def test_a_flag_joined_to_its_value_is_told_how_to_be_written() -> None:
    (problem,) = check(("--ctx-size=4096",))
    assert problem.message == "llama-server does not take --ctx-size=4096: write --ctx-size and 4096 as two items"
    (problem,) = check(("--ctx-size 4096",))
    assert "as two" in problem.message


def test_every_problem_is_told_at_once() -> None:
    assert len(check(("--host", "0.0.0.0", "-a", "x", "--port", "1"))) == 3


def test_underscores_spell_the_same_flag_in_long_names_only() -> None:
    assert spell("--ctx_size") == "--ctx-size"
    assert spell("-a_b") == "-a_b"
    assert spell("-1") is None
    assert spell("plain") is None


def test_the_last_of_a_repeated_flag_counts() -> None:
    args = ("-c", "1", "--ctx_size", "2", "-np")
    assert value_of(args, "--ctx-size", "-c") == "2"
    assert value_of(args, "-np") == ""
    assert value_of(args, "--threads") is None
    assert is_given(args, "--parallel", "-np")
    assert not is_given(args, "--threads")
