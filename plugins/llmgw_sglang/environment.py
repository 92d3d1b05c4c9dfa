"""The environment of one shard: its cards, its fabric, its caches, its limits, and how its health is answered."""

from __future__ import annotations

from llmgw.engines import Launch, pin_cards, pin_fabric, place_caches, stay_offline, value_of
from llmgw_sglang.flags import STYLE

# Some five hundred settings are read from SGLANG_* alone, a gRPC port and the hub among them, and SGL_* is rewritten to
# them. What the agent's shell had exported is nobody's choice.
INHERITED = ("SGLANG_", "SGL_")

# It reports no usage by itself; the libraries that it stands on do.
QUIET = {"DO_NOT_TRACK": "1", "NO_COLOR": "1"}

# Releases until 0.5.20 or so move what is not SGLang's own nowhere, so that all are named.
_CACHES = {
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "SGLANG_JIT_CACHE_DIR": "sglang_jit",
    "TILELANG_CACHE_DIR": "tilelang",
}

# What else is fetched from the hub.
_SOURCES = ("--tokenizer-path", "--speculative-draft-model-path", "--speculative-draft-model")


def build(launch: Launch) -> dict[str, str]:
    """What is set, whatever the machine says; the profile's own env may still differ."""
    env = {
        **QUIET,
        # Since 0.5.6 /health waits for a token, one second at least and up to 20, at each poll of the agent, which
        # waits for 4. Without, it answers at once, and still not before the warm-up had its tokens; that an engine
        # hangs later on is seen by its counters. Releases before wait whatever they are told: for no longer than the
        # agent does.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "SGLANG_HEALTH_CHECK_TIMEOUT": "3",
    }
    if launch.max_output:
        # The most that any request gets: 0.5.16 and later, others read no such variable.
        env["SGLANG_MAX_NEW_TOKENS_LIMIT"] = str(launch.max_output)
    return env | pin_cards(launch.gpus) | pin_fabric(launch, "SGLANG_HOST_IP") | stay_offline(_sources(launch))


def defaults(launch: Launch) -> dict[str, str]:
    """Where it keeps what outlives a restart, and that its warm-up request does not go by way of a proxy."""
    return place_caches(launch, _CACHES) | {"NO_PROXY": "127.0.0.1,localhost"}


def _sources(launch: Launch) -> list[str]:
    others = (value_of(launch.args, STYLE, name) for name in _SOURCES)
    return [launch.source, *(lora.source for lora in launch.loras), *(other for other in others if other)]
