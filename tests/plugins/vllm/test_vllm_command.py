"""The command line of a shard, over the releases of vLLM and the shapes of a replica."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import llmgw_vllm
from llmgw.engines import Fabric, Flag, Launch, Lora, ModelName, Task, Version
from llmgw.engines.registry import open_engine
from llmgw.engines.testing import read_flags

ENGINE = open_engine("vllm", llmgw_vllm)
TABLES = {table.stem: read_flags(table.read_text()) for table in (Path(__file__).parent / "flags").glob("*.txt")}
REPORTS = ("--enable-prompt-tokens-details", "--disable-uvicorn-access-log")
LAUNCH = Launch(
    program=("/opt/vllm/bin/vllm",),
    source="/srv/models/llama",
    served_name="llama",
    host="127.0.0.1",
    port=18100,
    context_length=32768,
)
START = ("/opt/vllm/bin/vllm", "serve", "/srv/models/llama", "--served-model-name", "llama")
START = (*START, "--host", "127.0.0.1", "--port", "18100")


def a_version(number: str) -> Version:
    return Version(number=number, flags=tuple(Flag(names=(name,)) for name in sorted(TABLES[number])))


def argv_of(**facts: object) -> tuple[str, ...]:
    return ENGINE.build_command(replace(LAUNCH, **facts)).argv  # type: ignore[arg-type]


def test_one_card_has_no_shape_and_the_args_come_last() -> None:
    argv = argv_of(args=("--gpu-memory-utilization", "0.8"))
    assert argv == (*START, "--max-model-len", "32768", *REPORTS, "--gpu-memory-utilization", "0.8")


def test_tensor_and_pipeline_parallel_are_passed_in_full() -> None:
    argv = argv_of(tp=4, pp=2)
    assert argv[len(START) :][:4] == ("--tensor-parallel-size", "4", "--pipeline-parallel-size", "2")
    assert "--nnodes" not in argv


def test_each_rank_of_a_group_knows_its_place_and_only_the_first_serves() -> None:
    fabric = Fabric(address="10.0.0.1", interface="ib0")
    group = replace(LAUNCH, tp=8, pp=2, count=2, rendezvous="10.0.0.1:29501", fabric=fabric)
    first, second = (ENGINE.build_command(replace(group, rank=rank)) for rank in (0, 1))
    meeting = ("--master-addr", "10.0.0.1", "--master-port", "29501", "--distributed-executor-backend", "mp")
    shape = ("--tensor-parallel-size", "8", "--pipeline-parallel-size", "2", "--nnodes", "2", "--node-rank")
    rest = ("--max-model-len", "32768", *REPORTS)
    assert first.argv == (*START, *shape, "0", *meeting, *rest)
    assert second.argv == (*START, *shape, "1", *meeting, "--headless", *rest)
    assert first.serves
    assert not second.serves


def test_an_address_of_six_bytes_and_more_loses_its_brackets() -> None:
    argv = argv_of(tp=2, count=2, rendezvous="[fd00::1]:29501")
    assert argv[argv.index("--master-addr") + 1] == "fd00::1"
    assert argv[argv.index("--master-port") + 1] == "29501"


def test_a_group_without_a_meeting_place_has_no_word_for_it() -> None:
    assert "--master-addr" not in argv_of(tp=2, count=2, rendezvous=None)


def test_adapters_are_named_and_a_flag_of_several_values_is_never_the_last() -> None:
    loras = (Lora(name=ModelName("sql"), source="/srv/loras/sql"), Lora(name=ModelName("it"), source="org/a,b"))
    argv = argv_of(loras=loras, args=("stray",))
    at = argv.index("--lora-modules")
    assert argv[at + 1 : at + 4] == ("sql=/srv/loras/sql", '{"name": "it", "path": "org/a,b"}', "--enable-lora")
    assert "--max-lora-rank" not in argv
    assert argv[-2:] == (REPORTS[-1], "stray")


def test_parsers_are_passed_with_the_switch_that_they_need() -> None:
    argv = argv_of(tool_parser="hermes", reasoning_parser="qwen3")
    assert argv[argv.index("--tool-call-parser") + 1] == "hermes"
    assert argv[argv.index("--reasoning-parser") + 1] == "qwen3"
    assert "--enable-auto-tool-choice" in argv
    assert "--enable-auto-tool-choice" not in argv_of()


@pytest.mark.parametrize(
    ("args", "left_out"),
    [
        (("--max-model-len", "64k"), "--max-model-len"),
        (("--max_model_len=65536",), "--max-model-len"),
        (("--no-disable-uvicorn-access-log",), "--disable-uvicorn-access-log"),
        (("--enable_prompt_tokens_details",), "--enable-prompt-tokens-details"),
    ],
)
def test_what_the_args_give_is_not_given_twice(args: tuple[str, ...], left_out: str) -> None:
    assert left_out in argv_of()
    assert left_out not in argv_of(args=args)[: -len(args)]


def test_the_longest_answer_is_a_limit_of_the_server() -> None:
    argv = argv_of(max_output=4096)
    assert json.loads(argv[argv.index("--override-generation-config") + 1]) == {"max_new_tokens": 4096}
    assert "--override-generation-config" not in argv_of(max_output=None)
    assert "--override-generation-config" not in argv_of(max_output=4096, task=Task.EMBED)


@pytest.mark.parametrize(
    "args",
    [
        ("--override-generation-config", "{}"),
        ("--override_generation_config={}",),
        ("--override-generation-config.top_k=1",),
    ],
)
def test_a_generation_config_of_the_args_is_left_to_them(args: tuple[str, ...]) -> None:
    assert argv_of(max_output=4096, args=args) == (*argv_of(max_output=None), *args)


def test_the_args_may_bring_their_own_backend_and_switches() -> None:
    args = ("--distributed-executor-backend", "mp", "--enable-auto-tool-choice")
    argv = argv_of(tp=2, count=2, rendezvous="h:1", tool_parser="hermes", args=args)
    assert argv.count("--distributed-executor-backend") == 1
    assert argv_of(loras=(Lora(name=ModelName("a"), source="/a"),), args=("--enable-lora",)).count("--enable-lora") == 1
    assert argv.count("--enable-auto-tool-choice") == 1


@pytest.mark.parametrize(
    ("version", "task", "words"),
    [
        (None, Task.EMBED, ("--runner", "pooling")),
        (a_version("0.32.0"), Task.EMBED, ("--runner", "pooling")),
        (a_version("0.10.1"), Task.RERANK, ("--runner", "pooling")),
        (a_version("0.10.0"), Task.RERANK, ("--task", "score")),
        (a_version("0.10.0"), Task.EMBED, ("--task", "embed")),
        (Version(number="0.10.0"), Task.EMBED, ("--task", "embed")),
        (Version(number="0.10.1.1"), Task.EMBED, ("--runner", "pooling")),
        (Version(number="0.33.0rc1"), Task.RERANK, ("--runner", "pooling")),
        (Version(number="a build of ours"), Task.RERANK, ("--runner", "pooling")),
    ],
)
def test_a_task_is_called_what_the_release_calls_it(version: Version | None, task: Task, words: tuple[str]) -> None:
    argv = argv_of(version=version, task=task)
    at = argv.index(words[0])
    assert argv[at : at + 2] == words
    assert not {"--runner", "--task"} & set(argv_of(version=version))


@pytest.mark.parametrize("number", sorted(TABLES))
def test_no_release_is_passed_a_flag_that_it_lacks(number: str) -> None:
    """What it can't do without --nnodes aside; by its help, and by its number alone."""
    version = a_version(number)
    loras = (Lora(name=ModelName("sql"), source="/srv/loras/sql"),)
    for known in (version, Version(number=number)):
        for task in (Task.CHAT, Task.EMBED, Task.RERANK):
            argv = argv_of(version=known, task=task, tp=2, pp=2, loras=loras, tool_parser="a", reasoning_parser="b")
            assert {word for word in argv if word.startswith("--")} <= TABLES[number]


def test_a_release_without_an_optional_flag_starts_without_it() -> None:
    names = TABLES["0.32.0"] - {"--enable-prompt-tokens-details"}
    version = Version(number="0.99", flags=tuple(Flag(names=(name,)) for name in names))
    argv = argv_of(version=version)
    assert "--enable-prompt-tokens-details" not in argv
    assert "--disable-uvicorn-access-log" in argv


@pytest.mark.parametrize("version", [a_version("0.10.0"), Version(number="0.10.0")])
def test_prompts_are_kept_out_of_the_log_of_releases_that_write_them_there(version: Version) -> None:
    assert argv_of(version=version).count("--disable-log-requests") == 1
    assert argv_of(version=version, args=("--disable-log-requests",)).count("--disable-log-requests") == 1


@pytest.mark.parametrize("version", [None, a_version("0.10.2"), Version(number="0.16.0"), a_version("0.32.0")])
def test_later_ones_are_quiet_by_themselves(version: Version | None) -> None:
    assert "--disable-log-requests" not in argv_of(version=version)
