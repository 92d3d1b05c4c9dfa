"""What a GGUF file says of itself in its header, read from as much of its beginning as there is.

The header is whatever somebody has put on the network: nothing in it raises, and none of its counts is believed before
the bytes are there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Longer than the header of any model, with its whole vocabulary.
MAX_HEADER_BYTES = 128 * 1024 * 1024
# Strings, arrays and tensors, each of which is looked at by itself: a vocabulary with its merges has a million.
MAX_ITEMS = 3_000_000
MAX_KEYS = 20_000
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 8
MAX_NAME_BYTES = 64 * 1024
MAX_DEPTH = 4
# Of an array with more numbers only the length is kept: facts by layer have fewer.
MAX_KEPT = 4096
_MAX_SIZE = 2**62

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_WIDTHS = {kind: struct.calcsize(f"<{code}") for kind, code in _NUMBERS.items()}

# The name of a tensor's type, how many of its values make a block, and the bytes of one.
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """An array of which only the length is kept."""

    length: int


Value = int | float | bool | str | tuple[int | float | bool, ...] | Counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """``start`` is where it begins behind the header. A ``kind`` that is not known here is a number, and ``size_bytes``
    of such a tensor None."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    size_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """``header_bytes`` is where the tensors begin. ``data_bytes`` is all from there on, None where the size of one of
    them is not known."""

    version: int
    metadata: Mapping[str, Value] = field(hash=False)
    tensors: tuple[Tensor, ...]
    header_bytes: int
    data_bytes: int | None

    @property
    def file_bytes(self) -> int | None:
        """How long the file is at least."""
        return None if self.data_bytes is None else self.header_bytes + self.data_bytes

    @property
    def mostly(self) -> str | None:
        """The kind of tensor that most of the bytes are of."""
        return name_mostly((self,))


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """The header goes on: so many bytes from the file's beginning are needed at least."""

    at_least: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """It is no such header, or a broken one; ``why`` follows the name of the file in a sentence."""

    why: str


def name_mostly(headers: Iterable[Header]) -> str | None:
    """The same of all parts of one model."""
    sizes: dict[str, int] = {}
    for header in headers:
        for tensor in header.tensors:
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + (tensor.size_bytes or 0)
    return max(sizes, key=lambda kind: sizes[kind], default=None)


class _Short(Exception):  # noqa: N818 - never leaves this module
    """The bytes end before the header does."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least = at_least


class _Bad(Exception):  # noqa: N818
    """What stands there can't be."""


def read(head: bytes) -> Header | More | Wrong:
    """The header of a file that begins like this. Total, and done in time that grows with ``head`` alone."""
    if head[:4] != MAGIC[: len(head)]:
        return Wrong(why="is no GGUF file: it does not begin with GGUF")
    if len(head) < 24:
        return More(at_least=24)
    (version,) = struct.unpack_from("<I", head, 4)
    if version not in VERSIONS:
        return Wrong(why=_tell_version(version))
    try:
        return _Reader(head, version).read()
    except _Short as short:
        if short.at_least > MAX_HEADER_BYTES:
            return Wrong(why=f"has a header that claims more than {MAX_HEADER_BYTES // 1024**2} MiB")
        return More(at_least=short.at_least)
    except _Bad as bad:
        return Wrong(why=str(bad))


def _tell_version(version: int) -> str:
    if version and version & 0xFFFF == 0:
        return "is a big-endian GGUF file, which no engine here reads: get or convert the little-endian one"
    if version == 1:
        return "is of GGUF version 1, which no engine reads any more: convert the model again"
    return f"is of GGUF version {version}; versions 2 and 3 can be read"


class _Reader:
    """Reads one header from its beginning; raises _Short and _Bad."""

    def __init__(self, head: bytes, version: int) -> None:
        self._head = head
        self._version = version
        self._at = 8
        self._items = 0

    def read(self) -> Header:
        tensor_count, key_count = self._number("Q"), self._number("Q")
        if key_count > MAX_KEYS or tensor_count > MAX_TENSORS:
            raise _Bad(f"claims {key_count} keys and {tensor_count} tensors: it is broken")
        metadata = self._read_metadata(key_count, tensor_count)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 2**30 or alignment & (alignment - 1):
            raise _Bad("has an alignment that is no power of two: it is broken")
        tensors = self._read_tensors(tensor_count, alignment)
        ends = [None if tensor.size_bytes is None else tensor.start + tensor.size_bytes for tensor in tensors]
        known = [end for end in ends if end is not None]
        return Header(
            version=self._version,
            metadata=metadata,
            tensors=tensors,
            header_bytes=-(-self._at // alignment) * alignment if tensors else self._at,
            data_bytes=max(known, default=0) if len(known) == len(ends) else None,
        )

    def _read_metadata(self, count: int, tensor_count: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for left in range(count, 0, -1):
            # The shortest key is 13 bytes, the shortest tensor 32: no need to come back for each of them.
            self._ask(left * 13 + tensor_count * 32)
            key = self._name()
            if key in found:
                raise _Bad(f"has the key {key[:80]!r} twice: it is broken")
            found[key] = self._value(self._number("I"))
        return found

    def _read_tensors(self, count: int, alignment: int) -> tuple[Tensor, ...]:
        found = []
        for left in range(count, 0, -1):
            self._ask(left * 32)
            found.append(self._tensor(alignment))
        return tuple(found)

    def _tensor(self, alignment: int) -> Tensor:
        self._count(1)
        name = self._name()
        dimensions = self._number("I")
        if dimensions > MAX_DIMENSIONS:
            raise _Bad(f"has a tensor of {dimensions} dimensions: it is broken")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        kind, start = self._number("I"), self._number("Q")
        values = math.prod(shape)
        if values > _MAX_SIZE or start > _MAX_SIZE or start % alignment:
            raise _Bad(f"has a tensor {name[:80]!r} of a size or place that can't be: it is broken")
        title, block, width = TYPES.get(kind, (str(kind), 0, 0))
        if block and (shape[0] if shape else 1) % block:
            raise _Bad(f"has a tensor {name[:80]!r} whose rows are no whole blocks of {title}: it is broken")
        size = values // block * width if block else None
        return Tensor(name=name, shape=shape, kind=title, start=start, size_bytes=size)

    def _value(self, kind: int, depth: int = 0) -> Value:
        if kind in _NUMBERS:
            return self._scalar(kind)
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise _Bad(f"has a value of type {kind}, which there is not: it is broken")
        if depth == MAX_DEPTH:
            raise _Bad("has arrays in arrays without end: it is broken")
        inner, length = self._number("I"), self._number("Q")
        if inner in _NUMBERS:
            return self._numbers(inner, length)
        if inner == _STRING:
            self._count(length)
            self._skip_strings(length)
        else:
            # Each of them takes as long as many strings do.
            self._count(length * 16)
            for left in range(length, 0, -1):
                self._ask(left * 12)
                # (kept by their number alone: nothing that is asked for here lies in arrays of arrays)
                self._value(inner, depth + 1)
        return Counted(length=length)

    def _scalar(self, kind: int) -> int | float | bool:
        value: int | float | bool = self._number(_NUMBERS[kind])
        return value

    def _numbers(self, kind: int, length: int) -> Value:
        if length > MAX_KEPT:
            self._take(length * _WIDTHS[kind])
            return Counted(length=length)
        start = self._take(length * _WIDTHS[kind])
        return struct.unpack_from(f"<{length}{_NUMBERS[kind]}", self._head, start)

    def _skip_strings(self, count: int) -> None:
        """A vocabulary: the one place where each turn counts."""
        self._ask(count * 8)
        head, at, end = self._head, self._at, len(self._head)
        number = int.from_bytes
        for left in range(count, 0, -1):
            after = at + 8
            if after > end:
                raise _Short(at + left * 8)
            at = after + number(head[at:after], "little")
        self._at = at
        self._ask(0)

    def _name(self) -> str:
        text = self._text()
        if not text or len(text) > MAX_NAME_BYTES:
            raise _Bad("has a name that is empty or without end: it is broken")
        return text

    def _text(self) -> str:
        length = self._number("Q")
        start = self._take(length)
        return self._head[start : start + length].decode("utf-8", "replace")

    def _number(self, code: str) -> int:
        start = self._take(struct.calcsize(f"<{code}"))
        value: int = struct.unpack_from(f"<{code}", self._head, start)[0]
        return value

    def _take(self, count: int) -> int:
        """Where the next bytes begin, so many of them."""
        self._ask(count)
        start = self._at
        self._at += count
        return start

    def _ask(self, count: int) -> None:
        if self._at + count > len(self._head):
            raise _Short(self._at + count)

    def _count(self, items: int) -> None:
        self._items += items
        if self._items > MAX_ITEMS:
            raise _Bad(f"claims more than {MAX_ITEMS} strings and tensors: it is broken")
