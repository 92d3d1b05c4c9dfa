"""Why vLLM ended, from what vLLM 0.32 really printed when it was broken in each of these ways."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmgw_vllm
from llmgw.engines import Cause, CauseKind
from llmgw.engines.registry import open_engine

ENGINE = open_engine("vllm", llmgw_vllm)
LOGS = Path(__file__).parent / "logs"
WORKER = "(Worker_TP0 pid=77) ERROR 11-29 23:41:03 [multiproc_executor.py:953] "


def lines_of(name: str) -> tuple[str, ...]:
    return tuple((LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines())


def cause_of(*lines: str, code: int | None = 1, signal: int | None = None) -> Cause | None:
    return ENGINE.read_exit(lines, code, signal)


CASES = {
    "flag": (CauseKind.FLAG, "vllm: error: unrecognized arguments: --no-such-flag 3", "--no-such-flag"),
    "choice": (
        CauseKind.FLAG,
        "vllm serve: error: argument --dtype: invalid choice: 'bfloat17' "
        "(choose from 'auto', 'bfloat16', 'float', 'float16', 'float32', 'half')",
        "engine-check",
    ),
    "value": (
        CauseKind.FLAG,
        "vllm serve: error: argument --max-model-len: invalid human_readable_int_or_auto value: 'abc'",
        "engine-check",
    ),
    "parser": (CauseKind.PARSER, "invalid tool call parser: nope", "tool_parser"),
    "reasoning": (CauseKind.PARSER, "Reasoning parser 'nope' not found", "reasoning_parser"),
    "missing": (
        CauseKind.WEIGHTS_MISSING,
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
        "'/srv/models/not-there'. Use `repo_type` argument if needed.",
        "path",
    ),
    "empty": (
        CauseKind.WEIGHTS_MISSING,
        "RuntimeError: Cannot find any model weights with `/srv/models/empty`",
        "path",
    ),
    "lora": (
        CauseKind.WEIGHTS_MISSING,
        "Loading lora sql failed: No adapter found for /srv/models/no-lora",
        "adapter_config.json",
    ),
    "truncated": (
        CauseKind.WEIGHTS_CORRUPT,
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, "
        "file not fully covered",
        "fetch it again",
    ),
    "lfs": (
        CauseKind.WEIGHTS_CORRUPT,
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: header too large",
        "git-lfs",
    ),
    "port": (CauseKind.PORT, "OSError: [Errno 98] Address already in use", "port"),
    "heads": (
        CauseKind.PARALLEL,
        "Total number of attention heads (4) must be divisible by tensor parallel size (3).",
        "tp",
    ),
    "numa": (
        CauseKind.PARALLEL,
        "AssertionError: Not enough allowed NUMA nodes to bind threads of 4 local CPUWorkers. Allowed NUMA nodes are "
        "[0]. Please try to bind threads manually or decrease DP/TP/PP.",
        "nobind",
    ),
    "kv": (
        CauseKind.HOST_MEMORY,
        "ValueError: Available memory on node 0 (21.54/23.54 GiB) on kv cache allocation is less than requested memory "
        "for kv (400.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by "
        "other processes.",
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    "foomodel": (
        CauseKind.ARCHITECTURE,
        "Error parsing config for /srv/models/foomodel: The checkpoint you are trying to load has model type "
        "`foomodel` but Transformers does not recognize this architecture. This could be because of an issue with the "
        "checkpoint, or because your version of Transformers is out of date.",
        "upgrade",
    ),
    "fooarch": (CauseKind.ARCHITECTURE, "Model architectures ['FooForCausalLM'] are not supported", "upgrade"),
    "offline": (
        CauseKind.OFFLINE,
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for the "
        "specified revision on the local disk and outgoing traffic has been disabled. To enable repo look-ups and "
        "downloads online, pass 'local_files_only=False' as input.",
        "fetch",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_named_from_the_real_output(case: str) -> None:
    kind, line, remedy = CASES[case]
    cause = cause_of(*lines_of(case), code=2 if kind is CauseKind.FLAG else 1)
    assert cause is not None
    assert (cause.kind, cause.line) == (kind, line)
    assert remedy in (cause.remedy or "")


def test_a_context_that_the_model_lacks_is_named_with_what_it_has() -> None:
    cause = cause_of(*lines_of("context"))
    assert cause is not None
    assert cause.kind is CauseKind.CONTEXT
    assert cause.line.startswith("User-specified max_model_len (9000) is greater than the derived max_model_len")
    assert "to 1024 or less" in (cause.remedy or "")


def test_a_cache_that_has_no_room_is_named() -> None:
    cause = cause_of(*lines_of("kvsmall"))
    assert cause is not None
    assert cause.kind is CauseKind.KV_CACHE
    assert cause.line.startswith("ValueError: No available memory for the cache blocks.")
    assert "--gpu-memory-utilization" in (cause.remedy or "")


@pytest.mark.parametrize("case", [*CASES, "context", "kvsmall"])
def test_the_last_line_of_an_engine_that_failed_is_never_the_cause(case: str) -> None:
    """Nor a line of what it was given, which repeats every setting."""
    cause = cause_of(*lines_of(case))
    assert cause is not None
    assert "Engine core initialization failed" not in cause.line
    assert "non-default args" not in cause.line
    assert "pid=" not in cause.line


def test_a_log_without_a_fault_names_none() -> None:
    assert cause_of(*lines_of("good"), code=0) is None
    assert cause_of(*lines_of("good"), code=None) is None


@pytest.mark.parametrize("case", ["truncated", "kv", "lora", "empty"])
def test_without_a_rule_the_first_traceback_is_the_cause(case: str) -> None:
    """The words that the rules go by are taken out; the structure of the log stays."""
    words = ("SafetensorError", "incomplete metadata", "Available memory", "Loading lora", "Cannot find any model")
    lines = list(lines_of(case))
    for at, line in enumerate(lines):
        for word in words:
            line = line.replace(word, "Oddity")  # noqa: PLW2901
        lines[at] = line
    cause = cause_of(*lines)
    assert cause is not None
    assert cause.kind is CauseKind.OTHER
    assert "Oddity" in cause.line or "FileNotFoundError" in cause.line


def test_a_worker_that_is_gone_without_a_word_is_named_before_those_that_wait_for_it() -> None:
    """Recorded from one that crashed in its first request; the server then ends with exit code 0."""
    cause = cause_of(*lines_of("died"), code=0)
    assert cause is not None
    assert cause.kind is CauseKind.OTHER
    assert cause.line == "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor."
    assert "kernel" in (cause.remedy or "")


def test_a_worker_that_says_why_is_heard_before_it_is_gone() -> None:
    lines = (
        WORKER + "Traceback (most recent call last):",
        WORKER + "    step()",
        WORKER + "RuntimeError: the cache is odd",
        "(EngineCore pid=7) ERROR 11-29 23:41:04 [multiproc_executor.py:316] Worker proc VllmWorker-0 died "
        "unexpectedly (exit code: 1), shutting down executor.",
    )
    assert cause_of(*lines) == Cause(kind=CauseKind.OTHER, line="RuntimeError: the cache is odd")


def test_of_two_processes_each_has_its_own_traceback() -> None:
    lines = (
        WORKER + "WorkerProc failed to start.",
        WORKER + "Traceback (most recent call last):",
        "(EngineCore pid=7) ERROR 11-29 23:41:04 [core.py:1510] Traceback (most recent call last):",
        WORKER + '  File "/opt/vllm/worker.py", line 1, in load',
        "(EngineCore pid=7) ERROR 11-29 23:41:04 [core.py:1510]     wait()",
        "(EngineCore pid=7) ERROR 11-29 23:41:04 [core.py:1510] OSError: the worker is gone",
        WORKER + "    raise OddError(",
        WORKER + "vllm.OddError: the weights are odd",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    )
    assert cause_of(*lines) == Cause(kind=CauseKind.OTHER, line="vllm.OddError: the weights are odd")


def test_what_a_configuration_refuses_is_shown_without_its_wrapping() -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/opt/vllm/config.py", line 1, in __init__',
        "    validate()",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
        "  Value error, this goes not with that. [type=value_error, input_value=ArgsKwargs((), {}), input_type=X]",
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
    )
    assert cause_of(*lines) == Cause(kind=CauseKind.OTHER, line="this goes not with that.")


@pytest.mark.parametrize(
    ("line", "kind", "remedy"),
    [
        (
            WORKER + "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV "
            "cache is needed, which is larger than the available KV cache memory (7.50 GiB). Based on the available "
            "memory, the estimated maximum model length is 61440. Try increasing `gpu_memory_utilization`.",
            CauseKind.KV_CACHE,
            "61440",
        ),
        (WORKER + "ValueError: No available memory for the cache blocks.", CauseKind.KV_CACHE, "context_length"),
        (
            "ValueError: World size (4) is larger than the number of available GPUs (2) in this node.",
            CauseKind.PARALLEL,
            "shows 2 GPUs",
        ),
        (
            "vllm: error: unrecognized arguments: --nnodes 2 --node-rank 0 --master-addr 10.0.0.1",
            CauseKind.FLAG,
            "0.11.1",
        ),
        (
            WORKER + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            CauseKind.GPU_MEMORY,
            "memory",
        ),
        (
            WORKER
            + "ValueError: Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than desired GPU memory "
            "utilization (0.92, 72.9 GiB).",
            CauseKind.GPU_IN_USE,
            "nvidia-smi",
        ),
        (
            "vllm serve: error: argument --tool-call-parser: invalid choice: 'nope' (choose from 'hermes')",
            CauseKind.PARSER,
            "engine-check",
        ),
        ("KeyError: 'invalid reasoning parser: nope (chose from { qwen3 })'", CauseKind.PARSER, "reasoning_parser"),
        ("ValueError: LoRA rank 64 is greater than max_lora_rank 16.", CauseKind.OTHER, "--max-lora-rank"),
    ],
)
def test_other_causes_are_known(line: str, kind: CauseKind, remedy: str) -> None:
    cause = cause_of("INFO 11-29 23:41:03 [x.py:1] config: trust_remote_code=True", line)
    assert cause is not None
    assert cause.kind is kind
    assert remedy in (cause.remedy or "")


@pytest.mark.parametrize("level", ["INFO", "WARNING", "DEBUG"])
def test_what_it_says_on_the_way_is_no_cause(level: str) -> None:
    """It prints all that it was given, and "trust_remote_code=True" is what a tokenizer asks for elsewhere."""
    line = f"(EngineCore pid=7) {level} 11-29 23:41:03 [core.py:133] config: trust_remote_code=True"
    assert cause_of(line) is None


def test_an_exit_without_a_word_is_told_by_its_signal() -> None:
    stray = ("Traceback (most recent call last):", "    answer()", "ValueError: a request was odd")
    for lines in (("INFO:     Started server process [1]",), stray):
        cause = cause_of(*lines, code=None, signal=9)
        assert cause is not None
        assert cause.kind is CauseKind.HOST_MEMORY


UP = (
    "(EngineCore pid=7) INFO 11-29 23:41:38 [core.py:402] init engine (profile, create kv cache) took 34.48 s",
    "INFO:     Waiting for application startup.",
    "INFO:     Application startup complete.",
)
SERVING = "(APIServer pid=5) ERROR 11-29 23:59:03 [serving.py:929] "
# What the process that answers requests prints of one whose picture has an address that answers 401.
REFUSED = (
    SERVING + "Error in preprocessing prompt inputs",
    SERVING + "Traceback (most recent call last):",
    SERVING + '  File "/opt/vllm/lib/python3.11/site-packages/vllm/multimodal/media/connector.py", line 204, in fetch',
    SERVING + "    response.raise_for_status()",
    SERVING + "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://example.org/a.png",
)
# And of one that its web framework has to answer itself.
FAILED = (
    "ERROR:    Exception in ASGI application",
    "Traceback (most recent call last):",
    '  File "/opt/vllm/lib/python3.11/site-packages/uvicorn/protocols/http/httptools_impl.py", line 409, in run_asgi',
    "    result = await app(",
    "urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='example.org', port=443): Max retries exceeded with "
    "url: /a.png (Caused by NameResolutionError('Temporary failure in name resolution'))",
)
THROUGHPUT = (
    "(APIServer pid=5) INFO 11-29 23:59:13 [loggers.py:271] Engine 000: Avg prompt throughput: 3.1 tokens/s, Avg "
    "generation throughput: 12.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%",
)
FAULT = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
CORE = "(EngineCore pid=7) ERROR 11-29 23:59:20 [core.py:1510] "
CRASHED = (
    CORE + "EngineCore encountered a fatal error.",
    CORE + "Traceback (most recent call last):",
    CORE + "    step()",
    CORE + FAULT,
)


@pytest.mark.parametrize("before", [UP, THROUGHPUT, ()], ids=["whole", "late", "bare"])
@pytest.mark.parametrize("request_", [REFUSED, FAILED, REFUSED + FAILED], ids=["logged", "uvicorn", "both"])
def test_what_is_said_of_a_request_is_not_why_it_ended(before: tuple[str, ...], request_: tuple[str, ...]) -> None:
    lines = (*before, *request_)
    assert cause_of(*lines, code=None, signal=15) is None
    killed = cause_of(*lines, *THROUGHPUT, code=None, signal=9)
    assert killed is not None
    assert killed.kind is CauseKind.HOST_MEMORY
    ended = cause_of(*lines, *CRASHED)
    assert ended is not None
    assert (ended.kind, ended.line) == (CauseKind.GPU_FAULT, FAULT)


def test_a_fault_at_the_beginning_of_what_is_left_of_a_log_is_the_cause() -> None:
    cause = cause_of(*CRASHED, *THROUGHPUT, *REFUSED)
    assert cause is not None
    assert cause.line == FAULT


def test_what_an_engine_has_survived_is_not_why_it_ended() -> None:
    survived = "(APIServer pid=5) ERROR 11-29 23:40:03 [repo_utils.py:47] Error retrieving file list: 401 Client Error"
    assert cause_of(survived, *UP, code=None, signal=15) is None
    cause = cause_of(survived)
    assert cause is not None
    assert cause.kind is CauseKind.UNAUTHORISED


def test_the_server_is_heard_about_the_engine_behind_it() -> None:
    at = "(APIServer pid=5) ERROR 11-29 23:59:20 [async_llm.py:906] "
    lines = (*UP, *REFUSED, at + "AsyncLLM output_handler failed.", at + "Traceback (most recent call last):")
    assert cause_of(*lines, at + "KeyError: 'odd'") == Cause(kind=CauseKind.OTHER, line="KeyError: 'odd'")
    died = "(APIServer pid=5) ERROR 11-29 23:59:20 [core_client.py:908] Engine core proc EngineCore_0 died unexpectedly"
    assert cause_of(*UP, *REFUSED, died) == cause_of(died) is not None


def test_a_word_of_c_that_stands_alone_is_heard_of_one_that_serves() -> None:
    cause = cause_of(
        *UP, *FAILED, "terminate called after throwing an instance of 'std::bad_alloc'", signal=6, code=None
    )
    assert cause is not None
    assert cause.kind is CauseKind.HOST_MEMORY
