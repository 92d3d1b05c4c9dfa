"""How llama-server's flags are spelled, which of them are llmgw's own, and which have come and gone.

Seen in the help of releases b8672 to b11549 and read in the sources between them; tests/plugins/llamacpp/flags and
help have what those list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from llmgw.engines import FlagStyle, Problem, find_owned, find_owned_env, find_stray, list_changes, value_of

# "--flag=value" is an unknown flag to it, "--ctx_size" is "--ctx-size", and half a flag is none.
STYLE = FlagStyle(equals=False, underscores=True)

# Every spelling, by what llmgw sets in its place. A profile that repeats one would win, since its args come last, and
# the replica would be healthy where nobody asks for it, or be another model than its name says.
_OWNED = {
    "the model's source": (
        *("--model", "-m", "--model-url", "-mu", "--hf-repo", "-hf", "-hfr", "--hf-file", "-hff"),
        *("--docker-repo", "-dr", "--models-dir", "--models-preset"),
    ),
    "the model's name": ("--alias", "-a"),
    "the address that it picks on the node": ("--host", "--port", "--reuse-port", "--api-prefix"),
    "its own connection to the engine, which is plain and has no key": (
        *("--api-key", "--api-key-file", "--ssl-key-file", "--ssl-cert-file"),
    ),
    # A card is chosen by hiding the others, and is number 0 then, whatever it was before.
    "the placement, which decides on the machines and cards of a replica": ("--rpc", "--main-gpu", "-mg"),
    # Nothing is printed, or what no pattern fits: colours where the log is no terminal, JSON.
    "its own reading of the engine's log, which tells progress and causes": (
        *("--log-disable", "--log-colors", "--log-jsonl", "--no-log-jsonl"),
    ),
}
OWNED = {flag: origin for origin, spellings in _OWNED.items() for flag in spellings}

# Whatever is given beside them, it prints what they ask for and ends with 0.
ENDING = (
    *("--help", "-h", "--usage", "--version", "--license", "--cache-list", "-cl"),
    *("--completion-bash", "--list-devices"),
)

# Shorthands for a model that llama.cpp downloads by itself: --gpt-oss-20b-default, --fim-qwen-7b-spec and the like.
_PRESET = re.compile(r"--(embd|fim|gpt-oss|vision)-\S+-(default|spec)")
# From "info" on there is progress; below "error", 0, not even a cause.
_VERBOSITY = ("--verbosity", "--log-verbosity", "-lv")
_INFO = 3
_JOINED = re.compile(r"(--?[A-Za-z][\w-]*)=(.*)", re.DOTALL)

# The same in the environment. What is set there loses against a flag of llmgw's, so it would do nothing but mislead.
_OWNED_ENV = {
    "the model's source": (
        *("LLAMA_ARG_MODEL", "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_HF_REPO", "LLAMA_ARG_HF_FILE"),
        *("LLAMA_ARG_DOCKER_REPO", "LLAMA_ARG_MODELS_DIR", "LLAMA_ARG_MODELS_PRESET"),
    ),
    "the model's name": ("LLAMA_ARG_ALIAS",),
    "the address that it picks on the node": (
        *("LLAMA_ARG_HOST", "LLAMA_ARG_PORT", "LLAMA_ARG_REUSE_PORT", "LLAMA_ARG_API_PREFIX"),
        *("AIP_MODE", "AIP_HTTP_PORT", "AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE"),
    ),
    "its own connection to the engine, which is plain and has no key": (
        *("LLAMA_API_KEY", "LLAMA_ARG_API_KEY_FILE", "LLAMA_ARG_SSL_KEY_FILE", "LLAMA_ARG_SSL_CERT_FILE"),
    ),
    "the placement, which decides on machines and cards": (
        *("LLAMA_ARG_RPC", "LLAMA_ARG_MAIN_GPU", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    ),
    # Older builds have them without ARG_.
    "its own reading of the engine's log, which tells progress and causes": (
        *("LLAMA_ARG_LOG_COLORS", "LLAMA_LOG_COLORS", "LLAMA_ARG_LOG_JSONL"),
    ),
    "args: write --verbosity there": ("LLAMA_ARG_LOG_VERBOSITY", "LLAMA_LOG_VERBOSITY"),
    "context_length and args: write --ctx-size or --parallel there": ("LLAMA_ARG_CTX_SIZE", "LLAMA_ARG_N_PARALLEL"),
}
OWNED_ENV = {name: origin for origin, names in _OWNED_ENV.items() for name in names}

# gone_in is the first release known to be without it.
_GONE: dict[str, dict[str, str | None]] = {
    "b8672": {
        "--verbose-prompt": None,
        "--dump-kv-cache": None,
        "-dkvc": None,
    },
    "b10068": {
        "--draft": "--spec-draft-n-max",
        "--draft-n": "--spec-draft-n-max",
        "--draft-max": "--spec-draft-n-max",
        "--draft-min": "--spec-draft-n-min",
        "--draft-n-min": "--spec-draft-n-min",
        "--spec-ngram-size-n": "--spec-ngram-simple-size-n",
        "--spec-ngram-size-m": "--spec-ngram-simple-size-m",
        "--spec-ngram-min-hits": "--spec-ngram-simple-min-hits",
        "--ctx-size-draft": None,
        "-cd": None,
        "--spec-replace": None,
        "--license": None,
        "--checkpoint-every-n-tokens": "--checkpoint-min-step",
        "-cpent": "--checkpoint-min-step",
        "--clear-idle": "--cache-idle-slots",
        "--no-clear-idle": "--no-cache-idle-slots",
    },
    "b11434": {
        "--mlock": "--load-mode",
        "--mmap": "--load-mode",
        "--no-mmap": "--load-mode",
        "--direct-io": "--load-mode",
        "-dio": "--load-mode",
        "--no-direct-io": "--load-mode",
        "-ndio": "--load-mode",
    },
}
CHANGES = list_changes(_GONE)


def check(args: Sequence[str]) -> list[Problem]:
    """A problem for each flag that is llmgw's, ends llama-server, or is not read by it as it is written."""
    problems = [*find_owned(args, OWNED, STYLE, ending=ENDING), *find_stray(args, STYLE)]
    return [*problems, *(Problem(key="args", message=text) for text in _find_faults(args))]


def check_env(env: Mapping[str, str]) -> list[Problem]:
    """A problem for each variable that sets what is llmgw's."""
    return find_owned_env(env, OWNED_ENV)


def _find_faults(args: Sequence[str]) -> Iterator[str]:
    verbosity = value_of(args, STYLE, *_VERBOSITY)
    # "2x" is 2 to it, and "-1" less than any.
    if verbosity is not None and (re.fullmatch("[0-9]{1,9}", verbosity) is None or int(verbosity) < _INFO):
        yield (
            f"--verbosity {verbosity} keeps from the log what llmgw reads there, how far the engine is and why it "
            f"ended: give it {_INFO} or more"
        )
    for word in args:
        joined = _JOINED.fullmatch(word)
        if joined is not None:
            yield f"llama-server does not take {word}: write {joined[1]} and {joined[2]} as two items"
        elif _PRESET.fullmatch(word.replace("_", "-")):
            yield f"{word} is not for args: llmgw sets the model from {OWNED['--model']}"
