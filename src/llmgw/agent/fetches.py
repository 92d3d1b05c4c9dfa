"""Fetches of a node: one for all who wait for the same source, and over when nobody does any more."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import trio

from llmgw.agent.describing import describe_fetch
from llmgw.agent.hands import Depot
from llmgw.core.weights import Fetch, Manifest, Phase, Pull, Source, Swarm
from llmgw.errors import EngineFailed
from llmgw.host.weights.errors import FetchFailed, Kind, show_url
from llmgw.units import format_decimal, format_duration

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0
SHOWN_COMMIT = 12
# For so long it is told why the last fetch of a source failed: what a model names is tried again much sooner.
FAILED_SECONDS = 3600.0
MOST_FAILED = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Fetching:
    """One source that is on its way. ``wanted`` is who waits for it, and how each is told; nobody left ends it."""

    source: Source
    newest: bool
    told: Fetch
    began_at: float
    wanted: dict[Hashable, Callable[[Fetch], None]] = field(default_factory=dict)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    manifest: Manifest | None = None
    failure: EngineFailed | None = None

    def read(self) -> Manifest:
        """What was fetched. Raises EngineFailed."""
        if self.manifest is None:
            raise self.failure or EngineFailed(f"{show_url(self.source.text)} is not fetched any more")
        return self.manifest


class Fetches:
    """Those that are under way, by their sources. ``begin`` starts each as a task (as ``Nursery.start_soon`` does);
    ``find_swarm`` says who else has one, and ``find_users`` which shards run by a commit of it; ``changed`` is called
    when there is something new of any of them, ``turned`` when that is what other nodes wait for, ``kept`` with what
    has come, before whoever waits for it goes on, ``spoilt`` when one ends by what is damaged, before that is
    told, and ``over`` when one has ended, however."""

    __slots__ = (
        "_begin",
        "_changed",
        "_depot",
        "_failed",
        "_find_swarm",
        "_find_users",
        "_kept",
        "_logged",
        "_over",
        "_running",
        "_spoilt",
        "_turned",
    )

    def __init__(
        self,
        depot: Depot,
        *,
        begin: Callable[..., object],
        find_swarm: Callable[[str], Swarm | None],
        find_users: Callable[[str, str], Sequence[str]],
        changed: Callable[[], None],
        turned: Callable[[], None],
        kept: Callable[[Manifest], None],
        spoilt: Callable[[], Awaitable[None]],
        over: Callable[[], None],
    ) -> None:
        self._depot = depot
        self._begin = begin
        self._find_swarm = find_swarm
        self._find_users = find_users
        self._changed = changed
        self._turned = turned
        self._kept = kept
        self._spoilt = spoilt
        self._over = over
        self._running: dict[str, Fetching] = {}
        # The last one of each source where that failed, and when.
        self._failed: dict[str, tuple[float, Fetch]] = {}
        self._logged: dict[str, float] = {}

    def __iter__(self) -> Iterator[Fetching]:
        return iter(self._running.values())

    def __bool__(self) -> bool:
        return bool(self._running)

    def list_failed(self) -> tuple[Fetch, ...]:
        """Of each source whose last fetch has failed that one, with why; for an hour, until the next one begins or the
        source is here. ``pull``: of several orders that it was carried out for the last one."""
        since = trio.current_time() - FAILED_SECONDS
        kept = [(source, (at, fetch)) for source, (at, fetch) in self._failed.items() if at > since]
        self._failed = dict(kept[-MOST_FAILED:])
        return tuple(fetch for _, fetch in self._failed.values())

    def forget_failed(self, source: str) -> None:
        """It is here, whoever has brought it."""
        self._failed.pop(source, None)

    def tell(self) -> None:
        """Tell all who wait how far it is."""
        for fetching in self:
            for tell in fetching.wanted.values():
                tell(fetching.told)

    async def wait(
        self, source: Source, want: Hashable, tell: Callable[[Fetch], None], *, newest: bool = False
    ) -> Fetching:
        """Wait for the end of a fetch with all others who do; ``want`` is who waits. Who wants the newest waits for one
        that was begun for that."""
        while True:
            fetching = self._running.get(source.text)
            if fetching is None:
                fetching = self._start(source, newest=newest)
            elif fetching.scope.cancel_called or (newest and not fetching.newest):
                await fetching.done.wait()
                continue
            fetching.wanted[want] = tell
            self._changed()
            try:
                await fetching.done.wait()
            finally:
                del fetching.wanted[want]
                if not fetching.wanted:
                    fetching.scope.cancel()
            return fetching

    def _start(self, source: Source, *, newest: bool) -> Fetching:
        told = Fetch(source=source.text, phase=Phase.RESOLVING)
        fetching = Fetching(source=source, newest=newest, told=told, began_at=trio.current_time())
        self._running[source.text] = fetching
        self._failed.pop(source.text, None)
        self._turned()
        log.warning("fetching %s", show_url(source.text))
        self._begin(self._carry, fetching, name=f"fetch {source.name}")
        return fetching

    async def _carry(self, fetching: Fetching) -> None:
        """One fetch to its end; whatever happens in it, the others go on."""
        source = fetching.source
        try:
            with fetching.scope:
                fetching.manifest = await self._depot.fetch(
                    source,
                    swarm=lambda: self._find_swarm(source.text),
                    tell=lambda fetch: self._note(fetching, fetch),
                    newest=fetching.newest,
                    users=lambda commit: self._find_users(source.text, commit),
                )
                self._kept(fetching.manifest)
        except EngineFailed as error:
            fetching.failure = error
            if isinstance(error, FetchFailed) and error.kind is Kind.CORRUPT:
                await self._spoilt()
        except Exception as error:
            log.exception("the fetch of %s ends by a fault of llmgw", show_url(source.text))
            fetching.failure = EngineFailed(f"a fault of llmgw itself: {type(error).__name__}: {error}")
        finally:
            del self._running[source.text]
            self._logged.pop(source.text, None)
            if fetching.failure is not None:
                self._failed[source.text] = trio.current_time(), _tell_failed(fetching, fetching.failure)
            fetching.done.set()
            self._turned()
            self._over()
        _log_end(fetching)

    def _note(self, fetching: Fetching, fetch: Fetch) -> None:
        before, fetching.told = fetching.told, fetch
        now, text = trio.current_time(), fetch.source
        is_over = fetch.phase in (Phase.READY, Phase.FAILED)
        if not is_over and now - self._logged.get(text, fetching.began_at) >= LOG_SECONDS:
            self._logged[text] = now
            # (whoever waits for it sees these without asking for more words)
            log.warning("%s%s", describe_fetch(fetch), "" if fetch.cause is None else f": {fetch.cause}")
        if (before.phase, before.commit) != (fetch.phase, fetch.commit):
            self._turned()
        self._changed()


def _tell_failed(fetching: Fetching, failure: EngineFailed) -> Fetch:
    """Its last figures, and why it went no further."""
    return replace(
        fetching.told,
        phase=Phase.FAILED,
        rate=None,
        left_seconds=None,
        stalled_seconds=None,
        cause=failure.message,
        remedy=failure.remedy,
        pull=max((who.number for who in fetching.wanted if isinstance(who, Pull)), default=None),
    )


def _log_end(fetching: Fetching) -> None:
    source, manifest, told = show_url(fetching.source.text), fetching.manifest, fetching.told
    if manifest is not None:
        log.warning(
            "%s is here (%s): %s in %s; %s came from its origin, %s from other nodes",
            source,
            manifest.commit[:SHOWN_COMMIT],
            format_decimal(manifest.size_bytes),
            format_duration(round(trio.current_time() - fetching.began_at)),
            format_decimal(told.origin_bytes),
            format_decimal(told.peer_bytes),
        )
    elif fetching.failure is not None:
        log.warning("%s can't be fetched: %s", source, fetching.failure.message)
    else:
        log.info("%s is fetched no further: nobody waits for it", source)
