"""The command and the environment of a shard of SGLang."""

from __future__ import annotations

from dataclasses import replace

import pytest

import llmgw_sglang
from llmgw.engines import Fabric, Flag, Launch, Lora, ModelName, Task, Version
from llmgw_sglang import environment, ports

LAUNCH = Launch(
    program=("/opt/sglang/bin/sglang",),
    source="/srv/models/tiny",
    served_name="tiny",
    host="127.0.0.1",
    port=18003,
    context_length=32768,
)


def argv(**facts: object) -> tuple[str, ...]:
    return llmgw_sglang.engine_build_command(replace(LAUNCH, **facts)).argv


def value(words: tuple[str, ...], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


def test_an_ordinary_launch() -> None:
    assert argv(args=("--page-size", "16")) == (
        *("/opt/sglang/bin/sglang", "serve", "--model-path", "/srv/models/tiny", "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", "18003", "--context-length", "32768"),
        *("--dist-init-addr", "127.0.0.1:20042", "--enable-metrics", "--enable-cache-report"),
        *("--log-level-http", "warning", "--page-size", "16"),
    )


@pytest.mark.parametrize(
    ("program", "begins"),
    [
        (("/usr/bin/sglang",), ("/usr/bin/sglang", "serve")),
        (("/opt/venv/bin/python",), ("/opt/venv/bin/python", "-m", "sglang.launch_server")),
        (("/opt/venv/bin/python3.12",), ("/opt/venv/bin/python3.12", "-m", "sglang.launch_server")),
        (("python3", "-m", "sglang.launch_server"), ("python3", "-m", "sglang.launch_server")),
    ],
)
def test_an_interpreter_is_told_the_module_that_serves(program: tuple[str, ...], begins: tuple[str, ...]) -> None:
    words = argv(program=program)
    assert words[: len(begins)] == begins
    assert words[len(begins)] == "--model-path"


def test_a_group_over_two_nodes() -> None:
    fabric = Fabric(address="10.0.0.2", interface="ib0", hcas=("mlx5_0", "mlx5_1"))
    launch = replace(LAUNCH, tp=8, pp=2, rank=1, count=2, rendezvous="10.0.0.1:29600", fabric=fabric, gpus=(0, 1))
    command = llmgw_sglang.engine_build_command(launch)
    words = command.argv
    shape = ("--tp-size", "--pp-size", "--nnodes", "--node-rank", "--dist-init-addr")
    assert [value(words, flag) for flag in shape] == ["8", "2", "2", "1", "10.0.0.1:29600"]
    assert (
        command.env
        | {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": "0,1",
            "SGLANG_HOST_IP": "10.0.0.2",
            "NCCL_SOCKET_IFNAME": "=ib0",
            "GLOO_SOCKET_IFNAME": "ib0",
            "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        }
        == command.env
    )
    assert not command.serves
    assert llmgw_sglang.engine_build_command(replace(launch, rank=0)).serves


def test_one_node_needs_no_fabric() -> None:
    command = llmgw_sglang.engine_build_command(replace(LAUNCH, fabric=Fabric(address="10.0.0.2", interface="ib0")))
    assert not {"SGLANG_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & set(command.env)
    assert command.serves


@pytest.mark.parametrize(
    ("version", "passed"),
    [
        (None, False),
        (Version(number="0.5.8"), False),
        (Version(number="0.5.10.post1"), True),
        (Version(number="0.5.23"), True),
        (Version(number="built here"), False),
        (Version(number="0.5.23", flags=(Flag(names=("--port",)),)), False),
        (Version(number="0.0.0.dev1", flags=(Flag(names=("--engine-info-bootstrap-port",)),)), True),
    ],
)
def test_a_flag_that_not_all_releases_have_is_passed_to_those_that_do(version: Version | None, passed: bool) -> None:
    assert value(argv(version=version), "--engine-info-bootstrap-port") == ("20051" if passed else None)


def test_engines_of_one_node_have_no_port_in_common() -> None:
    taken = [set(range(ports.rendezvous(port), ports.rendezvous(port) + 14)) for port in range(18000, 18900)]
    assert sum(map(len, taken)) == len(set().union(*taken))
    assert max(map(max, taken)) < 32768
    assert min(map(min, taken)) > 18999
    assert all(ports.engine_info(port) in range(20000, 32768) for port in range(1, 65536))


@pytest.mark.parametrize(
    ("facts", "embeds"),
    [
        ({"task": Task.CHAT}, False),
        ({"task": Task.EMBED}, True),
        ({"task": Task.EMBED, "args": ("--chat-template", "/srv/template.jinja")}, True),
        ({"task": Task.RERANK}, True),
        ({"task": Task.RERANK, "source": "Qwen/Qwen3-Reranker-0.6B"}, False),
        ({"task": Task.RERANK, "source": "Qwen/Qwen3-VL-Reranker-2B"}, False),
        ({"task": Task.RERANK, "args": ("--chat-template", "/srv/template.jinja")}, False),
    ],
)
def test_a_model_that_generates_nothing_is_an_embedding_one(facts: dict[str, object], embeds: bool) -> None:
    assert ("--is-embedding" in argv(**facts)) is embeds


def test_adapters_are_passed_by_name() -> None:
    loras = (
        Lora(name=ModelName("sql"), source="/srv/loras/sql"),
        Lora(name=ModelName("org/fr"), source="org/fr-lora"),
    )
    words = argv(loras=loras, args=("tail",))
    at = words.index("--lora-paths")
    assert words[at + 1 : at + 3] == ("sql=/srv/loras/sql", "org/fr=org/fr-lora")
    assert words[at + 3].startswith("--")


def test_parsers_are_passed() -> None:
    words = argv(tool_parser="qwen", reasoning_parser="qwen3")
    assert (value(words, "--tool-call-parser"), value(words, "--reasoning-parser")) == ("qwen", "qwen3")


@pytest.mark.parametrize(
    "args",
    [
        ("--context-length", "64k"),
        ("--context-length=64k",),
        ("--log-level-http", "info"),
        ("--enable-metrics",),
        ("--enable-cache-report",),
    ],
)
def test_a_flag_that_the_profile_gives_is_left_to_it(args: tuple[str, ...]) -> None:
    words = argv(args=args)
    assert words[-len(args) :] == args
    assert sum(word.partition("=")[0] == args[0].partition("=")[0] for word in words) == 1


@pytest.mark.parametrize(("gpus", "visible"), [((2, 0), "2,0"), ((), ""), (None, None)])
def test_cards_are_pinned_and_hidden(gpus: tuple[int, ...] | None, visible: str | None) -> None:
    assert environment.build(replace(LAUNCH, gpus=gpus)).get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(
    ("facts", "offline"),
    [
        ({}, True),
        ({"source": "org/tiny"}, False),
        ({"loras": (Lora(name=ModelName("sql"), source="org/sql"),)}, False),
        ({"loras": (Lora(name=ModelName("sql"), source="/srv/sql"),)}, True),
        ({"args": ("--speculative-draft-model-path", "org/draft")}, False),
        ({"args": ("--tokenizer-path=org/tokenizer",)}, False),
        ({"args": ("--tokenizer-path", "/srv/tokenizer")}, True),
    ],
)
def test_the_hub_is_left_alone_where_all_sources_are_paths(facts: dict[str, object], offline: bool) -> None:
    assert ("HF_HUB_OFFLINE" in environment.build(replace(LAUNCH, **facts))) is offline  # type: ignore[arg-type]


def test_caches_are_below_the_folder_that_stays() -> None:
    found = environment.defaults(replace(LAUNCH, cache="/var/cache/llmgw/"))
    assert found["SGLANG_CACHE_DIR"] == "/var/cache/llmgw/sglang"
    kept = {name: path for name, path in found.items() if name != "NO_PROXY"}
    assert len(set(kept.values())) == len(kept) > 5
    assert all(path.startswith("/var/cache/llmgw/") and "//" not in path for path in kept.values())
    assert environment.defaults(LAUNCH) == {"NO_PROXY": "127.0.0.1,localhost"}


def test_the_longest_answer_is_a_limit_of_the_server() -> None:
    assert environment.build(replace(LAUNCH, max_output=4096))["SGLANG_MAX_NEW_TOKENS_LIMIT"] == "4096"
    assert "SGLANG_MAX_NEW_TOKENS_LIMIT" not in environment.build(replace(LAUNCH, max_output=None))


def test_health_is_answered_at_once() -> None:
    env = environment.build(LAUNCH)
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert int(env["SGLANG_HEALTH_CHECK_TIMEOUT"]) < 4
