"""One request from its head to its last word: a plain generator, read top to bottom.

It decides and asks (steps.py); it moves no byte itself and knows no socket. Whatever it yields may be the last thing it
hears: the client can leave at each of them, and then ``finally`` has the last word, which is a plain call.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

import msgspec
import trio

from llmgw.config.node import Timeouts
from llmgw.core.identity import Caller
from llmgw.core.model import Model, Task
from llmgw.dialects import openai
from llmgw.dialects.refusal import Refusal
from llmgw.door.body import Asked, Fields, TooManyKeys, ask_for_usage, encode_fields, read_body, set_fields
from llmgw.door.http1 import RequestHead, ResponseHead
from llmgw.door.origin import Origins
from llmgw.door.relay import EchoAlias, Filter, StripUsage, usage_in_events, usage_in_reply
from llmgw.door.request import Outcome, Request
from llmgw.door.steps import (
    SILENT,
    Await,
    Collect,
    Destination,
    Failure,
    Forward,
    Headers,
    Park,
    ReadBody,
    Refuse,
    Relay,
    Relayed,
    Reply,
    Step,
)

CHAT = "/v1/chat/completions"
STREAMS = frozenset({CHAT, "/v1/completions"})
VECTORS = {Task.EMBED: "/v1/embeddings", Task.RERANK: "/v1/rerank"}
INFERENCE = STREAMS | set(VECTORS.values())
MODELS = "/v1/models"
HEALTH = "/health"
UNREACHABLE = "model_unreachable"
NO_ADAPTER = "adapter_not_served"
# A larger body is decoded, or edited, in a thread: 10 ms of one turn is all that everybody else can spare.
INLINE_BODY_BYTES = 1024 * 1024
INLINE_EDIT_BYTES = 64 * 1024
BODY_THREADS = 2
ENGINE_ERROR_BYTES = 256 * 1024
# An answer of these says "not me, not now": another replica may do better.
ELSEWHERE = frozenset({502, 503, 504})
STREAM_HEADERS: Headers = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
        b"expect",
        b"content-length",
    }
)
# Of ours, these are the client's to send; any other that a client sends would speak in the door's name.
CLIENT_HEADERS = frozenset({b"x-llmgw-thread", b"x-llmgw-agent", b"x-llmgw-hop"})
FORWARDED_HEADERS = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host"})

Steps = Generator[Step, Any, None]


@dataclass(frozen=True, slots=True)
class Wording:
    """How a request for one name is put to an engine: what its body must have, and the names, other than the one that
    was asked for, that the engine may answer under."""

    fields: Fields = ()
    served: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """A ready replica that was chosen, and what has to be known to speak to it: ``loras`` by its adapters' names, and
    ``base`` what a body must have that names the model itself."""

    replica: str
    address: Destination
    served_name: str
    usage_in_streams: bool = True
    loras: Mapping[str, Wording] = field(default_factory=dict, hash=False)
    base: Fields = ()


class Gateway(Protocol):
    """What an exchange may ask of the rest of the program. All but ``wait_ready`` are plain calls."""

    def identify(self, headers: Mapping[bytes, bytes]) -> Caller | Refusal:
        """Who asks."""

    def resolve(self, name: str) -> Model | None:
        """The model of that name or alias."""

    def models(self) -> list[Model]:
        """What can be asked for."""

    def created(self) -> int:
        """The time that listings give, in seconds since the epoch."""

    def choose(self, model: Model, without: Collection[str]) -> Route | None:
        """A ready replica that is none of ``without``; it counts as busier until ``release``."""

    def release(self, route: Route, *, answered: bool) -> None:
        """The request that ``choose`` gave this route to is over; whether it was answered, be it in part."""

    def eject(self, route: Route, reason: str) -> None:
        """No connection to this replica was had, or it broke before an answer: any other is to be preferred for now."""

    async def wait_ready(self, model: Model) -> bool:
        """Wait, within the program's limit, until a replica is ready. False: there is none, and ``absent`` says why."""

    def absent(self, model: Model) -> Refusal:
        """Why no replica of this model answers, and when to try again."""

    def pages(self) -> Destination | None:
        """Where everything that is no engine's is answered; None while that is not up."""

    def settle(self, request: Request) -> None:
        """The request is over: count it, log it."""


def exchange(request: Request, gateway: Gateway, origins: Origins, timeouts: Timeouts) -> Steps:
    """Answer one request."""
    try:
        refusal = origins.refuse(request.head)
        if refusal is not None:
            yield Refuse(refusal)
        elif request.path in INFERENCE and request.head.method == "POST":
            yield from _infer(request, gateway, timeouts)
        elif request.head.method == "OPTIONS":
            allowed = origins.preflight(request.head)
            yield Refuse(allowed) if isinstance(allowed, Refusal) else Reply(204, headers=allowed)
        else:
            yield from _dispatch(request, gateway, timeouts)
        if request.outcome is None:
            request.outcome = Outcome.DONE if request.status < 400 else Outcome.REFUSED
    except GeneratorExit:
        if request.outcome is None:
            request.outcome = Outcome.CLIENT_LEFT
        raise
    except Exception:
        request.outcome = Outcome.CRASHED
        raise
    finally:
        gateway.settle(request)


def _dispatch(request: Request, gateway: Gateway, timeouts: Timeouts) -> Steps:
    path, method = request.path, request.head.method
    if path in INFERENCE:
        return _not_allowed(b"POST, OPTIONS")
    if path in (HEALTH, MODELS) or path.startswith(MODELS + "/"):
        if method in ("GET", "HEAD"):
            return _look(request, gateway)
        return _not_allowed(b"GET, HEAD, OPTIONS")
    return _turn_page(request, gateway, timeouts)


def _not_allowed(allow: bytes) -> Steps:
    refusal = Refusal(status=405, code="method_not_allowed", message=f"Use {allow.decode()} here.")
    yield Refuse(refusal, ((b"allow", allow),))


def _look(request: Request, gateway: Gateway) -> Steps:
    """What the catalog knows, answered while no engine is up as well."""
    if request.path == HEALTH:
        yield Reply(200)
        return
    caller = gateway.identify(request.head.headers)
    if isinstance(caller, Refusal):
        yield Refuse(caller)
    elif request.path in (MODELS, MODELS + "/"):
        yield Reply(200, openai.list_models(gateway.models(), gateway.created()))
    else:
        # an id may have slashes, raw or escaped
        name = unquote(request.path[len(MODELS) + 1 :], errors="replace")
        model = gateway.resolve(name)
        if model is None:
            yield Refuse(_unknown_model(name))
        else:
            yield Reply(200, openai.show_model(model, name, gateway.created()))


def _unknown_model(name: str) -> Refusal:
    return Refusal(
        status=404,
        code="model_not_found",
        message=f"The model {name[:200]!r} does not exist here. GET /v1/models lists what does.",
        param="model",
    )


# -- the road to an engine


def _infer(request: Request, gateway: Gateway, timeouts: Timeouts) -> Steps:
    caller = gateway.identify(request.head.headers)
    if isinstance(caller, Refusal):
        yield Refuse(caller)
        return
    refusal = _unreadable(request.head)
    if refusal is not None:
        yield Refuse(refusal)
        return
    if request.body is None:
        read: bytes | Refusal = yield ReadBody()
        if isinstance(read, Refusal):
            yield Refuse(read)
            return
        request.body = read
        # the request holds it, and lets go of it when an engine has answered; this frame lasts as long as a stream
        del read
    asked: Asked | Refusal
    chat, streams = request.path == CHAT, request.path in STREAMS
    if len(request.body) <= INLINE_BODY_BYTES:
        asked = read_body(request.body, chat=chat, streams=streams)
    else:
        asked = yield Park(_in_thread, (functools.partial(read_body, request.body, chat=chat, streams=streams),))
    if isinstance(asked, Refusal):
        yield Refuse(asked)
        return
    model = gateway.resolve(asked.model)
    if model is None:
        yield Refuse(_unknown_model(asked.model))
        return
    request.model = model.name
    if model.task is not Task.CHAT and request.path in STREAMS:
        yield Refuse(_wrong_path(model, asked.model))
        return
    adapter = asked.model != model.name and model.find_lora(asked.model) is not None
    call = _Call(request, gateway, timeouts, asked, adapter)
    tried: tuple[str, ...] = ()
    while True:
        route = gateway.choose(model, tried)
        if route is None and refusal is None and (yield Park(gateway.wait_ready, (model,))):
            continue
        if route is None:
            if refusal is not None and refusal.code not in (UNREACHABLE, NO_ADAPTER):
                request.outcome = Outcome.ENGINE_FAILED
            yield Refuse(refusal or gateway.absent(model))
            return
        try:
            failed = yield from _ask(call, route)
        finally:
            gateway.release(route, answered=request.first_byte_at is not None)
        if failed is None:
            return
        # one that could not even be asked says nothing about one that was
        refusal = failed if refusal is None or failed.code != NO_ADAPTER else refusal
        # another one, as long as no byte of an engine went out
        tried = (*tried, route.replica)


async def _in_thread(call: Any) -> Any:
    # few at a time, apart from everybody else's threads; one whose client has left is not waited for
    return await trio.to_thread.run_sync(call, limiter=_limiter(), abandon_on_cancel=True)


_limiters: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("llmgw.door.bodies")


def _limiter() -> trio.CapacityLimiter:
    try:
        return _limiters.get()
    except LookupError:
        limiter = trio.CapacityLimiter(BODY_THREADS)
        _limiters.set(limiter)
        return limiter


def _unreadable(head: RequestHead) -> Refusal | None:
    headers = head.headers
    if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
        return Refusal(status=415, code="unsupported_encoding", message="Send the body without Content-Encoding.")
    if headers.get(b"content-type", b"")[:10].lower() == b"multipart/":
        return Refusal(status=415, code="unsupported_media_type", message="Send the body as application/json.")
    return None


class _Call(msgspec.Struct, frozen=True):
    """What is wanted of an engine: for whom, within what times, what the body says, and whether it names an adapter."""

    request: Request
    gateway: Gateway
    timeouts: Timeouts
    asked: Asked
    adapter: bool

    def word(self, route: Route) -> Wording | None:
        """How it is put to this replica; None where that has no way to be asked for the adapter."""
        name = self.asked.model
        if self.adapter:
            return route.loras.get(name)
        if name == route.served_name and not route.base:
            return VERBATIM
        return _word_base(name, route.served_name, route.base)


VERBATIM = Wording()


@functools.lru_cache(maxsize=1024)
def _word_base(name: str, served_name: str, base: Fields) -> Wording:
    if name == served_name:
        return Wording(base)
    return Wording((*encode_fields({"model": served_name}), *base), (served_name,))


def _ask(call: _Call, route: Route) -> Generator[Step, Any, Refusal | None]:
    """Ask one replica. None when the client has its answer; a Refusal when another replica may still be asked."""
    request, asked = call.request, call.asked
    wording = call.word(route)
    if wording is None:
        return _no_adapter(request, asked)
    request.replica = route.replica
    if len(request.body or b"") <= INLINE_EDIT_BYTES:
        step: Step = _forward(route, call, wording)
    else:
        step = yield Park(_in_thread, (functools.partial(_forward, route, call, wording),))
    answer: ResponseHead | Failure | object = yield step
    if isinstance(step, Refuse):
        return None
    del step
    if answer is SILENT:
        answer = yield Await()
    if isinstance(answer, Failure):
        if not answer.busy and not answer.timed_out:
            call.gateway.eject(route, answer.reason)
        return (yield from _report_failure(request, route, answer))
    assert isinstance(answer, ResponseHead)  # noqa: S101 - what is left of Forward's answers
    if answer.coding is not None:
        reason = (
            f"its answer has the Content-Encoding {answer.coding.decode('latin-1')[:100]!r}, which nobody asked for"
        )
        return (yield from _report_failure(request, route, Failure(reason, sent=True)))
    if not 200 <= answer.status < 300:
        return (yield from _report_engine_error(request, answer))
    content_type = answer.get(b"content-type") or b"application/json"
    events = content_type[:17].lower() == b"text/event-stream"
    if request.opened and not events:
        request.outcome = Outcome.ENGINE_FAILED
        yield Refuse(
            Refusal(status=502, code="engine_failed", message="The engine answered a stream with something else.")
        )
        return None
    filters: tuple[Filter, ...] = (StripUsage(),) if events and _is_asked_for_usage(route, asked) else ()
    if wording.served:
        filters += (EchoAlias(wording.served, asked.model, whole=not events),)
    if answer.body is not None and not events:
        out = answer.body
        for each in filters:
            out = each.feed(out) + each.end()
        request.usage = usage_in_reply(answer.body)
        yield Reply(answer.status, out, content_type)
        return None
    headers = ((b"content-type", content_type), *(STREAM_HEADERS if events else ()))
    relayed: Relayed = yield Relay(answer, headers, events, filters)
    usage = usage_in_events(relayed.last) if events else usage_in_reply(relayed.last)
    request.usage = usage
    if relayed.problem is not None:
        request.problem = relayed.problem
        request.outcome = request.outcome or (Outcome.TIMED_OUT if relayed.timed_out else Outcome.ENGINE_FAILED)
    return None


def _wrong_path(model: Model, asked: str) -> Refusal:
    """Its engine may answer all the same: with words that the model was never made to write."""
    does, path = ("embeds text", VECTORS[Task.EMBED]) if model.task is Task.EMBED else ("ranks", VECTORS[Task.RERANK])
    message = f"The model {asked!r} {does} and does not chat: ask for it at {path}."
    return Refusal(status=400, code="wrong_task", message=message, param="model")


def _no_adapter(request: Request, asked: Asked) -> Refusal:
    """Better said than answered by the base model, which would look as if the adapter had been used."""
    message = (
        f"The adapter {asked.model!r} of the model {request.model} can't be asked for: its engine has no way to choose "
        f"an adapter for one request. Ask for {request.model}."
    )
    return Refusal(status=400, code=NO_ADAPTER, message=message, param="model")


def _is_asked_for_usage(route: Route, asked: Asked) -> bool:
    """llmgw asks on its own account, and takes the answer out again."""
    return asked.stream and not asked.wants_usage and route.usage_in_streams


def _forward(route: Route, call: _Call, wording: Wording) -> Forward | Refuse:
    """The request as the engine gets it."""
    request, asked, timeouts = call.request, call.asked, call.timeouts
    body = request.body or b""
    try:
        if _is_asked_for_usage(route, asked):
            body = ask_for_usage(body, names_stream_options=asked.names_stream_options)
        if wording.fields:
            body = set_fields(body, wording.fields)
    except TooManyKeys as error:
        return Refuse(Refusal(status=400, code="invalid_request", message=str(error)))
    request_bytes = _request_bytes(request, route.address, body)
    if asked.stream:
        return Forward(route.address, request_bytes, False, timeouts.response_header, timeouts.stream_open_after)
    return Forward(route.address, request_bytes, False, timeouts.generation or None)


def _request_bytes(request: Request, address: Destination, body: bytes) -> bytes:
    lines = _request_lines(request.path, address)
    return b"%b%b\r\ncontent-length: %d\r\n\r\n%b" % (lines, request.id.encode(), len(body), body)


@functools.lru_cache(maxsize=1024)
def _request_lines(path: str, address: Destination) -> bytes:
    # whoever sits behind a trunk has no address here
    host = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "localhost"
    return (f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nx-request-id: ").encode()


def _report_failure(request: Request, route: Route, failure: Failure) -> Generator[Step, Any, Refusal | None]:
    request.problem = f"replica {route.replica}: {failure.reason}"
    if failure.busy:
        yield Refuse(_no_resources(failure))
        return None
    if failure.timed_out:
        request.outcome = Outcome.TIMED_OUT
        message = f"The engine did not answer in time: {failure.reason}."
        yield Refuse(Refusal(status=504, code="engine_timeout", message=message))
        return None
    if failure.unreachable:
        # (the reason names the node, and is in the log)
        message = f"The model {request.model} can't be reached now; try again in 5 s."
        refusal = Refusal(status=503, code=UNREACHABLE, message=message, retry_after=5)
    else:
        message = f"The engine failed before it answered: {failure.reason}."
        refusal = Refusal(status=502, code="engine_failed", message=message, retry_after=5)
    if not request.opened:
        return refusal
    request.outcome = Outcome.ENGINE_FAILED
    yield Refuse(refusal)
    return None


def _no_resources(failure: Failure) -> Refusal:
    message = f"This server is at its limits: {failure.reason}. Try again, or give it more (ulimit -n)."
    return Refusal(status=503, code="server_busy", message=message, retry_after=2)


def _report_engine_error(request: Request, answer: ResponseHead) -> Generator[Step, Any, Refusal | None]:
    body: bytes = yield Collect(ENGINE_ERROR_BYTES)
    refusal = openai.read_engine_error(answer.status, body)
    status = refusal.status
    request.problem = f"the engine answered {answer.status}: {refusal.message[:300]}"
    if status in ELSEWHERE or status == 429:
        after = answer.get(b"retry-after") or b""
        seconds = int(after) if after.isdigit() and len(after) < 6 else 5
        refusal = Refusal(
            status=status, code=refusal.code, message=refusal.message, param=refusal.param, retry_after=seconds
        )
    if status in ELSEWHERE and not request.opened:
        return refusal
    if status >= 500:
        request.outcome = Outcome.ENGINE_FAILED
    yield Refuse(refusal)
    return None


# -- the road to the pages


def _turn_page(request: Request, gateway: Gateway, timeouts: Timeouts) -> Steps:
    """Everything that is no engine's: handed to the pages with its body, under the door's own word for who asks."""
    address = gateway.pages()
    if address is None:
        message = "The pages are not up yet."
        yield Refuse(Refusal(status=503, code="starting", message=message, retry_after=1))
        return
    if request.body is None and request.head.has_body:
        read: bytes | Refusal = yield ReadBody()
        if isinstance(read, Refusal):
            yield Refuse(read)
            return
        request.body = read
        del read
    answer: ResponseHead | Failure = yield Forward(
        address,
        _page_request(request, request.body or b""),
        bodyless=request.head.method == "HEAD",
        head_seconds=timeouts.response_header,
    )
    if isinstance(answer, Failure):
        request.problem = f"pages: {answer.reason}"
        if answer.busy:
            yield Refuse(_no_resources(answer))
            return
        request.outcome = Outcome.ENGINE_FAILED
        yield Refuse(Refusal(status=502, code="pages_failed", message="The page could not be made.", retry_after=1))
        return
    headers = tuple((name, value) for name, value in answer.headers if name not in HOP_BY_HOP and name != b"date")
    relayed: Relayed = yield Relay(answer, headers)
    if relayed.problem is not None:
        request.problem, request.outcome = f"pages: {relayed.problem}", request.outcome or Outcome.ENGINE_FAILED


def _page_request(request: Request, body: bytes) -> bytes:
    head = request.head
    lines = [b"%b %b HTTP/1.1" % (head.method.encode(), head.origin_form)]
    for name, value in head.headers.items():
        ours = name.startswith(b"x-llmgw-") and name not in CLIENT_HEADERS
        if not (ours or name in HOP_BY_HOP or name in FORWARDED_HEADERS or name in (b"host", b"x-request-id")):
            lines.append(b"%b: %b" % (name, value))
    # the name that was checked, which is not the Host's where the target has one of its own
    lines.append(b"host: %b" % (head.authority or b"localhost"))
    lines.append(f"x-forwarded-for: {request.peer}\r\nx-llmgw-exchange: {request.id}".encode())
    if head.has_body or body:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
