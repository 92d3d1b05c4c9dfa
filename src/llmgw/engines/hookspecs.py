"""The hooks of an engine plugin: build (facts to something to do) and read (text to facts).

All are synchronous, pure and total: odd input gives None, never an exception. A spec may gain arguments and never
lose or rename one, so that a plugin written against an older llmgw goes on working.
"""

from __future__ import annotations

import pluggy

from llmgw.core.model import Model, Profile
from llmgw.engines.types import (
    Command,
    Embedded,
    EngineInfo,
    Health,
    Launch,
    Load,
    LogFact,
    ProbeOutput,
    Problem,
    RequestRules,
    Version,
)

hookspec = pluggy.HookspecMarker("llmgw")


@hookspec(firstresult=True)
def engine_describe() -> EngineInfo | None:
    """What this engine is and can do. Required."""


@hookspec(firstresult=True)
def engine_embedded() -> Embedded | None:
    """A program that stands in for the binary where none is installed; None when there is none."""


@hookspec(firstresult=True)
def engine_validate(model: Model, profile: Profile) -> list[Problem] | None:
    """What is wrong with this profile, as far as the engine can tell without running; [] when nothing is."""


@hookspec(firstresult=True)
def engine_build_command(launch: Launch) -> Command | None:
    """The command that starts one shard. Required."""


@hookspec(firstresult=True)
def engine_build_probe(program: tuple[str, ...]) -> Command | None:
    """A command that prints the version and ends."""


@hookspec(firstresult=True)
def engine_build_request(profile: Profile) -> RequestRules | None:
    """How bodies are edited for this engine, as data."""


@hookspec(firstresult=True)
def engine_read_probe(output: ProbeOutput) -> Version | None:
    """The version in a probe's output; None when it isn't there."""


@hookspec(firstresult=True)
def engine_read_health(status: int, body: str) -> Health | None:
    """What an answer of the health path means. Required."""


@hookspec(firstresult=True)
def engine_read_log(line: str) -> LogFact | None:
    """What one line of the engine's log tells; None for the many that tell nothing."""


@hookspec(firstresult=True)
def engine_read_load(text: str) -> Load | None:
    """How busy the engine is, from the text of its load path."""
