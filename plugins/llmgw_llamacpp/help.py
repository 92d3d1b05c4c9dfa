"""The flags that a llama-server lists in its ``--help``: their values, and which are on their way out.

An entry begins at the start of a line, its description at column 40 or on the next lines:

    -fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
                                            (env: LLAMA_ARG_FLASH_ATTN)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from llmgw.engines import Flag, Takes

_LONGEST = 200_000
_COLUMN = 40
_NAME = re.compile(r"--?[A-Za-z][\w.-]*")
_ENV = re.compile(r"\s*\(env: \w+\)\s*$")
_REMOVED = re.compile(r"\bargument has been removed\b", re.IGNORECASE)
_DEPRECATED = re.compile(r"\bdeprecated\b", re.IGNORECASE)

_BRACED = re.compile(r"\{([\w+.,-]+)\}|\[([\w-]+(?:\|[\w-]+)+)\]|<([\w-]+(?:\|[\w-]+)+)>")
_ALLOWED = re.compile(r"\ballowed values: ([\w+.-]+(?:, [\w+.-]+)*)")
_BULLET = re.compile(r"\s*- ([a-z][\w+-]*)(?: \(default\))?: ")
_DEFAULT = re.compile(r"\(default: '?([a-z][\w+-]*)'?[),]")

# Of what is one number. Where words do as well, its description has them in quotes; a flag that does nothing any more
# reads no value either.
_NUMBERS = frozenset({"N", "INDEX", "PORT", "SEED", "SECONDS"})
_WORD = re.compile(r"'[a-z]+'")

# What llama.cpp reads as well where its help lists on, off and auto.
_SWITCH = {"on": ("enabled", "true", "1"), "off": ("disabled", "false", "0"), "auto": ("-1",)}


def read_help(text: str) -> tuple[Flag, ...]:
    """Every flag in a help text; () where it is none."""
    return tuple(flag for entry in _entries(text[:_LONGEST]) if (flag := _read_entry(entry)) is not None)


def _entries(text: str) -> Iterator[list[str]]:
    entry: list[str] = []
    for line in text.splitlines():
        if line.startswith("-"):
            if entry:
                yield entry
            # "----- sampling params -----" heads a section.
            entry = [] if line.startswith("---") else [line]
        elif line[:1].isspace() and entry:
            entry.append(line)
    if entry:
        yield entry


def _read_entry(lines: Sequence[str]) -> Flag | None:
    head, said = _divide(lines[0])
    described = [said, *(line.strip() for line in lines[1:])]
    names, operand = _read_head(head)
    if not names:
        return None
    description = _ENV.sub("", " ".join(" ".join(described).split()))[:300]
    removed = _REMOVED.search(description) is not None
    return Flag(
        names=names,
        takes=_takes(operand),
        choices=_choices(operand, described) if operand else frozenset(),
        number=operand in _NUMBERS and not _WORD.search(description) and not _DEPRECATED.search(description),
        removed=description if removed else None,
        deprecated=description if not removed and _DEPRECATED.search(description) else None,
    )


def _divide(line: str) -> tuple[str, str]:
    """The names and what is said of them; a head that is too long for its column has its description below."""
    gap = re.search(r"(?<![, ]) {2,}", line)
    at = gap.start() if gap else _COLUMN - 1
    # A single space is a gap only where the columns meet, and only after a head that ends there.
    if gap or (line[at : at + 1] == " " and _takes(_read_head(line[:at])[1]) is not Takes.MANY):
        return line[:at], line[at:].strip()
    return line, ""


def _read_head(head: str) -> tuple[tuple[str, ...], str]:
    names, operand = [], ""
    for part in re.split(r",\s+", head):
        name = _NAME.match(part)
        if name is not None:
            names.append(name[0])
            operand = part[name.end() :].strip() or operand
    return tuple(dict.fromkeys(names)), operand


def _takes(operand: str) -> Takes:
    # "<tensor name pattern>=<buffer type>,..." is one value, "START END" are two.
    words = re.sub(r"<[^<>]*>", "x", operand).split()
    return (Takes.NONE, Takes.ONE)[len(words)] if len(words) < 2 else Takes.MANY


def _choices(operand: str, described: Sequence[str]) -> frozenset[str]:
    braced = _BRACED.fullmatch(operand)
    if braced is not None:
        found = set(re.split(r"[,|]", braced[1] or braced[2] or braced[3]))
        if found <= set(_SWITCH):
            found.update(*(_SWITCH[word] for word in tuple(found)))
        return frozenset(found - {""})
    whole = " ".join(described)
    allowed = _ALLOWED.search(whole)
    if allowed is not None:
        return frozenset(allowed[1].split(", "))
    listed = {bullet[1] for line in described if (bullet := _BULLET.match(line)) is not None}
    default = _DEFAULT.search(whole) if listed else None
    return frozenset(listed | {default[1]} if default is not None else listed)
