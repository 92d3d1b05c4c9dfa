"""Flags that a profile may not give, and words that llama-server would not take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmgw.engines import is_given, value_of
from llmgw_llamacpp.flags import ENDING, STYLE, check, check_env


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("-m", "-m"),
        ("--model", "--model"),
        ("--model_url", "--model-url"),
        ("-hf", "-hf"),
        ("--host", "--host"),
        ("--port", "--port"),
        ("-a", "-a"),
        ("--api-key", "--api-key"),
        ("--rpc", "--rpc"),
        ("--main-gpu", "--main-gpu"),
        ("-mg", "-mg"),
        ("--log-disable", "--log-disable"),
        ("--log_colors", "--log-colors"),
        ("--log-jsonl", "--log-jsonl"),
        ("--gpt-oss-20b-default", "--gpt-oss-20b-default"),
        ("--fim-qwen-7b-spec", "--fim-qwen-7b-spec"),
    ],
)
def test_a_flag_of_the_house_is_refused_by_name(word: str, flag: str) -> None:
    (problem,) = check(("--mlock", word))
    assert problem.key == "args"
    assert problem.message.startswith(f"{flag} is not for args: llmgw sets ")


def test_ordinary_flags_and_values_pass() -> None:
    args = ("--ctx-size", "65536", "-ngl", "all", "--parallel", "-1", "--temp", "0.2", "--spec-default")
    assert check(args) == []
    assert check(("--chat-template-kwargs", '{"a": "--port"}', "--override-kv", "a=int:1", "-", "--")) == []


@pytest.mark.parametrize("flag", ENDING)
def test_a_flag_that_ends_the_program_is_refused(flag: str) -> None:
    (problem,) = check(("--mlock", flag))
    assert problem.message == f"{flag} is not for args: with it the engine prints something and ends"


def test_every_flag_that_the_helps_say_ends_it_is_refused() -> None:
    ends = re.compile(r"^(-\S.*?) {2,}(?:print|show) (?!.*\bprompt\b)", re.MULTILINE)
    text = (Path(__file__).parent / "help" / "b10434.txt").read_text()
    named = {name for heads in ends.findall(text) for name in re.split(r",\s*", heads)}
    assert named >= {"--help", "-cl", "--list-devices", "--completion-bash"}
    assert named <= set(ENDING)


def test_a_word_that_belongs_to_no_flag_is_refused() -> None:
    (problem,) = check(("positional", "--mlock"))
    assert problem.message == "'positional' is no flag, and the value of none: take it out"


def test_a_flag_joined_to_its_value_is_told_how_to_be_written() -> None:
    (problem,) = check(("--ctx-size=4096",))
    assert problem.message == "llama-server does not take --ctx-size=4096: write --ctx-size and 4096 as two items"
    (problem,) = check(("--ctx-size 4096",))
    assert "as two" in problem.message


def test_every_problem_is_told_at_once() -> None:
    assert len(check(("--host", "0.0.0.0", "-a", "x", "--port", "1"))) == 3


def test_a_joined_flag_of_the_house_is_named_too() -> None:
    for word in ("--port=1", "-m=/x"):
        (problem,) = check((word,))
        assert problem.message.startswith(f"llama-server does not take {word}: ")


def test_what_the_house_sets_is_refused_in_the_environment_as_well() -> None:
    env = {"LLAMA_API_KEY": "x", "CUDA_VISIBLE_DEVICES": "1", "LLAMA_ARG_CTX_SIZE": "1", "LLAMA_ARG_NO_PERF": "1"}
    problems = check_env(env)
    assert [problem.key for problem in problems] == ["env"] * 3
    assert [problem.message.split()[0] for problem in problems] == sorted(env)[:3]
    assert check_env({"GGML_VK_VISIBLE_DEVICES": "0", "HF_TOKEN": "x", "LLAMA_ARG_SPLIT_MODE": "row"}) == []


def test_the_last_of_a_repeated_flag_counts() -> None:
    args = ("-c", "1", "--ctx_size", "2", "-np", "-a_b")
    assert value_of(args, STYLE, "--ctx-size", "-c") == "2"
    assert value_of(args, STYLE, "-np") == ""
    assert value_of(args, STYLE, "--threads") is None
    assert is_given(args, STYLE, "--parallel", "-np")
    assert not is_given(args, STYLE, "--threads")


@pytest.mark.parametrize("flag", ["-lv", "--verbosity", "--log_verbosity"])
def test_a_log_that_tells_neither_progress_nor_causes_is_refused(flag: str) -> None:
    for level in ("0", "1", "2", "-1", "2x", "+1", " 1", "high", ""):
        (problem,) = check((flag, level))
        assert problem.key == "args"
        assert problem.message.endswith("give it 3 or more")
    for level in ("3", "4", "5"):
        assert check((flag, level)) == []
    assert check(("-v", "--log-file", "/var/log/x.log", "--no-log-timestamps")) == []


def test_the_same_in_the_environment_is_refused() -> None:
    env = dict.fromkeys(("LLAMA_ARG_MAIN_GPU", "LLAMA_ARG_LOG_COLORS", "LLAMA_ARG_LOG_JSONL"), "1")
    assert len(check_env(env)) == 3
    (problem,) = check_env({"LLAMA_ARG_LOG_VERBOSITY": "0"})
    assert "write --verbosity there" in problem.message
    assert check_env({"LLAMA_ARG_LOG_FILE": "/var/log/x.log"}) == []
