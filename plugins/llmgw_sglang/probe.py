"""Version and flags in what ``sglang version`` and ``sglang serve --help`` print, or an interpreter in their place."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmgw.engines import Flag, ProbeOutput, Version, read_argparse_help
from llmgw_sglang.command import is_interpreter, server

# Not by importing sglang, which takes seconds, nor by its command line, which has no version before 0.5.8.
_ASK_PYTHON = "from importlib.metadata import version; print('sglang version:', version('sglang'))"

_VERSION = re.compile(r"^sglang version: (\d[\w.+-]*)\s*$", re.MULTILINE)
_WHOLE = frozenset({"--served-model-name", "--model-path", "--port"})
# `sglang serve --help` has those of its other servers too, which are not passed.
_OTHERS = re.compile(r"^--- Help for (?!Standard Language Model)", re.MULTILINE)


def ask(program: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The words that ask this program for its version, and for its help."""
    # An interpreter that has been given its module says no version otherwise.
    if is_interpreter(program):
        return (program[0], "-c", _ASK_PYTHON), (*server(program), "--help")
    return (*program[:1], "version"), (*server(program), "--help")


def read(outputs: Sequence[ProbeOutput]) -> Version | None:
    """The version, with its flags where a whole help is among the outputs."""
    if not outputs or outputs[0].code != 0:
        return None
    found = _VERSION.search(outputs[0].stdout)
    if found is None:
        return None
    helps = [read_help(output.stdout) for output in outputs[1:] if output.code == 0]
    return Version(number=found[1], flags=max(helps, key=len, default=()))


def read_help(text: str) -> tuple[Flag, ...]:
    """The flags of a whole help; () where the text is none."""
    others = _OTHERS.search(text)
    flags = read_argparse_help(text[: others.start()] if others else text)
    names = {name for flag in flags for name in flag.names}
    return flags if names >= _WHOLE else ()
