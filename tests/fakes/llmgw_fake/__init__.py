"""A stranger's engine plugin: with this folder on PYTHONPATH every llmgw finds the engine ``fake``."""

from __future__ import annotations

import os.path
import re

from llmgw.engines import (
    BROKEN,
    LOADING,
    READY,
    Command,
    Embedded,
    EngineInfo,
    Health,
    Launch,
    Load,
    LogFact,
    ProbeOutput,
    Problem,
    Profile,
    RequestRules,
    SourceKind,
    Version,
    hookimpl,
)

OWNED = ("--host", "--port", "--model", "--alias")
FAKES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@hookimpl
def engine_describe() -> EngineInfo:
    return EngineInfo(
        title="Fake engine",
        default_binary="llmgw-fake-engine",
        sources=frozenset({SourceKind.FILE}),
        file_suffixes=(".fake",),
        api_paths=frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"}),
        cpu=True,
        load_path="/metrics",
        stop_grace_seconds=1.0,
    )


@hookimpl
def engine_embedded() -> Embedded:
    return Embedded(module="fake_engine", requires="llmgw_fake", install="PYTHONPATH=tests/fakes")


@hookimpl
def engine_validate(profile: Profile) -> list[Problem]:
    taken = [arg for arg in profile.args if arg.partition("=")[0] in OWNED]
    return [Problem(key="args", message=f"{flag} belongs to llmgw: leave it out") for flag in taken]


@hookimpl
def engine_build_command(launch: Launch) -> Command:
    argv = (*launch.program, "--host", launch.host, "--port", str(launch.port))
    argv += ("--model", launch.source, "--alias", launch.served_name, *launch.args)
    return Command(argv=argv, env={"PYTHONPATH": FAKES, "PYTHONUNBUFFERED": "1"}, scrub=("FAKE_",))


@hookimpl
def engine_build_probe(program: tuple[str, ...]) -> Command:
    return Command(argv=(*program, "--version"), env={"PYTHONPATH": FAKES})


@hookimpl
def engine_build_request() -> RequestRules:
    return RequestRules()


@hookimpl
def engine_read_probe(output: ProbeOutput) -> Version | None:
    found = re.match(r"fake_engine (\S+)", output.stdout)
    return Version(number=found[1]) if found else None


@hookimpl
def engine_read_health(status: int, body: str) -> Health:
    if status == 200:
        return READY
    return BROKEN(body.removeprefix("broken: ")) if body.startswith("broken: ") else LOADING


@hookimpl
def engine_read_log(line: str) -> LogFact | None:
    for word, make in (
        ("loading: ", lambda text: LogFact(progress=text)),
        ("fatal: ", lambda text: LogFact(fatal=text)),
        ("giving up: ", lambda text: LogFact(fatal=text, generic=True)),
    ):
        if line.startswith(word):
            return make(line.removeprefix(word))
    return None


@hookimpl
def engine_read_load(text: str) -> Load | None:
    found = dict(re.findall(r"^fake_(running|waiting) (\d+)$", text, re.MULTILINE))
    return Load(running=int(found["running"]), waiting=int(found["waiting"])) if len(found) == 2 else None
