"""A client that leaves, in each phase of its request, by a farewell or without: its engine stops at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab.running import Llmgw, wait_for
from lab.wire import CHAT, Wire, chat, get, post

pytestmark = pytest.mark.slow
WAYS = pytest.mark.parametrize("way", ["fin", "rst"])


@pytest.fixture(scope="module")
def llmgw(launch: Callable[..., Llmgw]) -> Llmgw:
    return launch()


@pytest.fixture(autouse=True)
def _goes_on(llmgw: Llmgw) -> Iterator[None]:
    yield
    llmgw.check_health()
    assert not [seen for seen in llmgw.engine.requests() if seen["state"] == "open"]


def begin(llmgw: Llmgw, tag: str, fake: dict[str, Any], **fields: Any) -> Wire:
    """A request that the engine has begun to work on."""
    wire = Wire(llmgw.address)
    wire.send(post(CHAT, chat(fake, user=tag, **fields)))
    wait_for(lambda: llmgw.engine.find(tag), f"request {tag}")
    return wire


def check_left(llmgw: Llmgw, tag: str) -> None:
    """The engine saw it go before it was done, and the log says so."""
    assert llmgw.engine.wait_ended(tag)["state"] == "left"
    wait_for(lambda: "client_left" in llmgw.log, "a line of the log")


@WAYS
@pytest.mark.parametrize("sent", [b"", b"GET", get()[:-2], post(CHAT, chat())[:-5]])
def test_before_the_request_is_complete(llmgw: Llmgw, way: str, sent: bytes) -> None:
    for _ in range(20):
        with llmgw.connect() as wire:
            wire.send(sent)
            wire.leave(way)


@WAYS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fake", [{"silence": "head"}, {"head_ms": 60_000}], ids=str)
def test_while_the_engine_reads_the_prompt(llmgw: Llmgw, way: str, stream: bool, fake: dict[str, Any]) -> None:
    tag = f"t-prefill-{way}-{stream}-{fake}"
    begin(llmgw, tag, fake, stream=stream).leave(way)
    check_left(llmgw, tag)


@WAYS
@pytest.mark.parametrize("stream", [False, True])
def test_after_another_request_on_both_connections(llmgw: Llmgw, way: str, stream: bool) -> None:
    """The engine's connection was used before: it is closed all the same."""
    tag = f"t-reused-{way}-{stream}"
    with llmgw.connect() as wire:
        assert wire.ask(post(CHAT, chat())).status == 200
        wire.send(post(CHAT, chat({"silence": "head"}, user=tag, stream=stream)))
        wait_for(lambda: llmgw.engine.find(tag), tag)
        wire.leave(way)
        check_left(llmgw, tag)


@WAYS
def test_while_a_whole_reply_is_made(llmgw: Llmgw, way: str) -> None:
    begin(llmgw, f"t-whole-{way}", {"tokens": 100, "interval_ms": 1000}).leave(way)
    check_left(llmgw, f"t-whole-{way}")


@WAYS
@pytest.mark.parametrize(
    "fake",
    [{"interval_ms": 100, "tokens": 1000}, {"silence": "events", "after": 3}, {"flood": -1}],
    ids=["slow", "silent", "flood"],
)
def test_in_the_middle_of_a_stream(llmgw: Llmgw, way: str, fake: dict[str, Any]) -> None:
    tag = f"t-middle-{way}-{fake}"
    with begin(llmgw, tag, fake, stream=True) as wire:
        wire.read_until(b"\n\n")
        wire.leave(way)
    check_left(llmgw, tag)


@WAYS
def test_while_it_reads_nothing(llmgw: Llmgw, way: str) -> None:
    tag = f"t-full-{way}"
    with begin(llmgw, tag, {"flood": -1}, stream=True) as wire:
        wait_for(lambda: is_still(llmgw, tag), "the engine to be held")
        wire.leave(way)
    check_left(llmgw, tag)


@WAYS
def test_with_a_request_sent_ahead(llmgw: Llmgw, way: str) -> None:
    tag = f"t-ahead-{way}"
    with begin(llmgw, tag, {"silence": "head"}, stream=True) as wire:
        wire.send(post(CHAT, chat(user=tag + "-second")) * 3)
        wire.leave(way)
    check_left(llmgw, tag)
    assert llmgw.engine.find(tag + "-second") is None


def test_by_closing_only_its_sending_side(llmgw: Llmgw) -> None:
    """Which is how a client that is gone looks, too, so it counts as that."""
    tag = "t-half"
    with begin(llmgw, tag, {"silence": "events", "after": 2}, stream=True) as wire:
        wire.sock.shutdown(1)
        check_left(llmgw, tag)


def is_still(llmgw: Llmgw, tag: str, last: dict[str, int] = {}) -> bool:  # noqa: B006 - what was seen the last time
    """The engine has written a good deal, and nothing more since this was asked before."""
    seen = llmgw.engine.find(tag)
    assert seen is not None
    before, last[tag] = last.get(tag, -1), seen["bytes_written"]
    return bool(before == last[tag] > 100_000)


def test_a_slow_reader_holds_its_engine_and_nobody_else(llmgw: Llmgw) -> None:
    tag = "t-slow"
    with begin(llmgw, tag, {"flood": 64_000_000}, stream=True) as slow:
        wait_for(lambda: is_still(llmgw, tag), "the engine to be held")
        seen = llmgw.engine.find(tag)
        assert seen is not None
        assert seen["bytes_written"] < 32_000_000
        # everybody else goes on
        for _ in range(5):
            llmgw.check_health()
        slow.read_until(b"\n\n")
        for _ in range(100):
            slow.more()
            slow.buffer = b""
        wait_for(lambda: not is_still(llmgw, tag), "the engine to go on")


def test_a_slow_reader_gets_every_byte(llmgw: Llmgw) -> None:
    with begin(llmgw, "t-all", {"flood": 12_000_000}, stream=True) as slow:
        wait_for(lambda: is_still(llmgw, "t-all"), "the engine to be held")
        reply = slow.read_reply()
    seen = llmgw.engine.wait_ended("t-all")
    assert seen["state"] == "finished"
    assert len(reply.body) >= 12_000_000 * 0.99
    assert reply.events[-1] == b"[DONE]"
    assert len(set(reply.events)) == 2


def test_hundreds_of_idle_connections_are_held_and_given_back(llmgw: Llmgw) -> None:
    before = llmgw.descriptors()
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(llmgw.address)) for _ in range(300)]
        for wire in wires[::3]:
            assert wire.ask(get()).status == 200
        for wire in wires[1::3]:
            wire.send(b"GET /hea")
        streams = wires[2::3]
        for wire in streams:
            wire.send(post(CHAT, chat({"tokens": 3, "interval_ms": 300}, stream=True)))
        assert llmgw.cpu_share(0.5) < 0.5
        llmgw.check_health()
        for wire in streams:
            assert wire.read_reply().events[-1] == b"[DONE]"
        assert llmgw.descriptors() >= before + 300
    wait_for(lambda: llmgw.descriptors() <= before + 1, "descriptors to come back")


@WAYS
def test_a_connection_that_ends_while_it_is_not_read_spins_nothing(llmgw: Llmgw, way: str) -> None:
    with begin(llmgw, f"t-spin-{way}", {"silence": "head"}) as first, llmgw.connect() as second:
        first.send(get() * 3)
        second.send(get()[:-2])
        second.sock.shutdown(1)
        first.leave(way)
        assert llmgw.cpu_share(0.5) < 0.3
