"""The real argument parser of an installed SGLang against what the plugin reads and passes.

It is run by name, with the Python of an environment that has sglang in LLMGW_TEST_SGLANG_PYTHON; serving needs a GPU,
and the parser does not.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import llmgw_sglang
from llmgw.engines import Launch, Lora, ModelName, ProbeOutput, Task, Version
from llmgw.engines.check import FlagState, check_launch, launch_of, sample_model
from llmgw.engines.registry import open_engine
from llmgw_sglang.flags import OWNED, read_count

PYTHON = os.environ["LLMGW_TEST_SGLANG_PYTHON"]
ENGINE = open_engine("sglang", llmgw_sglang)
LIMIT_SECONDS = 300

# Its imports alone take seconds, and many of them on a machine that is busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_SECONDS)]

# The words are parsed, and nothing is started.
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang serve")
ServerArgs.add_cli_args(parser)
for words in json.loads(sys.stdin.read()):
    try:
        parsed = vars(parser.parse_args(words))
        print(json.dumps({key: parsed[key] for key in parsed if isinstance(parsed[key], (int, str, bool, list))}))
    except SystemExit:
        print("null")
"""


def run(*words: str, given: str = "") -> ProbeOutput:
    done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    return ProbeOutput(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


@cache
def probed(*program: str) -> Version:
    outputs = [run(*command.argv) for command in ENGINE.build_probe(program)]
    version = ENGINE.read_probe(outputs)
    assert version is not None
    return version


def launches() -> list[Launch]:
    model, profile = sample_model(ENGINE)
    one = launch_of(model, profile, (PYTHON,), probed(PYTHON))
    return [
        one,
        replace(one, task=Task.EMBED, args=("--mem-fraction-static", "0.8")),
        replace(
            one,
            tp=2,
            pp=2,
            rank=1,
            count=2,
            rendezvous="10.0.0.1:29600",
            tool_parser="qwen",
            reasoning_parser="qwen3",
            loras=(Lora(name=ModelName("sql"), source="/srv/sql"),),
        ),
    ]


def parse(*lines: list[str]) -> list[dict[str, object] | None]:
    output = run(PYTHON, "-c", PARSE, given=json.dumps(lines))
    assert output.code == 0, output.stderr
    return [json.loads(line) for line in output.stdout.splitlines()[-len(lines) :]]


def test_the_probe_reads_every_flag_of_the_parser() -> None:
    listing = "import argparse\nfrom sglang.srt.server_args import ServerArgs\np = argparse.ArgumentParser()\n"
    listing += "ServerArgs.add_cli_args(p)\n"
    listing += "[print(' '.join(a.option_strings), ','.join(map(str, a.choices or ())), sep='\\t') for a in p._actions"
    listing += " if a.help != '==SUPPRESS==']"
    output = run(PYTHON, "-c", listing)
    assert output.code == 0, output.stderr
    version = probed(PYTHON)
    rows = [row.split("\t") for row in output.stdout.splitlines() if row.startswith("-")]
    assert len(rows) > 150
    for names, choices in rows:
        for name in names.split():
            flag = version.find(name)
            assert flag is not None, name
            assert flag.choices == frozenset(choices.split(",")) - {""}, name


def test_the_command_itself_is_probed_as_its_interpreter_is() -> None:
    binary = Path(PYTHON).with_name("sglang")
    version = probed(str(binary))
    assert version.number == probed(PYTHON).number
    known = {name for flag in probed(PYTHON).flags for name in flag.names}
    assert {name for flag in version.flags for name in flag.names} == known


def test_what_llmgw_passes_is_parsed_as_it_is_meant() -> None:
    commands = [list(ENGINE.build_command(launch).argv[3:]) for launch in launches()]
    one, embed, group = parse(*commands)
    assert one is not None
    assert embed is not None
    assert group is not None
    assert (one["model_path"], one["served_model_name"], one["port"]) == ("org/sample", "sample", 18000)
    assert (one["context_length"], one["enable_metrics"], one["log_level_http"]) == (4096, True, "warning")
    assert embed["is_embedding"] is True
    assert [group[key] for key in ("tp_size", "pp_size", "nnodes", "node_rank")] == [2, 2, 2, 1]
    assert group["dist_init_addr"] == "10.0.0.1:29600"
    assert group["tool_call_parser"] == "qwen"


def test_engine_check_finds_nothing_wrong_with_what_llmgw_passes() -> None:
    for launch in launches():
        assert {finding.state for finding in check_launch(ENGINE, launch)} == {FlagState.OK}


def test_engine_check_and_the_parser_refuse_the_same() -> None:
    refused = {
        ("--nope",): FlagState.UNKNOWN,
        ("--pp", "2"): FlagState.UNKNOWN,
        ("--page_size", "2"): FlagState.UNKNOWN,
        ("--tool-call-parser", "nope"): FlagState.WRONG_VALUE,
        ("--enable-lora", "2"): FlagState.WRONG_VALUE,
        ("--page-size",): FlagState.WRONG_VALUE,
    }
    for words, state in refused.items():
        found = check_launch(ENGINE, replace(launches()[0], args=words))[-1]
        assert (found.state, found.breaks) == (state, True), words
    parsed = parse(*(["--model-path", "m", *words] for words in refused), ["--model-path", "m"])
    assert parsed[:-1] == [None] * len(refused)
    assert parsed[-1] is not None


def test_words_are_read_as_the_parser_reads_them() -> None:
    base = ["--model-path", "m"]
    short, equals, count = parse([*base, "--tp", "2"], [*base, "--tp-size=2"], [*base, "--context-length", "32Ki"])
    assert short is not None
    assert equals is not None
    assert count is not None
    assert (short["tp_size"], equals["tp_size"]) == (2, 2)
    assert count["context_length"] == read_count("32Ki")


def test_every_owned_flag_is_known_or_gone() -> None:
    known = {name for flag in probed(PYTHON).flags for name in flag.names}
    assert set(OWNED) - known <= {"--model-type"}


def test_the_line_that_names_a_bad_flag_is_the_cause() -> None:
    output = run(PYTHON, "-m", "sglang.launch_server", "--model-path", "/nowhere", "--nope")
    cause = ENGINE.read_exit(output.stderr.splitlines()[-400:], output.code, None)
    assert output.code == 2
    assert cause is not None
    assert re.search(r"unrecognized arguments: --nope", cause.line)
