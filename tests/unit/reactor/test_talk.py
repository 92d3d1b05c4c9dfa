"""The answering end of small requests: what it makes of what comes, and what it does not wait for."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

from llmgw.reactor.talk import MAX_HEAD_BYTES, SEND_BYTES, Asked, Over, Talk

GET = b"GET /x?y=1 HTTP/1.1\r\nhost: h\r\nx-one: 1\r\nx-two: a\r\nx-two: b\r\n\r\n"


def begin() -> tuple[trio.abc.Stream, Talk]:
    """The end of who asks, and ours."""
    ours, theirs = memory_stream_pair()
    return theirs, Talk(ours, head_seconds=10.0, idle_seconds=75.0, stall_seconds=60.0)


async def hear(talk: Talk) -> Asked:
    asked = await talk.hear()
    assert asked is not None
    return asked


async def test_one_request_after_the_other_is_heard_and_answered() -> None:
    peer, talk = begin()
    for number in range(3):
        await peer.send_all(GET)
        asked = await hear(talk)
        assert (asked.method, asked.target, asked.problem) == ("GET", "/x?y=1", None)
        # a header that is there twice says nothing
        assert [asked.find(name) for name in ("x-one", "x-two", "x-three")] == ["1", None, None]
        await talk.say(200, [("content-length", "2")], b"o%d" % number)
        said = await peer.receive_some()
        while not said.endswith(b"o%d" % number):
            said += await peer.receive_some()
        assert said.startswith(b"HTTP/1.1 200 ")
        assert talk.goes_on()
    await talk.close()
    assert await peer.receive_some() == b""


async def test_requests_may_come_in_one_go() -> None:
    peer, talk = begin()
    await peer.send_all(GET * 2)
    for _ in range(2):
        await hear(talk)
        await talk.say(204, [])
        assert talk.goes_on()


async def test_a_large_body_leaves_in_parts() -> None:
    peer, talk = begin()
    body = bytes(range(256)) * 2048
    assert len(body) > 2 * SEND_BYTES
    await peer.send_all(GET)
    await hear(talk)
    await talk.say(200, [("content-length", str(len(body)))], body)
    said = b""
    while not said.endswith(body):
        said += await peer.receive_some()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 2 * MAX_HEAD_BYTES, 431),
    ],
)
async def test_what_can_not_be_understood_is_told_and_is_the_last(said: bytes, status: int) -> None:
    peer, talk = begin()
    await peer.send_all(said)
    asked = await hear(talk)
    assert asked.problem is not None
    assert asked.problem[0] == status
    await talk.say(status, [("content-length", "0"), ("connection", "close")])
    assert not talk.goes_on()


async def test_who_asks_nothing_more_is_done(autojump_clock: MockClock) -> None:
    _, talk = begin()
    assert await talk.hear() is None
    assert trio.current_time() == 75.0


async def test_half_a_request_ends_it(autojump_clock: MockClock) -> None:
    peer, talk = begin()
    await peer.send_all(GET[:20])
    with pytest.raises(Over, match="half a request"):
        await talk.hear()
    assert trio.current_time() == 10.0


async def test_a_peer_that_goes_between_two_requests_is_done() -> None:
    peer, talk = begin()
    await peer.aclose()
    assert await talk.hear() is None


async def test_who_takes_nothing_ends_it(autojump_clock: MockClock) -> None:
    class Stuck(trio.abc.Stream):
        async def send_all(self, data: object) -> None:
            await trio.sleep_forever()

        async def wait_send_all_might_not_block(self) -> None: ...

        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            return GET

        async def aclose(self) -> None: ...

    talk = Talk(Stuck(), head_seconds=1.0, idle_seconds=1.0, stall_seconds=60.0)
    await hear(talk)
    with pytest.raises(Over, match="it took nothing for 60 s"):
        await talk.say(204, [])
    assert trio.current_time() == 60.0
