"""One token asked of an engine, which may answer, refuse, fail or say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio
import trio.testing

from llmgw.agent.canary import TRY_SECONDS, Missed, ask_for_token, build_asks, list_paths
from llmgw.agent.machine import Machine
from llmgw.agent.settings import AgentSettings, WeightsSettings
from llmgw.core.model import Task
from llmgw.core.node import NodeId

NOWHERE = Path("/nowhere")
HANDS = Machine(AgentSettings(node_id=NodeId("n1"), state=NOWHERE, weights=WeightsSettings(cache=NOWHERE)))
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ALL = frozenset({CHAT, TEXT, "/v1/embeddings", "/v1/rerank"})


@pytest.fixture
async def serve(nursery):
    """Answer each path with a status; the port, and what was asked."""

    async def serve(**answers):
        asked = []
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def answer(stream):
            head, _, body = bytes(await stream.receive_some(65536)).partition(b"\r\n\r\n")
            path = head.split()[1].decode()
            asked.append((path, json.loads(body)))
            status = answers[path.rpartition("/")[2]]
            if status:
                text = b'{"error":\n "no"}'
                await stream.send_all(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(text), text))

        nursery.start_soon(trio.serve_listeners, answer, [listener])
        return listener.socket.getsockname()[1], asked

    return serve


async def ask(port, task=Task.CHAT, paths=ALL):
    with trio.fail_after(100):
        missed = await ask_for_token(HANDS, port, build_asks(task, "m", paths))
        return None if missed is None else missed.words


async def test_a_chat_of_one_token_is_asked_of_a_chat_model(serve):
    port, asked = await serve(completions=200)
    assert await ask(port) is None
    ((path, body),) = asked
    assert path == CHAT
    assert body == {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("task", "path", "field"), [(Task.EMBED, "embeddings", "input"), (Task.RERANK, "rerank", "documents")]
)
async def test_each_task_is_asked_for_what_it_does(serve, task, path, field):
    port, asked = await serve(**{path: 200})
    assert await ask(port, task) is None
    assert asked[0][0] == f"/v1/{path}"
    assert asked[0][1]["model"] == "m"
    assert field in asked[0][1]


def test_there_is_something_to_ask_for_every_task():
    assert all(build_asks(task, "m", ALL) for task in Task)
    assert list_paths(Task.CHAT) == f"{CHAT}, {TEXT}"


@pytest.mark.parametrize(
    ("task", "paths", "asked"),
    [
        (Task.CHAT, {CHAT, TEXT}, [CHAT, TEXT]),
        (Task.CHAT, {CHAT}, [CHAT]),
        (Task.CHAT, {TEXT, "/v1/embeddings"}, [TEXT]),
        (Task.CHAT, {"/v1/embeddings"}, []),
        (Task.EMBED, ALL, ["/v1/embeddings"]),
        (Task.EMBED, {CHAT, "/v1/rerank"}, []),
        (Task.RERANK, ALL, ["/v1/rerank"]),
        (Task.RERANK, set(), []),
    ],
)
def test_only_paths_that_the_engine_has_are_asked(task, paths, asked):
    assert [ask.path for ask in build_asks(task, "m", paths)] == asked


async def test_an_engine_without_chats_is_asked_to_complete_a_text_at_once(serve):
    port, asked = await serve(completions=200)
    assert await ask(port, paths={TEXT}) is None
    assert asked == [(TEXT, {"model": "m", "prompt": "Hi", "max_tokens": 1})]


async def test_a_model_without_a_chat_template_is_asked_to_complete_a_text(nursery):
    answered = []
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def answer(stream):
        path = bytes(await stream.receive_some(65536)).split()[1].decode()
        answered.append(path)
        await stream.send_all(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % (400 if path == CHAT else 200))

    nursery.start_soon(trio.serve_listeners, answer, [listener])
    assert await ask(listener.socket.getsockname()[1]) is None
    assert answered == [CHAT, TEXT]


async def test_what_came_instead_is_told_in_one_line(serve):
    port, asked = await serve(completions=400)
    assert await ask(port) == '/v1/chat/completions answered 400 {"error": "no"}'
    assert len(asked) == 2


async def test_what_is_hidden_is_not_in_what_came_instead(serve):
    port, _ = await serve(completions=500)
    said = await ask_for_token(HANDS, port, build_asks(Task.CHAT, "m", ALL), lambda text: text.replace("no", "***"))
    assert said.words.endswith('answered 500 {"error": "***"}')


async def test_an_engine_that_fails_is_asked_no_second_kind(serve):
    port, asked = await serve(completions=500)
    assert (await ask(port)).startswith("/v1/chat/completions answered 500")
    assert len(asked) == 1


async def test_an_engine_that_closes_or_is_gone_did_not_answer(serve):
    port, _ = await serve(completions=0)
    assert await ask(port) == "/v1/chat/completions did not answer"
    with trio.socket.socket() as sock:
        await sock.bind(("127.0.0.1", 0))
        assert await ask(sock.getsockname()[1]) == "/v1/chat/completions did not answer"


async def test_a_silent_engine_is_not_waited_for_for_ever(listener, autojump_clock):
    began = trio.current_time()
    said = await ask_for_token(HANDS, listener.getsockname()[1], build_asks(Task.CHAT, "m", ALL))
    assert said == Missed(words=f"/v1/chat/completions did not answer within {TRY_SECONDS:g} s", silent=True)
    assert trio.current_time() == began + TRY_SECONDS
