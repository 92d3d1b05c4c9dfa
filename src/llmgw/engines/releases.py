"""What a release knows: which of two is older, whether one takes a flag, and which flags are gone since when."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmgw.engines.types import FlagChange, Version

__all__ = ["knows", "list_changes", "order_release"]

_NUMBER = re.compile(r"\d{1,9}(?:\.\d{1,9}){0,5}")


def order_release(number: str) -> tuple[int, ...]:
    """What releases are compared by: 0.9 comes before 0.10.1, b9999 before b10000, and 0.11 is 0.11.0.

    What follows the number counts for nothing (``0.32.0+cpu``, ``0.5.6.post1``, ``0.11.0rc1``). () for none.
    """
    found = _NUMBER.search(number)
    parts = [int(part) for part in found[0].split(".")] if found else []
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def knows(
    version: Version | None,
    flag: str,
    *,
    since: str | None = None,
    until: str | None = None,
    unknown: bool | None = None,
) -> bool:
    """Whether a release takes a flag: by its help where that was read, else by its number.

    ``since`` is the first release that has it, ``until`` the first that has it no more. ``unknown`` is the
    answer for one whose number nobody knows; by default it is taken for a current one.
    """
    if version is not None and version.flags:
        return version.find(flag) is not None
    number = order_release(version.number) if version is not None else ()
    if not number:
        return until is None if unknown is None else unknown
    return (since is None or number >= order_release(since)) and (until is None or number < order_release(until))


def list_changes(gone: Mapping[str, Mapping[str, str | None]]) -> tuple[FlagChange, ...]:
    """By release the flags that are gone in it, each with the one that does it now, None for none."""
    return tuple(
        FlagChange(flag=flag, gone_in=release, instead=instead)
        for release, flags in gone.items()
        for flag, instead in flags.items()
    )
