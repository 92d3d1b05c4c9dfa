"""Why the system does not start a program, in words: its errno alone often names the wrong thing."""

from __future__ import annotations

import errno
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmgw.config.paths import is_text

# What the machine lacks at this moment, and another try may find; the last: somebody is writing the file.
PASSING = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY})

_ELF = b"\x7fELF"
# 32 and 64 bits; little and big end first; the header of the shorter kind.
_CLASSES, _ORDERS, _ELF_BYTES = (b"\x01", b"\x02"), (b"\x01", b"\x02"), 52
_MACHINES = {
    3: "i386",
    8: "mips",
    20: "ppc",
    21: "ppc64",
    22: "s390x",
    40: "arm",
    62: "x86_64",
    183: "aarch64",
    243: "riscv64",
    258: "loongarch64",
}
_HEAD_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstartable:
    """Why a program can't be executed, and what to do about it."""

    reason: str
    remedy: str | None = None


def find_unusable(path: str) -> Unstartable | None:
    """Why this can't be a program, before anybody tries to start it; None where it may be one. Blocks."""
    if not is_text(path):
        # It is told to others, as text.
        return Unstartable(reason=f"{os.fsencode(path)!r} is not UTF-8", remedy="give the program a path that is")
    if os.path.isdir(path):
        return Unstartable(reason="it is a folder", remedy="give the program in it")
    if not os.path.exists(path):
        return Unstartable(reason="it is not there", remedy="give the path of the engine's program")
    if not os.access(path, os.X_OK):
        return Unstartable(reason="it may not be executed", remedy="`chmod +x` it, or give the program itself")
    return None


def advise_write(error: OSError, path: str) -> str | None:
    """What to do about a file that can't be written; None where the system's words are all there is."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return f"make room on the disk of {path}"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"see that llmgw may write to {path}"
    return None


def explain_start(program: str, error: OSError) -> Unstartable:
    """What is behind the error that starting ``program`` gave. Blocks."""
    if error.filename is not None and os.fsdecode(error.filename) != program:
        # The folder that it is to run in, or its log.
        path = os.fsdecode(error.filename)
        return Unstartable(reason=f"{path}: {error.strerror or error}", remedy=advise_write(error, path))
    match error.errno:
        case errno.ENOEXEC:
            return _explain_format(_read_head(program))
        case errno.ENOENT if os.path.exists(program):
            return _explain_interpreter(_read_head(program))
        case errno.EACCES | errno.EPERM:
            return Unstartable(
                reason=error.strerror or str(error),
                remedy="make it executable (chmod +x), and see that its file system is not mounted noexec",
            )
    return Unstartable(reason=error.strerror or str(error))


def _explain_format(head: bytes) -> Unstartable:
    here = platform.machine()
    if not head.startswith(_ELF):
        return Unstartable(
            reason="it is neither a binary nor a script whose first line begins with #!",
            remedy="give the path of the program itself",
        )
    built = _read_machine(head)
    if built is not None and built != here:
        return Unstartable(
            reason=f"wrong CPU architecture: it is built for {built}, and this machine is {here}",
            remedy=f"install a build for {here}",
        )
    return Unstartable(reason="its file is damaged: it is no whole binary", remedy="install it again")


def _explain_interpreter(head: bytes) -> Unstartable:
    """The file is there, so what the system misses is what it starts first to run it."""
    if head.startswith(b"#!"):
        words = head[2:].splitlines()[0].decode(errors="replace").split() or [""]
        return Unstartable(
            reason=f"the interpreter {words[0]}, which its first line names, is not there",
            remedy="install it again: its environment was moved or removed",
        )
    return Unstartable(
        reason="the system's loader that it was built for is not there",
        remedy=f"install a build for this distribution and {platform.machine()}",
    )


def _read_machine(head: bytes) -> str | None:
    """None where the header is none: what follows the first four bytes has to make sense."""
    order: Literal["big", "little"] = "big" if head[5:6] == b"\x02" else "little"
    sound = head[4:5] in _CLASSES and head[5:6] in _ORDERS and head[6:7] == b"\x01"
    if len(head) < _ELF_BYTES or not sound or int.from_bytes(head[20:24], order) != 1:
        return None
    number = int.from_bytes(head[18:20], order)
    return _MACHINES.get(number, f"another CPU (number {number})")


def _read_head(program: str) -> bytes:
    try:
        with Path(program).open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""
