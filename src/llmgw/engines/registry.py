"""Finds the installed engine plugins and wraps each one as an Engine.

A plugin is a stranger's code: one that is broken is left out by name and takes nobody down with it, and one that
raises while it reads a line of a log costs that line and nothing else.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

import pluggy

from llmgw.core.model import Model, Profile
from llmgw.engines import hookspecs
from llmgw.engines.types import (
    LOADING,
    Command,
    Embedded,
    EngineInfo,
    Health,
    Launch,
    Load,
    LogFact,
    ProbeOutput,
    RequestRules,
    Version,
)
from llmgw.errors import EngineFailed, LlmgwError, Problem

__all__ = ["GROUP", "REQUIRED", "Engine", "Found", "find_engines", "hooks_of", "load_engines", "open_engine"]

GROUP = "llmgw.engines"
REQUIRED = ("engine_describe", "engine_build_command", "engine_read_health")

_SPECS = tuple(name for name in vars(hookspecs) if name.startswith("engine_"))
_log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """One engine's plugin. Whatever a hook does, the methods answer: None, LOADING or an empty list at worst.

    Only ``build_command`` can fail, with EngineFailed: there is no harmless command to start instead.
    """

    def __init__(self, name: str, info: EngineInfo, hooks: pluggy.HookRelay) -> None:
        self.name = name
        self.info = info
        self._hooks = hooks
        self._reported: set[str] = set()
        self.embedded = self._ask("engine_embedded", Embedded)

    def validate(self, model: Model, profile: Profile) -> list[Problem]:
        """What is wrong with the profile; the keys are relative to the profile (``args``) or the model (``source``)."""
        found = self._ask("engine_validate", list, model=model, profile=profile) or []
        return [problem for problem in found if isinstance(problem, Problem)]

    def build_command(self, launch: Launch) -> Command:
        """The command that starts one shard. EngineFailed when the plugin has none."""
        command = self._ask("engine_build_command", Command, launch=launch)
        if command is None:
            text = f"the plugin of engine {self.name} built no command for {launch.served_name}: the log says why"
            raise EngineFailed(text)
        return command

    def build_probe(self, program: tuple[str, ...]) -> Command | None:
        """The command that prints the version and ends, or None."""
        return self._ask("engine_build_probe", Command, program=program)

    def build_request(self, profile: Profile) -> RequestRules:
        """How bodies are edited for this engine; the defaults where the plugin does not say."""
        return self._ask("engine_build_request", RequestRules, profile=profile) or RequestRules()

    def read_probe(self, output: ProbeOutput) -> Version | None:
        """The version that a probe printed, or None."""
        return self._ask("engine_read_probe", Version, output=output)

    def read_health(self, status: int, body: str) -> Health:
        """What an HTTP answer of the health path means. A refused connection is the caller's to judge."""
        return self._ask("engine_read_health", Health, status=status, body=body) or LOADING

    def read_log(self, line: str) -> LogFact | None:
        """What one line of the log tells, or None."""
        return self._ask("engine_read_log", LogFact, line=line)

    def read_load(self, text: str) -> Load | None:
        """How busy the engine is, or None."""
        return self._ask("engine_read_load", Load, text=text)

    def _ask(self, hook: str, kind: type[T], **facts: object) -> T | None:
        try:
            answer = getattr(self._hooks, hook)(**facts)
        except Exception:
            self._report(hook, "it raised", exc_info=True)
            return None
        if answer is None or isinstance(answer, kind):
            return answer
        self._report(hook, f"it returned {type(answer).__name__}, not {kind.__name__}", exc_info=False)
        return None

    def _report(self, hook: str, fault: str, *, exc_info: bool) -> None:
        # Once for each hook: a reader that fails on one line fails on a million, and the log is for the operator.
        if hook not in self._reported:
            self._reported.add(hook)
            _log.warning("engine %s: %s of its plugin is ignored: %s", self.name, hook, fault, exc_info=exc_info)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The engines that can be used, by name, and why others can't."""

    engines: Mapping[str, Engine]
    problems: tuple[Problem, ...] = ()


def load_engines() -> dict[str, Engine]:
    """Every usable engine by name; each that is left out is logged with its reason."""
    found = find_engines()
    for problem in found.problems:
        _log.error("%s", problem)
    return dict(found.engines)


def find_engines() -> Found:
    """Every installed plugin, each opened alone, so that a broken one leaves the rest in place."""
    engines: dict[str, Engine] = {}
    origins: dict[str, EntryPoint] = {}
    problems = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        earlier = origins.setdefault(point.name, point)
        if earlier is not point:
            # An editable install beside a wheel lists the same plugin twice, which harms nobody.
            if earlier.value != point.value:
                text = f"{_origin(point)} is left out: {_origin(earlier)} has that name already; uninstall one of them"
                problems.append(Problem(key=f"engine {point.name}", message=text))
            continue
        try:
            engines[point.name] = _load(point)
        except LlmgwError as failed:
            problems.append(Problem(key=f"engine {point.name}", message=failed.message))
    return Found(engines=engines, problems=tuple(problems))


def open_engine(name: str, plugin: object, origin: str = "") -> Engine:
    """One plugin as an Engine. LlmgwError says what in it can't be used, and ``origin``, where it comes from."""
    origin = origin or f"plugin {getattr(plugin, '__name__', type(plugin).__name__)}"
    hooks = hooks_of(name, plugin, origin)
    try:
        info = hooks.engine_describe()
    except Exception as failed:
        raise LlmgwError(f"{origin}: engine_describe raised {_one_line(failed)}") from failed
    if not isinstance(info, EngineInfo):
        raise LlmgwError(f"{origin}: engine_describe returned {type(info).__name__}, it has to be an EngineInfo")
    return Engine(name, info, hooks)


def hooks_of(name: str, plugin: object, origin: str) -> pluggy.HookRelay:
    """The hooks of this plugin alone, every name and argument checked. LlmgwError names what does not fit."""
    # A manager for each: asking one engine then never asks another, and no hook has to begin with "is it me?".
    manager = pluggy.PluginManager("llmgw")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as failed:
        raise LlmgwError(f"{origin}: {_one_line(failed)}; the hooks are listed in docs/engine-plugins.md") from failed
    marked = {caller.name for caller in manager.get_hookcallers(plugin) or []}
    for hook in _SPECS:
        if hook not in marked and inspect.isroutine(getattr(plugin, hook, None)):
            raise LlmgwError(f"{origin}: {hook} is not marked with @hookimpl, so it would never be asked")
    missing = [hook for hook in REQUIRED if hook not in marked]
    if missing:
        raise LlmgwError(f"{origin}: {', '.join(missing)} missing; every engine needs {', '.join(REQUIRED)}")
    return manager.hook


def _load(point: EntryPoint) -> Engine:
    origin = _origin(point)
    try:
        plugin = point.load()
    # SystemExit too: a module that ends the interpreter while it is imported would end llmgw.
    except (Exception, SystemExit) as failed:
        raise LlmgwError(f"{origin} can't be imported: {_one_line(failed)}") from failed
    return open_engine(point.name, plugin, origin)


def _origin(point: EntryPoint) -> str:
    place = f" of distribution {point.dist.name} {point.dist.version}" if point.dist else ""
    return f"plugin {point.value}{place}"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
