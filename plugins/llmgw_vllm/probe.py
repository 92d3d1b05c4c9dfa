"""Version and flags in what ``vllm --version`` and ``vllm serve --help`` print."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmgw.engines import Flag, ProbeOutput, Takes, Version, read_argparse_help

# The whole help has its own name since 0.11, and is behind plain --help before. Each release answers the other's
# question with a part of it or with the names of groups, and exit code 0: whichever lists more is the whole.
QUESTIONS = (("--version",), ("serve", "--help=all"), ("serve", "--help"))

_VERSION = re.compile(r"^(?:vllm |vLLM )?v?(\d+\.\d+[\w.+-]*)\s*$", re.MULTILINE)
_WHOLE = frozenset({"--served-model-name", "--max-model-len", "--port"})
_TIPS = "When passing JSON CLI arguments"
# Rewritten to --optimization-level before the parser has them, so that no help lists them.
_LEVELS = ("-O", "-O0", "-O1", "-O2", "-O3")


def read(outputs: Sequence[ProbeOutput]) -> Version | None:
    """The version, with its flags where a whole help is among the outputs."""
    if not outputs or outputs[0].code != 0:
        return None
    found = _VERSION.search(outputs[0].stdout) or _VERSION.search(outputs[0].stderr)
    if found is None:
        return None
    helps = [read_help(output.stdout) for output in outputs[1:] if output.code == 0]
    return Version(number=found[1], flags=max(helps, key=len, default=()))


def read_help(text: str) -> tuple[Flag, ...]:
    """The flags of a whole help; () where the text is none."""
    # What follows are examples of a flag --json-arg that there is not.
    flags = read_argparse_help(text.partition(_TIPS)[0])
    names = {name for flag in flags for name in flag.names}
    if not names >= _WHOLE:
        return ()
    return (*flags, *(Flag(names=(name,), takes=Takes.MAYBE) for name in _LEVELS if name not in names))
