from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmgw.standalone.from_hub import IDLE_TRIES, _Hub, _next_url, fetch_from_hub
from llmgw.standalone.pinned import PinnedFile, Unavailable


@pytest.fixture
def fetch(tiny: PinnedFile, cache: Path, said: Any) -> Callable[..., Path]:
    def fetch_here(url: str, *, file: PinnedFile = tiny, pauses: list[float] | None = None, **environ: str) -> Path:
        waits: list[float] = [] if pauses is None else pauses
        return fetch_from_hub(file, cache, said, {"HF_ENDPOINT": url, **environ}, waits.append)

    return fetch_here


def ranged(reply: Any, body: bytes, asked: Any, **more: Any) -> Any:
    """The rest of a body, as a server that knows ranges answers."""
    if "range" not in asked.headers:
        return reply(body=body, **more)
    start = int(asked.headers["range"].removeprefix("bytes=").removesuffix("-"))
    where = {"content-range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
    return reply(status=206, headers=where, body=body[start:], **more)


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_the_file_is_fetched_checked_and_kept(
    *, fetch: Any, serve_web: Any, reply: Any, body: bytes, cache: Path, said: Any
) -> None:
    web = serve_web(lambda asked: reply(body=body))
    path = fetch(web.url + "/")
    assert path == cache / "Tiny.gguf"
    assert path.read_bytes() == body
    assert left(cache) == ["Tiny.gguf"]
    assert web.asked[0].path == "/org/repo/resolve/abc/Tiny.gguf"
    assert web.asked[0].headers["accept-encoding"] == "identity"
    assert said.moves[-1] == (len(body), len(body))


def test_the_token_goes_to_the_hub_and_not_where_it_sends_us(
    fetch: Any, serve_web: Any, reply: Any, body: bytes
) -> None:
    storage = serve_web(lambda asked: reply(body=body))
    hub = serve_web(lambda asked: reply(status=302, headers={"location": f"{storage.url}/blob?signed=1"}))
    fetch(hub.url, HF_TOKEN="secret")
    assert hub.asked[0].headers["authorization"] == "Bearer secret"
    assert "authorization" not in storage.asked[0].headers
    assert storage.asked[0].path == "/blob?signed=1"


def test_a_redirect_within_the_hub_keeps_the_token(fetch: Any, serve_web: Any, reply: Any, body: bytes) -> None:
    def answer(asked: Any) -> Any:
        return reply(body=body) if asked.path == "/moved" else reply(status=307, headers={"location": "/moved"})

    hub = serve_web(answer)
    fetch(hub.url, HF_TOKEN="secret")
    assert [asked.headers.get("authorization") for asked in hub.asked] == ["Bearer secret"] * 2


def test_a_cut_download_goes_on_where_it_ended(fetch: Any, serve_web: Any, reply: Any, body: bytes) -> None:
    web = serve_web(lambda asked: ranged(reply, body, asked, cut=100_000))
    assert fetch(web.url).read_bytes() == body
    starts = [int(asked.headers.get("range", "bytes=0-")[6:-1]) for asked in web.asked]
    assert starts == sorted(set(starts))
    assert len(starts) >= 3


def test_a_later_run_goes_on_with_what_an_earlier_one_left(
    fetch: Any, serve_web: Any, reply: Any, body: bytes, cache: Path
) -> None:
    (cache / "Tiny.gguf.part").write_bytes(body[:200_000])
    web = serve_web(lambda asked: ranged(reply, body, asked))
    assert fetch(web.url).read_bytes() == body
    assert web.asked[0].headers["range"] == "bytes=200000-"


def test_a_server_without_ranges_is_read_from_the_start(
    fetch: Any, serve_web: Any, reply: Any, body: bytes, cache: Path
) -> None:
    (cache / "Tiny.gguf.part").write_bytes(b"x" * 1000)
    web = serve_web(lambda asked: reply(body=body))
    assert fetch(web.url).read_bytes() == body


@pytest.mark.parametrize("size", [1000, len("x") * 400_000])
def test_a_bad_remainder_of_an_earlier_run_is_thrown_away(
    *, fetch: Any, serve_web: Any, reply: Any, body: bytes, cache: Path, size: int
) -> None:
    (cache / "Tiny.gguf.part").write_bytes(b"x" * size)
    web = serve_web(lambda asked: ranged(reply, body, asked))
    assert fetch(web.url).read_bytes() == body


def test_another_file_of_the_same_size_is_refused_and_not_kept(
    fetch: Any, serve_web: Any, reply: Any, body: bytes, cache: Path
) -> None:
    web = serve_web(lambda asked: reply(body=body[:-1] + b"?"))
    with pytest.raises(Unavailable, match="is not that file: its SHA-256 differs"):
        fetch(web.url)
    assert left(cache) == []


def test_a_longer_file_is_refused_before_it_is_all_there(
    fetch: Any, serve_web: Any, reply: Any, body: bytes, cache: Path
) -> None:
    web = serve_web(lambda asked: reply(body=body + b"more"))
    with pytest.raises(Unavailable, match=r"sends more than Tiny\.gguf has"):
        fetch(web.url)
    assert "Tiny.gguf" not in left(cache)


def test_a_range_of_another_size_is_refused(fetch: Any, serve_web: Any, reply: Any, body: bytes, cache: Path) -> None:
    (cache / "Tiny.gguf.part").write_bytes(body[:10])
    web = serve_web(lambda asked: ranged(reply, body + b"more", asked))
    with pytest.raises(Unavailable, match=r"has Tiny\.gguf in another size"):
        fetch(web.url)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_plain_no_is_taken_at_once(fetch: Any, serve_web: Any, reply: Any, status: int) -> None:
    web = serve_web(lambda asked: reply(status=status))
    with pytest.raises(Unavailable, match=f"answers {status} for Tiny"):
        fetch(web.url)
    assert len(web.asked) == 1


def test_a_busy_server_is_asked_again_after_growing_pauses(fetch: Any, serve_web: Any, reply: Any, body: bytes) -> None:
    answers = iter([reply(status=503), reply(status=429), reply(body=body)])
    web = serve_web(lambda asked: next(answers))
    pauses: list[float] = []
    assert fetch(web.url, pauses=pauses).read_bytes() == body
    assert pauses == [2.0, 4.0]


def test_a_server_that_brings_nothing_is_given_up(fetch: Any, serve_web: Any, reply: Any, body: bytes) -> None:
    web = serve_web(lambda asked: reply(body=body, cut=0))
    with pytest.raises(Unavailable, match="can't be reached, or breaks off"):
        fetch(web.url)
    assert len(web.asked) == IDLE_TRIES


def test_nobody_there_is_said_so(fetch: Any, serve_web: Any, reply: Any) -> None:
    web = serve_web(lambda asked: reply())
    web.close()
    with pytest.raises(Unavailable, match=r"^127\.0\.0\.1 can't be reached"):
        fetch(web.url)


def test_redirects_in_circles_end(fetch: Any, serve_web: Any, reply: Any) -> None:
    web = serve_web(lambda asked: reply(status=302, headers={"location": asked.path}))
    with pytest.raises(Unavailable, match="round in circles"):
        fetch(web.url)


@pytest.mark.parametrize("endpoint", ["ftp://hub", "hub", "http://", "https://hub:port"])
def test_an_endpoint_that_is_no_web_address_is_named(fetch: Any, endpoint: str) -> None:
    with pytest.raises(Unavailable, match=r"^HF_ENDPOINT=.* is not a web address$"):
        fetch(endpoint)


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:8080/x",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/x",
        "http://localhost/x",
        "file:///etc/passwd",
    ],
)
def test_a_public_hub_can_not_send_us_to_ourselves(location: str) -> None:
    with httpx.Client() as client:
        hub = _Hub(url=httpx.URL("http://hub.example/x"), token=None, client=client)
        with pytest.raises(Unavailable, match="which is refused"):
            _next_url(hub, hub.url, location)


def test_a_redirect_from_https_to_http_is_refused() -> None:
    with httpx.Client() as client:
        hub = _Hub(url=httpx.URL("https://hub.example/x"), token=None, client=client)
        assert _next_url(hub, hub.url, "https://cdn.example/y").host == "cdn.example"
        with pytest.raises(Unavailable, match="redirects to http:, which is refused"):
            _next_url(hub, hub.url, "http://cdn.example/y")


def test_a_file_that_has_no_room_is_not_begun(fetch: Any, serve_web: Any, reply: Any, tiny: PinnedFile) -> None:
    web = serve_web(lambda asked: reply())
    with pytest.raises(Exception, match=r"the disk of .* is full .* nothing was kept; make room"):
        fetch(web.url, file=replace(tiny, size_bytes=10**18))
    assert web.asked == []
