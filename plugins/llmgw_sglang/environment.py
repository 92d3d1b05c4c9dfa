"""The environment of one shard: its cards, its fabric, its caches, and how its health is answered."""

from __future__ import annotations

from llmgw.engines import Launch
from llmgw_sglang.flags import value_of

# Some five hundred settings are read from SGLANG_* alone, a gRPC port and the hub among them, and SGL_* is rewritten to
# them. What the agent's shell had exported is nobody's choice.
INHERITED = ("SGLANG_", "SGL_")

# It reports no usage by itself; the libraries that it stands on do.
QUIET = {"DO_NOT_TRACK": "1", "NO_COLOR": "1"}

# Below the folder that outlives a restart: weights, compiled kernels and graphs, each for minutes of the next start.
# Releases until 0.5.20 or so move what is not SGLang's own nowhere, so that all are named.
_CACHES = {
    "HF_HOME": "huggingface",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "SGLANG_JIT_CACHE_DIR": "sglang_jit",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
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
    if launch.gpus is not None:
        # "" is none at all: an absent variable would be all.
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, launch.gpus))}
    if all(map(_is_path, _sources(launch))):
        env["HF_HUB_OFFLINE"] = "1"
    return env | _fabric(launch)


def defaults(launch: Launch) -> dict[str, str]:
    """Where it keeps what outlives a restart, and that its warm-up request does not go by way of a proxy."""
    cache = launch.cache.rstrip("/") if launch.cache else ""
    found = {name: f"{cache}/{folder}" for name, folder in _CACHES.items()} if cache else {}
    return found | {"NO_PROXY": "127.0.0.1,localhost"}


def _fabric(launch: Launch) -> dict[str, str]:
    fabric = launch.fabric
    if fabric is None or launch.count <= 1:
        return {}
    # NCCL takes a name for a beginning, eth1 for eth10 too, unless "=" stands before it. Gloo knows no such sign.
    env = {
        "SGLANG_HOST_IP": fabric.address,
        "NCCL_SOCKET_IFNAME": f"={fabric.interface}",
        "GLOO_SOCKET_IFNAME": fabric.interface,
    }
    return env | ({"NCCL_IB_HCA": f"={','.join(fabric.hcas)}"} if fabric.hcas else {})


def _sources(launch: Launch) -> list[str]:
    others = (value_of(launch.args, name) for name in _SOURCES)
    return [launch.source, *(lora.source for lora in launch.loras), *(other for other in others if other)]


def _is_path(source: str) -> bool:
    return source.startswith(("/", "./", "../", "~"))
