"""Progress in the lines of an engine's log, by a table of patterns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmgw.engines.types import LogFact

__all__ = ["read_progress"]

_LONGEST = 2000


def read_progress(
    line: str, table: Sequence[tuple[re.Pattern[str], str]], prefix: re.Pattern[str] | None = None
) -> LogFact | None:
    """What the first pattern of ``table`` that is found says, with its groups as ``{0}``; None where none is found.

    ``prefix`` is taken off before. Of a bar that is drawn over and over in one line the last state counts.
    """
    # Cut, so that no pattern has to be fast on a line of a megabyte.
    text = line[-_LONGEST:].rstrip().rpartition("\r")[2]
    begin = prefix.match(text) if prefix is not None else None
    text = text[begin.end() :] if begin else text
    for pattern, said in table:
        found = pattern.search(text)
        if found is not None:
            return LogFact(progress=said.format(*found.groups()))
    return None
