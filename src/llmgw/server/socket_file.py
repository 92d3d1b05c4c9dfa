"""Opens the unix socket that only the door dials: in a folder that nobody else may enter, over what a crash left."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmgw.errors import LlmgwError

# What the kernel keeps for the path of a unix socket, its closing zero taken off; a longer one can't be bound at all.
MAX_PATH_BYTES = 107


@contextmanager
def open_socket_file(path: str, *, backlog: int) -> Iterator[socket.socket]:
    """A listening socket at ``path``; its file is gone again at the end, unless another process has replaced it.

    A socket file on which nobody listens is replaced. One that is in use, a file of another kind and a folder of
    another user are left alone: LlmgwError, as for what can't be made or looked into.
    """
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise LlmgwError(
            f"the socket path {path} has {size} bytes, more than the {MAX_PATH_BYTES} that the system takes: "
            "choose a shorter folder"
        )
    with _in_words(path):
        _make_private(Path(path).parent)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.setblocking(False)
        with _in_words(path):
            _clear(path)
            listener.bind(path)
            made = os.stat(path, follow_symlinks=False)
        try:
            listener.listen(backlog)
            yield listener
        finally:
            with suppress(FileNotFoundError):
                found = os.stat(path, follow_symlinks=False)
                if (found.st_dev, found.st_ino) == (made.st_dev, made.st_ino):
                    os.unlink(path)


@contextmanager
def _in_words(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = os.fsdecode(error.filename or path)
        reason = "it is a file, not a folder" if isinstance(error, FileExistsError) else error.strerror or str(error)
        raise LlmgwError(
            f"the socket {path} can't be opened ({where}: {reason}): mend that, or choose another folder"
        ) from error


def _make_private(folder: Path) -> None:
    """The folder is what keeps others out: not every system asks for the rights of the socket file itself."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise LlmgwError(f"{folder} is not a folder of this user: remove it, or choose another folder")
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)


def _clear(path: str) -> None:
    """Remove a socket file on which nobody listens, and nothing else."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise LlmgwError(f"{path} is in the way and is not a socket: move it, or choose another folder")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            # A full backlog: somebody listens, and is busy.
            pass
    raise LlmgwError(f"another llmgw listens on {path}: stop it, or choose another folder")
