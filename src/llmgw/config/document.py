"""YAML with places: every value knows its line and column, and all that is wrong is gathered before anyone is told.

The composed nodes are walked instead of the constructed objects: those have forgotten where they stood, and have
quietly dropped the first of two equal keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

import yaml

from llmgw.config.ordinary import read_ordinary
from llmgw.config.paths import is_text
from llmgw.errors import ConfigError, Problem
from llmgw.units import parse_duration, parse_size, printable

MAX_FILE_BYTES = 1024 * 1024
# A few lines of anchors can stand for billions of values; no honest file comes near this.
MAX_VALUES = 100_000
# A text counts for as many values as it has of this: a long one can be repeated by anchors as well.
VALUE_CHARS = 100
MAX_SECONDS = 30 * 86_400

# A message may hold a value, and its end says what to do: so a long word is cut before the whole is.
_LONG_WORD = re.compile(r"(\S{200})\S{20,}")
MESSAGE_CHARS = 2000

T = TypeVar("T")
V = TypeVar("V")

_STR, _INT, _FLOAT, _BOOL, _NULL = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))


class Findings:
    """The problems of one file, in the order of its lines."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._found: list[tuple[int, int, Problem]] = []

    def where(self, mark: yaml.Mark) -> str:
        return f"{printable(self.file)}:{mark.line + 1}:{mark.column + 1}"

    def add(self, mark: yaml.Mark, key: str, message: str) -> None:
        problem = Problem(key=tidy(key), message=tidy(message), where=self.where(mark))
        self._found.append((mark.line, mark.column, problem))

    def problems(self) -> list[Problem]:
        return [problem for _, _, problem in sorted(self._found, key=lambda found: found[:2])]

    def raise_if_any(self) -> None:
        if self._found:
            raise ConfigError(self.problems())


class Section:
    """One mapping of a document, read key by key; ``close`` then names the keys that nobody asked for.

    A reader answers with ``default`` when the key is absent, and also when its value is wrong: that has been noted,
    and the whole is refused in the end.
    """

    def __init__(self, node: yaml.MappingNode, path: str, findings: Findings) -> None:
        self._mark, self._end = node.start_mark, node.end_mark
        self._path = path
        self._findings = findings
        self._keys: dict[str, tuple[yaml.Mark, yaml.Node]] = {}
        self._asked: set[str] = set()
        self._required: set[str] = set()
        self._refused: set[str] = set()
        for key, value in node.value:
            self._learn(key, value)

    def _learn(self, key: yaml.Node, value: yaml.Node) -> None:
        if not isinstance(key, yaml.ScalarNode):
            self._findings.add(key.start_mark, self._path, "a key must be a word")
        elif key.value in self._keys:
            first = self._keys[key.value][0].line + 1
            self._findings.add(key.start_mark, self.path(key.value), f"written twice (first on line {first})")
        else:
            self._keys[key.value] = (key.start_mark, value)

    def path(self, key: str) -> str:
        """The dotted path of a key of this section, from the top of the file."""
        return f"{self._path}.{key}" if self._path else key

    def written(self) -> str:
        """This section alone as it was written, moved to the left. Of its aliases only the names are in it."""
        start, end = self._mark, self._end
        first, *lines = (start.buffer or "")[start.pointer : end.pointer].split("\n")
        # YAML counts what lies before the next section to this one: comments, which belong to that.
        while lines and re.fullmatch(rf"\s*| {{0,{max(start.column - 1, 0)}}}#.*", lines[-1]):
            lines.pop()
        indent = " " * start.column
        return "".join(f"{line.removeprefix(indent)}\n" for line in (first, *lines))

    def has(self, key: str) -> bool:
        return key in self._keys

    def is_empty(self, key: str) -> bool:
        """Whether a key stands there with nothing under it, or with an empty list."""
        node = self._keys[key][1] if key in self._keys else None
        return node is not None and (node.tag == _NULL or (isinstance(node, yaml.SequenceNode) and not node.value))

    def names(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def where(self, key: str) -> str:
        """``file:line:column`` of a key, or of the section where the key isn't written."""
        return self._findings.where(self._keys[key][0] if key in self._keys else self._mark)

    def wrong(self, key: str, message: str, *, shown: str | None = None) -> None:
        """Note what is wrong with a key, which is called ``shown`` where it is not to be told in full."""
        mark = self._keys[key][0] if key in self._keys else self._mark
        self._findings.add(mark, self.path(key if shown is None else shown), message)

    def text(self, key: str, default: T) -> str | T:
        return self._scalar(key, default, as_text)

    def as_written(self, key: str, default: T) -> str | T:
        """A single value of any kind as it is written: a number or yes/no too, and nothing at all in quotes."""

        def read(node: yaml.ScalarNode) -> str:
            return check_characters(str(node.value))

        return self._scalar(key, default, read, none='has no value; write "" for an empty one')

    def require(self, key: str) -> None:
        """Note that a key has to be there, with a value; how it is read is said as of any other."""
        self._asked.add(key)
        self._required.add(key)
        if key not in self._keys:
            self.wrong(key, "is missing")

    def required_text(self, key: str) -> str:
        self.require(key)
        return self.text(key, "")

    def truth(self, key: str, *, default: bool) -> bool:
        def read(node: yaml.ScalarNode) -> bool:
            # YAML also takes yes, no, on and off, and most who read the file next don't know whether it does.
            if node.tag != _BOOL or node.value.lower() not in {"true", "false"}:
                raise ValueError(f"must be true or false, not {_shown(node)}")
            return str(node.value).lower() == "true"

        return self._scalar(key, default, read)

    def choice(self, key: str, default: str, allowed: Collection[str]) -> str:
        def read(node: yaml.ScalarNode) -> str:
            # Of on, off, yes and no YAML makes something else than words.
            value = str(node.value) if node.value in allowed else as_text(node)
            if value not in allowed:
                raise ValueError(f"{value!r} is not one of {', '.join(sorted(allowed))}")
            return value

        return self._scalar(key, default, read)

    def count(self, key: str, default: T, *, low: int, high: int) -> int | T:
        def read(node: yaml.ScalarNode) -> int:
            # Only plain decimals: YAML would also read 010 as eight and 1:30 as ninety.
            if not re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", node.value):
                raise ValueError(f"must be a whole number, not {_shown(node)}")
            if node.tag != _INT:
                raise ValueError("must be a whole number without quotes")
            return _within(int(node.value), low, high)

        return self._scalar(key, default, read)

    def amount(
        self, key: str, default: T, *, high: int, zero: bool = True, what: str = "number of 0 or more", unit: str = ""
    ) -> float | T:
        """A plain number, whole or not, told of as a ``what`` and with its unit; ``zero`` says whether it may be 0."""

        def read(node: yaml.ScalarNode) -> float:
            if node.tag not in {_INT, _FLOAT} or not re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,18})?", node.value):
                raise ValueError(f"must be a {what}, as 8 or 7.5, not {_shown(node)}")
            value = float(node.value)
            if not value and not zero:
                raise ValueError("must be more than 0")
            if value > high:
                raise ValueError(f"must be {high}{unit} at most, not {node.value}")
            return value

        return self._scalar(key, default, read)

    def gigabytes(self, key: str, default: T, *, high: int, zero: bool = True) -> float | T:
        """GB of 10^9 bytes."""
        return self.amount(key, default, high=high, zero=zero, what="number of gigabytes", unit=" GB")

    def duration(self, key: str, default: float, *, zero: bool = False) -> float:
        """Seconds; ``zero`` says whether none at all is allowed."""

        def read(node: yaml.ScalarNode) -> float:
            seconds = parse_duration(_quantity(node))
            if seconds == 0 and not zero:
                raise ValueError("must be more than 0")
            if seconds > MAX_SECONDS:
                raise ValueError(f"is longer than {MAX_SECONDS // 86_400} days")
            return seconds

        return self._scalar(key, default, read)

    def size(self, key: str, default: T, *, low: int) -> int | T:
        """Bytes; ``low`` is the least that works."""

        def read(node: yaml.ScalarNode) -> int:
            size_bytes = parse_size(_quantity(node))
            if size_bytes < low:
                raise ValueError(f"must be at least {low} bytes")
            return size_bytes

        return self._scalar(key, default, read)

    def ports(self, key: str, default: tuple[int, int]) -> tuple[int, int]:
        """The first and the last of a range of ports that an ordinary user may open."""

        def read(node: yaml.ScalarNode) -> tuple[int, int]:
            match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", node.value)
            low, high = (int(match[1]), int(match[2])) if match else (0, 0)
            if not 1024 <= low <= high <= 65535:
                raise ValueError(f"{_shown(node)} is not a range of ports from 1024 to 65535; write it as 18000-18999")
            return low, high

        return self._scalar(key, default, read)

    def texts(self, key: str, *, numbers: bool = False) -> tuple[str, ...]:
        """A list of words; ``numbers`` takes unquoted numbers too, as they are written."""
        words: list[str] = []
        for index, node in enumerate(self._items(key)):
            try:
                if not isinstance(node, yaml.ScalarNode):
                    raise ValueError(f"must be text, not {_kind(node)}")
                words.append(node.value if numbers and node.tag in {_INT, _FLOAT} else as_text(node))
            except ValueError as error:
                self._findings.add(node.start_mark, f"{self.path(key)}[{index}]", str(error))
        return tuple(words)

    def section(self, key: str) -> Section:
        """The mapping under a key; an empty one where the key is absent or has nothing under it."""
        node = self._take(key)
        if node is None or isinstance(node, yaml.MappingNode):
            return Section(node or self._nothing(), self.path(key), self._findings)
        if node.tag != _NULL:
            self.wrong(key, f"must be a mapping (key: value), not {_kind(node)}")
        return Section(self._nothing(), self.path(key), self._findings)

    def sections(self, key: str) -> tuple[Section, ...]:
        """The mappings in the list under a key."""
        found: list[Section] = []
        for index, node in enumerate(self._items(key)):
            path = f"{self.path(key)}[{index}]"
            if isinstance(node, yaml.MappingNode):
                found.append(Section(node, path, self._findings))
            else:
                self._findings.add(node.start_mark, path, f"must be a mapping (key: value), not {_kind(node)}")
        return tuple(found)

    def refuse(self, keys: Collection[str], why: str) -> None:
        """Keys that are known and can't be written; none of them is ever suggested for another."""
        self._refused.update(keys)
        for key in self._keys:
            if key in keys:
                self.wrong(key, why)

    def close(self) -> None:
        """Every key that was neither asked for nor refused is unknown; the nearest one that was asked is suggested."""
        for key in self._keys.keys() - self._asked - self._refused:
            self.wrong(key, f"unknown key{near(key, self._asked)}")

    def _take(self, key: str) -> yaml.Node | None:
        self._asked.add(key)
        return self._keys[key][1] if key in self._keys else None

    def _nothing(self) -> yaml.MappingNode:
        return yaml.MappingNode("tag:yaml.org,2002:map", [], start_mark=self._mark, end_mark=self._mark)

    def _items(self, key: str) -> Iterator[yaml.Node]:
        node = self._take(key)
        if isinstance(node, yaml.SequenceNode):
            yield from node.value
        elif node is not None and node.tag != _NULL:
            self.wrong(key, f"must be a list, not {_kind(node)}")

    def _scalar(
        self,
        key: str,
        default: T,
        read: Callable[[yaml.ScalarNode], V],
        *,
        none: str = "has no value; leave the key out to have its default",
    ) -> V | T:
        none = "has no value, and needs one" if key in self._required else none
        node = self._take(key)
        if node is None:
            return default
        try:
            if not isinstance(node, yaml.ScalarNode):
                raise ValueError(f"must be a single value, not {_kind(node)}")
            if node.tag == _NULL:
                raise ValueError(none)
            return read(node)
        except ValueError as error:
            self.wrong(key, str(error))
            return default


def as_text(node: yaml.ScalarNode) -> str:
    """A word; a number or yes/no that was meant as one is told to be quoted."""
    if node.tag != _STR:
        raise ValueError(f'must be text, not {_shown(node)}; write "{node.value}" if that is what you mean')
    if not node.value.strip():
        raise ValueError("must not be empty")
    return check_characters(str(node.value))


def check_characters(text: str) -> str:
    """The text. ValueError where YAML's escapes have made what no file, no message and no program can be given."""
    if "\0" in text:
        raise ValueError("holds a NUL character: take it out")
    if not is_text(text):
        raise ValueError("holds half a character (of a pair such as \\uD83D\\uDE00): write the character itself")
    return text


def tidy(text: str) -> str:
    """What is told of a document, in one line of a length that can be read, whatever was written there."""
    short = _LONG_WORD.sub(lambda found: f"{found[1]}…", printable(text))
    return short if len(short) <= MESSAGE_CHARS else f"{short[:MESSAGE_CHARS]}…"


def near(word: str, known: Collection[str]) -> str:
    """`` (other?)`` when one of the known words is close enough to be what was meant, else nothing."""
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f" ({close[0]}?)" if close else ""


def read_document(path: Path) -> tuple[Section, Findings]:
    """The top mapping of a file. ConfigError when it can't be read, or is no mapping."""
    return parse_document(_read_text(path), str(path))


def parse_document(text: str, file: str) -> tuple[Section, Findings]:
    """The top mapping of a text, which its writer knows as ``file``. ConfigError when it is no mapping."""
    root = _compose(text, file)
    if root is None:
        raise _refused(file, "is empty; write at least one key, or leave the file out")
    if not isinstance(root, yaml.MappingNode):
        raise _refused(file, f"must be a mapping (key: value) at the top, not {_kind(root)}")
    _check_expansion(root, file)
    findings = Findings(file)
    return Section(root, "", findings), findings


def _compose(text: str, file: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        name = printable(file)
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        told = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError([Problem(key="", message=tidy(f"is not YAML: {told}"), where=place)]) from None
    except yaml.YAMLError as error:
        raise _refused(file, f"is not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise _refused(file, "is nested too deep") from None


def _read_text(path: Path) -> str:
    try:
        raw = read_ordinary(path, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _refused(str(path), f"can't be read: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise _refused(str(path), f"is larger than {MAX_FILE_BYTES // 1024} KiB: not a configuration")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _refused(str(path), f"is not UTF-8 (line {line})") from None


def _check_expansion(root: yaml.Node, file: str) -> None:
    """Aliases are fine while what they stand for is finite and small."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1 + len(node.value) // VALUE_CHARS
        if id(node) in open_nodes:
            raise _refused(file, f"line {node.start_mark.line + 1} holds an alias of itself")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            sizes[id(node)] = 1 + sum(size(child) for child in _children(node))
            open_nodes.discard(id(node))
        return sizes[id(node)]

    if size(root) > MAX_VALUES:
        raise _refused(file, f"stands for more than {MAX_VALUES} values: not a configuration")


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    for child in node.value:
        if isinstance(child, tuple):
            yield from child
        else:
            yield child


def _refused(file: str, message: str) -> ConfigError:
    return ConfigError([Problem(key="", message=tidy(message), where=printable(file))])


def _quantity(node: yaml.ScalarNode) -> str:
    if node.tag not in {_STR, _INT, _FLOAT}:
        raise ValueError(f"must be a number with a unit, not {_shown(node)}")
    return str(node.value)


def _within(value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ValueError(f"must be from {low} to {high}, not {value}")
    return value


def _shown(node: yaml.ScalarNode) -> str:
    return repr(node.value if len(node.value) <= 60 else node.value[:57] + "...")


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
