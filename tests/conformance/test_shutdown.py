"""Ctrl-C while clients are in the middle of things: running requests get their time, and then it ends."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.running import Llmgw, wait_for, write_model
from lab.wire import CHAT, Wire, chat, get, post

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Llmgw]]:
    started: list[Llmgw] = []

    def start(**node: Any) -> Llmgw:
        started.append(Llmgw(tmp_path, "serve", str(write_model(tmp_path)), **node))
        return started[0].start().wait_ready()

    yield start
    for llmgw in started:
        llmgw.clean()


def refuses(llmgw: Llmgw) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(llmgw.address) != 0


def test_a_running_request_is_finished_first(start: Callable[..., Llmgw]) -> None:
    llmgw = start()
    with llmgw.connect() as wire, llmgw.connect() as idle, llmgw.connect() as half:
        assert idle.ask(get()).status == 200
        half.send(b"GET / HT")
        wire.send(post(CHAT, chat({"tokens": 20, "interval_ms": 100}, stream=True)))
        wire.read_until(b"\n\n")
        llmgw.interrupt()
        wait_for(lambda: refuses(llmgw), "the port to close")
        assert idle.over
        assert wire.read_to_end().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert llmgw.wait_ended() == 0
    assert llmgw.engines() == []


def test_a_client_that_never_reads_is_not_waited_for(start: Callable[..., Llmgw]) -> None:
    llmgw = start(timeouts={"drain": "1s"})
    with contextlib.ExitStack() as stack:
        for way in ({"flood": -1}, {"silence": "head"}, {"silence": "events"}):
            wire = stack.enter_context(Wire(llmgw.address, receive_bytes=4096))
            wire.send(post(CHAT, chat(way, stream=True, user=f"t-{way}")))
            wait_for(lambda way=way: llmgw.engine.find(f"t-{way}"), "the request")
        wire = stack.enter_context(Wire(llmgw.address, receive_bytes=4096))
        wire.send(get("/v1/models") * 8)
        wire = stack.enter_context(Wire(llmgw.address))
        wire.send(post(CHAT, chat())[:-3])
        assert llmgw.stop() == 0
    assert llmgw.engines() == []
    assert "Traceback" not in llmgw.log


def test_what_is_cut_by_the_end_is_told_so(start: Callable[..., Llmgw]) -> None:
    llmgw = start(timeouts={"drain": "500ms"})
    with llmgw.connect() as stream, llmgw.connect() as whole, llmgw.connect() as old:
        asked = chat({"tokens": 1000, "interval_ms": 100}, stream=True)
        stream.send(post(CHAT, asked))
        whole.send(post(CHAT, chat({"tokens": 1000, "interval_ms": 100})))
        old.send(post(CHAT, asked).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        for wire in (stream, old):
            wire.read_until(b"\n\n")
        assert llmgw.stop() == 0
        for wire in (stream, old):
            said = wire.read_to_end()
            assert b"[DONE]" not in said
            assert b'"code":"stopping"' in said
        reply = whole.read_reply()
        assert (reply.status, reply.code, reply.get("connection")) == (503, "stopping", "close")


def test_a_second_ctrl_c_waits_for_no_request(start: Callable[..., Llmgw]) -> None:
    llmgw = start(timeouts={"drain": "10m"})
    with llmgw.connect() as wire:
        wire.send(post(CHAT, chat({"silence": "head"}, user="t-1")))
        wait_for(lambda: llmgw.engine.find("t-1"), "the request")
        llmgw.interrupt()
        wait_for(lambda: refuses(llmgw), "the port to close")
        time.sleep(0.3)
        assert llmgw.running.poll() is None
        llmgw.interrupt()
        assert llmgw.wait_ended() == 0
    assert llmgw.engines() == []


def test_a_slow_reader_of_a_finished_answer_gets_the_rest_of_it(start: Callable[..., Llmgw]) -> None:
    """The engine has long said all, and the exchange is over: what waits here is still owed."""
    llmgw = start()
    size = 6_000_000
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(llmgw.address, receive_bytes=4096)) for _ in range(4)]
        for at, wire in enumerate(wires):
            # of each size some byte stays behind, however much the kernel takes
            wire.send(post(CHAT, chat({"line_kb": (size - 1_300_000 * at) // 1000}, user=f"t-{at}")))
        wait_for(lambda: llmgw.log.count(" done ") >= 1, "an answer that is over")
        time.sleep(0.3)
        llmgw.interrupt()
        wait_for(lambda: refuses(llmgw), "the port to close")
        time.sleep(0.3)
        for wire in wires:
            assert wire.read_reply().json["model"] == "m"
    assert llmgw.wait_ended() == 0
