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

from llmgw.agent.masking import Mask
from llmgw.agent.preflight import Run, examine
from llmgw.agent.programs import find_given
from llmgw.config.definition import Definition, find_rejections, load_definitions
from llmgw.config.profiles import unknown_engine
from llmgw.core.model import Model, Profile
from llmgw.engines.check import FlagFinding, sample_model
from llmgw.engines.registry import Engine, Found, find_engines
from llmgw.errors import ConfigError, Problem, UsageError
from llmgw.host.guard import ended_with_us
from llmgw.host.output import STDERR, say
from llmgw.host.signals import stop_signals
from llmgw.units import printable


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
    # Another plugin of this name, or a folder of plugins that can't be read: this may not be the engine that was meant.
    for problem in found.problems:
        if problem.key == f"engine {name}" or not problem.key.startswith("engine "):
            say(f"llmgw: {printable(str(problem))}")
    program = find_binary(binary)
    targets = read_targets(Path(file), engine, found) if file is not None else Targets(own=(_ordinary(engine),))
    number = len(targets.own)
    if os.isatty(STDERR) or number > 1:
        each = f", {number} profiles" if number > 1 else ""
        limit = f"each within {engine.info.probe_seconds:g} s"
        say(f"reading the version and the help of {printable(program[0])} ({limit}{each}) ...")
    marker = f"engine-check-{os.getpid()}-"
    with ended_with_us(marker):
        checks = trio.run(_check_all, engine, program, targets.own, marker)
    return _answer(engine, program, checks, targets.others)


def _ordinary(engine: Engine) -> Target:
    model, profile = sample_model(engine)
    return Target(model=model, profile=profile)


def find_engine(name: str, found: Found) -> Engine:
    """UsageError names those that there are, and why this one can't be used, where that is known."""
    if name in found.engines:
        return found.engines[name]
    own = [problem.message for problem in found.problems if problem.key == f"engine {name}"]
    # The name that stands in its package may be another one, and the folder that it lies in can't be read.
    others = [str(problem) for problem in found.problems if problem.key != f"engine {name}"]
    raise UsageError("\n".join((unknown_engine(name, found.engines), *own, *others)))


def find_binary(given: str) -> tuple[str, ...]:
    """What is run: a path, or a bare name that PATH finds, as ``engines.<name>.bin`` is read. UsageError says what to
    do."""
    # A bare name that lies here is meant as a path by whoever sees it here; an agent is somewhere else.
    here = os.sep not in given and shutil.which(given) is None and os.path.exists(given)
    path, unusable = find_given(os.path.join(os.curdir, given) if here else given)
    if unusable is not None:
        name = printable(os.fsencode(given).decode("utf-8", "backslashreplace"))
        raise UsageError(f"--bin: {name}: {unusable.reason}; {unusable.remedy}")
    return (path,)


def read_targets(file: Path, engine: Engine, found: Found) -> Targets:
    """ConfigError with everything that is wrong in the definition, with its places."""
    definitions = load_definitions(file, found.engines)
    # Of flags alone; the same definition may be for `llmgw serve`, which books no GPU.
    problems = find_rejections(definitions, {engine.name: engine}, gpus=False)
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


async def _check_all(
    engine: Engine, program: tuple[str, ...], targets: Sequence[Target], marker: str
) -> list[dict[str, Any]]:
    # Another environment may make it another program; with an equal one it is run once.
    runs: list[Run] = []
    with _stops_as_ctrl_c():
        return [
            await _check(engine, program, target, marker=f"{marker}{number}:0", runs=runs)
            for number, target in enumerate(targets)
        ]


async def _check(
    engine: Engine, program: tuple[str, ...], target: Target, *, marker: str, runs: list[Run]
) -> dict[str, Any]:
    model, profile = target.model, target.profile
    tried = await examine(engine, program, model=model, profile=profile, marker=marker, runs=runs)
    starts, version = tried.starts, tried.version
    invalid = engine.validate(model, profile, tried.version) if starts else []
    mask = Mask(profile.env)
    # As they are told in the one place, and not in the other.
    unplaced = {mask.hide(str(problem)) for problem in invalid}
    problems = [problem for problem in tried.problems if problem not in unplaced]
    fails = not starts or bool(invalid) or any(finding.breaks for finding in tried.findings)
    named = {} if target.definition is None else {"model": model.name, "profile": profile.name, "where": target.where}
    return {
        **named,
        "version": None if version is None else mask.hide(version.number),
        # What never said which release it is may be any program, or one that hangs.
        "works": not fails and version is not None,
        "fails": fails,
        "starts": starts,
        "broken": None if starts else tried.broken,
        "remedy": tried.remedy,
        "missing_libraries": list(tried.missing_libraries),
        "problems": [*problems, *mask.hide_all(map(target.locate, invalid))],
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
        "fails": any(check["fails"] for check in checks),
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
