"""The words of a command line as flags and values, and the flags that a help text lists.

One reader for everybody who looks at an engine's arguments: the plugin that refuses a flag which llmgw owns, and the
check of what a binary knows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from llmgw.engines.types import Flag, FlagStyle, Takes, Version
from llmgw.errors import Problem

__all__ = [
    "Given",
    "find_given",
    "find_less_context",
    "find_meant",
    "find_owned",
    "find_owned_env",
    "find_stray",
    "is_given",
    "keep_whole",
    "read_argparse_help",
    "spell",
    "split_args",
    "value_of",
]

_FLAG = re.compile(r"--?[A-Za-z]\S*")
_ONE_ITEM = re.compile(r"--?[A-Za-z][\w-]*\s+\S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A flag as it was given: its name in the engine's own spelling, and what followed it.

    ``words`` are those of the command line that make it up, ``key`` is the rest of a dotted one (``--flag.key``).
    """

    name: str
    values: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    key: str | None = None


def spell(word: str, style: FlagStyle) -> tuple[str, str | None, str | None] | None:
    """A word as a flag's name, the key of a dotted one, and its ``=value``; None when it is a value."""
    if _FLAG.fullmatch(word.partition("=")[0]) is None:
        return None
    name, equals, value = word.partition("=") if style.equals else (word, "", "")
    key = None
    if style.dotted:
        name, dot, rest = name.partition(".")
        key = rest if dot else None
    if style.underscores and name.startswith("--"):
        name = name.replace("_", "-")
    return name, key, value if equals else None


def split_args(args: Sequence[str], style: FlagStyle) -> tuple[Given, ...]:
    """The flags of a command line in their order; a word that begins like a flag is one, ``-1`` is a value.

    Values before the first flag are left out.
    """
    found: list[Given] = []
    for word in args:
        flag = spell(word, style)
        if flag is not None:
            name, key, value = flag
            found.append(Given(name=name, key=key, values=() if value is None else (value,), words=(word,)))
        elif found:
            last = found[-1]
            found[-1] = replace(last, values=(*last.values, word), words=(*last.words, word))
    return tuple(found)


def find_meant(name: str, style: FlagStyle, names: Collection[str]) -> str | None:
    """Which of ``names`` an engine may take this flag for: the same, a longer one that it begins, or a letter's flag
    with its value joined to it (``-n2``). None for another flag.

    Where the beginning fits more than one flag the engine refuses it, so it does no harm that one of them is found.
    """
    if name in names:
        return name
    if not style.abbreviations or name in style.whole:
        return None
    if not name.startswith("--") and name[:2] in names:
        return name[:2]
    return min((flag for flag in names if flag.startswith(name)), default=None)


def keep_whole(style: FlagStyle, version: Version | None) -> FlagStyle:
    """The style where the flags of a binary are known: none of them is short for another."""
    names = frozenset(name for flag in version.flags for name in flag.names) if version is not None else frozenset()
    return replace(style, whole=style.whole | names) if names else style


def find_given(args: Sequence[str], style: FlagStyle, *names: str) -> tuple[Given, ...]:
    """The flags among the args that the engine takes for one of ``names``, each under that name."""
    found = []
    for each in split_args(args, style):
        meant = find_meant(each.name, style, names)
        if meant is None:
            continue
        if meant.startswith(each.name):
            found.append(replace(each, name=meant))
        else:
            joined = each.words[0].removeprefix(meant)
            found.append(replace(each, name=meant, key=None, values=(joined, *each.words[1:])))
    return tuple(found)


def value_of(args: Sequence[str], style: FlagStyle, *names: str) -> str | None:
    """The value of the last of these flags, shortened or not: "" when nothing follows it, None when none is given.

    A dotted flag sets a part of a value and is none.
    """
    given = [each for each in find_given(args, style, *names) if each.key is None]
    if not given:
        return None
    return given[-1].values[0] if given[-1].values else ""


def is_given(args: Sequence[str], style: FlagStyle, *names: str) -> bool:
    """Whether one of the flags is among the args, shortened or not, or a part of its value as a dotted one."""
    return bool(find_given(args, style, *names))


def find_owned(
    args: Sequence[str], owned: Mapping[str, str], style: FlagStyle, *, ending: Collection[str] = ()
) -> list[Problem]:
    """A problem for each of ``args`` that is a flag of llmgw's, ends the engine, or is no flag as it is written.

    ``owned`` is what llmgw sets each flag from, by every spelling that the engine takes: "the model's source".
    ``ending`` are those with which the engine prints something and ends (``--help``).
    """
    problems = []
    for word in args:
        flag = spell(word, style)
        if flag is None:
            if _ONE_ITEM.match(word):
                problems.append(f"{word!r} is one item: write the flag and its value as two")
            continue
        name = flag[0]
        meant = find_meant(name, style, (*owned, *ending))
        if meant is None:
            continue
        short = f"{name} (short for {meant})" if meant != name else name
        why = f"llmgw sets it from {owned[meant]}" if meant in owned else "with it the engine prints something and ends"
        problems.append(f"{short} is not for args: {why}")
    return [Problem(key="args", message=message) for message in problems]


def find_stray(args: Sequence[str], style: FlagStyle) -> list[Problem]:
    """A problem for each word before the first flag, of an engine that is given nothing but flags."""
    stray = itertools.takewhile(lambda word: spell(word, style) is None, args)
    return [
        Problem(key="args", message=f"{word!r} is no flag, and the value of none: take it out")
        for word in stray
        if not _ONE_ITEM.match(word)
    ]


def find_owned_env(env: Mapping[str, str], owned: Mapping[str, str]) -> list[Problem]:
    """A problem for each variable that is llmgw's; ``owned`` is what llmgw sets each from."""
    return [
        Problem(key="env", message=f"{name} is not for env: llmgw sets it from {owned[name]}")
        for name in sorted(env)
        if name in owned
    ]


def find_less_context(given: str, tokens: int, context_length: int | None) -> list[Problem]:
    """A problem where args give a request fewer tokens than the model promises; ``given`` is a flag and its value."""
    if context_length is None or tokens >= context_length:
        return []
    text = f"{given} is {tokens} tokens, and the model promises context_length {context_length}: "
    text += f"take it out of args, or set context_length to {tokens}"
    return [Problem(key="args", message=text)]


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HELP = re.compile(r"^( {1,16})-h, --help\b", re.MULTILINE)
_SPELLING = re.compile(r"-{1,2}[A-Za-z][\w.-]*")
_BROKEN_WORD = re.compile(r"(?<=\w)-$")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_DEFAULT = re.compile(r"\s*\(default: [^()]*\)$")
_MOST_SAID = 300

# What says of the flag itself that it goes: "Deprecated. Use --y", "[DEPRECATED] ...", "(deprecated, use --y)". Not
# "Deprecated metrics are shown", and not "replaces the deprecated --y".
_GOES = re.compile(
    r"^[\W_]*(?-i:DEPRECATED\b)"
    r"|^[\W_]*deprecated(?=\s*(?:$|[.,:;)\]!\u2013\u2014-])|\s+(?:in|since|as|and|but|by|use|please|alias|option|flag"
    r"|argument|parameter|spelling|name|synonym|form)\b)"
    r"|^[\W_]*(?:a |an |the )?(?:deprecated|obsolete) (?:alias|synonym|spelling|name|form)\b"
    r"|\b(?:this|the) (?:option|flag|argument|parameter|setting|switch) (?:is|was|has been)(?: now)?"
    r" (?:deprecated|removed|obsolete)",
    re.IGNORECASE,
)
_OWN_NAME_GOES = r"^[\W_]*(?:the )?[`'\"]*(?:{names})[`'\"]*(?: (?:option|flag|argument))? (?:is|was|has been)(?: now)?"
_OWN_NAME_GOES += r" (?:deprecated|removed|obsolete)"


def read_argparse_help(text: str) -> tuple[Flag, ...]:
    """The flags in the help that argparse printed, with their choices and what is said of deprecated ones.

    An entry begins with a flag, as far in as ``-h, --help``; what follows two spaces or stands further in describes it.
    """
    text = _COLOUR.sub("", text)
    found = _HELP.search(text)
    column = len(found[1]) if found else 2
    entries: list[list[str]] = []
    entry: list[str] | None = None
    prose = False
    for line in text.splitlines():
        words = line.strip()
        indent = len(line) - len(line.lstrip())
        if not words:
            prose = False
        elif indent == column and not prose and _SPELLING.match(words):
            entry = [words]
            entries.append(entry)
        elif indent <= column:
            # A group's description may have a flag at the beginning of any of its lines.
            prose = indent == column and " " in words and "  " not in words
            entry = None
        elif entry is not None:
            entry.append(words)
    return tuple(_read_entry(entry) for entry in entries)


def _read_entry(lines: Sequence[str]) -> Flag:
    head, description = _split_entry("\n".join(lines))
    names: list[str] = []
    flag = Flag(names=(), takes=Takes.NONE)
    for part in _parts(head):
        spelling = _SPELLING.match(part)
        if spelling is not None:
            names.append(spelling[0])
            operand = part[spelling.end() :].strip(" =")
            flag = _read_operand(flag, operand) if operand else flag
    said = _join(description.splitlines())
    return replace(flag, names=tuple(dict.fromkeys(names)), deprecated=_find_deprecation(said, names))


def _split_entry(text: str) -> tuple[str, str]:
    """Head and description: these are two spaces or a line apart, unless a list of choices or names goes on there."""
    depth = 0
    for at, mark in enumerate(text):
        depth += (mark in "{[") - (mark in "}]")
        ends = (mark == "\n" and text[at - 1] != ",") or text.startswith("  ", at)
        if ends and depth <= 0:
            return " ".join(text[:at].split()), text[at:]
    head, _, description = text.partition("\n") if depth > 0 else (text, "", "")
    return " ".join(head.split()), description


def _parts(head: str) -> list[str]:
    """``--flag {a,b}, -f {a,b}`` in its two parts: a comma inside braces or brackets divides nothing."""
    parts, depth, begin = [], 0, 0
    for at, mark in enumerate(head):
        depth += (mark in "{[") - (mark in "}]")
        if mark == "," and depth == 0 and head[at + 1 : at + 3].startswith(" -"):
            parts.append(head[begin:at].strip())
            begin = at + 1
    return [*parts, head[begin:].strip()]


def _read_operand(flag: Flag, operand: str) -> Flag:
    maybe = operand.startswith("[") and operand.endswith("]") and not operand.startswith(("['", '["'))
    # Any number, none among them, is what MANY is not.
    takes = Takes.UNSAID if maybe and "..." in operand else Takes.MAYBE if maybe else None
    if operand.lstrip("[").startswith("{") and "}" in operand:
        listed, _, rest = operand.lstrip("[{").partition("}")
        choices = frozenset(word for each in listed.split(",") if (word := each.strip()))
        wider = _SPELLING.search(rest)
        # "{a,b} or any name that --plugin brings": a list that names no flag beside it is not the whole of it.
        is_open = "..." in choices or (rest.lstrip().startswith("or ") and wider is None)
        flag = replace(flag, choices=frozenset() if is_open else choices, widened_by=wider[0] if wider else None)
        return replace(flag, takes=takes or (Takes.MANY if rest.strip().startswith("[") else Takes.ONE))
    several = "..." in operand or (" " in operand and not operand.startswith("["))
    return replace(flag, takes=takes or (Takes.MANY if several else Takes.ONE))


def _join(lines: Sequence[str]) -> str:
    """Wrapped lines as one: argparse breaks words at their hyphens too."""
    joined: list[str] = []
    for words in (" ".join(line.split()) for line in lines):
        if joined and not _BROKEN_WORD.search(joined[-1]):
            joined.append(" ")
        joined.append(words)
    return "".join(joined).strip()


def _find_deprecation(said: str, names: Sequence[str]) -> str | None:
    """The description from where it says that this flag goes, or None."""
    if "deprecat" not in said.lower() and "removed" not in said and "obsolete" not in said.lower():
        return None
    spelled = {form for name in names for form in (name, name.lstrip("-"), name.lstrip("-").replace("-", "_"))}
    own = re.compile(_OWN_NAME_GOES.format(names="|".join(map(re.escape, sorted(spelled)))), re.IGNORECASE)
    sentences = _SENTENCE.split(said)
    for at, sentence in enumerate(sentences):
        if _GOES.search(sentence) or own.search(sentence):
            return _DEFAULT.sub("", " ".join(sentences[at:]))[:_MOST_SAID]
    return None
