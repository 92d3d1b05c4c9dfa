"""What runs and what should: events go in with a time, effects come out, and nothing else writes this state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import assert_never

from llmgw.core.brake import Brake, find_brake
from llmgw.core.catalog import Catalog
from llmgw.core.costs import Score
from llmgw.core.effects import Announce, Effect, WakeAt
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Event,
    NodeLost,
    NodeMarked,
    NodeRegistered,
    NodeRemoved,
    NodeReported,
    NodesExpected,
    NodeSilent,
    RulesChanged,
    ShardChanged,
    Stopping,
    Wakeup,
)
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Model, ModelName, launch_facts
from llmgw.core.node import Gpu, Node, NodeId
from llmgw.core.picture import FleetStatistics, picture
from llmgw.core.placement import Placement, Rejected, Verdict, place
from llmgw.core.rejection import Reason
from llmgw.core.replica import (
    MAY_FOLLOW,
    Load,
    Replica,
    Shard,
    ShardReport,
    ShardSpec,
    ShardState,
    replica_id,
    shard_id,
)
from llmgw.core.roster import Life, LifeKey, Member, Roster, ShardKey
from llmgw.core.scaling import Failures, fail, wanted
from llmgw.core.trace import Decision, Trace
from llmgw.units import format_duration

# Somebody who asked has waited, was told to come back, and came or gave up within this time: a model that fails for
# nobody is not tried for ever.
DEMAND_SECONDS = 300.0

# A node says at once that it launches what it was told to. What it has not mentioned this long after it was told
# otherwise, it never saw: the second word had replaced the first.
UNHEARD_SECONDS = 5.0

# What found no room is looked at again at each event that may have made some. Should that ever miss one: this often.
BACKSTOP_SECONDS = 30.0

# The nodes of a replica that ran before this server each come when they come. Then it is whole, or it is none.
WHOLE_SECONDS = 30.0

# What failed on a node longer ago says little of the next try there.
FAILED_SECONDS = 3600.0

# An agent says at once that it launches what it was told to. Where it does not, something keeps the word from it, or it
# from the word.
LAUNCH_SECONDS = 60.0

# What does not end within this time may never: it keeps its room, and holds up nothing else.
STOPPING_SECONDS = 120.0

# Before a server says otherwise.
REPLACE_AFTER_SECONDS = 60.0
BRAKE_SECONDS = 600.0

# Where the shards of one replica meet: of these ports one that no other replica's rank 0 has on that node.
RENDEZVOUS_PORTS = range(29500, 30000)

# Nobody gets so far, and a node that says it did must not bring a replica to where no number is left for its next try.
MOST_EPOCHS = 2**31

# Of a replica, by its digits.
LONGEST_NUMBER = 4

# Nodes that are looked at anew before something is placed: more wait for the next turn.
HOSTS_A_TURN = 100

NO_CAUSE = "it gave no cause"

# Lines of the log about one registration, or one model that finds no place.
FEW = 16

USUAL_LOAD_SECONDS = 5.0
LONGEST_RETRY_AFTER_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a shard ended: why, of what kind that is, what to do about it, and its engine's last lines."""

    cause: str
    kind: str | None = None
    remedy: str | None = None
    lines: tuple[str, ...] = ()


def _short_of_context(replica: Replica) -> str:
    """What an engine takes less than clients are told; "" when nothing."""
    takes, promised = replica.context_length, replica.shard.model.context_length
    if takes is None or promised is None or takes >= promised:
        return ""
    return f"; it takes {takes} tokens a request, and its model promises context_length {promised}"


class Fleet:
    """The machine. Only ``handle`` changes anything; all else reads."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.trace = Trace()
        self._roster = Roster()
        self._failures: dict[tuple[ModelName, NodeId], Failures] = {}
        self._asked_at: dict[ModelName, float] = {}
        self._load_seconds: dict[ModelName, float] = {}
        self._verdicts: dict[ModelName, Verdict] = {}
        self._unplanned: dict[ModelName, None] = {}
        self._stopping = False
        # what a later time brings: a try, a shard that was never launched, a replica
        # of several nodes that is not whole, a lost node's replicas to be placed anew
        self._retry_at: dict[ModelName, float] = {}
        self._forget_at: dict[ShardKey, float] = {}
        self._whole_at: dict[LifeKey, float] = {}
        self._launched_at: dict[ShardKey, float] = {}
        self._replace_at: dict[NodeId, float] = {}
        self._look_again_at = math.inf
        self._wake_at: float | None = None
        # of a server that has begun anew: who was there before, who may still come and until when, and who did not
        self._known: frozenset[NodeId] = frozenset()
        self._expected: set[NodeId] = set()
        self._settled_at = 0.0
        self._absent: dict[NodeId, float] = {}
        self._replace_after = REPLACE_AFTER_SECONDS
        self._brake_seconds = BRAKE_SECONDS
        self._brake: Brake | None = None
        self._effects: list[Effect] = []

    # -- what is read

    def ready(self, name: ModelName) -> tuple[Replica, ...]:
        """The replicas that requests may go to, by id. A look-up, not a search: each request asks."""
        return self._roster.ready.get(name, ())

    def verdict(self, name: ModelName) -> Verdict | None:
        """What came of the last attempt to place a replica of this model; None when none is to the point."""
        return self._verdicts.get(name)

    def silent_nodes(self, name: ModelName) -> tuple[NodeId, ...]:
        """The lost nodes that replicas of this model are on."""
        lost = self._roster.lost_at.keys()
        on = {node for life in self._roster.of(name) if life.alive and not life.given_up for node in life.replica.nodes}
        return tuple(sorted(on & lost))

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

    def hosts(self) -> tuple[Host, ...]:
        """The nodes as placement sees them now, by id: with ``backing_off`` and ``failed`` all that an answer depends
        on, for whoever wants it explained somewhere else."""
        return self._roster.hosts()

    def backing_off(self, name: ModelName) -> dict[NodeId, float]:
        """Until when each node is not tried again for this model, because it failed there."""
        return {node: failures.until for (model, node), failures in self._failures.items() if model == name}

    def failed(self, name: ModelName, now: float) -> dict[NodeId, int]:
        """How often in a row this model failed on each node, the last time within an hour."""
        recent = now - FAILED_SECONDS
        return {
            node: failures.count
            for (model, node), failures in self._failures.items()
            if model == name and failures.until > recent
        }

    def wanted(self, model: Model, now: float) -> int:
        """How many replicas there are to be now."""
        return wanted(model, demand=self._is_asked_for(model.name, now))

    def brake(self, now: float) -> Brake | None:
        """The brake, while it holds."""
        lost_at = [*self._roster.lost_at.values(), *self._absent.values()]
        return find_brake(lost_at, len(self._roster.members) + len(self._absent), self._brake_seconds, now)

    def held_up(self, now: float) -> str | None:
        """Why what would be placed may not be: nothing at all while the server waits for its nodes, and nothing for
        lost nodes while the brake holds. None when neither is so."""
        if self._expected:
            names = _few(sorted(self._expected))
            wait = format_duration(round(max(self._settled_at - now, 0.0)))
            return f"nothing is placed yet: the server waits for what {names} run, {wait} at most"
        brake = self.brake(now)
        return None if brake is None else _describe(brake, now)

    def statistics(self, now: float | None = None) -> FleetStatistics:
        """An immutable picture for people and programs that look on; never a basis for a change. Without a time it does
        not tell of the brake."""
        brake = None if now is None else self.brake(now)
        return picture(self._roster, self.catalog, self._verdicts, tuple(sorted(self._absent)), brake)

    # -- what changes it

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in what happened, answer what is to be done. Plans one model at most; a WakeAt asks for another turn."""
        self._effects = []
        match event:
            case CatalogChanged(models=models):
                self._change_catalog(Catalog(models), now)
            case NodeRegistered():
                self._register(event, now)
            case NodesExpected(nodes=nodes, until=until):
                self._known, self._settled_at = nodes, until
                self._expected = set(nodes) - self._roster.members.keys()
            case NodeReported(node=node, applied=applied):
                self._take_report(node, applied, now)
            case NodeSilent(node=node_id):
                self._fall_silent(node_id)
            case NodeLost(node=node_id):
                self._lose(node_id, now)
            case NodeMarked():
                self._roster.mark(event)
                self._plan_waiting()
            case NodeRemoved(node=node_id):
                self._remove(node_id, now)
            case RulesChanged(replace_after=replace_after, brake=brake):
                self._change_rules(replace_after, brake)
            case ShardChanged(node=node_id, report=report):
                life = self._roster.at(node_id, report.replica, report.epoch)
                # A word of an epoch that is over, or that this fleet never began, moves nothing.
                if life is not None:
                    self._observe(life, node_id, report, now)
            case Demand(model=name):
                self._demand(name, now)
            case Wakeup():
                self._wake_at = None
            case Stopping():
                self._stop(now)
            case _:
                assert_never(event)
        self._settle(now)
        self._heed_brake(now)
        self._come_due(now)
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
        self._roster.forget_held(model.source for model in catalog)

    def _start_afresh(self, name: ModelName) -> None:
        """Somebody has changed this definition: what came of the earlier one says nothing of the new one."""
        for tried in [tried for tried in self._failures if tried[0] == name]:
            del self._failures[tried]
        self._verdicts.pop(name, None)
        self._retry_at.pop(name, None)
        self._load_seconds.pop(name, None)
        self._asked_at.pop(name, None)

    # -- nodes

    def _register(self, event: NodeRegistered, now: float) -> None:
        name = event.node.id
        was_lost = name in self._roster.lost_at
        member = self._roster.enrol(event.node)
        self._expected.discard(name)
        self._absent.pop(name, None)
        self._replace_at.pop(name, None)
        named: set[LifeKey] = set()
        # A look at all replicas of a model for each of a thousand shards would take seconds.
        room: dict[ModelName, int] = {}
        said = len(self._effects)
        # The newest epoch first: were there two of a replica, that is the one to keep.
        for spec, report in sorted(event.running, key=lambda pair: -pair[0].epoch):
            life = self._roster.at(name, spec.replica, spec.epoch)
            if life is not None:
                self._observe(life, name, report, now)
                self._find_again(life, name, report, now)
                if was_lost and life.alive:
                    fate = "; it is to stop, another has its place" if life.given_up else ""
                    self._announce(life.replica, f"{life.replica.id} can be reached again: {name} is back{fate}")
            else:
                life = self._find_running(member, spec, report, room, now)
            if life is not None:
                named.add(life.key)
            if spec.epoch < MOST_EPOCHS and self._may_be_named(spec):
                self._roster.see_epoch(spec.replica, spec.epoch)
        for life in list(self._roster.on(name)):
            if life.key not in named and life.shard_on(name).state is not ShardState.ENDED:
                self._miss(life, name, now)
        self._cut_short(said, name)
        if self._is_everybody_here():
            # What is missing of a replica is on no node.
            self._whole_at = dict.fromkeys(self._whole_at, now)
        for model in self.catalog:
            self._plan_later(model.name)

    def _is_everybody_here(self) -> bool:
        """Each node that was there before this server began has said what it runs."""
        away = self._expected or self._absent or self._roster.lost_at
        return bool(self._known) and not away

    def _cut_short(self, said: int, node: NodeId) -> None:
        """A node may come with a thousand shards: the log gets the first few, and how many more."""
        more = self._effects[said + FEW :]
        if more:
            del self._effects[said + FEW :]
            text = f"and {len(more)} more changes with the registration of {node}"
            self._effects.append(Announce(model=None, text=text, warning=True))

    def _find_running(
        self, member: Member, spec: ShardSpec, report: ShardReport, room: dict[ModelName, int], now: float
    ) -> Life | None:
        """A shard that ran before this fleet knew of it: taken over as it is, or left to its node to stop.

        ``room`` is how many more there may be of each model, as far as it was asked for.
        """
        node = member.node.id
        if report.state is ShardState.ENDED:
            text = f"{spec.replica} had ended on {node}: {report.cause or NO_CAUSE}"
            text += f"; {report.remedy}" if report.remedy else ""
            self._effects.append(Announce(model=spec.model.name, text=text, lines=report.lines, warning=True))
            return None
        # Booked on the node that it runs on, whatever that node was called when it was placed.
        there = replace(spec, node=node)
        life = self._find_rest(spec)
        ours = (
            not self._stopping
            and report.state is not ShardState.STOPPING
            and spec.node == node
            and self._is_defined(spec)
            and self._may_be_named(spec)
            and spec.epoch < MOST_EPOCHS
            and spec.epoch >= self._roster.last_given(spec.replica)
            and (life is not None or (not self._roster.is_alive(spec.replica) and self._find_room(spec, room) > 0))
        )
        shard = Shard(
            spec=there,
            state=report.state if ours else ShardState.STOPPING,
            since=now,
            endpoint=report.endpoint,
            context_length=report.context_length,
            progress=report.progress,
            load=report.load,
        )
        if ours and life is None:
            room[spec.model.name] -= 1
        if life is None or not ours:
            life = self._begin(shard, spec.count, now)
        else:
            life.set_shard(shard, now)
        if ours:
            self._roster.desire(spec)
            if not life.complete:
                self._whole_at.setdefault(life.key, max(now, self._settled_at) + WHOLE_SECONDS)
        life.heard.add(node)
        self._roster.put(life)
        if shard.state is ShardState.READY:
            self._roster.note_held(node, spec.model.source)
        fate = "is taken over" if ours else "is to stop: it isn't what the catalog asks for"
        self._announce(life.replica, f"{spec.replica} was already running on {node} and {fate}")
        return life

    def _find_again(self, life: Life, node: NodeId, report: ShardReport, now: float) -> None:
        """A shard that was taken for gone, since nobody spoke of it, and runs: it is to stop, and books its room."""
        shard = life.shard_on(node)
        if shard.state is ShardState.ENDED and report.state is not ShardState.ENDED:
            life.set_shard(replace(shard, state=ShardState.STOPPING, since=now), now)
            self._roster.put(life)

    def _find_rest(self, spec: ShardSpec) -> Life | None:
        """The life of several nodes that this shard is a missing part of."""
        for life in self._roster.epochs_of(spec.replica):
            replica = life.replica
            wanted_here = replica.epoch == spec.epoch and life.count == spec.count and self._roster.is_desired(life)
            if wanted_here and spec.rank not in {shard.spec.rank for shard in replica.shards}:
                return life
        return None

    def _begin(self, shard: Shard, count: int, now: float) -> Life:
        spec = shard.spec
        state = shard.state if count == 1 or shard.state is ShardState.STOPPING else ShardState.PLACED
        replica = Replica(
            id=spec.replica,
            model=spec.model.name,
            profile=spec.profile.name,
            epoch=spec.epoch,
            shards=(shard,),
            state=state,
            since=now,
        )
        return Life(replica, count=count)

    def _find_room(self, spec: ShardSpec, room: dict[ModelName, int]) -> int:
        """How many more there may be: a node can't take a model from another by saying that it runs it."""
        name = spec.model.name
        if name not in room:
            model = self.catalog.named(name)
            most = model.scaling.max if model is not None else 0
            room[name] = most - sum(map(self._roster.is_desired, self._roster.of(name)))
        return room[name]

    def _may_be_named(self, spec: ShardSpec) -> bool:
        """Its names are such as this fleet gives: others are not to be remembered for ever, nor taken for ours."""
        name = spec.model.name
        if self.catalog.named(name) is None:
            return False
        number = spec.replica.removeprefix(replica_id(name, 0).removesuffix("0"))
        if not (number.isdecimal() and number.isascii() and len(number) <= LONGEST_NUMBER):
            return False
        return spec.id == shard_id(name, int(number), spec.rank) and 0 <= spec.rank < spec.count

    def _miss(self, life: Life, node: NodeId, now: float) -> None:
        """Its node has registered without it."""
        if node in life.heard:
            self._end(life, node, End(cause="it no longer ran when its node registered again"), now)
            return
        # It never saw it, or it ran and ended and both words were lost: only another epoch is sure to be launched.
        if life.count > 1:
            self._take_back(life, f"{node} never launched its part", now)
        self._roster.withdraw(life)
        self._gone(life, node, now)

    def _take_report(self, node: Node, applied: int | None, now: float) -> None:
        member = self._roster.members.get(node.id)
        if member is None:
            return
        before = member.node
        self._roster.set_node(member, node)
        # Most reports bring other figures of the same things, and a thousand nodes bring many.
        if _offer(before) != _offer(node):
            self._plan_waiting()
        # (a node that is not there says nothing of what it launches, nor anything else)
        for key in [key for key, at in self._launched_at.items() if key[0] == node.id and at <= now]:
            del self._launched_at[key]
            self._find_unlaunched(key, now)
        if applied is not None:
            member.tells = True
            for key in [key for key in self._forget_at if key[0] == node.id]:
                life = self._roster.owner(key)
                # It has taken the set without this shard and never spoke of it: it never saw the set with it.
                if applied >= life.withdrawn_by.get(node.id, math.inf):
                    self._gone(life, node.id, now)

    def _fall_silent(self, name: NodeId) -> None:
        member = self._roster.members.get(name)
        if member is not None and member.standing is Standing.READY:
            self._roster.set_standing(member, Standing.SILENT)

    def _lose(self, name: NodeId, now: float) -> None:
        """What runs there may serve on, unseen: it keeps its room, and gets no requests."""
        member = self._roster.members.get(name)
        if member is None or member.standing is Standing.LOST:
            return
        self._roster.set_standing(member, Standing.LOST, now)
        for life in self._roster.on(name):
            if life.alive and not life.given_up:
                self._replace_at[name] = now + self._replace_after
                text = f"{life.replica.id} can't be reached: {name} is silent; no request goes there until it is back"
                self._announce(life.replica, text, warning=True)
        self._plan_waiting()

    def _remove(self, name: NodeId, now: float) -> None:
        member = self._roster.members.get(name)
        self._absent.pop(name, None)
        self._expected.discard(name)
        if member is None:
            return
        lives = [life for life in self._roster.on(name) if life.shard_on(name).state is not ShardState.ENDED]
        if member.standing is not Standing.LOST and lives:
            text = f"{name} is not removed: {', '.join(sorted(life.replica.id for life in lives))} runs there"
            self._effects.append(Announce(model=None, text=text, warning=True))
            return
        self._replace_at.pop(name, None)
        for life in lives:
            self._take_back(life, f"{name} was removed", now)
            self._gone(life, name, now)
        last, lives = self._roster.remove(name)
        self._effects.append(last)
        for life in lives:
            if not life.alive:
                self._forget(life)
        self._plan_waiting()

    def _change_rules(self, replace_after: float, brake: float) -> None:
        later = replace_after - self._replace_after
        self._replace_after, self._brake_seconds = replace_after, brake
        for name in self._replace_at:
            self._replace_at[name] += later

    # -- lives

    def _observe(self, life: Life, node: NodeId, report: ShardReport, now: float) -> None:
        life.heard.add(node)
        self._forget_at.pop((node, *life.key[:2]), None)
        self._launched_at.pop((node, *life.key[:2]), None)
        shard = life.shard_on(node)
        if report.state not in MAY_FOLLOW[shard.state]:
            return
        if report.state is ShardState.ENDED:
            end = End(cause=report.cause or NO_CAUSE, kind=report.kind, remedy=report.remedy, lines=report.lines)
            self._end(life, node, end, now)
            return
        before = life.replica
        changed = report.state is not shard.state
        life.set_shard(
            replace(
                shard,
                state=report.state,
                since=now if changed else shard.since,
                endpoint=report.endpoint or shard.endpoint,
                context_length=report.context_length,
                progress=report.progress,
                load=report.load,
            ),
            now,
        )
        if not changed:
            self._roster.refresh(life)
            return
        self._count_health(life, before, now)
        self._roster.put(life)
        if report.state is ShardState.READY:
            self._roster.note_held(node, shard.spec.model.source)
        if life.replica.state is ShardState.READY and before.state is not ShardState.READY:
            self._welcome(life, now)

    def _welcome(self, life: Life, now: float) -> None:
        replica = life.replica
        after = ""
        if life.launched_at is not None:
            seconds = self._load_seconds[replica.model] = now - life.launched_at
            after = f" after {format_duration(seconds)}"
        on = ", ".join(replica.nodes)
        self._announce(replica, f"{replica.id} is ready on {on}{after}{_short_of_context(replica)}")

    def _count_health(self, life: Life, before: Replica, now: float) -> None:
        """How long it served, as it leaves that: an engine that dies may be reported as stopping before it has
        ended."""
        if before.state is ShardState.READY and life.replica.state is not ShardState.READY:
            life.ready_seconds = now - before.since

    def _end(self, life: Life, node: NodeId, end: End, now: float) -> None:
        """A shard's process is gone, and its room is free. Where nobody asked for that, the whole epoch has failed."""
        before = life.replica
        if not self._roster.is_desired(life):
            self._gone(life, node, now)
            if not life.alive and life.replica.cause is None:
                self._announce(before, f"{before.id} has stopped on {', '.join(before.nodes)}")
            return
        self._fail(life, node, end, now)
        self._gone(life, node, now)
        self._stop_shards(life, now)

    def _fail(self, life: Life, node: NodeId, end: End, now: float) -> None:
        """An epoch that was wanted is over, by what happened on this node."""
        before = life.replica
        self._roster.withdraw(life)
        life.replica = replace(before, cause=end.cause, kind=end.kind, remedy=end.remedy, lines=end.lines)
        if before.state is ShardState.READY:
            life.ready_seconds = now - before.since
        tried = (before.model, node)
        earlier = self._failures.get(tried)
        failures = self._failures[tried] = replace(fail(earlier, life.ready_seconds, now), cause=end.cause)
        wait = format_duration(failures.until - now)
        text = (
            f"{before.id} ended on {node}: {end.cause} (failure {failures.count} in a row; not tried there for {wait})"
        )
        text += f"; {end.remedy}" if end.remedy else ""
        # What fails in the same way for a week must not fill the log with the engine's same last words.
        told = earlier is not None and failures.count > 1 and earlier.cause == end.cause
        self._announce(before, text, lines=() if told else end.lines, warning=True)

    def _gone(self, life: Life, node: NodeId, now: float) -> None:
        """Nothing of the life is left on this node. One that has failed is shown until its next try."""
        shard = life.shard_on(node)
        self._forget_at.pop((node, *life.key[:2]), None)
        over = replace(shard, state=ShardState.ENDED, since=now, endpoint=None, progress=None, load=Load())
        life.set_shard(over, now)
        self._plan_later(life.replica.model)
        self._plan_waiting()
        if life.alive or life.replica.cause is not None:
            self._roster.put(life)
        else:
            self._forget(life)

    def _stop_shards(self, life: Life, now: float) -> None:
        """What is left of an epoch that is over is to end, and books its room until it has."""
        for shard in life.replica.shards:
            node = shard.spec.node
            if shard.state in (ShardState.ENDED, ShardState.STOPPING):
                continue
            if node not in life.heard:
                # An agent that tells what it has taken tells this as well, and till then it may launch it.
                member = self._roster.members.get(node)
                tells = member is not None and member.tells
                self._forget_at[node, *life.key[:2]] = math.inf if tells else now + UNHEARD_SECONDS
            life.set_shard(replace(shard, state=ShardState.STOPPING, since=now), now)
        self._roster.put(life)

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
        """Out of the desired sets; alive and booked until its nodes say that it ended."""
        if not life.alive:
            self._forget(life)
        elif self._roster.is_desired(life):
            before = life.replica
            self._roster.withdraw(life)
            self._stop_shards(life, now)
            self._announce(before, f"{before.id} on {', '.join(before.nodes)} is to stop: {why}")

    def _forget(self, life: Life) -> None:
        self._roster.forget(life)
        self._whole_at.pop(life.key, None)
        for node in life.replica.nodes:
            self._forget_at.pop((node, *life.key[:2]), None)

    def _is_defined(self, spec: ShardSpec) -> bool:
        """The catalog, too, would launch this shard as it runs."""
        model = self.catalog.named(spec.model.name)
        if model is None:
            return False
        facts = launch_facts(spec.model, spec.profile)
        return any(launch_facts(model, profile) == facts for profile in model.profiles)

    # -- what a later time brings

    def _settle(self, now: float) -> None:
        """The nodes of an earlier server have had their time to come back."""
        if not self._expected or now < self._settled_at:
            return
        self._absent = dict.fromkeys(sorted(self._expected), now)
        self._expected.clear()
        text = f"not back since the server has begun anew: {_few(self._absent)}; what they run is placed elsewhere"
        self._effects.append(Announce(model=None, text=text, warning=True))

    def _heed_brake(self, now: float) -> None:
        before, self._brake = self._brake, self.brake(now)
        if self._brake is not None:
            if before is None:
                self._effects.append(Announce(model=None, text=_describe(self._brake, now), warning=True))
            return
        if before is None:
            return
        self._effects.append(Announce(model=None, text="the brake is off: lost nodes are dealt with one by one again"))
        if now < before.until:
            # Some are back, and the others may be about to come.
            self._replace_at = dict.fromkeys(self._replace_at, now + self._replace_after)
            self._whole_at = dict.fromkeys(self._whole_at, now + WHOLE_SECONDS)
            if self._absent:
                # What those run nobody here has heard yet.
                self._expected, self._absent = set(self._absent), {}
                self._settled_at = now + self._replace_after
        for model in self.catalog:
            self._plan_later(model.name)

    def _come_due(self, now: float) -> None:
        for name in [name for name, at in self._retry_at.items() if at <= now]:
            del self._retry_at[name]
            self._plan_later(name)
        for key in [key for key, at in self._forget_at.items() if at <= now]:
            self._gone(self._roster.owner(key), key[0], now)
        if self._brake is None:
            for whole in [key for key, at in self._whole_at.items() if at <= now]:
                del self._whole_at[whole]
                life = self._roster.lives.get(whole)
                if life is not None and not life.complete:
                    self._take_back(life, f"{len(life.replica.shards)} of its {life.count} shards came back", now)
            for node in [node for node, at in self._replace_at.items() if at <= now]:
                del self._replace_at[node]
                for life in self._roster.on(node):
                    self._plan_later(life.replica.model)
        if now >= self._look_again_at:
            self._look_again_at = math.inf
            self._plan_waiting()

    def _find_unlaunched(self, key: ShardKey, now: float) -> None:
        """A node was told to launch it, and speaks of everything else."""
        node, name, epoch = key
        life = self._roster.at(node, name, epoch)
        if life is None or not self._roster.is_desired(life):
            return
        self._fail(life, node, End(cause="its node was told to launch it and says nothing of it"), now)
        self._stop_shards(life, now)
        self._plan_later(life.replica.model)

    def _ask_to_be_woken(self, now: float) -> None:
        times = [*self._retry_at.values(), *self._forget_at.values(), self._look_again_at]
        # What the brake holds up has its own time after that.
        times += [self._brake.until] if self._brake is not None else self._replace_at.values()
        times += self._whole_at.values() if self._brake is None else ()
        if self._unplanned and not self._expected:
            times.append(now)
        if self._expected:
            times.append(self._settled_at)
        at = min(times)
        if at < math.inf and (self._wake_at is None or at < self._wake_at):
            self._wake_at = at
            self._effects.append(WakeAt(at=at))

    # -- what is placed

    def _plan_later(self, name: ModelName) -> None:
        if not self._stopping:
            self._unplanned[name] = None

    def _plan_waiting(self) -> None:
        """There may be room now for those that found none."""
        for name, verdict in self._verdicts.items():
            if isinstance(verdict, Rejected):
                self._plan_later(name)

    def _plan_one(self, now: float) -> None:
        """One model a turn, however many wait: a thousand at once would hold up every request meanwhile."""
        while self._unplanned and self._roster.freshen(HOSTS_A_TURN):
            name = next(iter(self._unplanned))
            del self._unplanned[name]
            model = self.catalog.named(name)
            if model is not None:
                self._plan(model, now)
                return

    def _plan(self, model: Model, now: float) -> None:
        self._retry_at.pop(model.name, None)
        kept = self._shed_surplus(model, now)
        unreachable = [life for life in kept if self._is_overdue(life)]
        for life in unreachable:
            # The nodes that can be reached end their shards first: what is left of it serves nobody.
            if life.count > 1:
                self._give_up(life, now)
        replaceable = [life for life in unreachable if life.count == 1]
        lacking = self.wanted(model, now) - len(kept) + len(unreachable)
        if lacking <= 0:
            if isinstance(self._verdicts.get(model.name), Rejected):
                del self._verdicts[model.name]
            return
        if self._may_run_unseen(model, now):
            return
        # One that is still stopping counts against the most there may be: its memory is in use, even where the profile
        # books none. Its end plans this model again, or a time by which anything has ended.
        stopping = [life for life in self._roster.of(model.name) if self._is_stopping(life, now)]
        room = model.scaling.max - len(kept) + len(unreachable) - len(stopping)
        if lacking > room and stopping:
            self._retry_at[model.name] = min(life.replica.since for life in stopping) + STOPPING_SECONDS
        for _ in range(min(lacking, room)):
            backing_off, failed = self.backing_off(model.name), self.failed(model.name, now)
            verdict = place(model, self._roster.hosts(), backing_off, now, failed=failed)
            earlier = self._verdicts.get(model.name)
            # Kept as it is, it would hold all nodes as they were at this moment.
            if isinstance(verdict, Rejected):
                self._verdicts[model.name] = verdict.keep(FEW)
                self._wait_for_room(model, verdict, earlier, now)
                return
            self._verdicts[model.name] = verdict.keep()
            if replaceable:
                self._give_up(replaceable.pop(0), now)
            self._start(model, verdict, now)

    def _is_asked_for(self, name: ModelName, now: float) -> bool:
        asked_at = self._asked_at.get(name)
        return asked_at is not None and now - asked_at < DEMAND_SECONDS

    def _may_run_unseen(self, model: Model, now: float) -> bool:
        """The brake holds, and nodes that this server has never heard may run it. What is known of it, or asked for,
        goes its way."""
        if self._brake is None or not self._absent or self._is_asked_for(model.name, now):
            return False
        return not any(True for _ in self._roster.of(model.name))

    def _is_overdue(self, life: Life) -> bool:
        """A node of it is lost for so long that it is not waited for any more."""
        if self._brake is not None:
            return False
        return any(node in self._roster.lost_at and node not in self._replace_at for node in life.replica.nodes)

    def _give_up(self, life: Life, now: float) -> None:
        """Another epoch takes its place. What of it can't be reached keeps its room, and ends when its node is back."""
        life.given_up = True
        gone = [node for node in life.replica.nodes if node in self._roster.lost_at]
        self._take_back(life, f"{', '.join(gone)} is lost, and another takes its place", now)

    def _is_stopping(self, life: Life, now: float) -> bool:
        """It is to end, can be told to, and has not had its time."""
        over = not life.alive or self._roster.is_desired(life) or not self._roster.is_running(life)
        return not over and now < life.replica.since + STOPPING_SECONDS

    def _shed_surplus(self, model: Model, now: float) -> list[Life]:
        """Stop what is beyond the most there may be, the least useful first; answers what is kept."""
        most = model.scaling.max
        lives = sorted(self._roster.of(model.name), key=self._rank)
        desired = [life for life in lives if self._roster.is_desired(life)]
        for life in desired[most:]:
            self._take_back(life, f"no more than {most} may run", now)
        kept = desired[:most]
        for life in [life for life in lives if not life.alive][most - len(kept) :]:
            self._forget(life)
        return kept

    def _rank(self, life: Life) -> tuple[bool, bool, str]:
        lost = any(node in self._roster.lost_at for node in life.replica.nodes)
        return lost, life.replica.state is not ShardState.READY, life.replica.id

    def _start(self, model: Model, placement: Placement, now: float) -> None:
        number = 1
        while self._roster.is_alive(replica_id(model.name, number)):
            number += 1
        name = replica_id(model.name, number)
        epoch = self._roster.next_epoch(name)
        rendezvous = self._meet(placement, epoch)
        specs = [
            ShardSpec(
                id=shard_id(model.name, number, rank),
                replica=name,
                epoch=epoch,
                node=assigned.node,
                model=model,
                profile=placement.profile,
                rank=rank,
                count=len(placement.shards),
                gpus=assigned.gpus,
                fabric=placement.fabric,
                rendezvous=rendezvous,
            )
            for rank, assigned in enumerate(placement.shards)
        ]
        replica = Replica(
            id=name,
            model=model.name,
            profile=placement.profile.name,
            epoch=epoch,
            shards=tuple(Shard(spec=spec, state=ShardState.PLACED, since=now) for spec in specs),
            state=ShardState.PLACED,
            since=now,
        )
        for spec in specs:
            self._roster.desire(spec)
            self._launched_at[spec.node, name, epoch] = now + LAUNCH_SECONDS
        self._roster.put(Life(replica, count=len(specs), launched_at=now))
        text = f"{name} goes to {', '.join(replica.nodes)} by profile {placement.profile.name!r} (epoch {epoch})"
        self._announce(replica, text)
        self.trace.add(
            Decision(
                at=now,
                model=model.name,
                why=_word(placement.score),
                replica=name,
                profile=placement.profile.name,
                nodes=replica.nodes,
            )
        )

    def _meet(self, placement: Placement, epoch: int) -> str | None:
        """Where the shards of one replica find one another: at rank 0's address on their fabric."""
        if placement.fabric is None:
            return None
        node = self._roster.members[placement.node].node
        address = next(found.address for found in node.fabrics if found.name == placement.fabric)
        taken = {life.replica.shard.rendezvous for life in self._roster.on(node.id) if life.alive}
        host = f"[{address}]" if ":" in str(address) else address
        # Another one with each try: this one may be some other program's.
        ports = (RENDEZVOUS_PORTS[(epoch - 1 + n) % len(RENDEZVOUS_PORTS)] for n in range(len(RENDEZVOUS_PORTS)))
        places = (f"{host}:{port}" for port in ports)
        # Only a node that lies has none left.
        return next((place for place in places if place not in taken), f"{host}:{RENDEZVOUS_PORTS[0]}")

    def _wait_for_room(self, model: Model, verdict: Rejected, earlier: Verdict | None, now: float) -> None:
        reasons = verdict.reasons()
        counts = {str(reason): number for reason, number in reasons.items()}
        why = verdict.counted() or "there is no node, or no profile"
        self.trace.add(Decision(at=now, model=model.name, why=why, reasons=counts))
        if Reason.BACKING_OFF in reasons:
            # The failure was announced, with the time of the next try.
            waits = [until for until in self.backing_off(model.name).values() if until > now]
            self._retry_at[model.name] = min(waits)
            return
        if reasons:
            self._look_again_at = min(self._look_again_at, now + BACKSTOP_SECONDS)
        # Numbers move with each report; only another reason is news.
        if reasons and (not isinstance(earlier, Rejected) or earlier.reasons() != reasons):
            shown = verdict.first(FEW)
            more = sum(reasons.values()) - len(shown)
            lines = [f"{no.node}, profile {no.profile!r}: {no.detail}" for no in shown]
            lines += [f"and {more} more; llmgw ctl explain-placement {model.name} shows all"] if more else []
            text = f"no node can run {model.name} now"
            self._effects.append(Announce(model=model.name, text=text, lines=tuple(lines), warning=True))

    def _announce(self, replica: Replica, text: str, *, lines: tuple[str, ...] = (), warning: bool = False) -> None:
        self._effects.append(Announce(model=replica.model, text=text, lines=lines, warning=warning))


def _offer(node: Node) -> tuple[object, ...]:
    """What of a node placement goes by, its figures roughly: another one is worth a look for those that wait."""
    return (
        node.engines,
        node.labels,
        node.fabrics,
        node.memory_gb,
        round(node.memory_foreign_gb),
        [(disk.path, disk.free_gb // 10) for disk in node.disks],
        None if node.gpus is None else [_offer_of(gpu) for gpu in node.gpus],
    )


def _offer_of(gpu: Gpu) -> tuple[object, ...]:
    foreign = round(sum(use.memory_gb for use in gpu.foreign))
    return gpu.uuid, gpu.gpu_class, gpu.memory_gb, gpu.broken, gpu.mig is None, gpu.nvlink_peers, foreign


def _word(score: Score) -> str:
    return f"the least cost: {score.seconds:.0f} s" if score.seconds else "nothing speaks against it"


def _describe(brake: Brake, now: float) -> str:
    wait = format_duration(round(max(brake.until - now, 0.0)))
    return (
        f"the brake holds: {brake.lost} of {brake.nodes} nodes were lost together, so it may be this server that is "
        f"cut off. Nothing is stopped or placed anew for them before they are back, or for {wait}"
    )


def _few(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - FEW} more" if len(found) > FEW else ""
    return ", ".join(found[:FEW]) + more
