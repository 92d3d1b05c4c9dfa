"""What runs and what should: events go in with a time, effects come out, and nothing else writes this state."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import assert_never

from llmgw.core.catalog import Catalog
from llmgw.core.effects import Announce, Effect, WakeAt
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Event,
    NodeLost,
    NodeRegistered,
    NodeReported,
    NodesExpected,
    ShardChanged,
    Stopping,
    Wakeup,
)
from llmgw.core.model import Model, ModelName, launch_facts
from llmgw.core.node import Node, NodeId
from llmgw.core.placement import Placement, Rejected, Verdict, place
from llmgw.core.rejection import Reason
from llmgw.core.replica import MAY_FOLLOW, Load, Replica, ShardReport, ShardSpec, ShardState, replica_id, shard_id
from llmgw.core.roster import Life, LifeKey, Member, Roster
from llmgw.core.scaling import Failures, fail, wanted
from llmgw.units import format_duration

# Somebody who asked has waited, was told to come back, and came or gave up within this time: a model that fails for
# nobody is not tried for ever.
DEMAND_SECONDS = 300.0

# A node says at once that it launches what it was told to. What it has not mentioned this long after it was told
# otherwise, it never saw: the second word had replaced the first.
UNHEARD_SECONDS = 5.0

NO_CAUSE = "it gave no cause"

# Lines of the log about one registration.
FEW = 16

USUAL_LOAD_SECONDS = 5.0
LONGEST_RETRY_AFTER_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatistics:
    """A node, whether it is silent, the memory in GB that replicas have booked there, and those replicas (ended ones
    book nothing)."""

    node: Node
    lost: bool
    revision: int
    booked_gb: float
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """A model, its replicas (a failed one stays until its next try), and the last answer when one was to be placed."""

    model: Model
    replicas: tuple[Replica, ...]
    verdict: Verdict | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatistics:
    """The whole fleet at one moment: nodes by id, models as in the catalog, replicas by id."""

    nodes: tuple[NodeStatistics, ...]
    models: tuple[ModelStatistics, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a shard ended: why, of what kind that is, what to do about it, and its engine's last lines."""

    cause: str
    kind: str | None = None
    remedy: str | None = None
    lines: tuple[str, ...] = ()


def _short_of_context(report: ShardReport, replica: Replica) -> str:
    """What an engine takes less than clients are told; "" when nothing."""
    takes, promised = report.context_length, replica.shard.model.context_length
    if takes is None or promised is None or takes >= promised:
        return ""
    return f"; it takes {takes} tokens a request, and its model promises context_length {promised}"


class Fleet:
    """The machine. Only ``handle`` changes anything; all else reads."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self._roster = Roster()
        self._failures: dict[tuple[ModelName, NodeId], Failures] = {}
        self._asked_at: dict[ModelName, float] = {}
        self._load_seconds: dict[ModelName, float] = {}
        self._verdicts: dict[ModelName, Verdict] = {}
        self._unplanned: dict[ModelName, None] = {}
        self._retry_at: dict[ModelName, float] = {}
        self._forget_at: dict[LifeKey, float] = {}
        self._wake_at: float | None = None
        self._stopping = False
        self._expected: set[NodeId] = set()
        self._settled_at = 0.0
        self._effects: list[Effect] = []

    def ready(self, name: ModelName) -> tuple[Replica, ...]:
        """The replicas that requests may go to, by id. A look-up, not a search: each request asks."""
        return self._roster.ready.get(name, ())

    def verdict(self, name: ModelName) -> Verdict | None:
        """What came of the last attempt to place a replica of this model; None when none is to the point."""
        return self._verdicts.get(name)

    def silent_nodes(self, name: ModelName) -> tuple[NodeId, ...]:
        """The lost nodes that replicas of this model are on."""
        lost = self._roster.lost()
        return tuple(sorted({life.replica.shard.node for life in self._roster.of(name) if life.alive} & lost))

    def idle(self) -> bool:
        """True when nothing runs or is about to run on any node."""
        return self._roster.idle()

    def retry_after_seconds(self, name: ModelName, now: float) -> int:
        """When to ask again for a model that is not ready, from 1 to 120: a plain guess until it has loaded once."""
        usual = self._load_seconds.get(name, USUAL_LOAD_SECONDS)
        launched = [
            life.launched_at
            for life in self._roster.of(name)
            if life.launched_at is not None and self._roster.is_desired(life)
        ]
        began_at = min(launched) if launched else max(self._retry_at.get(name, now), now)
        left = began_at + usual - now
        # A load that is late already says nothing of when it will be done.
        return min(max(math.ceil(left if left > 0 else USUAL_LOAD_SECONDS), 1), LONGEST_RETRY_AFTER_SECONDS)

    def statistics(self) -> FleetStatistics:
        """An immutable picture for people and programs that look on; never a basis for a change."""
        booked = self._roster.bookings()
        on_node: dict[NodeId, list[Replica]] = {}
        of_model: dict[ModelName, list[Replica]] = {}
        for replica in sorted((life.replica for life in self._roster.lives.values()), key=lambda replica: replica.id):
            on_node.setdefault(replica.shard.node, []).append(replica)
            of_model.setdefault(replica.model, []).append(replica)
        return FleetStatistics(
            nodes=tuple(
                NodeStatistics(
                    node=member.node,
                    lost=member.lost,
                    revision=member.revision,
                    booked_gb=booked.get(name, 0.0),
                    replicas=tuple(on_node.get(name, ())),
                )
                for name, member in sorted(self._roster.members.items())
            ),
            models=tuple(
                ModelStatistics(
                    model=model,
                    replicas=tuple(of_model.get(model.name, ())),
                    verdict=self._verdicts.get(model.name),
                )
                for model in self.catalog
            ),
        )

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in what happened, answer what is to be done. Plans one model at most; a WakeAt asks for another turn."""
        self._effects = []
        match event:
            case CatalogChanged(models=models):
                self._change_catalog(Catalog(models), now)
            case NodeRegistered():
                self._register(event, now)
            case NodesExpected(nodes=nodes, until=until):
                self._expected, self._settled_at = set(nodes) - self._roster.members.keys(), until
            case NodeReported(node=node, applied=applied):
                self._take_report(node, applied)
            case NodeLost(node=node_id):
                self._lose(node_id)
            case ShardChanged(node=node_id, report=report):
                life = self._roster.lives.get((node_id, report.replica, report.epoch))
                # A word of an epoch that is over, or that this fleet never began, moves nothing.
                if life is not None:
                    self._observe(life, report, now)
            case Demand(model=name):
                self._demand(name, now)
            case Wakeup():
                self._wake_at = None
            case Stopping():
                self._stop(now)
            case _:
                assert_never(event)
        self._come_due(now)
        if now >= self._settled_at:
            self._expected.clear()
        if not self._expected:
            self._plan_one(now)
        self._effects += self._roster.changed_desires()
        self._ask_to_be_woken(now)
        return self._effects

    def _change_catalog(self, catalog: Catalog, now: float) -> None:
        earlier, self.catalog = self.catalog, catalog
        for model in earlier:
            if catalog.named(model.name) != model:
                self._start_afresh(model.name)
        for model in catalog:
            if earlier.named(model.name) != model:
                self._plan_later(model.name)
        for life in list(self._roster.lives.values()):
            if not self._is_defined(life.replica.shard):
                self._take_back(life, "its definition has changed or is gone", now)

    def _start_afresh(self, name: ModelName) -> None:
        """Somebody has changed this definition: what came of the earlier one says nothing of the new one."""
        for tried in [tried for tried in self._failures if tried[0] == name]:
            del self._failures[tried]
        self._verdicts.pop(name, None)
        self._retry_at.pop(name, None)
        self._load_seconds.pop(name, None)
        self._asked_at.pop(name, None)

    def _register(self, event: NodeRegistered, now: float) -> None:
        was_lost = event.node.id in self._roster.lost()
        member = self._roster.enrol(event.node)
        self._expected.discard(event.node.id)
        named: set[LifeKey] = set()
        said = len(self._effects)
        # The newest epoch first: were there two of a replica, that is the one to keep.
        for spec, report in sorted(event.running, key=lambda pair: -pair[0].epoch):
            key = (event.node.id, spec.replica, spec.epoch)
            named.add(key)
            life = self._roster.lives.get(key)
            if life is not None:
                self._observe(life, report, now)
                if was_lost and life.alive:
                    self._announce(life.replica, f"{life.replica.id} can be reached again: {event.node.id} is back")
            else:
                self._find_running(member, spec, report, now)
            self._roster.see_epoch(spec.replica, spec.epoch)
        for key, life in list(self._roster.lives.items()):
            if key[0] == event.node.id and key not in named and life.alive:
                self._miss(life, now)
        self._cut_short(said, event.node.id)
        for model in self.catalog:
            self._plan_later(model.name)

    def _cut_short(self, said: int, node: NodeId) -> None:
        """A node may come with a thousand shards: the log gets the first few, and how many more."""
        more = self._effects[said + FEW :]
        if more:
            last = next(effect for effect in reversed(self._effects) if isinstance(effect, Announce))
            del self._effects[said + FEW :]
            text = f"and {len(more)} more changes with the registration of {node}"
            self._effects.append(Announce(model=last.model, text=text, warning=True))

    def _find_running(self, member: Member, spec: ShardSpec, report: ShardReport, now: float) -> None:
        """A shard that ran before this fleet knew of it: taken over as it is, or left to its node to stop."""
        if report.state is ShardState.ENDED:
            text = f"{spec.replica} had ended on {member.node.id}: {report.cause or NO_CAUSE}"
            text += f"; {report.remedy}" if report.remedy else ""
            self._effects.append(Announce(model=spec.model.name, text=text, lines=report.lines, warning=True))
            return
        ours = (
            not self._stopping
            and report.state is not ShardState.STOPPING
            and spec.node == member.node.id
            and self._is_defined(spec)
            and not self._roster.is_alive(spec.replica)
            and self._lacks(spec.model.name)
        )
        if ours:
            self._roster.desire(spec)
        replica = Replica(
            id=spec.replica,
            model=spec.model.name,
            profile=spec.profile.name,
            # Booked on the node that it runs on, whatever that node was called when it was placed.
            shard=replace(spec, node=member.node.id),
            state=report.state if ours else ShardState.STOPPING,
            since=now,
            endpoint=report.endpoint,
            context_length=report.context_length,
            progress=report.progress,
            load=report.load,
        )
        self._roster.put(Life(replica, heard=True))
        fate = "is taken over" if ours else "is to stop: it isn't what the catalog asks for"
        self._announce(replica, f"{replica.id} was already running on {member.node.id} and {fate}")

    def _lacks(self, name: ModelName) -> bool:
        """There is a place for one more: a node can't take a model from another by saying that it runs it."""
        model = self.catalog.named(name)
        return model is not None and sum(map(self._roster.is_desired, self._roster.of(name))) < model.scaling.max

    def _miss(self, life: Life, now: float) -> None:
        """Its node has registered without it."""
        if life.heard:
            self._end(life, End(cause="it no longer ran when its node registered again"), now)
            return
        # It never saw it, or it ran and ended and both words were lost: only another epoch is sure to be launched.
        if self._roster.is_desired(life):
            self._roster.withdraw(life)
        self._forget(life)

    def _take_report(self, node: Node, applied: int | None) -> None:
        member = self._roster.members.get(node.id)
        if member is None:
            return
        member.node = node
        self._plan_waiting()
        if applied is not None:
            for key in [key for key in self._forget_at if key[0] == node.id]:
                life = self._roster.lives[key]
                # It has taken the set without this shard and never spoke of it: it never saw the set with it.
                if life.withdrawn_by is not None and applied >= life.withdrawn_by:
                    self._forget_unheard(life)

    def _lose(self, name: NodeId) -> None:
        """What runs there may serve on, unseen: it keeps its room, and gets no requests."""
        member = self._roster.members.get(name)
        if member is None or member.lost:
            return
        self._roster.mark_lost(member, lost=True)
        for life in self._roster.lives.values():
            replica = life.replica
            if replica.shard.node == name and life.alive:
                text = f"{replica.id} can't be reached: {name} is silent; no request goes there until it is back"
                self._announce(replica, text, warning=True)
        self._plan_waiting()

    def _observe(self, life: Life, report: ShardReport, now: float) -> None:
        life.heard = True
        self._forget_at.pop(life.key, None)
        replica = life.replica
        if report.state not in MAY_FOLLOW[replica.state]:
            return
        if report.state is ShardState.ENDED:
            end = End(cause=report.cause or NO_CAUSE, kind=report.kind, remedy=report.remedy, lines=report.lines)
            self._end(life, end, now)
            return
        changed = report.state is not replica.state
        if changed:
            self._count_health(life, now)
        life.replica = replace(
            replica,
            state=report.state,
            since=now if changed else replica.since,
            endpoint=report.endpoint or replica.endpoint,
            context_length=report.context_length,
            progress=report.progress,
            load=report.load,
        )
        self._roster.put(life)
        if changed and report.state is ShardState.READY:
            after = ""
            if life.launched_at is not None:
                seconds = self._load_seconds[replica.model] = now - life.launched_at
                after = f" after {format_duration(seconds)}"
            self._announce(
                replica, f"{replica.id} is ready on {replica.shard.node}{after}{_short_of_context(report, replica)}"
            )

    def _count_health(self, life: Life, now: float) -> None:
        """To be called as it leaves its state: an engine that dies may be reported as stopping before it has ended."""
        if life.replica.state is ShardState.READY:
            life.ready_seconds = now - life.replica.since

    def _end(self, life: Life, end: End, now: float) -> None:
        """The process is gone, and its room is free."""
        replica = life.replica
        node = replica.shard.node
        self._plan_later(replica.model)
        self._plan_waiting()
        if not self._roster.is_desired(life):
            self._forget(life)
            self._announce(replica, f"{replica.id} has stopped on {node}")
            return
        self._roster.withdraw(life)
        self._count_health(life, now)
        tried = (replica.model, node)
        earlier = self._failures.get(tried)
        failures = self._failures[tried] = replace(fail(earlier, life.ready_seconds, now), cause=end.cause)
        life.replica = replace(
            replica,
            state=ShardState.ENDED,
            since=now,
            endpoint=None,
            progress=None,
            cause=end.cause,
            kind=end.kind,
            remedy=end.remedy,
            lines=end.lines,
            load=Load(),
        )
        self._roster.put(life)
        wait = format_duration(failures.until - now)
        text = (
            f"{replica.id} ended on {node}: {end.cause} (failure {failures.count} in a row; not tried there for {wait})"
        )
        text += f"; {end.remedy}" if end.remedy else ""
        # What fails in the same way for a week must not fill the log with the engine's same last words.
        told = earlier is not None and failures.count > 1 and earlier.cause == end.cause
        self._announce(replica, text, lines=() if told else end.lines, warning=True)

    def _demand(self, name: ModelName, now: float) -> None:
        # Only for models that there are: a client's invention must not grow memory.
        model = self.catalog.resolve(name)
        if model is not None:
            self._asked_at[model.name] = now
            self._plan_later(model.name)

    def _stop(self, now: float) -> None:
        self._stopping = True
        self._unplanned.clear()
        self._retry_at.clear()
        for life in list(self._roster.lives.values()):
            self._take_back(life, "everything stops", now)

    def _take_back(self, life: Life, why: str, now: float) -> None:
        """Out of the desired set; alive and booked until its node says that it ended."""
        replica = life.replica
        if not life.alive:
            self._forget(life)
        elif self._roster.is_desired(life):
            self._roster.withdraw(life)
            if not life.heard:
                self._forget_at[life.key] = now + UNHEARD_SECONDS
            life.replica = replace(replica, state=ShardState.STOPPING, since=now)
            self._roster.put(life)
            self._announce(replica, f"{replica.id} on {replica.shard.node} is to stop: {why}")

    def _forget(self, life: Life) -> None:
        self._roster.forget(life)
        self._forget_at.pop(life.key, None)

    def _is_defined(self, spec: ShardSpec) -> bool:
        """The catalog, too, would launch this shard as it runs."""
        model = self.catalog.named(spec.model.name)
        if model is None:
            return False
        facts = launch_facts(spec.model, spec.profile)
        return any(launch_facts(model, profile) == facts for profile in model.profiles)

    def _plan_later(self, name: ModelName) -> None:
        if not self._stopping:
            self._unplanned[name] = None

    def _plan_waiting(self) -> None:
        """There may be room now for those that found none."""
        for name, verdict in self._verdicts.items():
            if isinstance(verdict, Rejected):
                self._plan_later(name)

    def _come_due(self, now: float) -> None:
        for name in [name for name, at in self._retry_at.items() if at <= now]:
            del self._retry_at[name]
            self._plan_later(name)
        for key in [key for key, at in self._forget_at.items() if at <= now]:
            self._forget_unheard(self._roster.lives[key])

    def _forget_unheard(self, life: Life) -> None:
        self._forget(life)
        self._plan_later(life.replica.model)
        self._plan_waiting()

    def _plan_one(self, now: float) -> None:
        """One model a turn, however many wait: a thousand at once would hold up every request meanwhile."""
        while self._unplanned:
            name = next(iter(self._unplanned))
            del self._unplanned[name]
            model = self.catalog.named(name)
            if model is not None:
                self._plan(model, now)
                return

    def _plan(self, model: Model, now: float) -> None:
        self._retry_at.pop(model.name, None)
        kept = self._shed_surplus(model, now)
        asked_at = self._asked_at.get(model.name)
        demand = asked_at is not None and now - asked_at < DEMAND_SECONDS
        lacking = wanted(model, demand=demand) - kept
        if lacking <= 0:
            if isinstance(self._verdicts.get(model.name), Rejected):
                del self._verdicts[model.name]
            return
        # One that is still stopping counts against the most there may be: its memory is in use, even where the profile
        # books none. Its end plans this model again.
        alive = sum(1 for life in self._roster.of(model.name) if life.alive)
        for _ in range(min(lacking, model.scaling.max - alive)):
            verdict = place(
                model,
                self._roster.nodes(),
                self._roster.bookings(),
                self._backing_off(model.name),
                now,
                lost=self._roster.lost(),
            )
            earlier = self._verdicts.get(model.name)
            self._verdicts[model.name] = verdict
            if isinstance(verdict, Rejected):
                self._wait_for_room(model, verdict, earlier, now)
                return
            self._start(model, verdict, now)

    def _shed_surplus(self, model: Model, now: float) -> int:
        """Stop what is beyond the most there may be, the least useful first; answers how many are kept."""
        most = model.scaling.max
        lives = sorted(
            self._roster.of(model.name), key=lambda life: (life.replica.state is not ShardState.READY, life.key[1])
        )
        desired = [life for life in lives if self._roster.is_desired(life)]
        for life in desired[most:]:
            self._take_back(life, f"no more than {most} may run", now)
        kept = min(len(desired), most)
        for life in [life for life in lives if not life.alive][most - kept :]:
            self._forget(life)
        return kept

    def _start(self, model: Model, placement: Placement, now: float) -> None:
        number = 1
        while self._roster.is_alive(replica_id(model.name, number)):
            number += 1
        name = replica_id(model.name, number)
        spec = ShardSpec(
            id=shard_id(model.name, number, 0),
            replica=name,
            epoch=self._roster.next_epoch(name),
            node=placement.node,
            model=model,
            profile=placement.profile,
        )
        replica = Replica(
            id=name,
            model=model.name,
            profile=placement.profile.name,
            shard=spec,
            state=ShardState.PLACED,
            since=now,
        )
        self._roster.desire(spec)
        self._roster.put(Life(replica, launched_at=now))
        text = f"{name} goes to {placement.node} by profile {placement.profile.name!r} (epoch {spec.epoch})"
        self._announce(replica, text)

    def _wait_for_room(self, model: Model, verdict: Rejected, earlier: Verdict | None, now: float) -> None:
        if any(rejection.reason is Reason.BACKING_OFF for rejection in verdict.rejections):
            # The failure was announced, with the time of the next try.
            self._retry_at[model.name] = min(until for until in self._backing_off(model.name).values() if until > now)
            return
        # Numbers move with each report; only another reason is news.
        if verdict.rejections and (not isinstance(earlier, Rejected) or _reasons(earlier) != _reasons(verdict)):
            lines = tuple(f"{no.node}, profile {no.profile!r}: {no.detail}" for no in verdict.rejections)
            text = f"no node can run {model.name} now"
            self._effects.append(Announce(model=model.name, text=text, lines=lines, warning=True))

    def _backing_off(self, name: ModelName) -> dict[NodeId, float]:
        return {node: failures.until for (model, node), failures in self._failures.items() if model == name}

    def _ask_to_be_woken(self, now: float) -> None:
        times = [*self._retry_at.values(), *self._forget_at.values()]
        if self._unplanned:
            times.append(self._settled_at if self._expected else now)
        if times and (self._wake_at is None or min(times) < self._wake_at):
            self._wake_at = min(times)
            self._effects.append(WakeAt(at=self._wake_at))

    def _announce(self, replica: Replica, text: str, *, lines: tuple[str, ...] = (), warning: bool = False) -> None:
        self._effects.append(Announce(model=replica.model, text=text, lines=lines, warning=warning))


def _reasons(verdict: Rejected) -> set[tuple[str, str, Reason]]:
    return {(rejection.node, rejection.profile, rejection.reason) for rejection in verdict.rejections}
