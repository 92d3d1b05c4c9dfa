"""The folder of what was fetched: ``<key of the source>/<commit>/…``, each commit whole, verified and described by its
manifest. What is on its way has other names, so that nothing else is ever taken for a model."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import trio

from llmgw.core.weights import Listing, Manifest, SetAside, key_of
from llmgw.host.disks import is_shared
from llmgw.host.weights.disk.beneath import Folder, open_folder
from llmgw.host.weights.disk.clearing import (
    Leftover,
    find_odd,
    list_leftovers,
    list_set_aside,
    read_source,
    remove_commit,
    remove_empty,
    remove_leftover,
    set_aside,
    set_unread_aside,
    tidy_key,
)
from llmgw.host.weights.disk.damage import Damaged, find_wrong, read_mark, refuse_used, remove_mark, write_mark
from llmgw.host.weights.disk.entry_file import find_entry_file, find_entry_folder
from llmgw.host.weights.disk.faults import NoRoom, explain, explain_lock
from llmgw.host.weights.disk.file_names import MANIFEST_NAME, RENEWED_NAME, SOURCE_NAME, is_commit, is_key
from llmgw.host.weights.disk.heads import find_bad_head
from llmgw.host.weights.disk.in_use import InUse, NotRemoved, Use, use_commit
from llmgw.host.weights.disk.key_lock import is_held_by, show_life, take_lock
from llmgw.host.weights.disk.manifest_file import (
    describe_unread,
    find_fault,
    mode_of,
    read_manifest,
    renew_manifest,
)
from llmgw.host.weights.disk.part_folder import clear_others, come_after
from llmgw.host.weights.disk.partial import Partial, never, open_partial, tell_nobody, tell_nobody_both
from llmgw.host.weights.disk.reserve import Reservations
from llmgw.host.weights.errors import FetchFailed, Kind, show_url

log = logging.getLogger(__name__)

LET_GO_SECONDS = 5.0
# So many of the last commits that were set aside are told of.
MOST_SET_ASIDE = 16
GONE = "it is gone"
BARE = "it holds no manifest"
ELSE = "its manifest is of something else"

# When and where a file was written.
_Stamp: TypeAlias = tuple[int, ...] | None
_Noted: TypeAlias = tuple[tuple[_Stamp, ...], Manifest]


class Cache:
    """One agent's folder, which other programs may share. What is not async here blocks: call it in a thread.

    It is made when something is first fetched, and needs to be only readable for what does not write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reservations = Reservations()
        # A manifest is long, and does not change: what was read of it, by key and commit, for as long as it is here.
        self._known: dict[str, dict[str, _Noted]] = {}
        self._told: set[tuple[str, str, str]] = set()
        # What was found wrong and can't be noted beside it, by key and commit, and of which manifest.
        self._marks: dict[tuple[str, str], tuple[tuple[_Stamp, ...], str]] = {}
        self._damaged: dict[str, tuple[Damaged, ...]] = {}
        self._set_aside: tuple[SetAside, ...] = ()

    @property
    def set_asides(self) -> tuple[SetAside, ...]:
        """The last commits that were found damaged and set aside, to be fetched anew. Does not block."""
        return self._set_aside

    def find(self, source: str) -> Manifest | None:
        """The newest commit of a source that is whole by its files' sizes, and of which nothing else was found; None
        when there is none, or a newer one is no copy any more: nobody is to go back to an older version by that
        without a word."""
        whole, lost = self.tell_apart(source)
        return None if lost else whole

    def tell_apart(self, source: str) -> tuple[Manifest | None, tuple[Damaged, ...]]:
        """The newest commit of a source that is whole, and what was here of newer ones, the newest first: what is no
        copy any more, and what was set aside for that and is not fetched anew yet."""
        whole = max(self._list_of(source), key=_rank, default=None)
        lost = [*self._damaged.get(key_of(source), ()), *self._list_set_aside(source)]
        newer = (each for each in lost if whole is None or _rank(each.manifest) > _rank(whole))
        return whole, tuple(sorted(newer, key=lambda each: _rank(each.manifest), reverse=True))

    def list(self) -> tuple[Manifest, ...]:
        """All commits of all sources that are whole."""
        found: list[Manifest] = []
        keys: list[str] = []
        with self._telling(), open_folder(self.folder) as cache:
            keys = list(filter(is_key, cache.names()))
            for name in keys:
                found += self._list_commits(cache, name)
        self._known = {name: known for name, known in self._known.items() if name in keys}
        self._told = {each for each in self._told if each[0] in ("", *keys)}
        self._damaged = {name: found for name, found in self._damaged.items() if name in keys}
        return tuple(found)

    def list_damaged(self) -> tuple[Damaged, ...]:
        """What the last look at each source has found that was fetched, and is no copy any more. Does not block."""
        return tuple(each for found in tuple(self._damaged.values()) for each in found)

    def read(self, source: str, commit: str) -> Manifest | None:
        """What lies under a commit's name, by its manifest, whole or not; None when nothing does, or what can't be
        said."""
        if not is_commit(commit):
            return None
        with self._telling(key_of(source), commit), self._open_commit(source, commit) as folder:
            manifest = read_manifest(folder)
            if (manifest.source, manifest.commit) == (source, commit):
                return manifest
        return None

    def tell_unread(self, source: str, commit: str) -> Damaged | None:
        """What lies under a commit's name whose manifest says nothing, and why; None where nothing does, or it says
        something. Raises FetchFailed where the disk can't be read."""
        try:
            if not is_commit(commit):
                return None
            with self._open_commit(source, commit) as folder:
                try:
                    manifest = read_manifest(folder)
                    why = None if (manifest.source, manifest.commit) == (source, commit) else ELSE
                except FileNotFoundError:
                    why = BARE
                except ValueError as error:
                    why = str(error)
                return None if why is None else Damaged(manifest=describe_unread(folder, source, commit), why=why)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise explain(error, self.folder) from error

    def judge(self, manifest: Manifest) -> str | None:
        """Why a commit is no copy any more, as far as that is known without a look into its files; None where it is."""
        found = self._find_damaged(manifest)
        return None if found is None else found.why

    def is_marked(self, manifest: Manifest) -> bool:
        """Whether a commit is none for no other reason than that it was noted so: all of it is there by its sizes."""
        found = self._find_damaged(manifest)
        return found is not None and found.is_marked

    def _find_damaged(self, manifest: Manifest) -> Damaged | None:
        self._list_of(manifest.source)
        found = self._damaged.get(key_of(manifest.source), ())
        return next((each for each in found if each.manifest.commit == manifest.commit), None)

    def look(self, manifest: Manifest) -> str | None:
        """What an engine would end by: a look at the files' beginnings, of some milliseconds. What is found is no copy
        any more. Raises FetchFailed where the disk can't be read."""
        why = self._examine(manifest, lambda folder: find_fault(folder, manifest) or find_bad_head(folder, manifest))
        # (what was removed just now is not damaged)
        return None if why == GONE else why

    def prove(
        self, manifest: Manifest, stop: Callable[[], bool] = never, tell: Callable[[int, int], None] = tell_nobody_both
    ) -> str | None:
        """Compare all that lies here of a commit with the hashes that it was kept with. What is wrong makes it no copy
        any more, and where nothing is it is one again. ``tell``: so many bytes were read, and so many are right. Raises
        FetchFailed where the disk can't be read."""
        stopped = False

        def stops() -> bool:
            nonlocal stopped
            stopped = stopped or stop()
            return stopped

        return self._examine(
            manifest, lambda folder: find_wrong(folder, manifest, stops, tell), proves=lambda: not stopped
        )

    def note_wrong(self, manifest: Manifest, why: str) -> None:
        """Somebody has read a part of a commit, and found it wrong: it is no copy any more."""
        # (where it is gone, or can't be reached, no launch takes it either)
        with suppress(FetchFailed):
            self._examine(manifest, lambda folder: read_mark(folder) or why)

    def set_aside(self, manifest: Manifest, why: str) -> None:
        """Have what lies here of a damaged commit be what is left of a fetch of it: the next one keeps what is right,
        and fetches the rest anew. Whoever calls this holds the source's lock. Raises FetchFailed, also while some
        program keeps it from being removed."""
        self._set_one_aside(manifest, why, lambda key: set_aside(key, manifest))

    def set_unread_aside(
        self,
        damaged: Damaged,
        listing: Listing,
        stop: Callable[[], bool] = never,
        tell: Callable[[int], None] = tell_nobody,
    ) -> None:
        """The same of a commit whose manifest says nothing, once it is known what the commit is: all of it is read.
        ``tell``: so many bytes of it so far."""
        self._set_one_aside(damaged.manifest, damaged.why, lambda key: set_unread_aside(key, listing, stop, tell))

    def _set_one_aside(self, manifest: Manifest, why: str, act: Callable[[Folder], None]) -> None:
        source, commit = manifest.source, manifest.commit
        folder = self.folder / key_of(source) / commit
        try:
            with open_folder(self.folder) as cache, cache.enter(key_of(source)) as key:
                act(key)
        except FileNotFoundError:
            return
        except InUse as error:
            raise refuse_used(source, commit, folder, why, ()) from error
        except OSError as error:
            raise explain(error, self.folder) from error
        log.warning(
            "%s (%s) in %s is damaged: %s: what of it is right is kept, and the rest is fetched anew",
            *(show_url(source), commit[:12], folder, why),
        )
        self._marks.pop((key_of(source), commit), None)
        told = SetAside(source=source, commit=commit, fetched_at=manifest.fetched_at, why=why)
        self._set_aside = (*self._set_aside, told)[-MOST_SET_ASIDE:]

    def path_of(self, manifest: Manifest, *, as_file: bool) -> Path:
        """What an engine is pointed at: the folder that the files are in, or the one file that is the model (of several
        parts the first). Raises FetchFailed when several files could be it."""
        commit = self.folder / key_of(manifest.source) / manifest.commit
        return commit / (find_entry_file(manifest) if as_file else find_entry_folder(manifest))

    @asynccontextmanager
    async def hold(self, source: str, waiting: Callable[[str], None]) -> AsyncIterator[None]:
        """Be the only one that fetches this source, of all programs that share the folder. While another one does,
        ``waiting`` is told which, each time that changes or that one goes on. Raises FetchFailed when the folder can't
        be used."""
        try:
            lock = await take_lock(lambda: self._open_key(source), waiting)
        except OSError as error:
            raise explain_lock(error, self.folder) from error
        try:
            yield
        finally:
            try:
                with trio.move_on_after(LET_GO_SECONDS, shield=True):
                    await trio.to_thread.run_sync(self._leave, source, lock)
            finally:
                os.close(lock)

    async def show_life(self, source: str) -> None:
        """Whoever waits for this source, which is held here, is to see that it goes on. Where that can't be noted, they
        take it for one that hangs, and no harm is done."""
        await trio.to_thread.run_sync(self._show_life, source)

    def renew(self, source: str, commit: str, now: float) -> Manifest | None:
        """A commit that is here and whole, as the newest of its source from ``now`` on: what was taken back at its
        origin is the newest no more, though it was fetched later. None when it is not here. Whoever calls this holds
        the source's lock. Raises FetchFailed when the folder can't be used."""
        found = sorted(self._list_of(source), key=_rank)
        manifest = next((each for each in found if each.commit == commit), None)
        if manifest is None or manifest is found[-1]:
            return manifest
        try:
            with open_folder(self.folder) as cache, cache.enter(key_of(source)) as key, key.enter(commit) as folder:
                return renew_manifest(folder, manifest, come_after(key, commit, now))
        except OSError as error:
            raise explain(error, self.folder) from error

    def open_partial(
        self, listing: Listing, stop: Callable[[], bool] = never, tell: Callable[[int], None] = tell_nobody
    ) -> Partial:
        """What is here of this commit, and room for the rest. Whoever calls this holds the source's lock.

        Raises FetchFailed when there is no room, or the folder can't be used; Stopped when ``stop`` says so, while what
        is here is compared with what was noted of it: so many bytes of it so far, as ``tell`` is told.
        """
        alone = not is_shared(self.folder)
        try:
            with self._open_key(listing.source) as key:
                if read_source(key) != listing.source:
                    key.write(SOURCE_NAME, f"{listing.source}\n".encode(), mode=mode_of(listing.source))
                    key.sync()
                try:
                    return open_partial(key, listing, self._reservations, stop, alone=alone, tell=tell)
                except NoRoom:
                    # Of a commit that was on its way before this one, nobody will want the rest; and fetches that were
                    # killed have taken room that they do not need.
                    clear_others(key, listing.commit)
                    self.tidy(but=listing.source)
                return open_partial(key, listing, self._reservations, stop, alone=alone, tell=tell)
        except OSError as error:
            raise explain(error, self.folder) from error

    def use(self, manifest: Manifest) -> Use | None:
        """Keep a commit from being removed, by whatever program, until this is closed. None: it is gone already."""
        try:
            with open_folder(self.folder) as cache, cache.enter(key_of(manifest.source)) as key:
                return use_commit(key, manifest.commit)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise explain_lock(error, self.folder) from error

    def remove(self, source: str, commit: str, stands: Callable[[], bool] = lambda: True) -> int:
        """Remove a commit, and return the bytes freed: 0 when it is not here. ``stands``: whether it is still to go.
        Raises NotRemoved, which says why."""
        with self._clearing() as cache:
            freed = remove_commit(cache, source, commit, stands) if cache is not None else 0
        self.tidy()
        return freed

    def list_partials(self) -> tuple[Leftover, ...]:
        """What is on its way, or never came whole."""
        found: list[Leftover] = []
        with self._telling(), open_folder(self.folder) as cache:
            for name in filter(is_key, cache.names()):
                with self._telling(name), cache.enter(name) as key:
                    found += list_leftovers(key)
        return tuple(found)

    def remove_partial(self, leftover: Leftover, stands: Callable[[], bool] = lambda: True) -> int:
        """Remove what never came whole, and return the bytes freed. Raises NotRemoved, also while it is fetched."""
        with self._clearing() as cache:
            return remove_leftover(cache, leftover, stands) if cache is not None else 0

    def tidy(self, *, but: str | None = None) -> None:
        """Clear away what programs that were killed have left and nobody goes on with: folders that nothing is in, and
        room that was taken for what never came. ``but``: this source is being fetched here."""
        alone, left_alone = not is_shared(self.folder), None if but is None else key_of(but)
        with self._telling(), open_folder(self.folder) as cache:
            for name in (each for each in cache.names() if is_key(each) and each != left_alone):
                with self._telling(name), cache.enter(name) as key:
                    tidy_key(cache, key, alone=alone)

    def _show_life(self, source: str) -> None:
        with suppress(OSError), open_folder(self.folder) as cache, cache.enter(key_of(source)) as key:
            show_life(key)

    def _open_key(self, source: str) -> Folder:
        with open_folder(self.folder, make=True) as cache:
            return cache.enter(key_of(source), make=True)

    def _leave(self, source: str, lock: int) -> None:
        """Where a fetch has brought nothing, nothing of it stays. (What can't be looked at stays.)"""
        with suppress(OSError), open_folder(self.folder) as cache, cache.enter(key_of(source)) as key:
            if is_held_by(key, lock):
                remove_empty(cache, key)

    @contextmanager
    def _open_commit(self, source: str, commit: str) -> Iterator[Folder]:
        with open_folder(self.folder) as cache, cache.enter(f"{key_of(source)}/{commit}") as folder:
            yield folder

    def _examine(
        self, manifest: Manifest, find: Callable[[Folder], str | None], *, proves: Callable[[], bool] = never
    ) -> str | None:
        """What is found wrong with a commit counts for every program on this folder, and whatever is begun anew, until
        it is another one, or (``proves``: by all of its bytes) nothing is found any more."""
        name = key_of(manifest.source), manifest.commit
        try:
            with self._open_commit(manifest.source, manifest.commit) as folder:
                stamps = _stamp_all(folder)
                why = find(folder)
                if why is not None or proves():
                    self._mark(name, folder, stamps, why)
        except FileNotFoundError:
            return GONE
        except OSError as error:
            raise FetchFailed(
                f"{error.filename or self.folder / '/'.join(name)} can't be read: {error.strerror or error}",
                Kind.DISK,
                remedy="see what ails that disk (dmesg), and let the user that llmgw runs as read what is there",
            ) from error
        return why

    def _mark(self, name: tuple[str, str], folder: Folder, stamps: tuple[_Stamp, ...], why: str | None) -> None:
        self._marks.pop(name, None)
        try:
            if why is None:
                remove_mark(folder)
            else:
                write_mark(folder, why)
        except OSError as error:
            # (by a disk that is read only, or full, it is known for as long as this agent runs)
            log.warning("%s can't be changed: %s", error.filename or folder.path, error.strerror)
            if why is not None:
                self._marks[name] = stamps, why

    def _list_of(self, source: str) -> tuple[Manifest, ...]:
        found: list[Manifest] = []
        with self._telling(), open_folder(self.folder) as cache:
            found += self._list_commits(cache, key_of(source))
        return tuple(found)

    def _list_set_aside(self, source: str) -> tuple[Damaged, ...]:
        found: list[Damaged] = []
        with self._telling(), open_folder(self.folder) as cache, cache.enter(key_of(source)) as key:
            found += list_set_aside(key)
        return tuple(found)

    def _list_commits(self, cache: Folder, name: str) -> Iterable[Manifest]:
        before, found = self._known.pop(name, {}), {}
        damaged: list[Damaged] = []
        with self._telling(name), cache.enter(name) as key:
            for commit in filter(is_commit, key.names()):
                with self._telling(name, commit):
                    try:
                        noted = _look_at(key, commit, before.get(commit))
                    except ValueError as error:
                        damaged += _find_unread(key, commit, str(error))
                        raise
                    if noted is None:
                        continue
                    stamps, manifest, fault, mark = noted
                    marked = self._marks.get((name, commit))
                    if mark is None and marked is not None and marked[0] == stamps:
                        mark = marked[1]
                    if (why := fault or mark) is not None:
                        damaged.append(Damaged(manifest=manifest, why=why, is_marked=fault is None))
                        raise ValueError(why)
                    found[commit] = stamps, manifest
            self._known[name] = found
        self._damaged[name] = tuple(damaged)
        return [manifest for _, manifest in found.values()]

    @contextmanager
    def _telling(self, key: str = "", commit: str = "") -> Iterator[None]:
        """What can't be read, or is not whole, is not there: that is said in the log, once."""
        try:
            yield
        except FileNotFoundError:
            # Nothing was fetched yet, or it was removed just now.
            return
        except (OSError, ValueError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            if (key, commit, reason) not in self._told:
                self._told.add((key, commit, reason))
                log.warning("weights in %s can't be used: %s", self.folder / key / commit, reason)

    @contextmanager
    def _clearing(self) -> Iterator[Folder | None]:
        with ExitStack() as stack:
            try:
                cache = stack.enter_context(open_folder(self.folder))
            except FileNotFoundError:
                cache = None
            except OSError as error:
                raise _unremovable(error) from error
            try:
                yield cache
            except OSError as error:
                raise _unremovable(error) from error


def _rank(manifest: Manifest) -> tuple[float, str]:
    """The newest last."""
    return manifest.fetched_at, manifest.commit


def _look_at(
    key: Folder, commit: str, known: _Noted | None
) -> tuple[tuple[_Stamp, ...], Manifest, str | None, str | None] | None:
    """What a commit is by its manifest, what of it is not there, and what was found wrong with it; None when it is
    none. Raises OSError, and ValueError when nobody can say."""
    if not key.has_folder(commit):
        return None
    with key.enter(commit) as folder:
        stamps = _stamp_all(folder)
        if stamps[0] is None:
            raise ValueError(BARE)
        manifest = known[1] if known is not None and known[0] == stamps else read_manifest(folder)
        if (key_of(manifest.source), manifest.commit) != (key.path.name, commit):
            raise ValueError(ELSE)
        return stamps, manifest, find_fault(folder, manifest), read_mark(folder)


def _find_unread(key: Folder, commit: str, why: str) -> list[Damaged]:
    """What lies there, where llmgw has fetched something; its manifest says nothing. (What could not be removed is not
    told: nobody is to be promised its room.)"""
    source = read_source(key)
    if source is None:
        return []
    with key.enter(commit) as folder:
        if find_odd(folder) is not None:
            return []
        manifest = describe_unread(folder, source, commit)
    return [Damaged(manifest=manifest, why=why)] if manifest.files else []


def _stamp_all(folder: Folder) -> tuple[_Stamp, ...]:
    """Other than before once the manifest of a commit is."""
    return _stamp(folder.status(MANIFEST_NAME)), _stamp(folder.status(RENEWED_NAME))


def _stamp(found: os.stat_result | None) -> _Stamp:
    if found is None:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _unremovable(error: OSError) -> NotRemoved:
    return NotRemoved(f"{error.filename}: {error.strerror or error}")
