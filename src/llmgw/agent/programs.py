"""Which program runs an engine on this node, and what came of trying it. Used to launch and to report alike."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import trio

from llmgw.agent.preflight import Preflight, examine
from llmgw.config.paths import is_text
from llmgw.engines.registry import Engine
from llmgw.errors import EngineFailed

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """What came of a program, of which file, and when."""

    stamp: tuple[int, int]
    found: Preflight
    at: float


class Programs:
    """What came of trying the programs of this node. Each is tried once, again when its file has changed, and now and
    then while it is broken: what it lacked may have been installed.

    ``marker_prefix`` is the state folder's: a program that is tried when llmgw is killed is ended at the next start.
    ``retry_seconds``: how long a broken one is left alone.
    """

    __slots__ = ("_marker_prefix", "_news", "_numbers", "_retry_seconds", "_said", "_tried", "_turns", "changes")

    def __init__(self, *, marker_prefix: str, retry_seconds: float = RETRY_SECONDS) -> None:
        self._marker_prefix = marker_prefix
        self._retry_seconds = retry_seconds
        # Two may be tried at once, and the end of one must not be that of the other.
        self._numbers = itertools.count(1)
        self._turns: dict[str, trio.Lock] = {}
        self._tried: dict[tuple[str, tuple[str, ...]], _Tried] = {}
        self._said: dict[tuple[str, tuple[str, ...]], frozenset[str]] = {}
        self._news = trio.Event()
        self.changes = 0

    async def find(self, engine: Engine, program: tuple[str, ...]) -> Preflight | None:
        """What is known of this program as it is now; None before it was tried."""
        tried = self._tried.get((engine.name, program))
        stamp = await trio.to_thread.run_sync(_stamp, engine, program)
        return tried.found if tried is not None and tried.stamp == stamp else None

    async def check(self, engine: Engine, program: tuple[str, ...], *, again: bool = False) -> Preflight:
        """The same, tried now where it has to be; whoever asks meanwhile waits for that one try.

        ``again``: one that was undecided is due for another try as a broken one is.
        """
        async with self._turns.setdefault(engine.name, trio.Lock()):
            key = (engine.name, program)
            # Before it is tried: a file that is replaced meanwhile is found changed at the next look.
            stamp = await trio.to_thread.run_sync(_stamp, engine, program)
            tried = self._tried.get(key)
            if tried is not None and tried.stamp == stamp and not self._is_due(tried, again=again):
                return tried.found
            marker = f"{self._marker_prefix}probe-{next(self._numbers)}:0"
            found = await examine(engine, program, marker=marker)
            self._tried[key] = _Tried(stamp=stamp, found=found, at=trio.current_time())
            self._tell(key, found)
            self.changes += 1
            self._news.set()
            self._news = trio.Event()
            return found

    def _is_due(self, tried: _Tried, *, again: bool) -> bool:
        unsure = tried.found.broken is not None or (again and tried.found.undecided)
        return unsure and trio.current_time() >= tried.at + self._retry_seconds

    async def wait_changed(self, after: int) -> None:
        """Until more has been tried than these many ``changes``."""
        while self.changes <= after:
            await self._news.wait()

    def _tell(self, key: tuple[str, tuple[str, ...]], found: Preflight) -> None:
        """Each problem once, and once more when it has come back."""
        reasons = dict.fromkeys([*([found.broken] if found.broken is not None else []), *found.problems])
        earlier = self._said.get(key, frozenset())
        self._said[key] = frozenset(reasons)
        for reason in reasons:
            if reason not in earlier:
                remedy = f"; {found.remedy}" if found.remedy is not None and reason == found.broken else ""
                log.warning("engine %s: %s: %s%s", found.engine, found.program[0], reason, remedy)


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
