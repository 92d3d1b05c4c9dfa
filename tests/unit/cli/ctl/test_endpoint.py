"""Where an endpoint is and who may ask it, and endpoints that say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from llmgw.cli.ctl.endpoint import Client, Endpoint, ask_endpoint, read_endpoint
from llmgw.dialects.toolcheck import Findings
from llmgw.errors import LlmgwError, UsageError

KEY = "sk-0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://gpu01:8000", "http://gpu01:8000"),
        (" https://gpu01/ ", "https://gpu01"),
        ("https://gpu01/v1/", "https://gpu01"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("https://host/api/v1/chat/completions", "https://host/api"),
    ],
)
def test_a_url_is_read_up_to_its_version(text: str, url: str) -> None:
    assert read_endpoint(text, None, environ={}) == Endpoint(url=url)


def test_a_key_comes_from_the_file_that_is_named_or_the_environment(tmp_path: Path) -> None:
    environ = {"OPENAI_API_KEY": "sk-of-the-environment"}
    assert read_endpoint("http://h", None, environ=environ).key == "sk-of-the-environment"
    assert read_endpoint("http://h", None, environ={"OPENAI_API_KEY": " "}).key is None
    file = tmp_path / "key"
    file.touch(0o640)
    file.write_text(f"\n{KEY}\r\nmore\n")
    assert read_endpoint("http://h", file, environ=environ).key == KEY
    with pytest.raises(UsageError, match="can't be read: Is a directory"):
        read_endpoint("http://h", tmp_path, environ=environ)


def test_a_key_is_hidden() -> None:
    endpoint = Endpoint(url="http://h", key=KEY)
    assert KEY not in repr(endpoint)
    assert endpoint.hide(f"Bearer {KEY} is wrong") == "Bearer … is wrong"
    assert Endpoint(url="http://h", key="none").hide("none of them") == "none of them"
    assert Endpoint(url="http://h").hide("none of them") == "none of them"


@pytest.fixture
async def silent(nursery: trio.Nursery) -> Endpoint:
    """It takes every connection, and says nothing."""

    async def listen(stream: trio.SocketStream) -> None:
        async with stream:
            async for _ in stream:
                pass

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, listen, [listener])
    return Endpoint(url=f"http://127.0.0.1:{listener.socket.getsockname()[1]}")


def words(found: Findings) -> list[str]:
    return [each.answer for each in found.exchanges]


@pytest.mark.slow
async def test_an_endpoint_that_says_nothing_is_left(silent: Endpoint) -> None:
    served, found = await ask_endpoint(silent, "m", exchange_seconds=0.2, check_seconds=60)
    assert (served.name, words(found)) == ("m", ["the answer did not begin within 0.2 s"])
    with pytest.raises(LlmgwError, match=r"does not tell its models \(the answer did not begin within 0.2 s\)"):
        await ask_endpoint(silent, None, exchange_seconds=0.2, check_seconds=60)


async def test_a_check_that_has_taken_its_time_asks_no_more(silent: Endpoint) -> None:
    _, found = await ask_endpoint(silent, "m", exchange_seconds=0.1, check_seconds=0.05)
    assert words(found) == ["not asked: the check has taken its 0.05 s"]


async def test_an_answer_without_an_end_is_left(nursery: trio.Nursery) -> None:
    left = trio.Event()

    async def flood(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
            try:
                while True:
                    await stream.send_all(b"x" * 65536)
            except trio.BrokenResourceError:
                left.set()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, flood, [listener])
    async with Client(Endpoint(url=f"http://127.0.0.1:{listener.socket.getsockname()[1]}")) as client:
        reply = await client.ask(b"{}", seconds=1000)
    assert reply.problem == "the answer is longer than 4 MiB"
    await left.wait()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            b"HTTP/1.1 302 X\r\nlocation: http://other/v1\r\ncontent-length: 0\r\n\r\n",
            r"models \(302: it sends on to http://other/v1: give that URL\)",
        ),
        (b"HTTP/1.1 200 X\r\ncontent-length: 2\r\n\r\n{}", r"models \(200: that is no list of models\)"),
        (b'HTTP/1.1 200 X\r\ncontent-length: 11\r\n\r\n{"data":[]}', r"has no models: load one there"),
    ],
)
async def test_an_endpoint_without_a_model_to_ask_says_why(nursery: trio.Nursery, answer: bytes, said: str) -> None:
    async def listen(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(65536)
            await stream.send_all(answer)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, listen, [listener])
    endpoint = Endpoint(url=f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
    with pytest.raises(LlmgwError, match=said):
        await ask_endpoint(endpoint, None, exchange_seconds=60, check_seconds=60)


def test_a_key_that_is_said_back_is_hidden_and_a_word_that_stands_for_none_is_not() -> None:
    assert Endpoint(url="http://h", key="sk-secret").hide("bad key sk-secret given") == "bad key … given"
    assert Endpoint(url="http://h", key="none").hide("there is none") == "there is none"
