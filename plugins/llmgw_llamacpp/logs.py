"""What a line of llama-server's log tells: progress for whoever waits, or the cause of its end.

A failed start prints a chain: the cause first, then each caller's "failed to load model", then "exiting due to …".
The first line that is not such a wrapper is the cause; the wrappers are marked generic.
"""

from __future__ import annotations

import re

from llmgw.engines import LogFact

_LONGEST = 2000

# "0.00.014.292 E llama_model_load: error loading model: …": since the start, level, then a name or two of code.
_LINE = re.compile(r"\s*(?:\d+\.\d+\.\d+\.\d+ )?([IWEDT]) (.*)")
_PLACE = re.compile(r"(?:\w+ +)?[\w~]+(?:\(\))?: ")

# A place in llama.cpp's sources, up to the file's name.
_SOURCE = r"(?:\S*/)?(?=[\w.-]+\.(?:c|cc|cpp|cu|cuh|h|hpp|m|mm):\d+: )"

_PROGRESS = (
    (re.compile(r"loading model '(?:.*/)?([^'/]+)'"), "loading {0}"),
    (re.compile(r"loading model tensors, this can take a while"), "loading the weights"),
    (re.compile(r"warming up the model"), "warming up"),
    (re.compile(r"initializing, n_slots = (\d+), n_ctx_slot = (\d+)"), "slots: {0} of {1} tokens"),
    (re.compile(r"initializing slots, n_slots = (\d+)"), "slots: {0}"),
)

# Printed without a level: by the argument parser, the dynamic linker, an assertion, CUDA, and Python.
_FATAL = (
    re.compile(r"(?:.*/)?[\w.-]+: (error while loading shared libraries: .+)"),
    re.compile(r"(error: invalid argument: .+)"),
    re.compile(r'(error while handling (?:argument|environment variable) ".+)'),
    re.compile(r"(?:error: )?(the supplied chat template is not supported.*)"),
    re.compile(r".*?(GGML_ASSERT\(.+)"),
    re.compile(r".*?(CUDA error: .+)"),
    # The last word before an abort: "…/common.cpp:2245: get_sub_batch: failed to add token …". Of a few it is only
    # "fatal error", and then the place is all that there is to look for.
    re.compile(_SOURCE + r"([\w.-]+:\d+: fatal error)"),
    re.compile(_SOURCE + r"[\w.-]+:\d+: (?:\w+: )?(.+)"),
    re.compile(r".*?((?:cudaMalloc|ggml_aligned_malloc)\S* (?:failed|insufficient).+|insufficient memory .+)"),
    re.compile(r"\s*what\(\): +(.+)"),
    re.compile(r"([A-Z]\w*(?:Error|Exception): .+)"),
    re.compile(r"error: (.+)"),
)

_GENERIC = re.compile(
    r"(error loading model: )?(llama_model_loader: )?failed to load model\b"
    r"|encountered an error while trying to fit params"
    r"|exiting due to\b"
    r"|failed to (create|initialize) (the )?(llama_)?context\b(?!:)"
)

# Builds before the middle of 2026 print no levels: there a cause is known by its words alone.
_CAUSE = re.compile(
    r"failed to open GGUF file|invalid magic characters|error loading model: |unknown model architecture"
    r"|couldn't bind HTTP server socket|failed to allocate .*buffer|unable to allocate .*buffer"
)

# What llama.cpp says of the bytes, and not of the file that somebody gave.
_NO_GGUF = re.compile(r"invalid magic characters\b")
_NO_GGUF_MEANS = "; the weights are no GGUF file: was the download another page, or cut off? Fetch it again"

# Errors of one request: the engine goes on, and what it says weeks later of its end must not be one of these.
_OF_A_REQUEST = re.compile(r"(slot|que|res) |srv +(send_error|log_server_r|stop|operator\(\)|format_)")


def read(line: str) -> LogFact | None:
    """The fact in a line; None for the many without one."""
    # Cut, so that no pattern below has to be fast on a line of a megabyte.
    line = line.strip()[:_LONGEST].partition("\n")[0]
    levelled = _LINE.fullmatch(line)
    if levelled is None:
        return _read_bare(line)
    level, text = levelled[1], levelled[2]
    if level == "E":
        return None if _OF_A_REQUEST.match(text) else _fatal(_words(text))
    return _progress(text) if level == "I" else None


def _read_bare(line: str) -> LogFact | None:
    for pattern in _FATAL:
        if found := pattern.fullmatch(line):
            return _fatal(found[1])
    text = _words(line)
    if _GENERIC.match(text) or _CAUSE.match(text):
        return _fatal(text)
    return _progress(line)


def _words(text: str) -> str:
    place = _PLACE.match(text)
    return text[place.end() :].strip() if place else text.strip()


def _progress(text: str) -> LogFact | None:
    for pattern, words in _PROGRESS:
        if found := pattern.search(text):
            return LogFact(progress=words.format(*found.groups()))
    return None


def _fatal(text: str) -> LogFact | None:
    if _NO_GGUF.match(text):
        text += _NO_GGUF_MEANS
    return LogFact(fatal=text, generic=_GENERIC.match(text) is not None) if text else None
