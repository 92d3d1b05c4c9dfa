"""Parsers of tool calls and of reasoning: which one fits a model by its name, and which ones a binary has."""

from __future__ import annotations

import re
from difflib import get_close_matches

from llmgw.engines import Model, ParserFlag, Problem, Profile, Task, Version
from llmgw_sglang.flags import is_given, value_of

TOOL_FLAG = "--tool-call-parser"
REASONING_FLAG = "--reasoning-parser"

# The first that fits counts. The parsers are those of 0.5.23; what they are for is said by SGLang's own documentation,
# by its table of parsers, and by the models' cards.
_FITTING = (
    (r"distill", None),
    (r"deepseek-?v4\.1", "deepseekv41"),
    (r"deepseek-?v4", "deepseekv4"),
    (r"deepseek-?v3\.2", "deepseekv32"),
    (r"deepseek-?v3\.1", "deepseekv31"),
    (r"deepseek-?(v3|r1-0528)", "deepseekv3"),
    (r"qwen-?3-coder|qwen-?3\.[5-9]", "qwen3_coder"),
    (r"hermes", "hermes"),
    (r"qwen-?(2\.5|3)|qwq", "qwen"),
    (r"llama-?4", "pythonic"),
    (r"llama-?3\.[1-3]", "llama3"),
    (r"mistral|mixtral|ministral|magistral|devstral", "mistral"),
    (r"gpt-oss", "gpt-oss"),
    (r"glm-?(4\.7|5)", "glm47"),
    (r"glm-?4\.[56]", "glm45"),
    (r"kimi-?k3", "kimi_k3"),
    (r"kimi-?k2", "kimi_k2"),
    (r"minimax-?m3", "minimax-m3"),
    (r"minimax-?m2", "minimax-m2"),
    (r"minicpm-?5", "minicpm5"),
    (r"mimo", "mimo"),
    (r"gemma-?4", "gemma4"),
    (r"hunyuan", "hunyuan"),
    (r"step-?3\.5", "step3p5"),
    (r"step-?3", "step3"),
    (r"intern-?s1", "interns1"),
    (r"gigachat-?3\.5", "gigachat35"),
    (r"gigachat-?3", "gigachat3"),
    (r"trinity", "trinity"),
    (r"ling-?3", "ling3"),
    (r"lfm-?2", "lfm2"),
    (r"apertus", "apertus2509"),
)
FITTING = tuple((re.compile(pattern), parser) for pattern, parser in _FITTING)


def name(model: Model, profile: Profile) -> ParserFlag | None:
    """The flag for tool calls, what is given for it, and what fits by the model's source or name."""
    if model.task is not Task.CHAT:
        return None
    given = profile.tool_parser or value_of(profile.args, TOOL_FLAG) or None
    return ParserFlag(flag=TOOL_FLAG, given=given, suggested=_suggest(model.source) or _suggest(model.name))


def check(profile: Profile, version: Version | None) -> list[Problem]:
    """A parser that is given twice, or that the binary does not have; of one that isn't known nothing is said."""
    problems = []
    for key, given, flag in (
        ("tool_parser", profile.tool_parser, TOOL_FLAG),
        ("reasoning_parser", profile.reasoning_parser, REASONING_FLAG),
    ):
        if given is not None and is_given(profile.args, flag):
            problems.append(Problem(key="args", message=f"{flag} is not for args: the profile has {key} {given}"))
        chosen, where = (given, key) if given is not None else (value_of(profile.args, flag), "args")
        known = version.find(flag) if version is not None else None
        if chosen and known is not None and known.choices and chosen not in known.choices:
            problems.append(Problem(key=where, message=_refuse(chosen, flag, known.choices)))
    return problems


def _refuse(chosen: str, flag: str, choices: frozenset[str]) -> str:
    close = get_close_matches(chosen, sorted(choices), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(choices))}"
    return f"this SGLang has no parser {chosen!r} for {flag}: {hint}"


def _suggest(text: str) -> str | None:
    text = re.sub(r"[\s_]+", "-", text.lower()[:400])
    return next((parser for pattern, parser in FITTING if pattern.search(text)), None)
