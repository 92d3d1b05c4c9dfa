"""What a release of vLLM knows: by its own help where that was read, else by its number.

The releases that are spoken of as supported are 0.10.1 to 0.32.
"""

from __future__ import annotations

import re

from llmgw.engines import Version

# Optional to llmgw, and newer than the oldest release that it supports; what is not here is in all of them.
_SINCE = {
    "--enable-log-requests": (0, 10, 1),
    "--runner": (0, 10, 1),
    "--nnodes": (0, 11, 1),
}
_UNTIL = {"--task": (0, 13), "--disable-log-requests": (0, 17)}


def knows(version: Version | None, flag: str) -> bool:
    """Whether this release takes the flag; None is taken for a current one."""
    if version is not None and version.flags:
        return version.find(flag) is not None
    number = _order(version.number) if version is not None else ()
    if not number:
        return flag not in _UNTIL
    return number >= _SINCE.get(flag, ()) and (flag not in _UNTIL or number < _UNTIL[flag])


def is_for_cpu(version: Version | None) -> bool:
    """Whether it is a build for CPUs, which names itself ``0.32.0+cpu``."""
    return version is not None and "+cpu" in version.number


def _order(number: str) -> tuple[int, ...]:
    found = re.match(r"\d{1,6}(?:\.\d{1,6})*", number)
    return tuple(map(int, found[0].split("."))) if found else ()
