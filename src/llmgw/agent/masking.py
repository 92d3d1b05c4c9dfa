"""Which words of an engine's output are secrets, and that output without them: engines print their environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from llmgw.host.logfile import strip_controls

MASK = "***"
# A shorter value can't be a secret, and to hide each "1" or "true" would leave nothing that can be read.
LEAST_CHARS = 6

# TOKENIZERS_PARALLELISM and KEYBOARD hold no secret: the word ends there, or is a plural.
# Where something lies is no secret, and is what an operator has to mend. Nor is a number.
_PLAIN = re.compile(r"(?:/[A-Za-z][\w.-]*){2,}/?|[0-9]+")

_SECRET_NAME = re.compile(r"(?:token|key|secret|pass(?:w(?:or)?d|phrase)?|credential)s?(?![a-z])", re.IGNORECASE)


class Mask:
    """What hides the values of ``env``, but for paths and numbers that are called no secret, and those of ``inherited``
    whose name says that they are a token, a key, a secret, a password or credentials."""

    __slots__ = ("_pattern",)

    def __init__(self, env: Mapping[str, str], inherited: Mapping[str, str] = os.environ) -> None:
        named = (value for name, value in inherited.items() if _SECRET_NAME.search(name))
        given = (value for name, value in env.items() if _SECRET_NAME.search(name) or not _PLAIN.fullmatch(value))
        words = {word for value in (*given, *named) for word in _spellings(value) if len(word) >= LEAST_CHARS}
        # The longest first: of one that holds another nothing is to be left.
        found = "|".join(map(re.escape, sorted(words, key=lambda word: (-len(word), word))))
        self._pattern = re.compile(found) if found else None

    def hide(self, text: str) -> str:
        """The text without them. To be asked before anything is cut: half a secret would not be known for one."""
        return text if self._pattern is None else self._pattern.sub(MASK, text)

    def hide_all(self, texts: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(self.hide, texts))


def _spellings(value: str) -> Iterator[str]:
    """As it is written, and as its parts come out of a log: line by line, without controls, with single spaces."""
    yield value
    for line in value.splitlines():
        shown = strip_controls(line)
        yield from (shown.strip(), " ".join(shown.split()))
