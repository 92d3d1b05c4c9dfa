"""The first seconds of a connection: the claim against the certificate, last words, and streams in memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
import trio.testing
from trio_websocket import ConnectionRejected, WebSocketConnection, WebSocketRequest
from wsproto.events import Request

from llmgw.core.node import NodeId
from llmgw.errors import LinkLost
from llmgw.link.control import NODE_HEADER, PATH, Tap, ask_upgrade
from llmgw.link.handshake import Floor, Rejection, Unwelcome, check_claim, linger, read_name, upgrade

NODE = NodeId("gpu-01")


def claim(*values: bytes, path: str = PATH) -> WebSocketRequest:
    headers = [(NODE_HEADER.encode(), value) for value in values]
    connection: Any = None
    return WebSocketRequest(connection, Request(host="localhost", target=path, extra_headers=headers))


def test_a_node_claims_what_its_certificate_says() -> None:
    assert check_claim(claim(b"gpu-01"), NODE) is None
    assert check_claim(claim(b"gpu-01", path=f"{PATH}?a=b"), NODE) is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((), "none"),
        ((b"gpu-02",), "gpu-02"),
        ((b"GPU-01",), "GPU-01"),
        ((b"gpu-01 ",), "gpu-01 "),
        ((b"",), "none"),
        ((b"gpu-01", b"gpu-01"), "gpu-01 and gpu-01"),
        ((b"\xff\x1b[31m",), "\ufffd\\x1b[31m"),
        ((b"x" * 5000,), "x" * 100),
    ],
)
def test_another_claim_is_refused_in_words_that_a_log_can_take(values: tuple[bytes, ...], said: str) -> None:
    assert check_claim(claim(*values), NODE) == Rejection(
        status=403,
        code="wrong_node",
        message=f"the certificate is of node gpu-01, and the agent claims to be {said} (x-llmgw-node)",
    )


def test_another_path_is_not_found() -> None:
    rejection = check_claim(claim(b"gpu-01", path="/metrics"), NODE)
    assert rejection is not None
    assert rejection.status == 404


def test_a_certificate_names_one_node() -> None:
    assert read_name({"subject": ((("organizationName", "us"),), (("commonName", "gpu-01"),))}) == NODE
    for subject in ((), ((("commonName", ""),),), ((("commonName", "a"),), (("commonName", "b"),))):
        with pytest.raises(Unwelcome, match="it needs one, the node's id"):
            read_name({"subject": subject})


async def test_an_upgrade_is_accepted_or_rejected_with_its_reason(nursery: trio.Nursery) -> None:
    for rejection in (None, Rejection(status=403, code="no", message="not you")):
        here, there = trio.testing.memory_stream_pair()
        tap, floor = _stand(there)
        if rejection is None:
            async with trio.open_nursery() as both:
                both.start_soon(_ask, nursery, here, [])
                ws = await upgrade(nursery, tap, floor, lambda request: None)
            assert isinstance(ws, WebSocketConnection)
            continue
        rejected: list[ConnectionRejected] = []
        async with trio.open_nursery() as both:
            both.start_soon(_ask, None, here, rejected)
            with pytest.raises(Unwelcome, match="not you"):
                await upgrade(nursery, tap, floor, lambda request, no=rejection: no)
        assert rejected[0].status_code == 403
        assert json.loads(rejected[0].body or b"") == {"error": {"code": "no", "message": "not you"}}


def _stand(stream: trio.abc.Stream) -> tuple[Tap, Floor]:
    floor = Floor(stream)
    return Tap(floor), floor


async def _ask(nursery: trio.Nursery | None, stream: trio.abc.Stream, rejected: list[ConnectionRejected]) -> None:
    if nursery is not None:
        await ask_upgrade(nursery, Tap(stream), host="localhost", node=NODE)
        return
    try:
        async with trio.open_nursery() as reading:
            await ask_upgrade(reading, Tap(stream), host="localhost", node=NODE)
    except* ConnectionRejected as group:
        rejected.extend(error for error in group.exceptions if isinstance(error, ConnectionRejected))


async def test_a_peer_that_goes_before_its_request_is_lost(nursery: trio.Nursery) -> None:
    here, there = trio.testing.memory_stream_pair()
    tap, floor = _stand(there)
    await here.send_all(b"GET /llm")
    await here.aclose()
    with pytest.raises(LinkLost, match="closed the connection"):
        await upgrade(nursery, tap, floor, lambda request: None)


async def test_a_request_that_cant_be_read_is_answered_and_refused(nursery: trio.Nursery) -> None:
    here, there = trio.testing.memory_stream_pair()
    tap, floor = _stand(there)
    await here.send_all(b"\x00\x01\x02\r\n\r\n")
    with pytest.raises(Unwelcome, match="malformed"):
        await upgrade(nursery, tap, floor, lambda request: None)
    assert (await here.receive_some(100)).startswith(b"HTTP/1.1 400 ")


async def test_a_floor_carries_until_it_is_closed_and_then_nothing() -> None:
    here, there = trio.testing.memory_stream_pair()
    floor = Floor(there)
    await here.send_all(b"one")
    assert await floor.receive_some(10) == b"one"
    await floor.wait_send_all_might_not_block()
    await floor.send_all(b"two")
    assert await here.receive_some(10) == b"two"
    await floor.aclose()
    assert floor.closed.is_set()
    with pytest.raises(trio.ClosedResourceError):
        await floor.send_all(b"three")
    with pytest.raises(trio.ClosedResourceError):
        await floor.receive_some(10)


async def test_a_floor_that_stops_reading_hands_nothing_up(autojump_clock: object) -> None:
    here, there = trio.testing.memory_stream_pair()
    floor = Floor(there)
    floor.stop_reading()
    await here.send_all(b"late")
    with trio.move_on_after(60) as waited:
        await floor.receive_some(10)
    assert waited.cancelled_caught


async def _connected() -> tuple[trio.SocketStream, trio.SocketStream]:
    one, two = trio.socket.socketpair()
    return trio.SocketStream(one), trio.SocketStream(two)


async def test_lingering_ends_with_the_peer_or_with_its_time(autojump_clock: object) -> None:
    for goes in (True, False):
        here, there = await _connected()
        await there.send_all(b"still talking")
        if goes:
            await there.aclose()
        with trio.fail_after(60):
            await linger(here)
        here.socket.close()
        there.socket.close()


async def test_lingering_on_a_closed_connection_is_nothing() -> None:
    here, there = await _connected()
    here.socket.close()
    there.socket.close()
    await linger(here)
