"""One token, asked of an engine that says it is ready: several processes may pass health and hang at their first
collective."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from llmgw.core.model import Task
from llmgw.host.http import Reply, post
from llmgw.host.ports import HOST

TRY_SECONDS = 60.0
SHOWN_CHARS = 300

_WORD = "Hi"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request that makes an engine compute as little as it can."""

    path: str
    body: dict[str, object]


def build_asks(task: Task, served_name: str) -> tuple[Ask, ...]:
    """What is asked for the task, in this order until one is answered: a model without a chat template refuses a chat,
    and completes a text."""
    match task:
        case Task.EMBED:
            return (Ask(path="/v1/embeddings", body={"model": served_name, "input": _WORD}),)
        case Task.RERANK:
            return (Ask(path="/v1/rerank", body={"model": served_name, "query": _WORD, "documents": [_WORD]}),)
        case Task.CHAT:
            chat: dict[str, object] = {"model": served_name, "messages": [{"role": "user", "content": _WORD}]}
            return (
                Ask(path="/v1/chat/completions", body=chat | {"max_tokens": 1}),
                Ask(path="/v1/completions", body={"model": served_name, "prompt": _WORD, "max_tokens": 1}),
            )


async def fail_to_answer(port: int, task: Task, served_name: str) -> str | None:
    """None once one of the asks is answered; else what came in its place, in a few words."""
    said = None
    for ask in build_asks(task, served_name):
        reply: Reply | None = None
        with trio.move_on_after(TRY_SECONDS) as limit:
            reply = await post(HOST, port, ask.path, ask.body)
        if reply is not None and reply.status is not None and 200 <= reply.status < 300:
            return None
        if limit.cancelled_caught:
            return said or f"{ask.path} did not answer within {TRY_SECONDS:g} s"
        if reply is None or reply.status is None:
            return said or f"{ask.path} did not answer"
        said = said or f"{ask.path} answered {reply.status} {' '.join(reply.body.split())[:SHOWN_CHARS]}".rstrip()
        # Only a refusal of this kind of request is a reason to try the other kind.
        if not 400 <= reply.status < 500:
            break
    return said
