"""The engine vLLM: how ``vllm serve`` is started, and what its answers and log lines mean.

The map of the plugin:

- ``command.py``      the command line of a shard; ``environment.py``  its environment
- ``flags.py``        what of a profile is llmgw's own, and how vLLM reads flags; ``history.py``  those it has dropped
- ``releases.py``     what a release knows; ``probe.py``  version and flags from what the binary prints
- ``parsers.py``      parsers of tool calls and reasoning
- ``logs.py``         progress in its log; ``exits.py``  why it ended; ``metrics.py``  how busy it is
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
from llmgw_vllm import command, environment, exits, flags, history, logs, metrics, parsers, probe


@hookimpl
def engine_describe() -> EngineInfo:
    return EngineInfo(
        title="vLLM",
        default_binary="vllm",
        sources=frozenset({SourceKind.REPOSITORY}),
        api_paths=frozenset(
            {
                *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
                *("/v1/embeddings", "/v1/rerank"),
            }
        ),
        tasks=frozenset({Task.CHAT, Task.EMBED, Task.RERANK}),
        # With a build for CPUs, which is another package.
        cpu=True,
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
        # It drops what it is at, and then takes its processes down one after the other.
        stop_grace_seconds=20.0,
        # Each command imports PyTorch first: 6 to 13 s on an idle machine.
        probe_seconds=90.0,
        owned_by="vllm",
        flag_style=flags.STYLE,
        flag_changes=history.CHANGES,
    )


@hookimpl
def engine_validate(model: Model, profile: Profile, version: Version | None) -> list[Problem]:
    problems = [*flags.check_args(profile.args), *flags.check_env(profile.env)]
    problems += flags.check_context(profile.args, model.context_length)
    problems += flags.check_backend(profile.args, profile.tp * profile.pp)
    problems += parsers.check(profile, version)
    if model.source.lower().endswith(".gguf"):
        text = f"{model.source} is one GGUF file, and vLLM reads a repository or a folder of one: name that of the "
        text += "model's safetensors, or choose an engine that reads GGUF"
        problems.append(Problem(key="source", message=text))
    return problems


@hookimpl
def engine_build_command(launch: Launch) -> Command:
    return Command(
        argv=command.build(launch),
        env=environment.build(launch),
        defaults=environment.defaults(launch),
        scrub=environment.INHERITED,
        serves=not command.is_up_without_http(launch),
    )


@hookimpl
def engine_build_probe(program: tuple[str, ...]) -> tuple[Command, ...]:
    return tuple(Command(argv=(*program, *words), scrub=environment.INHERITED) for words in probe.QUESTIONS)


@hookimpl
def engine_build_request(model: Model) -> RequestRules:
    # An adapter is served under its own name, beside the model.
    return RequestRules(usage_in_streams=True, loras={lora.name: {"model": lora.name} for lora in model.loras})


@hookimpl
def engine_name_parser(model: Model, profile: Profile) -> ParserFlag | None:
    return parsers.name(model, profile)


@hookimpl
def engine_read_probe(outputs: tuple[ProbeOutput, ...]) -> Version | None:
    return probe.read(outputs)


@hookimpl
def engine_read_health(status: int | None, body: str) -> Health | None:
    # It does not listen before it can serve, and 200 has no body.
    if status is None:
        return LOADING
    if status == 200:
        other = body.lstrip()[:1] == "<"
        return BROKEN("its /health is not vLLM's: does something else hold the port?") if other else READY
    if status == 503:
        return BROKEN("/health answers 503: the engine behind vLLM's server has died")
    if status in (401, 403, 404):
        return BROKEN(f"/health answers {status}: is this vLLM, with its paths and without a key?")
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
