"""What runs where and what each node is told: the books that the fleet keeps. Nothing is decided here.

A shard that was taken out of a node's desired set keeps its room booked until its node says that it ended: an engine
frees its memory when it is gone, not when somebody decides that it should go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from llmgw.core.effects import Desire
from llmgw.core.events import NodeMarked
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import ModelName
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import (
    Replica,
    ReplicaId,
    Shard,
    ShardId,
    ShardSpec,
    ShardState,
    booked_gb_of,
    join_states,
)
from llmgw.core.weights import parse_source

Name = TypeVar("Name")

# A replica's epoch, and the node that it was first known on: two nodes may each say that they run the same one.
LifeKey = tuple[ReplicaId, int, NodeId]
# What a report speaks of: there is one shard of an epoch on a node.
ShardKey = tuple[NodeId, ReplicaId, int]


@dataclass(slots=True)
class Member:
    """A registered node, and what it was last told (``sent`` is None when it may have forgotten).

    While it is lost nothing is sent to what runs there, and all of it stays booked. ``host`` is None when it is to be
    made anew. ``tells``: it has said which desired set it took last.
    """

    node: Node
    tells: bool = False
    standing: Standing = Standing.READY
    revision: int = 0
    desired: dict[ShardId, ShardSpec] = field(default_factory=dict)
    sent: tuple[ShardSpec, ...] | None = None
    host: Host | None = None


@dataclass(slots=True)
class Life:
    """One epoch of a replica: ``replica`` has the shards that are known, of the ``count`` that there are to be.

    ``launched_at`` is None when it ran before we knew it; ``heard`` has the nodes that have spoken of their shard;
    ``withdrawn_by`` is for each node the revision of the first desired set without it; ``ready_seconds`` is how long it
    has served, once it no longer does. ``given_up``: another epoch takes its place, since a node of it is lost.
    ``stray``: it runs though nobody asked its node to. ``in_place``: its room is the next one's.
    ``stands_in``: it was launched as its model was before, since what is written has no place. ``proven``: it has
    served for a while; ``answered``: it has answered somebody; ``recalled``: an operator wants it replaced; ``drain``
    is the number of its last drain; ``evicted_for`` the model that it makes way for.
    """

    replica: Replica
    count: int = 1
    launched_at: float | None = None
    heard: set[NodeId] = field(default_factory=set)
    withdrawn_by: dict[NodeId, int] = field(default_factory=dict)
    ready_seconds: float = 0.0
    given_up: bool = False
    stray: bool = False
    in_place: bool = False
    stands_in: bool = False
    proven: bool = False
    answered: bool = False
    recalled: bool = False
    drain: int = 0
    evicted_for: ModelName | None = None
    key: LifeKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.replica.id, self.replica.epoch, self.replica.shard.node)

    @property
    def alive(self) -> bool:
        return self.replica.state is not ShardState.ENDED

    @property
    def complete(self) -> bool:
        return len(self.replica.shards) == self.count

    def shard_on(self, node: NodeId) -> Shard:
        return next(shard for shard in self.replica.shards if shard.spec.node == node)

    def set_shard(self, shard: Shard, now: float) -> None:
        """Enter what is new of a shard; the replica's state follows from all of them."""
        shards = [other for other in self.replica.shards if other.spec.node != shard.spec.node]
        ordered = tuple(sorted((*shards, shard), key=lambda each: each.spec.rank))
        state = join_states([each.state for each in ordered], self.count)
        since = self.replica.since if state is self.replica.state else now
        self.replica = replace(self.replica, shards=ordered, state=state, since=since)


class Roster:
    """Nodes and lives, with the bookings and the routable replicas that follow from them."""

    def __init__(self) -> None:
        self.members: dict[NodeId, Member] = {}
        # when the lease of each lost node ended
        self.lost_at: dict[NodeId, float] = {}
        self.lives: dict[LifeKey, Life] = {}
        self._ready: dict[ModelName, tuple[Replica, ...]] = {}
        # whose are to be found anew, by whoever asks next: a node may bring a thousand of one model
        self._unready: dict[ModelName, None] = {}
        # the same lives again, for who asks for some of them: a node may bring a thousand at once
        self._at: dict[ShardKey, Life] = {}
        self._by_replica: dict[ReplicaId, dict[LifeKey, Life]] = {}
        self._by_model: dict[ModelName, dict[LifeKey, Life]] = {}
        self._by_node: dict[NodeId, dict[LifeKey, Life]] = {}
        self._routable: set[LifeKey] = set()
        self._epochs: dict[ReplicaId, int] = {}
        self._given: dict[ReplicaId, int] = {}
        # of nodes that were removed, the number of the last set
        self._revisions: dict[NodeId, int] = {}
        self._touched: set[NodeId] = set()
        self._marks: dict[NodeId, NodeMarked] = {}
        # room that is kept for a model though nothing of it runs there, by the shards that ran
        self._reserved: dict[ModelName, tuple[Shard, ...]] = {}
        # sources that engines there have loaded, and those that the node says it has (absent: it does not say)
        self._holds: dict[NodeId, set[str]] = {}
        self._stored: dict[NodeId, frozenset[str]] = {}
        self._begun: dict[NodeId, Mapping[str, float]] = {}
        # whose host is to be made anew
        self._stale: dict[NodeId, None] = {}
        self._order: tuple[Member, ...] | None = None

    # -- nodes

    def enrol(self, node: Node) -> Member:
        """The node as it is now, to be told anew what it is to run."""
        if node.id not in self.members:
            self.members[node.id] = Member(node, revision=self._revisions.pop(node.id, 0))
            self._order = None
        member = self.members[node.id]
        member.node = node
        member.tells = False
        member.sent = None
        self._touched.add(node.id)
        self.set_standing(member, Standing.READY)
        return member

    def set_standing(self, member: Member, standing: Standing, now: float = 0.0) -> None:
        """``now`` is when it was lost; requests no longer go to a lost one, or again to one that is back."""
        was, member.standing = member.standing, standing
        if standing is Standing.LOST:
            self.lost_at[member.node.id] = now
        else:
            self.lost_at.pop(member.node.id, None)
        self._make_anew(member.node.id)
        if Standing.LOST in (was, standing) and was is not standing:
            for name in {life.replica.model for life in self.on(member.node.id)}:
                self._refresh_ready(name)

    def set_node(self, member: Member, node: Node) -> None:
        """What the node has now."""
        member.node = node
        self._make_anew(node.id)
        # At once: a thousand nodes that wait to be looked at would make whoever does wait for them all.
        self.host(member)

    def mark(self, marked: NodeMarked) -> None:
        """What an operator has said of a node, whether or not it is there."""
        self._marks[marked.node] = marked
        self._make_anew(marked.node)

    def marked(self, node: NodeId) -> NodeMarked | None:
        """What an operator has said of a node."""
        return self._marks.get(node)

    def is_draining(self, node: NodeId) -> bool:
        """All that runs there is to go."""
        mark = self._marks.get(node)
        return mark is not None and mark.draining

    def remove(self, name: NodeId) -> tuple[Desire, list[Life]]:
        """Forget a node, with what was said of it. Answers what it is to run from now on, for whoever keeps what it was
        told, and the lives that had a shard there, which are the caller's to end."""
        # An agent takes no set whose number is lower than one that it had.
        revision = self._revisions[name] = self.members.pop(name).revision + 1
        self.lost_at.pop(name, None)
        self._marks.pop(name, None)
        self._holds.pop(name, None)
        self._stored.pop(name, None)
        self._begun.pop(name, None)
        self._touched.discard(name)
        self._stale.pop(name, None)
        self._order = None
        return Desire(node=name, revision=revision, shards=()), list(self.on(name))

    def is_lost(self, name: NodeId) -> bool:
        return name in self.lost_at or name not in self.members

    def is_away(self, name: NodeId) -> bool:
        """Lost, or its link is down: what it said last may be so no more."""
        member = self.members.get(name)
        return member is None or member.standing is not Standing.READY

    def hosts(self) -> tuple[Host, ...]:
        """The nodes as placement sees them, by id."""
        if self._order is None:
            self._order = tuple(self.members[name] for name in sorted(self.members))
        return tuple(member.host or self.host(member) for member in self._order)

    def host(self, member: Member) -> Host:
        if member.host is None:
            member.host = self._make_host(member)
            self._stale.pop(member.node.id, None)
        return member.host

    def freshen(self, most: int) -> bool:
        """Make as many hosts as have changed, ``most`` of them; whether none is left: a thousand take longer than a
        turn may."""
        for name in list(islice(self._stale, most)):
            self.host(self.members[name])
        return not self._stale

    def hosts_for(self, asker: ModelName, gone: Collection[LifeKey] = ()) -> tuple[Host, ...]:
        """The nodes as this model finds them, once these lives have ended: what is reserved for it is free."""
        touched = {node for key in gone for node in self.lives[key].replica.nodes}
        touched |= {shard.spec.node for shard in self._reserved.get(asker, ())}
        if not touched:
            return self.hosts()
        return tuple(self._see(host, asker, gone) if host.id in touched else host for host in self.hosts())

    def host_for(self, asker: ModelName, node: NodeId, gone: LifeKey) -> Host:
        """One node as this model will find it once this life has ended."""
        return self._see(self.host(self.members[node]), asker, (gone,))

    def _see(self, host: Host, asker: ModelName, gone: Collection[LifeKey]) -> Host:
        return self._make_host(self.members[host.id], gone, asker)

    def reserve(self, name: ModelName, shards: tuple[Shard, ...]) -> None:
        """Keep the room of these, which have ended, for this model, beside what is kept for it."""
        before = self._reserved.get(name, ())
        there = {shard.spec.id: shard.spec.node for shard in shards}
        cards = {(shard.spec.node, uuid) for shard in shards for uuid in shard.spec.gpus or ()}
        # Of one that was tried on two nodes the room on the last; and no card twice.
        others = (
            shard
            for shard in before
            if there.get(shard.spec.id, shard.spec.node) == shard.spec.node
            and cards.isdisjoint((shard.spec.node, uuid) for uuid in shard.spec.gpus or ())
        )
        self._reserved[name] = (*others, *shards)
        for shard in (*before, *shards):
            self._make_anew(shard.spec.node)

    @property
    def reserved(self) -> Mapping[ModelName, tuple[Shard, ...]]:
        """The shards that have ended, and whose room is kept."""
        return self._reserved

    def use(self, name: ModelName, begun: Iterable[ShardSpec]) -> None:
        """Of the room that is kept for it these take what they need; the rest stays kept."""
        shards = self._reserved.pop(name, ())
        for spec in begun:
            shards = _take(shards, spec)
            self._make_anew(spec.node)
        if shards:
            self._reserved[name] = shards

    def release(self, name: ModelName) -> bool:
        """Keep no room for it; whether some was."""
        shards = self._reserved.pop(name, ())
        for shard in shards:
            self._make_anew(shard.spec.node)
        return bool(shards)

    def _make_host(self, member: Member, gone: Collection[LifeKey] = (), asker: ModelName | None = None) -> Host:
        name = member.node.id
        booked: dict[str, ReplicaId] = {}
        booked_gb = 0.0
        replicas: Counter[ModelName] = Counter()
        for life in self.on(name):
            shard = life.shard_on(name)
            if shard.state is ShardState.ENDED or life.key in gone:
                continue
            booked_gb += booked_gb_of(shard)
            gpus = shard.spec.gpus
            if gpus is None and shard.spec.profile.gpus:
                # Launched by an agent that knew of no GPUs, on whichever it found.
                gpus = tuple(gpu.uuid for gpu in member.node.gpus or ())
            booked |= dict.fromkeys(gpus or (), life.replica.id)
            replicas[life.replica.model] += 1
        kept: dict[str, ModelName] = {}
        kept_gb: dict[ModelName, float] = {}
        for model, shards in self._reserved.items():
            for shard in shards:
                if shard.spec.node == name and model != asker:
                    kept_gb[model] = kept_gb.get(model, 0.0) + booked_gb_of(shard)
                    kept |= {uuid: model for uuid in shard.spec.gpus or () if uuid not in booked}
                    booked |= {uuid: shard.spec.replica for uuid in shard.spec.gpus or () if uuid not in booked}
        booked_gb += sum(kept_gb.values())
        mark = self._marks.get(name)
        labels = member.node.labels
        if mark is not None and mark.labels:
            labels = {key: value for key, value in {**labels, **mark.labels}.items() if value is not None}
        return Host(
            node=member.node,
            standing=member.standing,
            cordoned=mark is not None and (mark.cordoned or mark.draining),
            labels=labels,
            booked_gb=booked_gb,
            booked=booked,
            kept=kept,
            kept_gb=kept_gb,
            replicas=replicas,
            holds=self._find_held(name),
            begun=self._begun.get(name, {}),
        )

    def _find_held(self, name: NodeId) -> frozenset[str]:
        loaded, stored = self._holds.get(name, ()), self._stored.get(name)
        if stored is None:
            return frozenset(loaded)
        # What was fetched may have been removed since.
        return stored.union(source for source in loaded if not parse_source(source).is_fetched)

    def note_stored(self, name: NodeId, sources: frozenset[str], begun: Mapping[str, float]) -> bool:
        """The node says that it has these on its disks, and no others that are fetched, and so many GB of those that
        were ``begun``; whether that is news."""
        if name not in self.members or (self._stored.get(name), self._begun.get(name)) == (sources, begun):
            return False
        self._stored[name], self._begun[name] = sources, begun
        self._make_anew(name)
        return True

    def note_held(self, name: NodeId, source: str) -> None:
        """An engine there has loaded this source."""
        held = self._holds.setdefault(name, set())
        if source not in held:
            held.add(source)
            self._make_anew(name)

    def forget_held(self, sources: Iterable[str]) -> None:
        """Keep what is known of these sources only: there is no end of those that were in the catalog once."""
        kept = set(sources)
        for name, held in self._holds.items():
            if not held <= kept:
                held.intersection_update(kept)
                self._make_anew(name)

    def _make_anew(self, name: NodeId) -> None:
        member = self.members.get(name)
        if member is not None:
            member.host = None
            self._stale[name] = None

    # -- lives

    def put(self, life: Life) -> None:
        """Enter a life, or what has become of it."""
        name = life.replica.id
        self.lives[life.key] = life
        self._by_replica.setdefault(name, {})[life.key] = life
        self._by_model.setdefault(life.replica.model, {})[life.key] = life
        for node in life.replica.nodes:
            self._at[node, name, life.replica.epoch] = life
            self._by_node.setdefault(node, {})[life.key] = life
            self._make_anew(node)
        if life.key in self._routable or self._is_routable(life):
            self._refresh_ready(life.replica.model)

    def refresh(self, life: Life) -> None:
        """Only figures of it have changed."""
        if life.key in self._routable:
            self._refresh_ready(life.replica.model)

    def forget(self, life: Life) -> None:
        name = life.replica.id
        del self.lives[life.key]
        _drop(self._by_replica, name, life.key)
        _drop(self._by_model, life.replica.model, life.key)
        for node in life.replica.nodes:
            del self._at[node, name, life.replica.epoch]
            _drop(self._by_node, node, life.key)
            self._make_anew(node)
        if life.key in self._routable:
            self._refresh_ready(life.replica.model)

    def at(self, node: NodeId, name: ReplicaId, epoch: int) -> Life | None:
        """The life that has a shard of this epoch on the node."""
        return self._at.get((node, name, epoch))

    def owner(self, key: ShardKey) -> Life:
        """The life of a shard that is known to be one's."""
        return self._at[key]

    def of(self, name: ModelName) -> Iterator[Life]:
        return iter(self._by_model.get(name, {}).values())

    def on(self, node: NodeId) -> Iterator[Life]:
        """Those with a shard on this node."""
        return iter(self._by_node.get(node, {}).values())

    def epochs_of(self, name: ReplicaId) -> Iterator[Life]:
        return iter(self._by_replica.get(name, {}).values())

    def is_alive(self, name: ReplicaId) -> bool:
        """Some epoch of it is that counts: not one that another is to take the place of."""
        return any(life.alive and not life.given_up for life in self.epochs_of(name))

    def is_running(self, life: Life) -> bool:
        """Some of it lives where it could be told to end."""
        return any(s.state is not ShardState.ENDED and not self.is_lost(s.spec.node) for s in life.replica.shards)

    def idle(self) -> bool:
        return not any(life.alive for life in self.lives.values())

    def next_epoch(self, name: ReplicaId) -> int:
        """One more than any that was seen or given: a late word of an earlier try can't be mistaken for this one's."""
        epoch = self._epochs[name] = self._given[name] = self._epochs.get(name, 0) + 1
        return epoch

    def see_epoch(self, name: ReplicaId, epoch: int) -> None:
        self._epochs[name] = max(epoch, self._epochs.get(name, 0))

    def last_given(self, name: ReplicaId) -> int:
        """The highest that was given; 0 when there was none. What a node says it has seen is no order of ours."""
        return self._given.get(name, 0)

    # -- what is desired

    def desire(self, spec: ShardSpec) -> None:
        self.members[spec.node].desired[spec.id] = spec
        self._touched.add(spec.node)

    def withdraw(self, life: Life) -> None:
        """Out of the desired sets of all its nodes."""
        for shard in life.replica.shards:
            member = self.members.get(shard.spec.node)
            if member is not None and _has(member.desired, shard.spec):
                del member.desired[shard.spec.id]
                life.withdrawn_by[shard.spec.node] = member.revision + 1
                self._touched.add(shard.spec.node)

    def is_desired(self, life: Life) -> bool:
        return any(self._is_desired_there(shard.spec) for shard in life.replica.shards)

    def _is_desired_there(self, spec: ShardSpec) -> bool:
        member = self.members.get(spec.node)
        return member is not None and _has(member.desired, spec)

    def changed_desires(self) -> list[Desire]:
        """What the nodes don't know yet, once: whole sets, by node."""
        desires: list[Desire] = []
        for name in sorted(self._touched):
            member = self.members[name]
            shards = tuple(member.desired[shard] for shard in sorted(member.desired))
            if shards != member.sent:
                member.sent = shards
                member.revision += 1
                desires.append(Desire(node=name, revision=member.revision, shards=shards))
        self._touched.clear()
        return desires

    # -- what may be asked

    def _is_routable(self, life: Life) -> bool:
        replica = life.replica
        return (
            replica.state is ShardState.READY
            and replica.endpoint is not None
            and replica.draining is None
            and not any(map(self.is_lost, replica.nodes))
        )

    @property
    def ready(self) -> Mapping[ModelName, tuple[Replica, ...]]:
        """The routable replicas of each model that has any, by id."""
        while self._unready:
            self._find_ready(self._unready.popitem()[0])
        return self._ready

    def _refresh_ready(self, name: ModelName) -> None:
        self._unready[name] = None

    def _find_ready(self, name: ModelName) -> None:
        lives = list(self.of(name))
        routable = [life for life in lives if self._is_routable(life)]
        self._routable.difference_update(life.key for life in lives)
        self._routable.update(life.key for life in routable)
        if routable:
            replicas = sorted((life.replica for life in routable), key=lambda replica: replica.id)
            # Of one that serves nobody tells anything unless it gives no sign of life: what is sent there may hang.
            well = [replica for replica in replicas if replica.progress is None]
            self._ready[name] = tuple(well or replicas)
        else:
            self._ready.pop(name, None)


def _take(kept: Iterable[Shard], spec: ShardSpec) -> tuple[Shard, ...]:
    """What is left of kept room once this has its own."""
    rest: list[Shard] = []
    need_gb = spec.profile.min_memory_gb or 0.0
    for shard in kept:
        if shard.spec.node != spec.node:
            rest.append(shard)
            continue
        gpus = tuple(uuid for uuid in shard.spec.gpus or () if uuid not in (spec.gpus or ()))
        taken_gb = min(booked_gb_of(shard), need_gb)
        need_gb -= taken_gb
        gb = booked_gb_of(shard) - taken_gb
        if gpus or gb:
            profile = replace(shard.spec.profile, min_memory_gb=gb)
            rest.append(replace(shard, spec=replace(shard.spec, gpus=gpus, profile=profile)))
    return tuple(rest)


def _has(desired: Mapping[ShardId, ShardSpec], spec: ShardSpec) -> bool:
    there = desired.get(spec.id)
    return there is not None and (there.replica, there.epoch) == (spec.replica, spec.epoch)


def _drop(index: dict[Name, dict[LifeKey, Life]], name: Name, key: LifeKey) -> None:
    del index[name][key]
    if not index[name]:
        del index[name]
