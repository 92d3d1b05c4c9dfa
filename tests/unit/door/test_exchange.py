"""One request as a playbook: what the exchange asks for, and what it makes of the answers."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from llmgw.config.node import Timeouts
from llmgw.dialects.openai import Usage
from llmgw.dialects.refusal import Refusal
from llmgw.door.body import MAX_KEYS, encode_fields
from llmgw.door.exchange import (
    BODY_THREADS,
    INLINE_BODY_BYTES,
    INLINE_EDIT_BYTES,
    Gateway,
    Route,
    Wording,
    _in_thread,
    exchange,
)
from llmgw.door.http1 import RequestHead, ResponseHead
from llmgw.door.origin import Origins
from llmgw.door.relay import EchoAlias, StripUsage
from llmgw.door.request import Outcome, Request
from llmgw.door.steps import SILENT, Await, Collect, Failure, Forward, Park, ReadBody, Refuse, Relay, Relayed, Reply

TIMEOUTS = Timeouts(response_header=60, generation=600, stream_open_after=30)
JSON_HEAD = ResponseHead(200, [(b"content-type", b"application/json")])
EVENTS_HEAD = ResponseHead(200, [(b"content-type", b"text/event-stream; charset=utf-8")])


class Play:
    """An exchange driven by hand. ``step`` is what it asks for now; ``None`` when it is over."""

    def __init__(self, gateway: Any, method: str = "POST", path: str = "/v1/chat/completions", **fields: bytes) -> None:
        headers = {b"host": b"localhost", **{name.replace("_", "-").encode(): value for name, value in fields.items()}}
        length = int(headers.get(b"content-length", b"0"))
        head = RequestHead(method, path.encode(), 1, headers, keep_alive=True, content_length=length, chunked=False)
        self.gateway = gateway
        self.request = Request("req-1", head, "10.0.0.1", 0.0)
        self.steps = exchange(self.request, gateway, Origins("127.0.0.1"), TIMEOUTS)
        self.step: Any = None
        self.answer(None)

    def answer(self, value: Any) -> Any:
        """Resume it with a step's result, and set what the driver would have set."""
        try:
            self.step = self.steps.send(value)
        except StopIteration:
            self.step = None
        if isinstance(self.step, Refuse) and not self.request.opened:
            self.request.status = self.step.refusal.status
        elif isinstance(self.step, Reply):
            self.request.status = self.step.status
        elif isinstance(self.step, Relay):
            self.request.status = self.step.head.status
            self.request.opened = self.request.opened or self.step.events
        elif isinstance(self.step, Await):
            self.request.opened, self.request.status = True, 200
        return self.step

    def body(self, **fields: object) -> Any:
        assert isinstance(self.step, ReadBody)
        return self.answer(json.dumps({"model": "tiny", "messages": [{}], **fields}).encode())

    def end(self) -> Request:
        """It is over and was settled once."""
        assert self.step is None
        assert self.gateway.settled == [self.request]
        assert sorted(self.gateway.taken) == sorted(self.gateway.released)
        return self.request


@pytest.fixture
def gateway(world: Any) -> Any:
    found: Gateway = world.gateway
    return found


@pytest.fixture
def play(gateway: Any) -> Callable[..., Play]:
    def begin(*given: Any, **fields: bytes) -> Play:
        return Play(gateway, *given, **fields)

    return begin


def replace_body(head: ResponseHead, body: bytes) -> ResponseHead:
    return ResponseHead(head.status, head.headers, body=body)


def refusal_of(step: Any) -> Refusal:
    assert isinstance(step, Refuse)
    return step.refusal


# -- what needs no engine


def test_health_is_an_empty_200(play: Any) -> None:
    game = play("GET", "/health")
    assert game.step == Reply(200)
    game.answer(None)
    assert game.end().outcome is Outcome.DONE


def test_models_are_listed(play: Any) -> None:
    game = play("GET", "/v1/models")
    assert [row["id"] for row in json.loads(game.step.body)["data"]] == ["tiny", "gpt", "sql"]
    game.answer(None)
    game.end()


@pytest.mark.parametrize("path", ["/v1/models/tiny", "/v1/models/t%69ny", "/v1/models/gpt", "/v1/models/sql"])
def test_a_model_is_shown_by_any_of_its_names(play: Any, path: str) -> None:
    game = play("GET", path)
    assert json.loads(game.step.body)["object"] == "model"


def test_an_unknown_model_is_a_404_whatever_slashes_it_has(play: Any) -> None:
    refusal = refusal_of(play("GET", "/v1/models/org/none%ff").step)
    assert (refusal.status, refusal.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", b"POST, OPTIONS"),
        ("POST", "/v1/models", b"GET, HEAD, OPTIONS"),
        ("PUT", "/health", b"GET, HEAD, OPTIONS"),
    ],
)
def test_another_method_is_told_which_ones_there_are(play: Any, method: str, path: str, allow: bytes) -> None:
    game = play(method, path)
    assert refusal_of(game.step).status == 405
    assert game.step.headers == ((b"allow", allow),)
    game.answer(None)
    assert game.end().outcome is Outcome.REFUSED


def test_a_preflight_is_answered_for_every_path(play: Any) -> None:
    game = play("OPTIONS", "/v1/chat/completions", origin=b"http://localhost:3000")
    assert game.step.status == 204


def test_a_foreign_page_is_refused_before_anything_else(play: Any) -> None:
    game = play("POST", "/v1/chat/completions", origin=b"https://evil.example")
    assert refusal_of(game.step).code == "origin_not_allowed"
    assert refusal_of(play("GET", "/health", host=b"evil.example").step).code == "host_not_allowed"


def test_whoever_is_not_known_is_refused_before_a_byte_of_the_body(play: Any) -> None:
    game = play(authorization=b"Bearer wrong")
    assert refusal_of(game.step).status == 401
    assert refusal_of(play("GET", "/v1/models", authorization=b"Bearer wrong").step).status == 401


@pytest.mark.parametrize(
    "headers", [{"content_encoding": b"gzip"}, {"content_type": b"multipart/form-data; boundary=x"}]
)
def test_a_body_that_cannot_be_read_is_refused_before_it_comes(play: Any, headers: dict[str, bytes]) -> None:
    assert refusal_of(play(**headers).step).status == 415


# -- the road to an engine


def test_a_request_goes_to_a_replica_under_the_served_name_with_its_body_untouched(play: Any) -> None:
    game = play()
    assert isinstance(game.step, ReadBody)
    body = b'{"model":"tiny", "messages":[{"role":"user","content":"hi"}],"n":1e400}'
    forward = game.answer(body)
    assert isinstance(forward, Forward)
    assert forward.address == ("10.0.0.9", 1)
    assert forward.request.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 10.0.0.9:1\r\n")
    assert b"\r\nx-request-id: req-1\r\n" in forward.request
    assert forward.request.endswith(b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert (forward.head_seconds, forward.silent_seconds) == (600, None)
    relay = game.answer(JSON_HEAD)
    assert relay == Relay(JSON_HEAD, ((b"content-type", b"application/json"),))
    game.answer(Relayed(None, b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'))
    request = game.end()
    assert (request.outcome, request.usage, request.replica, request.model) == (
        Outcome.DONE,
        Usage(3, 4),
        "rep-1",
        "tiny",
    )


def test_a_stream_that_wants_no_usage_is_asked_for_it_and_gets_it_taken_out(play: Any) -> None:
    game = play()
    forward = game.body(stream=True)
    assert b'"stream_options":{"include_usage":true}' in forward.request
    assert (forward.head_seconds, forward.silent_seconds) == (60, 30)
    relay = game.answer(EVENTS_HEAD)
    assert relay.events
    assert [type(each) for each in relay.filters] == [StripUsage]
    assert (b"cache-control", b"no-cache") in relay.headers
    game.answer(Relayed(None, b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'))
    assert game.end().usage == Usage(1, 2)


def test_a_stream_that_wants_its_usage_goes_verbatim(play: Any) -> None:
    game = play()
    game.body(stream=True, stream_options={"include_usage": True})
    assert game.answer(EVENTS_HEAD).filters == ()


def test_an_engine_that_does_not_know_usage_in_streams_is_not_asked(play: Any, gateway: Any) -> None:
    gateway.routes = [Route("rep-1", ("10.0.0.9", 1), "tiny", usage_in_streams=False)]
    game = play()
    assert b"stream_options" not in game.body(stream=True).request


def test_an_alias_is_renamed_on_the_way_and_echoed_back(play: Any) -> None:
    game = play()
    assert b'"model": "tiny"' in game.body(model="gpt").request
    (echo,) = game.answer(JSON_HEAD).filters
    assert isinstance(echo, EchoAlias)
    assert echo.feed(b'{"model":"tiny"}') + echo.end() == b'{"model":"gpt"}'


def wordings(**fields: object) -> dict[str, Wording]:
    """How the adapter is asked for where the engine wants these fields for it."""
    served = ("tiny",) if fields["model"] in ("sql", "tiny") else (str(fields["model"]), "tiny")
    told = {key: value for key, value in fields.items() if (key, value) != ("model", "sql")}
    return {"sql": Wording(encode_fields(told), served)}


@pytest.mark.parametrize(
    ("fields", "sent", "answered"),
    [
        ({"model": "sql"}, b'{"model":"sql", "prompt":"x"}', "sql"),
        ({"model": "tiny:sql"}, b'{"model":"tiny:sql", "prompt":"x"}', "tiny:sql"),
        (
            {"model": "tiny", "lora": [{"id": 0, "scale": 1.0}]},
            b'{"lora":[{"id":0,"scale":1.0}],"model":"tiny", "prompt":"x"}',
            "tiny",
        ),
    ],
)
def test_an_adapter_is_asked_for_as_its_engine_wants_it_and_answers_under_its_name(
    play: Any, gateway: Any, fields: dict[str, object], sent: bytes, answered: str
) -> None:
    gateway.routes = [Route("rep-1", ("10.0.0.9", 1), "tiny", loras=wordings(**fields))]
    game = play("POST", "/v1/completions")
    forward = game.answer(b'{"model":"sql", "prompt":"x"}')
    assert forward.request.endswith(b"\r\n\r\n" + sent)
    (echo,) = game.answer(JSON_HEAD).filters
    for name in ("tiny", answered):
        assert echo.feed(b'{"model":"%b"}' % name.encode()) + echo.end() == b'{"model":"sql"}'
    game.answer(Relayed(None))
    assert game.end().model == "tiny"


def test_an_adapter_is_asked_for_in_a_stream_too(play: Any, gateway: Any) -> None:
    gateway.routes = [Route("rep-1", ("10.0.0.9", 1), "tiny", loras=wordings(model="tiny", lora=[]))]
    game = play()
    request = game.body(model="sql", stream=True).request
    body = json.loads(request.partition(b"\r\n\r\n")[2])
    assert (body["model"], body["lora"], body["stream_options"]) == ("tiny", [], {"include_usage": True})
    assert [type(each) for each in game.answer(EVENTS_HEAD).filters] == [StripUsage, EchoAlias]


@pytest.mark.parametrize("model", ["tiny", "gpt"])
def test_whoever_asks_for_the_model_itself_gets_no_adapter(play: Any, gateway: Any, model: str) -> None:
    gateway.routes = [Route("rep-1", ("10.0.0.9", 1), "tiny", loras=wordings(model="tiny", lora=[]))]
    body = b'{"prompt":"x","model":"%b"}'
    forward = play("POST", "/v1/completions").answer(body % model.encode())
    assert forward.request.endswith(b"\r\n\r\n" + body % b"tiny")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("model", "words"), [("vectors", "embeds text"), ("ranks", "ranks")])
def test_a_model_that_does_not_chat_is_not_asked_to(play: Any, gateway: Any, path: str, model: str, words: str) -> None:
    refusal = refusal_of(play("POST", path).body(model=model))
    assert (refusal.status, refusal.code, refusal.param) == (400, "wrong_task", "model")
    assert words in refusal.message
    assert gateway.taken == []


@pytest.mark.parametrize("model", ["vectors", "ranks", "tiny"])
def test_what_a_model_may_do_besides_its_engine_says(play: Any, gateway: Any, model: str) -> None:
    play("POST", "/v1/embeddings").body(model=model)
    assert gateway.taken == ["rep-1"]


@pytest.mark.parametrize("model", ["tiny", "gpt"])
def test_what_its_engine_needs_for_the_model_itself_is_set(play: Any, gateway: Any, model: str) -> None:
    gateway.routes = [Route("rep-1", ("10.0.0.9", 1), "tiny", base=(("lora", b"[]"),))]
    forward = play("POST", "/v1/completions").answer(b'{"prompt":"x","model":"%b"}' % model.encode())
    assert forward.request.endswith(b'\r\n\r\n{"lora":[],"prompt":"x","model":"tiny"}')


def test_an_adapter_that_its_engine_can_not_choose_is_refused_and_no_engine_is_asked(play: Any, gateway: Any) -> None:
    gateway.routes = [Route("rep-1", ("10.0.0.1", 1), "tiny"), Route("rep-2", ("10.0.0.2", 1), "tiny")]
    game = play()
    refusal = refusal_of(game.body(model="sql"))
    assert (refusal.status, refusal.code, refusal.param) == (400, "adapter_not_served", "model")
    assert "'sql' of the model tiny" in refusal.message
    game.answer(None)
    request = game.end()
    assert (request.outcome, request.replica) == (Outcome.REFUSED, None)
    assert gateway.taken == ["rep-1", "rep-2"]


def test_an_adapter_is_asked_of_the_replica_that_has_it(play: Any, gateway: Any) -> None:
    gateway.routes = [ROUTES[0], Route("rep-2", ("10.0.0.2", 1), "tiny", loras=wordings(model="sql"))]
    game = play()
    assert game.body(model="sql").address == ("10.0.0.2", 1)
    refusal = refusal_of(game.answer(Failure("it broke", sent=True)))
    assert (refusal.status, refusal.code) == (502, "engine_failed")
    game.answer(None)
    assert game.end().outcome is Outcome.ENGINE_FAILED


def test_a_failure_of_the_replica_that_has_the_adapter_is_told_before_the_lack_of_it_elsewhere(
    play: Any, gateway: Any
) -> None:
    gateway.routes = [Route("rep-2", ("10.0.0.2", 1), "tiny", loras=wordings(model="sql")), ROUTES[0]]
    game = play()
    game.body(model="sql")
    assert refusal_of(game.answer(Failure("it broke", sent=True))).code == "engine_failed"


RANKING = (
    b'{"object":"list","model":"tiny","results":[{"index":1,"relevance_score":0.9}],"usage":{"prompt_tokens":7,'
    b'"total_tokens":7}}'
)


@pytest.mark.parametrize("reply", [RANKING, RANKING.replace(b'"prompt_tokens":7,', b"")])
def test_documents_are_ranked_by_the_engine_and_what_it_read_is_counted(play: Any, reply: bytes) -> None:
    game = play("POST", "/v1/rerank")
    body = b'{"model":"tiny", "query":"q", "documents":["a", {"text":"b"}], "top_n":1}'
    forward = game.answer(body)
    assert forward.request.startswith(b"POST /v1/rerank HTTP/1.1\r\n")
    assert forward.request.endswith(b"\r\n\r\n" + body)
    assert game.answer(replace_body(JSON_HEAD, reply)) == Reply(200, reply, b"application/json")
    game.answer(None)
    assert game.end().usage == Usage(7, 0)


def test_a_ranking_is_given_under_the_alias_that_was_asked_for(play: Any) -> None:
    game = play("POST", "/v1/rerank")
    assert b'"model": "tiny"' in game.body(model="gpt").request
    step = game.answer(replace_body(JSON_HEAD, RANKING))
    assert step.body == RANKING.replace(b'"tiny"', b'"gpt"')


def test_an_answer_without_usage_is_passed_on_as_well(play: Any) -> None:
    game = play("POST", "/v1/rerank")
    game.body()
    step = game.answer(replace_body(JSON_HEAD, b'[{"score":0.5,"index":0}]'))
    assert step.body == b'[{"score":0.5,"index":0}]'
    game.answer(None)
    assert game.end().usage is None


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/embeddings"])
def test_where_nothing_streams_a_wish_for_a_stream_goes_out_as_it_came(play: Any, path: str) -> None:
    game = play("POST", path)
    body = b'{"model":"tiny","stream":true,"input":"x"}'
    forward = game.answer(body)
    assert forward.request.endswith(b"\r\n\r\n" + body)
    # the time for a whole answer, and no stream is opened while it is made
    assert (forward.head_seconds, forward.silent_seconds) == (600, None)


def test_what_would_be_undone_in_a_stream_is_left_alone_in_a_whole_reply(play: Any) -> None:
    game = play()
    game.body(stream=True)
    assert game.answer(JSON_HEAD).filters == ()


def test_the_type_of_a_stream_is_read_in_any_case(play: Any) -> None:
    game = play()
    game.body(stream=True)
    assert game.answer(ResponseHead(200, [(b"content-type", b"Text/Event-Stream")])).events


@pytest.mark.parametrize("body", [b"{", b"{}", b'{"model":"tiny"}', b'{"model":"tiny","messages":[]}'])
def test_a_body_that_does_not_fit_is_a_400(play: Any, body: bytes) -> None:
    game = play()
    assert refusal_of(game.answer(body)).status == 400
    game.answer(None)
    assert game.end().outcome is Outcome.REFUSED


def test_a_body_that_was_not_read_is_refused_as_the_reading_says(play: Any) -> None:
    game = play()
    refusal = Refusal(status=413, code="request_too_large", message="x")
    assert refusal_of(game.answer(refusal)) is refusal


def test_an_unknown_model_is_a_404(play: Any) -> None:
    game = play()
    assert refusal_of(game.body(model="none")).code == "model_not_found"


async def test_a_large_body_is_read_and_edited_in_a_thread(play: Any) -> None:
    game = play("POST", "/v1/completions")
    body = json.dumps({"model": "gpt", "prompt": "x" * INLINE_BODY_BYTES}).encode()
    for expected in ("Asked", "Forward"):
        step = game.answer(body)
        assert isinstance(step, Park)
        body = await step.call(*step.args)
        assert type(body).__name__ == expected
    assert isinstance(game.answer(body), Forward)


async def test_a_body_of_middling_size_is_edited_in_a_thread(play: Any) -> None:
    game = play()
    step = game.body(model="gpt", user="x" * INLINE_EDIT_BYTES)
    assert isinstance(step, Park)
    assert b'"model": "tiny"' in game.answer(await step.call(*step.args)).request


@pytest.mark.parametrize("size", [0, INLINE_EDIT_BYTES], ids=["inline", "in a thread"])
@pytest.mark.parametrize("same", [False, True])
async def test_a_body_of_too_many_keys_is_a_400_and_no_engine_is_asked(play: Any, size: int, same: bool) -> None:
    game = play("POST", "/v1/completions")
    keys = ",".join(f'"k{0 if same else number}":0' for number in range(MAX_KEYS))
    step = game.answer(f'{{{keys},"prompt":"{"x" * size}","model":"gpt"}}'.encode())
    assert isinstance(step, Park) is bool(size)
    if size:
        step = game.answer(await step.call(*step.args))
    refusal = refusal_of(step)
    assert (refusal.status, refusal.code) == (400, "invalid_request")
    assert str(MAX_KEYS) in refusal.message
    game.answer(None)
    assert game.end().outcome is Outcome.REFUSED


class Work:
    """What threads do: each takes its place, and stays until the test lets it go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.began: list[int] = []

    def __call__(self, number: int) -> int:
        self.began.append(number)
        assert self.go_on.wait(20)
        return number


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 - a thread tells trio nothing
        await trio.sleep(0.001)


async def test_few_bodies_are_in_threads_at_once(nursery: trio.Nursery) -> None:
    work, done = Work(), []

    async def read(number: int) -> None:
        done.append(await _in_thread(functools.partial(work, number)))

    with trio.fail_after(60):
        try:
            for number in range(BODY_THREADS + 3):
                nursery.start_soon(read, number)
            await until(lambda: len(work.began) == BODY_THREADS)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert len(work.began) == BODY_THREADS
            # and everybody else's threads are as many as ever
            assert await trio.to_thread.run_sync(lambda: "free") == "free"
        finally:
            work.go_on.set()
        await until(lambda: len(done) == BODY_THREADS + 3)
    assert sorted(done) == list(range(BODY_THREADS + 3))


async def test_a_thread_whose_client_has_left_is_not_waited_for() -> None:
    work = Work()
    try:
        with trio.fail_after(30), trio.CancelScope() as scope:

            async def read() -> None:
                await _in_thread(functools.partial(work, 1))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await until(lambda: work.began)
                scope.cancel()
        assert scope.cancelled_caught
        assert not work.go_on.is_set()
    finally:
        work.go_on.set()


async def test_a_model_without_a_replica_is_waited_for(play: Any, gateway: Any) -> None:
    gateway.routes = []
    game = play()
    step = game.body()
    assert isinstance(step, Park)
    gateway.ready_after_wait, gateway.routes = True, [Route("rep-7", ("10.0.0.7", 1), "tiny")]
    assert game.answer(await step.call(*step.args)).address == ("10.0.0.7", 1)


async def test_a_model_that_does_not_come_up_is_refused_with_a_time(play: Any, gateway: Any) -> None:
    gateway.routes = []
    game = play()
    game.body()
    refusal = refusal_of(game.answer(False))
    assert (refusal.status, refusal.code, refusal.retry_after) == (503, "model_loading", 7)


# -- failures


ROUTES = [Route("rep-1", ("10.0.0.1", 1), "tiny"), Route("rep-2", ("10.0.0.2", 1), "tiny")]


def test_a_replica_that_fails_before_it_answers_is_left_for_another(play: Any, gateway: Any) -> None:
    gateway.routes = ROUTES
    game = play()
    game.body()
    forward = game.answer(Failure("it broke", sent=True))
    assert forward.address == ("10.0.0.2", 1)
    game.answer(JSON_HEAD)
    game.answer(Relayed(None))
    request = game.end()
    assert (request.outcome, request.replica) == (Outcome.DONE, "rep-2")
    assert gateway.taken == gateway.released == ["rep-1", "rep-2"]


@pytest.mark.parametrize(
    ("failure", "tells"),
    [
        (Failure("it broke", sent=True), True),
        (Failure("no connection within 5 s", sent=False), True),
        (Failure("node n1 has no trunk", sent=False, unreachable=True), True),
        # one that is silent has its connections, and for what is ours no engine is to blame
        (Failure("no answer within 600 s", sent=True, timed_out=True), False),
        (Failure("too many open files", sent=False, busy=True), False),
    ],
)
def test_a_connection_that_fails_is_told_of(play: Any, gateway: Any, failure: Failure, tells: bool) -> None:
    gateway.routes = ROUTES
    game = play()
    game.body()
    game.answer(failure)
    assert gateway.ejected == ([("rep-1", failure.reason)] if tells else [])


def test_an_answer_is_no_failure_of_the_connection_however_bad_it_is(play: Any, gateway: Any) -> None:
    gateway.routes = ROUTES
    game = play()
    game.body()
    game.answer(ResponseHead(503))
    game.answer(b"")
    assert gateway.taken == ["rep-1", "rep-2"]
    assert gateway.ejected == []


def test_when_all_have_failed_the_client_hears_why(play: Any, gateway: Any) -> None:
    gateway.routes = ROUTES
    game = play()
    game.body()
    game.answer(Failure("it broke", sent=True))
    refusal = refusal_of(game.answer(Failure("it broke too", sent=False)))
    assert (refusal.status, refusal.code, refusal.retry_after) == (502, "engine_failed", 5)
    assert "it broke too" in refusal.message
    game.answer(None)
    assert game.end().outcome is Outcome.ENGINE_FAILED


def test_a_node_that_can_not_be_reached_is_no_failure_of_its_engine(play: Any, gateway: Any) -> None:
    gateway.routes = ROUTES
    game = play()
    game.body()
    game.answer(Failure("node n1 has no trunk", sent=False, unreachable=True))
    refusal = refusal_of(game.answer(Failure("node n2 has no trunk", sent=False, unreachable=True)))
    assert (refusal.status, refusal.code, refusal.retry_after) == (503, "model_unreachable", 5)
    assert refusal.message == "The model tiny can't be reached now; try again in 5 s.", "a client is told of no node"
    game.answer(None)
    assert "node n2 has no trunk" in str(game.end().problem)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_an_engine_that_has_no_time_is_left_for_another(play: Any, gateway: Any, status: int) -> None:
    gateway.routes = ROUTES
    game = play()
    game.body()
    assert isinstance(game.answer(ResponseHead(status)), Collect)
    assert isinstance(game.answer(b'{"error":{"message":"Loading model","code":"loading"}}'), Forward)
    game.answer(ResponseHead(status, [(b"retry-after", b"11")]))
    refusal = refusal_of(game.answer(b'{"error":"busy"}'))
    assert (refusal.status, refusal.message, refusal.retry_after) == (status, "busy", 11)
    game.answer(None)
    assert game.end().outcome is Outcome.ENGINE_FAILED


@pytest.mark.parametrize(
    ("status", "shown", "outcome"),
    [
        (400, 400, Outcome.REFUSED),
        (429, 429, Outcome.REFUSED),
        (500, 500, Outcome.ENGINE_FAILED),
        (301, 502, Outcome.ENGINE_FAILED),
        (304, 502, Outcome.ENGINE_FAILED),
        (199, 502, Outcome.ENGINE_FAILED),
        (599, 599, Outcome.ENGINE_FAILED),
        (600, 502, Outcome.ENGINE_FAILED),
        (999, 502, Outcome.ENGINE_FAILED),
    ],
)
def test_an_engines_error_is_the_clients_and_no_other_replica_is_asked(
    play: Any, gateway: Any, status: int, shown: int, outcome: Outcome
) -> None:
    gateway.routes = ROUTES[:1]
    game = play()
    game.body()
    game.answer(ResponseHead(status, [(b"retry-after", b"Wed, 21 Oct 2015 07:28:00 GMT")]))
    refusal = refusal_of(game.answer(b'{"error":{"message":"no","code":"c","param":"p"}}'))
    assert (refusal.status, refusal.code, refusal.message, refusal.param) == (shown, "c", "no", "p")
    assert refusal.retry_after == (5 if shown in (429, 502) else None)
    game.answer(None)
    assert game.end().outcome is outcome


def test_an_answer_in_a_coding_that_nobody_asked_for_is_no_answer(play: Any, gateway: Any) -> None:
    gateway.routes = ROUTES
    game = play()
    game.body()
    assert isinstance(game.answer(ResponseHead(200, coding=b"gzip", body=b"\x1f\x8b")), Forward)
    refusal = refusal_of(game.answer(ResponseHead(400, coding=b"br")))
    assert (refusal.status, refusal.code) == (502, "engine_failed")
    assert "'br'" in refusal.message


def test_an_engine_that_is_too_slow_is_a_504_and_nobody_else_is_asked(play: Any, gateway: Any) -> None:
    gateway.routes = ROUTES
    game = play()
    game.body()
    refusal = refusal_of(game.answer(Failure("no answer within 600 s", sent=True, timed_out=True)))
    assert (refusal.status, refusal.code) == (504, "engine_timeout")
    game.answer(None)
    assert game.end().outcome is Outcome.TIMED_OUT


def test_a_silent_stream_is_opened_and_then_failures_are_events(play: Any, gateway: Any) -> None:
    gateway.routes = ROUTES
    game = play()
    game.body(stream=True)
    assert game.answer(SILENT) == Await()
    refusal = refusal_of(game.answer(Failure("it broke", sent=True)))
    assert refusal.status == 502
    game.answer(None)
    assert game.end().outcome is Outcome.ENGINE_FAILED
    assert gateway.taken == ["rep-1"]


@pytest.mark.parametrize("status", [200, 503])
def test_an_opened_stream_that_turns_out_to_be_none_ends_in_an_error(play: Any, gateway: Any, status: int) -> None:
    gateway.routes = ROUTES
    game = play()
    game.body(stream=True)
    game.answer(SILENT)
    step = game.answer(ResponseHead(status, [(b"content-type", b"application/json")]))
    if status == 503:
        step = game.answer(b'{"error":"busy"}')
    assert isinstance(step, Refuse)
    game.answer(None)
    assert game.end().outcome is Outcome.ENGINE_FAILED


@pytest.mark.parametrize(("timed_out", "outcome"), [(False, Outcome.ENGINE_FAILED), (True, Outcome.TIMED_OUT)])
def test_a_stream_that_broke_is_settled_as_such(play: Any, timed_out: bool, outcome: Outcome) -> None:
    game = play()
    game.body(stream=True)
    game.answer(EVENTS_HEAD)
    game.answer(Relayed("it went away", timed_out=timed_out))
    request = game.end()
    assert (request.outcome, request.problem) == (outcome, "it went away")


# -- the client leaves


def lead_to(game: Play, phase: str) -> None:
    if phase == "body":
        return
    game.body(stream=True)
    if phase == "silent":
        game.answer(SILENT)
    elif phase == "collect":
        game.answer(ResponseHead(400))
    elif phase == "relay":
        game.answer(EVENTS_HEAD)
    elif phase == "second replica":
        game.answer(Failure("x", sent=True))


@pytest.mark.parametrize("phase", ["body", "forward", "silent", "collect", "relay", "second replica"])
def test_a_client_that_leaves_is_settled_once_and_its_replica_released_once(
    play: Any, gateway: Any, phase: str
) -> None:
    gateway.routes = ROUTES
    game = play()
    lead_to(game, phase)
    game.steps.close()
    game.steps.close()
    game.step = None
    assert game.end().outcome is Outcome.CLIENT_LEFT


def test_an_outcome_that_is_known_better_stays(play: Any) -> None:
    game = play()
    game.request.outcome = Outcome.STOPPED
    game.steps.close()
    assert game.request.outcome is Outcome.STOPPED


def test_what_raises_is_settled_as_a_crash(play: Any, gateway: Any) -> None:
    game = play()
    lead_to(game, "forward")
    with pytest.raises(ZeroDivisionError):
        game.steps.throw(ZeroDivisionError())
    game.step = None
    assert game.end().outcome is Outcome.CRASHED


# -- the road to the pages


def test_every_other_path_is_turned_over_to_the_pages(play: Any, gateway: Any) -> None:
    gateway.pages_at = "/run/pages.sock"
    game = play(
        "GET",
        "/chat?x=1",
        cookie=b"a=1",
        connection=b"keep-alive",
        x_llmgw_exchange=b"forged",
        x_llmgw_thread=b"t-1",
        x_forwarded_for=b"1.2.3.4",
        x_request_id=b"forged",
    )
    forward = game.step
    assert isinstance(forward, Forward)
    assert (forward.address, forward.bodyless) == ("/run/pages.sock", False)
    lines = forward.request.split(b"\r\n")
    assert lines[0] == b"GET /chat?x=1 HTTP/1.1"
    assert b"host: localhost" in lines
    assert b"cookie: a=1" in lines
    assert b"x-llmgw-thread: t-1" in lines
    assert b"x-llmgw-exchange: req-1" in lines
    assert b"x-forwarded-for: 10.0.0.1" in lines
    assert not any(b"forged" in line or b"1.2.3.4" in line or line.startswith(b"connection") for line in lines)
    head = ResponseHead(
        200, [(b"content-type", b"text/html"), (b"connection", b"close"), (b"date", b"x"), (b"set-cookie", b"y")]
    )
    relay = game.answer(head)
    assert relay.headers == ((b"content-type", b"text/html"), (b"set-cookie", b"y"))
    game.answer(Relayed(None))
    assert game.end().outcome is Outcome.DONE


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("http://127.0.0.1:1/chat?x=1", b"GET /chat?x=1 HTTP/1.1"),
        ("http://127.0.0.1:1?x=1", b"GET /?x=1 HTTP/1.1"),
        ("http://127.0.0.1:1", b"GET / HTTP/1.1"),
    ],
)
def test_a_page_is_asked_for_by_path_and_under_the_name_that_was_checked(
    play: Any, gateway: Any, target: str, line: bytes
) -> None:
    gateway.pages_at = "/run/pages.sock"
    lines = play("GET", target, host=b"evil.example").step.request.split(b"\r\n")
    assert lines[0] == line
    assert [each for each in lines if each.startswith(b"host:")] == [b"host: 127.0.0.1:1"]


def test_a_page_gets_the_body_that_was_sent(play: Any, gateway: Any) -> None:
    gateway.pages_at = "/run/pages.sock"
    game = play("POST", "/login", content_length=b"4")
    assert isinstance(game.step, ReadBody)
    forward = game.answer(b"a=bc")
    assert forward.request.endswith(b"\r\ncontent-length: 4\r\n\r\na=bc")
    assert forward.request.count(b"content-length") == 1


def test_a_page_whose_body_was_not_read_is_refused(play: Any, gateway: Any) -> None:
    gateway.pages_at = "/run/pages.sock"
    game = play("POST", "/login", content_length=b"4")
    assert refusal_of(game.answer(Refusal(status=408, code="request_timeout", message="x"))).status == 408


def test_a_head_request_for_a_page_has_no_body_to_wait_for(play: Any, gateway: Any) -> None:
    gateway.pages_at = "/run/pages.sock"
    assert play("HEAD", "/").step.bodyless


def test_pages_that_are_not_up_are_said_to_be_starting(play: Any) -> None:
    assert refusal_of(play("GET", "/").step).code == "starting"


def test_a_page_that_fails_is_a_502(play: Any, gateway: Any) -> None:
    gateway.pages_at = "/run/pages.sock"
    game = play("GET", "/")
    assert refusal_of(game.answer(Failure("gone", sent=True))).code == "pages_failed"
    game.answer(None)
    assert game.end().outcome is Outcome.ENGINE_FAILED
    game = play("GET", "/")
    game.answer(ResponseHead(200))
    gateway.settled.clear()
    game.answer(Relayed("cut"))
    assert game.end().problem == "pages: cut"
