"""The command line of one shard: SGLang's server with every fact of a launch, and the profile's args last."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmgw.engines import Launch, Task, is_given, knows
from llmgw_sglang import ports
from llmgw_sglang.flags import STYLE

_MODULE = "sglang.launch_server"
_INFO_PORT = "--engine-info-bootstrap-port"

# A reranker that is asked for a "yes" or "no", and generates it; --is-embedding would keep it from that (0.5.8).
_GENERATING_RERANKER = re.compile(r"qwen-?3[\w.-]*-rerank", re.IGNORECASE)


def build(launch: Launch) -> tuple[str, ...]:
    """The words of the command. A flag that args give already is left to them."""
    # --lora-paths takes all words up to the next flag, so it is not the last.
    return (
        *server(launch.program),
        *("--model-path", launch.source, "--served-model-name", launch.served_name),
        *("--host", launch.host, "--port", str(launch.port)),
        *_model(launch),
        *_shape(launch),
        *_parsers(launch),
        *_reports(launch),
        *launch.args,
    )


def server(program: tuple[str, ...]) -> tuple[str, ...]:
    """What starts the server: ``sglang serve``, or an interpreter's ``-m``, which is the only way before 0.5.5.

    So the binary of an older release is the ``python`` of its environment.
    """
    if len(program) > 1:
        return program
    return (*program, "-m", _MODULE) if is_interpreter(program) else (*program, "serve")


def is_interpreter(program: tuple[str, ...]) -> bool:
    """Whether it is a Python, by the name of its file."""
    return bool(program) and program[0].rpartition("/")[2].startswith("python")


def _shape(launch: Launch) -> Iterator[str]:
    if launch.tp > 1:
        yield from ("--tp-size", str(launch.tp))
    if launch.pp > 1:
        yield from ("--pp-size", str(launch.pp))
    if launch.count > 1:
        yield from ("--nnodes", str(launch.count), "--node-rank", str(launch.rank))
    yield from ("--dist-init-addr", launch.rendezvous or f"127.0.0.1:{ports.rendezvous(launch.port)}")
    if knows(launch.version, _INFO_PORT, since="0.5.10", unknown=False):
        yield from (_INFO_PORT, str(ports.engine_info(launch.port)))


def _model(launch: Launch) -> Iterator[str]:
    if launch.loras:
        yield from ("--lora-paths", *(f"{lora.name}={lora.source}" for lora in launch.loras))
    if launch.context_length and not is_given(launch.args, STYLE, "--context-length"):
        yield from ("--context-length", str(launch.context_length))
    if launch.task is Task.EMBED or (launch.task is Task.RERANK and not _generates(launch)):
        yield "--is-embedding"


def _generates(launch: Launch) -> bool:
    """Whether it ranks by generating: such ones need a template of their own, or are known by name."""
    named = f"{launch.source} {launch.served_name}"[:600]
    return is_given(launch.args, STYLE, "--chat-template") or _GENERATING_RERANKER.search(named) is not None


def _parsers(launch: Launch) -> Iterator[str]:
    if launch.tool_parser is not None:
        yield from ("--tool-call-parser", launch.tool_parser)
    if launch.reasoning_parser is not None:
        yield from ("--reasoning-parser", launch.reasoning_parser)


def _reports(launch: Launch) -> Iterator[str]:
    """How much of it is told: metrics, cached tokens in replies, and no line of the log for each request."""
    for flag in ("--enable-metrics", "--enable-cache-report"):
        if not is_given(launch.args, STYLE, flag):
            yield flag
    if not is_given(launch.args, STYLE, "--log-level-http"):
        yield from ("--log-level-http", "warning")
