"""Why vLLM ended: its own rules over its last lines, and the first traceback where neither they nor its exit tell.

Each of its processes prints what became of it and passes that on to the one that started it, so that the cause stands
up to a hundred lines before the end, and the last line is always the same. Once it serves, the process that answers
requests prints tracebacks of these too, and goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmgw.engines import Cause, CauseKind, diagnose, rule
from llmgw_vllm.logs import PREFIX

# Said whatever went wrong, or after a clean stop too.
GENERIC = re.compile(
    r"Engine core initialization failed|EngineCore (?:encountered an issue|failed to start)|EngineDeadError"
    r"|WorkerProc (?:initialization )?failed|Received sigquit"
    r"|For further information visit https://errors\.pydantic|\bvalidation errors? for \w+$"
    r"|^nanobind:|leaked (?:semaphore|shared_memory|instance|type|function)|resource_tracker"
    r"|FutureWarning|UserWarning|DeprecationWarning|\[shutdown\]",
)

# What stands before is what it has survived.
_UP = re.compile(r"Application startup complete")
# Printed by one that is up, for a log that has lost its beginning; and files whose errors are of a request.
_SERVES = re.compile(r"Avg (?:prompt|generation) throughput|Exception in ASGI application")
_SERVING = re.compile(r"(?:batch_)?serving\w*\.py:")
# Of the process that answers requests these alone speak of the engine behind it.
_CLIENT = re.compile(r"(?:async_llm|core_client|async_llm_engine)\.py:")
_SERVER = re.compile(r"(?:APIServer|ApiServer|$)")

# Below these levels it says what it does and what it was given, words of causes among them: trust_remote_code=True.
_ON_THE_WAY = ("DEBUG", "INFO", "WARNING")

# pydantic wraps what the configuration refuses, and repeats all of its input after it.
_WRAPPED = re.compile(r"\s*Value error, (.+?)(?: \[type=\w+, input_value=.*)?$")
_DIED = re.compile(r"Worker proc \S+ died unexpectedly|Engine core proc \S+ died unexpectedly")
_DIED_REMEDY = "it was killed, or crashed without a word: look for it in the kernel's log (out of memory, segfault)"
_SHOWN = 600
_LONGEST = 2000
_TRACEBACK = "Traceback (most recent call last):"

RULES = (
    rule(
        CauseKind.FLAG,
        r"error: unrecognized arguments: .*--(?:nnodes|node-rank|master-addr)\b",
        "this release can't span nodes without Ray: vLLM 0.11.1 or later can; or choose tp and pp that one node has",
    ),
    rule(
        CauseKind.PARSER,
        r"(invalid tool call parser: [^\s(]+)",
        "`llmgw ctl engine-check` tells which tool_parser this release has; choose one of them",
        line="{0}",
    ),
    rule(
        CauseKind.PARSER,
        r"(invalid reasoning parser: [^\s(]+|Reasoning parser '[^']*' not found)",
        "choose a reasoning_parser that this release has; the engine's log lists them",
        line="{0}",
    ),
    rule(
        CauseKind.PARSER,
        r"argument (--(?:tool-call|reasoning)-parser): invalid choice: ('[^']*')",
        "`llmgw ctl engine-check` tells which ones this release has; choose one of them",
        line="argument {0}: invalid choice: {1}",
    ),
    rule(
        CauseKind.CONTEXT,
        r"max_model_len \(\d+\) is greater than the derived max_model_len \(\w+=([0-9]+)",
        "set the model's context_length, or --max-model-len in args, to {0} or less: the model has no more",
    ),
    rule(
        CauseKind.CONTEXT,
        r"max_model_len \(\d+\) is greater than the derived",
        "set the model's context_length, or --max-model-len in args, to what the model has",
    ),
    rule(
        CauseKind.KV_CACHE,
        r"larger than the available KV cache memory.*estimated maximum model length is (\d+)",
        "set context_length to {0} or less, or give it more: a higher tp, or a higher --gpu-memory-utilization",
    ),
    rule(
        CauseKind.KV_CACHE,
        r"larger than the available KV cache memory|No available memory for the cache blocks",
        "less context_length, a higher tp, or a higher --gpu-memory-utilization in args",
    ),
    rule(
        CauseKind.HOST_MEMORY,
        r"Available memory on node \d+ .* less than requested memory for kv",
        "set VLLM_CPU_KVCACHE_SPACE (GiB) in the profile's env, or --kv-cache-memory-bytes in args, to what is free",
    ),
    rule(
        CauseKind.PARALLEL,
        r"must be divisible by (?:the )?tensor parallel size",
        "set the profile's tp to a number that divides the model's attention heads",
    ),
    rule(
        CauseKind.PARALLEL,
        r"World size \(\d+\) is larger than the number of available GPUs \((\d+)\)",
        "the node shows {0} GPUs to it: a lower tp, or look with `nvidia-smi` where the others are",
    ),
    rule(
        CauseKind.PARALLEL,
        r"Not enough allowed NUMA nodes to bind threads of",
        "a lower tp, or VLLM_CPU_OMP_THREADS_BIND: nobind in the profile's env",
    ),
    rule(
        CauseKind.PARALLEL,
        r"Pipeline parallelism is not supported for this model|does not support pipeline parallel",
        "take pp out of the profile, and set a higher tp for it",
    ),
    rule(
        CauseKind.ARCHITECTURE,
        r"(Model architectures? \[[^\]]*\] (?:are|is) not supported)",
        "this vLLM does not know the architecture: upgrade it, or choose another engine",
        line="{0}",
    ),
    rule(
        CauseKind.WEIGHTS_MISSING,
        r"(Loading lora \S+ failed: No adapter found for \S+)",
        "see that the adapter's folder is there on this node, with its adapter_config.json",
        line="{0}",
    ),
    rule(
        CauseKind.WEIGHTS_CORRUPT,
        r"SafetensorError: Error while deserializing header: header too large",
        "the file is no weights at all (a git-lfs pointer, or a page of HTML): fetch it again; `llmgw ctl weights pull "
        "SOURCE` mends what llmgw has fetched; of your own, put the whole file there",
    ),
    rule(
        CauseKind.OTHER,
        r"(LoRA rank \d+ is greater than max_lora_rank \d+)",
        "give --max-lora-rank in args the rank of the adapter",
        line="{0}",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line without its prefix. ``traceback`` is the number of the one that it belongs to, ``raised`` its last.

    ``process`` is "" where the line does not say it, as those of uvicorn and of C++ don't.
    """

    process: str
    level: str | None
    file: str
    text: str
    traceback: int | None = None
    raised: bool = False


def read(lines: Sequence[str], code: int | None, signal: int | None) -> Cause | None:
    """The cause by a rule; else what the exit tells; else the first traceback's end, or process that is gone."""
    scanned = list(_scan(lines))
    up = next((at for at, line in enumerate(scanned) if _UP.search(line.text)), None)
    served = up is not None or any(map(_is_of_one_that_serves, scanned))
    if served:
        scanned = [line for line in scanned[up or 0 :] if not _is_of_a_request(line)]
    # Not the code that a traceback shows: "raise LocalEntryNotFoundError(" is in one too.
    told = [line for line in scanned if line.level not in _ON_THE_WAY and (line.traceback is None or line.raised)]
    by_rule = diagnose([line.text for line in told], None, None, RULES, generic=GENERIC, served=served)
    # One that was killed may have the traceback of some request in its last lines, which had nothing to do with it.
    certain = by_rule or diagnose((), code, signal)
    if certain is not None:
        return certain
    raised = sorted((line for line in scanned if line.raised), key=lambda line: line.traceback or 0)
    for line in raised:
        if not GENERIC.search(line.text):
            remedy = _DIED_REMEDY if _DIED.search(line.text) else None
            return Cause(kind=CauseKind.OTHER, line=" ".join(line.text.split())[:_SHOWN], remedy=remedy)
    return None


def _is_of_one_that_serves(line: _Line) -> bool:
    return _SERVES.search(line.text) is not None or (line.level == "ERROR" and _SERVING.match(line.file) is not None)


def _is_of_a_request(line: _Line) -> bool:
    """Of one that serves: whether the line is a word of the process that answers requests, about one of them."""
    if _DIED.search(line.text) or not _SERVER.match(line.process):
        return False
    # uvicorn's tracebacks, and no other words that stand alone: C++ and the kernel's are among these.
    plain = not line.process and line.level is None and line.traceback is None
    return not plain and not _CLIENT.match(line.file)


def _scan(lines: Sequence[str]) -> Iterator[_Line]:
    """Processes write into one log at once: a line belongs to the traceback that its own process has begun."""
    begun = 0
    inside: dict[str, int] = {}
    left: dict[str, int] = {}
    for line in lines:
        prefix = PREFIX.match(line)
        process, level = (prefix["process"] or "", prefix["level"]) if prefix else ("", None)
        file = prefix["file"] or "" if prefix else ""
        text = line[prefix.end() if prefix else 0 :][:_LONGEST]
        wrapped = _WRAPPED.match(text)
        if text.strip() == _TRACEBACK:
            begun += 1
            inside[process] = begun
            yield _Line(process=process, level=level, file=file, text=text, traceback=begun)
        elif _DIED.search(text):
            # Of one that was killed there is no other word; those that wait for it have tracebacks.
            begun += 1
            yield _Line(process=process, level=level, file=file, text=text, traceback=begun, raised=True)
        elif wrapped is not None:
            yield _Line(
                process=process,
                level=level,
                file=file,
                text=wrapped[1],
                traceback=left.get(process),
                raised=process in left,
            )
        elif process in inside and (not text.strip() or text[0] in " \t"):
            yield _Line(process=process, level=level, file=file, text=text, traceback=inside[process])
        elif process in inside:
            left[process] = inside.pop(process)
            yield _Line(process=process, level=level, file=file, text=text, traceback=left[process], raised=True)
        else:
            yield _Line(process=process, level=level, file=file, text=text)
