"""A file from the Hugging Face hub, or a mirror of it: redirects followed by hand, cut downloads continued."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from llmgw.standalone.pinned import (
    PinnedFile,
    Progress,
    Unavailable,
    disk_errors,
    disk_full,
    keep,
    sha256_of,
)

HUB = "https://huggingface.co"
IDLE_TRIES = 4
MAX_TRIES = 100
MAX_REDIRECTS = 10
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_AGAIN = {408, 425, 429, 500, 502, 503, 504}


class _BrokenError(Exception):
    """This try ended early, and another may do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hub:
    """Where the file is asked for, the token that is meant for that place alone, and the client that asks."""

    url: httpx.URL
    token: str | None
    client: httpx.Client

    def headers_for(self, url: httpx.URL) -> dict[str, str]:
        """The token goes to the hub's own origin and nowhere else: a redirect leads to other people's storage."""
        if self.token is None or (url.scheme, url.host, url.port) != (self.url.scheme, self.url.host, self.url.port):
            return {}
        return {"authorization": f"Bearer {self.token}"}


def fetch_from_hub(
    file: PinnedFile,
    cache: Path,
    progress: Progress,
    environ: Mapping[str, str],
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """The file in the cache. Unavailable where the hub can't be reached, hasn't the file, or sends another one."""
    part = cache / f"{file.name}.part"
    with httpx.Client(timeout=TIMEOUT, follow_redirects=False) as client, disk_errors(cache, part):
        hub = _hub(client, file, environ)
        if shutil.disk_usage(cache).free < file.size_bytes - _size_of(part):
            part.unlink(missing_ok=True)
            raise disk_full(cache)
        progress.say(f"fetching {file.name} from {hub.url.host} ({file.size_bytes // 10**6} MB, once)")
        resumed = part.exists()
        _fetch_all(hub, file, part, progress, pause)
        if resumed and sha256_of(part) != file.sha256:
            # What an earlier run left behind may have lost bytes in a crash.
            part.unlink()
            _fetch_all(hub, file, part, progress, pause)
        if sha256_of(part) != file.sha256:
            part.unlink()
            raise Unavailable(f"what {hub.url.host} sent as {file.name} is not that file: its SHA-256 differs")
        return keep(file, part, cache)


def _hub(client: httpx.Client, file: PinnedFile, environ: Mapping[str, str]) -> _Hub:
    base = (environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    try:
        url = httpx.URL(f"{base}/{file.hub_path}")
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in {"http", "https"} or not url.host:
        raise Unavailable(f"HF_ENDPOINT={base} is not a web address")
    # In the clear a token would be everybody's on the way.
    may_tell = url.scheme == "https" or _is_local(url.host)
    return _Hub(url=url, token=(environ.get("HF_TOKEN") or None) if may_tell else None, client=client)


def _fetch_all(hub: _Hub, file: PinnedFile, part: Path, progress: Progress, pause: Callable[[float], None]) -> None:
    idle_tries = 0
    for _ in range(MAX_TRIES):
        before = _size_of(part)
        try:
            _fetch_rest(hub, file, part, progress)
            return
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        except _BrokenError as error:
            reason = str(error)
        # A line that breaks every few megabytes still gets there; one that brings nothing does not.
        idle_tries = 0 if _size_of(part) > before else idle_tries + 1
        if idle_tries == IDLE_TRIES:
            break
        progress.say(f"{hub.url.host}: {reason}; trying again")
        pause(2.0**idle_tries)
    raise Unavailable(f"{hub.url.host} can't be reached, or breaks off: {reason}")


def _fetch_rest(hub: _Hub, file: PinnedFile, part: Path, progress: Progress) -> None:
    """What is missing of ``part``, to the last byte and onto the disk."""
    have = _size_of(part)
    if have > file.size_bytes:
        part.unlink()
        have = 0
    if have == file.size_bytes:
        return
    with _follow(hub, have) as response:
        start = _start_of(response, have, file)
        with part.open("r+b" if start else "wb") as out:
            out.seek(start)
            done = start
            for chunk in response.iter_raw():
                done += len(chunk)
                if done > file.size_bytes:
                    out.truncate(0)
                    raise Unavailable(f"{hub.url.host} sends more than {file.name} has")
                out.write(chunk)
                progress.moved(done, file.size_bytes)
            out.flush()
            os.fsync(out.fileno())
    if done < file.size_bytes:
        raise _BrokenError(f"it ended after {done} of {file.size_bytes} bytes")


@contextlib.contextmanager
def _follow(hub: _Hub, have: int) -> Iterator[httpx.Response]:
    url = hub.url
    for _ in range(MAX_REDIRECTS):
        headers = {"accept-encoding": "identity", **hub.headers_for(url)}
        if have:
            headers["range"] = f"bytes={have}-"
        with hub.client.stream("GET", url, headers=headers) as response:
            if not response.has_redirect_location:
                yield response
                return
            url = _next_url(hub, url, response.headers["location"])
    raise Unavailable(f"{hub.url.host} sends us round in circles")


def _next_url(hub: _Hub, url: httpx.URL, location: str) -> httpx.URL:
    try:
        target = url.join(location)
    except httpx.InvalidURL:
        raise Unavailable(f"{url.host} redirects to something that is no address") from None
    if target.scheme not in {"http", "https"} or (url.scheme == "https" and target.scheme != "https"):
        raise Unavailable(f"{url.host} redirects to {target.scheme}:, which is refused")
    # A public name must not make this machine ask its own private services; a mirror on this machine may.
    if _is_local(target.host) and not _is_local(hub.url.host):
        raise Unavailable(f"{url.host} redirects to {target.host}, an address of this machine's own, which is refused")
    return target


def _is_local(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_link_local or address.is_unspecified


def _start_of(response: httpx.Response, have: int, file: PinnedFile) -> int:
    """Where the answer's first byte belongs."""
    if response.status_code == 200:
        return 0
    if response.status_code == 206:
        if response.headers.get("content-range") == f"bytes {have}-{file.size_bytes - 1}/{file.size_bytes}":
            return have
        raise Unavailable(f"{response.url.host} has {file.name} in another size")
    if response.status_code in _AGAIN:
        raise _BrokenError(f"it answers {response.status_code}")
    raise Unavailable(f"{response.url.host} answers {response.status_code} for {file.name}")


def _size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0
