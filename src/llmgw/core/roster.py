"""What runs where and what each node is told: the books that the fleet keeps. Nothing is decided here.

A shard that was taken out of a node's desired set keeps its room booked until its node says that it ended: an engine
frees its memory when it is gone, not when somebody decides that it should go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from llmgw.core.effects import Desire
from llmgw.core.model import ModelName
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import Replica, ReplicaId, ShardId, ShardSpec, ShardState

LifeKey = tuple[NodeId, ReplicaId, int]


@dataclass(slots=True)
class Member:
    """A registered node, and what it was last told (``sent`` is None when it may have forgotten).

    While it is ``lost`` nothing is sent to what runs there, and all of it stays booked.
    """

    node: Node
    lost: bool = False
    revision: int = 0
    desired: dict[ShardId, ShardSpec] = field(default_factory=dict)
    sent: tuple[ShardSpec, ...] | None = None


@dataclass(slots=True)
class Life:
    """One epoch of a replica on its node.

    ``launched_at`` is None when it ran before we knew it; ``heard`` is true once its node has spoken of it;
    ``withdrawn_by`` is the revision of the first desired set without it; ``ready_seconds`` is how long it has served,
    once it no longer does.
    """

    replica: Replica
    launched_at: float | None = None
    heard: bool = False
    withdrawn_by: int | None = None
    ready_seconds: float = 0.0

    @property
    def key(self) -> LifeKey:
        shard = self.replica.shard
        return shard.node, shard.replica, shard.epoch

    @property
    def alive(self) -> bool:
        return self.replica.state is not ShardState.ENDED


class Roster:
    """Nodes and lives, with the bookings and the routable replicas that follow from them."""

    def __init__(self) -> None:
        self.members: dict[NodeId, Member] = {}
        self.lives: dict[LifeKey, Life] = {}
        # the same lives again, for who asks for some of them: a node may bring a thousand at once
        self._by_replica: dict[ReplicaId, dict[LifeKey, Life]] = {}
        self._by_model: dict[ModelName, dict[LifeKey, Life]] = {}
        self._routable: set[LifeKey] = set()
        self.ready: dict[ModelName, tuple[Replica, ...]] = {}
        self._epochs: dict[ReplicaId, int] = {}
        self._touched: set[NodeId] = set()

    def enrol(self, node: Node) -> Member:
        """The node as it is now, to be told anew what it is to run."""
        member = self.members.setdefault(node.id, Member(node))
        member.node = node
        member.sent = None
        self._touched.add(node.id)
        self.mark_lost(member, lost=False)
        return member

    def mark_lost(self, member: Member, *, lost: bool) -> None:
        """Requests no longer go there, or again."""
        if member.lost is not lost:
            member.lost = lost
            for name in {
                life.replica.model for life in self.lives.values() if life.replica.shard.node == member.node.id
            }:
                self._refresh_ready(name)

    def lost(self) -> frozenset[NodeId]:
        return frozenset(name for name, member in self.members.items() if member.lost)

    def nodes(self) -> list[Node]:
        return [member.node for member in self.members.values()]

    def put(self, life: Life) -> None:
        """Enter a life, or what has become of it; an earlier epoch of the replica that has ended makes room for it."""
        key = life.key
        if key not in self.lives:
            for ended in [other for other in self._by_replica.get(life.replica.id, {}).values() if not other.alive]:
                self.forget(ended)
        self.lives[key] = life
        self._by_replica.setdefault(life.replica.id, {})[key] = life
        self._by_model.setdefault(life.replica.model, {})[key] = life
        if key in self._routable or self._is_routable(life):
            self._refresh_ready(life.replica.model)

    def forget(self, life: Life) -> None:
        key = life.key
        del self.lives[key]
        for index, name in ((self._by_replica, life.replica.id), (self._by_model, life.replica.model)):
            del index[name][key]  # type: ignore[index]
            if not index[name]:  # type: ignore[index]
                del index[name]  # type: ignore[arg-type]
        if key in self._routable:
            self._refresh_ready(life.replica.model)

    def of(self, name: ModelName) -> Iterator[Life]:
        return iter(self._by_model.get(name, {}).values())

    def is_alive(self, name: ReplicaId) -> bool:
        """Some epoch of it is, on some node."""
        return any(life.alive for life in self._by_replica.get(name, {}).values())

    def idle(self) -> bool:
        return not any(life.alive for life in self.lives.values())

    def bookings(self) -> dict[NodeId, float]:
        """The memory in GB that each node's replicas have booked, those included that are on their way out."""
        booked: dict[NodeId, float] = {}
        for life in self.lives.values():
            if life.alive:
                shard = life.replica.shard
                booked[shard.node] = booked.get(shard.node, 0.0) + (shard.profile.min_memory_gb or 0.0)
        return booked

    def next_epoch(self, name: ReplicaId) -> int:
        """One more than any that was seen or given: a late word of an earlier try can't be mistaken for this one's."""
        epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        return epoch

    def see_epoch(self, name: ReplicaId, epoch: int) -> None:
        self._epochs[name] = max(epoch, self._epochs.get(name, 0))

    def desire(self, spec: ShardSpec) -> None:
        self.members[spec.node].desired[spec.id] = spec
        self._touched.add(spec.node)

    def withdraw(self, life: Life) -> None:
        shard = life.replica.shard
        member = self.members[shard.node]
        del member.desired[shard.id]
        life.withdrawn_by = member.revision + 1
        self._touched.add(shard.node)

    def is_desired(self, life: Life) -> bool:
        shard = life.replica.shard
        spec = self.members[shard.node].desired.get(shard.id)
        return spec is not None and spec.epoch == shard.epoch

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

    def _is_routable(self, life: Life) -> bool:
        replica = life.replica
        return (
            replica.state is ShardState.READY
            and replica.endpoint is not None
            and not self.members[replica.shard.node].lost
        )

    def _refresh_ready(self, name: ModelName) -> None:
        lives = list(self.of(name))
        routable = [life for life in lives if self._is_routable(life)]
        self._routable.difference_update(life.key for life in lives)
        self._routable.update(life.key for life in routable)
        if routable:
            self.ready[name] = tuple(sorted((life.replica for life in routable), key=lambda replica: replica.id))
        else:
            self.ready.pop(name, None)
