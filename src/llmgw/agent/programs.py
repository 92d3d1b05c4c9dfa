"""Which program runs an engine on this node, and what came of trying it. Used to launch and to report alike."""

from __future__ import annotations

import glob
import importlib.util
import itertools
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import trio

from llmgw.agent.hands import Hands
from llmgw.agent.preflight import Preflight
from llmgw.config.paths import is_text
from llmgw.engines.registry import Engine
from llmgw.errors import EngineFailed
from llmgw.host.executable import Unstartable, find_unusable

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
# The pause doubles from the first to this many times as long: a try of a broken engine may cost half a minute of a CPU.
LONGEST_PAUSE = 16

# Beside a program of Python's: the environment whose packages it runs.
_PACKAGES = "../lib/python*/*-packages"


def find_program(engine: Engine, binaries: Mapping[str, str]) -> tuple[str, ...]:
    """What is run before any flag: the configured binary, else the one on PATH, else the embedded one.

    Raises EngineFailed, which says what to install or where to point.
    """
    configured = binaries.get(engine.name)
    if configured is not None:
        path, unusable = find_given(configured)
        if unusable is not None:
            text = f"engines.{engine.name}.bin: {configured}: {unusable.reason}"
            raise EngineFailed(text, remedy=unusable.remedy)
        return (path,)
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


def find_given(given: str) -> tuple[str, Unstartable | None]:
    """The path that is meant by a path, or by a bare name that PATH finds, and why it can't be a program. Blocks."""
    path = os.path.expanduser(given)
    if os.sep not in path:
        found = shutil.which(path)
        if found is None:
            return path, Unstartable(reason="there is no such program on PATH", remedy="give its whole path")
        path = found
    path = os.path.abspath(path)
    return path, find_unusable(path)


def _whole(found: str) -> str:
    path = os.path.abspath(found)
    # It is reported to the server, as text.
    if not is_text(path):
        raise EngineFailed(f"{os.fsencode(path)!r} is not UTF-8: give the program a path that is")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """What came of a program, of which files, when, and how long it is left alone if it has to be tried again."""

    stamp: tuple[int, ...]
    found: Preflight
    at: float
    pause_seconds: float


class Programs:
    """What came of trying the programs of this node. Each is tried once, again when its files have changed, and ever
    more rarely while it can't start: what it lacked may have been installed. One that starts and does not know our
    flags will not learn them.

    One that is tried when llmgw is killed is ended at the next start. ``retry_seconds``: how long one that can't start
    is left alone at first; LONGEST_PAUSE times as long in the end.
    """

    __slots__ = ("_hands", "_news", "_numbers", "_retry_seconds", "_said", "_tried", "_turns", "changes")

    def __init__(self, hands: Hands, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._hands = hands
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
        stamp = await self._hands.run(self._hands.stamp_program, engine, program)
        return tried.found if tried is not None and tried.stamp == stamp else None

    async def check(self, engine: Engine, program: tuple[str, ...], *, again: bool = False) -> Preflight:
        """The same, tried now where it has to be; whoever asks meanwhile waits for that one try.

        ``again``: one that was undecided is due for another try as one that can't start is.
        """
        async with self._turns.setdefault(engine.name, trio.Lock()):
            key = (engine.name, program)
            # Before it is tried: a file that is replaced meanwhile is found changed at the next look.
            stamp = await self._hands.run(self._hands.stamp_program, engine, program)
            tried = self._tried.get(key)
            pause_seconds = self._retry_seconds
            if tried is not None and tried.stamp == stamp:
                if not _is_due(tried, again=again):
                    return tried.found
                pause_seconds = min(2 * tried.pause_seconds, LONGEST_PAUSE * self._retry_seconds)
            marker = f"{self._hands.state.marker_prefix()}probe-{next(self._numbers)}:0"
            try:
                found = await self._hands.examine(engine, program, marker=marker)
            except Exception as error:
                found = self._tell_fault(key, error)
            self._tried[key] = _Tried(stamp=stamp, found=found, at=trio.current_time(), pause_seconds=pause_seconds)
            self._tell(key, found)
            self.changes += 1
            self._news.set()
            self._news = trio.Event()
            return found

    async def wait_changed(self, after: int) -> None:
        """Until more has been tried than these many ``changes``."""
        while self.changes <= after:
            await self._news.wait()

    def _tell_fault(self, key: tuple[str, tuple[str, ...]], error: Exception) -> Preflight:
        """What came of a try that failed by whoever reads it: no proof against the program, and nothing that another
        look, a few seconds on, would change."""
        name, program = key
        words = " ".join(f"{type(error).__name__}: {error}".split())
        reason = f"it is not checked, by a fault of the plugin or of llmgw: {words}"
        if reason not in self._said.get(key, frozenset()):
            log.error("engine %s: %s: %s", name, program[0], reason, exc_info=error)
            self._said[key] = frozenset({reason})
        return Preflight(
            engine=name,
            program=program,
            version=None,
            broken=None,
            remedy=None,
            problems=(reason,),
            missing_libraries=(),
            findings=(),
            undecided=True,
        )

    def _tell(self, key: tuple[str, tuple[str, ...]], found: Preflight) -> None:
        """Each problem once, and once more when it has come back."""
        reasons = dict.fromkeys([*([found.broken] if found.broken is not None else []), *found.problems])
        earlier = self._said.get(key, frozenset())
        self._said[key] = frozenset(reasons)
        for reason in reasons:
            if reason not in earlier:
                remedy = f"; {found.remedy}" if found.remedy is not None and reason == found.broken else ""
                log.warning("engine %s: %s: %s%s", found.engine, found.program[0], reason, remedy)


def _is_due(tried: _Tried, *, again: bool) -> bool:
    unsure = not tried.found.starts or (again and tried.found.undecided)
    return unsure and trio.current_time() >= tried.at + tried.pause_seconds


def stamp_program(engine: Engine, program: tuple[str, ...]) -> tuple[int, ...]:
    """What changes when the program is replaced: of the file itself, or of what the embedded one stands on, and of the
    folders of packages beside it, for pip leaves an interpreter and may leave a script as they are. Blocks."""
    path: str | None = program[0]
    if len(program) > 1 and engine.embedded is not None:
        path = _find_origin(engine.embedded.requires)
    try:
        stat = os.stat(path or program[0])
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size, *_stamp_packages(program[0]))


def _stamp_packages(path: str) -> tuple[int, ...]:
    # A program on PATH may be a link into its environment, and the interpreter of an environment one out of it.
    bins = dict.fromkeys((os.path.dirname(path), os.path.dirname(os.path.realpath(path))))
    folders = [os.path.join(folder, found) for folder in bins for found in glob.glob(_PACKAGES, root_dir=folder)]
    times = []
    for folder in sorted(folders):
        # One that has just gone is a change of its own.
        with suppress(OSError):
            times.append(os.stat(folder).st_mtime_ns)
    return tuple(times)


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
