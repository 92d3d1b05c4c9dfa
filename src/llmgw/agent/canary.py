"""One token, asked of an engine that says it is ready: several processes may pass health and hang at their first
collective."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import trio

from llmgw.agent.hands import Hands
from llmgw.core.model import Task
from llmgw.host.http import Reply

TRY_SECONDS = 60.0
SHOWN_CHARS = 300

_WORD = "Hi"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request that makes an engine compute as little as it can."""

    path: str
    body: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """What came in the place of a token, in a few words: ``silent``: nothing did; ``refused``: the engine does not take
    such a request, which tells nothing of whether it computes."""

    words: str
    silent: bool = False
    refused: bool = False


# What proves a task, in this order until one is answered: a model without a chat template refuses a chat, and
# completes a text.
_PROOFS: dict[Task, tuple[Ask, ...]] = {
    Task.CHAT: (
        Ask(path="/v1/chat/completions", body={"messages": [{"role": "user", "content": _WORD}], "max_tokens": 1}),
        Ask(path="/v1/completions", body={"prompt": _WORD, "max_tokens": 1}),
    ),
    Task.EMBED: (Ask(path="/v1/embeddings", body={"input": _WORD}),),
    Task.RERANK: (Ask(path="/v1/rerank", body={"query": _WORD, "documents": [_WORD]}),),
}


def list_paths(task: Task) -> str:
    """The paths that the task can be asked at, in words."""
    return ", ".join(ask.path for ask in _PROOFS[task])


def build_asks(task: Task, served_name: str, api_paths: Collection[str]) -> tuple[Ask, ...]:
    """What is asked for the task of an engine that has these paths; () where it has none of the task's."""
    named = {"model": served_name}
    return tuple(Ask(path=ask.path, body=named | ask.body) for ask in _PROOFS[task] if ask.path in api_paths)


async def ask_for_token(
    hands: Hands, port: int, asks: Iterable[Ask], hide: Callable[[str], str] = str, limit_seconds: float = TRY_SECONDS
) -> Missed | None:
    """None once one of the asks is answered, for each of which there is so much time; else what came in its place,
    without what ``hide`` takes out."""
    first: Missed | None = None
    for ask in asks:
        reply: Reply | None = None
        with trio.move_on_after(limit_seconds) as limit:
            reply = await hands.post(port, ask.path, ask.body)
        if reply is not None and reply.status is not None and 200 <= reply.status < 300:
            return None
        if limit.cancelled_caught:
            return _join(first, Missed(words=f"{ask.path} did not answer within {limit_seconds:g} s", silent=True))
        if reply is None or reply.status is None:
            return _join(first, Missed(words=f"{ask.path} did not answer", silent=True))
        answer = hide(" ".join(reply.body.split()))[:SHOWN_CHARS]
        words = f"{ask.path} answered {reply.status} {answer}".rstrip()
        first = _join(first, Missed(words=words, refused=_is_refusal(reply.status)))
        # Only a refusal of this kind of request is a reason to try the other kind.
        if not 400 <= reply.status < 500:
            break
    return first


def _join(first: Missed | None, last: Missed) -> Missed:
    """The words of the first, and what became of it in the end."""
    return last if first is None else replace(last, words=first.words)


def _is_refusal(status: int) -> bool:
    # "Not now" is no word on the request.
    return 400 <= status < 500 and status not in (408, 425, 429)
