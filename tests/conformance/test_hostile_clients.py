"""Thousands of requests that are almost right: whatever they do, everybody else's go on and nothing is held."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections.abc import Callable

import pytest
from lab.running import Llmgw, wait_for
from lab.wire import CHAT, Malformed, Wire, chat, chunked, get, post

pytestmark = pytest.mark.slow
REQUESTS = 3000
THREADS = 6
READ_AHEAD_BYTES = 50_000
SEED = os.environ.get("LLMGW_FUZZ_SEED") or str(random.SystemRandom().randrange(10**9))
MIB = 1024 * 1024
UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")

VALID = [
    get(),
    get("/"),
    get("/nowhere?a=b"),
    get("/v1/models", "Accept: */*", "User-Agent: x"),
    get("/v1/models/other%2Fname"),
    get("/", method="HEAD"),
    get(CHAT, "Origin: http://localhost", "Access-Control-Request-Headers: x-a", method="OPTIONS"),
    get("/health", *UPGRADE) + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    get(version="1.0"),
    post(CHAT, chat()),
    post(CHAT, chat(stream=True)),
    post(CHAT, chat(stream=True, model="other/name", stream_options={"include_usage": True})),
    post(CHAT, chat(stream=True), "Connection: keep-alive", version="1.0"),
    post(CHAT, chat({"cut": "events", "after": 1}, stream=True)),
    post(CHAT, chat({"silence": "head"})),
    post(CHAT, chat({"flood": 1_000_000}, stream=True)),
    post(CHAT, chat(), "Expect: 100-continue"),
    post(CHAT, chat(), *UPGRADE),
    post("/v1/embeddings", json.dumps({"model": "m", "input": ["a", "b"]}).encode()),
    get(CHAT, "Transfer-Encoding: chunked", method="POST") + chunked(chat(stream=True), 11),
    get(CHAT, "Transfer-Encoding: chunked", *UPGRADE, method="POST") + chunked(chat(), 40),
    post("/nowhere", b"x" * 1000),
]

LINES = [
    b"Host: 127.0.0.1", b"Host:", b"Content-Length: 7", b"Content-Length: 0", b"Content-Length: 18446744073709551616",
    b"Content-Length: +5", b"Content-Length: 5, 5", b"Transfer-Encoding: chunked", b"Transfer-Encoding: \tchunked",
    b"Transfer-Encoding: identity, chunked", b"Transfer-Encoding : chunked", b"Connection: close",
    b"Connection: upgrade", b"Upgrade: websocket", b"Expect: 100-continue", b"Expect: x", b" folded: line",
    b"X: " + b"y" * 5000, b"X" * 9000, b"\xff\xfe: \x80", b"X: \x00", b"Origin: null", b"Cookie: a", b"TE: trailers",
    b"Trailer: Content-Length",
]  # fmt: skip

CHUNKS = [
    b"0\r\n\r\n", b"5\r\nabcd\r\n", b"-1\r\n", b"ffffffffffffffff\r\n", b"0;x=" + b"y" * 2000 + b"\r\n\r\n",
    b"5 \r\nabcde\r\n", b"\r\n", b"0\r\nX: y\r\nContent-Length: 5\r\n\r\n", b"0x5\r\nabcde\r\n", b"1\nx\n0\n\n",
]  # fmt: skip


def mutate(request: bytes, rng: random.Random) -> bytes:
    """A few things go wrong with it."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not request:
            break
        at = rng.randrange(len(request))
        match rng.randrange(12):
            case 0:
                request = request[:at] + bytes([rng.randrange(256)]) + request[at + 1 :]
            case 1:
                request = request[:at]
            case 2:
                request = request[:at] + request[at + rng.randrange(20) :]
            case 3:
                request = request[:at] + request[at : at + rng.randrange(200)] * 2 + request[at:]
            case 4 | 5:
                line, _, rest = request.partition(b"\r\n")
                request = line + b"\r\n" + rng.choice(LINES) + b"\r\n" + rest
            case 6:
                request = request.replace(
                    b"\r\n", rng.choice((b"\n", b"\r", b"\r\n\r\n", b"\r\r\n")), rng.randrange(1, 4)
                )
            case 7:
                request += rng.choice((request, get(), rng.randbytes(rng.randrange(300)), rng.choice(CHUNKS)))
            case 8:
                head, blank, body = request.partition(b"\r\n\r\n")
                request = head + b"\r\nTransfer-Encoding: chunked" + blank + rng.choice(CHUNKS) + body
            case 9:
                request = request * rng.randrange(2, 50)
            case 10:
                line, _, rest = request.partition(b"\r\n")
                request = line + b"\r\n" + b"X: y\r\n" * rng.randrange(4000) + rest
            case 11:
                request = request.replace(b"{", b"[" * rng.randrange(3000), 1)
    return request


def say(wire: Wire, request: bytes, rng: random.Random) -> None:
    """All of it at once, or in pieces."""
    cuts = sorted(rng.randrange(len(request) + 1) for _ in range(rng.choice((0, 0, 1, 5))))
    for start, end in zip([0, *cuts], [*cuts, len(request)], strict=True):
        wire.send(request[start:end])


def listen(wire: Wire, request: bytes, rng: random.Random) -> None:
    """Read for a moment; what comes is HTTP, and every error has a body that says so."""
    wire.sock.settimeout(rng.choice((0.02, 0.05)))
    read = 0
    with contextlib.suppress(TimeoutError):
        # whether an answer has a body can't be told here once HEAD was said
        while not (b"HEAD" in request or read > 100):
            reply = wire.read_reply()
            read += 1
            assert reply.status == 100 or reply.get("x-request-id"), reply
            assert reply.status < 500 or reply.status in (501, 502, 503, 505), reply
            if reply.status >= 400:
                assert reply.code


def attack(llmgw: Llmgw, number: int) -> None:
    rng = random.Random(f"{SEED}-{number}")
    request = mutate(rng.choice(VALID), rng)
    try:
        with Wire(llmgw.address) as wire:
            try:
                # (it may be refused, and the connection closed, before all of it is said; and whoever says more than is
                # read ahead of an answer that never comes gives up)
                wire.sock.settimeout(5)
                say(wire, request, rng)
                if rng.random() < 0.1:
                    # (of a connection that was reset already there is nothing left to shut, which is ENOTCONN)
                    with contextlib.suppress(OSError):
                        wire.sock.shutdown(1)
                listen(wire, request, rng)
            except (ConnectionError, TimeoutError):
                pass
            except Malformed as error:
                if "ended" not in str(error):  # an answer may be cut, but never be nonsense
                    raise AssertionError(error) from error
            # (a FIN behind more than is read ahead of an answer reaches nobody before that answer is over)
            wire.leave("rst" if len(request) > READ_AHEAD_BYTES else rng.choice(("fin", "rst")))
    except AssertionError as error:
        raise AssertionError(f"request {number} of seed {SEED}: {request[:2000]!r}: {error}") from error


@pytest.fixture(scope="module")
def llmgw(launch: Callable[..., Llmgw]) -> Llmgw:
    # one body of the greatest size takes all the memory that there is for bodies: a byte that is not given back shows
    return launch(limits={"max_body": "1MiB", "bodies_total": "1MiB"})


@pytest.mark.timeout(240)
def test_thousands_of_mutated_requests_leave_no_trace(llmgw: Llmgw) -> None:
    llmgw.check_health()
    wait_for(lambda: quiet(llmgw), "quiet")
    before = llmgw.descriptors()
    failures: list[BaseException] = []

    def run(first: int) -> None:
        try:
            for number in range(first, REQUESTS, THREADS):
                attack(llmgw, number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert llmgw.running.poll() is None, f"seed {SEED}: it ended\n{llmgw.log[-5000:]}"
    llmgw.check_health()
    wait_for(lambda: quiet(llmgw) and llmgw.descriptors() <= before, f"descriptors to come back (seed {SEED})")
    body = chat(padding="")
    body = chat(padding="x" * (MIB - len(body)))
    assert llmgw.cpu_share() < 0.3, f"seed {SEED}: something spins"
    for _ in range(2):
        assert llmgw.ask(post(CHAT, body)).status == 200, f"seed {SEED}: memory for bodies is still held"
    llmgw.check_health()


def quiet(llmgw: Llmgw) -> bool:
    """Nothing goes on in the engine, and its connections have been given up."""
    return not [seen for seen in llmgw.engine.requests() if seen["state"] == "open"] and not connections(llmgw)


def connections(llmgw: Llmgw) -> list[str]:
    """Established connections of the client port and of the engine's."""
    ports = {f"{llmgw.port:04X}", f"{llmgw.engine.port:04X}"}
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table][1:]
    inodes = {
        os.readlink(f"/proc/{llmgw.running.pid}/fd/{number}") for number in os.listdir(f"/proc/{llmgw.running.pid}/fd")
    }
    return [
        row[1]
        for row in rows
        if row[3] == "01" and f"socket:[{row[9]}]" in inodes and {row[1][-4:], row[2][-4:]} & ports
    ]
