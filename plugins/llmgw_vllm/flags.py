"""Which flags and variables of a profile are llmgw's own, and how vLLM reads the words of its command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llmgw.engines import FlagStyle, Problem, find_less_context, find_owned, find_owned_env, find_stray, value_of

# All four were tried with 0.32: --tensor_parallel_size=2 and -t 2 are --tensor-parallel-size 2, and
# --speculative-config.method or -cc.mode set one key of a JSON value.
STYLE = FlagStyle(
    equals=True,
    underscores=True,
    abbreviations=True,
    dotted=True,
    # Flags that a longer one begins with.
    whole=frozenset({"--device", "--reasoning-parser"}),
)

# Every spelling, by what llmgw sets in its place. The args come last and would win: the replica would be another model
# than its name says, be healthy where nobody asks for it, or take cards that are another's.
_OWNED = {
    "the model's source": ("--model",),
    "the model's name": ("--served-model-name",),
    "the model's task": ("--runner", "--task"),
    "the model's loras": ("--lora-modules",),
    "the address that it picks on the node": ("--host", "--port", "--uds", "--root-path", "--grpc", "--grpc-port"),
    "its own connection to the engine, which is plain and has no key": (
        *("--api-key", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"),
        *("--enable-ssl-refresh", "--no-enable-ssl-refresh"),
    ),
    "its own reading of the engine's metrics, which requests are routed by": ("--disable-log-stats",),
    "the profile, whose args are what this file would hold": ("--config",),
    "the profile's tp and pp": (
        *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
        *("--prefill-context-parallel-size", "-pcp"),
    ),
    "the placement, which decides on the nodes and cards of a replica": (
        *("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"),
        *("--device-ids", "--data-parallel-size", "-dp", "--data-parallel-size-local", "-dpl"),
        *("--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr", "--data-parallel-address", "-dpa"),
        *("--data-parallel-rpc-port", "-dpp", "--data-parallel-backend", "-dpb", "--data-parallel-supervisor-port"),
        *("--data-parallel-external-lb", "--no-data-parallel-external-lb", "-dpe"),
        *("--data-parallel-hybrid-lb", "--no-data-parallel-hybrid-lb", "-dph"),
        *("--data-parallel-multi-port-external-lb", "-dpm"),
    ),
}
OWNED = {flag: instead for instead, spellings in _OWNED.items() for flag in spellings}

_OWNED_ENV = {
    "its own connection to the engine, which has no key": ("VLLM_API_KEY",),
    "the placement": (
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("VLLM_DP_SIZE", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT"),
    ),
    "the fabric's address": ("VLLM_HOST_IP",),
    "the ports that it picks on the node": ("VLLM_PORT",),
}
OWNED_ENV = {name: instead for instead, names in _OWNED_ENV.items() for name in names}

# The version is a question to vLLM, and none to its server: the flag is a mistake there.
ENDING = ("--help", "-h", "--version", "-v")

_DISTRIBUTED = "--distributed-executor-backend"
_CONTEXT = "--max-model-len"
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def check_args(args: Sequence[str]) -> list[Problem]:
    """A problem for each flag that is llmgw's, ends the engine, or is none."""
    return [*find_owned(args, OWNED, STYLE, ending=ENDING), *find_stray(args, STYLE)]


def check_env(env: Mapping[str, str]) -> list[Problem]:
    """A problem for each variable that is llmgw's."""
    return find_owned_env(env, OWNED_ENV)


def check_context(args: Sequence[str], context_length: int | None) -> list[Problem]:
    """A context of the args' own may be longer than the model promises, and not shorter."""
    given = value_of(args, STYLE, _CONTEXT)
    # Since 0.14 it finds out by itself with "auto" or -1 how much fits.
    if given is None or given.lower() == "auto" or given == "-1":
        return []
    tokens = read_count(given)
    if tokens is None:
        text = f"{_CONTEXT} needs a number of tokens, not {given!r}: 32768, 32k (32000) or 32K (32768)"
        return [Problem(key="args", message=text)]
    return find_less_context(f"{_CONTEXT} {given}", tokens, context_length)


def check_backend(args: Sequence[str], world: int) -> list[Problem]:
    """What starts the processes of a replica: one that would span machines by itself takes what nobody has placed."""
    backend = value_of(args, STYLE, _DISTRIBUTED)
    if backend in ("ray", "external_launcher"):
        text = f"{_DISTRIBUTED} {backend} starts processes where llmgw has placed none: take it out, mp is used"
        return [Problem(key="args", message=text)]
    if backend == "uni" and world > 1:
        text = f"{_DISTRIBUTED} uni is one process, and tp times pp is {world}: take it out"
        return [Problem(key="args", message=text)]
    return []


def read_count(text: str) -> int | None:
    """A number as vLLM reads it, above 0: 32768, 32k, 1.5k, 32K. None for anything else."""
    found = re.fullmatch(r"([0-9]{1,12})(\.[0-9]{1,6})?([kKmMgGtT]?)", text.strip())
    if found is None or (found[2] and not found[3].islower()):
        return None
    factor = _FACTORS.get(found[3], 1)
    count = int(float(found[1] + found[2]) * factor) if found[2] else int(found[1]) * factor
    return count or None
