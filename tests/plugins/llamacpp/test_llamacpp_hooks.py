"""The hooks of the llama.cpp plugin: commands, requests, health, load, versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import llmgw_llamacpp
from llmgw.engines import (
    LOADING,
    READY,
    CauseKind,
    HealthState,
    Launch,
    Load,
    Lora,
    Model,
    ModelName,
    ParserFlag,
    ProbeOutput,
    Profile,
    Task,
    Version,
)
from llmgw.engines.registry import open_engine

HERE = Path(__file__).parent
ENGINE = open_engine("llamacpp", llmgw_llamacpp)
HELP = (HERE / "help" / "b10434.txt").read_text(encoding="utf-8")
BASIC = (
    *("python", "-m", "llmgw_llamacpp.embedded", "--model", "/models/smol.gguf", "--alias", "smol"),
    *("--host", "127.0.0.1", "--port", "18000", "--ctx-size", "4096", "--parallel", "1"),
)
LORAS = (Lora(name=ModelName("sql"), source="/l/sql.gguf"), Lora(name=ModelName("law"), source="/l/law.gguf"))


def a_launch(
    *args: str, gpus: tuple[int, ...] | None = None, threads: int | None = None, context: int | None = 4096
) -> Launch:
    return Launch(
        program=("python", "-m", "llmgw_llamacpp.embedded"),
        source="/models/smol.gguf",
        served_name="smol",
        host="127.0.0.1",
        port=18000,
        context_length=context,
        gpus=gpus,
        threads=threads,
        args=args,
    )


def a_probe(stdout: str = "", stderr: str = "", code: int = 0) -> ProbeOutput:
    return ProbeOutput(code=code, stdout=stdout, stderr=stderr)


def problems_of(
    source: str = "/m/x.gguf", *args: str, profile: dict[str, object] | None = None, **model: object
) -> list[tuple[str, str]]:
    asked = replace(Profile(name="cpu", engine="llamacpp", args=args), **(profile or {}))
    defined = Model(name=ModelName("smol"), source=source, context_length=4096, profiles=(asked,))
    found = ENGINE.validate(replace(defined, **model), asked)
    return [(problem.key, problem.message) for problem in found]


def added_by(launch: Launch) -> tuple[str, ...]:
    """What stands between the basic flags and those of every command."""
    argv = ENGINE.build_command(launch).argv
    assert argv[: len(BASIC)] == BASIC
    assert argv[-2:] == ("--metrics", "--no-webui")
    return argv[len(BASIC) : -2]


def test_the_command_names_model_address_slots_and_metrics() -> None:
    command = ENGINE.build_command(a_launch(threads=6))
    assert command.argv == (*BASIC, "--threads", "6", "--metrics", "--no-webui")
    assert command.env == {"GGML_NO_BACKTRACE": "1"}


def test_inherited_settings_of_llama_server_are_scrubbed() -> None:
    command = ENGINE.build_command(a_launch())
    for name in ("LLAMA_ARG_CTX_SIZE", "LLAMA_API_KEY", "LLAMA_SERVER_ROUTER_PORT", "AIP_MODE"):
        assert name.startswith(command.scrub)
    assert not "PATH".startswith(command.scrub)


def test_a_profile_decides_on_its_threads() -> None:
    argv = ENGINE.build_command(a_launch("-t", "2", threads=6)).argv
    assert "--threads" not in argv
    assert argv[-2:] == ("-t", "2")


def test_what_a_profile_gives_is_not_given_twice() -> None:
    args = ("--metrics", "--ui", "-n", "5")
    assert ENGINE.build_command(replace(a_launch(*args), max_output=9)).argv == (*BASIC, *args)


def test_an_answer_has_its_limit() -> None:
    assert added_by(replace(a_launch(), max_output=100)) == ("--predict", "100")


def test_embeddings_and_ranking_have_room_for_a_whole_input() -> None:
    """An input that is longer than one batch is refused, and a batch is 512 tokens by default."""
    room = ("--batch-size", "4096", "--ubatch-size", "4096")
    assert added_by(replace(a_launch(), task=Task.EMBED)) == ("--embeddings", *room)
    assert added_by(replace(a_launch(), task=Task.RERANK)) == ("--reranking", *room)
    argv = ENGINE.build_command(replace(a_launch("-ub", "64", "--embedding", context=None), task=Task.EMBED)).argv
    assert not {"--embeddings", "--batch-size", "--ubatch-size"} & set(argv)


def test_a_projector_and_a_reasoning_format_are_named() -> None:
    launch = replace(a_launch(), mmproj="/m/mm.gguf", reasoning_parser="deepseek")
    assert added_by(launch) == ("--mmproj", "/m/mm.gguf", "--reasoning-format", "deepseek")


def test_adapters_are_loaded_and_none_is_applied() -> None:
    launch = replace(a_launch(), loras=LORAS)
    assert added_by(launch) == ("--lora-scaled", "/l/sql.gguf:0,/l/law.gguf:0", "--cache-ram", "0")
    older = "--lora-scaled FNAME SCALE               path to LoRA adapter with user defined scaling"
    version = ENGINE.read_probe([a_probe(stderr="version: 6000 (a)"), a_probe(older)])
    assert added_by(replace(launch, version=version)) == (
        *("--lora-scaled", "/l/sql.gguf", "0", "--lora-scaled", "/l/law.gguf", "0"),
    )


def test_no_prompt_is_kept_in_ram_beside_adapters() -> None:
    """It would be found by its tokens alone, with the state that another adapter made of them."""
    launch = replace(a_launch(), loras=LORAS)
    known = ENGINE.read_probe([a_probe(stderr="version: 8672 (a)"), a_probe(HELP)])
    for version in (None, known, Version(number="8672")):
        argv = ENGINE.build_command(replace(launch, version=version)).argv
        assert argv[argv.index("--cache-ram") + 1] == "0", version
    assert "--cache-ram" not in ENGINE.build_command(replace(a_launch(), version=known)).argv
    for args in (("-cram", "0"), ("--cache_ram", "0")):
        argv = ENGINE.build_command(replace(launch, args=args)).argv
        assert argv[-2:] == args
        assert "--cache-ram" not in argv
        assert problems_of("/m/x.gguf", *args, loras=LORAS) == []


def test_a_cache_in_ram_is_refused_beside_adapters_and_nowhere_else() -> None:
    env = {"env": {"LLAMA_ARG_CACHE_RAM": "4096"}}
    for args in (("--cache-ram", "4096"), ("-cram", "-1"), ("--cache_ram", "0", "-cram", "1"), ("--cache-ram", "")):
        ((key, message),) = problems_of("/m/x.gguf", *args, loras=LORAS)
        assert (key, "does not go with loras" in message) == ("args", True)
        assert problems_of("/m/x.gguf", *args) == []
    ((key, message),) = problems_of(profile=env, loras=LORAS)
    assert (key, message.partition(":")[0]) == ("env", "LLAMA_ARG_CACHE_RAM does not go with loras")
    assert problems_of(profile=env) == []
    assert problems_of(profile={"env": {"LLAMA_ARG_CACHE_RAM": "0"}}, loras=LORAS) == []


def test_a_request_names_its_adapter_and_one_for_the_model_says_that_it_wants_none() -> None:
    model = Model(name=ModelName("smol"), source="/m/x.gguf", loras=LORAS)
    rules = ENGINE.build_request(model, Profile(name="cpu", engine="llamacpp"))
    assert rules.loras == {
        "sql": {"lora": [{"id": 0, "scale": 1.0}]},
        "law": {"lora": [{"id": 1, "scale": 1.0}]},
    }
    assert rules.base == {"lora": [{"id": 0, "scale": 0.0}]}
    assert rules.usage_in_streams
    assert ENGINE.build_request(replace(model, loras=()), Profile(name="cpu", engine="llamacpp")).base == {}


def test_gpus_are_counted_by_bus_order() -> None:
    assert ENGINE.build_command(a_launch(gpus=(1, 3))).env == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "1,3",
        "GGML_NO_BACKTRACE": "1",
    }
    assert added_by(replace(a_launch(gpus=(1, 3)), tp=2)) == ("--split-mode", "layer")
    argv = ENGINE.build_command(replace(a_launch("-sm", "row", gpus=(1, 3)), tp=2)).argv
    assert "--split-mode" not in argv


def test_without_gpus_none_is_used_whichever_the_build_is_for() -> None:
    command = ENGINE.build_command(a_launch(gpus=()))
    assert (command.env["CUDA_VISIBLE_DEVICES"], command.env["GGML_VK_VISIBLE_DEVICES"]) == ("", "")
    assert added_by(a_launch(gpus=())) == ("--device", "none")
    launch = replace(a_launch(gpus=()), mmproj="/m/mm.gguf")
    assert added_by(launch) == ("--mmproj", "/m/mm.gguf", "--device", "none", "--no-mmproj-offload")


def test_a_switch_has_the_name_that_stays_where_the_release_knows_it() -> None:
    version = ENGINE.read_probe([a_probe(stderr="version: 0.1.0-dev (build 10434, commit a)"), a_probe(HELP)])
    assert ENGINE.build_command(replace(a_launch(), version=version)).argv[-1] == "--no-ui"


def test_a_repository_is_refused_and_a_file_in_one_is_not() -> None:
    ((key, message),) = problems_of("Qwen/Qwen2.5-7B-Instruct:Q4_K_M")
    assert key == "source"
    assert "write hf:Qwen/Qwen2.5-7B-Instruct/FILE.gguf" in message
    assert problems_of("https://h/q4.gguf?download=true") == []
    assert problems_of("hf:Qwen/Qwen2.5-GGUF/*q4_k_m*.gguf@main") == []
    assert problems_of("hf:Qwen/Qwen2.5-GGUF/q4.gguf") == []
    assert problems_of("models/q4.GGUF") == []
    assert problems_of("/models/blobs/sha256-0123") == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("version: 0.1.0-dev (build 1, commit 7e4c0a9)\nbuilt with GNU 11.4.0 for Linux x86_64\n", "0.1.0-dev"),
        ("version: 8672 (3ce7da2)\nbuilt with GNU 11.4.0 for Linux x86_64\n", "8672"),
        ("ggml_cuda_init: found 1 CUDA devices\nversion: 4589 (abc)\n", "4589"),
    ],
)
def test_a_version_is_read_from_stderr(text: str, number: str) -> None:
    assert ENGINE.read_probe([a_probe(stderr=text)]) == Version(number=number)


def test_the_build_is_the_version_where_a_packager_left_it() -> None:
    text = "version: 0.1.0-dev (build 10434, commit 7e4c0a9)\n"
    assert ENGINE.read_probe([a_probe(stderr=text)]) == Version(number="10434")


def test_the_flags_are_read_from_the_help() -> None:
    version = "version: 0.1.0-dev (build 1, commit 7e4c0a9)\n"
    found = ENGINE.read_probe([a_probe(stderr=version), a_probe(HELP)])
    assert found is not None
    assert found.find("--ctx-size") is not None
    assert ENGINE.read_probe([a_probe(stderr=version), a_probe(HELP, code=1)]) == Version(number="0.1.0-dev")


def test_the_probe_asks_for_the_version_and_the_help() -> None:
    probes = ENGINE.build_probe(("llama-server",))
    assert [probe.argv for probe in probes] == [("llama-server", "--version"), ("llama-server", "--help")]
    assert all("LLAMA_ARG_CTX_SIZE".startswith(probe.scrub) for probe in probes)


def test_a_probe_that_failed_has_no_version() -> None:
    text = "llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared object file"
    assert ENGINE.read_probe([a_probe(stderr=text, code=127)]) is None
    assert ENGINE.read_probe([a_probe(stderr="version: 1 (a)", code=1)]) is None


def test_health_tells_loading_ready_and_broken_apart() -> None:
    loading = '{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
    assert ENGINE.read_health(503, loading) == LOADING
    assert ENGINE.read_health(200, '{"status":"ok"}') == READY
    assert ENGINE.read_health(500, "") == LOADING
    assert ENGINE.read_health(None, "") == LOADING


@pytest.mark.parametrize(("status", "body"), [(200, "<html>It works!</html>"), (200, "[]"), (404, ""), (401, "{}")])
def test_something_else_on_the_port_is_broken(status: int, body: str) -> None:
    health = ENGINE.read_health(status, body)
    assert health.state is HealthState.BROKEN
    assert health.reason


@pytest.mark.parametrize(
    ("recorded", "load"),
    [
        # (it does not count what its cache had, so that nobody knows how much came in)
        ("b8672", Load(running=0, waiting=0, steps=3)),
        ("b10434", Load(running=0, waiting=0, prompt_tokens=1, cached_tokens=0, steps=3)),
        ("b11549", Load(running=0, waiting=0, prompt_tokens=1, cached_tokens=0, steps=3)),
    ],
)
def test_the_load_of_each_recorded_version_is_read(recorded: str, load: Load) -> None:
    assert ENGINE.read_load((HERE / "metrics" / f"{recorded}.txt").read_text()) == load


def test_what_the_cache_had_came_in_as_well() -> None:
    text = (
        "llamacpp:requests_processing 0\nllamacpp:prompt_tokens_total 30\nllamacpp:prompt_tokens_cached_total 70\n"
        "llamacpp:n_decode_total 12\n"
    )
    assert ENGINE.read_load(text) == Load(running=0, prompt_tokens=100, cached_tokens=70, steps=12)


def test_load_counts_requests_and_the_cache_of_older_builds() -> None:
    text = (
        "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1e+01\n"
        "llamacpp:kv_cache_usage_ratio 0.25\nllamacpp:n_tokens_max nan\n"
    )
    assert ENGINE.read_load(text) == Load(running=2, waiting=10, cache_used=0.25)


def test_what_the_metrics_do_not_say_is_none() -> None:
    assert ENGINE.read_load("llamacpp:requests_processing 1\n") == Load(running=1)
    assert ENGINE.read_load('{"error":{"code":501}}') is None
    assert ENGINE.read_load("llamacpp:requests_processing -1\n") is None
    assert ENGINE.read_load("llamacpp:kv_cache_usage_ratio 0.5\n") is None


@pytest.mark.parametrize(
    ("args", "parser"),
    [
        ((), ParserFlag(flag="--chat-template-file")),
        (("--chat-template", "chatml"), ParserFlag(flag="--chat-template-file", given="chatml")),
        (("--no-jinja",), ParserFlag(flag="--jinja", given="--no-jinja")),
    ],
)
def test_tool_calls_are_parsed_by_the_chat_template(args: tuple[str, ...], parser: ParserFlag) -> None:
    model = Model(name=ModelName("smol"), source="/m/x.gguf")
    assert ENGINE.name_parser(model, Profile(name="cpu", engine="llamacpp", args=args)) == parser


def test_a_definition_with_everything_in_order_has_no_problem() -> None:
    asked = {"tp": 2, "reasoning_parser": "auto", "env": {"GGML_VK_VISIBLE_DEVICES": "0"}}
    assert problems_of(profile=asked, mmproj="https://h/mm.gguf?download=true", loras=LORAS) == []


@pytest.mark.parametrize(
    ("key", "words", "problems"),
    [
        ("env", "LLAMA_ARG_HOST is not for env", problems_of(profile={"env": {"LLAMA_ARG_HOST": "0.0.0.0"}})),
        ("mmproj", "does not end in .gguf", problems_of(mmproj="org/repo")),
        ("loras", "does not end in .gguf", problems_of(loras=(Lora(name=ModelName("a"), source="/a.safetensors"),))),
        ("loras", "divided by , and :", problems_of(loras=(Lora(name=ModelName("a"), source="/a:b.gguf"),))),
        ("loras", "divided by , and :", problems_of(loras=(Lora(name=ModelName("a"), source="hf:o/r/a,b.gguf"),))),
        ("loras", "divided by , and :", problems_of(loras=(Lora(name=ModelName("a"), source="https://h/a:b.gguf"),))),
        ("source", "is none that llama.cpp reads", problems_of("hf:org/repo/model.safetensors")),
        ("loras", "for chats and completions only", problems_of(loras=LORAS, task=Task.EMBED)),
        ("args", "take --lora and its like out", problems_of("/m/x.gguf", "--lora", "/b.gguf", loras=LORAS)),
        ("args", "take --mmproj and its like out", problems_of("/m/x.gguf", "-mm", "/b.gguf", mmproj="/c.gguf")),
        ("args", "--pooling none gives no embedding", problems_of("/m/x.gguf", "--pooling", "none", task=Task.EMBED)),
        ("args", "--pooling mean can't rank", problems_of("/m/x.gguf", "--pooling", "mean", task=Task.RERANK)),
        ("args", "--split-mode none uses one card", problems_of("/m/x.gguf", "-sm", "none", profile={"tp": 2})),
        ("reasoning_parser", "no reasoning format 'qwen3'", problems_of(profile={"reasoning_parser": "qwen3"})),
        (
            "args",
            "reasoning_parser is set as well",
            problems_of("/m/x.gguf", "--reasoning-format", "none", profile={"reasoning_parser": "auto"}),
        ),
        ("tool_parser", "no choice of tool parsers", problems_of(profile={"tool_parser": "hermes"})),
        ("pp", "no pipeline parallelism", problems_of(profile={"pp": 2})),
    ],
)
def test_what_does_not_go_together_is_named(key: str, words: str, problems: list[tuple[str, str]]) -> None:
    ((found, message),) = problems
    assert (found, words in message) == (key, True)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ('{"default_generation_settings":{"n_ctx":2048,"params":{}},"total_slots":2}', 2048),
        ('{"default_generation_settings":{"n_ctx":"2048"}}', None),
        ('{"error":{"code":501}}', None),
        ("[]", None),
        ("no", None),
    ],
)
def test_what_a_slot_holds_is_read(text: str, tokens: int | None) -> None:
    assert ENGINE.read_context(text) == tokens


def test_an_allocation_that_is_asserted_is_a_lack_of_memory() -> None:
    line = "/src/ggml/src/ggml.c:1568: GGML_ASSERT(ctx->mem_buffer != NULL) failed"
    cause = ENGINE.read_exit((line,), None, 6)
    assert cause is not None
    assert (cause.kind, cause.line) == (CauseKind.HOST_MEMORY, "GGML_ASSERT(ctx->mem_buffer != NULL) failed")
    assert cause.remedy is not None


def test_a_chat_template_that_can_not_be_read_is_named() -> None:
    lines = (
        "0.00.005.135 E common_chat_templates_init: error: Unexpected token: %} of type 9",
        "0.00.005.161 E common_chat_templates_init: failed to initialize chat template",
        "0.00.555.289 E srv          init: exiting due to model loading error",
    )
    for at in (0, 1):
        cause = ENGINE.read_exit(lines[at:], 1, None)
        assert cause is not None
        assert cause.kind is CauseKind.FLAG
        assert cause.line.startswith("chat template: ")
        assert "--chat-template-file" in (cause.remedy or "")


def test_a_file_that_a_flag_names_and_nobody_can_read_is_told_as_that() -> None:
    said = "error while handling argument \"--chat-template-file\": error: failed to open file '/no.jinja'"
    cause = ENGINE.read_exit((said,), 1, None)
    assert cause is not None
    assert (cause.kind, cause.line) == (CauseKind.FLAG, said)
    assert "can't be read on this node" in (cause.remedy or "")
