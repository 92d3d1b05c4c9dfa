"""A stranger's engine plugin: with this folder on PYTHONPATH every llmgw finds the engine ``fake``."""

from __future__ import annotations

import os.path
import re

from llmgw.engines import (
    BROKEN,
    LOADING,
    READY,
    Cause,
    CauseKind,
    Command,
    Embedded,
    EngineInfo,
    FlagChange,
    FlagStyle,
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
    diagnose,
    find_owned,
    hookimpl,
    read_argparse_help,
    read_max_model_len,
    rule,
)

OWNED = {
    "--host": "the address that it picks on the node",
    "--port": "the address that it picks on the node",
    "--model": "the model's source",
    "--alias": "the model's name",
    "--tp": "the placement",
    "--pp": "the placement",
    "--nodes": "the placement",
    "--rank": "the placement",
    "--meet": "the placement",
    "--headless": "the placement",
}
FAKES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STYLE = FlagStyle(underscores=True, abbreviations=True)

RULES = (
    rule(CauseKind.PORT, r"^fatal: (port \d+ is already in use)", "another program has the port", line="{0}"),
    rule(CauseKind.WEIGHTS_CORRUPT, r"^fatal: (the weights are corrupt)", "fetch the weights again", line="{0}"),
    rule(CauseKind.OTHER, r"^fatal: (.+)", line="{0}"),
    # Its last words, whatever went wrong.
    rule(CauseKind.OTHER, r"^giving up: (.+)", line="{0}", weak=True),
)


@hookimpl
def engine_describe() -> EngineInfo:
    return EngineInfo(
        title="Fake engine",
        default_binary="llmgw-fake-engine",
        sources=frozenset({SourceKind.FILE}),
        file_suffixes=(".fake",),
        api_paths=frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank"}),
        tasks=frozenset({Task.CHAT, Task.EMBED, Task.RERANK}),
        cpu=True,
        tensor_parallel=True,
        pipeline_parallel=True,
        span_nodes=True,
        loras=True,
        tool_parser=True,
        load_path="/metrics",
        context_path="/v1/models",
        stop_grace_seconds=1.0,
        flag_style=STYLE,
        flag_changes=(FlagChange(flag="--weights", gone_in="0.9", instead="--model"),),
    )


@hookimpl
def engine_embedded() -> Embedded:
    return Embedded(module="fake_engine", requires="llmgw_fake", install="PYTHONPATH=tests/fakes")


@hookimpl
def engine_validate(profile: Profile) -> list[Problem]:
    return find_owned(profile.args, OWNED, STYLE)


@hookimpl
def engine_build_command(launch: Launch) -> Command:
    argv = [*launch.program, "--host", launch.host, "--port", str(launch.port)]
    argv += ["--model", launch.source, "--alias", launch.served_name]
    argv += [word for lora in launch.loras for word in ("--lora", f"{lora.name}={lora.source}")]
    if launch.tool_parser is not None:
        argv += ["--tool-parser", launch.tool_parser]
    for flag, width in (("--tp", launch.tp), ("--pp", launch.pp)):
        argv += [flag, str(width)] if width > 1 else []
    serves = launch.rank == 0
    if launch.count > 1:
        argv += ["--nodes", str(launch.count), "--rank", str(launch.rank), "--meet", launch.rendezvous or ""]
        argv += [] if serves else ["--headless"]
    return Command(argv=(*argv, *launch.args), env=_environment(launch), scrub=("FAKE_",), serves=serves)


@hookimpl
def engine_build_probe(program: tuple[str, ...]) -> tuple[Command, ...]:
    asked = ("--version", "--help")
    return tuple(Command(argv=(*program, word), env={"PYTHONPATH": FAKES}, scrub=("FAKE_",)) for word in asked)


@hookimpl
def engine_build_request(model: Model) -> RequestRules:
    return RequestRules(loras={lora.name: {"fake_lora": lora.name} for lora in model.loras})


@hookimpl
def engine_name_parser(model: Model, profile: Profile) -> ParserFlag:
    suggested = "parrot" if "parrot" in model.name.lower() else None
    return ParserFlag(flag="--tool-parser", given=profile.tool_parser, suggested=suggested)


@hookimpl
def engine_read_probe(outputs: tuple[ProbeOutput, ...]) -> Version | None:
    found = re.match(r"fake_engine (\S+)", outputs[0].stdout)
    if found is None or outputs[0].code != 0:
        return None
    return Version(number=found[1], flags=read_argparse_help(outputs[1].stdout) if len(outputs) > 1 else ())


@hookimpl
def engine_read_health(status: int | None, body: str) -> Health:
    if status == 200:
        return READY
    return BROKEN(body.removeprefix("broken: ")) if re.match(r"broken: .", body) else LOADING


@hookimpl
def engine_read_log(line: str) -> LogFact | None:
    found = re.match(r"loading: (.*\S)", line)
    return LogFact(progress=found[1]) if found else None


@hookimpl
def engine_read_exit(lines: tuple[str, ...], code: int | None, signal: int | None) -> Cause | None:
    return diagnose(lines, code, signal, RULES)


@hookimpl
def engine_read_context(text: str) -> int | None:
    return read_max_model_len(text)


@hookimpl
def engine_read_load(text: str) -> Load | None:
    found = {name: int(count) for name, count in re.findall(r"^fake_(\w+) ([0-9]{1,18})$", text, re.MULTILINE)}
    if not found.keys() >= {"running", "waiting"}:
        return None
    share = found.get("cache_percent")
    return Load(
        running=found["running"],
        waiting=found["waiting"],
        cache_used=None if share is None else min(share, 100) / 100,
        prompt_tokens=found.get("prompt_tokens"),
        cached_tokens=found.get("cached_tokens"),
        steps=found.get("steps"),
    )


def _environment(launch: Launch) -> dict[str, str]:
    env = {"PYTHONPATH": FAKES, "PYTHONUNBUFFERED": "1"}
    if launch.fabric is not None:
        env["FAKE_FABRIC"] = ",".join((launch.fabric.interface, *launch.fabric.hcas))
    if launch.gpus is not None:
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, launch.gpus))}
    return env
