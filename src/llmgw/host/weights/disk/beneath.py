"""What lies below a folder, reached step by step from its open descriptor: a link that somebody has planted there is
never followed, neither to write nor to remove."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A pipe would hold whoever opens it until somebody writes into it.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Folder:
    """An open folder. Names below it may have several parts (``a/b``); each part must be a real folder.

    Everything here blocks, and raises OSError with the whole path in ``filename``.
    """

    __slots__ = ("file", "path")

    def __init__(self, file: int, path: Path) -> None:
        self.file = file
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """A second time does nothing."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def copy(self) -> Folder:
        """The same folder, to be closed by itself."""
        return Folder(os.dup(self.file), self.path)

    def enter(self, name: str, *, make: bool = False) -> Folder:
        """The folder of this name; ``make``: what is missing of it is made."""
        folder = self.copy()
        try:
            for part in name.split("/"):
                if make:
                    folder.make(part)
                inner = folder._open(part, _FOLDER | os.O_NOFOLLOW)
                folder.close()
                folder = Folder(inner, folder.path / part)
        except BaseException:
            folder.close()
            raise
        return folder

    def make(self, name: str) -> None:
        """Make a folder of one part, if it is not there."""
        with self._told(name):
            try:
                os.mkdir(name, dir_fd=self.file)
            except FileExistsError:
                return
            # Else a power cut takes the new name, and all that was written below it with its word.
            os.fsync(self.file)

    def open(self, name: str, flags: int, *, mode: int = 0o666) -> int:
        """Open the plain file of this name, and refuse what is none. ``mode`` is of a new one, less the umask."""
        with self._parent(name) as (parent, last):
            file = parent._open(last, flags | _FILE, mode)
        try:
            with self._told(name):
                _check(os.fstat(file), flags)
        except BaseException:
            os.close(file)
            raise
        return file

    def read(self, name: str, limit: int) -> bytes:
        """The first ``limit`` bytes of a file."""
        with self._told(name), os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read(limit)

    def write(self, name: str, content: bytes, *, mode: int = 0o666) -> None:
        """Have a file hold this, on the disk when this returns. A kill in the middle leaves a part of it."""
        # Not emptied while it is opened: it may prove to be another's.
        with self._told(name), os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT, mode=mode), "wb") as file:
            file.truncate(0)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def status(self, name: str) -> os.stat_result | None:
        """What is at this name; None when nothing is, or something on the way to it is no folder."""
        try:
            with self._parent(name) as (parent, last), parent._told(last):
                return os.stat(last, dir_fd=parent.file, follow_symlinks=False)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise

    def names(self) -> list[str]:
        """What is in it, sorted."""
        with self._told(""):
            return sorted(os.listdir(self.file))

    def has_folder(self, name: str) -> bool:
        """Whether a real folder has this name."""
        found = self.status(name)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """All that is below, what is in a folder before the folder itself. What goes away meanwhile is left out."""
        for name in self.names():
            found = self.status(name)
            if found is None:
                continue
            if stat.S_ISDIR(found.st_mode):
                try:
                    with self.enter(name) as inner:
                        yield from ((f"{name}/{below}", each) for below, each in inner.walk())
                except FileNotFoundError:
                    continue
            yield name, found

    def rename(self, old: str, new: str) -> None:
        """Both of one part. A folder replaces only an empty one."""
        with self._told(new):
            os.rename(old, new, src_dir_fd=self.file, dst_dir_fd=self.file)

    def unlink(self, name: str) -> None:
        """Remove a file, or a link itself; nothing happens when it is not there."""
        try:
            with self._parent(name) as (parent, last), parent._told(last):
                os.unlink(last, dir_fd=parent.file)
        except FileNotFoundError:
            return

    def remove(self, name: str) -> int:
        """Remove a folder, with all that is in it, or a file. Returns the bytes that this gives back to the disk."""
        found = self.status(name)
        if found is None:
            return 0
        if not stat.S_ISDIR(found.st_mode):
            self.unlink(name)
            return count_bytes(found)
        with self.enter(name) as inner:
            if os.fstat(inner.file).st_dev != os.fstat(self.file).st_dev:
                # What is mounted here was put here by a person.
                raise OSError(errno.EBUSY, "something is mounted there", str(inner.path))
            freed = sum(inner.remove(each) for each in inner.names())
        with self._parent(name) as (parent, last), parent._told(last):
            os.rmdir(last, dir_fd=parent.file)
        return freed

    def sync(self) -> None:
        """When this returns, the names in it are on the disk."""
        with self._told(""):
            os.fsync(self.file)

    def _open(self, name: str, flags: int, mode: int = 0o666) -> int:
        with self._told(name):
            try:
                return os.open(name, flags, mode, dir_fd=self.file)
            except OSError as error:
                # The kernel's own words for it are "not a directory", or "too many levels of links".
                if error.errno in (errno.ELOOP, errno.ENOTDIR) and self._is_link(name):
                    raise OSError(errno.ELOOP, "it is a link, and none is followed there") from error
                raise

    def _is_link(self, name: str) -> bool:
        return stat.S_ISLNK(os.stat(name, dir_fd=self.file, follow_symlinks=False).st_mode)

    @contextmanager
    def _parent(self, name: str) -> Iterator[tuple[Folder, str]]:
        above, _, last = name.rpartition("/")
        if not above:
            yield self, last
            return
        with self.enter(above) as parent:
            yield parent, last

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path / name), None
            raise


def open_folder(path: Path, *, make: bool = False) -> Folder:
    """The folder at a path that the operator has chosen: links in that path itself are followed."""
    if make:
        path.mkdir(parents=True, exist_ok=True)
    return Folder(os.open(path, _FOLDER), path)


def _check(found: os.stat_result, flags: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file")
    if flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
        # What is written here would be written there as well, and nobody knows where that is.
        raise OSError(errno.EINVAL, "it is a hard link to another file")


def count_bytes(found: os.stat_result) -> int:
    """What a file takes from the disk: holes take nothing, and a second name of the same file neither."""
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        return 0
    return min(found.st_size, found.st_blocks * 512)
