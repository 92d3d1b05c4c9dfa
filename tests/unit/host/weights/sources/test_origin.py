"""Sources resolved and read, from a server that is like the hub and like any other, and that misbehaves."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from fake_origin import FakeOrigin
from trio.testing import MockClock

from llmgw.core.weights import Listing, parse_source
from llmgw.errors import ConfigError
from llmgw.host.weights.errors import Broken, FetchFailed, Kind, NoRanges
from llmgw.host.weights.sources.origin import Origin, OriginSettings, open_origin, read_origin_settings
from llmgw.pki.authority import certificate_pem, make_authority

SIZE = 1_500_000
TOKEN = "hf_very_secret"
X = "org/repo/x.gguf"
HUB_X = f"hf:{X}"
AUTHORITY = certificate_pem(make_authority(now=time.time()).certificate)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    repo = tmp_path / "served" / "org" / "repo"
    repo.mkdir(parents=True)
    (repo / "x.gguf").write_bytes(os.urandom(SIZE))
    (repo / "config.json").write_text("{}")
    return repo


@pytest.fixture
def web(folder: Path) -> Iterator[FakeOrigin]:
    """The hub, with its storage on another port, and a plain web server."""
    # One authority is read sooner than all that there are.
    (folder.parents[1] / "ca.pem").write_bytes(AUTHORITY)
    with FakeOrigin(folder.parents[1], cdn="other") as origin:
        yield origin
    # What was left open would be told of here, in the test that left it.
    gc.collect()


@pytest.fixture
async def origin(web: FakeOrigin) -> Any:
    async with open_origin(settings_of(web)) as found:
        yield found


def settings_of(web: FakeOrigin, **more: Any) -> OriginSettings:
    usual = {"endpoint": web.url, "token": TOKEN, "ca_file": str(web.folder / "ca.pem")}
    return OriginSettings(**{**usual, "connect_seconds": 60, "read_seconds": 60, **more})


async def resolve(origin: Origin, text: str, commit: str | None = None) -> Listing:
    with trio.fail_after(60):
        return await origin.resolve(parse_source(text), commit)


async def read(origin: Origin, listing: Listing, part: tuple[int, int] | None = None, *, file: int = 0) -> bytes:
    start, stop = part or (0, listing.files[file].size_bytes)
    with trio.fail_after(60):
        async with origin.read(parse_source(listing.source), listing, file, start, stop) as chunks:
            return b"".join([chunk async for chunk in chunks])


async def failing(work: Callable[..., Awaitable[object]], *args: Any) -> FetchFailed:
    with pytest.raises(FetchFailed) as raised:
        await work(*args)
    return raised.value


async def broken(*args: Any) -> Broken:
    with pytest.raises(Broken) as raised:
        await read(*args)
    return raised.value


# What a source is


async def test_a_file_of_the_hub_is_known_by_its_commit(origin: Origin, web: FakeOrigin, folder: Path) -> None:
    listing = await resolve(origin, HUB_X)
    assert listing.source == HUB_X
    assert listing.commit == web.commit_of("org/repo")
    (file,) = listing.files
    assert (file.name, file.size_bytes, file.sha256) == ("x.gguf", SIZE, web.sha256_of(folder / "x.gguf"))


async def test_a_revision_leads_to_the_commit_that_it_is(origin: Origin, web: FakeOrigin) -> None:
    web.tags["refs/pr/1"] = web.commit_of("org/repo")
    assert (await resolve(origin, f"{HUB_X}@refs/pr/1")).commit == web.commit_of("org/repo")


async def test_a_commit_that_is_asked_for_is_had_or_missed(origin: Origin, web: FakeOrigin, folder: Path) -> None:
    commit = web.commit_of("org/repo")
    assert (await resolve(origin, HUB_X, commit)).commit == commit
    (folder / "config.json").write_text("{ }")
    error = await failing(resolve, origin, HUB_X, commit)
    assert error.kind is Kind.CHANGED


async def test_a_mirror_that_has_another_commit_than_was_asked_for_is_found_out(
    origin: Origin, web: FakeOrigin
) -> None:
    web.fault("api/*", api={"sha": "0" * 40, "siblings": [{"rfilename": "x.gguf", "size": 1}]})
    assert (await failing(resolve, origin, HUB_X, web.commit_of("org/repo"))).kind is Kind.CHANGED


async def test_parts_and_companions_come_along(origin: Origin, folder: Path) -> None:
    for number in (1, 2):
        (folder / f"m-0000{number}-of-00002.safetensors").write_bytes(b"x" * number)
    listing = await resolve(origin, "hf:org/repo/m-00001*.safetensors")
    assert [(file.name, file.size_bytes) for file in listing.files] == [
        ("config.json", 2),
        ("m-00001-of-00002.safetensors", 1),
        ("m-00002-of-00002.safetensors", 2),
    ]
    assert await read(origin, listing) == b"{}"
    assert await read(origin, listing, file=2) == b"xx"


async def test_a_mirror_that_tells_no_sizes_is_asked_for_each(origin: Origin, web: FakeOrigin, folder: Path) -> None:
    web.fault("api/*", api={"sha": web.commit_of("org/repo"), "siblings": [{"rfilename": "x.gguf"}]})
    (file,) = (await resolve(origin, HUB_X)).files
    assert (file.size_bytes, file.sha256) == (SIZE, web.sha256_of(folder / "x.gguf"))


async def test_a_file_of_any_server_is_known_by_its_mark_and_size(origin: Origin, web: FakeOrigin) -> None:
    first = await resolve(origin, f"{web.url}/{X}")
    assert [(file.name, file.size_bytes, file.sha256) for file in first.files] == [("x.gguf", SIZE, None)]
    assert (await resolve(origin, f"{web.url}/{X}")).commit == first.commit
    web.fault(X, etag='"another"')
    assert (await resolve(origin, f"{web.url}/{X}")).commit != first.commit
    assert (await failing(resolve, origin, f"{web.url}/{X}", first.commit)).kind is Kind.CHANGED


async def test_an_address_brings_all_parts(origin: Origin, web: FakeOrigin, folder: Path) -> None:
    for number in (1, 2):
        (folder / f"a b-0000{number}-of-00002.gguf").write_bytes(b"x" * number)
    listing = await resolve(origin, f"{web.url}/org/repo/a%20b-00001-of-00002.gguf?secret=1")
    assert [file.name for file in listing.files] == ["a b-00001-of-00002.gguf", "a b-00002-of-00002.gguf"]
    assert await read(origin, listing, file=1) == b"xx"
    assert "secret=1" in web.requests[-1].path
    (folder / "a b-00002-of-00002.gguf").unlink()
    error = await failing(resolve, origin, listing.source)
    assert (error.kind, "00002-of" in error.message) == (Kind.MISSING, True)


async def test_the_hubs_own_address_tells_the_sha256(origin: Origin, web: FakeOrigin, folder: Path) -> None:
    listing = await resolve(origin, f"{web.url}/org/repo/resolve/main/x.gguf")
    assert listing.files[0].sha256 == web.sha256_of(folder / "x.gguf")
    for _ in range(2):
        assert await read(origin, listing) == (folder / "x.gguf").read_bytes()


async def test_without_a_mark_another_moment_is_another_file(web: FakeOrigin) -> None:
    web.fault(X, etag="")
    times = iter(range(9))
    async with open_origin(settings_of(web), now=lambda: float(next(times))) as origin:
        first = await resolve(origin, f"{web.url}/{X}")
        assert (await resolve(origin, f"{web.url}/{X}")).commit != first.commit
        # What this program has begun it may go on with.
        assert (await resolve(origin, f"{web.url}/{X}", first.commit)).commit == first.commit
        assert len(await read(origin, first, (0, 10))) == 10
    async with open_origin(settings_of(web)) as another:
        assert (await failing(resolve, another, f"{web.url}/{X}", first.commit)).kind is Kind.CHANGED


async def test_a_server_that_does_not_say_how_long_it_is_cannot_be_fetched_from(
    origin: Origin, web: FakeOrigin
) -> None:
    web.fault(X, no_length=True, no_ranges=True)
    error = await failing(resolve, origin, f"{web.url}/{X}")
    assert error.kind is Kind.UNSUPPORTED
    assert "does not say how long" in error.message


async def test_a_server_that_knows_no_ranges_says_how_long_it_is(origin: Origin, web: FakeOrigin) -> None:
    web.fault(X, no_ranges=True)
    assert (await resolve(origin, f"{web.url}/{X}")).size_bytes == SIZE


async def test_an_empty_file_is_one(origin: Origin, web: FakeOrigin, folder: Path) -> None:
    (folder / "empty.gguf").write_bytes(b"")
    listing = await resolve(origin, f"{web.url}/org/repo/empty.gguf")
    assert listing.size_bytes == 0
    assert await read(origin, listing) == b""


@pytest.mark.parametrize("text", ["/x.gguf", "org/repo", "s3://bucket/x", "hf:org/repo"])
async def test_what_is_not_fetched_is_said_to_be_so(origin: Origin, text: str) -> None:
    assert (await failing(resolve, origin, text)).kind is Kind.UNSUPPORTED


@pytest.mark.parametrize("last", ["..%2Fx.gguf", ".hidden", "%0a", "x%5Cy"])
async def test_an_address_whose_name_leads_elsewhere_is_not_kept(origin: Origin, web: FakeOrigin, last: str) -> None:
    error = await failing(resolve, origin, f"{web.url}/{last}?secret=1")
    assert error.kind is Kind.UNSUPPORTED
    assert "secret" not in error.message
    assert web.requests == []


async def test_an_address_of_endless_parts_is_told_and_not_asked(origin: Origin, web: FakeOrigin) -> None:
    error = await failing(resolve, origin, f"{web.url}/x-00001-of-99999.gguf?secret=1")
    assert (error.kind, "one of 99999 parts" in error.message) == (Kind.UNSUPPORTED, True)
    assert "secret" not in error.message
    assert web.requests == []


@pytest.mark.parametrize(
    "headers", [{"content-range": "bytes 0-0/" + "9" * 5000}, {"x-linked-size": "9" * 5000, "content-range": "x"}]
)
async def test_a_length_of_endless_digits_is_none(origin: Origin, web: FakeOrigin, headers: dict[str, str]) -> None:
    web.fault(X, headers=headers, no_length=True)
    error = await failing(resolve, origin, f"{web.url}/{X}")
    assert (error.kind, "does not say how long" in error.message) == (Kind.UNSUPPORTED, True)


async def test_an_address_with_a_port_that_nobody_has_is_none(origin: Origin) -> None:
    error = await failing(resolve, origin, "http://127.0.0.1:99999/x.gguf?secret=1")
    assert (error.kind, "secret" in error.message) == (Kind.UNSUPPORTED, False)


# What the hub refuses


async def test_a_gated_repository_is_listed_and_not_given(web: FakeOrigin) -> None:
    web.gated["org/repo"] = "hf_another"
    for token, remedy in ((None, "then set HF_TOKEN"), (TOKEN, "the account that the token is of")):
        async with open_origin(settings_of(web, token=token)) as origin:
            error = await failing(read, origin, await resolve(origin, HUB_X))
            assert error.kind is Kind.GATED
            assert remedy in (error.remedy or "")
    async with open_origin(settings_of(web, token="hf_another")) as origin:
        assert len(await read(origin, await resolve(origin, HUB_X))) == SIZE


async def test_what_is_missing_is_told_apart(origin: Origin, folder: Path) -> None:
    error = await failing(resolve, origin, "hf:org/other/x.gguf")
    assert (error.kind, "this token may not read it" in error.message) == (Kind.MISSING, True)
    error = await failing(resolve, origin, f"{HUB_X}@v9")
    assert (error.kind, "no revision v9" in error.message) == (Kind.MISSING, True)
    error = await failing(resolve, origin, "hf:org/repo/X.gguf")
    assert (error.kind, error.remedy) == (Kind.NO_FILE, "did you mean hf:org/repo/x.gguf?")
    listing = await resolve(origin, "hf:org/repo/config.json")
    (folder / "config.json").write_text("{ }")
    error = await failing(read, origin, listing)
    assert (error.kind, "has no commit" in error.message) == (Kind.CHANGED, True)


@pytest.mark.parametrize(("status", "kind"), [(403, Kind.REFUSED), (404, Kind.NO_FILE)])
async def test_where_the_hub_keeps_a_file_is_not_the_hub(
    origin: Origin, web: FakeOrigin, status: int, kind: Kind
) -> None:
    listing = await resolve(origin, HUB_X)
    web.fault("cdn/*", status=status)
    error = await failing(read, origin, listing)
    assert (error.kind, "where 127.0.0.1" in error.message) == (kind, True)
    assert "token" not in error.message + (error.remedy or "")
    web.fault("org/repo/resolve/*/config.json", redirect="/nowhere/config.json")
    error = await failing(read, origin, await resolve(origin, "hf:org/repo/config.json"))
    assert (error.kind, "has no such file" in error.message) == (Kind.NO_FILE, True)


async def test_a_host_that_is_not_allowed_is_not_asked(web: FakeOrigin) -> None:
    async with open_origin(settings_of(web, allow_hosts=("models.internal",))) as origin:
        for text in (HUB_X, f"{web.url}/{X}"):
            assert (await failing(resolve, origin, text)).kind is Kind.REFUSED
    assert web.requests == []


async def test_a_redirect_may_lead_past_the_allowed_hosts(web: FakeOrigin) -> None:
    async with open_origin(settings_of(web, allow_hosts=(f"127.0.0.1:{web.port}",))) as origin:
        assert len(await read(origin, await resolve(origin, HUB_X))) == SIZE
        assert web.requests[-1].cdn


# Its bytes


async def test_a_part_is_exactly_that(origin: Origin, folder: Path) -> None:
    whole = (folder / "x.gguf").read_bytes()
    listing = await resolve(origin, HUB_X)
    for start, stop in ((0, SIZE), (0, 1), (SIZE - 1, SIZE), (700_000, 1_200_000), (5, 5)):
        assert await read(origin, listing, (start, stop)) == whole[start:stop]


async def test_the_storage_is_asked_at_once_the_next_time(origin: Origin, web: FakeOrigin) -> None:
    listing = await resolve(origin, HUB_X)
    await read(origin, listing, (0, 10))
    web.forget()
    await read(origin, listing, (10, 20))
    assert [seen.cdn for seen in web.requests] == [True]


@pytest.mark.parametrize("status", [403, 404, 410, 503])
async def test_a_signed_address_that_has_expired_is_asked_for_anew(
    origin: Origin, web: FakeOrigin, status: int
) -> None:
    listing = await resolve(origin, HUB_X)
    await read(origin, listing, (0, 10))
    web.fault("cdn/*", status=status, times=1)
    web.forget()
    assert len(await read(origin, listing, (10, 20))) == 10
    assert [seen.cdn for seen in web.requests] == [True, False, True]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"reset_after": 1000}, "broke"),
        ({"reset_after": 0}, "broke|ended"),
        ({"short_after": 1000}, "ended"),
        ({"status": 503}, "503"),
        ({"headers": {"content-range": f"bytes 7-99/{SIZE}"}}, "other bytes"),
        ({"headers": {"content-range": None}}, "other bytes"),
    ],
)
async def test_a_try_that_breaks_may_be_made_again(
    origin: Origin, web: FakeOrigin, folder: Path, fault: dict[str, Any], words: str
) -> None:
    listing = await resolve(origin, HUB_X)
    web.fault("cdn/*", **fault, times=1)
    with pytest.raises(Broken, match=words):
        await read(origin, listing, (0, 500_000))
    assert await read(origin, listing, (0, 500_000)) == (folder / "x.gguf").read_bytes()[:500_000]


async def test_a_body_without_a_length_that_ends_early_is_found_out(origin: Origin, web: FakeOrigin) -> None:
    listing = await resolve(origin, HUB_X)
    web.fault("cdn/*", headers={"content-length": "100"}, short_after=100)
    error = await broken(origin, listing, (0, 500_000))
    assert "100 of 500000 bytes" in error.reason


async def test_a_server_that_goes_quiet_is_left(web: FakeOrigin) -> None:
    async with open_origin(settings_of(web, read_seconds=0.1)) as origin:
        listing = await resolve(origin, HUB_X)
        web.fault("cdn/*", stall_after=1000)
        error = await broken(origin, listing)
    assert "has sent nothing for 0.1 s" in error.reason


async def test_too_many_requests_say_when_to_come_back(origin: Origin, web: FakeOrigin) -> None:
    listing = await resolve(origin, HUB_X)
    web.fault(X, status=429, headers={"retry-after": "12"})
    assert (await broken(origin, listing)).wait_seconds == 12
    web.fault("api/*", status=429)
    with pytest.raises(Broken):
        await resolve(origin, HUB_X)


async def test_a_server_that_knows_no_ranges_is_read_in_order(origin: Origin, web: FakeOrigin, folder: Path) -> None:
    whole = (folder / "x.gguf").read_bytes()
    listing = await resolve(origin, HUB_X)
    web.fault("cdn/*", no_ranges=True)
    assert await read(origin, listing, (0, 1000)) == whole[:1000]
    assert await read(origin, listing, (100_000, 200_000)) == whole[100_000:200_000]
    with pytest.raises(NoRanges):
        await read(origin, listing, (1_000_000, SIZE))
    assert await read(origin, listing) == whole


async def test_a_refused_range_means_that_there_are_none_or_another_file(origin: Origin, web: FakeOrigin) -> None:
    listing = await resolve(origin, HUB_X)
    for headers in ({}, {"content-range": f"bytes */{SIZE}"}):
        web.fault("cdn/*", status=416, headers=headers, times=1)
        with pytest.raises(NoRanges):
            await read(origin, listing, (1, 10))
    web.fault("cdn/*", status=416, headers={"content-range": "bytes */3"})
    assert (await failing(read, origin, listing, (1, 10))).kind is Kind.CHANGED
    web.clear()
    web.fault("cdn/*", status=416)
    assert "nobody asked for" in (await broken(origin, listing)).reason


async def test_a_file_that_was_replaced_is_not_mixed_with_what_it_was(
    origin: Origin, web: FakeOrigin, folder: Path
) -> None:
    listing = await resolve(origin, f"{web.url}/{X}")
    await read(origin, listing, (0, 10))
    (folder / "x.gguf").write_bytes(os.urandom(SIZE))
    os.utime(folder / "x.gguf", (1, 1))
    assert (await failing(read, origin, listing, (10, 20))).kind is Kind.CHANGED
    (folder / "x.gguf").write_bytes(b"short")
    assert (await failing(read, origin, listing, (0, 3))).kind is Kind.CHANGED


@pytest.mark.parametrize(
    "headers",
    [{"x-repo-commit": "0" * 40}, {"x-linked-size": "17"}, {"x-linked-etag": '"' + "0" * 64 + '"'}],
)
async def test_a_hub_that_leads_to_another_file_is_found_out(
    origin: Origin, web: FakeOrigin, headers: dict[str, str]
) -> None:
    listing = await resolve(origin, HUB_X)
    web.fault("*/resolve/*", headers=headers)
    assert (await failing(read, origin, listing, (0, 10))).kind is Kind.CHANGED


async def test_what_is_read_without_being_resolved_here_is_looked_at_first(web: FakeOrigin) -> None:
    async with open_origin(settings_of(web)) as one:
        listing = await resolve(one, f"{web.url}/{X}")
    async with open_origin(settings_of(web)) as another:
        assert len(await read(another, listing, (0, 10))) == 10
    web.fault(X, etag='"another"')
    async with open_origin(settings_of(web)) as another:
        assert (await failing(read, another, listing, (0, 10))).kind is Kind.CHANGED


async def test_a_listing_that_says_another_size_is_another_file(origin: Origin, web: FakeOrigin) -> None:
    listing = await resolve(origin, f"{web.url}/{X}")
    other = dataclasses.replace(listing, files=(dataclasses.replace(listing.files[0], size_bytes=5),))
    assert (await failing(read, origin, other)).kind is Kind.CHANGED


async def test_what_comes_compressed_is_refused(origin: Origin, web: FakeOrigin) -> None:
    listing = await resolve(origin, HUB_X)
    assert web.requests[-1].headers["accept-encoding"] == "identity"
    web.fault("cdn/*", headers={"content-encoding": "gzip"})
    error = await failing(read, origin, listing, (0, 10))
    assert (error.kind, "compressed" in error.message) == (Kind.UNSUPPORTED, True)


async def test_a_read_that_is_left_or_cancelled_leaves_nothing_behind(origin: Origin, web: FakeOrigin) -> None:
    listing = await resolve(origin, HUB_X)
    source = parse_source(HUB_X)
    async with origin.read(source, listing, 0, 0, SIZE) as chunks:
        async for chunk in chunks:
            assert chunk
            break
    web.fault("cdn/*", stall_after=1000)
    async with trio.open_nursery() as nursery:

        async def stall() -> None:
            async with origin.read(source, listing, 0, 0, SIZE) as chunks:
                async for _ in chunks:
                    nursery.cancel_scope.cancel()

        nursery.start_soon(stall)
    web.clear()
    assert len(await read(origin, listing)) == SIZE


@pytest.mark.slow
async def test_a_server_that_only_drips_is_left(web: FakeOrigin) -> None:
    async with open_origin(settings_of(web, read_seconds=2)) as origin:
        listing = await resolve(origin, HUB_X)
        web.fault("cdn/*", bytes_per_s=5000)
        error = await broken(origin, listing)
    assert "bytes in " in error.reason
    assert error.remedy


async def test_a_body_of_which_only_the_framing_drips_is_left(web: FakeOrigin, autojump_clock: MockClock) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"0")
                await trio.sleep(5)

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        endpoint = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        async with open_origin(settings_of(web, endpoint=endpoint, read_seconds=30)) as origin:
            with pytest.raises(Broken, match="has sent nothing of it for 90 s") as raised:
                await origin.resolve(parse_source(HUB_X), None)
        nursery.cancel_scope.cancel()
    assert raised.value.remedy


async def test_servers_that_share_an_address_may_say_different_things(
    origin: Origin, web: FakeOrigin, folder: Path
) -> None:
    listing = await resolve(origin, f"{web.url}/{X}")
    web.fault(X, headers={"etag": None})
    assert await read(origin, listing, (10, 20)) == (folder / "x.gguf").read_bytes()[10:20]
    assert (await resolve(origin, listing.source, listing.commit)).commit == listing.commit
    web.clear()
    # (what was said at first is what counts)
    web.fault(X, etag='"another"')
    assert (await failing(read, origin, listing, (10, 20))).kind is Kind.CHANGED


async def test_an_answer_that_does_not_say_any_more_of_which_file_it_is_is_not_taken(
    origin: Origin, web: FakeOrigin, folder: Path
) -> None:
    listing = await resolve(origin, f"{web.url}/{X}")
    web.fault(X, etag="", times=1)
    assert "does not say any more" in (await broken(origin, listing, (10, 20))).reason
    assert await read(origin, listing, (10, 20)) == (folder / "x.gguf").read_bytes()[10:20]
    web.fault(X, etag="", times=1)
    assert (await failing(resolve, origin, listing.source, listing.commit)).kind is Kind.CHANGED


async def test_a_listing_of_other_files_is_another_thing(origin: Origin, web: FakeOrigin) -> None:
    listing = await resolve(origin, f"{web.url}/{X}")
    other = dataclasses.replace(listing, files=listing.files * 2)
    assert (await failing(read, origin, other)).kind is Kind.CHANGED


# Where it leads


@pytest.mark.parametrize("target", ["http://169.254.169.254/x?secret=1", "http://user:pw@127.0.0.1/x", "ftp://h/x"])
async def test_a_redirect_that_is_refused_names_no_secret(origin: Origin, web: FakeOrigin, target: str) -> None:
    web.fault(X, redirect=target)
    error = await failing(resolve, origin, f"{web.url}/{X}?key=secret")
    assert error.kind is Kind.REFUSED
    assert not {"secret", "pw"} & set(error.message.replace("=", " ").replace(":", " ").split())


async def test_redirects_in_a_circle_come_to_an_end(origin: Origin, web: FakeOrigin) -> None:
    web.fault(X, redirect=f"/{X}")
    assert "circles" in (await failing(resolve, origin, f"{web.url}/{X}")).message
    assert len(web.requests) == 11


async def test_the_token_is_told_to_the_hub_alone(
    web: FakeOrigin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with FakeOrigin(web.folder) as other:
        async with open_origin(settings_of(web)) as origin:
            web.fault("org/repo/resolve/*/config.json", redirect=f"{other.url}/org/repo/config.json")
            listing = await resolve(origin, HUB_X)
            await read(origin, listing)
            await read(origin, await resolve(origin, "hf:org/repo/config.json"))
            await read(origin, await resolve(origin, f"{other.url}/{X}"))
            web.clear()
            web.fault("api/*", status=403)
            error = await failing(resolve, origin, HUB_X)
        told = {(seen.cdn, seen.headers.get("authorization")) for seen in web.requests}
        assert told == {(False, f"Bearer {TOKEN}"), (True, None)}
        assert [seen for seen in other.requests if "authorization" in seen.headers] == []
        assert len(other.requests) == 3
    assert TOKEN not in f"{error!r}{error.remedy}{settings_of(web)!r}"
    assert TOKEN not in caplog.text
    assert "very-secret" not in "".join(record.getMessage() for record in caplog.records if record.name == "httpx")


async def test_in_the_clear_no_token_is_told(web: FakeOrigin) -> None:
    settings = settings_of(
        web,
        endpoint="http://hub.example",
        proxies=read_origin_settings({"HTTP_PROXY": web.url}, token=None, allow_hosts=()).proxies,
    )
    async with open_origin(settings) as origin:
        await resolve(origin, HUB_X)
    assert "authorization" not in web.requests[-1].headers


async def test_a_proxy_is_asked_where_the_environment_names_one(web: FakeOrigin, folder: Path) -> None:
    environ = {"HTTP_PROXY": web.url, "HF_ENDPOINT": "http://hub.example/"}
    settings = read_origin_settings(environ, token=None, allow_hosts=("hub.example",))
    async with open_origin(settings) as origin:
        web.fault("org/repo/x.gguf", redirect="http://storage.example/cdn/org/repo/x.gguf", times=1)
        listing = await resolve(origin, HUB_X)
        assert await read(origin, listing) == (folder / "x.gguf").read_bytes()
        assert web.requests[-1].path == "http://storage.example/cdn/org/repo/x.gguf"
        web.fault("org/repo/config.json", redirect="http://127.0.0.1:1/x")
        error = await failing(read, origin, await resolve(origin, "hf:org/repo/config.json"))
        assert error.kind is Kind.REFUSED


# What is written


def test_the_settings_are_those_of_the_file_and_of_the_environment() -> None:
    settings = read_origin_settings({}, token=None, allow_hosts=())
    assert (settings.endpoint, settings.token) == ("https://huggingface.co", None)
    environ = {"HF_ENDPOINT": "https://mirror.example/hf/", "HF_TOKEN": f" {TOKEN}\n", "SSL_CERT_FILE": "/ca.pem"}
    settings = read_origin_settings(environ, token=None, allow_hosts=("a", "b"))
    assert (settings.endpoint, settings.token) == ("https://mirror.example/hf", TOKEN)
    assert (settings.allow_hosts, settings.ca_file) == (("a", "b"), "/ca.pem")
    assert read_origin_settings(environ, token="hf_file", allow_hosts=()).token == "hf_file"


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({"HF_ENDPOINT": "mirror.example"}, "HF_ENDPOINT"),
        ({"HF_ENDPOINT": "ftp://mirror.example"}, "HF_ENDPOINT"),
        ({"HF_ENDPOINT": "https://me:secret@mirror.example"}, "HF_ENDPOINT"),
        ({"HF_TOKEN": "secret\nwith a line"}, "HF_TOKEN"),
        ({"HF_TOKEN": "secret-ü"}, "HF_TOKEN"),
    ],
)
def test_what_cannot_be_used_is_named_and_not_shown(environ: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=key) as raised:
        read_origin_settings(environ, token=None, allow_hosts=())
    assert "secret" not in str(raised.value)
