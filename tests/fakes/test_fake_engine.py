"""The fake engine does what its tests of others rely on: each behaviour, seen at the bytes."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from llmgw.engines import read_argparse_help

PROGRAM = str(Path(__file__).with_name("fake_engine.py"))
FLAGS = re.findall(r'^    "(--[a-z-]+)": \{', Path(PROGRAM).read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """One engine for all tests here; each looks at its own requests only."""
    with subprocess.Popen([sys.executable, PROGRAM, "--alias", "m"], stdout=subprocess.PIPE, text=True) as engine:
        for line in engine.stdout:
            if "listening on" in line:
                break
        yield int(line.rpartition(":")[2])
        engine.kill()


def request(body, path="/v1/chat/completions", method="POST", close=True):
    octets = b"" if body is None else json.dumps(body).encode()
    end = "connection: close\r\n" if close else ""
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n{end}content-length: {len(octets)}\r\n\r\n".encode() + octets


async def ask(port, body, **options):
    """All bytes of the answer until the engine closes."""
    with trio.fail_after(60):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request(body, **options))
            return b"".join([bytes(chunk) async for chunk in stream])


def chat(stream=True, **fake):
    return {"model": "m", "stream": stream, "messages": [], "fake": fake}


def unchunk(octets):
    """The body of a chunked answer; the last chunk must be there."""
    head, _, rest = octets.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            assert rest == b"\r\n"
            return body
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]


def events(octets):
    texts = unchunk(octets).decode().split("\n\n")[:-1]
    assert all(text.startswith("data: ") for text in texts)
    return [json.loads(text[6:]) for text in texts if text != "data: [DONE]"]


async def test_a_stream_has_role_text_and_finish(port):
    octets = await ask(port, chat(tokens=3))
    said = events(octets)
    assert unchunk(octets).endswith(b"data: [DONE]\n\n")
    assert said[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "".join(event["choices"][0]["delta"]["content"] for event in said[1:4]) == "Ein Gruß aus "
    assert said[-1]["choices"][0]["finish_reason"] == "stop"
    assert not any("usage" in event for event in said)


async def test_usage_comes_in_an_event_of_its_own_when_asked_for(port):
    body = chat(tokens=2) | {"stream_options": {"include_usage": True}}
    assert events(await ask(port, body))[-1] == {
        "id": "fake-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
    }


@pytest.mark.parametrize(
    ("kind", "usage"),
    [
        ("strings", {"prompt_tokens": "7", "completion_tokens": "1", "total_tokens": "8"}),
        ("nulls", {"prompt_tokens": None, "completion_tokens": None, "total_tokens": None}),
        ("none", None),
    ],
)
async def test_usage_can_be_odd(port, kind, usage):
    answer = await ask(port, chat(stream=False, tokens=1, usage=kind))
    assert json.loads(answer.partition(b"\r\n\r\n")[2]).get("usage") == usage


async def test_usage_can_be_in_every_event(port):
    body = chat(tokens=2) | {"stream_options": {"continuous_usage_stats": True, "include_usage": True}}
    assert all("usage" in event for event in events(await ask(port, body)))


async def test_a_whole_answer_a_completion_and_embeddings(port):
    whole = await ask(port, chat(stream=False, tokens=2))
    assert json.loads(whole.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == "Ein Gruß "
    text = await ask(port, chat(stream=False, tokens=1), path="/v1/completions")
    assert json.loads(text.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "Ein "
    streamed = events(await ask(port, chat(tokens=1), path="/v1/completions"))
    assert [event["choices"][0]["text"] for event in streamed] == ["Ein ", ""]
    vectors = await ask(port, {"model": "m", "input": ["a", "b"]}, path="/v1/embeddings")
    assert len(json.loads(vectors.partition(b"\r\n\r\n")[2])["data"]) == 2
    packed = await ask(port, {"model": "m", "input": "a", "encoding_format": "base64"}, path="/v1/embeddings")
    (row,) = json.loads(packed.partition(b"\r\n\r\n")[2])["data"]
    assert struct.unpack("<3f", base64.b64decode(row["embedding"])) == (0.25, -0.5, 1.0)


async def test_the_longest_document_is_ranked_first(port):
    body = {"model": "m", "query": "q", "documents": ["a", "abc", "ab"], "top_n": 2}
    ranked = json.loads((await ask(port, body, path="/v1/rerank")).partition(b"\r\n\r\n")[2])
    assert [result["index"] for result in ranked["results"]] == [1, 2]
    assert ranked["usage"] == {"total_tokens": 12}


async def test_what_was_sent_is_told_by_its_hash(port):
    body = chat(stream=False, tokens=1) | {"user": "hashed"}
    await ask(port, body)
    told = await ask(port, None, path="/fake/requests", method="GET")
    (seen,) = [each for each in json.loads(told.partition(b"\r\n\r\n")[2]) if each["body"].get("user") == "hashed"]
    assert seen["sha256"] == hashlib.sha256(json.dumps(body).encode()).hexdigest()


@pytest.mark.parametrize(
    ("shape", "piece"),
    [
        ("llamacpp", b'"code": 418'),
        ("vllm", b'{"error": "the fake'),
        ("sglang", b'{"object": "error"'),
        ("fastapi", b'{"detail"'),
        ("openai", b'"param": null'),
        ("html", b"text/html"),
        ("empty", b"content-length: 0"),
    ],
)
async def test_an_error_comes_in_each_shape(port, shape, piece):
    octets = await ask(port, chat(status=418, error=shape))
    assert octets.startswith(b"HTTP/1.1 418 ")
    assert piece in octets


async def test_an_error_event_comes_inside_a_stream(port):
    octets = await ask(port, chat(error_event=2, error="vllm"))
    assert octets.startswith(b"HTTP/1.1 200")
    assert events(octets)[2] == {"error": "the fake engine was asked to fail"}


@pytest.mark.parametrize(
    ("cut", "end"),
    [("head", b"\r\n\r\n"), ("events", b"}\n\n\r\n"), ("event", b"\r\n"), ("frame", b"null}")],
)
async def test_a_stream_is_cut_where_it_was_asked(port, cut, end):
    octets = await ask(port, chat(cut=cut, after=2, no_finish=True))
    assert octets.startswith(b"HTTP/1.1 200")
    assert octets.endswith(end) or (cut == "frame" and not octets.endswith(b"\n"))
    assert not octets.endswith(b"0\r\n\r\n")


async def test_nothing_comes_when_it_is_cut_before_the_first_byte(port):
    assert await ask(port, chat(cut="first_byte")) == b""


async def test_a_reset_is_a_reset(port):
    with pytest.raises(trio.BrokenResourceError):
        await ask(port, chat(cut="events", after=1, reset=True, interval_ms=200))


@pytest.mark.slow
@pytest.mark.parametrize(("silence", "came"), [("head", b""), ("events", b"}\n\n\r\n")])
async def test_silence_lasts_until_the_peer_leaves_and_the_engine_sees_it_leave(port, silence, came):
    body = chat(silence=silence, after=1) | {"user": f"silent-{silence}-{os.getpid()}"}
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request(body))
        octets = b""
        with trio.fail_after(60):
            while not octets.endswith(came):
                octets += await stream.receive_some()
        await wait_seen(port, body, "open")
        with trio.move_on_after(0.2):
            raise AssertionError(f"more came: {await stream.receive_some()}")
    seen = await wait_seen(port, body, "left")
    assert seen["bytes_written"] == len(octets)
    assert seen["left_after"] > 0


async def wait_seen(port, body, state):
    with trio.fail_after(60):
        while True:
            for seen in await list_seen(port):
                if seen["body"] == body and seen["state"] == state:
                    return seen
            await trio.sleep(0.02)


async def list_seen(port):
    octets = await ask(port, None, path="/fake/requests", method="GET")
    return json.loads(octets.partition(b"\r\n\r\n")[2])


@pytest.mark.slow
async def test_a_reader_that_does_not_read_stops_a_flood(port):
    body = chat(flood=-1) | {"user": f"flood-{os.getpid()}"}
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request(body))
        with trio.fail_after(60):
            before, written = -1, 0
            while before != written or not written:
                await trio.sleep(0.2)
                before, written = written, (await wait_seen(port, body, "open"))["bytes_written"]


async def test_bytes_come_one_by_one_and_characters_in_halves(port):
    plain = unchunk(await ask(port, chat(tokens=3)))
    assert unchunk(await ask(port, chat(tokens=3, bytewise=True))) == plain
    halves = await ask(port, chat(tokens=3, split_unicode=True))
    assert unchunk(halves) == plain
    assert b"\xc3\r\n" in halves


async def test_the_end_of_a_stream_waits_for_its_file(port, tmp_path):
    gate = tmp_path / "gate"
    with trio.fail_after(60):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request(chat(tokens=2, hold=str(gate))))
            said = b""
            while "Gruß ".encode() not in said:
                said += await stream.receive_some()
            with trio.move_on_after(0.1) as waiting:
                said += await stream.receive_some()
            assert waiting.cancelled_caught
            gate.touch()
            said += b"".join([bytes(chunk) async for chunk in stream])
    assert b"finish_reason" in said
    assert unchunk(said).endswith(b"data: [DONE]\n\n")


async def test_a_long_line_crlf_pings_and_a_missing_end(port):
    long = events(await ask(port, chat(tokens=1, line_kb=300)))
    assert len(long[2]["choices"][0]["delta"]["content"]) == 300_000
    assert unchunk(await ask(port, chat(crlf=True))).endswith(b"\r\n\r\ndata: [DONE]\r\n\r\n")
    assert b": ping\n\n" in unchunk(await ask(port, chat(pings=True)))
    assert b"[DONE]" not in unchunk(await ask(port, chat(no_done=True)))


async def test_the_arguments_of_two_tool_calls_interleave(port):
    arguments = {0: "", 1: ""}
    order = []
    for event in events(await ask(port, chat(tools=True)))[1:-1]:
        (call,) = event["choices"][0]["delta"]["tool_calls"]
        order.append(call["index"])
        arguments[call["index"]] += call["function"]["arguments"]
    assert [json.loads(text) for text in arguments.values()] == [{"wort": "grün"}] * 2
    assert order == [0, 1] * 4


@pytest.mark.parametrize("framing", ["close", "http10"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_reply_may_end_by_closing(port, framing, stream):
    head, _, body = (await ask(port, chat(stream=stream, framing=framing), close=False)).partition(b"\r\n\r\n")
    assert b"content-length" not in head
    assert b"chunked" not in head
    assert head.startswith(b"HTTP/1.0" if framing == "http10" else b"HTTP/1.1")
    assert body.endswith(b"data: [DONE]\n\n" if stream else b"}")


async def test_a_whole_reply_may_be_chunked(port):
    assert json.loads(unchunk(await ask(port, chat(stream=False, framing="chunked"))))["object"] == "chat.completion"


async def test_continues_and_odd_headers(port):
    octets = await ask(port, chat(stream=False, continues=2, odd_headers=True, headers=[["x-mine", "1"]]))
    assert octets.startswith(b"HTTP/1.1 100 Continue\r\n\r\n" * 2 + b"HTTP/1.1 200")
    assert b"x-double: 1\r\nX-Double: 2\r\nx-empty:\r\n" in octets
    assert b"x-mine: 1\r\n" in octets


async def test_a_connection_is_kept_and_may_close_right_after_a_reply(port):
    body = chat(stream=False, tokens=1)
    last = chat(stream=False, tokens=1, close=True)
    with trio.fail_after(60):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request(body, close=False) + request(last, close=False))
            octets = b"".join([bytes(chunk) async for chunk in stream])
    assert octets.count(b"HTTP/1.1 200 OK") == 2
    assert b"connection: close" not in octets


def run(*flags, probe="", timeout=60):
    environ = {**os.environ, "FAKE_PROBE": probe}
    command = [sys.executable, PROGRAM, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environ)


@pytest.mark.slow
def test_it_tells_its_version_and_its_flags():
    assert run("--version").stdout == "fake_engine 1.0\n"
    flags = {name for flag in read_argparse_help(run("--help").stdout) for name in flag.names}
    assert flags == {*FLAGS, "--version", "-h", "--help"}


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_a_probe_can_miss_a_library_or_hang(flag):
    done = run(flag, probe="library")
    assert done.returncode == 127
    assert "error while loading shared libraries: libfake.so.1: cannot open shared object file" in done.stderr
    with pytest.raises(subprocess.TimeoutExpired):
        run(flag, probe="hang", timeout=1)


@pytest.mark.slow
def test_its_help_can_be_spoiled():
    probe = "garbled deprecated=--alias without=--model"
    assert run("--version", probe=probe).stdout == "the fake one\n"
    flags = {flag.names[0]: flag for flag in read_argparse_help(run("--help", probe=probe).stdout)}
    assert flags["--alias"].deprecated == "Deprecated. Use another one instead."
    assert "--model" not in flags
    assert flags["--tool-parser"].choices == {"parrot", "magpie"}
    silent = run("--help", probe="silent")
    assert (silent.returncode, silent.stdout) == (0, "")


@pytest.mark.slow
def test_a_flag_that_is_not_there_is_refused():
    done = run("--model", "m", probe="without=--model")
    assert done.returncode == 2
    assert "error: unrecognized arguments: --model m" in done.stderr


@pytest.mark.slow
def test_a_headless_one_waits_without_listening():
    command = [sys.executable, PROGRAM, "--headless", "--meet", "192.0.2.1:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout.readline() == "waiting for rank 0 at 192.0.2.1:1\n"
        engine.terminate()
        assert engine.stdout.read() == "cleaning up before exit\n"
    assert engine.returncode == 0


async def test_its_metrics_count_what_it_did(port):
    async def count():
        octets = await ask(port, None, path="/metrics", method="GET")
        lines = octets.partition(b"\r\n\r\n")[2].decode().splitlines()[1:]
        return {name: int(number) for name, number in map(str.split, lines)}

    before = await count()
    assert before.keys() >= {"fake_running", "fake_waiting", "fake_cache_percent"}
    await ask(port, chat(tokens=1))
    await ask(port, chat(tokens=1))
    after = await count()
    assert after["fake_prompt_tokens"] - before["fake_prompt_tokens"] >= 14
    assert after["fake_cached_tokens"] > before["fake_cached_tokens"]
    assert after["fake_steps"] > before["fake_steps"]


def read_metrics(octets):
    return dict(line.split() for line in octets.decode().splitlines() if line.startswith("fake_"))


async def test_one_that_is_hung_answers_its_polls_and_no_request_until_it_goes_on(port):
    await ask(port, {"mode": "hung"}, path="/fake/mode")
    async with trio.open_nursery() as nursery:
        answers = []

        async def ask_and_keep():
            answers.append(await ask(port, chat(stream=False)))

        before = read_metrics(await ask(port, None, path="/metrics", method="GET"))
        nursery.start_soon(ask_and_keep)
        metrics = before
        while metrics["fake_running"] == "0":
            metrics = read_metrics(await ask(port, None, path="/metrics", method="GET"))
        assert metrics["fake_steps"] == before["fake_steps"]
        assert b'"ok"' in await ask(port, None, path="/health", method="GET")
        assert not answers
        await ask(port, {"mode": ""}, path="/fake/mode")
    assert b"200 OK" in answers[0]


async def test_the_steps_of_one_that_is_busy_grow(port):
    await ask(port, {"mode": "busy"}, path="/fake/mode")
    steps = []
    while len(set(steps)) < 3:
        steps.append(int(read_metrics(await ask(port, None, path="/metrics", method="GET"))["fake_steps"]))
    assert steps == sorted(steps)
    await ask(port, {"mode": ""}, path="/fake/mode")


def test_one_that_is_frozen_is_stopped_until_it_is_sent_on(tmp_path):
    mode = tmp_path / "mode"
    flags = ("--behave-file", str(mode), "--hold-mb", "30")
    with subprocess.Popen([sys.executable, PROGRAM, *flags], stdout=subprocess.PIPE, text=True) as engine:
        assert any("listening on" in line for line in engine.stdout)
        memory = Path(f"/proc/{engine.pid}/status").read_text()
        assert int(re.search(r"RssAnon:\s+(\d+)", memory)[1]) > 30_000
        mode.write_text("frozen")
        _, status = os.waitpid(engine.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        engine.send_signal(signal.SIGCONT)
        engine.terminate()
