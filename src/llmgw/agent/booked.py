"""What was booked for a shard: its GPUs, its fabric and its rendezvous, looked at just before the launch; and the
memory of its GPUs seen given back after its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from llmgw.core.hosts import CRUMB_GB, spare_gb
from llmgw.core.learned import USUAL_SHARE
from llmgw.core.model import Profile
from llmgw.core.node import ForeignUse, Gpu
from llmgw.core.replica import ShardSpec
from llmgw.engines.types import Fabric
from llmgw.errors import EngineFailed
from llmgw.host.gpus import GpusFound

if TYPE_CHECKING:
    from llmgw.agent.held import Tools

log = logging.getLogger(__name__)

GIVEN_BACK_SECONDS = 10.0
# A driver keeps some hundred MB for itself; an engine that has not let go holds many times that.
KEPT_GB = 1.0
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 1.0


class GpuInUse(EngineFailed):
    """Another program holds so much of a booked GPU that the engine would end for want of memory, or hang."""


class RendezvousTaken(EngineFailed):
    """Another program listens where the shards of a replica are to meet."""


async def find_gpus(spec: ShardSpec, tools: Tools) -> tuple[Gpu, ...] | None:
    """The GPUs that are booked for the shard, as they are now and in its order; None where nobody chooses.

    Raises EngineFailed when one of them is not there, can't be used, or is in use.
    """
    if not spec.gpus:
        return None if spec.gpus is None else ()
    found = await tools.hands.look_at_gpus(tools)
    gpus = tuple(_find(uuid, found) for uuid in spec.gpus)
    for gpu in gpus:
        _check_room(gpu, spec.profile)
    return gpus


def _find(uuid: str, found: GpusFound) -> Gpu:
    gpu = next((gpu for gpu in found.gpus if gpu.uuid == uuid), None)
    if gpu is None:
        has = ", ".join(f"{each.index}: {each.uuid}" for each in found.gpus) or "none"
        problem = f" ({found.problem})" if found.problem is not None else ""
        raise EngineFailed(
            f"GPU {uuid} is not among those that this node has: {has}{problem}",
            remedy="nothing, if it was taken out; else see whether nvidia-smi and the kernel's log (dmesg) know of it",
        )
    if gpu.broken is not None:
        raise EngineFailed(
            f"{_name(gpu)} can't be used: {gpu.broken}",
            remedy="see what the kernel's log (dmesg) says of it; a reset or a reboot of the node may bring it back",
        )
    if gpu.mig is not None:
        raise EngineFailed(
            f"{_name(gpu)} is cut into MIG instances, and an engine takes whole GPUs",
            remedy=f"turn MIG off (nvidia-smi -i {gpu.index} -mig 0), or keep engines off this node",
        )
    return gpu


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name}, {gpu.uuid})"


def _check_room(gpu: Gpu, profile: Profile) -> None:
    """By the rule that placement has: what it saw may be some seconds old."""
    needed_gb = USUAL_SHARE * gpu.memory_gb if profile.gpu_memory_gb is None else profile.gpu_memory_gb
    left_gb = spare_gb(gpu)
    if left_gb + CRUMB_GB >= needed_gb:
        return
    users = ", ".join(map(_tell_use, sorted(gpu.foreign, key=lambda use: -use.memory_gb)))
    text = f"{_name(gpu)} has {left_gb:.1f} GB left of {gpu.memory_gb:.1f}, and {needed_gb:.1f} are needed"
    raise GpuInUse(
        f"{text}: in use by {users}" if users else text,
        remedy="end what uses it" if users else "give the profile a gpu_memory_gb that fits, or another gpu_class",
    )


def _tell_use(use: ForeignUse) -> str:
    if use.pid is None:
        who = "a process that the device does not name (of a container, or ended just now)"
    else:
        who = f"pid {use.pid} ({use.name or 'its name is not known'})"
    return f"{who}: {use.memory_gb:.1f} GB"


async def find_fabric(spec: ShardSpec, tools: Tools) -> Fabric | None:
    """The network that the shards of the replica meet over, as this node is on it now; None where there is none.

    Raises EngineFailed when it is out of service: a launch would hang at its first all-reduce.
    """
    if spec.fabric is None:
        return None
    declared = {each.name: each for each in await tools.hands.look_at_fabrics(tools)}
    found = declared.get(spec.fabric)
    if found is None:
        has = ", ".join(declared) or "none"
        raise EngineFailed(
            f"fabric {spec.fabric} is not declared on this node; declared: {has}",
            remedy="declare it under fabrics in its agent.yaml, and start the agent anew",
        )
    down = found.down
    if down is None and (found.address is None or found.interface is None):
        down = "its interface has no address" if found.interface is not None else "its interface is not known"
    if down is not None:
        raise EngineFailed(
            f"fabric {spec.fabric} is out of service on this node: {down}",
            remedy="mend that, or correct fabrics in its agent.yaml and start the agent anew",
        )
    return Fabric(address=found.address or "", interface=found.interface or "", hcas=found.hcas)


def check_rendezvous(spec: ShardSpec, tools: Tools) -> None:
    """Raise RendezvousTaken when this is where the shards of the replica meet, and another program listens there: its
    engines would wait for one another until they give up."""
    if spec.rank == 0 and spec.rendezvous is not None and tools.hands.is_taken(spec.rendezvous):
        raise RendezvousTaken(
            f"the shards of {spec.replica} are to meet at {spec.rendezvous}, and another program listens there",
            remedy="nothing: the next try takes another port. ss -ltnp tells on this node whose it is",
        )


async def wait_given_back(spec: ShardSpec, tools: Tools, before: Sequence[Gpu]) -> bool:
    """Wait, for so long at most, until the device says that the GPUs of a shard that has ended are free of it; whether
    it has said so.

    ``before``: what they were like before its start, where that was seen. What the driver still holds after that is
    told of, and reported as in use from now on.
    """
    if not spec.gpus:
        return True
    nameless = {gpu.uuid: _measure_nameless(gpu) for gpu in before}
    deadline, pause = trio.current_time() + GIVEN_BACK_SECONDS, FIRST_PAUSE
    while held := await _measure_held(spec.gpus, tools, nameless):
        if trio.current_time() >= deadline:
            told = ", ".join(f"{gb:.1f} GB of {uuid}" for uuid, gb in held.items())
            text = "shard %s has ended, and %s are not given back after %g s; they count as in use by another"
            log.warning(text, spec.id, told, GIVEN_BACK_SECONDS)
            return False
        await trio.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE)
    return True


async def _measure_held(uuids: Sequence[str], tools: Tools, nameless: dict[str, float]) -> dict[str, float]:
    """What nobody else holds of them and is not free; nothing where the device does not say."""
    found = await tools.hands.look_at_gpus(tools)
    told = [gpu for gpu in found.gpus if gpu.uuid in uuids and gpu.broken is None]
    held = {gpu.uuid: _measure_nameless(gpu) - nameless.get(gpu.uuid, 0.0) for gpu in told}
    return {uuid: gb for uuid, gb in held.items() if gb > KEPT_GB}


def _measure_nameless(gpu: Gpu) -> float:
    """The memory in use, in GB, that no other program is known to hold."""
    return gpu.memory_used_gb - sum(use.memory_gb for use in gpu.foreign if use.pid is not None)
