"""What a safetensors file, and the index over several of them, say of themselves.

Both are JSON of somebody else's: nothing in them raises.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The format's own limit.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 64
_MAX_SIZE = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """It lies at ``start`` to ``stop`` behind the header."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """``header_bytes`` is where the tensors begin, and ``data_bytes`` is all from there on."""

    tensors: tuple[Tensor, ...]
    header_bytes: int
    data_bytes: int
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def file_bytes(self) -> int:
        """How long the file is, to the byte."""
        return self.header_bytes + self.data_bytes

    @property
    def mostly(self) -> str | None:
        """The kind of tensor that most of the bytes are of."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.stop - tensor.start
        return max(sizes, key=lambda kind: sizes[kind], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What ``model.safetensors.index.json`` lists: the names of all files, and the bytes of the tensors in them where
    it says so."""

    files: tuple[str, ...]
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """The header goes on: so many bytes from the file's beginning are needed at least."""

    at_least: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """It is no such header, or a broken one; ``why`` follows the name of the file in a sentence."""

    why: str


def read(head: bytes) -> Header | More | Wrong:
    """The header of a file that begins like this."""
    if len(head) < 8:
        return More(at_least=8)
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        return Wrong(why="is no safetensors file: it does not begin with the length of a header")
    if len(head) > 8 and head[8:9] != b"{":
        return Wrong(why="is no safetensors file: its header is no JSON")
    if len(head) < 8 + length:
        return More(at_least=8 + length)
    facts = _decode(head[8 : 8 + length])
    if facts is None:
        return Wrong(why="has a header that can't be read as JSON: it is broken")
    noted = facts.pop("__metadata__", None)
    tensors = [_read_tensor(name, told) for name, told in facts.items()]
    whole = tuple(each for each in tensors if each is not None)
    if len(whole) < len(tensors):
        return Wrong(why="has a tensor without a shape, a type or a place in its header: it is broken")
    return Header(
        tensors=whole,
        header_bytes=8 + length,
        data_bytes=max((each.stop for each in whole), default=0),
        metadata={str(key): str(value) for key, value in noted.items()} if isinstance(noted, dict) else {},
    )


def read_index(text: bytes) -> Index | Wrong:
    """What an index lists."""
    facts = _decode(text)
    listed = facts.get("weight_map") if facts is not None else None
    if facts is None or not isinstance(listed, dict):
        return Wrong(why="is no index of safetensors files: it has no weight_map")
    names = dict.fromkeys(listed.values()) if all(isinstance(name, str) for name in listed.values()) else {}
    if not names or not all(_is_plain(name) for name in names):
        return Wrong(why="names no files, or none that can be: it is broken")
    noted = facts.get("metadata")
    total = noted.get("total_size") if isinstance(noted, dict) else None
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    return Index(files=tuple(sorted(names)), total_bytes=total if _is_size(total) and total else None)


def _read_tensor(name: str, told: Any) -> Tensor | None:
    if not isinstance(told, dict):
        return None
    shape, kind, place = told.get("shape"), told.get("dtype"), told.get("data_offsets")
    if not isinstance(kind, str) or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        return None
    if not all(_is_size(side) for side in shape) or math.prod(shape) > _MAX_SIZE:
        return None
    if not isinstance(place, list) or len(place) != 2 or not all(_is_size(each) for each in place):
        return None
    start, stop = place
    return Tensor(name=name, shape=tuple(shape), kind=kind, start=start, stop=stop) if start <= stop else None


def _decode(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _is_plain(name: str) -> bool:
    """A file beside the index, or below it."""
    return bool(name) and name.isprintable() and not any(part in ("", ".", "..") for part in name.split("/"))
