"""Where one more replica of a model could go: now, once something else is gone, in a moment, or by other figures."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from llmgw.core.costs import OFTEN
from llmgw.core.filters import Need, find_reason, find_reasons, is_blind, needs_gb
from llmgw.core.hosts import CRUMB_GB, Host, Standing
from llmgw.core.model import Model, with_launch
from llmgw.core.node import NodeId
from llmgw.core.placement import Placement, Verdict, by_priority, place
from llmgw.core.rejection import Reason
from llmgw.core.rolling import is_same_launch
from llmgw.core.roster import LifeKey
from llmgw.core.state import State

# What another replica's end may mend.
ROOM = frozenset({Reason.NOT_ENOUGH_GPUS, Reason.NOT_ENOUGH_GPU_MEMORY, Reason.NOT_ENOUGH_MEMORY})

# What backs off for longer is not waited for.
SOON_SECONDS = 60.0


class Search:
    """The looks at the nodes that one turn of one model may take; each of them costs a placement."""

    __slots__ = ("_backing_off", "_failed", "_filled", "_fit", "_hosts", "_model", "_needs", "_now", "_state")

    def __init__(self, state: State, model: Model, now: float) -> None:
        self._state = state
        self._model = model
        self._now = now
        self._filled = state.learned.fill(model, state.versions)
        self._backing_off = state.backing_off(model.name)
        self._failed = state.failed(model.name, now)
        self._hosts = state.roster.hosts_for(model.name)
        self._needs: list[Need] | None = None
        # of a profile and a fabric, the nodes that would do
        self._fit: dict[tuple[str, str], set[NodeId]] = {}

    def find(self) -> Verdict:
        """Where it can go now."""
        return self._place(self._filled, self._hosts)

    def find_unfilled(self) -> Placement | None:
        """Where it could go if nothing had been measured."""
        if self._filled is self._model:
            return None
        found = self._place(self._model, self._hosts)
        return found if isinstance(found, Placement) else None

    def find_by_proven(self) -> tuple[Model | None, Placement | None]:
        """The model as it was launched when it served, and where that can go; None where it has served by no other."""
        by = self._earlier()
        return by, None if by is None else self._find_earlier(by, self._hosts)

    def fits_by_proven_once_gone(self, gone: Iterable[LifeKey]) -> bool:
        """The same, as ``fits_once_gone``: whether it has a place as it was launched when it served."""
        keys, by = tuple(gone), self._earlier()
        if not keys or by is None:
            return False
        return self._find_earlier(by, self._state.roster.hosts_for(self._model.name, keys)) is not None

    def _earlier(self) -> Model | None:
        proven = self._state.rolls.proven(self._model.name)
        if proven is None or is_same_launch(proven, self._model):
            return None
        return with_launch(self._model, proven)

    def _find_earlier(self, by: Model, hosts: Sequence[Host]) -> Placement | None:
        found = self._place(self._state.learned.fill(by, self._state.versions), hosts)
        return found if isinstance(found, Placement) else None

    def fits_once_gone(self, gone: Iterable[LifeKey], *, soon: bool = False) -> bool:
        """Whether it has a place once these have ended. ``soon``: and links that are down are up again."""
        keys = tuple(gone)
        if not keys:
            return False
        hosts = self._state.roster.hosts_for(self._model.name, keys)
        return self._is_place(tuple(map(_bring_back, hosts)) if soon else hosts)

    def fits_soon(self) -> bool:
        """Whether it only has to wait for a moment: for a node that failed just now, or whose link is down."""
        return fits_soon(self._filled, self._hosts, self._backing_off, self._now, failed=self._failed)

    @property
    def keeps_in_vain(self) -> bool:
        """Whether the room that is kept for it is of no use to it: it would have no place if all of that was given back
        already, and nodes were there that may be in a moment."""
        kept = self._state.roster.reserved.get(self._model.name, ())
        if not kept:
            return False
        hosts = tuple(_give_back(host, {shard.spec.node for shard in kept}) for host in self._hosts)
        later = _wait_out(self._backing_off, self._now)
        by = self._earlier()
        ways = [self._filled, self._model]
        ways += [] if by is None else [self._state.learned.fill(by, self._state.versions)]
        return not any(
            isinstance(place(each, hosts, later, self._now, failed=self._failed), Placement) for each in ways
        )

    def could_fit_on(self, node: NodeId, gone: LifeKey, *, soon: bool = False) -> bool:
        """Whether nothing speaks against this node once that has ended, nor for several nodes against enough others. It
        costs little, and tells nearly all. ``soon``: once its link is up again."""
        roster = self._state.roster
        here = roster.host(roster.members[node])
        if soon:
            here = _bring_back(here)
        shard = roster.lives[gone].replica.shard
        # (launched by an agent that knew of no GPUs, it may be on any)
        given = tuple(here.booked) if shard.gpus is None and shard.profile.gpus else shard.gpus or ()
        hopeful = [need for need in self._list_needs() if _may_come(need, here, given)]
        if not hopeful:
            return False
        host = roster.host_for(self._model.name, node, gone)
        if soon:
            host = _bring_back(host)
        return any(find_reason(need, host) is None and self._has_company(need, host) for need in hopeful)

    def _has_company(self, need: Need, host: Host) -> bool:
        """Whether enough others of one of its fabrics would do besides."""
        others = need.profile.nodes - 1
        return not others or any(len(self._list_fit(need, fabric) - {host.id}) >= others for fabric in host.fabrics)

    def _list_fit(self, need: Need, fabric: str) -> set[NodeId]:
        key = (need.profile.name, fabric)
        if key not in self._fit:
            there = (host for host in self._hosts if fabric in host.fabrics)
            self._fit[key] = {host.id for host in there if find_reason(need, host) is None}
        return self._fit[key]

    @property
    def has_failed_often(self) -> bool:
        """It has failed so often of late that nobody is to make way for it."""
        return sum(self._failed.values()) >= OFTEN

    def _list_needs(self) -> list[Need]:
        if self._needs is None:
            blind = is_blind(self._hosts)
            self._needs = [
                Need(
                    model=self._filled,
                    profile=profile,
                    backing_off=self._backing_off,
                    now=self._now,
                    blind=blind,
                    failed=self._failed,
                )
                for profile in by_priority(self._filled)
            ]
        return self._needs

    def _is_place(self, hosts: Sequence[Host]) -> bool:
        return isinstance(self._place(self._filled, hosts), Placement)

    def _place(self, model: Model, hosts: Sequence[Host]) -> Verdict:
        return place(model, hosts, self._backing_off, self._now, failed=self._failed)


def fits_soon(
    model: Model,
    hosts: Sequence[Host],
    backing_off: Mapping[NodeId, float],
    now: float,
    *,
    failed: Mapping[NodeId, int],
) -> bool:
    """Whether a model that has no place now only has to wait for a moment: for a node that failed just now, or whose
    link is down."""
    later = _wait_out(backing_off, now)
    silent = any(map(_is_silent, hosts))
    if len(later) == len(backing_off) and not silent:
        return False
    back = tuple(map(_bring_back, hosts))
    return isinstance(place(model, back, later, now, failed=failed), Placement)


def _wait_out(backing_off: Mapping[NodeId, float], now: float) -> dict[NodeId, float]:
    """Where it isn't tried again in a moment either."""
    return {node: until for node, until in backing_off.items() if until > now + SOON_SECONDS}


def _give_back(host: Host, kept: Collection[NodeId]) -> Host:
    """The node as it may be in a moment: where room is kept, what holds it still may be the engine that has ended."""
    if host.id not in kept:
        return _bring_back(host)
    gpus = host.node.gpus
    freed = None if gpus is None else tuple(replace(gpu, foreign=()) for gpu in gpus)
    return replace(host, standing=Standing.READY, node=replace(host.node, gpus=freed, memory_foreign_gb=0.0))


def _may_come(need: Need, host: Host, given: Sequence[str]) -> bool:
    """Whether these GPUs, and memory, could be all that is missing here: a look that makes no other host."""
    if not ROOM.issuperset(find_reasons(need, host)):
        return False
    free = max((bits.bit_count() for bits in host.classes.values()), default=0)
    if free + len(given) < need.gpus:
        return False
    return not need.gpus or any(needs_gb(need, gpu) <= gpu.memory_gb + CRUMB_GB for gpu in host.node.gpus or ())


def _bring_back(host: Host) -> Host:
    """The node as it is once its link is up again."""
    return replace(host, standing=Standing.READY) if _is_silent(host) else host


def _is_silent(host: Host) -> bool:
    return host.standing is Standing.SILENT
