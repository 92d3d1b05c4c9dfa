"""What an agent must still know after its own death: one file per shard that runs, one of what was desired, and a lock
that admits one agent."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from llmgw.core.effects import Desire
from llmgw.core.replica import ShardId, ShardSpec
from llmgw.errors import UsageError
from llmgw.host.logfile import LogFile, prune_logs

log = logging.getLogger(__name__)

# How often the lock of a dead holder is tried for.
LOCK_TRIES = 50
LOCK_PAUSE_SECONDS = 0.02

# The disk, the quota, and the limit on what this process may write.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One started engine. ``pid``, ``start_time`` (clock ticks since boot) and ``boot_id`` together name a process
    for all time; ``argv_hash`` tells which command line it was started with. ``serves``: it answers HTTP. ``proven``:
    it has answered a request for one token, where its health alone does not tell. ``weights``: what it runs by of all
    that llmgw has fetched, as pairs of source and commit."""

    spec: ShardSpec
    pid: int
    start_time: int
    boot_id: str
    argv_hash: str
    port: int
    log: str
    marker: str
    serves: bool = True
    proven: bool = False
    weights: tuple[tuple[str, str], ...] = ()


class StateTaken(UsageError):  # noqa: N818 - named by what happens next, like all of them
    """Another program works with the state folder; ``holder`` is its pid, as far as it is known."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(
            f"another llmgw (pid {holder}) works with the state folder {path}: stop it first, "
            "or give this one another state folder"
        )
        self.holder = holder


class StateFolder:
    """The folder of one agent's state. Everything here blocks: call it in a thread."""

    __slots__ = ("cache", "desired", "logs", "path", "shards")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards = path / "shards"
        self.logs = path / "logs"
        self.cache = path / "cache"
        self.desired = path / "desired.json"

    def hold(self) -> AbstractContextManager[None]:
        """Keep a second program off this folder (``hold_state``)."""
        return hold_state(self.path)

    def make(self) -> None:
        """Create what is missing. Raises UsageError when a folder can't be made, or may not be read and written."""
        for folder in (self.path, self.shards, self.logs):
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                # Now, and not as a failed launch or a forgotten engine later.
                if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, "it may not be read and written", str(folder))
            except OSError as error:
                raise _unusable(self.path, error) from error

    def make_cache(self) -> Path:
        """The folder for what engines keep over restarts; made where somebody has cleared it. Raises OSError."""
        self.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.cache

    def log_path(self, shard: ShardId) -> Path:
        """Where the shard's engine writes."""
        return self.logs / f"{_file_name(shard)}.log"

    def open_log(self, path: Path, hide: Callable[[str], str]) -> LogFile:
        """A reader of an engine's log from its beginning; ``hide`` takes out of each line what nobody is to read."""
        return LogFile(path, hide)

    def prune_logs(self, in_use: set[Path]) -> None:
        """Remove the oldest logs of engines that run no more."""
        prune_logs(self.logs, in_use)

    def marker(self, spec: ShardSpec) -> str:
        """What the processes of this shard carry in their environment."""
        return f"{self.marker_prefix()}{spec.id}:{spec.epoch}"

    def marker_prefix(self) -> str:
        """How every marker of this folder begins."""
        return f"{self.path.resolve()}:"

    def write(self, record: ShardRecord) -> None:
        """Replace the shard's file as a whole, and on the disk when this returns: half a file would lose an engine.

        Raises OSError, always with a ``filename``.
        """
        _replace(self.shards / f"{_file_name(record.spec.id)}.json", msgspec.json.encode(record))

    def write_desired(self, desire: Desire) -> None:
        """Remember the set that is to run here, as ``write`` does a shard. Raises OSError with a ``filename``."""
        _replace(self.desired, msgspec.json.encode(desire))

    def read_desired(self) -> Desire | None:
        """The set that was last to run here; None when there never was one.

        Raises UsageError when the file can't be understood: an unknown set is not an empty one.
        """
        try:
            return msgspec.json.decode(self.desired.read_bytes(), type=Desire)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"what is to run here can't be read from {self.desired}: {reason}") from error

    def remove(self, shard: ShardId) -> None:
        """The shard's processes are seen gone. A file that can't be removed is said in the log and does no harm: the
        next agent finds that its process is none."""
        path = self.shards / f"{_file_name(shard)}.json"
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("state file %s can't be removed: %s", path, error.strerror or error)

    def read(self) -> list[ShardRecord]:
        """Every shard's file. One that can't be understood is set aside under another name, and said in the log."""
        records = []
        for path in sorted(self.shards.glob("*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=ShardRecord)
                if record.pid <= 1 or path.stem != _file_name(record.spec.id):
                    raise msgspec.ValidationError("it does not describe the shard that it is named after")
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                self._set_aside(path, error)
            else:
                records.append(record)
        return records

    def _set_aside(self, path: Path, error: Exception) -> None:
        aside = path.with_suffix(".damaged")
        try:
            path.replace(aside)
        except OSError:
            log.warning("state file %s can't be used and stays where it is: %s", path, error)
        else:
            log.warning("state file %s can't be used and is now %s: %s", path, aside.name, error)


@contextmanager
def hold_state(path: Path) -> Iterator[None]:
    """Keep a second program off this folder; raises StateTaken when one is there already, UsageError when the folder
    can't be used.

    Two agents over one folder would each stop the other's engines as not desired.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        _lock(file, path)
        yield
    finally:
        os.close(file)


def _lock(file: int, path: Path) -> None:
    tries = LOCK_TRIES
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                tries -= 1
                holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
                # One that was killed while it started a program: until that is executed, it holds what its parent did.
                if not tries or not holder.isdigit() or Path(f"/proc/{holder}").exists():
                    raise StateTaken(path, holder) from error
                time.sleep(LOCK_PAUSE_SECONDS)
            else:
                break
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        error.filename = str(path / "lock")
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> UsageError:
    reason = "it is a file, not a folder" if isinstance(error, FileExistsError) else error.strerror or str(error)
    remedy = "free some space, or give another one" if error.errno in _FULL else "mend that, or give another one"
    return UsageError(f"the state folder {path} can't be used ({error.filename or path}: {reason}): {remedy}")


def _file_name(shard: ShardId) -> str:
    """A shard id as a file name; ids come from outside and may hold anything."""
    return quote(shard, safe="")


def _replace(path: Path, content: bytes) -> None:
    """Half a file is never seen, and the whole one is on the disk when this returns. Raises OSError with a
    ``filename``."""
    fresh = path.with_suffix(".fresh")
    try:
        # A profile's env may hold a token, and the folder be one that others may look into.
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        # On a full disk the half of it would take what space there is; nobody reads it.
        with suppress(OSError):
            fresh.unlink()
        # A write that fails does not say by itself where.
        error.filename = error.filename or str(path)
        raise
