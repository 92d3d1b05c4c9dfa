"""Which flags and variables of a profile are llmgw's own, and how SGLang reads the words of its command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llmgw.engines import (
    FlagStyle,
    Problem,
    find_less_context,
    find_owned,
    find_owned_env,
    find_stray,
    is_given,
    value_of,
)

# Tried with the parser of 0.5.23: --tp 2 is --tp-size 2; --tp_size and --model.path are refused.
# A longer flag begins with --log-level.
STYLE = FlagStyle(equals=True, underscores=False, abbreviations=True, dotted=False, whole=frozenset({"--log-level"}))

# Every spelling, by what llmgw sets in its place. The args come last and would win: the replica would be another model
# than its name says, be healthy where nobody asks for it, or take cards that are another's.
_OWNED = {
    "the model's source": ("--model-path", "--model"),
    "the model's name": ("--served-model-name",),
    # --model-type is `sglang serve`'s own: another of its servers, for pictures.
    "the model's task": ("--is-embedding", "--model-type"),
    "the model's loras": ("--lora-paths",),
    "the address that it picks on the node": ("--host", "--port", "--fastapi-root-path"),
    "its own connection to the engine, which is plain HTTP and has no key": (
        *("--api-key", "--admin-api-key", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"),
        *("--ssl-keyfile-password", "--enable-ssl-refresh"),
        *("--smg-grpc-mode", "--grpc-mode", "--grpc-port", "--smg-http-sidecar-port", "--grpc-http-sidecar-port"),
    ),
    "the profile, whose args are what this file would hold": ("--config",),
    "the profile's tp and pp": (*("--tp-size", "--tensor-parallel-size", "--pp-size", "--pipeline-parallel-size"),),
    "the placement, which decides on the nodes and cards of a replica": (
        *("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--nccl-port"),
        *("--engine-info-bootstrap-port", "--base-gpu-id", "--gpu-id-step", "--use-ray"),
    ),
}
OWNED = {flag: instead for instead, spellings in _OWNED.items() for flag in spellings}

_OWNED_ENV = {
    "the placement": (
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE",
    ),
    "the fabric's address": ("SGLANG_HOST_IP",),
    "the ports that it picks on the node": ("SGLANG_PORT",),
    "nothing: the engine is asked over HTTP": ("SGLANG_GRPC_PORT",),
}
# SGL_X is another name of SGLANG_X.
OWNED_ENV = {
    spelled: instead
    for instead, names in _OWNED_ENV.items()
    for name in names
    for spelled in (name, re.sub(r"^SGLANG_", "SGL_", name))
}

# The version is a question to `sglang`, and none to its server: the flag is a mistake there.
ENDING = ("--help", "-h", "--version", "-v")

_REPLICAS = ("--dp-size", "--data-parallel-size")
_WITHIN_TP = ("--enable-dp-attention", "--attn-dp-size", "--attention-data-parallel-size")
_CONTEXT = "--context-length"
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FACTORS = _DECIMAL | {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def check_args(args: Sequence[str]) -> list[Problem]:
    """A problem for each flag that is llmgw's, ends the engine, or is none."""
    return [*find_owned(args, OWNED, STYLE, ending=ENDING), *find_stray(args, STYLE)]


def check_env(env: Mapping[str, str]) -> list[Problem]:
    """A problem for each variable that is llmgw's."""
    return find_owned_env(env, OWNED_ENV)


def check_replicas(args: Sequence[str]) -> list[Problem]:
    """Data parallelism is replicas of its own, on cards that llmgw has not booked, unless only attention has it."""
    given = value_of(args, STYLE, *_REPLICAS)
    if given is None:
        return []
    if not (given.isascii() and given.isdigit()) or not given.strip("0"):
        text = f"{_REPLICAS[0]} needs a whole number above 0, not {given!r}"
        return [Problem(key="args", message=text)]
    if given.lstrip("0") == "1" or is_given(args, STYLE, *_WITHIN_TP):
        return []
    text = f"{_REPLICAS[0]} {given} takes the cards of {given} replicas, and a replica has those of one: take it out"
    text += " and set scaling.min, or add --enable-dp-attention, which stays within tp"
    return [Problem(key="args", message=text)]


def check_context(args: Sequence[str], context_length: int | None) -> list[Problem]:
    """A context of the args' own may be longer than the model promises, and not shorter."""
    given = value_of(args, STYLE, _CONTEXT)
    if given is None:
        return []
    tokens = read_count(given)
    if tokens is None:
        text = f"{_CONTEXT} needs a number of tokens, not {given!r}: 32768, 32k (32000) or 32Ki (32768)"
        return [Problem(key="args", message=text)]
    return find_less_context(f"{_CONTEXT} {given}", tokens, context_length)


def read_count(text: str) -> int | None:
    """A number as SGLang reads it, above 0: 32768, 32k, 1.5k, 32Ki. None for anything else.

    Suffixes are understood by current releases (0.5.23) and by none of the first ones.
    """
    found = re.fullmatch(r"([0-9]{1,12})(\.[0-9]{1,6})?(|k|M|G|T|Ki|Mi|Gi|Ti)", text.strip())
    if found is None or (found[2] and (found[3].endswith("i") or not found[3])):
        return None
    factor = _FACTORS[found[3]]
    count = int(float(found[1] + found[2]) * factor) if found[2] else int(found[1]) * factor
    return count or None
