"""What ended a llama-server, from logs that b8672 to b11549 really wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmgw_llamacpp
from llmgw.engines import Cause, CauseKind
from llmgw.engines.registry import open_engine
from llmgw_llamacpp import exits

ENGINE = open_engine("llamacpp", llmgw_llamacpp)
LOGS = Path(__file__).parent / "logs"
VERSIONS = ("b8672", "b10068", "b10434", "b11549")
CAUSES = {
    "missing": (CauseKind.WEIGHTS_MISSING, "failed to open GGUF file 'missing.gguf' (No such file or directory)"),
    "truncated": (
        CauseKind.WEIGHTS_CORRUPT,
        "the weights truncated.gguf: tensor 'token_embd.weight' data is not within the file bounds, model is corrupted "
        "or incomplete",
    ),
    "junk": (
        CauseKind.WEIGHTS_CORRUPT,
        "the weights junk.gguf: invalid magic characters: 'hell', expected 'GGUF'",
    ),
    "port": (CauseKind.PORT, "couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18342"),
    "flag": (CauseKind.FLAG, "error: invalid argument: --bogus"),
}
ONLY_B10434 = {
    "adapter": (CauseKind.ARCHITECTURE, "the adapter adapter.gguf: model arch and LoRA arch mismatch"),
    "architecture": (CauseKind.ARCHITECTURE, "unknown model architecture: 'nonesuch'"),
    "cache": (CauseKind.KV_CACHE, "failed to allocate buffer for kv cache"),
    "library": (CauseKind.LIBRARY, "the shared library libllama-server-impl.so is missing"),
    "memory": (CauseKind.HOST_MEMORY, "insufficient memory (attempted to allocate 42.12 MB)"),
    "mmproj": (CauseKind.ARCHITECTURE, "the mmproj: Failed to load CLIP model from smollm2.gguf"),
    "offline": (
        CauseKind.OFFLINE,
        "no file of weights to load: exactly one out metadata, path_model, and file must be defined",
    ),
    "removed": (
        CauseKind.FLAG,
        'error while handling argument "--draft-max": the argument has been removed. use --spec-draft-n-max or '
        "--spec-ngram-mod-n-max",
    ),
    "warmup": (CauseKind.CONTEXT, "GGML_ASSERT(n_tokens_all <= cparams.n_batch) failed"),
}

# Good weights, and another file beside them that is not.
BESIDE = {
    "adapter-page": (
        CauseKind.WEIGHTS_CORRUPT,
        "the adapter html.gguf: invalid magic characters: '<htm', expected 'GGUF'",
    ),
    "adapter-shape": (
        CauseKind.ARCHITECTURE,
        "the adapter badshape.gguf: tensor 'blk.0.attn_q.weight' has incorrect shape (hint: maybe wrong base model?)",
    ),
    "adapter-model": (
        CauseKind.ARCHITECTURE,
        "the adapter smol.gguf: expect general.type to be 'adapter', but got: model",
    ),
    "adapter-missing": (
        CauseKind.WEIGHTS_MISSING,
        "the adapter: failed to open GGUF file 'no.gguf' (No such file or directory)",
    ),
    "adapter": ONLY_B10434["adapter"],
    "mmproj": ONLY_B10434["mmproj"],
    "mmproj-page": (
        CauseKind.WEIGHTS_CORRUPT,
        "the mmproj html.gguf: invalid magic characters: '<htm', expected 'GGUF'",
    ),
    "draft-page": (
        CauseKind.WEIGHTS_CORRUPT,
        "the draft model html.gguf: invalid magic characters: '<htm', expected 'GGUF'",
    ),
    "control-page": (
        CauseKind.WEIGHTS_CORRUPT,
        "the control vector html.gguf: invalid magic characters: '<htm', expected 'GGUF'",
    ),
}


def recorded(name: str) -> tuple[str, ...]:
    return tuple((LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines())


def cause_of(*lines: str, code: int | None = 1, signal: int | None = None) -> Cause:
    cause = ENGINE.read_exit(lines, code, signal)
    assert cause is not None
    return cause


@pytest.mark.parametrize("case", CAUSES)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_line_that_names_the_cause_is_found(version: str, case: str) -> None:
    cause = cause_of(*recorded(f"{version}-{case}"))
    assert (cause.kind, cause.line) == CAUSES[case]
    assert cause.remedy


@pytest.mark.parametrize("case", ONLY_B10434)
def test_rarer_causes_are_found_as_well(case: str) -> None:
    cause = cause_of(*recorded(f"b10434-{case}"))
    assert (cause.kind, cause.line) == ONLY_B10434[case]
    assert cause.remedy


@pytest.mark.parametrize("case", BESIDE)
def test_a_file_beside_the_weights_is_blamed_by_its_name_and_what_it_is(case: str) -> None:
    cause = cause_of(*recorded(f"b10434-{case}"))
    assert (cause.kind, cause.line) == BESIDE[case]
    mine = case.partition("-")[0]
    assert mine in str(cause.remedy)
    # And none of the others, which are in order.
    others = {"adapter", "mmproj", "draft", "control"} - {mine}
    assert not others & set(str(cause.remedy).replace(":", "").split())


@pytest.mark.parametrize("case", ["adapter-page", "adapter-shape", "adapter-missing"])
def test_a_newer_release_says_less_of_an_adapter(case: str) -> None:
    kind, line = BESIDE[case]
    cause = cause_of(*recorded(f"b11549-{case}"))
    newer = "the adapter: failed to open 'no.gguf': No such file or directory"
    assert (cause.kind, cause.line) == (kind, newer if case == "adapter-missing" else line)


@pytest.mark.parametrize(
    ("case", "kind", "line"),
    [
        (
            "page",
            CauseKind.WEIGHTS_CORRUPT,
            "the weights smol-00002-of-00003.gguf: invalid magic characters: '<htm', expected 'GGUF'",
        ),
        (
            "truncated",
            CauseKind.WEIGHTS_CORRUPT,
            "the weights smol-00001-of-00003.gguf or another of its parts: tensor 'blk.2.ffn_gate.weight' data is not "
            "within the file bounds, model is corrupted or incomplete",
        ),
        (
            "other",
            CauseKind.WEIGHTS_CORRUPT,
            "invalid split file idx: 2 (file: smol-00002-of-00003.gguf), expected 1",
        ),
        (
            "missing",
            CauseKind.WEIGHTS_MISSING,
            "failed to open GGUF file 'smol-00003-of-00003.gguf' (No such file or directory)",
        ),
    ],
)
def test_of_weights_in_several_files_the_one_that_is_bad_is_blamed(case: str, kind: CauseKind, line: str) -> None:
    cause = cause_of(*recorded(f"b11549-split-{case}"))
    assert (cause.kind, cause.line) == (kind, line)
    assert cause.remedy
    if case == "other":
        assert "smol-00002-of-00003.gguf is another part than its name says" in cause.remedy


def test_parts_that_are_not_of_one_model_are_told() -> None:
    place = "0.00.005.000 E llama_model_load: error loading model: "
    end = "0.00.006.000 E cmn  common_init_: failed to load model '/m/x-00001-of-00002.gguf'"
    for words in ("corrupted model: 9 tensors expected but 8 found", "invalid model: tensor 'a' is duplicated"):
        cause = cause_of(f"{place}{words}", end)
        assert cause.kind is CauseKind.WEIGHTS_CORRUPT
        assert cause.line == f"the weights /m/x-00001-of-00002.gguf or another of its parts: {words}"
    cause = cause_of(
        f"{place}illegal split file idx: 1 (file: /m/x-00002-of-00002.gguf), model must be loaded with the first"
    )
    assert (cause.kind, "given as its first" in str(cause.remedy)) == (CauseKind.WEIGHTS_MISSING, True)


def test_each_file_is_blamed_for_its_own_fault() -> None:
    """A projector that it did not like does not make the weights' fault its own, nor the other way round."""
    projector = "0.00.006.595 E mtmd_get_memory_usage: error: Failed to load CLIP model from /m/mm.gguf"
    magic = "0.00.288.197 E gguf_init_from_reader: invalid magic characters: '<htm', expected 'GGUF'"
    weights = "0.00.288.879 E cmn  common_init_: failed to load model '/m/x.gguf'"
    assert cause_of(projector, magic, weights).line.startswith("the weights /m/x.gguf: invalid magic")
    assert cause_of(magic, projector, weights).line.startswith("the mmproj /m/mm.gguf: invalid magic")
    assert cause_of(magic).line == "invalid magic characters: '<htm', expected 'GGUF'"


def test_an_adapter_that_may_not_be_read_is_told_as_such() -> None:
    opened = "0.00.299.375 E gguf_init_from_file: failed to open GGUF file '/l/a.gguf' (Permission denied)"
    newer = "0.02.314.910 E llama_adapter_lora_init: failed to open '/l/a.gguf': Permission denied"
    for line, told in (
        (opened, "failed to open GGUF file '/l/a.gguf' (Permission denied)"),
        (newer, "failed to open '/l/a.gguf': Permission denied"),
    ):
        cause = cause_of(line, "0.00.299.480 E cmn  common_init_: failed to load lora adapter '/l/a.gguf'")
        assert cause.line == f"the adapter: {told}"
        assert cause.remedy == "let the user that the engine runs as read /l/a.gguf"


def test_an_adapter_without_room_is_a_matter_of_memory() -> None:
    line = (
        "0.00.3.0 E llama_adapter_lora_init: failed to apply lora adapter: failed to allocate buffer for lora adapter"
    )
    assert cause_of(line).kind is CauseKind.HOST_MEMORY


@pytest.mark.parametrize("version", VERSIONS)
def test_a_bad_value_is_named_with_its_flag(version: str) -> None:
    cause = cause_of(*recorded(f"{version}-value"))
    assert cause.kind is CauseKind.FLAG
    assert cause.line.startswith('error while handling argument "--ctx-size": ')
    assert "--ctx-size" in str(cause.remedy)


@pytest.mark.parametrize("version", ["b8672", "b10434", "b11549"])
def test_a_log_without_a_fault_leaves_the_cause_to_the_exit(version: str) -> None:
    """It has two requests that were refused: their errors are not the engine's."""
    lines = recorded(f"{version}-good")
    assert ENGINE.read_exit(lines, 1, None) is None
    assert cause_of(*lines, code=None, signal=9).kind is CauseKind.HOST_MEMORY
    assert cause_of(*lines, code=None, signal=4).kind is CauseKind.CPU_UNSUPPORTED


@pytest.mark.parametrize(
    ("line", "kind", "told"),
    [
        (
            "/opt/llama.cpp/llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared "
            "object file: No such file or directory",
            CauseKind.LIBRARY,
            "the shared library libgomp.so.1 is missing",
        ),
        (
            "llama_model_load: error loading model: unknown model architecture: 'qwen9'",
            CauseKind.ARCHITECTURE,
            "unknown model architecture: 'qwen9'",
        ),
        (
            "0.01.300.000 E llama_model_load: error loading model: error loading model vocabulary: unknown "
            "pre-tokenizer type: 'x9'",
            CauseKind.TOKENIZER,
            "unknown pre-tokenizer type: 'x9'",
        ),
        (
            "0.01.300.000 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: "
            "cudaMalloc failed: out of memory",
            CauseKind.GPU_MEMORY,
            "allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
        ),
        (
            "0.01.300.000 E alloc_tensor_range: failed to allocate Vulkan0 buffer of size 4294967296",
            CauseKind.GPU_MEMORY,
            "failed to allocate Vulkan0 buffer of size 4294967296",
        ),
        (
            "llama_init_from_model: quantized V cache requires flash_attn to be enabled",
            CauseKind.QUANTIZATION,
            "quantized V cache requires flash_attn to be enabled",
        ),
        (
            "0.01.300.000 E gguf_init_from_file: failed to open GGUF file '/m/x.gguf' (Permission denied)",
            CauseKind.WEIGHTS_MISSING,
            "failed to open GGUF file '/m/x.gguf' (Permission denied)",
        ),
        (
            "0.00.308.747 E llama_model_load: error loading model: mmap failed: Cannot allocate memory",
            CauseKind.HOST_MEMORY,
            "mmap failed: Cannot allocate memory",
        ),
        ("ggml.c:123: GGML_ASSERT(n > 0) failed", CauseKind.OTHER, "GGML_ASSERT(n > 0) failed"),
        ("/src/ggml/src/ggml.c:123: GGML_ASSERT(n > 0) failed", CauseKind.OTHER, "GGML_ASSERT(n > 0) failed"),
        (
            "/workspace/llama.cpp/common/common.cpp:2245: get_sub_batch: failed to add token 2 at index 1 (error -1)",
            CauseKind.CONTEXT,
            "failed to add token 2 at index 1 (error -1)",
        ),
        ("/src/ggml-cuda/mmq.cu:31: unsupported type", CauseKind.OTHER, "unsupported type"),
        ("/src/ggml-cuda/mmq.cu:31: fatal error", CauseKind.OTHER, "mmq.cu:31: fatal error"),
        ("/src/ggml-cuda.cu:98: CUDA error: out of memory", CauseKind.GPU_MEMORY, None),
        ("  what():  std::bad_alloc", CauseKind.HOST_MEMORY, None),
        ("  what():  Resource temporarily unavailable", CauseKind.HOST_MEMORY, "Resource temporarily unavailable"),
        (
            "exiting due to RuntimeError: Resource temporarily unavailable",
            CauseKind.HOST_MEMORY,
            "Resource temporarily unavailable",
        ),
        (
            "ModuleNotFoundError: No module named 'llmgw'",
            CauseKind.LIBRARY,
            "ModuleNotFoundError: No module named 'llmgw'",
        ),
        ("0.01.000.000 E srv  main: an error that nobody has seen", CauseKind.OTHER, "an error that nobody has seen"),
    ],
)
def test_other_causes_are_known(line: str, kind: CauseKind, told: str | None) -> None:
    cause = cause_of(line)
    assert (cause.kind, cause.line) == (kind, told or line.strip().replace("  ", " "))


@pytest.mark.parametrize(
    "line",
    [
        "0.00.023.229 E cmn  common_init_: failed to load model 'x.gguf'",
        "0.00.023.236 E srv  llama_server: exiting due to model loading error",
        "0.00.014.351 E common_fit_params: encountered an error while trying to fit params to free memory: failed",
        "0.00.756.735 E cmn  common_init_: failed to create context with model '/m/x.gguf'",
        "0.00.756.750 E srv    load_model: failed to create_context with model '/m/x.gguf'",
        "init: exiting due to HTTP server error",
        "0.01.338.489 E srv    send_error: task id = 4, error: Cannot allocate memory",
        "0.00.003.231 W srv  llama_server: warning: failed to mlock 4-byte buffer: Cannot allocate memory",
        "warning: failed to mlock 4-byte buffer (after previously locking 0 bytes): Cannot allocate memory",
        "0.00.003.231 I srv  x: GGML_ASSERT(no) failed",
    ],
)
def test_what_is_printed_whatever_went_wrong_is_never_the_cause(line: str) -> None:
    assert exits.read((line,), 1, None) is None


def test_cards_that_it_did_without_are_the_cause_of_last_resort() -> None:
    cuda = "0.00.001.000 E ggml_cuda_init: failed to initialize CUDA: CUDA driver version is insufficient"
    missing = "0.00.002.000 E gguf_init_from_file: failed to open GGUF file 'x.gguf' (No such file or directory)"
    assert cause_of(cuda, missing).kind is CauseKind.WEIGHTS_MISSING
    assert cause_of(cuda).kind is CauseKind.DRIVER


def test_the_cache_is_named_whatever_else_had_no_room() -> None:
    card = "0.01.3.0 E x: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory"
    cache = "0.01.3.1 E x: failed to initialize the context: failed to allocate buffer for kv cache"
    assert cause_of(card, cache).kind is CauseKind.KV_CACHE
