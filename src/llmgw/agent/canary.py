"""One token, asked of an engine that says it is ready: several processes may pass health and hang at their first
collective."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

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


async def fail_to_answer(hands: Hands, port: int, asks: Iterable[Ask], hide: Callable[[str], str] = str) -> str | None:
    """None once one of the asks is answered; else what came in its place, in a few words, without what ``hide`` takes
    out."""
    said = None
    for ask in asks:
        reply: Reply | None = None
        with trio.move_on_after(TRY_SECONDS) as limit:
            reply = await hands.post(port, ask.path, ask.body)
        if reply is not None and reply.status is not None and 200 <= reply.status < 300:
            return None
        if limit.cancelled_caught:
            return said or f"{ask.path} did not answer within {TRY_SECONDS:g} s"
        if reply is None or reply.status is None:
            return said or f"{ask.path} did not answer"
        answer = hide(" ".join(reply.body.split()))[:SHOWN_CHARS]
        said = said or f"{ask.path} answered {reply.status} {answer}".rstrip()
        # Only a refusal of this kind of request is a reason to try the other kind.
        if not 400 <= reply.status < 500:
            break
    return said
