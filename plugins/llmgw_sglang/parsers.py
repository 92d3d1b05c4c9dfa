"""Parsers of tool calls and of reasoning: which one fits a model by its name, and which ones a binary has."""

from __future__ import annotations

from llmgw.engines import Model, ParserFlag, Problem, Profile, Version, check_parsers, name_tool_parser
from llmgw_sglang.flags import STYLE

TOOL_FLAG = "--tool-call-parser"
FLAGS = {"tool_parser": TOOL_FLAG, "reasoning_parser": "--reasoning-parser"}

# The first that fits counts. The parsers are those of 0.5.23; what they are for is said by SGLang's own documentation,
# by its table of parsers, and by the models' cards.
FITTING: tuple[tuple[str, str | None], ...] = (
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


def name(model: Model, profile: Profile) -> ParserFlag | None:
    """The flag for tool calls, what is given for it, and what fits by the model's source or name."""
    return name_tool_parser(model, profile, STYLE, TOOL_FLAG, FITTING)


def check(profile: Profile, version: Version | None) -> list[Problem]:
    """A parser that is given twice, or that the binary does not have."""
    return check_parsers(profile, version, STYLE, FLAGS)
