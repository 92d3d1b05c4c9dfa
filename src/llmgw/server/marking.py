"""What an operator says of nodes: kept in the store first, then told to the fleet; and the nodes that are away."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import trio

from llmgw.admin.management import Refused
from llmgw.admin.views import BrakeView, NodeMarks, RemovedNode
from llmgw.config.addresses import wrong_node
from llmgw.config.labels import wrong_label
from llmgw.core.events import NodeMarked, NodeRemoved
from llmgw.core.hosts import Standing
from llmgw.core.node import NodeId
from llmgw.core.picture import Draining, FleetStatistics, NodeStatistics
from llmgw.core.replica import ShardState
from llmgw.server.acts import carry_through
from llmgw.server.machines import KeptNode, LinkFacts, living, view_brake
from llmgw.server.scheduler import Scheduler

# More than anybody has, and few enough to be told with each word about the node.
MAX_LABELS = 64
MAX_SHOWN = 200
# A drain that is to wait for longer waits for ever.
MAX_DRAIN_SECONDS = 365 * 86400.0


class NodeStore(Protocol):
    """Where nodes and their marks are kept; what has returned is durable. LlmgwError when it can't be done."""

    async def list_marks(self) -> tuple[KeptNode, ...]:
        """Those that were seen or marked."""

    async def mark(
        self,
        node: NodeId,
        *,
        cordoned: bool,
        labels: Mapping[str, str | None],
        draining: bool = False,
        drain_until: float | None = None,
    ) -> None:
        """Keep this of a node, in place of what was kept before; ``drain_until`` in seconds since 1970."""

    async def forget(self, node: NodeId) -> bool:
        """Whether it was known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    """What is said of a node; ``drain_until`` in seconds since 1970."""

    cordoned: bool = False
    draining: bool = False
    drain_until: float | None = None
    labels: Mapping[str, str | None] = field(default_factory=dict, hash=False)


class Marking:
    """The acts upon nodes, one after another. ``kept`` is what the store had of each when it was last asked."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: NodeStore,
        *,
        links: Callable[[], Iterable[LinkFacts]],
        forgotten: Callable[[NodeId], None],
        let_go: Callable[[NodeId], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Of each node that is removed ``forgotten`` is called first, and ``let_go`` last, which ends its link."""
        self._scheduler = scheduler
        self._store = store
        self._links = links
        self._forgotten = forgotten
        self._let_go = let_go
        self._wall = wall
        self._acting = trio.Lock()
        self._removed: set[NodeId] = set()
        self.kept: Mapping[NodeId, KeptNode] = {}

    async def load(self) -> None:
        """Tell the fleet what was said of nodes: once, at the start, before it may place anything."""
        await self._read()
        for node in self.kept:
            marks = self._marks(node)
            if marks != _Marks():
                await self._tell(node, marks)

    def seen(self) -> frozenset[NodeId]:
        """The nodes that were here before this start."""
        return frozenset(each.node for each in self.kept.values() if each.last_seen is not None)

    def links(self) -> tuple[LinkFacts, ...]:
        """Those of the agents, without what is left of nodes that were removed."""
        members = {each.node.id for each in self._scheduler.fleet.statistics().nodes} if self._removed else set()
        return tuple(
            link for link in self._links() if link.connected or link.node not in self._removed or link.node in members
        )

    async def cordon(self, name: str, *, cordoned: bool) -> NodeMarks:
        """Keep new replicas off a node, or no longer. It may be said again, and a cordon of a node that is not there
        yet; Refused for the end of one that nobody has heard of. Its end ends a drain as well."""
        node = _read_name(name)
        async with self._acting:
            if not cordoned:
                self._check_known(node)
            marks = self._marks(node)
            if cordoned:
                marks = replace(marks, cordoned=True)
            else:
                marks = replace(marks, cordoned=False, draining=False, drain_until=None)
            await self._mark(node, marks)
        return self._view(node)

    async def drain(self, name: str, *, deadline_seconds: float | None) -> NodeMarks:
        """Cordon a node, and have what runs there run elsewhere: as soon as there is room, or when the deadline has
        passed in any case. Said again it goes by the new deadline; Refused for a node that nobody has heard of."""
        node = _read_name(name)
        until = None if deadline_seconds is None else self._wall() + _check_deadline(deadline_seconds)
        async with self._acting:
            self._check_known(node)
            marks = replace(self._marks(node), cordoned=True, draining=True, drain_until=until)
            await self._mark(node, marks)
        return self._view(node)

    async def label(self, name: str, changes: Mapping[str, str | None]) -> NodeMarks:
        """Lay labels over the node's own; None takes one away. Refused for a node that nobody has heard of."""
        node = _read_name(name)
        _check_labels(changes)
        async with self._acting:
            self._check_known(node)
            marks = self._marks(node)
            labels = {**marks.labels, **changes}
            own = _find(self._scheduler.fleet.statistics(), node)
            # What the node does not have need not be taken from it.
            kept = {
                label: value
                for label, value in labels.items()
                if value is not None or own is None or label in own.node.labels
            }
            if len(kept) > MAX_LABELS:
                message = f"{node} would have {len(kept)} labels of yours, and {MAX_LABELS} are the most"
                raise Refused(message, status=400, code="invalid_label")
            await self._mark(node, replace(marks, labels=kept))
        return self._view(node)

    async def remove(self, name: str) -> RemovedNode:
        """Forget a node that is lost, or cordoned with nothing running; Refused for any other."""
        node = NodeId(name)
        async with self._acting:
            # As it is read from the store: this server may have been told of the node by the node itself.
            await carry_through(self._read)
            fleet = self._scheduler.fleet.statistics()
            each = _find(fleet, node)
            connected = any(link.node == node and link.connected for link in self._links())
            if each is not None:
                _refuse_in_use(each, fleet.draining.get(node))
            elif node not in self.kept:
                raise self._unknown(name, connected=connected)
            elif connected:
                message = f"{node} is joining: its agent is connected; stop it there first, or wait until it is ready"
                raise Refused(message, status=409, code="node_in_use")
            known = each is not None or self.kept[node].last_seen is not None
            before = self._brake()
            await carry_through(lambda: self._forget(node))
            after = self._brake()
        return RemovedNode(
            node=node,
            connected=connected,
            known=known,
            running=living(each) if each is not None else (),
            brake_before=before if _is_less(after, before) else None,
            brake=after if _is_less(after, before) else None,
        )

    # -- the store, then the fleet

    async def _mark(self, node: NodeId, marks: _Marks) -> None:
        async def act() -> None:
            await self._store.mark(
                node,
                cordoned=marks.cordoned,
                labels=marks.labels,
                draining=marks.draining,
                drain_until=marks.drain_until,
            )
            await self._read()
            await self._tell(node, marks)

        await carry_through(act)

    async def _tell(self, node: NodeId, marks: _Marks) -> None:
        # The fleet's clock begins anew with each server, and the store's goes on.
        left = self._left(marks.drain_until)
        await self._scheduler.post(
            NodeMarked(
                node=node,
                cordoned=marks.cordoned,
                draining=marks.draining,
                drain_until=None if left is None else trio.current_time() + left,
                labels=marks.labels,
            )
        )

    def _left(self, until: float | None) -> float | None:
        return None if until is None else max(until - self._wall(), 0.0)

    async def _forget(self, node: NodeId) -> None:
        # First: a word of the node that comes meanwhile is not to bring it back.
        self._forgotten(node)
        await self._store.forget(node)
        await self._read()
        self._removed.add(node)
        await self._scheduler.post(NodeRemoved(node=node))
        # A node that has come back in this moment stays: without marks, as in the store.
        await self._scheduler.settle(NodeMarked(node=node))
        self._let_go(node)

    async def _read(self) -> None:
        self.kept = {each.node: each for each in await self._store.list_marks()}

    def _marks(self, node: NodeId) -> _Marks:
        kept = self.kept.get(node)
        if kept is None:
            return _Marks()
        return _Marks(cordoned=kept.cordoned, draining=kept.draining, drain_until=kept.drain_until, labels=kept.labels)

    # -- what is answered

    def _brake(self) -> BrakeView | None:
        now = trio.current_time()
        return view_brake(self._scheduler.fleet.statistics(now), now)

    def tell_unknown(self, name: str) -> str | None:
        """That nobody has seen or marked a node of that name, and which may be meant; None where somebody has."""
        node = NodeId(name)
        here = any(link.node == node for link in self._links())
        if node in self.kept or here or _find(self._scheduler.fleet.statistics(), node) is not None:
            return None
        return self._unknown(name, connected=False).message

    def _check_known(self, node: NodeId) -> None:
        """A mark of a node that nobody has seen or marked is most likely meant for another one."""
        if self.tell_unknown(node) is not None:
            raise self._unknown(node, connected=False)

    def _view(self, node: NodeId) -> NodeMarks:
        fleet = self._scheduler.fleet.statistics()
        kept, each = self.kept.get(node), _find(fleet, node)
        known = each is not None or (kept is not None and kept.last_seen is not None)
        marks = self._marks(node)
        return NodeMarks(
            node=node,
            cordoned=marks.cordoned,
            draining=marks.draining,
            drain_seconds_left=self._left(marks.drain_until),
            labels={label: value for label, value in sorted(marks.labels.items()) if value is not None},
            without=tuple(sorted(label for label, value in marks.labels.items() if value is None)),
            known=known,
            running=living(each) if each is not None else (),
            close=None if known else self._find_close(node, fleet),
        )

    def _find_close(self, name: str, fleet: FleetStatistics) -> str | None:
        names = self.seen().union(each.node.id for each in fleet.nodes)
        return next(iter(difflib.get_close_matches(name, sorted(names), n=1)), None)

    def _unknown(self, name: str, *, connected: bool) -> Refused:
        if connected:
            message = f"nothing is kept of {name}: its agent is connected and registers when it connects anew"
        else:
            close = self._find_close(name, self._scheduler.fleet.statistics())
            message = f"there is no node {name}" + (f"; did you mean {close}?" if close else "")
        return Refused(message, status=404, code="unknown_node")


def _find(fleet: FleetStatistics, node: NodeId) -> NodeStatistics | None:
    return next((each for each in fleet.nodes if each.node.id == node), None)


def _is_less(after: BrakeView | None, before: BrakeView | None) -> bool:
    """There is less of the brake, or another one; its time runs out by itself."""
    if before is None or after is None:
        return before is not None
    return (after.lost, after.nodes) != (before.lost, before.nodes)


def _refuse_in_use(each: NodeStatistics, draining: Draining | None) -> None:
    """Refused unless the node is lost, or drained: cordoned with nothing alive on it."""
    name, running = each.node.id, living(each)
    if each.host.standing is Standing.LOST or (each.host.cordoned and not running):
        return
    stands = f"{name} is {each.host.standing}{' and cordoned' if each.host.cordoned else ''}"
    if running:
        stands += f", with {', '.join(running)}"
    # (one that was removed, or is one too many, needs no further word)
    going = {replica.id for replica in each.replicas if replica.state is ShardState.STOPPING or replica.draining}
    stays = not going.issuperset(running)
    steps = []
    if stays and draining is None:
        steps.append(f"`llmgw ctl drain {name}`")
    elif stays and draining is not None and draining.until is None:
        # (it waits for room elsewhere, which there may never be)
        steps.append(f"make room elsewhere, or give the drain an end: `llmgw ctl drain {name} --deadline 10m`")
    elif not stays and not each.host.cordoned:
        steps.append(f"`llmgw ctl cordon {name}`")
    if running:
        steps.append(f"wait until {', '.join(running)} {'has' if len(running) == 1 else 'have'} stopped")
    remedy = f"{', then '.join(steps)}; or stop its agent, and wait until the node is lost"
    raise Refused(f"{stands}: first {remedy}", status=409, code="node_in_use")


def _check_deadline(seconds: float) -> float:
    if not (math.isfinite(seconds) and 0 <= seconds <= MAX_DRAIN_SECONDS):
        message = f"a deadline is from 0 s to {MAX_DRAIN_SECONDS / 86400:g} days, not {seconds:g} s"
        raise Refused(message, status=400, code="invalid_deadline")
    return seconds


def _read_name(name: str) -> NodeId:
    if (why := wrong_node(name)) is not None:
        message = f"node {name[:MAX_SHOWN]!r} {why.removeprefix(f'{name!r} ')}"
        raise Refused(message, status=400, code="invalid_node")
    return NodeId(name)


def _check_labels(changes: Mapping[str, str | None]) -> None:
    if not changes:
        raise Refused(
            "no label is given: write NAME=VALUE, or NAME- to take one away", status=400, code="invalid_label"
        )
    for name, value in changes.items():
        if (why := wrong_label(name, value or "")) is not None:
            raise Refused(f"label {name[:MAX_SHOWN]!r} {why}", status=400, code="invalid_label")
