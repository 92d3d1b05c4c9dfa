"""The hooks of an engine plugin: build (facts to something to do) and read (text to facts).

All are synchronous, pure and total: odd input gives None, never an exception. A spec may gain arguments and never
lose or rename one, so that a plugin written against an older llmgw goes on working.
"""

from __future__ import annotations

import pluggy

from llmgw.core.model import Model, Profile
from llmgw.core.replica import Load
from llmgw.engines.types import (
    Cause,
    Command,
    Embedded,
    EngineInfo,
    Health,
    Launch,
    LogFact,
    ParserFlag,
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
def engine_validate(model: Model, profile: Profile, version: Version | None) -> list[Problem] | None:
    """What is wrong with this profile, as far as the engine can tell without running; [] when nothing is.

    ``version`` is that of the node's binary; None on a server, which has none.
    """


@hookspec(firstresult=True)
def engine_build_command(launch: Launch) -> Command | None:
    """The command that starts one shard. Required."""


@hookspec(firstresult=True)
def engine_build_probe(program: tuple[str, ...]) -> Command | tuple[Command, ...] | None:
    """Commands that print the version and the help, and end."""


@hookspec(firstresult=True)
def engine_build_request(model: Model, profile: Profile) -> RequestRules | None:
    """How bodies are edited for this engine, as data."""


@hookspec(firstresult=True)
def engine_name_parser(model: Model, profile: Profile) -> ParserFlag | None:
    """What makes the engine parse this model's tool calls; None where no flag does."""


@hookspec(firstresult=True)
def engine_read_probe(output: ProbeOutput, outputs: tuple[ProbeOutput, ...]) -> Version | None:
    """The version, and the flags, in what the probe's commands printed (``output`` is the first of ``outputs``).

    There may be fewer outputs than commands: one that fails is the last that is run. None when no version is there.
    """


@hookspec(firstresult=True)
def engine_read_health(status: int | None, body: str) -> Health | None:
    """What an answer of the health path means; a status of None is a connection that is refused. Required."""


@hookspec(firstresult=True)
def engine_read_log(line: str) -> LogFact | None:
    """What one line of the engine's log tells; None for the many that tell nothing."""


@hookspec(firstresult=True)
def engine_read_exit(lines: tuple[str, ...], code: int | None, signal: int | None) -> Cause | None:
    """Why the engine ended, from its last 400 lines or so, oldest first, and how its process did.

    ``code`` is its exit code, or ``signal`` what killed it; both None where it still ran, or nobody knows.
    """


@hookspec(firstresult=True)
def engine_read_context(text: str) -> int | None:
    """How many tokens one request may have, prompt and answer together, from the text of the context path."""


@hookspec(firstresult=True)
def engine_read_load(text: str) -> Load | None:
    """How busy the engine is, from the text of its load path."""
