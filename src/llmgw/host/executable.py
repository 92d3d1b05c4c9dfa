"""Why the system does not start a program, in words: its errno alone often names the wrong thing."""

from __future__ import annotations

import errno
import os
import platform
from dataclasses import dataclass
from pathlib import Path

# What the machine lacks at this moment, and another try may find; the last: somebody is writing the file.
PASSING = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY})

_ELF = b"\x7fELF"
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


def explain_start(program: str, error: OSError) -> Unstartable:
    """What is behind the error that starting ``program`` gave. Blocks."""
    if error.filename is not None and os.fsdecode(error.filename) != program:
        # The folder that it is to run in, or its log.
        return Unstartable(reason=f"{os.fsdecode(error.filename)}: {error.strerror or error}")
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
    if built != here:
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


def _read_machine(head: bytes) -> str:
    number = int.from_bytes(head[18:20], "big" if head[5:6] == b"\x02" else "little")
    return _MACHINES.get(number, f"another CPU (number {number})")


def _read_head(program: str) -> bytes:
    try:
        with Path(program).open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""
