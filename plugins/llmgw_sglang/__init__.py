"""The engine SGLang: how its server is started over one card, several and several nodes, and what it answers and logs.

The releases that are spoken of as supported are 0.5.0 to 0.5.23. Its serving can't be tried without a GPU: what it
does then is from the sources of 0.5.23, unless another release is named beside it.
"""

from __future__ import annotations

from llmgw.engines import (
    BROKEN,
    LOADING,
    READY,
    Cause,
    Command,
    EngineInfo,
    Health,
    Launch,
    Load,
    LogFact,
    Model,
    ParserFlag,
    ProbeOutput,
    Problem,
    Profile,
    RequestRules,
    SourceKind,
    Task,
    Version,
    hookimpl,
    read_max_model_len,
)
from llmgw_sglang import command, environment, exits, flags, history, logs, metrics, parsers, probe


@hookimpl
def engine_describe() -> EngineInfo:
    return EngineInfo(
        title="SGLang",
        default_binary="sglang",
        # Of a .gguf file it takes a few architectures only, by way of Transformers: such files are llama.cpp's.
        sources=frozenset({SourceKind.REPOSITORY}),
        # /v1/responses is there since 0.5.1, /v1/messages since 0.5.9.
        api_paths=frozenset(
            {
                *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
                *("/v1/embeddings", "/v1/rerank"),
            }
        ),
        tasks=frozenset(Task),
        # What is on the package index has kernels for CUDA only.
        cpu=False,
        tensor_parallel=True,
        pipeline_parallel=True,
        span_nodes=True,
        loras=True,
        tool_parser=True,
        reasoning_parser=True,
        health_path="/health",
        load_path="/metrics",
        context_path="/v1/models",
        stop_signal="SIGTERM",
        # It lets the requests that run come to their end, and then its processes one after the other.
        stop_grace_seconds=30.0,
        probe_seconds=90.0,
        owned_by="sglang",
        flag_style=flags.STYLE,
        flag_changes=history.CHANGES,
    )


@hookimpl
def engine_validate(model: Model, profile: Profile, version: Version | None) -> list[Problem]:
    return [
        *flags.check_args(profile.args),
        *flags.check_env(profile.env),
        *flags.check_replicas(profile.args),
        *flags.check_context(profile.args, model.context_length),
        *parsers.check(profile, version),
        *_check_name(model),
        *_check_source(model),
    ]


@hookimpl
def engine_build_command(launch: Launch) -> Command:
    return Command(
        argv=command.build(launch),
        env=environment.build(launch),
        defaults=environment.defaults(launch),
        scrub=environment.INHERITED,
        # Past rank 0 of a group there is a server that answers /health with 200 and nothing else: it can't be asked
        # for a token, and what it says of itself is what its process says by living.
        serves=launch.count <= 1 or launch.rank == 0,
    )


@hookimpl
def engine_build_probe(program: tuple[str, ...]) -> tuple[Command, ...]:
    return tuple(
        Command(argv=words, env=dict(environment.QUIET), scrub=environment.INHERITED) for words in probe.ask(program)
    )


@hookimpl
def engine_build_request(model: Model) -> RequestRules:
    # "base:adapter" as the name of the model is understood since 0.5.5 and by all of its APIs; before, and not by all,
    # lora_path.
    return RequestRules(
        usage_in_streams=True,
        loras={lora.name: {"model": f"{model.name}:{lora.name}", "lora_path": lora.name} for lora in model.loras},
    )


@hookimpl
def engine_name_parser(model: Model, profile: Profile) -> ParserFlag | None:
    return parsers.name(model, profile)


@hookimpl
def engine_read_probe(output: ProbeOutput, outputs: tuple[ProbeOutput, ...]) -> Version | None:
    return probe.read(outputs)


@hookimpl
def engine_read_health(status: int | None, body: str) -> Health | None:
    # Nothing listens until the weights are loaded. Then it is 503 until the warm-up, which is a request for a few
    # tokens through all cards of the replica, has its answer; 503 again while it stops.
    if status is None or status == 503:
        return LOADING
    if status == 200:
        return READY
    if status in (401, 403, 404):
        return BROKEN(f"/health answers {status}: is this SGLang, without a key, and does it serve HTTP?")
    return None


@hookimpl
def engine_read_log(line: str) -> LogFact | None:
    return logs.read(line)


@hookimpl
def engine_read_exit(lines: tuple[str, ...], code: int | None, signal: int | None) -> Cause | None:
    return exits.read(lines, code, signal)


@hookimpl
def engine_read_context(text: str) -> int | None:
    return read_max_model_len(text)


@hookimpl
def engine_read_load(text: str) -> Load | None:
    return metrics.read(text)


def _check_name(model: Model) -> list[Problem]:
    if ":" not in model.name:
        return []
    text = f"SGLang serves no model whose name has a colon, as {model.name} has: what stands after it is an adapter. "
    text += "Name it without, and give this name as one of its aliases"
    return [Problem(key="name", message=text)]


def _check_source(model: Model) -> list[Problem]:
    if not model.source.lower().endswith(".gguf"):
        return []
    text = f"{model.source} is one .gguf file, and SGLang is given a folder or a repository of safetensors: "
    text += "give the source of those, or let llama.cpp serve it"
    return [Problem(key="source", message=text)]
