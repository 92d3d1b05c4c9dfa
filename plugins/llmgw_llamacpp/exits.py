"""Why a llama-server ended, from its last lines.

A failed start prints a chain: the cause first, then each caller's "failed to load model", then "exiting due to …".
Where no rule knows the cause, it is the first error that is not such a wrapper.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmgw.engines import Cause, CauseKind, Rule, diagnose, rule

_LONGEST = 2000

# (the source is the definition's, which no engine knows)
_AGAIN = "`llmgw ctl weights pull SOURCE` mends what llmgw has fetched; of your own, put the whole file there"

# "0.00.014.292 E llama_model_load: error loading model: …": since the start, level, then a name or two of code.
_LEVELLED = re.compile(r"\s*(?:\d+\.\d+\.\d+\.\d+ )?([IWEDT]) (.*)")
_PLACE = re.compile(r"(?!error: |what\(\))(?:\w+ +)?[a-z_~][\w~]*(?:\(\))?: +")

# Printed at the end of whatever went wrong, by each caller in turn.
_WRAPPER = re.compile(
    r"^(?:error loading model: )?(?:llama_model_loader: )?failed to load model\b(?!,? '')"
    r"|^encountered an error while trying to fit params"
    r"|^exiting due to\b(?! RuntimeError: Resource temporarily unavailable)"
    r"|^failed to (?:create|initialize) (?:the )?(?:llama_)?context\b(?!:)"
    r"|^failed to create_context\b"
    r"|^\[mtmd\] failed to get memory usage"
    r"|\bfailed to mlock\b"
)

# Errors of one request: the engine goes on, and what it says weeks later of its end must not be one of these.
_OF_A_REQUEST = re.compile(r"(?:slot|que|res) |srv +(?:send_error|log_server_r|stop|operator\(\)|format_)")

# It goes on without its cards then, and ends, if it does, for another reason.
_SURVIVED = re.compile(r"\bggml_cuda_init: failed to initialize")

# Whatever ran out of memory before it says less: it was the cache that was asked for.
_KV_CACHE = rule(
    CauseKind.KV_CACHE,
    r"(failed to allocate buffer for kv cache|failed to allocate buffer for rs cache)",
    "the cache does not fit beside the weights: a smaller --ctx-size or context_length, fewer slots (--parallel), or "
    "--cache-type-k q8_0 and --cache-type-v q8_0",
    line="{0}",
)

RULES: tuple[Rule, ...] = (
    # the command line
    rule(
        CauseKind.FLAG,
        r"(error while handling argument \"(.+?)\": the argument has been removed.*)",
        "this release has no {1}: take it out of args, or write what the line names",
        line="{0}",
    ),
    rule(
        CauseKind.FLAG,
        r"(error while handling argument \"(.+?)\": .*failed to open file.*)",
        "{1} in args names a file that can't be read on this node: put it there, or correct its path",
        line="{0}",
    ),
    rule(
        CauseKind.FLAG,
        r"(error while handling argument \"(.+?)\": .*)",
        "correct the value of {1} in args; `llmgw ctl engine-check` tells what this release takes there",
        line="{0}",
    ),
    rule(
        CauseKind.FLAG,
        r"(error while handling environment variable \"(.+?)\": .*)",
        "correct {1} in the profile's env",
        line="{0}",
    ),
    rule(
        CauseKind.FLAG,
        r"(error: invalid argument: (.+))",
        "this release does not know {1}: take it out of args; `llmgw ctl engine-check` tells what it is called now",
        line="{0}",
    ),
    rule(
        CauseKind.FLAG,
        r"^(?:error: )?(Unexpected token: .* of type \d+.*|failed to initialize chat template)",
        "the chat template can't be read: correct --chat-template or --chat-template-file in args; without these it is "
        "the model's own",
        line="chat template: {0}",
    ),
    rule(
        CauseKind.FLAG,
        r"(the supplied chat template is not supported.*)",
        "correct --chat-template or --chat-template-file in args",
        line="{0}",
    ),
    rule(
        CauseKind.PORT,
        r"(couldn't bind HTTP server socket, hostname: .*port: (\d+).*)",
        "another program has port {1}: end it, or give the node other engine_ports",
        line="{0}",
    ),
    # the weights
    rule(
        CauseKind.WEIGHTS_MISSING,
        r"(failed to open GGUF file '(.+)' \(Permission denied\)|failed to open '(.+)': Permission denied)",
        "let the user that the engine runs as read {1}{2}",
        line="{0}",
    ),
    rule(
        CauseKind.WEIGHTS_MISSING,
        r"(failed to open GGUF file '(.+)' \(.+\)|failed to open (.+\.gguf)\b.*)",
        "there is no such file on this node: correct the path in the definition, or put the file there",
        line="{0}",
    ),
    rule(
        CauseKind.WEIGHTS_MISSING,
        r"(illegal split file idx.*|invalid split file name.*|missing split.*)",
        "a model in several files is given as its first (-00001-of-), with the others beside it",
        line="{0}",
    ),
    rule(
        CauseKind.WEIGHTS_CORRUPT,
        r"(invalid split file idx: .* \(file: (.+)\), expected .*)",
        f"{{1}} is another part than its name says: fetch it again; {_AGAIN}",
        line="{0}",
    ),
    rule(
        CauseKind.WEIGHTS_CORRUPT,
        r"(corrupted model: \d+ tensors expected but \d+ found|invalid model: tensor '.*' is duplicated"
        r"|invalid split count\b.*)",
        f"its parts are not of one model: fetch all of them again; {_AGAIN}",
        line="{0}",
    ),
    rule(
        CauseKind.WEIGHTS_CORRUPT,
        r"(invalid magic characters: .*)",
        f"the file is no GGUF: was the download another page, or cut off? Fetch it again; {_AGAIN}",
        line="{0}",
    ),
    rule(
        CauseKind.WEIGHTS_CORRUPT,
        r"((?:tensor '.*' )?data is not within the file bounds.*|encountered length_error .*"
        r"|failed to read (?:magic|header|key-value|tensor).*"
        r"|gguf_init_from_file\w*: failed to read .*)",
        f"the file is cut off or damaged: fetch it again; {_AGAIN}",
        line="{0}",
    ),
    rule(
        CauseKind.ARCHITECTURE,
        r"(unknown model architecture: '.*')",
        "this release of llama.cpp does not know this kind of model: upgrade it",
        line="{0}",
    ),
    rule(
        CauseKind.TOKENIZER,
        r"(unknown pre-tokenizer type: '.*'|unknown tokenizer: '.*')",
        "this release of llama.cpp does not know the model's tokenizer: upgrade it",
        line="{0}",
    ),
    rule(
        CauseKind.QUANTIZATION,
        r"(tensor '.*' has invalid ggml type \d+.*)",
        "the weights are of a newer quantization than this release knows: upgrade it, or choose other weights",
        line="{0}",
    ),
    rule(
        CauseKind.QUANTIZATION,
        r"(quantized V cache .*requires? (?:flash_attn|flash attention).*)",
        "give it --flash-attn on, or no quantized --cache-type-v",
        line="{0}",
    ),
    rule(
        CauseKind.ARCHITECTURE,
        r"(wrong number of tensors; .*|missing tensor '.*'|key not found in model: .*|wrong shape; expected.*)",
        "the weights and this release do not go together: upgrade it, or take weights that were converted for it",
        line="{0}",
    ),
    rule(
        CauseKind.ARCHITECTURE,
        r"failed to apply lora adapter: (?!failed to (?:load|allocate) )(.+)|(model arch and LoRA arch mismatch)",
        "the adapter goes with other weights, or is none: take the one that was made for these",
        line="{0}{1}",
    ),
    rule(
        CauseKind.ARCHITECTURE,
        r"(mismatch between text model .* and mmproj .*)",
        "the mmproj goes with other weights: take the one that was made for these",
        line="{0}",
    ),
    rule(
        CauseKind.OFFLINE,
        r"(exactly one out metadata, path_model, and file must be defined|failed to load model,? '')",
        "it was started without a file of weights, or may not fetch the one that it was given",
        line="no file of weights to load: {0}",
    ),
    # memory and cards
    rule(
        CauseKind.GPU_MEMORY,
        r"((?:failed|unable) to allocate (?:CUDA|ROCm|Vulkan|SYCL|Metal|MTL)\w* buffer.*|\w*ErrorOutOfDeviceMemory.*"
        r"|ggml_vulkan: Device memory allocation of size .* failed.*|hipMalloc failed: out of memory)",
        "it needs more GPU memory than is free: less context, smaller weights, a higher tp, or fewer --gpu-layers",
        line="{0}",
    ),
    rule(
        CauseKind.GPU_MEMORY,
        r"(allocating [\d.]+ MiB on device \d+: .*out of memory)",
        "it needs more GPU memory than is free: less context, smaller weights, a higher tp, or fewer --gpu-layers",
        line="{0}",
    ),
    rule(
        CauseKind.HOST_MEMORY,
        r"(encountered bad_alloc error .*|failed to allocate buffer for lora adapter.*"
        r"|insufficient memory \(attempted to allocate.*|failed to allocate (?:CPU\w* )?buffer of size.*"
        r"|unable to allocate CPU\w* buffer.*|mmap failed: Cannot allocate memory)",
        "the node has too little memory for it: less context, fewer slots, smaller weights, or another node",
        line="{0}",
    ),
    rule(
        CauseKind.HOST_MEMORY,
        r"(GGML_ASSERT\(ctx->mem_buffer != NULL\) failed)",
        "the node has too little memory for it: less context, fewer slots, smaller weights, or another node",
        line="{0}",
        weak=True,
    ),
    rule(
        CauseKind.HOST_MEMORY,
        r"(error while loading shared libraries: \S+: failed to map segment.*"
        r"|\S+: failed to map segment from shared.*)",
        "the node has too little memory for the program itself: see what else runs there, and what limits it",
        line="{0}",
    ),
    rule(
        CauseKind.LIBRARY,
        r"(error while loading shared libraries: \S+: (?!cannot open shared object).*)",
        "replace the library that it names by one that fits this machine and this build",
        line="{0}",
    ),
    # "what():  Resource temporarily unavailable" is a thread that could not be made, in a program of C++ or in Python.
    rule(
        CauseKind.HOST_MEMORY,
        r"(?:what\(\): +|exiting due to RuntimeError: )(Resource temporarily unavailable)|(Thread creation failed: .*)",
        "it could not start a thread: give it more memory, or raise the limit of processes",
        line="{0}{1}",
    ),
    rule(
        CauseKind.CONTEXT,
        r"(failed to add token .*|GGML_ASSERT\(n_tokens_all <= .*n_batch\) failed)",
        "a slot or a batch has too little room: give it a larger context_length, --ctx-size or --batch-size",
        line="{0}",
    ),
    rule(
        CauseKind.DRIVER,
        r"(failed to initialize (?:CUDA|ROCm): .*)",
        "look at `nvidia-smi` on the node: the driver is absent, broken, or older than this build wants",
        line="{0}",
    ),
    rule(
        CauseKind.LIBRARY,
        r"(ModuleNotFoundError: .*|the embedded llama\.cpp can't be loaded.*)",
        "install it in the environment of llmgw",
        line="{0}",
    ),
    # Where llama.cpp does not say what is wrong with it.
    rule(
        CauseKind.ARCHITECTURE,
        r"((?:Failed to load CLIP model from|failed to load multimodal model,) .*)",
        "the mmproj is none that this release can use, or not whole: take one that was made for these weights",
        line="{0}",
        weak=True,
    ),
    rule(
        CauseKind.ARCHITECTURE,
        r"(failed to load lora adapter .*)",
        "the adapter is none that this release can use, or not whole: take one that was made for these weights",
        line="{0}",
        weak=True,
    ),
    # The last word before an abort. Of a few it is only "fatal error", and then the place is all there is to look for.
    rule(CauseKind.OTHER, r"(GGML_ASSERT\(.+)", line="{0}", weak=True),
    rule(CauseKind.OTHER, r"(CUDA error: .+)", line="{0}", weak=True),
    rule(
        CauseKind.OTHER, r"^(?:\S*/)?([\w.-]+\.(?:c|cc|cpp|cu|cuh|h|hpp|m|mm):\d+: fatal error)", line="{0}", weak=True
    ),
    rule(CauseKind.OTHER, r"^\S*\.(?:c|cc|cpp|cu|cuh|h|hpp|m|mm):\d+: (?:\w+: )?(.+)", line="{0}", weak=True),
    rule(CauseKind.OTHER, r"what\(\): +(.+)", line="{0}", weak=True),
    rule(CauseKind.OTHER, r"^([A-Z]\w*(?:Error|Exception): .+)", line="{0}", weak=True),
    rule(CauseKind.OTHER, r"^(error: .+)", line="{0}", weak=True),
)


# What is wrong with a file is said before its name is, and by its name only a caller knows what it was to be.
_OF_A_FILE = frozenset(
    {
        *(CauseKind.WEIGHTS_MISSING, CauseKind.WEIGHTS_CORRUPT, CauseKind.ARCHITECTURE),
        *(CauseKind.TOKENIZER, CauseKind.QUANTIZATION),
    }
)
_WEIGHTS = "weights"
_CALLERS = (
    ("adapter", re.compile(r"failed to load lora adapter (?:file from (.+)|'(.+)')$")),
    (
        "mmproj",
        re.compile(
            r"failed to load CLIP model from (.+?)(?:\. Does this file exist\?)?$"
            r"|failed to load multimodal model, '(.+)'$",
            re.IGNORECASE,
        ),
    ),
    ("draft model", re.compile(r"failed to load draft model,? '(.+)'$")),
    ("control vector", re.compile(r"failed to load control vector file from (.+)$")),
    # (its first part is in order then, by whose name the callers go)
    (_WEIGHTS, re.compile(r"failed to load GGUF split from (.+)$")),
    (_WEIGHTS, re.compile(r"failed to load model,? '(.+)'$")),
)
# What is told of one that is in several files may be of any of them, where no line names another.
_FIRST_PART = re.compile(r"-00001-of-(?!00001)\d{5}\.gguf$")
_NAMED = re.compile(r"\(file: .+\)")
_KEYS = {"adapter": "its source in loras", "mmproj": "the model's mmproj"}
_REMEDIES = {
    CauseKind.WEIGHTS_MISSING: "the {0} is not on this node: correct {1}, or put the file there",
    CauseKind.WEIGHTS_CORRUPT: "the file of the {0} is cut off, damaged or no GGUF (a page of HTML?): fetch it again; "
    f"{_AGAIN}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line that may tell: without its prefixes, whether it says of itself that it is an error, and whether it is
    printed whatever went wrong."""

    text: str
    error: bool
    wrapper: bool


def read(lines: Sequence[str], code: int | None, signal: int | None) -> Cause | None:
    """The cause; None where neither the lines nor the exit tell."""
    known = tuple(_read_lines(lines))
    told = [line for line in known if not line.wrapper]
    texts = [line.text for line in told]
    cache = next((found for text in texts if (found := _KV_CACHE.pattern.search(text)) is not None), None)
    if cache is not None:
        return Cause(kind=_KV_CACHE.kind, line=cache[0], remedy=_KV_CACHE.remedy)
    cause = diagnose(texts, code, signal, RULES)
    if cause is not None:
        return _name_file(cause, [line.text for line in known]) if cause.kind in _OF_A_FILE else cause
    error = next((line.text for line in told if line.error), None)
    return Cause(kind=CauseKind.OTHER, line=error) if error is not None else None


def _name_file(cause: Cause, texts: Sequence[str]) -> Cause:
    """The cause with the file that it is about: that of the first caller who names one after it."""
    at = next((at for at, text in enumerate(texts) if cause.line in text), len(texts))
    named = ((what, found) for text in texts[at:] for what, form in _CALLERS if (found := form.search(text)))
    what, found = next(named, (_WEIGHTS, None))
    path = next(filter(None, found.groups()), "") if found is not None else ""
    here = path in cause.line
    if what == _WEIGHTS:
        # Alone, the path says what it is: it is the model's source.
        whose = cause.kind is CauseKind.WEIGHTS_CORRUPT and not here and _NAMED.search(cause.line) is None
        part = " or another of its parts" if _FIRST_PART.search(path) else ""
        return replace(cause, line=f"the weights {path}{part}: {cause.line}") if whose else cause
    line = f"the {what}{'' if here else f' {path}'}: {cause.line}"
    own = _REMEDIES.get(cause.kind, "the {0} does not go with these weights or this release, or is none: take another")
    # Of a file that is there and may not be read the rule has named what to do.
    readable = "Permission denied" not in cause.line
    generic = readable and what not in (cause.remedy or "")
    remedy = own.format(what, _KEYS.get(what, "its path in args")) if generic else cause.remedy
    return replace(cause, line=line, remedy=remedy)


def _read_lines(lines: Sequence[str]) -> Iterator[_Line]:
    survived = []
    for line in lines:
        # Cut, so that no pattern has to be fast on a line of a megabyte.
        read_line = _read_line(line.strip()[:_LONGEST].partition("\n")[0])
        if read_line is None:
            continue
        if _SURVIVED.search(line[:_LONGEST]):
            survived.append(read_line)
        else:
            yield read_line
    yield from survived


def _read_line(line: str) -> _Line | None:
    levelled = _LEVELLED.fullmatch(line)
    level, text = (levelled[1], levelled[2]) if levelled is not None else ("", line)
    if level not in ("", "E") or _OF_A_REQUEST.match(text):
        return None
    place = _PLACE.match(text)
    words = " ".join((text[place.end() :] if place else text).split())
    if not words:
        return None
    return _Line(text=words, error=level == "E", wrapper=_WRAPPER.search(words) is not None)
