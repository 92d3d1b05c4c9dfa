"""Finds the installed engine plugins and wraps each one as an Engine.

A plugin is a stranger's code: one that is broken is left out by name and takes nobody down with it, and one that
raises while it reads a line of a log costs that line and nothing else.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import TypeVar

import pluggy

from llmgw.core.model import Model, Profile, Task
from llmgw.core.replica import Load
from llmgw.core.weights import list_sources
from llmgw.engines import hookspecs
from llmgw.engines.causes import diagnose
from llmgw.engines.soundness import find_fault, find_wrong
from llmgw.engines.sources import GROUP, Source, find_sources
from llmgw.engines.taken import find_untaken
from llmgw.engines.types import (
    LOADING,
    Cause,
    Command,
    Embedded,
    EngineInfo,
    Health,
    HealthState,
    Launch,
    LogFact,
    ParserFlag,
    ProbeOutput,
    RequestRules,
    Version,
)
from llmgw.errors import EngineFailed, LlmgwError, Problem

__all__ = ["GROUP", "REQUIRED", "Engine", "Found", "find_engines", "hooks_of", "load_engines", "open_engine"]

REQUIRED = ("engine_describe", "engine_build_command", "engine_read_health")

_SPECS = tuple(name for name in vars(hookspecs) if name.startswith("engine_"))
# The numbers that every JSON reader keeps exact.
MAX_COUNT = 2**53

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """One engine's plugin. Whatever a hook does, the methods answer: None, LOADING or an empty list at worst.

    Only ``build_command`` can fail, with EngineFailed: there is no harmless command to start instead. ``folder`` is
    where the plugin's modules are, when no other program looks there.
    """

    def __init__(self, name: str, info: EngineInfo, hooks: pluggy.HookRelay, folder: str | None = None) -> None:
        self.name = name
        self.info = info
        self._hooks = hooks
        self._folder = folder
        self._reported: set[str] = set()
        self._faults: dict[str, str] = {}
        self.embedded = self._ask("engine_embedded", Embedded)

    def find_fault(self, hook: str) -> str | None:
        """What was wrong with this hook of the plugin when it was last asked, in words; None when it answered."""
        fault = self._faults.get(hook)
        return None if fault is None else f"{hook} of its plugin is at fault: {fault}"

    def validate(self, model: Model, profile: Profile, version: Version | None = None) -> list[Problem]:
        """What is wrong with the profile; the keys are relative to the profile (``args``) or the model (``source``).

        ``version`` is that of the binary that would run it, None where none is known.
        """
        found = self._ask("engine_validate", list, model=model, profile=profile, version=version) or []
        problems = [problem for problem in found if isinstance(problem, Problem)]
        rubbish = next((each for each in found if not isinstance(each, Problem)), None)
        if len(problems) < len(found):
            self._report("engine_validate", f"it returned a list with {type(rubbish).__name__} in it, not Problem")
        told = [*find_unable(self.info, model, profile), *problems]
        # What the plugin says of a source is closer to it.
        judged = {_part(problem) for problem in told}
        told += [problem for problem in find_untaken(self.info, model) if _part(problem) not in judged]
        return [replace(problem, message=_hide_queries(problem.message, model)) for problem in told]

    def check_gpus(self, profile: Profile) -> list[Problem]:
        """What is wrong with the GPUs that a profile asks for, where llmgw counts those of the nodes and chooses among
        them: what asks for none there gets none."""
        if self.info.cpu or profile.gpus:
            return []
        how = "write gpu_class: any (or a class as `llmgw ctl nodes` shows it)"
        message = f"{self.info.title} runs on GPUs alone, and this profile asks for none: {how}"
        return [Problem(key="gpu_class", message=message)]

    def build_command(self, launch: Launch) -> Command:
        """The command that starts one shard, the profile's own environment in it. EngineFailed when there is none."""
        command = self._ask("engine_build_command", Command, launch=launch)
        if command is None:
            fault = self.find_fault("engine_build_command") or "engine_build_command of its plugin returned None"
            raise EngineFailed(f"engine {self.name} built no command for {launch.served_name}: {fault}")
        return self._reachable(replace(command, env={**command.env, **launch.env}))

    def build_probe(self, program: tuple[str, ...]) -> tuple[Command, ...]:
        """The commands that print the version and the help, and end."""
        found: object = self._ask("engine_build_probe", Command | tuple, program=program)
        commands = found if isinstance(found, tuple) else () if found is None else (found,)
        sound = [self._check("engine_build_probe", command, Command) for command in commands]
        return tuple(self._reachable(command) for command in sound if command is not None)

    def build_request(self, model: Model, profile: Profile) -> RequestRules:
        """How bodies are edited for this engine; the defaults where the plugin does not say."""
        return self._ask("engine_build_request", RequestRules, model=model, profile=profile) or RequestRules()

    def name_parser(self, model: Model, profile: Profile) -> ParserFlag | None:
        """What makes the engine parse this model's tool calls, or None."""
        return self._ask("engine_name_parser", ParserFlag, model=model, profile=profile)

    def read_probe(self, outputs: Sequence[ProbeOutput]) -> Version | None:
        """The version, with the flags, that the probe's commands printed; None where there is none in them."""
        if not outputs:
            return None
        return self._ask("engine_read_probe", Version, output=outputs[0], outputs=tuple(outputs))

    def read_health(self, status: int | None, body: str) -> Health:
        """What an answer of the health path means; a status of None is a connection that is refused."""
        health = self._ask("engine_read_health", Health, status=status, body=body) or LOADING
        # Whatever a plugin says: nobody is sent to where nothing listens.
        return LOADING if status is None and health.state is HealthState.READY else health

    def read_log(self, line: str) -> LogFact | None:
        """What one line of the log tells, or None."""
        return self._ask("engine_read_log", LogFact, line=line)

    def read_exit(self, lines: Sequence[str], code: int | None, signal: int | None) -> Cause | None:
        """Why the engine ended, as its last lines and its exit tell; None where they don't.

        A plugin without the hook is helped out by what every engine's output may show (causes.py).
        """
        if not self._hooks.engine_read_exit.get_hookimpls():
            return diagnose(lines, code, signal)
        cause = self._ask("engine_read_exit", Cause, lines=tuple(lines), code=code, signal=signal)
        if cause is None or not cause.line.strip():
            return None
        # Shown in a table, and stored: one line each.
        remedy = " ".join(cause.remedy.split()) if cause.remedy else None
        return replace(cause, line=" ".join(cause.line.split()), remedy=remedy or None)

    def read_context(self, text: str) -> int | None:
        """How many tokens one request may have as the engine serves now, or None."""
        tokens = self._ask("engine_read_context", int, text=text)
        return tokens if tokens is not None and 0 < tokens <= MAX_COUNT else None

    def read_load(self, text: str) -> Load | None:
        """How busy the engine is, or None. What can't be so is left out: the server would refuse the whole report."""
        load = self._ask("engine_read_load", Load, text=text)
        return None if load is None else _possible(load)

    def _reachable(self, command: Command) -> Command:
        """The command, with the plugin's folder where Python looks if it runs what lies there: the embedded program, or
        a script that was installed along with it."""
        if self._folder is None:
            return command
        embedded = self.embedded is not None and command.argv[1:3] == ("-m", self.embedded.module)
        inside = os.path.join(self._folder, "")
        if not embedded and not any(str(program).startswith(inside) for program in command.argv[:1]):
            return command
        above = command.env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
        path = os.pathsep.join((self._folder, above)) if above else self._folder
        return replace(command, env={**command.env, "PYTHONPATH": path})

    def _ask(self, hook: str, kind: type[T] | UnionType, **facts: object) -> T | None:
        try:
            answer = getattr(self._hooks, hook)(**facts)
        # SystemExit too: whoever reads flags with an ArgumentParser raises it.
        except (Exception, SystemExit) as failed:
            self._report(hook, f"it raised {_one_line(failed)}", exc_info=True)
            return None
        self._faults.pop(hook, None)
        return None if answer is None else self._check(hook, answer, kind)

    def _check(self, hook: str, answer: object, kind: type[T] | UnionType) -> T | None:
        """The answer where it is of this kind, and sound."""
        if isinstance(answer, kind):
            fault = find_fault(answer)
            if fault is None:
                return answer
        else:
            fault = f"{type(answer).__name__}, not {getattr(kind, '__name__', str(kind))}"
        self._report(hook, f"it returned {fault}")
        return None

    def _report(self, hook: str, fault: str, *, exc_info: bool = False) -> None:
        self._faults[hook] = fault
        # Once for each hook: a reader that fails on one line fails on a million, and the log is for the operator.
        if hook not in self._reported:
            self._reported.add(hook)
            _log.warning("engine %s: %s of its plugin is ignored: %s", self.name, hook, fault, exc_info=exc_info)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The engines that can be used, by name, and why others can't. ``origins`` tells by name where each is from."""

    engines: Mapping[str, Engine]
    problems: tuple[Problem, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)


def load_engines(environ: Mapping[str, str] = os.environ) -> dict[str, Engine]:
    """Every usable engine by name; each that is left out is logged with its reason."""
    found = find_engines(environ)
    for problem in found.problems:
        _log.error("%s", problem)
    return dict(found.engines)


def find_engines(environ: Mapping[str, str] = os.environ) -> Found:
    """Every plugin that is installed or lies in the folder of LLMGW_PLUGINS, each opened alone, so that a broken one
    leaves the rest in place."""
    sources, troubles = find_sources(environ.get("LLMGW_PLUGINS"))
    problems = list(troubles)
    engines: dict[str, Engine] = {}
    taken: dict[str, Source] = {}
    for source in sources:
        earlier = taken.setdefault(source.name, source)
        if earlier is not source:
            # An editable install beside a wheel lists the same plugin twice, which harms nobody.
            if earlier.value != source.value:
                text = f"{source.title} is left out: {earlier.title} has that name already; take one of them away"
                problems.append(Problem(key=f"engine {source.name}", message=text))
            continue
        try:
            engines[source.name] = _load(source)
        except LlmgwError as failed:
            problems.append(Problem(key=f"engine {source.name}", message=failed.message))
    origins = {name: taken[name].origin for name in engines}
    return Found(engines=engines, problems=tuple(problems), origins=origins)


def open_engine(name: str, plugin: object, origin: str = "", folder: str | None = None) -> Engine:
    """One plugin as an Engine. LlmgwError says what in it can't be used, and ``origin``, where it comes from."""
    origin = origin or f"plugin {getattr(plugin, '__name__', type(plugin).__name__)}"
    hooks = hooks_of(name, plugin, origin)
    try:
        info = hooks.engine_describe()
    except (Exception, SystemExit) as failed:
        raise LlmgwError(f"{origin}: engine_describe raised {_one_line(failed)}") from failed
    if not isinstance(info, EngineInfo):
        raise LlmgwError(f"{origin}: engine_describe returned {type(info).__name__}, it has to be an EngineInfo")
    # Whoever asks an engine what it can do relies on these, and asks outside of any hook.
    wrong = find_wrong(info)
    if wrong:
        raise LlmgwError(f"{origin}: engine_describe returned an EngineInfo whose {', '.join(wrong)}")
    return Engine(name, info, hooks, folder)


def hooks_of(name: str, plugin: object, origin: str) -> pluggy.HookRelay:
    """The hooks of this plugin alone, every name and argument checked. LlmgwError names what does not fit."""
    # A manager for each: asking one engine then never asks another, and no hook has to begin with "is it me?".
    manager = pluggy.PluginManager("llmgw")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name)
        manager.check_pending()
        marked = {caller.name for caller in manager.get_hookcallers(plugin) or []}
        unmarked = [hook for hook in _SPECS if hook not in marked and inspect.isroutine(getattr(plugin, hook, None))]
    except pluggy.PluginValidationError as failed:
        raise LlmgwError(f"{origin}: {_one_line(failed)}; the hooks are listed in docs/engine-plugins.md") from failed
    # A module with a __getattr__ of its own, say: pluggy looks at whatever it has.
    except Exception as failed:
        raise LlmgwError(f"{origin}: its hooks can't be read: {_one_line(failed)}") from failed
    if unmarked:
        raise LlmgwError(f"{origin}: {unmarked[0]} is not marked with @hookimpl, so it would never be asked")
    missing = [hook for hook in REQUIRED if hook not in marked]
    if missing:
        raise LlmgwError(f"{origin}: {', '.join(missing)} missing; every engine needs {', '.join(REQUIRED)}")
    return manager.hook


def find_unable(info: EngineInfo, model: Model, profile: Profile) -> list[Problem]:
    """What the definition asks for and this engine can't do at all, so that nothing of it is passed over in silence."""
    title = info.title
    chats, out = model.task is Task.CHAT, "take it out"
    asked = (
        ("task", model.task not in info.tasks, f"{title} has no task {model.task}: it can {_listed(info.tasks)}"),
        ("mmproj", model.mmproj is not None and not info.projector, f"{title} takes no mmproj: take it out"),
        ("loras", bool(model.loras) and not info.loras, f"{title} takes no adapters: take loras out"),
        ("tp", profile.tp > 1 and not info.tensor_parallel, f"{title} has no tensor parallelism: take tp out"),
        ("pp", profile.pp > 1 and not info.pipeline_parallel, f"{title} has no pipeline parallelism: take pp out"),
        ("nodes", profile.nodes > 1 and not info.span_nodes, f"{title} can't span several nodes: take nodes out"),
        (
            "tool_parser",
            profile.tool_parser is not None and not info.tool_parser,
            f"{title} has no choice of tool parsers, it goes by the model's chat template: take tool_parser out",
        ),
        (
            "reasoning_parser",
            profile.reasoning_parser is not None and not info.reasoning_parser,
            f"{title} has no choice of reasoning parsers: take reasoning_parser out",
        ),
        *(
            (key, not chats and can and parser is not None, f"{key} is for chats, and the task is {model.task}: {out}")
            for key, can, parser in (
                ("tool_parser", info.tool_parser, profile.tool_parser),
                ("reasoning_parser", info.reasoning_parser, profile.reasoning_parser),
            )
        ),
    )
    return [Problem(key=key, message=message) for key, unable, message in asked if unable]


def _hide_queries(text: str, model: Model) -> str:
    """A message without what may open the addresses that the model is made of."""
    for source in list_sources(model):
        if "://" in source:
            text = text.replace(source, source.partition("?")[0])
    return text


def _part(problem: Problem) -> str:
    """Of ``loras[1].source`` the first word."""
    return problem.key.partition("[")[0]


def _possible(load: Load) -> Load:
    def count(value: int | None) -> int | None:
        return value if isinstance(value, int) and 0 <= value <= MAX_COUNT else None

    used = load.cache_used
    return Load(
        running=count(load.running),
        waiting=count(load.waiting),
        cache_used=used if isinstance(used, int | float) and 0 <= used <= 1 else None,
        prompt_tokens=count(load.prompt_tokens),
        cached_tokens=count(load.cached_tokens),
        steps=count(load.steps),
    )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words)) or "none"


def _load(source: Source) -> Engine:
    try:
        plugin = source.load()
    # SystemExit too: a module that ends the interpreter while it is imported would end llmgw.
    except (Exception, SystemExit) as failed:
        raise LlmgwError(f"{source.title} can't be imported: {_one_line(failed)}") from failed
    return open_engine(source.name, plugin, source.title, source.folder)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
