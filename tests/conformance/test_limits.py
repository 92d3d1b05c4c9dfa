"""Every limit in size and number, made small: what runs into it is refused in words, and all else goes on."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator

import pytest
from lab.running import Llmgw, wait_for
from lab.wire import CHAT, Wire, chat, chunked, get, post

pytestmark = pytest.mark.slow
MIB = 1024 * 1024
LIMITS = {"max_body": "2MiB", "bodies_total": "5MiB", "max_connections": 40, "max_pipelined": 8}


@pytest.fixture(scope="module")
def llmgw(launch: Callable[..., Llmgw]) -> Llmgw:
    return launch(limits=LIMITS)


@pytest.fixture(autouse=True)
def _goes_on(llmgw: Llmgw) -> Iterator[None]:
    yield
    llmgw.check_health()


@pytest.mark.parametrize("more", [0, 1])
def test_a_head_may_be_as_large_as_its_limit(llmgw: Llmgw, more: int) -> None:
    empty = get("/health", "X-Long: ")
    request = get("/health", "X-Long: " + "x" * (64 * 1024 - len(empty) - 200 + more * 400))
    reply = llmgw.ask(request)
    assert reply.status == (431 if more else 200)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("how", ["length", "chunks"])
def test_a_body_may_be_as_large_as_its_limit(llmgw: Llmgw, how: str, more: int) -> None:
    body = chat(user="t-size", padding="")
    body = chat(user="t-size", padding="x" * (2 * MIB - len(body) + more))
    assert len(body) == 2 * MIB + more
    if how == "length":
        request = post(CHAT, body)
    else:
        request = get(CHAT, "Transfer-Encoding: chunked", method="POST") + chunked(body, 50_000)
    with llmgw.connect() as wire:
        reply = wire.ask(request)
        assert reply.status == (413 if more else 200)
        if more:
            assert reply.code == "request_too_large"


def test_a_body_too_large_is_refused_before_it_comes(llmgw: Llmgw) -> None:
    assert llmgw.ask(get(CHAT, "Content-Length: 99999999999999", method="POST")).status == 413


def test_a_client_that_sends_on_reads_why_it_was_refused(llmgw: Llmgw) -> None:
    """It is in the middle of its upload: a reset would take the answer away from it."""
    head = get(CHAT, "Content-Length: 3000000", method="POST")
    with llmgw.connect() as wire:
        wire.send(head)
        time.sleep(0.2)
        for _ in range(20):
            wire.send(b"x" * 10_000)
        assert wire.read_reply().code == "request_too_large"


@contextlib.contextmanager
def held_bodies(llmgw: Llmgw) -> Iterator[list[Wire]]:
    """Two running requests, whose bodies leave no room for a third."""
    tags = [f"held-{os.urandom(4).hex()}" for _ in range(2)]
    with llmgw.connect() as one, llmgw.connect() as two:
        for wire, tag in zip((one, two), tags, strict=True):
            # a body counts until the engine has answered
            wire.send(post(CHAT, chat({"silence": "head"}, user=tag, padding="x" * (2 * MIB - 300))))
            wait_for(functools.partial(llmgw.engine.find, tag), f"request {tag} at the engine")
        yield [one, two]


def test_a_stream_that_runs_holds_no_body(llmgw: Llmgw) -> None:
    body = chat({"tokens": 10_000, "interval_ms": 50}, stream=True, padding="x" * (2 * MIB - 300))
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            wire = stack.enter_context(llmgw.connect())
            wire.send(post(CHAT, body))
            wire.read_until(b"\n\n")
        assert llmgw.ask(post(CHAT, chat(padding="x" * (2 * MIB - 200)))).status == 200


def test_bodies_share_one_memory(llmgw: Llmgw) -> None:
    body = chat(padding="x" * (2 * MIB - 200))
    with held_bodies(llmgw):
        reply = llmgw.ask(post(CHAT, body))
        assert (reply.status, reply.code, reply.get("retry-after")) == (503, "server_busy", "2")
        assert llmgw.chat().status == 200
    for _ in range(4):
        assert llmgw.ask(post(CHAT, body)).status == 200


@pytest.mark.parametrize("way", ["fin", "rst"])
def test_a_body_waits_until_there_is_room(llmgw: Llmgw, way: str) -> None:
    with held_bodies(llmgw) as held, llmgw.connect() as third, llmgw.connect() as fourth:
        request = post(CHAT, chat(padding="x" * (2 * MIB - 200)))
        sent = fourth.sock.send(request[:-10])
        third.send(request[:MIB])
        for wire in held:
            wire.leave(way)
        third.send(request[MIB:])
        assert third.read_reply().status == 200
        fourth.send(request[sent:])
        assert fourth.read_reply().status == 200


@pytest.mark.parametrize("size", [1, 100])
def test_only_so_many_requests_may_be_sent_ahead(llmgw: Llmgw, size: int) -> None:
    with llmgw.connect() as wire:
        wire.send(get() * 9 * size)
        statuses = []
        with contextlib.suppress(ConnectionResetError):
            while not statuses or statuses[-1] == 200:
                reply = wire.read_reply()
                statuses.append(reply.status)
        assert statuses[-1] == 400
        assert reply.code == "too_many_pipelined"
        assert len(statuses) <= 10
        assert wire.over


def test_only_so_many_connections_are_taken(llmgw: Llmgw) -> None:
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(llmgw.address)) for _ in range(40)]
        for wire in wires:
            assert wire.ask(get()).status == 200
        for _ in range(60):
            reply = llmgw.ask(get())
            assert (reply.status, reply.code, reply.get("retry-after")) == (503, "too_many_connections", "2")
            assert reply.get("x-request-id")
        # (which those that were there don't notice)
        assert wires[0].ask(post(CHAT, chat())).status == 200
    wait_for(lambda: llmgw.ask(get()).status == 200, "room for a connection")
