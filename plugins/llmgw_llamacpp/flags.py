"""Which flags of a profile's args are llmgw's own, and how flags are spelled."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmgw.engines import Problem

# Every spelling, by what llmgw sets in its place. A profile that repeats one would win, since its args come last, and
# the replica would be healthy where nobody asks for it, or be another model than its name says.
_OWNED = {
    "the model's source": (
        *("--model", "-m", "--model-url", "-mu", "--hf-repo", "-hf", "-hfr", "--hf-file", "-hff"),
        *("--docker-repo", "-dr", "--models-dir", "--models-preset"),
    ),
    "the model's name": ("--alias", "-a"),
    "the address that it picks on the node": ("--host", "--port", "--reuse-port", "--api-prefix"),
    "its own connection to the engine, which is plain and has no key": (
        *("--api-key", "--api-key-file", "--ssl-key-file", "--ssl-cert-file"),
    ),
    "the placement, which decides on the machines of a replica": ("--rpc",),
}
OWNED = {flag: instead for instead, spellings in _OWNED.items() for flag in spellings}

_FLAG = re.compile(r"--?[A-Za-z]\S*")

# Shorthands for a model that llama.cpp downloads by itself: --gpt-oss-20b-default, --fim-qwen-7b-spec and the like.
_PRESET = re.compile(r"--(embd|fim|gpt-oss|vision)-\S+-(default|spec)")


def spell(word: str) -> str | None:
    """The flag that llama.cpp would take a word for, ``_`` in long ones being ``-``; None when it is a value."""
    if _FLAG.fullmatch(word) is None:
        return None
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def is_given(args: Sequence[str], *names: str) -> bool:
    """Whether one of the flags is among the args."""
    return any(spell(word) in names for word in args)


def value_of(args: Sequence[str], *names: str) -> str | None:
    """The value of the last of these flags: "" when nothing follows it, None when none is given."""
    for at in range(len(args) - 1, -1, -1):
        if spell(args[at]) in names:
            return args[at + 1] if at + 1 < len(args) else ""
    return None


def check(args: Sequence[str]) -> list[Problem]:
    """A problem for each flag that is llmgw's, or that llama-server would not read as it is written."""
    return [Problem(key="args", message=message) for word in args if (message := _fault(word)) is not None]


def _fault(word: str) -> str | None:
    flag = spell(word)
    if flag is None:
        # "--ctx-size 4096" as one item of the list: llama-server takes the whole of it for a flag's name.
        if re.match(r"--?[A-Za-z][\w-]*\s+\S", word):
            return f"{word!r} is one item: write the flag and its value as two"
        return None
    if flag in OWNED:
        return f"{flag} is not for args: llmgw sets it from {OWNED[flag]}"
    if _PRESET.fullmatch(flag):
        return f"{flag} is not for args: llmgw sets the model from {OWNED['--model']}"
    if "=" in word and word.startswith("--"):
        name, _, value = word.partition("=")
        return f"llama-server does not take {word}: write {name} and {value} as two items"
    return None
