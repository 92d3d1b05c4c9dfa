"""Whether a file can be the weights that its name promises, by its beginning: what an engine would find out late."""

from __future__ import annotations

import re

from llmgw.core import gguf, safetensors

# As much of a file as is ever looked at: what goes on behind it is believed.
HEAD_BYTES = 16 * 1024 * 1024

_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_MARKUP = (".html", ".htm", ".xhtml")


def check_header(name: str, head: bytes, size: int) -> str | None:
    """What is wrong with a file of ``size`` bytes that begins with ``head``, as words that follow its name; None where
    that says nothing against it. Total; more of ``head`` than HEAD_BYTES is not looked at."""
    head, kind = head[:HEAD_BYTES], name.lower()
    if head.startswith(_POINTER):
        return "is a git-lfs pointer, and not the file that it points to: fetch it with `git lfs pull`, or from the hub"
    if not kind.endswith(_MARKUP) and _PAGE.match(head[:1024]):
        return "is an HTML page, and not the file: its address shows a page about it, or asks for a login"
    if not kind.endswith((".gguf", ".safetensors")):
        return None
    if size == 0:
        return "is empty"
    return _check_gguf(head, size) if kind.endswith(".gguf") else _check_safetensors(head, size)


def _check_gguf(head: bytes, size: int) -> str | None:
    found = gguf.read(head)
    if isinstance(found, gguf.Wrong):
        return found.why
    needed = found.at_least if isinstance(found, gguf.More) else found.file_bytes
    return _tell_cut(size, needed) if needed is not None and needed > size else None


def _check_safetensors(head: bytes, size: int) -> str | None:
    found = safetensors.read(head)
    if isinstance(found, safetensors.Wrong):
        return found.why
    if isinstance(found, safetensors.More):
        return _tell_cut(size, found.at_least) if found.at_least > size else None
    if size > found.file_bytes:
        return f"has {size} bytes, and its header tells of {found.file_bytes} only: it is broken"
    return _tell_cut(size, found.file_bytes) if size < found.file_bytes else None


def _tell_cut(size: int, needed: int) -> str:
    return f"ends early: it has {size} of at least {needed} bytes"
