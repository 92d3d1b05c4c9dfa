"""engine-check: the flags that llmgw and a profile would pass, against those that the binary knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum

from llmgw.core.model import Model, ModelName, Profile, Task
from llmgw.engines.flags import Given, find_meant, keep_whole, split_args
from llmgw.engines.registry import Engine
from llmgw.engines.releases import order_release
from llmgw.engines.types import EngineInfo, Flag, FlagChange, FlagStyle, Launch, SourceKind, Takes, Version

__all__ = ["FlagFinding", "FlagState", "check_launch", "launch_of", "sample_model"]

SHOWN_CHOICES = 12

# Whoever reads numbers as C does takes the beginning of "8k" and "1.5" for one.
_NUMBER = re.compile(r"\s*[+-]?\.?[0-9]")


class FlagState(StrEnum):
    """What the binary says of a flag. UNCHECKED: its help was not read, or has no list of flags."""

    OK = "ok"
    DEPRECATED = "deprecated"
    RENAMED = "renamed"
    REMOVED = "removed"
    UNKNOWN = "unknown"
    WRONG_VALUE = "wrong_value"
    UNCHECKED = "unchecked"


BREAKING = frozenset({FlagState.RENAMED, FlagState.REMOVED, FlagState.UNKNOWN, FlagState.WRONG_VALUE})


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagFinding:
    """One flag of a command line: ``given_by`` is "llmgw" or "profile"; ``detail`` says what to write instead."""

    flag: str
    given_by: str
    state: FlagState
    detail: str | None = None

    @property
    def breaks(self) -> bool:
        """Whether an engine that is started with it ends at once."""
        return self.state in BREAKING


def sample_model(engine: Engine) -> tuple[Model, Profile]:
    """An ordinary model of this engine, for a check that nobody gave a profile for."""
    info = engine.info
    by_file = SourceKind.FILE in info.sources
    source = f"/srv/models/sample{info.file_suffixes[0] if info.file_suffixes else ''}" if by_file else "org/sample"
    task = Task.CHAT if Task.CHAT in info.tasks else min(info.tasks, default=Task.CHAT)
    profile = Profile(name="sample", engine=engine.name)
    model = Model(name=ModelName("sample"), source=source, task=task, context_length=4096, profiles=(profile,))
    return model, profile


def launch_of(
    model: Model,
    profile: Profile,
    program: tuple[str, ...],
    version: Version | None,
    *,
    gpus: tuple[int, ...] | None = None,
) -> Launch:
    """What an agent would launch for this profile on one node: on some port, and a share of the node's cores."""
    return Launch(
        program=program,
        source=model.source,
        served_name=model.name,
        host="127.0.0.1",
        port=18000,
        version=version,
        gpus=gpus,
        tp=profile.tp,
        pp=profile.pp,
        task=model.task,
        context_length=model.context_length,
        max_output=model.max_output,
        mmproj=model.mmproj,
        loras=model.loras,
        tool_parser=profile.tool_parser,
        reasoning_parser=profile.reasoning_parser,
        threads=4,
        env=profile.env,
        args=profile.args,
    )


def check_launch(engine: Engine, launch: Launch) -> tuple[FlagFinding, ...]:
    """Each flag of the command that this launch makes, once, those of llmgw first. EngineFailed when there is none."""
    words = _words(engine, launch)
    style = engine.info.flag_style
    # What keys of the profile ask for is the profile's as much as its args are.
    plain = replace(launch, tool_parser=None, reasoning_parser=None, args=())
    ours = {each.name for each in split_args(_words(engine, plain), style)}
    # A profile's args come last and untouched: what they begin with is no value of the flag before them.
    own = len(words) - len(launch.args)
    before, behind = split_args(words[:own], style), split_args(words[own:], style)
    given = (*before, *behind)
    findings = []
    for at, each in enumerate(given):
        state, detail = _judge(each, given, engine.info, launch.version)
        given_by = "profile" if at >= len(before) or each.name not in ours else "llmgw"
        findings.append(FlagFinding(flag=each.name, given_by=given_by, state=state, detail=detail))
    unread = launch.version is None or not launch.version.flags
    state = FlagState.UNCHECKED if unread else FlagState.UNKNOWN
    detail = None if unread else "it is no flag, and the value of none"
    for word in words[own : len(words) - sum(len(each.words) for each in behind)]:
        findings.append(FlagFinding(flag=word, given_by="profile", state=state, detail=detail))
    return tuple(dict.fromkeys(findings))


def _words(engine: Engine, launch: Launch) -> tuple[str, ...]:
    """What follows the program."""
    words = engine.build_command(launch).argv[len(launch.program) :]
    # What an interpreter is told to run is no flag of the engine.
    if words[:1] == ("-m",) and "".join(launch.program[-1:]).rpartition("/")[2].startswith("python"):
        words = words[2:]
    return words


def _judge(
    given: Given, beside: Sequence[Given], info: EngineInfo, version: Version | None
) -> tuple[FlagState, str | None]:
    if version is None or not version.flags:
        return _judge_by_number(given, info, version)
    known = _find(given.name, info, version)
    if known is not None:
        return _judge_known(given, beside, known, info, version)
    return (
        _find_joined(given, beside, info, version)
        or _find_renamed(given.name, info, version)
        or _find_gone(given.name, info, version)
        or _find_abbreviated(given, beside, info, version)
        or (FlagState.UNKNOWN, _suggest(given.name, version))
    )


def _judge_by_number(given: Given, info: EngineInfo, version: Version | None) -> tuple[FlagState, str | None]:
    """What the history of the engine tells where its help could not be read."""
    change = _change(given.name, info)
    if version is not None and change is not None and order_release(change.gone_in) <= order_release(version.number):
        return _gone(change)
    return FlagState.UNCHECKED, None


def _judge_known(
    given: Given, beside: Sequence[Given], known: Flag, info: EngineInfo, version: Version
) -> tuple[FlagState, str | None]:
    if known.removed is not None:
        return _find_renamed(given.name, info, version) or (FlagState.REMOVED, known.removed)
    wrong = _find_wrong_value(given, beside, known, keep_whole(info.flag_style, version))
    if wrong is not None:
        return FlagState.WRONG_VALUE, wrong
    if known.deprecated is not None:
        return FlagState.DEPRECATED, known.deprecated
    return FlagState.OK, None


def _find(name: str, info: EngineInfo, version: Version) -> Flag | None:
    """The flag of this name, however the help spells it."""
    if (exact := version.find(name)) is not None or not info.flag_style.underscores:
        return exact
    return next((flag for flag in version.flags for each in flag.names if each.replace("_", "-") == name), None)


def _find_wrong_value(given: Given, beside: Sequence[Given], known: Flag, style: FlagStyle) -> str | None:
    values = given.values
    if given.key is not None:
        return None if known.takes is not Takes.NONE else f"it takes no value, so {given.name}.{given.key} can't be set"
    if known.takes is Takes.NONE and values:
        return f"it takes no value, and {values[0]!r} is given"
    if known.takes in (Takes.ONE, Takes.MANY) and not values:
        choices = _choices(known)
        return f"it needs a value{f': {choices}' if choices else ''}"
    if known.takes in (Takes.ONE, Takes.MAYBE) and len(values) > 1:
        return f"it takes one value, and {values[1]!r} is given besides"
    wider = (known.widened_by,) if known.widened_by is not None else ()
    if any(find_meant(each.name, style, wider) is not None for each in beside):
        return None
    if known.number and values and not _NUMBER.match(values[0]):
        return f"it needs a number, and {values[0]!r} is none"
    wrong = next((value for value in values if known.choices and value not in known.choices), None)
    if wrong is None:
        return None
    close = get_close_matches(wrong, known.choices, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{wrong!r} is none of {_choices(known)}{hint}"


def _choices(known: Flag) -> str:
    listed = sorted(known.choices)
    more = f" and {len(listed) - SHOWN_CHOICES} more" if len(listed) > SHOWN_CHOICES else ""
    return ", ".join(listed[:SHOWN_CHOICES]) + more


def _find_joined(
    given: Given, beside: Sequence[Given], info: EngineInfo, version: Version
) -> tuple[FlagState, str | None] | None:
    """``-n2`` is ``-n 2`` to who takes abbreviations, as argparse does."""
    known = version.find(given.name[:2]) if info.flag_style.abbreviations and given.name[1:2] != "-" else None
    if known is None or known.takes is Takes.NONE:
        return None
    meant = replace(given, name=given.name[:2], values=(given.name[2:], *given.values))
    return _judge_known(meant, beside, known, info, version)


def _find_renamed(name: str, info: EngineInfo, version: Version) -> tuple[FlagState, str | None] | None:
    """Another name of the same flag that this binary knows: a newer one, or an older where the binary is old."""
    newer = {change.flag: change.instead for change in info.flag_changes if change.instead is not None}
    later = _follow(name, lambda each: [newer[each]] if each in newer else [])
    earlier = _follow(name, lambda each: [old for old, new in newer.items() if new == each])
    known = [other for other in later if _takes_up(other, info, version) is not None][:1]
    if not known:
        flags = {flag.names: other for other in earlier[::-1] if (flag := _takes_up(other, info, version)) is not None}
        known = sorted(flags.values())
    if len(known) > 1:
        # Several that became one: each did a part of it, and which of them is meant nobody knows.
        return FlagState.RENAMED, f"this release has several in its place: {', '.join(known[:SHOWN_CHOICES])}"
    return (FlagState.RENAMED, f"this release calls it {known[0]}") if known else None


def _follow(name: str, step: Callable[[str], list[str]]) -> list[str]:
    """The names that one leads to: a flag may have been renamed more than once."""
    names = [name]
    for each in names:
        names += [other for other in step(each) if other not in names]
    return names[1:]


def _takes_up(other: str, info: EngineInfo, version: Version) -> Flag | None:
    found = version.find(other.partition(".")[0] if info.flag_style.dotted else other)
    return found if found is not None and found.removed is None else None


def _find_abbreviated(
    given: Given, beside: Sequence[Given], info: EngineInfo, version: Version
) -> tuple[FlagState, str | None] | None:
    if not info.flag_style.abbreviations:
        return None
    fits = sorted({each for flag in version.flags for each in flag.names if each.startswith(given.name)})
    known = version.find(fits[0]) if len(fits) == 1 else None
    if known is not None:
        state, detail = _judge_known(replace(given, name=fits[0]), beside, known, info, version)
        if state in BREAKING:
            return state, f"short for {fits[0]}: {detail}"
        return FlagState.DEPRECATED, f"short for {fits[0]}, which another release may not take for it: write the whole"
    return (FlagState.UNKNOWN, f"could be any of {', '.join(fits[:SHOWN_CHOICES])}") if fits else None


def _find_gone(name: str, info: EngineInfo, version: Version) -> tuple[FlagState, str | None] | None:
    change = _change(name, info)
    if change is None:
        return None
    # A packager may count in another way than the engine does: 0.1.0 is no release before b10068.
    alike = ("." in version.number) == ("." in change.gone_in)
    number = order_release(version.number) if alike else ()
    # A release that is older never had it: the flag has come and gone since.
    return None if number and number < order_release(change.gone_in) else _gone(change)


def _gone(change: FlagChange) -> tuple[FlagState, str | None]:
    if change.instead is None:
        return FlagState.REMOVED, f"gone since {change.gone_in}: take it out"
    return FlagState.RENAMED, f"gone since {change.gone_in}: it is {change.instead} now"


def _change(name: str, info: EngineInfo) -> FlagChange | None:
    return next((change for change in info.flag_changes if change.flag == name), None)


def _suggest(name: str, version: Version) -> str | None:
    close = get_close_matches(name, [each for flag in version.flags for each in flag.names], n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else None
