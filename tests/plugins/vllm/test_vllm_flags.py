"""Which flags and variables a profile may not have, and what releases of vLLM make of the others."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import llmgw_vllm
from llmgw.engines import Flag, Model, ModelName, Profile, Version, is_given
from llmgw.engines.check import FlagState, check_launch, launch_of
from llmgw.engines.registry import open_engine
from llmgw.engines.testing import read_flags
from llmgw_vllm import parsers
from llmgw_vllm.flags import ENDING, OWNED, STYLE, read_count
from llmgw_vllm.history import CHANGES

ENGINE = open_engine("vllm", llmgw_vllm)
TABLES = {table.stem: read_flags(table.read_text()) for table in (Path(__file__).parent / "flags").glob("*.txt")}
RELEASES = sorted(TABLES, key=lambda number: tuple(map(int, number.split("."))))


def a_definition(*args: str, context: int | None = 32768, **facts: object) -> tuple[Model, Profile]:
    source = facts.pop("source", "org/llama")
    profile = Profile(name="only", engine="vllm", args=args, **facts)  # type: ignore[arg-type]
    name = ModelName("llama")
    return Model(name=name, source=str(source), context_length=context, profiles=(profile,)), profile


def problems_of(*args: str, context: int | None = 32768, **facts: object) -> list[tuple[str, str]]:
    problems = ENGINE.validate(*a_definition(*args, context=context, **facts))
    return [(problem.key, problem.message) for problem in problems]


def a_version(number: str) -> Version:
    return Version(number=number, flags=tuple(Flag(names=(name,)) for name in sorted(TABLES[number])))


def findings_of(number: str, *args: str) -> dict[str, FlagState]:
    model, profile = a_definition(*args)
    found = check_launch(ENGINE, launch_of(model, profile, ("vllm",), a_version(number)))
    return {finding.flag: finding.state for finding in found}


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size"),
        (("--tensor_parallel_size=2",), "--tensor-parallel-size"),
        (("-tp", "2"), "-tp"),
        (("-tp=2",), "-tp"),
        # These too were tried with 0.32, and set tp, port, nnodes and rank.
        (("-t", "2"), "-tp"),
        (("--tensor-par", "2"), "--tensor-parallel-size"),
        (("--por", "9000"), "--port"),
        (("-n2",), "-n"),
        (("-r1",), "-r"),
        (("--headl",), "--headless"),
        (("--model", "org/other"), "--model"),
        (("--served_model_name", "other"), "--served-model-name"),
        (("--config", "/etc/vllm.yaml"), "--config"),
        (("--uds", "/run/vllm.sock"), "--uds"),
        (("--api-key", "k"), "--api-key"),
        (("--ssl-keyfile", "k"), "--ssl-keyfile"),
        (("--root-path", "/x"), "--root-path"),
        (("-dp", "2"), "-dp"),
        (("--data-parallel-start-rank", "2"), "--data-parallel-start-rank"),
        (("--device-ids", "0,1"), "--device-ids"),
        (("--lora-modules", "a=/b"), "--lora-modules"),
        (("--runner", "pooling"), "--runner"),
        (("--disable-log-stats",), "--disable-log-stats"),
        (("--grpc",), "--grpc"),
    ],
)
def test_a_flag_of_the_house_is_refused_however_it_is_spelled(args: tuple[str, ...], named: str) -> None:
    problems = problems_of(*args)
    assert [key for key, _ in problems] == ["args"]
    assert named in problems[0][1]
    assert "is not for args" in problems[0][1]


def test_no_other_flag_of_a_current_release_is_refused() -> None:
    others = sorted(TABLES["0.32.0"] - OWNED.keys() - set(ENDING) - {"--max-model-len"})
    assert len(others) > 300
    assert [flag for flag in others if problems_of(flag, "1")] == []


@pytest.mark.parametrize(
    "name", ["VLLM_API_KEY", "VLLM_PORT", "VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES", "VLLM_DP_SIZE", "CUDA_DEVICE_ORDER"]
)
def test_a_variable_of_the_house_is_refused(name: str) -> None:
    problems = problems_of(env={name: "1", "VLLM_CPU_KVCACHE_SPACE": "4"})
    assert [key for key, _ in problems] == ["env"]
    assert name in problems[0][1]


def test_a_context_of_the_args_may_be_longer_and_not_shorter() -> None:
    for enough in ("32768", "32K", "33k", "1M", "auto", "-1"):
        assert problems_of("--max-model-len", enough) == []
    (problem,) = problems_of("--max-model-len", "32k")
    assert problem == (
        "args",
        "--max-model-len 32k is 32000 tokens, and the model promises context_length 32768: take it out of args, or "
        "set context_length to 32000",
    )
    assert problems_of("--max_model_len=8192")
    assert problems_of("--max-model-len", "8192", context=None) == []


@pytest.mark.parametrize("text", ["", "abc", "0", "-2", "1.5", "1.5K", "1 000", "٣٢٧٦٨", "9" * 30])
def test_a_context_that_is_no_number_is_refused(text: str) -> None:
    (problem,) = problems_of("--max-model-len", text)
    assert "needs a number of tokens" in problem[1]


@pytest.mark.parametrize(
    ("text", "count"), [("32768", 32768), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("2m", 2000000)]
)
def test_numbers_are_read_as_vllm_reads_them(text: str, count: int) -> None:
    assert read_count(text) == count


def test_processes_are_started_where_llmgw_has_placed_them() -> None:
    assert problems_of("--distributed-executor-backend", "mp", tp=2) == []
    assert problems_of("--distributed-executor-backend", "uni") == []
    for args in (("ray",), ("external_launcher",)):
        assert [key for key, _ in problems_of("--distributed-executor-backend", *args)] == ["args"]
    (problem,) = problems_of("--distributed-executor-backend=uni", tp=2, pp=2)
    assert "4" in problem[1]


def test_a_gguf_file_is_refused_with_what_to_do() -> None:
    (problem,) = problems_of(source="/srv/models/llama-Q4.GGUF")
    assert problem[0] == "source"
    assert "safetensors" in problem[1]
    assert problems_of(source="/srv/models/llama") == []


@pytest.mark.parametrize("source", ["hf:org/repo/*", "hf:org/repo/*.safetensors@main", "org/repo"])
def test_what_is_fetched_is_a_folder(source: str) -> None:
    assert problems_of(source=source) == []


@pytest.mark.parametrize("source", ["hf:org/repo/m.gguf@main", "hf:org/repo/m.safetensors", "https://host/m.gguf?x"])
def test_one_file_that_would_be_fetched_is_refused(source: str) -> None:
    (problem,) = problems_of(source=source)
    assert problem[0] == "source"
    assert "reads a folder or a repository" in problem[1]


@pytest.mark.parametrize("number", [number for number in RELEASES if number != "0.9.2"])
def test_what_llmgw_passes_is_fine_with_each_release(number: str) -> None:
    assert set(findings_of(number).values()) == {FlagState.OK}


@pytest.mark.parametrize(("before", "after"), list(pairwise(RELEASES)))
def test_the_history_is_that_of_the_tables(before: str, after: str) -> None:
    """Switches' --no- forms go with them, and -O is still read where no help has it."""
    gone = {flag for flag in TABLES[before] - TABLES[after] if not flag.startswith("--no-") and flag != "-O"}
    assert {change.flag for change in CHANGES if change.gone_in == after} == gone


def test_what_took_the_place_of_a_flag_is_one_that_vllm_has() -> None:
    for change in CHANGES:
        assert change.instead is None or change.instead in TABLES["0.32.0"]


@pytest.mark.parametrize(
    ("flag", "last", "first", "state"),
    [
        ("--device", "0.9.2", "0.10.0", FlagState.REMOVED),
        ("--enable-reasoning", "0.9.2", "0.10.0", FlagState.RENAMED),
        ("--num-scheduler-steps", "0.10.0", "0.10.1", FlagState.REMOVED),
        ("--guided-decoding-backend", "0.10.2", "0.11.0", FlagState.RENAMED),
        ("--rope-scaling", "0.11.0", "0.11.1", FlagState.RENAMED),
        ("--override-pooler-config", "0.11.2", "0.12.0", FlagState.RENAMED),
        ("--task", "0.12.0", "0.13.0", FlagState.RENAMED),
        ("--cuda-graph-sizes", "0.12.0", "0.13.0", FlagState.RENAMED),
        ("--disable-log-requests", "0.16.0", "0.17.0", FlagState.REMOVED),
        ("--swap-space", "0.17.0", "0.18.0", FlagState.REMOVED),
        ("--disable-frontend-multiprocessing", "0.18.0", "0.19.0", FlagState.REMOVED),
        ("--max-num-partial-prefills", "0.24.0", "0.27.0", FlagState.REMOVED),
        ("--calculate-kv-scales", "0.27.0", "0.28.0", FlagState.REMOVED),
    ],
)
def test_engine_check_tells_of_a_flag_that_a_release_dropped(
    flag: str, last: str, first: str, state: FlagState
) -> None:
    assert findings_of(last, flag)[flag] is FlagState.OK
    assert findings_of(first, flag)[flag] is state


def test_each_flag_that_was_dropped_would_break_a_launch_today() -> None:
    model, profile = a_definition(*(change.flag for change in CHANGES))
    found = check_launch(ENGINE, launch_of(model, profile, ("vllm",), a_version("0.33.0")))
    assert {each.flag for each in found if each.breaks} == {change.flag for change in CHANGES}


def test_engine_check_goes_by_the_number_where_there_is_no_help() -> None:
    model, profile = a_definition("--swap-space", "4")
    for number, state in (("0.17.1", FlagState.UNCHECKED), ("0.20.0", FlagState.REMOVED)):
        launch = launch_of(model, profile, ("vllm",), Version(number=number))
        assert {each.flag: each.state for each in check_launch(ENGINE, launch)}["--swap-space"] is state


def test_a_flag_that_never_was_is_unknown() -> None:
    assert findings_of("0.32.0", "--no-such-flag")["--no-such-flag"] is FlagState.UNKNOWN


def test_no_flag_is_short_for_another() -> None:
    asked = [
        *OWNED,
        *ENDING,
        "--max-model-len",
        "--distributed-executor-backend",
        *parsers.FLAGS.values(),
        "--tokenizer",
    ]
    asked += ["--tool-parser-plugin", "--reasoning-parser-plugin", "--enable-lora", "--override-generation-config"]
    for flag in sorted({flag for table in TABLES.values() for flag in table} - set(asked)):
        assert not is_given((flag, "1"), STYLE, *asked), flag
    assert not is_given(("--reasoning-parser", "x"), STYLE, "--reasoning-parser-plugin")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--max-model-l=12",), "--max-model-len 12 is 12 tokens"),
        (("--max_model_l", "many"), "--max-model-len needs a number of tokens"),
        (("--distributed-executor-b=ray",), "--distributed-executor-backend ray starts processes"),
        (("--help",), "--help is not for args: with it the engine prints something and ends"),
        (("--help=all",), "--help is not for args"),
        (("-h",), "-h is not for args"),
        (("--vers",), "--vers (short for --version) is not for args"),
        (("positional", "--enforce-eager"), "'positional' is no flag"),
    ],
)
def test_what_is_refused_is_refused_in_short_too(args: tuple[str, ...], said: str) -> None:
    ((key, message),) = problems_of(*args)
    assert key == "args"
    assert message.startswith(said)


def test_a_parser_is_given_once_in_any_spelling() -> None:
    assert problems_of("--tool-call-p", "x", tool_parser="hermes") == [
        ("args", "--tool-call-parser is not for args: the profile has tool_parser hermes")
    ]
