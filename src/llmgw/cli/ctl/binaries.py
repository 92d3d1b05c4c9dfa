"""Looks at an engine's binary on this machine: which plugin and which profiles it is held against, and what came."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import trio

from llmgw.agent.preflight import examine
from llmgw.config.definition import Definition, find_rejections, load_definitions, unknown_engine
from llmgw.config.paths import is_text
from llmgw.core.model import Model, Profile
from llmgw.engines.check import FlagFinding, sample_model
from llmgw.engines.registry import Engine, Found, find_engines
from llmgw.errors import ConfigError, Problem, UsageError
from llmgw.host.output import STDERR, say
from llmgw.host.signals import stop_signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A profile that a binary is held against, and its definition with its number there: none for an ordinary one."""

    model: Model
    profile: Profile
    definition: Definition | None = None
    number: int = 0

    @property
    def where(self) -> str:
        return "" if self.definition is None else self.definition.places[f"profiles[{self.number}]"]

    def locate(self, problem: Problem) -> str:
        return str(problem if self.definition is None else self.definition.locate(self.number, problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The profiles of one engine in a definition, and those of others, which are left alone."""

    own: tuple[Target, ...]
    others: tuple[Target, ...] = ()


def check_binary(name: str, binary: str, file: str | None) -> dict[str, Any]:
    """What came of it, as values for JSON. UsageError or ConfigError where it can't be begun."""
    found = find_engines()
    engine = find_engine(name, found)
    program = find_binary(binary)
    targets = read_targets(Path(file), engine, found) if file is not None else Targets(own=(_ordinary(engine),))
    if os.isatty(STDERR):
        say(f"reading the version and the help of {program[0]} (each within {engine.info.probe_seconds:g} s) ...")
    checks = trio.run(_check_all, engine, program, targets.own)
    return _answer(engine, program, checks, targets.others)


def _ordinary(engine: Engine) -> Target:
    model, profile = sample_model(engine)
    return Target(model=model, profile=profile)


def find_engine(name: str, found: Found) -> Engine:
    """UsageError names those that there are, and why this one can't be used, where that is known."""
    if name in found.engines:
        return found.engines[name]
    reasons = [problem.message for problem in found.problems if problem.key == f"engine {name}"]
    raise UsageError("\n".join((unknown_engine(name, found.engines), *reasons)))


def find_binary(given: str) -> tuple[str, ...]:
    """What is run: a path, or a bare name that PATH finds, as ``engines.<name>.bin`` is read. UsageError says what to
    do."""
    path = os.path.expanduser(given)
    if os.sep not in path:
        on_path = shutil.which(path)
        if on_path is None and not os.path.exists(path):
            raise UsageError(f"--bin: there is no program {given!r} on PATH; give its whole path")
        path = on_path or path
    path = os.path.abspath(path)
    if os.path.isdir(path):
        raise UsageError(f"--bin: {given} is a folder; give the program in it")
    if not os.path.exists(path):
        raise UsageError(f"--bin: {given} is not there; give the path of the engine's program")
    if not os.access(path, os.X_OK):
        raise UsageError(f"--bin: {given} may not be executed; `chmod +x` it, or give the program itself")
    if not is_text(path):
        raise UsageError(f"--bin: {os.fsencode(path)!r} is not UTF-8; give the program a path that is")
    return (path,)


def read_targets(file: Path, engine: Engine, found: Found) -> Targets:
    """ConfigError with everything that is wrong in the definition, with its places."""
    definitions = load_definitions(file, found.engines)
    problems = find_rejections(definitions, {engine.name: engine})
    if problems:
        raise ConfigError(problems)
    targets = [
        Target(model=definition.model, profile=profile, definition=definition, number=number)
        for definition in definitions
        for number, profile in enumerate(definition.model.profiles)
    ]
    own = tuple(target for target in targets if target.profile.engine == engine.name)
    others = tuple(target for target in targets if target.profile.engine != engine.name)
    if not own:
        names = ", ".join(sorted({target.profile.engine for target in others}))
        raise UsageError(f"--profile: {file} has no profile for {engine.name}: it has some for {names}")
    return Targets(own=own, others=others)


async def _check_all(engine: Engine, program: tuple[str, ...], targets: Sequence[Target]) -> list[dict[str, Any]]:
    with _stops_as_ctrl_c():
        # Each is tried anew: its environment may make it another program.
        return [
            await _check(engine, program, target, marker=f"engine-check-{os.getpid()}-{number}:0")
            for number, target in enumerate(targets)
        ]


async def _check(engine: Engine, program: tuple[str, ...], target: Target, *, marker: str) -> dict[str, Any]:
    model, profile = target.model, target.profile
    tried = await examine(engine, program, model=model, profile=profile, marker=marker)
    starts = tried.starts
    invalid = engine.validate(model, profile, tried.version) if starts else []
    unplaced = {str(problem) for problem in invalid}
    problems = [problem for problem in tried.problems if problem not in unplaced]
    named = {} if target.definition is None else {"model": model.name, "profile": profile.name, "where": target.where}
    return {
        **named,
        "version": tried.version.number if tried.version is not None else None,
        "works": starts and not invalid and not any(finding.breaks for finding in tried.findings),
        "starts": starts,
        "broken": None if starts else tried.broken,
        "remedy": tried.remedy,
        "missing_libraries": list(tried.missing_libraries),
        "problems": [*problems, *map(target.locate, invalid)],
        "flags": [_flag(finding) for finding in tried.findings],
    }


@contextmanager
def _stops_as_ctrl_c() -> Iterator[None]:
    """Within trio: whatever asks this program to stop unwinds it as Ctrl-C does, so that what it has started ends."""
    interrupt = signal.getsignal(signal.SIGINT)

    def stop(signum: int, frame: FrameType | None) -> None:
        # (trio's own, which waits for a place where an exception does no harm)
        if callable(interrupt):
            interrupt(signal.SIGINT, frame)

    before = {each: signal.signal(each, stop) for each in stop_signals() if each != signal.SIGINT}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _answer(
    engine: Engine, program: tuple[str, ...], checks: list[dict[str, Any]], others: tuple[Target, ...]
) -> dict[str, Any]:
    """Of all the profiles together, and of each."""
    worst = next((check for check in checks if not check["starts"]), checks[0])
    answer = {
        "engine": engine.name,
        "program": program,
        "version": next((check["version"] for check in checks if check["version"] is not None), None),
        "works": all(check["works"] for check in checks),
        "starts": worst["starts"],
        "broken": worst["broken"],
        "remedy": worst["remedy"],
        "missing_libraries": worst["missing_libraries"],
        "problems": list(dict.fromkeys(problem for check in checks for problem in check["problems"])),
        "checks": [_known({**check, "version": None}) for check in checks],
        "skipped": [
            {"model": other.model.name, "profile": other.profile.name, "engine": other.profile.engine}
            for other in others
        ],
    }
    return _known(answer)


def _flag(finding: FlagFinding) -> dict[str, Any]:
    return _known(
        {
            "flag": finding.flag,
            "given_by": finding.given_by,
            "state": str(finding.state),
            "detail": finding.detail,
        }
    )


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if value is not None}
