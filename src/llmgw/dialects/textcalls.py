"""Whether a text holds a tool call that a model wrote and no parser took, and in which of the known notations."""

from __future__ import annotations

import re

# Nobody writes a call behind this much text, and the search stays quick whatever comes.
MAX_TEXT = 64 * 1024
# Between the name of the tool and what has to stand near it.
_NEAR = r"[^\0]{0,400}?"


def find_call(text: str, tool: str) -> str | None:
    """The notation in which ``text`` calls ``tool``, as a person would name it; None when it does not."""
    text = text[:MAX_TEXT]
    name = re.escape(tool)
    # Most texts are no call, and a call has the tool's name.
    if tool not in text:
        return None
    for notation, pattern in _NOTATIONS:
        if re.search(pattern.replace("NAME", name), text):
            return notation
    return None


# The first that fits names it: the particular before the general, for what stands inside a mark is often JSON.
_NOTATIONS = (
    ("DSML (DeepSeek 3.2)", r"<｜DSML｜invoke name=\"NAME\""),
    ("DeepSeek's <｜tool▁call▁begin｜>", rf"<｜tool▁calls?▁begin｜>{_NEAR}NAME"),
    ("Kimi's <|tool_call_begin|>", rf"<\|tool_calls?(?:_section)?_begin\|>{_NEAR}NAME"),
    ("Mistral's [TOOL_CALLS]", rf"\[TOOL_CALLS\]{_NEAR}NAME"),
    ("harmony (gpt-oss), to=functions", r"\bto=(?:functions\.)?NAME\b"),
    ("Llama's <|python_tag|>", rf"<\|python_tag\|>{_NEAR}NAME"),
    ("XML (Qwen3-Coder, Llama), <function=", r"<function=[\"']?NAME\b"),
    ("XML (MiniMax), <invoke", r"<invoke name=[\"']?NAME\b"),
    ("GLM's <tool_call> with <arg_key>", rf"<tool_call>\s*NAME{_NEAR}<arg_key>"),
    ("Hermes (Qwen), <tool_call>", rf"<tool_call>{_NEAR}NAME"),
    ("<|tool_call|> (Granite, Phi)", rf"<\|tool_call\|>{_NEAR}NAME"),
    ("InternLM's <|action_start|>", rf"<\|action_start\|>{_NEAR}NAME"),
    ("Functionary's >>>", r">>>\s*NAME\b"),
    (
        "JSON",
        rf"\"(?:name|tool_name|function|tool)\"\s*:\s*\"NAME\"{_NEAR}"
        r"\"(?:arguments|parameters|args|input|tool_parameters)\"\s*:",
    ),
    (
        "JSON",
        rf"\"(?:arguments|parameters|args|input|tool_parameters)\"\s*:{_NEAR}"
        r"\"(?:name|tool_name|function|tool)\"\s*:\s*\"NAME\"",
    ),
    # In the midst of a sentence it is a mention.
    ("a call in Python", r"\A\s*(?:```\w*\s+)?\[?\s*(?:print\()?NAME\(\s*(?:\w+\s*=|\*\*|\{|[\"'])"),
    ("a call in Python", r"```\w*\s+\[?(?:print\()?NAME\(\s*(?:\w+\s*=|\*\*|\{|[\"'])"),
)
