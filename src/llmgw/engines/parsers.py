"""Parsers of tool calls and of reasoning, for engines that have a list of them and a flag for each kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from llmgw.core.model import Model, Profile, Task
from llmgw.engines.flags import is_given, keep_whole, value_of
from llmgw.engines.types import FlagStyle, ParserFlag, Version
from llmgw.errors import Problem

__all__ = ["check_parsers", "name_tool_parser"]

_LONGEST = 400


def check_parsers(
    profile: Profile, version: Version | None, style: FlagStyle, flags: Mapping[str, str]
) -> list[Problem]:
    """A parser that is given twice, or that the binary does not have; of one that isn't known nothing is said.

    ``flags`` are the engine's, by the profile's keys (``tool_parser``, ``reasoning_parser``).
    """
    problems = []
    style = keep_whole(style, version)
    for key, flag in flags.items():
        given: str | None = getattr(profile, key)
        if given is not None and is_given(profile.args, style, flag):
            problems.append(Problem(key="args", message=f"{flag} is not for args: the profile has {key} {given}"))
        chosen, where = (given, key) if given is not None else (value_of(profile.args, style, flag), "args")
        known = version.find(flag) if version is not None else None
        if not chosen or known is None or not known.choices or chosen in known.choices:
            continue
        # What the operator brings along has names that no help lists.
        if known.widened_by is None or not is_given(profile.args, style, known.widened_by):
            problems.append(Problem(key=where, message=_refuse(chosen, flag, known.choices)))
    return problems


def name_tool_parser(
    model: Model, profile: Profile, style: FlagStyle, flag: str, fitting: Iterable[tuple[str, str | None]]
) -> ParserFlag | None:
    """The flag for tool calls, what is given for it, and what fits by the model's source or name; None but for chats.

    ``fitting``: patterns of names, in small letters with "-" for "_" and spaces, each with its parser, None where it
    is known that none fits. The first that is found counts.
    """
    if model.task is not Task.CHAT:
        return None
    given = profile.tool_parser or value_of(profile.args, style, flag) or None
    rules = tuple(fitting)
    return ParserFlag(flag=flag, given=given, suggested=_suggest(model.source, rules) or _suggest(model.name, rules))


def _refuse(chosen: str, flag: str, choices: frozenset[str]) -> str:
    close = get_close_matches(chosen, sorted(choices), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(choices))}"
    return f"this release has no parser {chosen!r} for {flag}: {hint}"


def _suggest(text: str, fitting: Sequence[tuple[str, str | None]]) -> str | None:
    text = re.sub(r"[\s_]+", "-", text.lower()[:_LONGEST])
    return next((parser for pattern, parser in fitting if re.search(pattern, text)), None)
