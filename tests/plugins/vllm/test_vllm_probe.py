"""Version and flags, from what vLLM really prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import llmgw_vllm
from llmgw.engines import Flag, ProbeOutput, Takes, Version
from llmgw.engines.check import FlagState, check_launch, launch_of, sample_model
from llmgw.engines.registry import open_engine

ENGINE = open_engine("vllm", llmgw_vllm)
HELP = (Path(__file__).parent / "help" / "0.32.0-some.txt").read_text(encoding="utf-8")
NOTICE = "Triton is installed, but doesn't include CPU backend. Disabling Triton.\n"
GROUPS = "usage: vllm serve [model_tag] [options]\n\nConfig Groups:\n  Frontend   Arguments for the server.\n"
PART = (
    "\nParameters matching 'all':\n\n  --disable-custom-all-reduce, --no-disable-custom-all-reduce\n"
    "                        Disable the custom all-reduce kernel. (default: False)\n"
)


def printed(stdout: str, code: int = 0, stderr: str = NOTICE) -> ProbeOutput:
    return ProbeOutput(code=code, stdout=stdout, stderr=stderr)


def read(*stdouts: str) -> Version | None:
    return ENGINE.read_probe([printed(text) for text in stdouts])


def find(name: str) -> Flag:
    version = read("0.32.0+cpu\n", HELP)
    assert version is not None
    flag = version.find(name)
    assert flag is not None
    return flag


def test_it_asks_for_the_version_and_for_the_help_of_new_and_old_releases() -> None:
    probes = ENGINE.build_probe(("/opt/vllm/bin/vllm",))
    assert [probe.argv[1:] for probe in probes] == [("--version",), ("serve", "--help=all"), ("serve", "--help")]
    assert all("VLLM_PORT".startswith(probe.scrub) for probe in probes)


@pytest.mark.parametrize("number", ["0.32.0+cpu", "0.10.1.1", "0.11.2", "0.33.0rc2.dev12+g1234abc.cu130"])
def test_the_version_is_the_only_line(number: str) -> None:
    assert read(f"{number}\n") == Version(number=number)


def test_a_version_behind_other_lines_is_found() -> None:
    assert read(f"{NOTICE}INFO 11-29 23:40:36 [importing.py:53] Triton\n0.32.0\n") == Version(number="0.32.0")


def test_a_probe_that_failed_has_no_version() -> None:
    assert ENGINE.read_probe([printed("0.32.0\n", code=1)]) is None
    assert ENGINE.read_probe([printed("", stderr="ImportError: libcudart.so.13: cannot open shared object")]) is None


@pytest.mark.parametrize("helps", [(HELP, GROUPS), (PART, HELP), (HELP,), (HELP, "")])
def test_the_whole_help_is_taken_wherever_it_stands(helps: tuple[str, ...]) -> None:
    """0.11 and later have it behind --help=all and groups behind --help; before it is the other way round."""
    version = read("0.32.0\n", *helps)
    assert version is not None
    assert version.find("--tensor-parallel-size") is not None


@pytest.mark.parametrize("helps", [(PART, GROUPS), (GROUPS,), (PART,), ("",)])
def test_a_part_of_a_help_is_none(helps: tuple[str, ...]) -> None:
    """Else every flag that it leaves out would be called unknown."""
    assert read("0.10.2\n", *helps) == Version(number="0.10.2")


def test_a_help_that_failed_is_not_read() -> None:
    assert ENGINE.read_probe([printed("0.32.0\n"), printed(HELP, code=1)]) == Version(number="0.32.0")


@pytest.mark.parametrize(
    ("name", "takes", "choices"),
    [
        ("--dtype", Takes.ONE, {"auto", "bfloat16", "float", "float16", "float32", "half"}),
        ("--runner", Takes.ONE, {"auto", "draft", "generate", "pooling"}),
        ("--served-model-name", Takes.MANY, set()),
        ("--lora-modules", Takes.MANY, set()),
        ("--max-model-len", Takes.ONE, set()),
        ("-tp", Takes.ONE, set()),
        ("--hf-token", Takes.MAYBE, set()),
        ("--no-enable-lora", Takes.NONE, set()),
        ("--headless", Takes.NONE, set()),
        # Its list is of examples: a class of one's own is taken too.
        ("--distributed-executor-backend", Takes.ONE, set()),
    ],
)
def test_each_flag_has_its_values(name: str, takes: Takes, choices: set[str]) -> None:
    flag = find(name)
    assert flag.takes is takes
    assert flag.choices == choices


def test_the_choices_of_the_tool_parser_are_all_there() -> None:
    flag = find("--tool-call-parser")
    assert len(flag.choices) == 54
    assert {"hermes", "llama3_json", "xlam", "apertus", "granite-20b-fc"} <= flag.choices


def test_only_what_goes_is_deprecated() -> None:
    assert find("--log-config-file").deprecated
    assert find("--disable-cascade-attn").deprecated
    for name in ("--allow-deprecated-quantization", "--show-hidden-metrics-for-version", "--dtype"):
        assert find(name).deprecated is None


def test_examples_below_the_help_are_no_flags() -> None:
    version = read("0.32.0\n", HELP)
    assert version is not None
    assert version.find("--json-arg") is None


@pytest.mark.parametrize(
    ("words", "flag", "state"),
    [
        (("-O3",), "-O3", FlagState.OK),
        (("-O", "2"), "-O", FlagState.OK),
        (("-cc.mode", "3"), "-cc", FlagState.OK),
        (("--speculative_config.method=ngram",), "--speculative-config", FlagState.OK),
        (("--dtype", "bfloat17"), "--dtype", FlagState.WRONG_VALUE),
        (("--dtype", "half"), "--dtype", FlagState.OK),
        (("--enable-prefix-caching", "true"), "--enable-prefix-caching", FlagState.WRONG_VALUE),
        (("--log-config-file", "/etc/log.json"), "--log-config-file", FlagState.DEPRECATED),
    ],
)
def test_what_a_profile_gives_is_held_against_the_help(words: tuple[str, ...], flag: str, state: FlagState) -> None:
    model, profile = sample_model(ENGINE)
    launch = launch_of(model, profile, ("vllm",), read("0.32.0\n", HELP))
    states = {each.flag: each.state for each in check_launch(ENGINE, replace(launch, args=words))}
    assert states[flag] is state
