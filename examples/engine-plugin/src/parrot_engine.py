"""The engine Parrot: how ``parrot-server`` is started, and what its answers and log lines mean."""

from __future__ import annotations

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
    Version,
    diagnose,
    find_owned,
    hookimpl,
    read_argparse_help,
    read_max_model_len,
    rule,
)

STYLE = FlagStyle()

OWNED = {
    "--weights": "the model's source",
    "-w": "the model's source",
    "--name": "the model's name",
    "--listen": "the address that it picks on the node",
    "--port": "the address that it picks on the node",
}

RULES = (
    rule(
        CauseKind.WEIGHTS_MISSING,
        r"FATAL: (weights \S+: No such file.*)",
        "put the file there on this node, or mend the model's source",
        line="{0}",
    ),
    rule(CauseKind.OTHER, r"FATAL: (.+)", line="{0}"),
)


@hookimpl
def engine_describe() -> EngineInfo:
    return EngineInfo(
        title="Parrot",
        default_binary="parrot-server",
        sources=frozenset({SourceKind.FILE}),
        file_suffixes=(".parrot",),
        api_paths=frozenset({"/v1/chat/completions"}),
        cpu=True,
        tool_parser=True,
        health_path="/health",
        load_path="/metrics",
        context_path="/v1/models",
        stop_signal="SIGTERM",
        stop_grace_seconds=5.0,
        probe_seconds=10.0,
        owned_by="parrot",
        flag_style=STYLE,
    )


@hookimpl
def engine_embedded() -> Embedded:
    return Embedded(module="parrot_server", requires="parrot_server", install="pip install parrot-engine")


@hookimpl
def engine_validate(model: Model, profile: Profile, version: Version | None) -> list[Problem]:
    problems = find_owned(profile.args, OWNED, STYLE)
    flag = version.find("--parse-calls") if version is not None else None
    if flag is not None and profile.tool_parser is not None and profile.tool_parser not in flag.choices:
        known = ", ".join(sorted(flag.choices))
        problems.append(Problem(key="tool_parser", message=f"{profile.tool_parser!r} is none of {known}"))
    return problems


@hookimpl
def engine_build_command(launch: Launch) -> Command:
    argv = [*launch.program, "--weights", launch.source, "--name", launch.served_name]
    argv += ["--listen", launch.host, "--port", str(launch.port)]
    if launch.context_length:
        argv += ["--context", str(launch.context_length)]
    if launch.gpus is not None:
        argv += ["--gpus", ",".join(map(str, launch.gpus))]
    if launch.tool_parser is not None:
        argv += ["--parse-calls", launch.tool_parser]
    return Command(argv=(*argv, *launch.args), scrub=("PARROT_",))


@hookimpl
def engine_build_probe(program: tuple[str, ...]) -> tuple[Command, ...]:
    return tuple(Command(argv=(*program, flag), scrub=("PARROT_",)) for flag in ("--version", "--help"))


@hookimpl
def engine_build_request(model: Model, profile: Profile) -> RequestRules:
    return RequestRules(usage_in_streams="--no-usage" not in profile.args)


@hookimpl
def engine_name_parser(model: Model, profile: Profile) -> ParserFlag:
    return ParserFlag(flag="--parse-calls", given=profile.tool_parser, suggested="xml")


@hookimpl
def engine_read_probe(outputs: tuple[ProbeOutput, ...]) -> Version | None:
    found = re.match(r"parrot (\d+\.\d+)", outputs[0].stdout)
    if found is None or outputs[0].code != 0:
        return None
    helped = len(outputs) > 1 and outputs[1].code == 0
    return Version(number=found[1], flags=read_argparse_help(outputs[1].stdout) if helped else ())


@hookimpl
def engine_read_health(status: int | None, body: str) -> Health | None:
    if status == 200:
        return READY
    if status == 404:
        return BROKEN("it has no health path: is this a parrot-server?")
    return LOADING if status in (None, 503) else None


@hookimpl
def engine_read_log(line: str) -> LogFact | None:
    found = re.fullmatch(r"loading the (\w+)", line)
    return LogFact(progress=f"loading the {found[1]}") if found else None


@hookimpl
def engine_read_exit(lines: tuple[str, ...], code: int | None, signal: int | None) -> Cause | None:
    return diagnose(lines, code, signal, RULES, generic=re.compile("FATAL: could not start"))


@hookimpl
def engine_read_context(text: str) -> int | None:
    return read_max_model_len(text)


@hookimpl
def engine_read_load(text: str) -> Load | None:
    found = dict(re.findall(r"^parrot_(\w+) ([0-9]{1,15})$", text, re.MULTILINE))
    if "running" not in found:
        return None
    heard, said = found.get("heard_words"), found.get("said_words")
    return Load(
        running=int(found["running"]),
        prompt_tokens=int(heard) if heard else None,
        steps=int(said) if said else None,
    )
