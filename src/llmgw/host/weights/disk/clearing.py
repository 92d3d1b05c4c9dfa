"""What is taken from the disk again, and what keeps it there. Each path is looked at anew before anything of it goes:
it is in the cache, named and written by us, no link, and nobody uses it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from llmgw.core.weights import Listing, Manifest, key_of
from llmgw.host.weights.disk.beneath import Folder, count_bytes
from llmgw.host.weights.disk.damage import Damaged, find_right, read_mark
from llmgw.host.weights.disk.file_names import PIECES_NAME, SOURCE_NAME, is_commit, is_key
from llmgw.host.weights.disk.in_use import NotRemoved, hold_alone
from llmgw.host.weights.disk.key_lock import LOCK_NAME, Holder, try_lock
from llmgw.host.weights.disk.manifest_file import list_foreign, read_manifest
from llmgw.host.weights.disk.part_folder import GONE_SUFFIX, PART_SUFFIX, give_room_back
from llmgw.host.weights.disk.partial import Stopped
from llmgw.host.weights.disk.piece_log import write_all
from llmgw.units import printable

_MOST_SOURCE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What is left of a fetch that did not end, or of a removal. ``source``: None when nobody can say any more.
    ``changed_at``: when something came last, in seconds since 1970."""

    key: str
    source: str | None
    commit: str
    size_bytes: int
    changed_at: float


def remove_commit(cache: Folder, source: str, commit: str, stands: Callable[[], bool] = lambda: True) -> int:
    """Returns the bytes freed, 0 when it is not there. ``stands``: whether it is still to go, asked when nothing but
    the removal is left. Raises NotRemoved, OSError."""
    if not is_commit(commit):
        raise NotRemoved(f"{commit[:200]!r} can't be a commit")
    name = key_of(source)
    if not cache.has_folder(name):
        return 0
    with cache.enter(name) as key, _hold(key):
        found = key.status(commit)
        if found is None:
            return 0
        with key.enter(commit) as folder:
            _look_at(key, folder, source, commit)
            with hold_alone(folder):
                _look_whether(stands)
                key.remove(commit + GONE_SUFFIX)
                # Half of it must not keep the name of the whole.
                key.rename(commit, commit + GONE_SUFFIX)
                key.sync()
                freed = key.remove(commit + GONE_SUFFIX)
        remove_empty(cache, key)
        return freed


def _look_whether(stands: Callable[[], bool]) -> None:
    if not stands():
        raise NotRemoved("the order was taken back, or was over, before its turn came")


def set_aside(key: Folder, manifest: Manifest) -> None:
    """Have what lies here of a commit, and is no copy of it any more, be what is left of a fetch: the next one keeps
    what of it is right. By who holds the lock of its source. Before the one rename it is what it was, behind it the
    other. Raises InUse, OSError."""
    with _take_over(key, manifest.commit, [file.name for file in manifest.files]) as folder:
        write_all(
            folder,
            (
                (number, piece, digest)
                for number, file in enumerate(manifest.files)
                for piece, digest in enumerate(file.pieces)
            ),
        )


def set_unread_aside(key: Folder, listing: Listing, stop: Callable[[], bool], tell: Callable[[int], None]) -> None:
    """The same of a commit whose manifest says nothing any more, by what it is elsewhere. ``tell``: so many bytes of it
    were read. Raises InUse, Stopped, OSError."""
    with _take_over(key, listing.commit, [file.name for file in listing.files]) as folder:
        right = list(find_right(folder, listing, stop, tell))
        if stop():
            raise Stopped("comparing what lies here was stopped")
        write_all(folder, right)


@contextmanager
def _take_over(key: Folder, commit: str, names: Sequence[str]) -> Iterator[Folder]:
    with key.enter(commit) as folder:
        if foreign := list_foreign(folder, names):
            raise OSError(errno.EEXIST, "llmgw did not put it there", printable(str(folder.path / foreign[0])))
        with hold_alone(folder):
            yield folder
            key.remove(commit + PART_SUFFIX)
            key.rename(commit, commit + PART_SUFFIX)
            key.sync()


def list_set_aside(key: Folder) -> list[Damaged]:
    """What was set aside in the folder of one source, and is not fetched anew yet: it has the manifest that it had.
    Raises OSError."""
    found = []
    for name in _list_parts(key):
        # (of one whose manifest said nothing nobody can say what it was)
        with key.enter(name) as part, suppress(FileNotFoundError, ValueError):
            manifest = read_manifest(part)
            if (key_of(manifest.source), manifest.commit + PART_SUFFIX) == (key.path.name, name):
                found.append(Damaged(manifest=manifest, why=read_mark(part) or "it was set aside"))
    return found


def list_leftovers(key: Folder) -> list[Leftover]:
    """Those in the folder of one source. Raises OSError."""
    source = read_source(key)
    return [_describe(key, name, source) for name in key.names() if _is_leftover(key, name)]


def remove_leftover(cache: Folder, leftover: Leftover, stands: Callable[[], bool] = lambda: True) -> int:
    """The same of what is left of a fetch."""
    if not is_key(leftover.key) or not is_commit(leftover.commit):
        raise NotRemoved(f"{leftover.key[:200]!r} and {leftover.commit[:200]!r} are no names of llmgw's")
    if not cache.has_folder(leftover.key):
        return 0
    with cache.enter(leftover.key) as key, _hold(key):
        names = [leftover.commit + suffix for suffix in (PART_SUFFIX, GONE_SUFFIX)]
        _look_whether(stands)
        freed = sum(key.remove(name) for name in names if key.has_folder(name))
        remove_empty(cache, key)
        return freed


def remove_empty(cache: Folder, key: Folder) -> None:
    """Remove what fetches have left that brought nothing, and the folder of a source once nothing was fetched into it,
    or is there any more, by who holds its lock. That goes last: who waits for it sees by that that it is no lock any
    more. Raises OSError."""
    for name in _list_bare(key):
        key.remove(name)
    if _is_empty(key):
        key.unlink(SOURCE_NAME)
        key.unlink(LOCK_NAME)
        with suppress(OSError):
            # (somebody may have begun to fetch it again)
            os.rmdir(key.path.name, dir_fd=cache.file)


def tidy_key(cache: Folder, key: Folder, *, alone: bool) -> None:
    """Clear away what fetches that were killed have left of one source, where nobody fetches it: a folder that nothing
    is in, and (``alone``: no other machine writes to that disk) room for what never came. Raises OSError."""
    if not (_list_parts(key) if alone else _list_bare(key)) and not _is_empty(key):
        return
    with suppress(NotRemoved), _hold(key):
        remove_empty(cache, key)
        for name in _list_parts(key) if alone else ():
            with key.enter(name) as part:
                give_room_back(part)


def read_source(key: Folder) -> str | None:
    """The source that a folder is of, as it is noted there; None when that is not so."""
    try:
        text = key.read(SOURCE_NAME, _MOST_SOURCE_BYTES).decode().removesuffix("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if key_of(text) == key.path.name else None


def _list_parts(key: Folder) -> list[str]:
    return [name for name in key.names() if name.endswith(PART_SUFFIX) and _is_leftover(key, name)]


def _list_bare(key: Folder) -> list[str]:
    """Those of which no piece was noted: whatever lies there, no fetch would go on from it."""
    return [name for name in _list_parts(key) if _is_bare(key, name)]


def _is_bare(key: Folder, name: str) -> bool:
    with key.enter(name) as part:
        noted = part.status(PIECES_NAME)
    return noted is None or noted.st_size == 0


def _is_empty(key: Folder) -> bool:
    return set(key.names()) <= {SOURCE_NAME, LOCK_NAME}


def _is_leftover(key: Folder, name: str) -> bool:
    commit, _, suffix = name.rpartition(".")
    return f".{suffix}" in (PART_SUFFIX, GONE_SUFFIX) and is_commit(commit) and key.has_folder(name)


def _describe(key: Folder, name: str, source: str | None) -> Leftover:
    with key.enter(name) as folder:
        size = sum(count_bytes(found) for _, found in folder.walk())
        changed = folder.status(PIECES_NAME) or os.fstat(folder.file)
    commit = name.rpartition(".")[0]
    return Leftover(key=key.path.name, source=source, commit=commit, size_bytes=size, changed_at=changed.st_mtime)


def find_odd(folder: Folder) -> str | None:
    """What is in a folder, or below it, that is neither a plain file nor a folder: no fetch has put that there. Raises
    OSError."""
    odd = (name for name, found in folder.walk() if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)))
    return next(odd, None)


def _look_at(key: Folder, folder: Folder, source: str, commit: str) -> None:
    manifest = None
    with suppress(FileNotFoundError, ValueError):
        manifest = read_manifest(folder)
    if manifest is not None and (manifest.source, manifest.commit) == (source, commit):
        foreign = next(iter(list_foreign(folder, [file.name for file in manifest.files])), None)
    elif read_source(key) == source:
        # Nobody can say any more what its files were: where its source was fetched to, they are those that lie there.
        foreign = find_odd(folder)
    else:
        raise NotRemoved(f"{folder.path} holds no manifest of llmgw's: remove it by hand")
    if foreign is not None:
        raise NotRemoved(
            f"llmgw did not put {printable(foreign)} into {folder.path}: move it away, then it can be removed"
        )


@contextmanager
def _hold(key: Folder) -> Iterator[None]:
    file = try_lock(key)
    if not isinstance(file, int):
        raise NotRemoved(f"its source is being fetched or removed just now ({(file or Holder()).words})")
    try:
        yield
    finally:
        os.close(file)
