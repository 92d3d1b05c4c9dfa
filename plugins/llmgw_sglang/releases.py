"""What a release of SGLang knows: by its own help where that was read, else by its number."""

from __future__ import annotations

import re

from llmgw.engines import Version

# Optional to llmgw, and newer than the oldest release that it supports; what is not here is in all of them.
_SINCE = {"--engine-info-bootstrap-port": (0, 5, 10)}


def knows(version: Version | None, flag: str) -> bool:
    """Whether this release takes the flag; of one that nobody knows, what all do."""
    if version is not None and version.flags:
        return version.find(flag) is not None
    number = _order(version.number) if version is not None else ()
    return flag not in _SINCE or number >= _SINCE[flag]


def _order(number: str) -> tuple[int, ...]:
    found = re.match(r"\d{1,6}(?:\.\d{1,6})*", number)
    return tuple(map(int, found[0].split("."))) if found else ()
