"""Whose the memory of a card is that is not ours."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from llmgw.core.node import ForeignUse
from llmgw.host.cards import Card, Holder
from llmgw.host.process import read_stat
from llmgw.units import printable

PROC = Path("/proc")
GB = 1e9

# What a card may have in use that is nobody's: where the driver tells what it keeps, and where that is counted in.
REST_BYTES = 200_000_000
REST_WITH_RESERVE_BYTES = 600_000_000

_LONGEST_NAME = 80
_MOST_ANCESTORS = 64
_MOST_ARGUMENTS = 4096
_INTERPRETER = re.compile(r"(python|pypy|perl|ruby|bash|sh|node|java)[\d.]*")
_OPTION = re.compile(r"\s+-")
# An interpreter's flags that are not followed by a value.
_ALONE = frozenset({"-u", "-B", "-E", "-I", "-O", "-OO", "-S", "-s", "-q"})


def find_foreign(card: Card, ours: Collection[int], proc: Path = PROC) -> tuple[ForeignUse, ...]:
    """The memory of a card that none of our processes has, the largest first. ``ours`` are the leaders of our engines'
    process trees, or all in them: what an engine has started since then is ours too. Blocks.

    What nobody listed accounts for is foreign without a pid when there is more of it than a driver needs. Where the
    driver does not say how much an engine of ours has, the engine has it.
    """
    holders = card.holders or ()
    strangers = [holder for holder in holders if not is_ours(holder.pid, ours)]
    found = [_use(holder.memory_bytes, holder, proc) for holder in strangers if holder.memory_bytes]
    rest = _count_rest(card, holders)
    unsized = [holder for holder in holders if holder.memory_bytes is None]
    if rest and all(holder in strangers for holder in unsized):
        # With one of unknown size it is clear whose the rest is.
        found.append(_use(rest, unsized[0] if len(unsized) == 1 else None, proc))
    return tuple(sorted(found, key=lambda use: (-use.memory_gb, use.pid or 0)))


def _count_rest(card: Card, holders: Collection[Holder]) -> int:
    """The bytes that are in use and that no process is known to have; 0 when they are no more than a driver needs."""
    if card.used_bytes is None:
        return 0
    rest = card.used_bytes - sum(holder.memory_bytes or 0 for holder in holders)
    return rest if rest > (REST_BYTES if card.reserve_apart else REST_WITH_RESERVE_BYTES) else 0


def _use(size_bytes: int, holder: Holder | None, proc: Path) -> ForeignUse:
    memory_gb = round(size_bytes / GB, 3)
    if holder is None:
        return ForeignUse(memory_gb=memory_gb)
    name = name_process(holder.pid, proc) or (_last_part(holder.name) if holder.name else None)
    return ForeignUse(memory_gb=memory_gb, pid=holder.pid, name=name)


def is_ours(pid: int, ours: Collection[int]) -> bool:
    """Whether a process is one of these, of their group or session, or descends from one that is."""
    for _ in range(_MOST_ANCESTORS):
        if pid in ours:
            return True
        stat = read_stat(pid) if pid > 1 else None
        if stat is None:
            return False
        if stat.group in ours or stat.session in ours:
            return True
        pid = stat.parent
    return False


def name_process(pid: int, proc: Path = PROC) -> str | None:
    """What people call a process: its program, and for an interpreter what it runs. None where it can't be seen.

    No other argument: they may hold keys, and this is shown to others.
    """
    try:
        with (proc / str(pid) / "cmdline").open("rb") as file:
            arguments = file.read(_MOST_ARGUMENTS).decode(errors="replace").rstrip("\0").split("\0")
        comm = (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    # (some write all of their arguments into the first one)
    program = _last_part(_OPTION.split(arguments[0])[0]) or comm
    words = [program, *_find_script(arguments[1:])] if _INTERPRETER.fullmatch(program) else [program]
    return printable(" ".join(words))[:_LONGEST_NAME] or None


def _find_script(arguments: list[str]) -> list[str]:
    for place, argument in enumerate(arguments):
        if argument in ("-m", "-jar"):
            return [argument, *(_last_part(word) for word in arguments[place + 1 : place + 2])]
        if not argument.startswith("-"):
            return [_last_part(argument)]
        if argument not in _ALONE:
            break
    return []


def _last_part(path: str) -> str:
    """Of a path; a title that a process gave itself is left as it is."""
    return path.rpartition("/")[2] if path.startswith(("/", "./", "../")) else path
