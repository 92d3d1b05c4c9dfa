"""The first line that names a cause is found, and nothing that an engine prints is too odd."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.engines import Cause, CauseKind, diagnose, rule
from llmgw.engines.causes import MAX_LINE_CHARS, RULES

STRIP = re.compile(r"\(\w+ pid=\d+\) (?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] )?")
GENERIC = re.compile(r"Engine core initialization failed|EngineDeadError")

# What engines and the libraries below them print, and the word for it.
SAMPLES = [
    (
        CauseKind.GPU_MEMORY,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79.1 GiB",
    ),
    (CauseKind.GPU_MEMORY, "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB"),
    (CauseKind.GPU_MEMORY, "allocating 7605.33 MiB on device 0: cudaMalloc failed: out of memory"),
    (CauseKind.GPU_MEMORY, "RuntimeError: CUDA error: out of memory"),
    (
        CauseKind.GPU_IN_USE,
        "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 72.8 GiB).",
    ),
    (CauseKind.GPU_IN_USE, "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied"),
    (CauseKind.HOST_MEMORY, "OSError: [Errno 12] Cannot allocate memory"),
    (CauseKind.HOST_MEMORY, "terminate called after throwing an instance of 'std::bad_alloc'"),
    (CauseKind.HOST_MEMORY, "MemoryError"),
    (CauseKind.HOST_MEMORY, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    (CauseKind.HOST_MEMORY, "Fatal Python error: Bus error"),
    (CauseKind.DISK, "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'"),
    (CauseKind.DISK, "OSError: [Errno 122] Disk quota exceeded"),
    (
        CauseKind.GPU_UNSUPPORTED,
        "CUDA error: no kernel image is available for execution on the device",
    ),
    (CauseKind.GPU_UNSUPPORTED, "RuntimeError: CUDA error: invalid device function"),
    (
        CauseKind.GPU_UNSUPPORTED,
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.",
    ),
    (CauseKind.DRIVER, "RuntimeError: CUDA driver version is insufficient for CUDA runtime version"),
    (CauseKind.DRIVER, "RuntimeError: The NVIDIA driver on your system is too old (found version 12010)."),
    (CauseKind.DRIVER, "RuntimeError: No CUDA GPUs are available"),
    (CauseKind.DRIVER, "Error 803: system has unsupported display driver / cuda driver combination"),
    (CauseKind.DRIVER, "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"),
    (CauseKind.DRIVER, "vllm: error while loading shared libraries: libcuda.so.1: cannot open shared object file"),
    (CauseKind.GPU_FAULT, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    (CauseKind.GPU_FAULT, "CUDA error: unspecified launch failure"),
    (CauseKind.GPU_FAULT, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
    (CauseKind.GPU_FAULT, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."),
    (CauseKind.COLLECTIVE, "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"),
    (CauseKind.COLLECTIVE, "ncclSystemError: System call (e.g. socket, malloc) or external library call failed"),
    (CauseKind.COLLECTIVE, "ncclRemoteError: A call failed possibly due to a network error"),
    (CauseKind.COLLECTIVE, "ncclInternalError: Internal check failed."),
    (CauseKind.COLLECTIVE, "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."),
    (CauseKind.COLLECTIVE, "Bootstrap : no socket interface found"),
    (CauseKind.COLLECTIVE, "ibv_modify_qp with errno 110 failed"),
    (CauseKind.RENDEZVOUS, "torch.distributed.DistNetworkError: The client socket has timed out after 600s"),
    (CauseKind.RENDEZVOUS, "torch.distributed.DistStoreError: wait timeout after 600000ms"),
    (CauseKind.RENDEZVOUS, "Timed out after 601 seconds waiting for clients. 1/2 clients joined."),
    (CauseKind.RENDEZVOUS, "The client socket has failed to connect to any network address of (10.0.0.1, 29501)."),
    (
        CauseKind.LIBRARY,
        "llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared object file",
    ),
    (CauseKind.LIBRARY, "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"),
    (CauseKind.LIBRARY, "/lib/libc.so.6: version `GLIBC_2.38' not found (required by ./llama-server)"),
    (CauseKind.CPU_UNSUPPORTED, "bash: ./llama-server: cannot execute binary file: Exec format error"),
    (CauseKind.CPU_UNSUPPORTED, "Fatal Python error: Illegal instruction"),
    (CauseKind.FLAG, "vllm: error: unrecognized arguments: --no-such-flag 3"),
    (CauseKind.FLAG, "vllm serve: error: argument --dtype: invalid choice: 'x' (choose from 'auto')"),
    (CauseKind.FLAG, "error: argument --port: expected one argument"),
    (CauseKind.FLAG, "error: ambiguous option: --pp could match --pp-size, --pp-async-batch-depth"),
    (CauseKind.PORT, "OSError: [Errno 98] Address already in use"),
    (
        CauseKind.WEIGHTS_MISSING,
        "errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/m'",
    ),
    (CauseKind.WEIGHTS_MISSING, "RuntimeError: Cannot find any model weights with `/m`"),
    (CauseKind.WEIGHTS_MISSING, "OSError: /m does not appear to have a file named config.json."),
    (CauseKind.WEIGHTS_MISSING, "OSError: /m is not a local folder and is not a valid model identifier listed on hf"),
    (CauseKind.WEIGHTS_MISSING, "ValueError: Unrecognized model in /m. Should have a `model_type` key"),
    (
        CauseKind.WEIGHTS_CORRUPT,
        "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
    ),
    (CauseKind.WEIGHTS_CORRUPT, "Error while deserializing header: HeaderTooLarge"),
    (CauseKind.ARCHITECTURE, "ValueError: Model architectures ['FooForCausalLM'] are not supported for now."),
    (
        CauseKind.ARCHITECTURE,
        "The checkpoint has model type `foomodel` but Transformers does not recognize this architecture.",
    ),
    (CauseKind.UNAUTHORISED, "huggingface_hub.errors.GatedRepoError: 403 Client Error."),
    (CauseKind.UNAUTHORISED, "401 Client Error: Unauthorized for url: https://huggingface.co/x"),
    (CauseKind.UNAUTHORISED, "Access to model org/x is restricted. You must be authenticated to access it."),
    (CauseKind.UNAUTHORISED, "Repository Not Found for url: https://huggingface.co/api/models/x."),
    (CauseKind.OFFLINE, "LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder"),
    (
        CauseKind.OFFLINE,
        "outgoing traffic has been disabled. To enable repo look-ups, set 'local_files_only' to False.",
    ),
    (CauseKind.TOKENIZER, "ValueError: Tokenizer class FooTokenizer does not exist or is not currently imported."),
    (CauseKind.TOKENIZER, "Please pass the argument `trust_remote_code=True` to allow custom code to be run."),
    (CauseKind.TOKENIZER, "ImportError: LlamaTokenizer requires the SentencePiece library but it was not found"),
    (CauseKind.TOKENIZER, "ModuleNotFoundError: No module named 'tiktoken'"),
    (CauseKind.QUANTIZATION, "ValueError: torch.bfloat16 is not supported for quantization method awq."),
    (CauseKind.QUANTIZATION, "ValueError: Unknown quantization method: foo."),
    (CauseKind.QUANTIZATION, "The quantization method fp8 is not supported for the current GPU."),
    # counted where nothing else is said
    (CauseKind.DRIVER, "libcuda.so.1: cannot open shared object file"),
    (CauseKind.DRIVER, "pynvml.NVMLError: Failed to initialize NVML: Driver/library version mismatch"),
    (CauseKind.COLLECTIVE, "gpu1:1:2 [0] NCCL WARN Call to ibv_reg_mr"),
    (CauseKind.OFFLINE, "socket.gaierror: [Errno -3] Temporary failure in name resolution"),
    (CauseKind.OFFLINE, "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /x"),
    (CauseKind.RENDEZVOUS, "Connection refused, tcp://10.0.0.1:29501"),
    (CauseKind.COLLECTIVE, "[rank0] Connection closed by remote peer gpu02"),
]


@pytest.mark.parametrize(("kind", "line"), SAMPLES)
def test_a_line_names_its_cause(kind: CauseKind, line: str) -> None:
    cause = diagnose(["INFO starting", line, "RuntimeError: it failed"], 1, None)
    assert cause is not None
    assert cause.kind is kind
    assert cause.remedy
    # In whatever case somebody prints it.
    assert getattr(diagnose([line.upper()], 1, None), "kind", None) is kind


@pytest.mark.parametrize("each", RULES, ids=lambda each: each.pattern.pattern[:40])
def test_every_rule_has_a_line_that_it_finds(each: object) -> None:
    first = [next((found for found in RULES if found.pattern.search(line)), None) for _, line in SAMPLES]
    assert any(found is each for found in first)


@pytest.mark.parametrize(
    "line",
    [
        "config: ModelConfig(model='/m', trust_remote_code=True, dtype=auto)",
        "INFO: loading the model, 12.5 GiB of GPU memory are free",
        "WARNING: bfloat16 is slow on this CPU",
        "GET /v1/models HTTP/1.1 401 Unauthorized",
        "Warning: deprecated flag",
    ],
)
def test_an_ordinary_line_names_none(line: str) -> None:
    assert diagnose([line], 1, None) is None


def test_the_first_cause_wins_and_its_prefix_is_gone() -> None:
    lines = [
        "(APIServer pid=1) INFO 11-29 10:00:00 [api_server.py:10] starting",
        "(EngineCore pid=2) ERROR 11-29 10:00:01 [core.py:99]   ValueError:   Unknown quantization method: foo.",
        "(APIServer pid=1) OSError: [Errno 98] Address already in use",
    ]
    cause = diagnose(lines, 1, None, strip=STRIP)
    assert cause is not None
    assert (cause.kind, cause.line) == (CauseKind.QUANTIZATION, "ValueError: Unknown quantization method: foo.")


def test_a_generic_line_is_never_the_cause() -> None:
    lines = ["RuntimeError: Engine core initialization failed: Address already in use", "MemoryError"]
    cause = diagnose(lines, 1, None, generic=GENERIC)
    assert cause is not None
    assert cause.line == "MemoryError"
    assert diagnose(lines[:1], 1, None, generic=GENERIC) is None


def test_what_may_be_harmless_counts_only_alone() -> None:
    lines = ["NCCL WARN something", "Connection closed by remote peer", "MemoryError"]
    assert getattr(diagnose(lines, 1, None), "kind", None) is CauseKind.HOST_MEMORY
    alone = diagnose(lines[:2], 137, None)
    assert alone is not None
    assert (alone.kind, alone.line) == (CauseKind.COLLECTIVE, "NCCL WARN something")


def test_the_rules_of_an_engine_come_before_the_common_ones() -> None:
    own = rule(CauseKind.PARSER, r"no parser (\w+)|address (\w+)", "take {0}{1} out", line="parser: {0}{1}")
    assert diagnose(["Address already in use"], 1, None, [own]) == Cause(
        kind=CauseKind.PARSER, line="parser: already", remedy="take already out"
    )
    late = diagnose(["Address already in use", "no parser x"], 1, None, [rule(CauseKind.PARSER, "no parser")])
    assert getattr(late, "kind", None) is CauseKind.PORT


def test_a_line_that_comes_out_empty_is_shown_as_it_was() -> None:
    own = rule(CauseKind.OTHER, r"fatal:(.*)", line="{0}")
    assert getattr(diagnose(["fatal: "], 1, None, [own]), "line", None) == "fatal:"


@pytest.mark.parametrize("text", ["{1}", "{name}", "{", "{0.there}", "{0[3]}", "set it to {a,b}", "{0:d}"])
def test_a_text_that_cannot_be_filled_is_found_when_the_rule_is_made(text: str) -> None:
    for more in ({"remedy": text}, {"line": text}):
        with pytest.raises(ValueError, match=r"the rule 'no \(.\)' can't fill its remedy or line"):
            rule(CauseKind.OTHER, r"no (.)", more.get("remedy"), line=more.get("line"))


@pytest.mark.parametrize(
    ("code", "signal", "kind"),
    [
        (None, 9, CauseKind.HOST_MEMORY),
        (137, None, CauseKind.HOST_MEMORY),
        (None, 7, CauseKind.HOST_MEMORY),
        (135, None, CauseKind.HOST_MEMORY),
        (None, 4, CauseKind.CPU_UNSUPPORTED),
        (132, None, CauseKind.CPU_UNSUPPORTED),
        (126, None, CauseKind.LIBRARY),
        (127, None, CauseKind.LIBRARY),
        (1, None, None),
        (0, None, None),
        (143, None, None),
        (255, None, None),
        (None, 15, None),
        (None, None, None),
    ],
)
def test_the_exit_tells_where_no_line_does(code: int | None, signal: int | None, kind: CauseKind | None) -> None:
    cause = diagnose(["nothing to see"], code, signal)
    assert (cause and cause.kind) == kind
    assert diagnose((), code, signal) == cause
    assert cause is None or cause.remedy
    # And a line is more than an exit.
    assert getattr(diagnose(["No space left on device"], code, signal), "kind", None) is CauseKind.DISK


def test_a_kill_may_have_been_somebodys() -> None:
    cause = diagnose((), None, 9)
    assert cause is not None
    assert "kernel" in cause.line
    assert "somebody or another program killed it" in str(cause.remedy)


def test_a_long_line_is_cut_for_whoever_reads_it() -> None:
    cause = diagnose([f"MemoryError: {'x' * 100_000}"], 1, None)
    assert cause is not None
    assert len(cause.line) == MAX_LINE_CHARS + 1
    assert cause.line.endswith("…")


def test_of_one_that_served_no_cause_of_a_start_is_looked_for() -> None:
    refused = "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://example.org/a.png"
    ended = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    own = (rule(CauseKind.FLAG, "odd schema"),)
    lines = ("odd schema", refused, ended)
    first = diagnose(lines, 1, None, own)
    assert first is not None
    assert first.kind is CauseKind.FLAG
    cause = diagnose(lines, 1, None, own, served=True)
    assert cause is not None
    assert (cause.kind, cause.line) == (CauseKind.GPU_MEMORY, ended)
    assert diagnose(lines[:2], None, 15, own, served=True) is None


GARBAGE = st.text(alphabet=st.characters(exclude_categories=()), max_size=200)


@pytest.mark.slow
@given(st.lists(GARBAGE | st.sampled_from([line for _, line in SAMPLES]), max_size=10), st.none() | st.integers())
def test_nothing_that_is_printed_is_too_odd(lines: list[str], number: int | None) -> None:
    for code, signal in ((number, None), (None, number)):
        cause = diagnose(lines, code, signal, strip=STRIP, generic=GENERIC)
        if cause is not None:
            assert cause.line.strip()
            assert "\n" not in cause.line + (cause.remedy or "")
            assert cause == diagnose(lines, code, signal, strip=STRIP, generic=GENERIC)


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    [
        *("Model architecture ", "ibv_a ", "tcp:// ", "Connection refused ", "Access to model ", "requires "),
        *(
            "quantization method ",
            "model type x ",
            "Free memory on device ",
            "ImportError: lib",
            "error: argument ",
            " ",
        ),
    ],
)
def test_a_line_of_any_length_is_read_in_one_go(piece: str) -> None:
    """A pattern that tries again from each beginning would not come back from these."""
    diagnose([piece * (100_000 // len(piece))] * 20, 1, None, strip=STRIP, generic=GENERIC)
