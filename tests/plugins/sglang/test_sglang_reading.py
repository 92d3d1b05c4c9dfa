"""What SGLang prints and answers: probes, health, log, exit and load."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import llmgw_sglang
from llmgw.engines import (
    LOADING,
    READY,
    Cause,
    CauseKind,
    HealthState,
    Load,
    Lora,
    Model,
    ModelName,
    ProbeOutput,
    Takes,
)
from llmgw_sglang import exits, logs, metrics, probe

HERE = Path(__file__).parent
HELP = (HERE / "help" / "0.5.23-some.txt").read_text(encoding="utf-8")
SAID = ProbeOutput(code=0, stdout="sglang version: 0.5.23\ngit revision: N/A\n", stderr="")


def explain(name: str) -> Cause:
    """The cause in a log whose last line says how the process ended."""
    *lines, last = (HERE / "logs" / f"{name}.log").read_text(encoding="utf-8").splitlines()[1:]
    ended = re.fullmatch(r"# (exit code|killed by signal) (\d+)", last)
    assert ended is not None
    number = int(ended[2])
    code, signal = (number, None) if ended[1] == "exit code" else (None, number)
    cause = exits.read(lines, code, signal)
    assert cause is not None
    return cause


@pytest.mark.parametrize(
    ("log", "kind", "line", "remedy"),
    [
        ("flag", CauseKind.FLAG, "unrecognized arguments: --nope 1", "--nope"),
        ("ambiguous", CauseKind.FLAG, "ambiguous option: --pp could match", "engine-check"),
        ("value", CauseKind.FLAG, "argument --port: invalid int value: 'high'", "engine-check"),
        ("choice", CauseKind.PARSER, "this release has no parser 'nope' for --tool-call-parser", "engine-check"),
        ("module", CauseKind.LIBRARY, "the Python package torchvision is missing", "torchvision"),
        ("oom", CauseKind.GPU_MEMORY, "torch.OutOfMemoryError: CUDA out of memory.", "--mem-fraction-static"),
        ("kv", CauseKind.KV_CACHE, "RuntimeError: Not enough memory.", "raise --mem-fraction-static"),
        ("graph", CauseKind.OTHER, "Exception: Capture cuda graph failed: Unknown", "--disable-cuda-graph"),
        ("context", CauseKind.CONTEXT, "context_length 65536 is more than the 32768 of the model", "32768"),
        ("heads", CauseKind.PARALLEL, "AssertionError: 32 is not divisible by 3", "another tp"),
        ("hung", CauseKind.HUNG, "Scheduler watchdog timeout", "--watchdog-timeout"),
        ("port", CauseKind.PORT, "Port is already in use. dist_init_port=20003", "another program"),
        ("killed", CauseKind.HOST_MEMORY, "Subprocess scheduler_0 (pid=4101) crashed", "Out of memory"),
        ("proxy", CauseKind.OTHER, "requests.exceptions.ProxyError", "NO_PROXY"),
        ("arch", CauseKind.ARCHITECTURE, "ValueError: Model architectures ['FooForCausalLM']", "upgrade"),
    ],
)
def test_the_cause_is_named_with_its_remedy(log: str, kind: CauseKind, line: str, remedy: str) -> None:
    cause = explain(log)
    assert cause.kind is kind
    assert line in cause.line
    assert cause.remedy is not None
    assert remedy in cause.remedy


def test_the_end_of_the_first_traceback_is_the_cause_of_what_no_rule_knows() -> None:
    cause = explain("unknown")
    assert cause == Cause(
        kind=CauseKind.OTHER, line="AttributeError: 'LlamaConfig' object has no attribute 'hidden_act'"
    )


def test_a_traceback_that_is_cut_off_does_not_get_the_end_of_the_next() -> None:
    begin = "Traceback (most recent call last):"
    lines = (begin, '  File "a.py", line 1', begin, '  File "b.py", line 2', "KeyError: 'b'")
    assert exits.read(lines, 1, None) == Cause(kind=CauseKind.OTHER, line="KeyError: 'b'")
    assert exits.read(lines[:4], 1, None) is None


def test_a_log_of_one_that_runs_names_no_cause() -> None:
    lines = (HERE / "logs" / "good.log").read_text(encoding="utf-8").splitlines()
    assert exits.read(lines, None, None) is None


UP = ("[2026-11-29 23:41:28] The server is fired up and ready to roll!",)
BUSY = ("[2026-11-29 23:59:02 TP0] Decode batch, #running-req: 1, #token: 412, token usage: 0.00, gen throughput: 90",)
# Of a request whose picture has an address that answers 401, and of one that the web framework answers.
REFUSED = (
    "[2026-11-29 23:59:03] Error in request: 401 Client Error: Unauthorized for url: https://example.org/a.png",
    "Traceback (most recent call last):",
    '  File "/opt/sglang/lib/python3.11/site-packages/sglang/srt/entrypoints/openai/serving_base.py", line 118',
    "    response = await self._handle_non_streaming_request(",
    "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://example.org/a.png",
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    "Traceback (most recent call last):",
    '  File "/opt/sglang/lib/python3.11/site-packages/sglang/srt/utils/common.py", line 999, in load_image',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB.",
)
FAILED = (
    "ERROR:    Exception in ASGI application",
    "Traceback (most recent call last):",
    '  File "/opt/sglang/lib/python3.11/site-packages/uvicorn/protocols/http/httptools_impl.py", line 409',
    "requests.exceptions.ProxyError: HTTPSConnectionPool(host='example.org', port=443): Max retries exceeded with url: "
    "/a.png (Caused by ProxyError('Unable to connect to proxy'))",
)
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
CRASHED = (
    "[2026-11-29 23:59:20 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/opt/sglang/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", line 6340, in run',
    "KeyError: 'odd'",
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    "Traceback (most recent call last):",
    '  File "/opt/sglang/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", line 6341, in run',
    ILLEGAL,
    "",
    "[2026-11-29 23:59:21] Received sigquit from a child process. It usually means the child failed.",
)


@pytest.mark.parametrize("before", [UP, BUSY], ids=["whole", "late"])
@pytest.mark.parametrize("request_", [REFUSED, FAILED, REFUSED + FAILED], ids=["logged", "uvicorn", "both"])
def test_what_is_said_of_a_request_is_not_why_it_ended(before: tuple[str, ...], request_: tuple[str, ...]) -> None:
    lines = (*before, *request_, *BUSY)
    assert exits.read(lines, None, 15) is None
    killed = exits.read(lines, None, 9)
    assert killed is not None
    assert killed.kind is CauseKind.HOST_MEMORY
    ended = exits.read((*lines, *CRASHED), None, 9)
    assert ended is not None
    assert (ended.kind, ended.line) == (CauseKind.GPU_FAULT, ILLEGAL)


def test_a_fault_at_the_beginning_of_what_is_left_of_a_log_is_the_cause() -> None:
    cause = exits.read((*CRASHED, *BUSY, *REFUSED), None, 9)
    assert cause is not None
    assert cause.line == ILLEGAL


def test_without_a_rule_it_is_the_traceback_that_a_process_ended_with() -> None:
    odd = tuple("RuntimeError: odd" if line == ILLEGAL else line for line in CRASHED)
    assert exits.read((*UP, *FAILED, *odd), None, 9) == Cause(kind=CauseKind.OTHER, line="KeyError: 'odd'")


def test_what_it_has_survived_is_not_why_it_ended() -> None:
    survived = "[2026-11-29 23:41:06] Error retrieving file list: 401 Client Error"
    assert exits.read((survived, *UP), None, 15) is None
    cause = exits.read((survived,), 1, None)
    assert cause is not None
    assert cause.kind is CauseKind.UNAUTHORISED


def test_its_own_sigkill_is_not_taken_for_the_kernels() -> None:
    said = "[2026-11-29 23:41:20] Received sigquit from a child process. It usually means the child failed."
    cause = exits.read((said,), None, 9)
    assert cause is not None
    assert (cause.kind, cause.line) == (CauseKind.OTHER, "one of its processes ended without saying why")
    cause = exits.read((), None, 9)
    assert cause is not None
    assert cause.kind is CauseKind.HOST_MEMORY


@pytest.mark.parametrize(
    "line",
    [
        "[2026-11-29 23:41:20] Received sigquit from a child process. It usually means the child failed.",
        "[2026-11-29 23:41:06 TP1] Ignore import error when loading sglang.srt.models.x: libcuda.so.1: cannot open "
        "shared object",
        "[2026-11-29 23:41:06] Warning: Target model's context_length (9) is greater than the derived "
        "context_length (8).",
        "[2026-11-29 23:41:05 TP1] The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
        "[2026-11-29 23:40:51] server_args=ServerArgs(model_path='m', trust_remote_code=True, dist_timeout=None)",
    ],
)
def test_a_line_that_is_said_whatever_goes_wrong_is_no_cause(line: str) -> None:
    cause = exits.read((line, "ValueError: Model architectures ['Foo'] are not supported for now."), 1, None)
    assert cause is not None
    assert cause.kind is CauseKind.ARCHITECTURE


def test_what_is_said_while_it_loads() -> None:
    lines = (HERE / "logs" / "good.log").read_text(encoding="utf-8").splitlines()
    assert [fact.progress for fact in map(logs.read, lines) if fact is not None] == [
        "waiting for all cards",
        "loading the weights",
        "loading the weights: 50 %",
        "loading the weights: 75 %",
        "the weights are loaded (14.99 GB)",
        "the KV cache is there",
        "capturing graphs",
        "capturing graphs: 87 %",
        "graphs are captured",
        "KV cache: 412345 tokens",
        "warming up",
        "warmed up",
    ]


def test_what_a_release_of_2025_says_while_it_loads() -> None:
    lines = (
        "[2025-08-20 10:00:00 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=60.11 GB, "
        "mem usage=14.99 GB.",
        "[2025-08-20 10:00:02 DP1 TP0 EP0] KV Cache is allocated. #tokens: 412345, K size: 25.17 GB, V size: 25.17 GB",
        "[2025-08-20 10:00:02] Capture cuda graph begin. This can take up to several minutes. avail mem=8.00 GB",
        "\rCapturing batches (bs=8 avail_mem=8.1 GB):  10%|#\rCapturing batches (bs=4 avail_mem=8.1 GB):  20%|##",
    )
    assert [fact.progress for fact in map(logs.read, lines) if fact is not None] == [
        "the weights are loaded (14.99 GB)",
        "KV cache: 412345 tokens",
        "capturing graphs",
        "capturing graphs: 20 %",
    ]


@pytest.mark.parametrize(
    ("status", "expected"), [(None, LOADING), (503, LOADING), (200, READY), (500, None), (302, None)]
)
def test_health(status: int | None, expected: object) -> None:
    assert llmgw_sglang.engine_read_health(status, "") == expected


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_is_not_sglang_is_broken(status: int) -> None:
    health = llmgw_sglang.engine_read_health(status, "")
    assert health is not None
    assert health.state is HealthState.BROKEN
    assert str(status) in str(health.reason)


def test_the_load_of_one_scheduler() -> None:
    text = (HERE / "metrics" / "0.5.23.txt").read_text(encoding="utf-8")
    assert metrics.read(text) == Load(
        running=3,
        waiting=2,
        cache_used=0.25,
        prompt_tokens=1500,
        cached_tokens=320,
        steps=760 + 35 + 40 + 1500,
    )


def test_the_loads_of_several_schedulers() -> None:
    """Two data parallel ranks of two ranks each, with priorities: a sum of one number from each of the two."""
    text = "".join(
        f'sglang:num_running_reqs{{dp_rank="{dp}",moe_dp_rank="7",priority="{priority}",tp_rank="{tp}"}} {count}\n'
        for dp, tp, priority, count in (
            *((0, 0, "", 5.0), (0, 1, "", 5.0), (1, 2, "", 2.0), (1, 3, "", 1.0)),
            *((0, 0, "1", 3.0), (0, 0, "2", 2.0), (1, 2, "1", 2.0)),
        )
    )
    text += 'sglang:token_usage{dp_rank="0"} 0.5\nsglang:token_usage{dp_rank="1"} 1.25\n'
    assert metrics.read(text) == Load(running=7, cache_used=1.0)


def test_nothing_is_read_out_of_other_metrics() -> None:
    assert metrics.read("vllm:num_requests_running 1.0\nsglang:token_usage 0.5\n") is None
    for odd in ("nan", "1.2.3", "-1"):
        assert metrics.read(f"sglang:num_running_reqs{{}} {odd}\nsglang:num_queue_reqs 1.0\n") == Load(waiting=1)


def test_cached_tokens_are_none_until_there_were_any() -> None:
    text = "sglang:num_running_reqs 0.0\nsglang:prompt_tokens_total 7.0\n"
    assert metrics.read(text) == Load(running=0, prompt_tokens=7, cached_tokens=0, steps=7)


def test_the_probe_asks_for_version_and_help() -> None:
    commands = llmgw_sglang.engine_build_probe(("/usr/bin/sglang",))
    assert [command.argv for command in commands] == [
        ("/usr/bin/sglang", "version"),
        ("/usr/bin/sglang", "serve", "--help"),
    ]
    first, second = llmgw_sglang.engine_build_probe(("/opt/venv/bin/python",))
    assert first.argv[:2] == ("/opt/venv/bin/python", "-c")
    assert second.argv == ("/opt/venv/bin/python", "-m", "sglang.launch_server", "--help")
    assert {command.scrub for command in (*commands, first, second)} == {("SGLANG_", "SGL_")}


def test_the_version_and_the_flags_are_read() -> None:
    version = probe.read((SAID, ProbeOutput(code=0, stdout=HELP, stderr="")))
    assert version is not None
    assert version.number == "0.5.23"
    parser = version.find("--tool-call-parser")
    assert parser is not None
    assert {"auto", "qwen3_coder", "response_template"} <= parser.choices
    model, old, lists = version.find("--model"), version.find("--disable-cuda-graph"), version.find("--gc-threshold")
    assert model is not None
    assert model.names == ("--model-path", "--model")
    assert old is not None
    assert "Deprecated" in str(old.deprecated)
    assert lists is not None
    assert lists.takes is Takes.MANY
    assert version.find("--no-enable-tf32-matmul") is not None


def test_flags_of_its_other_servers_are_none_of_its_own() -> None:
    assert "--num-gpus" in HELP
    version = probe.read((SAID, ProbeOutput(code=0, stdout=HELP, stderr="")))
    assert version is not None
    assert version.find("--num-gpus") is None


@pytest.mark.parametrize(
    "outputs",
    [
        (),
        (replace(SAID, code=1),),
        (replace(SAID, stdout="Traceback (most recent call last):\n"),),
        (replace(SAID, stdout=""),),
    ],
)
def test_what_does_not_say_its_version_is_not_known(outputs: tuple[ProbeOutput, ...]) -> None:
    assert probe.read(outputs) is None


@pytest.mark.parametrize(
    "second",
    [ProbeOutput(code=1, stdout=HELP, stderr=""), ProbeOutput(code=0, stdout="  --port PORT  a port", stderr="")],
)
def test_a_version_without_a_whole_help_has_no_flags(second: ProbeOutput) -> None:
    version = probe.read((SAID, second))
    assert version is not None
    assert (version.number, version.flags) == ("0.5.23", ())


def test_an_adapter_is_asked_for_in_both_ways() -> None:
    model = Model(name=ModelName("tiny"), source="/srv/tiny")
    assert llmgw_sglang.engine_build_request(model).loras == {}
    model = replace(model, loras=(Lora(name=ModelName("sql"), source="/srv/sql"),))
    rules = llmgw_sglang.engine_build_request(model)
    assert rules.loras == {"sql": {"model": "tiny:sql", "lora_path": "sql"}}


def test_what_a_request_may_have_is_read() -> None:
    text = '{"object":"list","data":[{"id":"m","owned_by":"sglang","max_model_len":512}]}'
    assert llmgw_sglang.engine_read_context(text) == 512
    assert llmgw_sglang.engine_read_context("") is None
