"""The environment of one shard: its cards, its fabric, its caches and its threads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmgw.engines import Launch, find_given, pin_cards, pin_fabric, place_caches, stay_offline
from llmgw_vllm.flags import STYLE
from llmgw_vllm.releases import is_for_cpu

# Some two hundred settings are read from VLLM_* alone, a key and ports among them; a service that Kubernetes calls
# "vllm" exports VLLM_PORT as a URL, and the start ends there. What the agent's shell had exported is nobody's choice.
INHERITED = ("VLLM_",)

# What else is fetched from the hub; the draft of a speculative config is a part of its JSON.
_SOURCES = ("--tokenizer", "--hf-config-path", "--spec-model")
_DRAFT = ("--speculative-config", "-sc")
_MODEL = re.compile(r'"model"\s{0,9}:\s{0,9}"([^"]+)"')

# Its own limit for a start is 10 minutes, whatever the size of the weights; llmgw has that of the profile.
_READY_SECONDS = "86400"


def build(launch: Launch) -> dict[str, str]:
    """What is set, whatever the machine says; the profile's own env may still differ."""
    # Coloured levels would hide the prefix that lines are read by.
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "NO_COLOR": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": _READY_SECONDS,
    }
    env |= pin_cards(launch.gpus) | pin_fabric(launch, "VLLM_HOST_IP") | stay_offline(_sources(launch))
    return env | _threads(launch)


def defaults(launch: Launch) -> dict[str, str]:
    """Where it keeps what outlives a restart."""
    return place_caches(launch, {"VLLM_CACHE_ROOT": "vllm"})


def _threads(launch: Launch) -> dict[str, str]:
    # By itself a build for CPUs binds a thread to each core that it sees, which in a container with a quota is more
    # than it has; only unbound does it keep to the number.
    if not is_for_cpu(launch.version) or not launch.threads:
        return {}
    workers = max(1, launch.tp * launch.pp // max(1, launch.count))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, launch.threads // workers)),
    }


def _sources(launch: Launch) -> Iterator[str]:
    yield launch.source
    yield from (lora.source for lora in launch.loras)
    for given in find_given(launch.args, STYLE, *_SOURCES):
        yield from given.values[:1]
    for given in find_given(launch.args, STYLE, *_DRAFT):
        if given.key == "model":
            yield from given.values[:1]
        elif given.key is None:
            yield from _MODEL.findall("".join(given.values[:1]))
