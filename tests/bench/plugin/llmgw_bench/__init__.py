"""The bench's mock upstream as an engine: what a stranger writes to have llmgw run a program of their own."""

from __future__ import annotations

from llmgw.engines import LOADING, READY, Command, EngineInfo, Health, Launch, SourceKind, hookimpl


@hookimpl
def engine_describe() -> EngineInfo:
    return EngineInfo(
        title="Bench mock",
        default_binary="llmgw-bench-mock",
        sources=frozenset({SourceKind.FILE}),
        file_suffixes=(".bench",),
        api_paths=frozenset({"/v1/chat/completions"}),
        cpu=True,
        stop_grace_seconds=2.0,
    )


@hookimpl
def engine_build_command(launch: Launch) -> Command:
    where = ("--host", launch.host, "--port", str(launch.port), "--model", launch.served_name)
    return Command(argv=(*launch.program, *where, *launch.args))


@hookimpl
def engine_read_health(status: int, body: str) -> Health:
    return READY if status == 200 else LOADING
