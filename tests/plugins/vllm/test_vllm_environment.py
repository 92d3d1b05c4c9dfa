"""The environment of a shard: cards, fabric, caches, threads, and what is taken away."""

from __future__ import annotations

from dataclasses import replace

import pytest

import llmgw_vllm
from llmgw.engines import Command, Fabric, Launch, Lora, ModelName, Version
from llmgw.engines.registry import open_engine

ENGINE = open_engine("vllm", llmgw_vllm)
FABRIC = Fabric(address="10.0.0.2", interface="ib0", hcas=("mlx5_0", "mlx5_1"))
CPU = Version(number="0.32.0+cpu")
LAUNCH = Launch(program=("vllm",), source="/srv/models/llama", served_name="llama", host="127.0.0.1", port=18100)


def command_of(**facts: object) -> Command:
    return ENGINE.build_command(replace(LAUNCH, **facts))  # type: ignore[arg-type]


def test_nothing_is_reported_to_anybody_and_lines_are_plain() -> None:
    env = command_of().env
    assert (env["VLLM_NO_USAGE_STATS"], env["DO_NOT_TRACK"], env["NO_COLOR"]) == ("1", "1", "1")


def test_how_long_a_start_may_take_is_the_profiles_to_say() -> None:
    assert int(command_of().env["VLLM_ENGINE_READY_TIMEOUT_S"]) > 3600
    assert command_of(env={"VLLM_ENGINE_READY_TIMEOUT_S": "60"}).env["VLLM_ENGINE_READY_TIMEOUT_S"] == "60"


@pytest.mark.parametrize(("gpus", "visible"), [((0, 3), "0,3"), ((2,), "2"), ((), "")])
def test_cards_are_counted_by_bus_order_and_none_is_none(gpus: tuple[int, ...], visible: str) -> None:
    env = command_of(gpus=gpus).env
    assert env["CUDA_VISIBLE_DEVICES"] == visible
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_cards_that_llmgw_does_not_choose_are_left_alone() -> None:
    assert not [name for name in command_of(gpus=None).env if name.startswith("CUDA_")]


def test_a_group_speaks_over_its_fabric_by_exact_names() -> None:
    env = command_of(tp=2, count=2, rank=1, fabric=FABRIC).env
    assert env["VLLM_HOST_IP"] == "10.0.0.2"
    assert env["NCCL_SOCKET_IFNAME"] == "=ib0"
    assert env["GLOO_SOCKET_IFNAME"] == "ib0"
    assert env["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1"


def test_adapters_for_rdma_are_named_only_where_there_are_any() -> None:
    assert "NCCL_IB_HCA" not in command_of(tp=2, count=2, fabric=replace(FABRIC, hcas=())).env


def test_one_node_alone_needs_no_fabric() -> None:
    assert not {"VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & command_of(fabric=FABRIC).env.keys()


@pytest.mark.parametrize(
    ("source", "lora", "offline"),
    [
        ("/srv/models/llama", None, True),
        ("/srv/models/llama", "/srv/loras/sql", True),
        ("/srv/models/llama", "org/sql", False),
        ("org/llama", None, False),
        ("org/llama", "/srv/loras/sql", False),
    ],
)
def test_the_hub_is_left_alone_when_everything_is_here(source: str, lora: str | None, offline: bool) -> None:
    loras = (Lora(name=ModelName("sql"), source=lora),) if lora else ()
    assert (command_of(source=source, loras=loras).env.get("HF_HUB_OFFLINE") == "1") is offline


@pytest.mark.parametrize(
    ("args", "offline"),
    [
        (("--tokenizer", "org/tokenizer"), False),
        (("--tokenizer=/srv/tokenizer",), True),
        (("--speculative-config", '{"method": "eagle", "model": "org/draft"}'), False),
        (("--speculative_config.model", "org/draft"), False),
        (("--speculative-conf.model", "org/draft"), False),
        (("--spec-m", "org/draft"), False),
        (("--tokenizer-mode", "auto"), True),
        (("-sc", '{"method": "eagle", "model": "/srv/draft"}'), True),
        (("--speculative-config", '{"method": "ngram"}', "--tokenizer"), True),
    ],
)
def test_the_hub_is_left_alone_only_when_what_args_name_is_here_too(args: tuple[str, ...], offline: bool) -> None:
    assert (command_of(source="/srv/models/llama", args=args).env.get("HF_HUB_OFFLINE") == "1") is offline


def test_caches_lie_below_the_folder_that_stays_and_give_way_to_the_machine() -> None:
    command = command_of(cache="/var/cache/llm/")
    assert command.defaults["HF_HOME"] == "/var/cache/llm/huggingface"
    assert command.defaults["VLLM_CACHE_ROOT"] == "/var/cache/llm/vllm"
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"} <= command.defaults.keys()
    assert not command.defaults.keys() & command.env.keys()
    assert command_of(cache=None).defaults == {}


def test_a_build_for_cpus_keeps_to_its_share_of_cores() -> None:
    env = command_of(version=CPU, threads=6).env
    assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["OMP_NUM_THREADS"]) == ("nobind", "6")
    assert command_of(version=CPU, threads=6, tp=4).env["OMP_NUM_THREADS"] == "1"
    assert command_of(version=CPU, threads=6, tp=4, count=2).env["OMP_NUM_THREADS"] == "3"
    assert command_of(version=CPU, threads=1, tp=4).env["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("version", [None, Version(number="0.32.0"), Version(number="0.32.0+cu130")])
def test_another_build_counts_its_threads_itself(version: Version | None) -> None:
    assert "OMP_NUM_THREADS" not in command_of(version=version, threads=6).env


def test_a_build_for_cpus_with_the_whole_machine_binds_its_threads() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command_of(version=CPU, threads=None).env


def test_the_profile_has_the_last_word() -> None:
    env = command_of(env={"HF_HUB_OFFLINE": "0", "VLLM_CPU_KVCACHE_SPACE": "4"}).env
    assert env["HF_HUB_OFFLINE"] == "0"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "4"


def test_inherited_settings_are_scrubbed() -> None:
    scrub = command_of().scrub
    assert "VLLM_PORT".startswith(scrub)
    assert "VLLM_API_KEY".startswith(scrub)
    assert not "HF_TOKEN".startswith(scrub)
    assert not "CUDA_HOME".startswith(scrub)
