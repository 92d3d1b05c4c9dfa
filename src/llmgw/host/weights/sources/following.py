"""The answer at the end of all redirects, each of them looked at first, and the hub's token told to the hub alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import trio

from llmgw.host.weights.errors import Broken, FetchFailed, Kind
from llmgw.host.weights.sources.answers import SAID, Answer, read_count
from llmgw.host.weights.sources.asker import AGENT, Asker
from llmgw.host.weights.sources.redirects import (
    MAX_REDIRECTS,
    Place,
    Proxies,
    check_allowed,
    choose_next,
    is_own,
    is_same_origin,
    name_lost,
)
from llmgw.host.weights.sources.web import Web

# A signed address of a hub's storage is good for an hour; asked for it once per piece, a hub would turn us away.
KEPT_PLACE_SECONDS = 300.0
MOST_KEPT = 512
MOST_LEFT_BYTES = 64 * 1024
# Longer than to connect anew takes.
MOST_LEFT_SECONDS = 2.0
FOUND = (200, 206, 416)
_LEADING = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """Where an address has led, and what was said on the way. ``allowed``: the places where the source itself is."""

    url: httpx.URL
    said: Mapping[str, str]
    allowed: frozenset[Place]
    until: float


class Following:
    """Asks, and follows where it may. ``endpoint`` is the hub's address, whose token ``token`` is."""

    def __init__(
        self,
        web: Web,
        *,
        endpoint: httpx.URL,
        token: str | None,
        allow_hosts: tuple[str, ...],
        proxies: Proxies,
        wait_seconds: float,
        asker: Asker = AGENT,
    ) -> None:
        self._web = web
        self._endpoint = endpoint
        # In the clear a token would be everybody's on the way.
        self._token = token if endpoint.scheme == "https" or is_own(endpoint.host) else None
        self._allow_hosts = allow_hosts
        self._proxies = proxies
        self._wait_seconds = wait_seconds
        self._asker = asker
        self._ends: dict[str, _End] = {}

    def authorize(self, url: httpx.URL) -> dict[str, str]:
        """The token goes to the hub's own origin and nowhere else: a redirect leads to other people's storage."""
        if self._token is None or not is_same_origin(url, self._endpoint):
            return {}
        return {"authorization": f"Bearer {self._token}"}

    @asynccontextmanager
    async def ask(self, start: httpx.URL, headers: Mapping[str, str], *, keep: bool = False) -> AsyncIterator[Answer]:
        """What ``start`` answers in the end. ``keep``: the next time the last address is asked at once."""
        check_allowed(start, self._allow_hosts, self._asker)
        end = self._ends.get(str(start)) if keep else None
        if end is not None and trio.current_time() < end.until:
            try:
                asked = {**headers, **self.authorize(end.url)}
                async with self._web.get(end.url, asked, allowed=end.allowed) as response:
                    if response.status_code in FOUND:
                        yield Answer(response=response, url=end.url, said=end.said)
                        return
            except (Broken, FetchFailed):
                self._ends.pop(str(start), None)
                raise
        # What was signed has expired, or the file has moved on.
        self._ends.pop(str(start), None)
        async with self._follow(start, headers) as (answer, allowed):
            if keep and allowed is not None and answer.url != start and answer.response.status_code in FOUND:
                self._keep(str(start), answer, allowed)
            yield answer

    @asynccontextmanager
    async def _follow(
        self, start: httpx.URL, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[Answer, frozenset[Place] | None]]:
        """With where redirects may lead, None where there was none."""
        url = start
        said: dict[str, str] = {}
        allowed: frozenset[Place] | None = None
        for _ in range(MAX_REDIRECTS + 1):
            async with self._web.get(url, {**headers, **self.authorize(url)}, allowed=allowed) as response:
                for name in SAID:
                    if name in response.headers:
                        said.setdefault(name, response.headers[name])
                if response.status_code in _LEADING and not response.has_redirect_location:
                    raise name_lost(url, response.status_code)
                if not response.has_redirect_location:
                    yield Answer(response=response, url=url, said=said), allowed
                    return
                if allowed is None:
                    allowed = self._web.find_places(url, response)
                location = response.headers["location"]
                told = read_count(response.headers.get("content-length"))
                if told is not None and told <= MOST_LEFT_BYTES:
                    # To the end of it, so that the connection is kept. Where that is long in coming it is not.
                    with trio.move_on_after(MOST_LEFT_SECONDS):
                        await response.aread()
            url = await choose_next(
                url, location, allowed=allowed, proxies=self._proxies, wait_seconds=self._wait_seconds
            )
        raise FetchFailed(f"{start.host} sends us round in circles", Kind.REFUSED, remedy="check the address")

    def _keep(self, start: str, answer: Answer, allowed: frozenset[Place]) -> None:
        if len(self._ends) >= MOST_KEPT:
            del self._ends[next(iter(self._ends))]
        until = trio.current_time() + KEPT_PLACE_SECONDS
        self._ends[start] = _End(url=answer.url, said=answer.said, allowed=allowed, until=until)
