"""Whether what a plugin answers is what it has to be, down to its parts: what is not would raise later, every time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from types import UnionType

from llmgw.core.model import Task
from llmgw.engines.types import (
    Cause,
    CauseKind,
    Command,
    Embedded,
    EngineInfo,
    Flag,
    FlagChange,
    FlagStyle,
    Health,
    HealthState,
    LogFact,
    ParserFlag,
    RequestRules,
    SourceKind,
    Version,
)

__all__ = ["find_fault", "find_wrong"]

# More than anybody waits for, and what every clock can take.
MAX_SECONDS = 1e6

_KINDS: tuple[tuple[str, type | UnionType], ...] = (
    *((name, str) for name in ("title", "default_binary", "health_path", "stop_signal")),
    *((name, str | None) for name in ("load_path", "context_path", "owned_by")),
    *((name, Set) for name in ("sources", "api_paths", "tasks")),
    *((name, tuple) for name in ("file_suffixes", "flag_changes")),
    *((name, int | float) for name in ("stop_grace_seconds", "probe_seconds")),
    ("flag_style", FlagStyle),
)
_ELEMENTS: tuple[tuple[str, type], ...] = (
    ("sources", SourceKind),
    ("api_paths", str),
    ("tasks", Task),
    ("file_suffixes", str),
    ("flag_changes", FlagChange),
)


def find_wrong(info: EngineInfo) -> list[str]:
    """What is wrong in a description, a few words each; its parts are looked at once they are of the right kinds."""
    wrong = [
        f"{name} is {type(fact).__name__}" for name, kind in _KINDS if not isinstance(fact := getattr(info, name), kind)
    ]
    return wrong or list(dict.fromkeys(_find_wrong_parts(info)))


def _find_wrong_parts(info: EngineInfo) -> list[str]:
    wrong = [
        f"{name} has {type(part).__name__} in it, not {kind.__name__}"
        for name, kind in _ELEMENTS
        for part in getattr(info, name)
        if not isinstance(part, kind)
    ]
    # (no comparison holds for a NaN)
    wrong += [
        f"{name} is {seconds}"
        for name in ("stop_grace_seconds", "probe_seconds")
        if not 0 <= (seconds := getattr(info, name)) <= MAX_SECONDS
    ]
    return wrong + [f"flag_changes has {fault}" for change in info.flag_changes if (fault := find_fault(change))]


def find_fault(answer: object) -> str | None:
    """What is wrong in an answer of one of the types below; None of one that is sound, or of another type."""
    wrong = [
        f"{name} is not {words}"
        for name, fits, words in _PARTS.get(type(answer), ())
        if not fits(getattr(answer, name))
    ]
    name = type(answer).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name} whose {', and '.join(wrong)}" if wrong else None


def _is(kind: type | UnionType) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def _is_words(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(word, str) for word in value)


def _is_flags(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(flag, Flag) and _is_words(flag.names) for flag in value)


def _is_environment(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(word, str) for pair in value.items() for word in pair)


_Part = tuple[str, Callable[[object], bool], str]


def _text(name: str) -> _Part:
    return name, _is(str), "text"


def _text_or_none(name: str) -> _Part:
    return name, _is(str | None), "text or None"


_PARTS: Mapping[type, tuple[_Part, ...]] = {
    Command: (
        ("argv", lambda value: _is_words(value) and bool(value), "a tuple of text that begins with the program"),
        ("env", _is_environment, "a mapping of text"),
        ("defaults", _is_environment, "a mapping of text"),
        ("scrub", _is_words, "a tuple of text"),
        _text_or_none("cwd"),
        ("serves", _is(bool), "true or false"),
    ),
    Version: (_text("number"), ("flags", _is_flags, "a tuple of Flag")),
    Embedded: (_text("module"), _text("requires"), _text("install")),
    FlagChange: (_text("flag"), _text("gone_in"), _text_or_none("instead")),
    Health: (("state", _is(HealthState), "a HealthState"), _text_or_none("reason")),
    LogFact: (_text("progress"),),
    Cause: (("kind", _is(CauseKind), "a CauseKind"), _text("line"), _text_or_none("remedy")),
    ParserFlag: (_text("flag"), _text_or_none("given"), _text_or_none("suggested"), _text_or_none("beside")),
    RequestRules: (("loras", _is(Mapping), "a mapping"), ("base", _is(Mapping), "a mapping")),
}
