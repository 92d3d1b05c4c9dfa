#!/usr/bin/env python3
"""A program that speaks HTTP like an engine and misbehaves on request. Standard library only.

Flags say how the process behaves (see ``--help``); a top-level field ``"fake": {...}`` of a request's body says how its
answer does. The fields of ``fake``, all optional:

    tokens, interval_ms, text, head_ms   how many pieces, how far apart, of which text, after which wait
    status, error                        an error: shapes llamacpp | vllm | sglang | fastapi | openai |
                                         html | empty
    error_event                          after so many events, an error event of shape ``error`` inside the 200
    cut, after, reset                    ends early: "first_byte" | "head" | "events" | "frame" | "event"; with RST
    silence, after                       goes quiet and keeps the connection: "head" | "events"
    bytewise, split_unicode, crlf        one byte a write; characters cut in two between writes; CRLF line ends
    line_kb                              one event whose line has so many kB
    tools                                two tool calls whose arguments arrive interleaved
    usage                                "none" | "strings" | "nulls" | "every_chunk"
    no_done, no_finish                   the stream ends without [DONE]; without a finish_reason
    pings                                a comment line before each event
    hold                                 the last event of a stream comes once this file is there
    flood                                so many bytes without a pause (-1: for ever)
    framing                              "chunked" | "length" | "close" | "http10"
    close                                the connection closes right after a reply that promised keep-alive
    continues                            so many "100 Continue" before the head
    headers, odd_headers                 more headers, [[name, value], ...]; doubled, empty, odd ones

FAKE_PROBE in the environment spoils ``--version`` and ``--help``, by words between spaces:

    library          a shared library is missing; this way nothing else works either
    hang             neither ends
    garbled          the version is told in words that nobody reads
    silent           the help is empty
    without=FLAG     the help has no such flag, and a launch that gives it fails
    deprecated=FLAG  the help says that the flag is deprecated

The process may be in a mode, which ``--behave``, the text of ``--behave-file`` or POST /fake/mode {"mode": "hung"} sets
and "" ends. An absent file says "" too; what counts is the last word of any of them:

    hung     /health and /metrics answer, and no request does: its steps and its cache stand still
    busy     no request is answered, and its steps grow
    frozen   the whole process is stopped (SIGSTOP), until somebody sends SIGCONT

``--hold-mb N`` takes so much memory when it starts to load.

GET /fake/requests tells every request seen, the SHA-256 of its body, and how it ended; POST /fake/health
{"status": N, "body": "...", "silent": true} changes the health from now on; POST /fake/exit {"code": N} ends the
process.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field

VERSION = "1.0"
WORDS = ["Ein", "Gruß", "aus", "Köln", "🚂", "und", "ein", "naïve", "café", "über", "dem", "Fluss", ""]
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests", 500: "Internal Server Error"}


@dataclass
class Seen:
    """One request, as ``GET /fake/requests`` tells it. Times are seconds since the request was complete."""

    id: int
    method: str
    path: str
    version: str
    headers: list
    body: object
    sha256: str
    connection: int
    state: str = "open"
    left_after: float | None = None
    bytes_written: int = 0
    began: float = field(default_factory=time.monotonic)


class PeerLeft(Exception):  # noqa: N818 - an event, not an error
    """The peer closed its side, or reset, while its request was being served."""


class Cut(Exception):  # noqa: N818 - asked for
    """The connection is to end here, as the request asked."""


class Connection:
    """One client connection: bytes in through a pump that sees the peer leave, bytes out and counted."""

    def __init__(self, reader, writer, number):
        self.reader, self.writer, self.number = reader, writer, number
        self.buffer = bytearray()
        self.arrived = asyncio.Event()
        self.gone = False
        self.seen = None
        writer.transport.set_write_buffer_limits(high=0)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def pump(self, serving):
        """Read until the peer leaves, then end what is being served."""
        try:
            while chunk := await self.reader.read(65536):
                self.buffer += chunk
                self.arrived.set()
        except OSError:
            pass
        self.gone = True
        self.arrived.set()
        if self.seen is not None and self.seen.state == "open":
            serving.cancel()

    async def more(self):
        self.arrived.clear()
        if self.gone:
            raise PeerLeft
        await self.arrived.wait()

    async def take(self, count):
        while len(self.buffer) < count:
            await self.more()
        taken = bytes(self.buffer[:count])
        del self.buffer[:count]
        return taken

    async def take_until(self, mark):
        while (at := self.buffer.find(mark)) < 0:
            await self.more()
        return await self.take(at + len(mark))

    async def send(self, octets):
        self.writer.write(octets)
        await self.writer.drain()
        if self.seen is not None:
            self.seen.bytes_written += len(octets)

    def reset(self):
        """Close with RST in place of FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def read_request(conn, number):
    """The next request of a connection, its body decoded when it is JSON."""
    head = (await conn.take_until(b"\r\n\r\n")).decode("latin-1")
    request_line, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, version = request_line.split(" ")
    headers = [[name, value.strip()] for name, _, value in (line.partition(":") for line in lines)]
    named = {name.lower(): value for name, value in headers}
    if named.get("expect", "").lower() == "100-continue":
        await conn.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" in named.get("transfer-encoding", "").lower():
        body = b""
        while size := int((await conn.take_until(b"\r\n")).split(b";")[0], 16):
            body += (await conn.take(size + 2))[:-2]
        while await conn.take_until(b"\r\n") != b"\r\n":
            pass
    else:
        body = await conn.take(int(named.get("content-length", "0")))
    try:
        content = json.loads(body) if body else None
    except ValueError:
        content = body.decode("latin-1")
    keep = named.get("connection", "").lower() != "close" and version == "HTTP/1.1"
    return Seen(number, method, path, version, headers, content, hashlib.sha256(body).hexdigest(), conn.number), keep


def error_body(shape, status, message="the fake engine was asked to fail"):
    """An error as each family of engines writes it."""
    match shape:
        case "llamacpp":
            return json.dumps({"error": {"code": status, "message": message, "type": "server_error"}})
        case "vllm":
            return json.dumps({"error": message})
        case "sglang":
            return json.dumps({"object": "error", "message": message, "type": "BadRequestError", "code": status})
        case "fastapi":
            return json.dumps({"detail": message})
        case "html":
            return f"<html><body><h1>{status}</h1><p>{message}</p></body></html>"
        case "empty":
            return ""
    return json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": None}})


class Reply:
    """One answer being written: head, then pieces in the framing that was asked for."""

    def __init__(self, conn, fake, keep, wait_free):
        self.conn, self.fake, self.keep, self.wait_free = conn, fake, keep, wait_free
        self.framing = fake.get("framing", "chunked")
        if self.framing in ("close", "http10"):
            self.keep = False

    async def head(self, status, content_type, length=None):
        if wait := self.fake.get("head_ms"):
            await asyncio.sleep(wait / 1000)
        if self.fake.get("silence") == "head":
            await asyncio.Event().wait()
        if self.fake.get("cut") == "first_byte":
            raise Cut
        for _ in range(self.fake.get("continues", 0)):
            await self.conn.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        version = "HTTP/1.0" if self.framing == "http10" else "HTTP/1.1"
        lines = [f"{version} {status} {REASONS.get(status, 'Odd')}", f"content-type: {content_type}", "server: fake"]
        lines += [f"{name}: {value}" for name, value in self.fake.get("headers", [])]
        if self.fake.get("odd_headers"):
            lines += [
                "x-double: 1",
                "X-Double: 2",
                "x-empty:",
                "set-cookie: a=1",
                "x-umlaut: gr\xfcn",
                "keep-alive: timeout=5",
            ]
        if self.framing == "chunked" and length is None:
            lines.append("transfer-encoding: chunked")
        elif self.framing not in ("close", "http10"):
            self.framing = "length"
            lines.append(f"content-length: {length}")
        if not self.keep and self.framing != "http10":
            lines.append("connection: close")
        await self.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        if self.fake.get("cut") == "head":
            raise Cut

    async def write(self, octets):
        if self.wait_free is not None:
            await self.wait_free()
        if self.fake.get("bytewise"):
            for octet in octets:
                await self.conn.send(bytes([octet]))
                await asyncio.sleep(0)
        else:
            await self.conn.send(octets)

    async def piece(self, octets):
        """A part of the body. Where asked, in two writes that cut its first wide character in the middle."""
        wide = next((at for at, octet in enumerate(octets) if octet >= 0xC0), None)
        if self.fake.get("split_unicode") and wide is not None:
            for part in (octets[: wide + 1], octets[wide + 1 :]):
                await self.frame(part)
                await asyncio.sleep(0.01)
        else:
            await self.frame(octets)

    async def frame(self, octets):
        if self.framing == "chunked":
            octets = b"%x\r\n%b\r\n" % (len(octets), octets)
        await self.write(octets)

    async def end(self):
        if self.framing == "chunked":
            await self.write(b"0\r\n\r\n")

    async def whole(self, status, text, content_type="application/json"):
        octets = text.encode()
        framing = self.framing if self.fake.get("framing") else "length"
        await self.head(status, content_type, None if framing == "chunked" else len(octets))
        if self.fake.get("cut") == "frame":
            await self.write(b"%x\r\n%b" % (len(octets), octets[:5]) if framing == "chunked" else octets[:5])
            raise Cut
        await self.piece(octets)
        await self.end()


class Engine:
    """What the program serves, and everything it has seen."""

    def __init__(self, options):
        self.options = options
        self.seen = []
        self.connections = 0
        self.ready_at = time.monotonic() + options.load_seconds
        self.health = None
        self.prompt_tokens = 0
        self.ended = asyncio.Event()
        self.code = options.exit_code
        self.mode = ""
        self.left_mode = asyncio.Event()
        self.busy_since = 0.0
        self.busy_steps = 0
        self.cache_percent = 0
        self.memory = b"x" * (1_000_000 * options.hold_mb)
        self.enter(options.behave)

    def enter(self, mode):
        """From now on; one that is frozen goes on in its ordinary mode."""
        if mode == self.mode:
            return
        self.busy_steps, self.busy_since = self.count_busy_steps(), time.monotonic()
        self.mode = "" if mode == "frozen" else mode
        if not self.mode:
            self.left_mode.set()
            self.left_mode = asyncio.Event()
        if mode == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)

    def count_busy_steps(self):
        return self.busy_steps + (int(100 * (time.monotonic() - self.busy_since)) if self.mode == "busy" else 0)

    async def watch_mode(self, path):
        """What the file says, and nothing as long as it says the same as before."""
        said = ""
        while True:
            mode = read_mode(path)
            if mode != said:
                said = mode
                self.enter(mode)
            await asyncio.sleep(0.02)

    async def wait_free(self):
        """Until requests are answered."""
        while self.mode:
            await self.left_mode.wait()

    def is_ready(self):
        options = self.options
        if options.never_ready or (options.ready_when and not os.path.exists(options.ready_when)):
            return False
        return time.monotonic() >= self.ready_at

    def leave(self):
        self.ended.set()
        # Whoever reads our log may be gone already.
        with suppress(OSError):
            print("cleaning up before exit", flush=True)

    async def serve(self, reader, writer):
        self.connections += 1
        conn = Connection(reader, writer, self.connections)
        serving = asyncio.current_task()
        pump = asyncio.create_task(conn.pump(serving))
        try:
            while await self.serve_one(conn):
                pass
        except Cut:
            conn.seen.state = "cut"
            if (conn.seen.body or {}).get("fake", {}).get("reset"):
                conn.reset()
        except (PeerLeft, OSError, asyncio.CancelledError):
            pass
        finally:
            if conn.seen is not None and conn.seen.state == "open":
                conn.seen.state = "left"
                conn.seen.left_after = time.monotonic() - conn.seen.began
            pump.cancel()
            writer.close()

    async def serve_one(self, conn):
        seen, keep = await read_request(conn, len(self.seen))
        conn.seen = seen
        self.seen.append(seen)
        body = seen.body if isinstance(seen.body, dict) else {}
        fake = body.get("fake") or {}
        path = seen.path.partition("?")[0]
        is_plain = path.startswith("/fake/") or path in ("/health", "/metrics", "/v1/models")
        reply = Reply(conn, fake, keep, None if is_plain else self.wait_free)
        if is_plain:
            await self.serve_plain(path, body, reply)
        elif not self.is_ready():
            await reply.whole(503, error_body("llamacpp", 503, "Loading model"))
        elif status := fake.get("status"):
            shape = fake.get("error", "openai")
            await reply.whole(status, error_body(shape, status), "text/html" if shape == "html" else "application/json")
        elif path == "/v1/embeddings":
            await reply.whole(200, json.dumps(embeddings(body)))
        elif path == "/v1/rerank":
            await reply.whole(200, json.dumps(rerank(body)))
        elif path in ("/v1/chat/completions", "/v1/completions"):
            self.prompt_tokens += 7
            write = stream if body.get("stream") else whole
            await write(reply, body, fake, chat=path == "/v1/chat/completions", name=self.options.alias)
        else:
            await reply.whole(404, error_body("llamacpp", 404, "File Not Found"))
        seen.state = "finished"
        return reply.keep and not fake.get("close")

    async def serve_plain(self, path, body, reply):
        match path:
            case "/health":
                await self.serve_health(reply)
            case "/metrics":
                await reply.whole(200, self.metrics(), "text/plain")
            case "/v1/models":
                model = {"id": self.options.alias}
                if self.options.says_context:
                    model["max_model_len"] = self.options.says_context
                await reply.whole(200, json.dumps({"object": "list", "data": [model]}))
            case "/fake/requests":
                await reply.whole(200, json.dumps([asdict(seen) for seen in self.asked()]))
            case "/fake/health":
                self.health = body
                await reply.whole(200, "{}")
            case "/fake/mode":
                await reply.whole(200, "{}")
                self.enter(body.get("mode", ""))
            case "/fake/exit":
                self.code = body.get("code", 0)
                await reply.whole(200, "{}")
                self.ended.set()
            case _:
                await reply.whole(404, "{}")

    def asked(self):
        """What was asked of the model."""
        return [seen for seen in self.seen if seen.path.startswith("/v1/") and seen.path != "/v1/models"]

    def metrics(self):
        """Of each prompt after the first the cache had all but one token; a step is a byte of an answer."""
        steps = sum(seen.bytes_written for seen in self.asked()) + self.count_busy_steps()
        running = sum(seen.state == "open" and seen.path.startswith("/v1/") for seen in self.seen)
        cached = max(self.prompt_tokens - 7, 0) // 7 * 6
        counts = {"running": running, "waiting": 0}
        if self.mode != "hung":
            self.cache_percent = min(10 * running, 100)
        counts["cache_percent"] = self.cache_percent
        counts |= {"prompt_tokens": self.prompt_tokens, "cached_tokens": cached, "steps": steps}
        return "# HELP fake_running x\n" + "".join(f"fake_{name} {count}\n" for name, count in counts.items())

    async def serve_health(self, reply):
        if self.health is not None:
            if self.health.get("silent"):
                await asyncio.Event().wait()
            await reply.whole(self.health.get("status", 200), self.health.get("body", ""), "text/plain")
        elif self.options.broken:
            await reply.whole(500, f"broken: {self.options.broken}", "text/plain")
        elif not self.is_ready():
            await reply.whole(503, error_body("llamacpp", 503, "Loading model"))
        else:
            await reply.whole(200, '{"status":"ok"}')


def read_mode(path):
    with suppress(OSError), open(path, encoding="utf-8") as file:
        return file.read().strip()
    return ""


def embeddings(body):
    texts = body.get("input", "")
    count = len(texts) if isinstance(texts, list) else 1
    vector = [0.25, -0.5, 1.0]
    if body.get("encoding_format") == "base64":
        vector = base64.b64encode(struct.pack("<3f", *vector)).decode()
    data = [{"object": "embedding", "index": at, "embedding": vector} for at in range(count)]
    usage = {"prompt_tokens": 3 * count, "total_tokens": 3 * count}
    return {"object": "list", "model": body.get("model"), "data": data, "usage": usage}


def rerank(body):
    """The longer a document, the better. The tokens are told in total alone, as some engines do."""
    documents = body.get("documents") or []
    best = sorted(range(len(documents)), key=lambda at: -len(documents[at]))[: body.get("top_n")]
    results = [{"index": at, "relevance_score": len(documents[at]) / 100} for at in best]
    return {"model": body.get("model"), "results": results, "usage": {"total_tokens": 4 * len(documents)}}


def usage_of(fake, tokens):
    match fake.get("usage"):
        case "none":
            return None
        case "strings":
            return {"prompt_tokens": "7", "completion_tokens": str(tokens), "total_tokens": str(7 + tokens)}
        case "nulls":
            return {"prompt_tokens": None, "completion_tokens": None, "total_tokens": None}
    return {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}


def words_of(fake, body):
    tokens = fake.get("tokens", min(5, body.get("max_tokens") or body.get("max_completion_tokens") or 5))
    if text := fake.get("text"):
        return [text] * tokens
    return [WORDS[at % (len(WORDS) - 1)] + " " for at in range(tokens)]


async def whole(reply, body, fake, *, chat, name):
    """One JSON answer; ``tokens`` times ``interval_ms`` is how long it takes to think."""
    words = words_of(fake, body)
    await asyncio.sleep(len(words) * fake.get("interval_ms", 0) / 1000)
    message = {"role": "assistant", "content": "".join(words)}
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
    choice |= {"message": message} if chat else {"text": message["content"]}
    answer = {
        "id": "fake-1",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1,
        "model": name or body.get("model"),
        "choices": [choice],
    }
    if (usage := usage_of(fake, len(words))) is not None:
        answer["usage"] = usage
    if fake.get("line_kb"):
        answer["padding"] = "x" * (1000 * fake["line_kb"])
    await reply.whole(200, json.dumps(answer, ensure_ascii=False))


def deltas_of(fake, body):
    """The deltas of a streamed chat, one an event."""
    if not fake.get("tools"):
        return [{"content": word} for word in words_of(fake, body)]
    calls = [
        {"index": at, "id": f"call-{at}", "type": "function", "function": {"name": f"look_{at}", "arguments": ""}}
        for at in (0, 1)
    ]
    parts = [{"index": at, "function": {"arguments": part}} for part in ('{"wo', 'rt": "grün', '"}') for at in (0, 1)]
    return [{"tool_calls": [call]} for call in (*calls, *parts)]


async def stream(reply, body, fake, *, chat, name):
    """An event stream, and every way to spoil one."""
    options = body.get("stream_options") or {}
    line_end = "\r\n" if fake.get("crlf") else "\n"
    frame = {
        "id": "fake-1",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1,
        "model": name or body.get("model"),
    }
    await reply.head(200, "text/event-stream; charset=utf-8")
    if fake.get("flood"):
        await flood(reply, fake["flood"], frame)
        return
    events = []
    deltas = deltas_of(fake, body)
    finish = "tool_calls" if fake.get("tools") else "stop"
    if chat:
        events.append(
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}]}
        )
    for delta in deltas:
        piece = {"delta": delta} if chat else {"text": delta.get("content", "")}
        events.append({"choices": [{"index": 0, **piece, "finish_reason": None}]})
    if fake.get("line_kb"):
        padding = {"content": "x" * (1000 * fake["line_kb"])}
        events.append({"choices": [{"index": 0, **({"delta": padding} if chat else {"text": padding["content"]})}]})
    if not fake.get("no_finish"):
        last = {"delta": {}} if chat else {"text": ""}
        events.append({"choices": [{"index": 0, **last, "finish_reason": finish}]})
    constant = options.get("include_usage") and options.get("continuous_usage_stats")
    if fake.get("usage") == "every_chunk" or constant:
        for at, event in enumerate(events):
            event["usage"] = usage_of(fake, at)
    if options.get("include_usage") and (usage := usage_of(fake, len(deltas))) is not None:
        events.append({"choices": [], "usage": usage})
    after = fake.get("after", 0)
    for at, event in enumerate(events):
        if at + 1 == len(events):
            await wait_file(fake.get("hold", ""))
        text = "data: " + json.dumps(frame | event, ensure_ascii=False) + line_end * 2
        await spoil(reply, fake, text.encode(), at == after, at)
        if fake.get("pings"):
            await reply.frame(f": ping{line_end}{line_end}".encode())
        await reply.piece(text.encode())
        await asyncio.sleep(fake.get("interval_ms", 0) / 1000)
    if after >= len(events):
        await spoil(reply, fake, b"data: [DONE]\n\n", True, len(events))
    if not fake.get("no_done"):
        await reply.piece(f"data: [DONE]{line_end}{line_end}".encode())
    await reply.end()


def is_there(path):
    return not path or os.path.exists(path)


async def wait_file(path):
    while True:
        if is_there(path):
            return
        await asyncio.sleep(0.02)


async def spoil(reply, fake, octets, here, at):
    """What was asked to go wrong before event number ``at``."""
    if fake.get("error_event") == at:
        await reply.piece(b"data: " + error_body(fake.get("error", "openai"), 500).encode() + b"\n\n")
        await reply.end()
        raise Cut
    if here and fake.get("silence") == "events":
        await asyncio.Event().wait()
    if here and fake.get("cut") == "events":
        raise Cut
    if here and fake.get("cut") == "frame":
        await reply.write(b"%x\r\n%b" % (len(octets), octets[:-4]) if reply.framing == "chunked" else octets[:-4])
        raise Cut
    if here and fake.get("cut") == "event":
        await reply.frame(octets[: len(octets) // 2])
        raise Cut


async def flood(reply, total, frame):
    """Events as fast as the peer takes them; how many bytes that were is in ``bytes_written``."""
    event = {"choices": [{"index": 0, "delta": {"content": "x" * 4000}, "finish_reason": None}]}
    text = ("data: " + json.dumps(frame | event) + "\n\n").encode()
    while total < 0 or reply.conn.seen.bytes_written < total:
        await reply.frame(text)
    await reply.frame(b"data: [DONE]\n\n")
    await reply.end()


def spawn_child(deaf):
    """A child in the same group that goes on when its parent is gone."""
    if pid := os.fork():
        print(f"child: {pid}", flush=True)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        time.sleep(60)


async def run(options):
    loop = asyncio.get_running_loop()
    engine = Engine(options)
    for signum in (signal.SIGTERM, signal.SIGINT):
        if options.deaf_to_term:
            signal.signal(signum, signal.SIG_IGN)
        else:
            loop.add_signal_handler(signum, engine.leave)
    if options.crash_after is not None:
        loop.call_later(options.load_seconds + options.crash_after, engine.ended.set)
    if options.headless:
        print(f"waiting for rank 0 at {options.meet}", flush=True)
        await engine.ended.wait()
        return engine.code
    try:
        server = await asyncio.start_server(engine.serve, options.host, options.port, limit=1 << 20)
    except OSError:
        print(f"fatal: port {options.port} is already in use\ngiving up: HTTP server error", flush=True)
        return 1
    watching = asyncio.create_task(engine.watch_mode(options.behave_file)) if options.behave_file else None
    print(f"loading: {options.model}", flush=True)
    for line in options.print_line:
        print(line, flush=True)
    if options.flood_log:
        sys.stdout.write("".join(f"noise {at:012d}\n" for at in range(options.flood_log // 19)))
        sys.stdout.flush()
    print(f"listening on http://{options.host}:{server.sockets[0].getsockname()[1]}", flush=True)
    await engine.ended.wait()
    if watching is not None:
        watching.cancel()
    server.close()
    return engine.code


FLAGS = {
    "--host": {"default": "127.0.0.1"},
    "--port": {"type": int, "default": 0, "help": "0 takes a free one; the line 'listening on' tells it"},
    "--model": {"default": "", "help": "any text; it is not read"},
    "--alias": {"default": "", "help": "the model name in replies (default: the request's)"},
    "--lora": {"action": "append", "metavar": "NAME=SOURCE", "help": "an adapter; may be repeated, and is not read"},
    "--tool-parser": {"choices": ["parrot", "magpie"], "help": "checked, and of no effect"},
    "--tp": {"type": int, "default": 1, "help": "how many cards share a layer; of no effect"},
    "--pp": {"type": int, "default": 1, "help": "how many cards share the layers; of no effect"},
    "--nodes": {"type": int, "default": 1, "help": "how many machines; of no effect"},
    "--rank": {"type": int, "default": 0, "help": "which of them this is; of no effect"},
    "--meet": {"default": "", "metavar": "HOST:PORT", "help": "where they meet; of no effect"},
    "--headless": {"action": "store_true", "help": "work for another rank: never listen"},
    "--says-context": {"type": int, "default": 0, "help": "max_model_len in /v1/models; 0 leaves it out"},
    "--load-seconds": {"type": float, "default": 0.0, "help": "/health is 503 so long"},
    "--never-ready": {"action": "store_true"},
    "--ready-when": {"default": "", "help": "/health is 503 until this file is there"},
    "--bind-when": {"default": "", "help": "listen only once this file is there"},
    "--broken": {"default": "", "help": "/health is 500 'broken: TEXT'"},
    "--crash-after": {"type": float, "help": "seconds after loading until the process ends by itself"},
    "--crash-at-start": {"action": "store_true", "help": "end before listening"},
    "--exit-code": {"type": int, "default": 0},
    "--behave": {"default": "", "choices": ["", "hung", "busy", "frozen"], "help": "how it begins"},
    "--behave-file": {"default": "", "help": "what stands in this file is the mode"},
    "--hold-mb": {"type": int, "default": 0, "help": "so many MB of memory that it takes"},
    "--deaf-to-term": {"action": "store_true"},
    "--spawn-child": {"action": "store_true", "help": "a child that goes on when the parent is gone"},
    "--print-line": {"action": "append", "default": [], "help": "a line of the log; may be repeated"},
    "--flood-log": {"type": int, "default": 0, "help": "so many bytes of log"},
}


def parse(spoiled):
    parser = argparse.ArgumentParser(prog="fake_engine", description="An engine that misbehaves on request.")
    version = "the fake one" if "garbled" in spoiled else f"fake_engine {VERSION}"
    parser.add_argument("--version", action="version", version=version)
    for flag, settings in FLAGS.items():
        if f"without={flag}" in spoiled:
            parser.set_defaults(**{flag.strip("-").replace("-", "_"): settings.get("default")})
            continue
        said = {"help": "Deprecated. Use another one instead."} if f"deprecated={flag}" in spoiled else {}
        parser.add_argument(flag, **settings | said)
    return parser.parse_args()


def spoil_probe(spoiled):
    """What goes wrong before a flag is looked at: an exit status, or None."""
    asked = {"--version", "--help", "-h"} & set(sys.argv)
    if "library" in spoiled:
        reason = "libfake.so.1: cannot open shared object file: No such file or directory"
        print(f"{sys.argv[0]}: error while loading shared libraries: {reason}", file=sys.stderr, flush=True)
        return 127
    while asked and "hang" in spoiled:
        time.sleep(60)
    return 0 if "silent" in spoiled and asked - {"--version"} else None


def main():
    spoiled = os.environ.get("FAKE_PROBE", "").split()
    code = spoil_probe(spoiled)
    if code is not None:
        return code
    options = parse(spoiled)
    if options.spawn_child:
        spawn_child(options.deaf_to_term)
    if options.crash_at_start:
        for line in options.print_line:
            print(line, flush=True)
        return options.exit_code
    while options.bind_when and not os.path.exists(options.bind_when):
        time.sleep(0.02)
    return asyncio.run(run(options))


if __name__ == "__main__":
    # Connections may still be open: leave at once, as a crashing engine does.
    code = main()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
