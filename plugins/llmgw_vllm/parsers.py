"""Parsers of tool calls and of reasoning: which one fits a model by its name, and which ones a binary has."""

from __future__ import annotations

from dataclasses import replace

from llmgw.engines import Model, ParserFlag, Problem, Profile, Version, check_parsers, name_tool_parser
from llmgw_vllm.flags import STYLE

TOOL_FLAG = "--tool-call-parser"
FLAGS = {"tool_parser": TOOL_FLAG, "reasoning_parser": "--reasoning-parser"}

# The first that fits counts. The parsers are those of 0.32; what they are for is said by vLLM's own documentation and
# by the models' cards.
FITTING: tuple[tuple[str, str | None], ...] = (
    (r"distill", None),
    (r"deepseek-?v4\.1", "deepseek_v41"),
    (r"deepseek-?v4", "deepseek_v4"),
    (r"deepseek-?v3\.2", "deepseek_v32"),
    (r"deepseek-?v3\.1", "deepseek_v31"),
    (r"deepseek-?(v3|r1-0528)", "deepseek_v3"),
    (r"qwen-?3-coder|qwen-?3\.[5-9]", "qwen3_coder"),
    (r"hermes|qwen-?(2\.5|3)|qwq|smollm-?3", "hermes"),
    (r"llama-?4", "llama4_pythonic"),
    (r"llama-?3\.[1-3]", "llama3_json"),
    (r"mistral|mixtral|ministral|magistral|devstral", "mistral"),
    (r"gpt-oss", "openai"),
    (r"glm-?(4\.7|5)", "glm47"),
    (r"glm-?4\.[56]", "glm45"),
    (r"kimi-?k3", "kimi_k3"),
    (r"kimi-?k2", "kimi_k2"),
    (r"minimax-?m3", "minimax_m3"),
    (r"minimax-?m2", "minimax_m2"),
    (r"granite-?20b-functioncalling", "granite-20b-fc"),
    (r"granite-?4", "granite4"),
    (r"granite-?3", "granite"),
    (r"internlm-?2", "internlm"),
    (r"jamba", "jamba"),
    (r"phi-?4-mini", "phi4_mini_json"),
    (r"functiongemma", "functiongemma"),
    (r"gemma-?4", "gemma4"),
    (r"hunyuan-?a13b", "hunyuan_a13b"),
    (r"xlam", "xlam"),
    (r"olmo-?3", "olmo3"),
    (r"seed-oss", "seed_oss"),
    (r"step-?3\.5", "step3p5"),
    (r"step-?3", "step3"),
    (r"ernie-?4\.5", "ernie45"),
    (r"longcat", "longcat"),
    (r"lfm-?2", "lfm2"),
    (r"apertus", "apertus"),
)


def name(model: Model, profile: Profile) -> ParserFlag | None:
    """The flag for tool calls, what is given for it, and what fits by the model's source or name."""
    named = name_tool_parser(model, profile, STYLE, TOOL_FLAG, FITTING)
    return replace(named, beside="--enable-auto-tool-choice") if named is not None else None


def check(profile: Profile, version: Version | None) -> list[Problem]:
    """A parser that is given twice, or that the binary does not have."""
    return check_parsers(profile, version, STYLE, FLAGS)
