"""Whether a program can run its engine here at all, and which of the flags that it would be given it does not know.

Both are found out before anything is launched: by running it for its version and its help, in the environment that a
launch would have. No state of an agent's is in this room.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

import trio

from llmgw.agent.masking import Mask
from llmgw.core.model import Model, Profile
from llmgw.engines.check import FlagFinding, check_launch, launch_of, sample_model
from llmgw.engines.registry import Engine
from llmgw.engines.types import CauseKind, Command, Launch, ProbeOutput, Version
from llmgw.errors import EngineFailed
from llmgw.host.executable import PASSING, explain_start
from llmgw.host.libraries import find_missing, name_packages
from llmgw.host.logfile import clean
from llmgw.host.process import CRASHES, NoOutput, Silence, describe_exit, find_signal, run_probe, split_exit

CAUSE_LINES = 400
SHOWN_CHARS = 300
_MEND = "mend the plugin, or install another release of it: the program is not to blame"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What came of trying a program.

    ``broken``: why an engine can't be started with it, in one line, and ``remedy`` what to do about that. ``problems``:
    whatever does not fit, one line each. ``findings``: the flags of a launch, () where it can't start. ``undecided``:
    the machine was too busy to tell, and another try may find more.
    """

    engine: str
    program: tuple[str, ...]
    version: Version | None
    broken: str | None
    remedy: str | None
    problems: tuple[str, ...]
    missing_libraries: tuple[str, ...]
    findings: tuple[FlagFinding, ...]
    undecided: bool = False

    @property
    def starts(self) -> bool:
        """Whether it runs at all: then what is broken is that llmgw passes flags which it does not know."""
        return self.broken is None or bool(self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """What went wrong when the program was run."""

    reason: str
    remedy: str | None = None
    libraries: tuple[str, ...] = ()
    breaks: bool = True
    undecided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What commands printed, and what went wrong with them. Whatever runs the same ones need not run them again."""

    commands: tuple[Command, ...]
    outputs: tuple[ProbeOutput, ...]
    fault: _Fault | None


async def examine(
    engine: Engine,
    program: tuple[str, ...],
    *,
    model: Model | None = None,
    profile: Profile | None = None,
    marker: str,
    runs: list[Run] | None = None,
) -> Preflight:
    """Try ``program``, for an ordinary model of the engine or for the one that is given. Each command of its probe may
    take as long as the engine's plugin allows; ``marker`` is what its processes carry meanwhile. ``runs``: those of
    before, for equal commands, environments and all; this one is added.

    Nothing that is told of what it printed holds a secret of the environment that it ran in.
    """
    model, profile = _choose(engine, model, profile)
    launch = launch_of(model, profile, program, None)
    mask = Mask(profile.env)
    fault: _Fault | None = None
    outputs: Sequence[ProbeOutput] = ()
    runs = [] if runs is None else runs
    try:
        built = engine.build_command(launch)
    except EngineFailed as failed:
        fault = _Fault(reason=failed.message, remedy=failed.remedy)
    else:
        commands = tuple(_join(probe, built) for probe in engine.build_probe(program))
        known = next((run for run in runs if run.commands == commands), None)
        if known is None:
            known = await _run(engine, program, commands, marker, mask)
            runs.append(known)
        outputs, fault = known.outputs, known.fault
        if fault is None and (wrong := engine.find_fault("engine_build_probe")) is not None:
            fault = _Fault(reason=f"{wrong}; its version and its flags are not checked", remedy=_MEND, breaks=False)
    # In a thread, as all that reads whole texts: a help has hundreds of flags, and other shards are looked after here.
    version = await trio.to_thread.run_sync(engine.read_probe, outputs)
    if fault is None and version is None and outputs:
        first = next((line for output in outputs for line in _lines(output, mask)), "nothing")
        wrong = engine.find_fault("engine_read_probe")
        fault = _Fault(
            reason=wrong or f"no version is in what it printed: {_cut(first)}",
            remedy=_MEND if wrong else f"see that this program is {engine.info.default_binary}, and no other",
        )
    if fault is not None and fault.breaks:
        found = Preflight(
            engine=engine.name,
            program=program,
            version=version,
            broken=fault.reason,
            remedy=fault.remedy,
            problems=(),
            missing_libraries=fault.libraries,
            findings=(),
        )
    else:
        found = _judge(engine, replace(launch, version=version), model, profile, fault)
    return _hide(found, mask)


def _hide(found: Preflight, mask: Mask) -> Preflight:
    """What is told, without secrets. Not the version, which is compared as it is: whoever tells it hides them."""

    def hide(text: str | None) -> str | None:
        return None if text is None else mask.hide(text)

    return replace(
        found,
        broken=hide(found.broken),
        remedy=hide(found.remedy),
        problems=mask.hide_all(found.problems),
        missing_libraries=mask.hide_all(found.missing_libraries),
        findings=tuple(replace(each, detail=hide(each.detail)) for each in found.findings),
    )


def _choose(engine: Engine, model: Model | None, profile: Profile | None) -> tuple[Model, Profile]:
    sample, ordinary = sample_model(engine)
    if model is not None and profile is None:
        profile = next((each for each in model.profiles if each.engine == engine.name), None)
    return model or sample, profile or ordinary


def _join(probe: Command, built: Command) -> Command:
    """The probe in the launch's own environment: else it tries another program than the one that will run."""
    return replace(
        probe,
        env=probe.env | built.env,
        defaults=probe.defaults | built.defaults,
        scrub=tuple(dict.fromkeys((*built.scrub, *probe.scrub))),
        cwd=built.cwd or probe.cwd,
    )


async def _run(engine: Engine, program: tuple[str, ...], commands: tuple[Command, ...], marker: str, mask: Mask) -> Run:
    """What the commands printed, one after the other, up to the first that fails."""
    fault: _Fault | None = None
    outputs: list[ProbeOutput] = []
    limit_seconds = engine.info.probe_seconds
    for command in commands:
        output = await run_probe(command, limit_seconds, marker=marker)
        asked = " ".join(command.argv[len(program) :]) or program[0]
        if isinstance(output, NoOutput):
            fault = await _explain_silence(command.argv[0], asked, output, limit_seconds)
            break
        outputs.append(output)
        if output.code != 0:
            libraries = await find_missing(command, output, limit_seconds, marker=marker)
            lines = await trio.to_thread.run_sync(_lines, output, mask)
            if libraries:
                why = _explain_missing(libraries)
            else:
                why = await trio.to_thread.run_sync(_explain_exit, engine, asked, output.code, lines)
            # A release whose help is called otherwise runs all the same.
            fault = replace(why, breaks=why.breaks or len(outputs) == 1)
            break
    return Run(commands=commands, outputs=tuple(outputs), fault=fault)


async def _explain_silence(path: str, asked: str, silent: NoOutput, limit_seconds: float) -> _Fault:
    if silent.error is not None:
        why = await trio.to_thread.run_sync(explain_start, path, silent.error)
        passing = silent.error.errno in PASSING
        return _Fault(
            reason=f"it can't be executed: {why.reason}", remedy=why.remedy, breaks=not passing, undecided=passing
        )
    if silent.why is Silence.TOO_MUCH:
        return _Fault(reason=f"{asked} printed more than can be read: its flags are not checked", breaks=False)
    text = f"{asked} took longer than {limit_seconds:g} s: not all of it is checked"
    return _Fault(reason=text, breaks=False, undecided=True)


def _explain_missing(libraries: tuple[str, ...]) -> _Fault:
    named = f"libraries {', '.join(libraries)} are" if len(libraries) > 1 else f"library {libraries[0]} is"
    return _Fault(reason=f"the shared {named} missing", remedy=name_packages(libraries), libraries=libraries)


def _explain_exit(engine: Engine, asked: str, code: int, lines: tuple[str, ...]) -> _Fault:
    exit_facts = split_exit(code)
    cause = engine.read_exit(lines[-CAUSE_LINES:], *exit_facts)
    if cause is None or cause == engine.read_exit((), *exit_facts):
        # No line names it: the last one is the best there is.
        killed = find_signal(code)
        told = describe_exit(code) if cause is None else cause.line
        remedy = _advise(killed, asked) if cause is None else cause.remedy
        if killed is signal.SIGKILL:
            # That of an engine is for want of memory mostly, and nothing that is asked for its version needs any.
            told, remedy = "killed by SIGKILL", _advise(killed, asked)
        reason = f"{told} (run with {asked}){f': {_cut(lines[-1])}' if lines else ''}"
    else:
        how = f"exit code {code} of" if code > 0 else "run with"
        reason, remedy = f"{_cut(cause.line)} ({how} {asked})", cause.remedy
    return _Fault(reason=reason, remedy=remedy, breaks=cause is None or cause.kind is not CauseKind.FLAG)


def _advise(killed: signal.Signals | None, asked: str) -> str:
    """What to do about a program that does not even say what it is."""
    if killed in CRASHES:
        return "it crashes before it does anything: install a build for this machine, its CPU, driver and libraries"
    if killed is not None:
        return f"run it with {asked} by hand: it is ended by itself, or by a limit that llmgw runs under"
    return f"run it with {asked} by hand, as the user that llmgw runs as, until it ends well"


def _judge(engine: Engine, launch: Launch, model: Model, profile: Profile, fault: _Fault | None) -> Preflight:
    """A program that runs: do the flags that it would be given fit it, and the profile?"""
    findings = check_launch(engine, launch)
    ours = [f"llmgw passes {_told(each)}" for each in findings if each.breaks and each.given_by == "llmgw"]
    theirs = [f"the profile passes {_told(each)}" for each in findings if each.breaks and each.given_by != "llmgw"]
    invalid = [str(problem) for problem in engine.validate(model, profile, launch.version)]
    if (wrong := engine.find_fault("engine_validate")) is not None:
        invalid.append(f"{wrong}; not all of the profile is checked")
    return Preflight(
        engine=engine.name,
        program=launch.program,
        version=launch.version,
        broken=ours[0] if ours else None,
        remedy="this release and this llmgw do not fit each other: install another of either" if ours else None,
        problems=tuple(dict.fromkeys((*([fault.reason] if fault is not None else []), *ours, *theirs, *invalid))),
        missing_libraries=(),
        findings=findings,
        undecided=fault is not None and fault.undecided,
    )


def _told(finding: FlagFinding) -> str:
    return f"{finding.flag}: {finding.detail or finding.state.replace('_', ' ')}"


def _lines(output: ProbeOutput, mask: Mask) -> tuple[str, ...]:
    # What went wrong is on stderr mostly, and its first line that names it counts; its last is the last resort.
    raw = f"{output.stdout}\n{output.stderr}".splitlines()
    return tuple(clean(line.encode(), mask.hide) for line in raw if line.strip())


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
