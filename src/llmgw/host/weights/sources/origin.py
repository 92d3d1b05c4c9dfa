"""Where weights come from at first: what a source is at this moment, and its bytes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import quote, unquote

import httpx
import trio

from llmgw import __version__
from llmgw.core import weights
from llmgw.core.weights import FileListed, Listing, Source, list_parts, tell_too_many_parts
from llmgw.errors import ConfigError, Problem
from llmgw.host.weights.errors import Broken, FetchFailed, Kind, show_url
from llmgw.host.weights.sources.answers import Answer, Target, check_answer, name_change, size_of
from llmgw.host.weights.sources.asker import AGENT, Asker
from llmgw.host.weights.sources.connections import make_tls
from llmgw.host.weights.sources.following import FOUND, Following
from llmgw.host.weights.sources.hub import (
    HUB,
    MAIN,
    Entry,
    api_url,
    explain,
    explain_status,
    explain_storage,
    file_url,
    read_repository,
    read_sha256,
    refuse_name,
)
from llmgw.host.weights.sources.redirects import Proxies, is_same_origin, read_proxies, read_web_address
from llmgw.host.weights.sources.web import CLOSE_SECONDS, HELD_UP, Web, read_body

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
# Whoever sends less in READ_SECONDS is as good as silent.
LEAST_BYTES = 16 * 1024
MOST_ANSWER_BYTES = 32 * 1024 * 1024
MOST_KEPT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginSettings:
    """How the outside is asked. ``endpoint``: the hub, without a slash at its end. ``allow_hosts``: which hosts a
    source may name, empty for all. ``ca_file``: who signs certificates that are believed, None for the usual ones.
    ``asker``: where all this is written, for those who have to change it."""

    endpoint: str = HUB
    token: str | None = field(default=None, repr=False)
    allow_hosts: tuple[str, ...] = ()
    user_agent: str = f"llmgw/{__version__}"
    proxies: Proxies = field(default_factory=Proxies)
    ca_file: str | None = None
    connect_seconds: float = CONNECT_SECONDS
    read_seconds: float = READ_SECONDS
    asker: Asker = AGENT


def read_origin_settings(
    environ: Mapping[str, str], *, token: str | None, allow_hosts: tuple[str, ...], asker: Asker = AGENT
) -> OriginSettings:
    """What the environment says, and what the asker's file does: its token is taken rather than HF_TOKEN. ConfigError
    where one of them can't be used."""
    endpoint = (environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    url = read_web_address(endpoint)
    if url is None or url.userinfo or url.query:
        # It is not shown: it may hold a password.
        raise ConfigError([Problem(key="HF_ENDPOINT", message="is no web address: write https://host")])
    told = (token or environ.get("HF_TOKEN") or "").strip()
    if not told.isascii() or not told.isprintable() or " " in told:
        key = "weights.hub_token" if token else "HF_TOKEN"
        raise ConfigError([Problem(key=key, message="holds characters that no token has")])
    return OriginSettings(
        endpoint=endpoint,
        token=told or None,
        allow_hosts=tuple(allow_hosts),
        proxies=read_proxies(environ),
        ca_file=environ.get("SSL_CERT_FILE") or None,
        asker=asker,
    )


@asynccontextmanager
async def open_origin(settings: OriginSettings, *, now: Callable[[], float] = time.time) -> AsyncIterator[Origin]:
    """``now`` in seconds since 1970. ConfigError where the certificates that ``settings`` names can't be read."""
    tls = await trio.to_thread.run_sync(make_tls, settings.ca_file)
    web = Web(
        tls,
        settings.proxies,
        connect_seconds=settings.connect_seconds,
        read_seconds=settings.read_seconds,
        user_agent=settings.user_agent,
        asker=settings.asker,
    )
    try:
        yield Origin(settings, web, now)
    finally:
        with trio.move_on_after(CLOSE_SECONDS, shield=True):
            await web.close()


class Origin:
    """The hub and all other web servers, asked by our rules. One for all fetches of a program."""

    def __init__(self, settings: OriginSettings, web: Web, now: Callable[[], float]) -> None:
        self._settings = settings
        self._web = web
        self._now = now
        self._endpoint = httpx.URL(settings.endpoint)
        self._following = Following(
            web,
            endpoint=self._endpoint,
            token=settings.token,
            allow_hosts=settings.allow_hosts,
            proxies=settings.proxies,
            wait_seconds=settings.connect_seconds,
            asker=settings.asker,
        )
        self._targets: dict[tuple[str, str], tuple[Target, ...]] = {}

    async def resolve(self, source: Source, commit: str | None) -> Listing:
        """What a source is now; with ``commit``, that one and no other: FetchFailed (CHANGED) where the origin has
        another. Broken where a later try may do better."""
        if source.form is weights.Form.HUB:
            return await self._resolve_hub(source, commit)
        if source.form is weights.Form.URL:
            return await self._resolve_url(source, commit)
        raise FetchFailed(
            f"{show_url(source.text)} is not fetched: {source.why or 'it is no file of a hub and no web address'}",
            Kind.UNSUPPORTED,
            remedy="write hf:org/repo/file or https://host/file",
        )

    @asynccontextmanager
    async def read(
        self, source: Source, listing: Listing, file: int, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes from ``start`` to before ``stop`` of a listing's file, and not one more.

        FetchFailed, Broken and NoRanges come out of entering and of the iteration. A read of the whole file asks for no
        range, so that it is good against every server.
        """
        if start >= stop:
            yield _nothing()
            return
        target = await self._target_of(source, listing, file)
        whole = start == 0 and stop == target.size_bytes
        headers = {} if whole else {"range": f"bytes={start}-{stop - 1}"}
        async with self._following.ask(target.url, headers, keep=True) as answer:
            if answer.response.status_code not in FOUND:
                _check_commit(source, listing.commit, answer)
                raise self._explain(source, target.url, answer)
            skipped = check_answer(answer, target, start, stop)
            async with aclosing(self._take(answer, skipped, stop - start)) as chunks:
                yield chunks

    async def _resolve_hub(self, source: Source, commit: str | None) -> Listing:
        asked = commit or source.revision or MAIN
        url = httpx.URL(api_url(self._settings.endpoint, source.repo, asked))
        async with self._following.ask(url, {}) as answer:
            if commit is not None:
                _check_commit(source, commit, answer)
            if answer.response.status_code != 200:
                raise self._explain(source, url, answer)
            body = await self._read_all(answer)

        def read() -> tuple[str, list[tuple[Entry, FileListed | None]]]:
            told, entries = read_repository(body, source, self._endpoint.host)
            return told, [(each, each.list()) for each in entries]

        told, found = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        if commit is not None and told != commit:
            raise name_change(source.repo, f"it is at {told[:12]}, not at {commit[:12]}")
        files = [listed or await self._measure(source, told, each) for each, listed in found]
        return Listing(source=source.text, commit=told, files=tuple(files))

    async def _measure(self, source: Source, commit: str, entry: Entry) -> FileListed:
        """A mirror's list may say no sizes; the file itself does."""
        url = httpx.URL(file_url(self._settings.endpoint, source.repo, commit, entry.name))
        target = await self._probe(source, url, entry.name)
        return FileListed(name=entry.name, size_bytes=target.size_bytes, sha256=entry.sha256 or target.sha256)

    async def _resolve_url(self, source: Source, commit: str | None) -> Listing:
        targets = [await self._probe(source, url, name) for name, url in _list_addresses(source.text)]
        found = _commit_of(targets, self._now())
        if commit is not None and commit != found:
            known = self._targets.get((source.text, commit))
            if known is None or not _look_alike(known, targets):
                raise name_change(show_url(source.text), "the server has another file by now")
            # Nobody can say that it has changed, and this program has begun it.
            found, targets = commit, list(known)
        if len(self._targets) >= MOST_KEPT:
            del self._targets[next(iter(self._targets))]
        self._targets[source.text, found] = tuple(targets)
        files = tuple(
            FileListed(name=target.name, size_bytes=target.size_bytes, sha256=target.sha256) for target in targets
        )
        return Listing(source=source.text, commit=found, files=files)

    async def _probe(self, source: Source, url: httpx.URL, name: str) -> Target:
        """How long a file is, and what tells it from another. By its first byte: some servers know no HEAD, and some
        signed addresses are for GET alone."""
        for headers in ({"range": "bytes=0-0"}, {}):
            async with self._following.ask(url, headers) as answer:
                response = answer.response
                if response.status_code == 416 and headers:
                    # It is empty, or the server can't count.
                    continue
                if response.status_code not in (200, 206):
                    raise self._explain(source, url, answer)
                size = size_of(answer)
                if size is None:
                    continue
                if answer.length == 1:
                    # To the end of it, so that the connection is kept.
                    await self._read_all(answer)
                return Target(
                    url=url,
                    name=name,
                    size_bytes=size,
                    sha256=read_sha256(answer.said.get("x-linked-etag")),
                    marks=answer.marks,
                    status=response.status_code,
                )
        raise FetchFailed(
            f"{url.host} does not say how long {name} is, so that nobody could tell when all of it is here",
            Kind.UNSUPPORTED,
            remedy="serve it by a web server that sends Content-Length",
        )

    async def _target_of(self, source: Source, listing: Listing, file: int) -> Target:
        listed = listing.files[file]
        if source.form is weights.Form.HUB:
            return Target(
                url=httpx.URL(file_url(self._settings.endpoint, source.repo, listing.commit, listed.name)),
                name=listed.name,
                size_bytes=listed.size_bytes,
                sha256=listed.sha256,
                commit=listing.commit,
            )
        if (source.text, listing.commit) not in self._targets:
            # It was resolved by another node, or before this program began.
            await self.resolve(source, listing.commit)
        targets = self._targets[source.text, listing.commit]
        if len(targets) != len(listing.files):
            raise name_change(show_url(source.text), f"it has {len(targets)} files, not {len(listing.files)}")
        target = targets[file]
        if target.size_bytes != listed.size_bytes:
            raise name_change(listed.name, f"it has {target.size_bytes} bytes, not {listed.size_bytes}")
        return target

    def _explain(self, source: Source, start: httpx.URL, answer: Answer) -> FetchFailed | Broken:
        status, headers = answer.response.status_code, answer.response.headers
        what = unquote(start.path.rpartition("/")[2])
        if source.form is not weights.Form.HUB:
            return explain_status(status, headers, answer.url.host, what)
        # A hub leads to where a file lies, and that may be on its own host.
        lost = status == 404 and answer.url != start and "x-error-code" not in headers
        if is_same_origin(answer.url, start) and not lost:
            token_told = bool(self._following.authorize(answer.url))
            return explain(
                source,
                status,
                headers,
                endpoint=self._settings.endpoint,
                token_told=token_told,
                asker=self._settings.asker,
            )
        return explain_storage(status, headers, answer.url.host, what, hub=start.host)

    async def _read_all(self, answer: Answer) -> bytes:
        body = bytearray()
        async with aclosing(self._chunks(answer)) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > MOST_ANSWER_BYTES:
                    raise FetchFailed(
                        f"{answer.url.host} answers with more than can be read",
                        Kind.UNSUPPORTED,
                        remedy="check the address",
                    )
        return bytes(body)

    async def _take(self, answer: Answer, skipped: int, wanted: int) -> AsyncGenerator[bytes, None]:
        """So many bytes behind those that are skipped."""
        left = wanted
        async with aclosing(self._chunks(answer)) as chunks:
            async for chunk in chunks:
                if left == 0:
                    # More than was asked for: the connection ends with it.
                    return
                if skipped >= len(chunk):
                    skipped -= len(chunk)
                    continue
                part = chunk[skipped : skipped + left] if skipped or len(chunk) > left else chunk
                skipped = 0
                left -= len(part)
                yield part
                if left == 0 and answer.length != wanted:
                    return
        if left:
            raise Broken(
                f"{answer.url.host} ended after {wanted - left} of {wanted} bytes",
                remedy="see whether a proxy, or a time limit there, cuts off what takes long",
            )

    async def _chunks(self, answer: Answer) -> AsyncGenerator[bytes, None]:
        with self._web.naming(answer.url, self._settings.proxies.find(answer.url)):
            async with read_body(answer.response) as chunks:
                # (the time that whoever takes it needs is not the server's)
                waited, came, since = 0.0, 0, trio.current_time()
                while True:
                    # (what frames a body may come byte by byte too, and is no chunk)
                    with trio.move_on_after(self._web.patience_seconds) as waiting:
                        chunk = await anext(chunks, None)
                    if waiting.cancelled_caught:
                        raise Broken(
                            f"{answer.url.host} has sent nothing of it for {self._web.patience_seconds:g} s",
                            remedy=HELD_UP,
                        )
                    if chunk is None:
                        return
                    waited += trio.current_time() - since
                    came += len(chunk)
                    if waited >= self._settings.read_seconds:
                        if came < LEAST_BYTES:
                            raise Broken(
                                f"{answer.url.host} has sent {came} bytes in {waited:.0f} s",
                                remedy=HELD_UP,
                            )
                        waited, came = 0.0, 0
                    yield chunk
                    since = trio.current_time()


def _check_commit(source: Source, commit: str, answer: Answer) -> None:
    if answer.response.headers.get("x-error-code") == "RevisionNotFound":
        raise name_change(source.repo, f"the hub has no commit {commit[:12]} any more")


async def _nothing() -> AsyncIterator[bytes]:
    for chunk in cast("tuple[bytes, ...]", ()):
        yield chunk


def _list_addresses(text: str) -> Iterator[tuple[str, httpx.URL]]:
    """All parts of what an address names, each with the name that it is kept under, one after the other: all of them at
    once take longer than a turn of the loop may."""
    place, sign, query = text.partition("#")[0].partition("?")
    folder, _, last = place.rpartition("/")
    name = unquote(last)
    if why := ("its name leads elsewhere" if "/" in name else refuse_name(name)):
        raise FetchFailed(
            f"{show_url(text)} can't be kept: {why}", Kind.UNSUPPORTED, remedy="give the file another name there"
        )
    if why := tell_too_many_parts(name):
        raise FetchFailed(f"{show_url(text)} {why}", Kind.UNSUPPORTED, remedy="check the address")
    for part in list_parts(name):
        url = read_web_address(f"{folder}/{last if part == name else quote(part)}{sign}{query}")
        if url is None:
            raise FetchFailed(f"{show_url(text)} is no address of a web server", Kind.UNSUPPORTED, remedy="check it")
        yield part, url


def _look_alike(known: tuple[Target, ...], found: list[Target]) -> bool:
    """Nothing tells them from one another, as far as their server says anything."""
    return all(
        one.size_bytes == two.size_bytes and (one.marks == two.marks or one.marks.agree(two.marks) is True)
        for one, two in zip(known, found, strict=True)
    )


def _commit_of(targets: list[Target], now: float) -> str:
    """A name for exactly these bytes; where no server told them from others, for what came at this moment."""
    told: list[object] = [[target.marks.first, target.size_bytes, target.name] for target in targets]
    if any(target.marks.first is None for target in targets):
        told.append(now)
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:40]
