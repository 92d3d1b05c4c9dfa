"""What this machine has besides processors and memory: its GPUs and the networks that it was declared to be on."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from llmgw.agent.settings import AgentSettings
from llmgw.agent.troubles import Troubles
from llmgw.agent.watch import PATIENCE_SECONDS, SLOW_SECONDS, Watch
from llmgw.core.node import FAKE_TROUBLE, FabricFound
from llmgw.host.gpus import GpusFound, open_gpus
from llmgw.host.infiniband import read_fabric
from llmgw.host.inventory_file import MAX_FABRICS, InventoryFile
from llmgw.host.memory import read_held_gb
from llmgw.host.process import find_marked

log = logging.getLogger(__name__)

NOT_ASKED = "this agent looks for no GPUs"
NO_ANSWER = "the driver does not answer"
FABRIC_SILENT = "its adapters do not answer: see the kernel's log (dmesg), and whether the adapter's firmware hangs"


class GpuSource(Protocol):
    """Where GPUs are read from. It blocks, and may do so for as long as a driver hangs."""

    def read(self, ours: frozenset[int]) -> GpusFound:
        """What there is now; the memory that these processes hold is ours, and that of all others foreign."""


class FakeGpus:
    """Those that a file tells of."""

    __slots__ = ("_file",)

    def __init__(self, file: InventoryFile) -> None:
        self._file = file

    def read(self, ours: frozenset[int]) -> GpusFound:
        """They are what the file says, whoever runs on them."""
        said = self._file.read()
        trouble = self._file.trouble
        wrong = None if trouble is None else f"{FAKE_TROUBLE}, and what it said before holds: {trouble}"
        return GpusFound(gpus=said.gpus, driver=said.driver, problem=wrong or said.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """The processes of all our engines, and the memory that they hold, in GB of 10^9 bytes."""

    pids: frozenset[int] = frozenset()
    held_gb: float = 0.0


class Devices:
    """They are looked at in threads that may hang with their driver, and one that does holds nobody up."""

    __slots__ = (
        "_declared",
        "_fabrics",
        "_file",
        "_found",
        "_gpus",
        "_marker_prefix",
        "_ours",
        "_read_fabric",
        "_source",
        "_troubles",
    )

    def __init__(
        self,
        settings: AgentSettings,
        *,
        marker_prefix: str,
        troubles: Troubles,
        file: InventoryFile | None = None,
        gpus: GpuSource | None = None,
        read_fabric: Callable[..., FabricFound] = read_fabric,
        patience_seconds: float = PATIENCE_SECONDS,
        slow_seconds: float = SLOW_SECONDS,
    ) -> None:
        self._declared = settings.fabrics
        self._marker_prefix = marker_prefix
        self._troubles = troubles
        self._file = file
        self._source = gpus or _open_gpus(settings, file)
        self._read_fabric = read_fabric
        self._found = GpusFound()
        self._ours = Watch(Ours(), patience_seconds=patience_seconds, slow_seconds=slow_seconds)
        self._gpus = Watch(self._found, patience_seconds=patience_seconds, slow_seconds=slow_seconds)
        unseen = tuple(FabricFound(name=name, hcas=each.hcas) for name, each in self._declared.items())
        self._fabrics = Watch(unseen, patience_seconds=patience_seconds, slow_seconds=slow_seconds)

    @property
    def looks_for_gpus(self) -> bool:
        return self._source is not None

    async def find_ours(self) -> Ours:
        """What our engines are at the moment. Behind a process that hangs in its driver the kernel makes others wait,
        so this may be what they were before."""
        return (await self._ours.look(self._find_ours)).value

    def _find_ours(self) -> Ours:
        pids = frozenset(stat.pid for stat in find_marked(self._marker_prefix))
        return Ours(pids=pids, held_gb=read_held_gb(pids))

    async def look_at_gpus(self, ours: Ours | None = None) -> GpusFound:
        """The GPUs as they are now. When their driver does not answer they are what they were, and none of them can be
        used. Whoever brings what is ``ours`` has other things to tell, and waits less."""
        if self._source is None:
            return GpusFound(problem=NOT_ASKED)
        pids = (ours or await self.find_ours()).pids
        found, trouble = self._found, None
        try:
            seen = await self._gpus.look(functools.partial(self._source.read, pids), patient=ours is None)
        except Exception as error:
            log.debug("the GPUs can't be looked at", exc_info=True)
            trouble = f"the look at it failed: {type(error).__name__}: {error}"
            found = _break(found, trouble, trouble)
        else:
            found = self._found = seen.value
            if seen.silent_seconds:
                trouble = NO_ANSWER
                found = _break(found, f"{NO_ANSWER} (for {seen.silent_seconds:.0f} s)", NO_ANSWER)
        for gpu in found.gpus:
            self._troubles.note(f"GPU {gpu.index} ({gpu.uuid})", trouble or gpu.broken)
        return found

    def recall_held_gb(self, pids: Collection[int]) -> float | None:
        """The most that these processes held of any one GPU at the last look that had an answer."""
        return self._found.find_most_held_gb(pids)

    async def look_at_fabrics(self) -> tuple[FabricFound, ...]:
        """The fabrics as they are now: those that are declared, and those that a fake inventory adds."""
        seen = await self._fabrics.look(self._read_fabrics)
        found = seen.value
        if seen.silent_seconds:
            found = tuple(replace(each, down=FABRIC_SILENT) for each in found)
        for each in found:
            self._troubles.note(f"fabric {each.name}", each.down)
        return found

    def _read_fabrics(self) -> tuple[FabricFound, ...]:
        said = {} if self._file is None else self._file.read().fabrics
        found = [self._read_declared(name, said.get(name)) for name in self._declared]
        added = (each for name, each in said.items() if name not in self._declared)
        # No more than a report may hold: the server would refuse it whole.
        return (*found, *added)[:MAX_FABRICS]

    def _read_declared(self, name: str, said: FabricFound | None) -> FabricFound:
        declared = self._declared[name]
        if said is not None:
            return replace(said, hcas=said.hcas or declared.hcas, interface=said.interface or declared.interface)
        try:
            return self._read_fabric(name, declared.hcas, declared.interface)
        except OSError as error:
            down = f"it can't be looked at: {error.strerror or error}"
            return FabricFound(name=name, interface=declared.interface, hcas=declared.hcas, down=down)


def _open_gpus(settings: AgentSettings, file: InventoryFile | None) -> GpuSource | None:
    if file is not None:
        return FakeGpus(file)
    if settings.discovery is None:
        return None
    program = settings.discovery.nvidia_smi
    return open_gpus(None if program is None else str(program), settings.discovery.classes)


def _break(found: GpusFound, broken: str, problem: str) -> GpusFound:
    """The GPUs that there were, none of which can be used now."""
    gpus = (replace(gpu, broken=broken, temperature_c=None, utilization_percent=None, foreign=()) for gpu in found.gpus)
    return replace(found, gpus=tuple(gpus), problem=f"the GPUs can't be looked at: {problem}")
