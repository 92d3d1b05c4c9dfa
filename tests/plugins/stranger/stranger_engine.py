"""An engine plugin as a stranger would ship it: one module, the three required hooks and a check of the args."""

from __future__ import annotations

from llmgw.engines import (
    LOADING,
    READY,
    Command,
    EngineInfo,
    Health,
    Launch,
    Problem,
    Profile,
    SourceKind,
    hookimpl,
)

OWNED = ("--listen", "--weights", "--name")


@hookimpl
def engine_describe() -> EngineInfo:
    return EngineInfo(
        title="Parrot",
        default_binary="parrot-server",
        sources=frozenset({SourceKind.FILE}),
        file_suffixes=(".parrot",),
        api_paths=frozenset({"/v1/chat/completions"}),
        cpu=True,
    )


@hookimpl
def engine_build_command(launch: Launch) -> Command:
    argv = (*launch.program, f"--weights={launch.source}", "--name", launch.served_name)
    argv += ("--listen", launch.host, "--listen-port", str(launch.port), *launch.args)
    # "" is no card at all, and a launch without any word of cards leaves the choice to the engine.
    cards = ",".join(map(str, launch.gpus)) if launch.gpus is not None else None
    pinned = {} if cards is None else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": cards}
    return Command(argv=argv, env=pinned)


@hookimpl
def engine_read_health(status: int | None) -> Health:
    return READY if status == 200 else LOADING


@hookimpl
def engine_validate(profile: Profile) -> list[Problem]:
    return [
        Problem(key="args", message=f"{flag} is set by llmgw")
        for flag in (*OWNED, "--listen-port")
        if any(word.partition("=")[0] == flag for word in profile.args)
    ]
