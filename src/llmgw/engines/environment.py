"""The environment of a shard, as whatever stands on CUDA, NCCL, PyTorch and the hub reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from llmgw.engines.types import Launch

__all__ = ["pin_cards", "pin_fabric", "place_caches", "stay_offline"]

# Weights, compiled kernels and graphs, each for minutes of the next start.
_CACHES = {
    "HF_HOME": "huggingface",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}


def pin_cards(gpus: tuple[int, ...] | None) -> dict[str, str]:
    """The cards of a launch, by PCI bus order as it counts them; nothing where the choice is the engine's."""
    if gpus is None:
        return {}
    # "" is none at all: an absent variable would be all.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def pin_fabric(launch: Launch, host: str) -> dict[str, str]:
    """Where the shards of one replica meet, for NCCL, Gloo and the engine, which reads its own address from ``host``.

    Nothing for a replica of one shard.
    """
    fabric = launch.fabric
    if fabric is None or launch.count <= 1:
        return {}
    # NCCL takes a name for a beginning, eth1 for eth10 too, unless "=" stands before it. Gloo knows no such sign.
    env = {
        host: fabric.address,
        "NCCL_SOCKET_IFNAME": f"={fabric.interface}",
        "GLOO_SOCKET_IFNAME": fabric.interface,
    }
    return env | ({"NCCL_IB_HCA": f"={','.join(fabric.hcas)}"} if fabric.hcas else {})


def place_caches(launch: Launch, own: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Folders below ``launch.cache`` for what outlives a restart, by variable: the common ones, and the engine's
    ``own`` as names of folders. For ``Command.defaults``; nothing where the launch has no cache."""
    cache = launch.cache.rstrip("/") if launch.cache else ""
    return {name: f"{cache}/{folder}" for name, folder in (_CACHES | dict(own)).items()} if cache else {}


def stay_offline(sources: Iterable[str]) -> dict[str, str]:
    """Keeps the hub's library from asking the hub, where all that is read is a path."""
    paths = all(source.startswith(("/", "./", "../", "~")) for source in sources)
    return {"HF_HUB_OFFLINE": "1"} if paths else {}
