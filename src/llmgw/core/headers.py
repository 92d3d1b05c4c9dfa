"""Whether a file can be the weights that its name promises, by its beginning: what an engine would find out late."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmgw.core import gguf, safetensors
from llmgw.core.weights import list_parts

# As much of a file as is ever looked at: what goes on behind it is believed.
HEAD_BYTES = 16 * 1024 * 1024

Header = gguf.Header | safetensors.Header

_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_MARKUP = (".html", ".htm", ".xhtml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a file's beginning says. ``wrong``: why it can't be what its name promises, as words that follow that name.
    ``header``: None where it has none, or not all of it is at hand; then ``needs`` is how many bytes of the beginning
    that takes at least, if that says more."""

    wrong: str | None = None
    header: Header | None = None
    needs: int = 0


def check_header(name: str, head: bytes, size: int) -> str | None:
    """What is wrong with a file of ``size`` bytes that begins with ``head``, as words that follow its name; None where
    that says nothing against it. Total; more of ``head`` than HEAD_BYTES is not looked at."""
    return judge_header(name, head, size).wrong


def judge_header(name: str, head: bytes, size: int) -> Judged:
    """The same, with the header itself. Total."""
    head, kind = head[:HEAD_BYTES], name.lower()
    if head.startswith(_POINTER):
        return Judged(
            wrong="is a git-lfs pointer, and not the file that it points to: fetch it with `git lfs pull`, or from the "
            "hub"
        )
    if not kind.endswith(_MARKUP) and _PAGE.match(head[:1024]):
        return Judged(wrong="is an HTML page, and not the file: its address shows a page about it, or asks for a login")
    if not kind.endswith((".gguf", ".safetensors")):
        return Judged()
    if size == 0:
        return Judged(wrong="is empty")
    return _judge_gguf(name, head, size) if kind.endswith(".gguf") else _judge_safetensors(head, size)


def list_parts_of(name: str, header: Header | None) -> tuple[str, ...]:
    """All files that a model of this name is in, the first one first: of a GGUF file by what its header says where that
    is at hand, for an engine goes by that."""
    if isinstance(header, gguf.Header) and _read_split(header) is None:
        return (name,)
    return list_parts(name)


def check_parts(headers: Mapping[str, Header]) -> str | None:
    """What is wrong with the parts of one model beside each other, each of them whole: words that begin with a file's
    name; None where nothing is. All parts are there, the first one first."""
    owners: dict[str, str] = {}
    seen: dict[frozenset[str], str] = {}
    for name, header in headers.items():
        names = frozenset(tensor.name for tensor in header.tensors)
        # (of safetensors two may have one tensor: what ties them is written twice here and there)
        if names and names in seen:
            return f"{name} holds the same tensors as {seen[names]}: one of them is a copy of the other"
        seen[names] = name
        if isinstance(header, gguf.Header):
            if twice := next((each for each in sorted(names) if each in owners), None):
                return f"{name} holds {twice[:80]!r}, and {owners[twice]} as well: they are not of one model"
            owners |= dict.fromkeys(names, name)
    first = next(iter(headers.items()), None)
    if first is not None and isinstance(first[1], gguf.Header):
        told = first[1].metadata.get("split.tensors.count")
        if type(told) is int and told != len(owners):
            return f"{first[0]} tells of {told} tensors, and its parts have {len(owners)}: they are not of one model"
    return None


def _judge_gguf(name: str, head: bytes, size: int) -> Judged:
    found = gguf.read(head)
    if isinstance(found, gguf.Wrong):
        return Judged(wrong=found.why)
    if isinstance(found, gguf.More):
        return Judged(wrong=_tell_cut(size, found.at_least), needs=found.at_least)
    return Judged(wrong=_tell_cut(size, found.file_bytes) or _tell_misnamed(name, found), header=found)


def _judge_safetensors(head: bytes, size: int) -> Judged:
    found = safetensors.read(head)
    if isinstance(found, safetensors.Wrong):
        return Judged(wrong=found.why)
    if isinstance(found, safetensors.More):
        return Judged(wrong=_tell_cut(size, found.at_least), needs=found.at_least)
    if size > found.file_bytes:
        return Judged(wrong=f"has {size} bytes, and its header tells of {found.file_bytes} only: it is broken")
    return Judged(wrong=_tell_cut(size, found.file_bytes), header=found)


def _read_split(header: gguf.Header) -> tuple[int, int] | None:
    """Which part it is, from 1 on, and of how many; None: it is a model by itself."""
    number, count = header.metadata.get("split.no"), header.metadata.get("split.count")
    return (number + 1, count) if type(number) is int and type(count) is int and count > 1 else None


def _tell_misnamed(name: str, header: gguf.Header) -> str | None:
    split = _read_split(header)
    if split is None:
        return None
    number, count = split
    parts = list_parts(name)
    if len(parts) == count and 1 <= number <= count and parts[number - 1] == name:
        return None
    # An engine finds the others by their names, and ends where one is another part than that.
    return (
        f"says in its header that it is part {number} of {count}: its name has to end in "
        f"-{number:05}-of-{count:05}.gguf, or it is another file than its name says"
    )


def _tell_cut(size: int, needed: int | None) -> str | None:
    return f"ends early: it has {size} of at least {needed} bytes" if needed is not None and needed > size else None
