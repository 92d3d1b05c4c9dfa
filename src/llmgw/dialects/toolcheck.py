"""tool-check: the requests that show whether tool calls work, and what their answers mean.

An exchange is a plain generator: whoever drives it sends each request and gives its reply back, over whatever there is.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from llmgw.dialects.openai import read_engine_error
from llmgw.dialects.toolreplies import Outcome, Reply, Said, read_plain, read_prompt_tokens, read_streamed

CHAT_PATH = "/v1/chat/completions"
# A model that reasons, on a machine that is busy, takes its time; the whole ends before whoever asked gives up.
EXCHANGE_SECONDS = 120.0
CHECK_SECONDS = 300.0
TOOL = "get_weather"
# A model that reasons does so for several hundred tokens before it calls. One that does not see its tools has nothing
# to reason about, and when it is small it may talk to the end: its check is not to take minutes.
MAX_TOKENS = 1024
UNSEEN_TOKENS = 256
COUNTED_TOKENS = 1
MAX_WORDS = 400
# As the others are refused: whoever asks is not let in, or is to come again later.
_NOT_NOW = frozenset({401, 408, 429, 502, 503, 504})

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Get the current weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The name of the city, such as Paris."}},
                "required": ["city"],
            },
        },
    }
]
_MESSAGES = [
    {
        "role": "user",
        "content": "What is the weather in Paris right now? Call the tool get_weather to find out; do not guess.",
    }
]
_FORCED = {"type": "function", "function": {"name": TOOL}}
# What a server may refuse by name, and a check can do without.
_SPARED = ("max_tokens", "temperature")


class Verdict(StrEnum):
    """What the answers mean together."""

    WORKS = "works"
    PARSER_MISSED = "parser_missed"
    TEMPLATE_DROPS = "template_drops"
    IGNORES = "ignores"
    REFUSES = "refuses"
    PARTLY = "partly"
    UNTOLD = "untold"
    UNASKED = "unasked"


class ParserFlag(Protocol):
    """What makes an engine parse tool calls: its flag, the value that it has, the one that may fit, and a switch that
    has to stand beside it."""

    @property
    def flag(self) -> str: ...
    @property
    def given(self) -> str | None: ...
    @property
    def suggested(self) -> str | None: ...
    @property
    def beside(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """Which flag parses the calls, by the title of the engine (None: it has no such flag).

    ``sure`` False: any of these may be the one that serves. ``profile``: llmgw runs it, by this profile, and gives the
    ``keyed`` ones their flag by its ``tool_parser``.
    """

    by_engine: Mapping[str, ParserFlag | None]
    keyed: frozenset[str] = frozenset()
    sure: bool = True
    profile: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: the body of a POST to CHAT_PATH; ``streamed`` is how its reply comes."""

    name: str
    body: bytes
    streamed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request by its name, and in a few words what came of it."""

    request: str
    outcome: Outcome
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was asked and what came; the counts of prompt tokens are None where no reply told them. ``lost``: the first
    that ended without an answer, for the engine or the connection failed."""

    exchanges: tuple[Exchange, ...]
    calls: Mapping[str, Said]
    lost: Exchange | None = None
    tokens_without: int | None = None
    tokens_with: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdict, what it means in a sentence, what to do about it, and what it rests on."""

    verdict: Verdict
    message: str
    remedy: str | None
    exchanges: tuple[Exchange, ...]
    tokens_without: int | None = None
    tokens_with: int | None = None


def ask_about_tools(model: str) -> Generator[Request, Reply, Findings]:
    """Ask ``model``, as the endpoint names it: yields each request, is sent its reply, and returns what was found."""
    spared: dict[str, object] = {"max_tokens": MAX_TOKENS, "temperature": 0}
    exchanges: list[Exchange] = []
    lost: list[Exchange] = []
    counts: list[int | None] = [None, None]
    fields: dict[str, object] = {}
    for at, name in enumerate(("without tools", "with tools")):
        tiny = {**spared, "max_tokens": COUNTED_TOKENS} if "max_tokens" in spared else {**spared}
        reply = yield from _ask(Request(name=name, body=_body(model, tiny, fields)), model, fields, spared, tiny)
        counts[at] = read_prompt_tokens(reply)
        exchanges.append(_tell_count(name, reply, counts[at]))
        lost += exchanges[-1:] if _is_lost(reply) else ()
        if not at and exchanges[0].outcome is not Outcome.ANSWERED:
            # What it does not do without tools either is not the tools' fault.
            return Findings(exchanges=tuple(exchanges), calls={})
        fields = {"tools": _TOOLS}
    if "max_tokens" in spared and counts[0] is not None and counts[0] == counts[1]:
        spared["max_tokens"] = UNSEEN_TOKENS
    calls: dict[str, Said] = {}
    for choice, words in (("auto", "auto"), (_FORCED, "forced")):
        for streamed in (False, True):
            name = f"{words}, streamed" if streamed else words
            fields = {"tools": _TOOLS, "tool_choice": choice, "stream": streamed}
            request = Request(name=name, body=_body(model, spared, fields), streamed=streamed)
            reply = yield from _ask(request, model, fields, spared, spared)
            read = read_streamed if streamed else read_plain
            said = _refused(reply) or read(reply, TOOL, forced=words == "forced")
            calls[name] = said
            exchanges.append(Exchange(request=name, outcome=said.outcome, answer=said.words))
            lost += exchanges[-1:] if _is_lost(reply) or said.broken_off else ()
    return Findings(
        exchanges=tuple(exchanges),
        calls=calls,
        lost=next(iter(lost), None),
        tokens_without=counts[0],
        tokens_with=counts[1],
    )


def advance(steps: Generator[Request, Reply, Findings], reply: Reply | None) -> Request | Findings:
    """The next request after this reply (None: the first), or what was found. Reading a long reply takes a while."""
    try:
        return next(steps) if reply is None else steps.send(reply)
    except StopIteration as done:
        found: Findings = done.value
        return found


def _ask(
    request: Request, model: str, fields: Mapping[str, object], spared: dict[str, object], sent: Mapping[str, object]
) -> Generator[Request, Reply, Reply]:
    """The reply; where a field that can be spared is what was refused, the reply without it."""
    sent = dict(sent)
    while True:
        reply = yield request
        refused = _find_spared(reply, sent)
        if refused is None:
            return reply
        # nor is it sent with what follows
        spared.pop(refused, None)
        del sent[refused]
        request = Request(name=request.name, body=_body(model, sent, fields), streamed=request.streamed)


def _find_spared(reply: Reply, sent: Mapping[str, object]) -> str | None:
    if reply.problem is not None or reply.status not in {400, 422}:
        return None
    refusal = read_engine_error(reply.status, reply.body)
    for field in _SPARED:
        if field in sent and (refusal.param == field or field in refusal.message):
            return field
    # A context that is smaller than what was asked for may be large enough for what is needed.
    return "max_tokens" if refusal.code == "context_length_exceeded" and "max_tokens" in sent else None


def _body(model: str, spared: Mapping[str, object], fields: Mapping[str, object]) -> bytes:
    body = {"model": model, "messages": _MESSAGES, **spared, **fields}
    return json.dumps(body, separators=(",", ":")).encode()


def _tell_count(name: str, reply: Reply, count: int | None) -> Exchange:
    refused = _refused(reply)
    if refused is not None:
        return Exchange(request=name, outcome=refused.outcome, answer=refused.words)
    said = read_plain(reply, TOOL, forced=False)
    if said.outcome is Outcome.FAILED:
        return Exchange(request=name, outcome=said.outcome, answer=said.words)
    words = f"{count} prompt tokens" if count is not None else "answered, and does not count its prompt tokens"
    return Exchange(request=name, outcome=Outcome.ANSWERED, answer=words)


def _is_lost(reply: Reply) -> bool:
    """Whether it is no answer at all: nothing came, or not to an end, or only the word that it can't be had now."""
    return reply.problem is not None or reply.status in _NOT_NOW


def _refused(reply: Reply) -> Said | None:
    """What an answer that is no success says."""
    if reply.problem is not None or reply.status == 200:
        return None
    message = _short(read_engine_error(reply.status, reply.body).message)
    outcome = Outcome.FAILED if reply.status in _NOT_NOW or reply.status < 400 else Outcome.REFUSED
    return Said(outcome=outcome, words=f"{reply.status}: {message}", text=message)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_WORDS else f"{line[:MAX_WORDS]}…"


# the verdict


def judge(found: Findings, parsers: Parsers) -> Report:
    """What the findings mean, and what is to be done."""
    verdict = _decide(found)
    message, remedy = _WORDS[verdict](found, parsers)
    return Report(
        verdict=verdict,
        message=message,
        remedy=remedy,
        exchanges=found.exchanges,
        tokens_without=found.tokens_without,
        tokens_with=found.tokens_with,
    )


def _decide(found: Findings) -> Verdict:
    if not found.calls:
        return Verdict.UNASKED
    outcomes = {said.outcome for said in found.calls.values()}
    if outcomes == {Outcome.CALLED}:
        return Verdict.WORKS
    if found.lost is not None:
        # What the others say was said by an engine that was about to end, or by another one.
        return Verdict.UNASKED
    auto = {said.outcome for name, said in found.calls.items() if name.startswith("auto")}
    # A forced call may come of what the engine lets a model say at all: by itself the model calls only under auto.
    if Outcome.CALLED not in auto and Outcome.FLAWED not in auto:
        if Outcome.WRITTEN in outcomes:
            return Verdict.PARSER_MISSED
        if found.tokens_with is not None and found.tokens_with == found.tokens_without:
            return Verdict.TEMPLATE_DROPS
    if outcomes & {Outcome.CALLED, Outcome.FLAWED}:
        return Verdict.PARTLY
    if Outcome.REFUSED in outcomes:
        return Verdict.REFUSES
    if Outcome.FAILED in outcomes:
        return Verdict.UNASKED
    if Outcome.ANSWERED not in outcomes or found.tokens_with is None or found.tokens_without is None:
        return Verdict.UNTOLD
    return Verdict.IGNORES


Words = tuple[str, str | None]


def _works(found: Findings, parsers: Parsers) -> Words:
    return "tool calls work, whole and streamed, forced and by the model's own choice", None


def _parser_missed(found: Findings, parsers: Parsers) -> Words:
    said = next(said for said in found.calls.values() if said.outcome is Outcome.WRITTEN)
    message = f"the model calls and the engine does not parse it: the call comes as text ({said.notation})"
    return message, _name_parsers(parsers)


def _template_drops(found: Findings, parsers: Parsers) -> Words:
    message = (
        "the chat template drops the tools: the prompt has "
        f"{found.tokens_with} tokens with them and without, so the model never sees them"
    )
    if Outcome.CALLED in {said.outcome for said in found.calls.values()}:
        message += "; a forced call comes all the same, for the engine lets it say nothing else"
    remedy = "serve a model whose chat template knows tools, or give the engine such a template; no parser helps here"
    return message, remedy


def _ignores(found: Findings, parsers: Parsers) -> Words:
    message = (
        "the model ignores its tools: its template shows them "
        f"({found.tokens_with} prompt tokens with them, {found.tokens_without} without), and it does not call"
    )
    return message, "use a model that is trained for tools, or one that is larger or less quantized"


def _refuses(found: Findings, parsers: Parsers) -> Words:
    said = next(said for said in found.calls.values() if said.outcome is Outcome.REFUSED)
    named = any(flag is not None and flag.flag in said.text for flag in parsers.by_engine.values())
    remedy = _name_parsers(parsers) if named else None
    return f"the endpoint refuses tools ({said.words})", remedy


def _partly(found: Findings, parsers: Parsers) -> Words:
    working = [name for name, said in found.calls.items() if said.outcome is Outcome.CALLED]
    failing = [f"not {name} ({said.words})" for name, said in found.calls.items() if said.outcome is not Outcome.CALLED]
    message = f"tool calls work in part: {', '.join((*(f'{name} works' for name in working), *failing))}"
    refused = [said.text for said in found.calls.values() if said.outcome is Outcome.REFUSED]
    flags = [flag.flag for flag in parsers.by_engine.values() if flag is not None]
    if any(flag in text for flag in flags for text in refused) or Outcome.WRITTEN in _outcomes(found):
        return message, _name_parsers(parsers)
    return message, "let clients ask in a way that works; a newer release of the engine may do better"


def _untold(found: Findings, parsers: Parsers) -> Words:
    if Outcome.ANSWERED not in _outcomes(found):
        message = "no call came, and it can't be told why: the answer was cut before the model came to one"
        return message, "give the model more room (its context length, or a limit on what it writes), and check again"
    message = (
        "no call came, and it can't be told whether the chat template drops the tools or the model ignores them: "
        "the endpoint does not count its prompt tokens"
    )
    return message, "ask the engine itself rather than what stands before it"


def _unasked(found: Findings, parsers: Parsers) -> Words:
    failed = found.lost or next(each for each in found.exchanges if each.outcome in {Outcome.FAILED, Outcome.REFUSED})
    return f"it could not be asked ({failed.request}): {failed.answer}", None


def _outcomes(found: Findings) -> set[Outcome]:
    return {said.outcome for said in found.calls.values()}


_WORDS = {
    Verdict.WORKS: _works,
    Verdict.PARSER_MISSED: _parser_missed,
    Verdict.TEMPLATE_DROPS: _template_drops,
    Verdict.IGNORES: _ignores,
    Verdict.REFUSES: _refuses,
    Verdict.PARTLY: _partly,
    Verdict.UNTOLD: _untold,
    Verdict.UNASKED: _unasked,
}


def _name_parsers(parsers: Parsers) -> str:
    named = [_name_parser(title, flag, parsers) for title, flag in parsers.by_engine.items()]
    if not named:
        return "look how the engine is told which parser the model's calls need"
    return "; ".join(named) if parsers.sure else f"it depends on the engine: {'; '.join(named)}"


def _name_parser(title: str, flag: ParserFlag | None, parsers: Parsers) -> str:
    if flag is None:
        return f"{title} has no flag for it: it goes by the model's chat template, so give it one that fits"
    keyed, value = title in parsers.keyed and parsers.profile is not None, flag.suggested or "VALUE"
    if flag.given is not None and flag.given.startswith("-"):
        return f"give {title} {flag.flag} in the place of {flag.given}"
    if flag.given is not None:
        where = f"tool_parser is {flag.given} in profile {parsers.profile}" if keyed else f"{flag.flag} is {flag.given}"
        better = f"; {value} may" if flag.suggested and flag.suggested != flag.given else ""
        return f"{where} and does not fit what came{better} ({title})"
    if keyed:
        return f"set tool_parser: {value} in profile {parsers.profile} ({flag.flag} of {title})"
    if parsers.profile is not None:
        return f"put {flag.flag} {value} into args of profile {parsers.profile} ({title})"
    beside = f"{flag.beside} " if flag.beside is not None else ""
    return f"start {title} with {beside}{flag.flag} {value}"
