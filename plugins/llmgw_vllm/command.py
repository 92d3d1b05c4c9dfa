"""The command line of one shard: ``vllm serve`` with every fact of a launch, and the profile's args last."""

from __future__ import annotations

import json
from collections.abc import Iterator

from llmgw.engines import Launch, Lora, Task, is_given
from llmgw_vllm.flags import STYLE
from llmgw_vllm.releases import knows

# What releases until 0.13 have in the place of --runner. A reranker is one that scores.
_OLD_TASKS = {Task.EMBED: "embed", Task.RERANK: "score"}

_GENERATION = "--override-generation-config"


def build(launch: Launch) -> tuple[str, ...]:
    """The words of the command. A flag that args give already is left to them."""
    # No flag that takes several values may be the last: it would take what args begin with.
    return (
        *(*launch.program, "serve", launch.source, "--served-model-name", launch.served_name),
        *("--host", launch.host, "--port", str(launch.port)),
        *_shape(launch),
        *_model(launch),
        *_parsers(launch),
        *_reports(launch),
        *launch.args,
    )


def is_up_without_http(launch: Launch) -> bool:
    """Whether this shard of a group listens for none: only rank 0 does."""
    return launch.count > 1 and launch.rank > 0


def _shape(launch: Launch) -> Iterator[str]:
    if launch.tp > 1:
        yield from ("--tensor-parallel-size", str(launch.tp))
    if launch.pp > 1:
        yield from ("--pipeline-parallel-size", str(launch.pp))
    if launch.count <= 1:
        return
    # Without Ray, which before 0.11.1 is the only way over several nodes.
    yield from ("--nnodes", str(launch.count), "--node-rank", str(launch.rank))
    if launch.rendezvous is not None:
        address, _, port = launch.rendezvous.rpartition(":")
        yield from ("--master-addr", address.strip("[]"), "--master-port", port)
    if not is_given(launch.args, STYLE, "--distributed-executor-backend"):
        yield from ("--distributed-executor-backend", "mp")
    if is_up_without_http(launch):
        yield "--headless"


def _model(launch: Launch) -> Iterator[str]:
    if launch.context_length and not is_given(launch.args, STYLE, "--max-model-len"):
        yield from ("--max-model-len", str(launch.context_length))
    if launch.max_output and launch.task is Task.CHAT and not is_given(launch.args, STYLE, _GENERATION):
        # The most that any request gets, and what one gets that does not say.
        yield from (_GENERATION, json.dumps({"max_new_tokens": launch.max_output}))
    if launch.task is not Task.CHAT:
        # The kind of pooling (vectors or scores) it takes from the model's own configuration.
        if knows(launch.version, "--runner"):
            yield from ("--runner", "pooling")
        elif knows(launch.version, "--task"):
            yield from ("--task", _OLD_TASKS[launch.task])
    if launch.loras:
        yield from ("--lora-modules", *map(_name_lora, launch.loras))
        if not is_given(launch.args, STYLE, "--enable-lora"):
            yield "--enable-lora"


def _name_lora(lora: Lora) -> str:
    # A comma makes vLLM read the whole of it as JSON.
    if "," in lora.source or "=" in lora.name:
        return json.dumps({"name": lora.name, "path": lora.source})
    return f"{lora.name}={lora.source}"


def _parsers(launch: Launch) -> Iterator[str]:
    if launch.tool_parser is not None:
        yield from ("--tool-call-parser", launch.tool_parser)
        if not is_given(launch.args, STYLE, "--enable-auto-tool-choice"):
            yield "--enable-auto-tool-choice"
    if launch.reasoning_parser is not None:
        yield from ("--reasoning-parser", launch.reasoning_parser)


def _reports(launch: Launch) -> Iterator[str]:
    """How much of it is told: cached tokens in replies, no line of the log for each request."""
    for flag in ("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"):
        if knows(launch.version, flag) and not is_given(launch.args, STYLE, flag, f"--no-{flag[2:]}"):
            yield flag
    # Until 0.10.0 the prompts themselves are logged unless they are told not to be.
    quiet = "--disable-log-requests"
    if (
        knows(launch.version, quiet)
        and not knows(launch.version, "--enable-log-requests")
        and not is_given(launch.args, STYLE, quiet)
    ):
        yield quiet
