"""What the fleet says that is so, in the words that the invariants use."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from llmgw.core.fleet import Fleet
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.placement import Placement, place
from llmgw.core.replica import Replica, ReplicaId, Shard, ShardSpec, ShardState, booked_gb_of

ON_ITS_WAY_OUT = (ShardState.STOPPING, ShardState.ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Nodes by id, every epoch of a replica once, and those that requests may go to. ``models`` are as they are
    written, and ``launched`` as they are launched; ``reserved`` are shards that have ended and whose room is kept;
    ``busy``: there are models that are still to be looked at."""

    hosts: Mapping[NodeId, Host]
    replicas: tuple[Replica, ...]
    models: Mapping[str, Model]
    ready: Mapping[ModelName, tuple[Replica, ...]]
    brake: bool
    launched: Mapping[str, Model] = field(default_factory=dict)
    held: Set[ModelName] = frozenset()
    reserved: Mapping[ModelName, tuple[Shard, ...]] = field(default_factory=dict)
    busy: bool = False

    def find(self, name: ReplicaId, epoch: int) -> Replica | None:
        """That epoch, of two on two nodes any."""
        return next((each for each in self.replicas if (each.id, each.epoch) == (name, epoch)), None)

    def is_lost(self, node: NodeId) -> bool:
        """Lost, or not there at all."""
        host = self.hosts.get(node)
        return host is None or host.standing is Standing.LOST

    def is_fenced(self, replica: Replica) -> bool:
        """Some of it is where nobody can tell it anything."""
        return any(map(self.is_lost, replica.nodes))

    def alive_shards(self) -> list[tuple[Replica, ShardSpec]]:
        """Each shard that has not ended, with its replica."""
        return [
            (replica, shard.spec)
            for replica in self.replicas
            for shard in replica.shards
            if shard.state is not ShardState.ENDED
        ]

    def serving(self, name: str) -> list[Replica]:
        """Those that count for a model: neither fenced nor on their way out."""
        return [
            replica
            for replica in self.replicas
            if replica.model == name and replica.state not in ON_ITS_WAY_OUT and not self.is_fenced(replica)
        ]


def read_books(fleet: Fleet, now: float) -> Books:
    """As they are now."""
    told = fleet.statistics(now)
    # A replica is told of with each of its nodes.
    replicas: dict[tuple[ReplicaId, int, tuple[NodeId, ...]], Replica] = {}
    for node in told.nodes:
        for replica in node.replicas:
            replicas[replica.id, replica.epoch, replica.nodes] = replica
    for model in told.models:
        for replica in model.replicas:
            replicas[replica.id, replica.epoch, replica.nodes] = replica
    names = {replica.model for replica in replicas.values()} | {model.model.name for model in told.models}
    return Books(
        hosts={node.host.id: node.host for node in told.nodes},
        replicas=tuple(replicas.values()),
        models={model.model.name: model.model for model in told.models},
        ready={name: fleet.ready(name) for name in sorted(names)},
        brake=told.brake is not None,
        launched={
            model.model.name: launched
            for model in told.models
            if (launched := fleet.launched(model.model.name)) is not None
        },
        held=frozenset(model.model.name for model in told.models if model.held),
        reserved=told.reserved,
        busy=bool(fleet._state.unplanned),
    )


class Reckoning:
    """What the fleet would answer now: asked only where it matters, since it takes time."""

    def __init__(self, fleet: Fleet, now: float) -> None:
        self._fleet = fleet
        self._now = now

    def wanted(self, name: ModelName) -> int:
        """How many replicas there are to be."""
        model = self._fleet.launched(name)
        return 0 if model is None else self._fleet.wanted(model, self._now)

    def has_room(self, name: ModelName, without: Replica | None = None) -> bool:
        """Whether one more of this model would find its place, now or in a moment, once ``without`` is gone: where it
        is not to be tried again yet, and where a link is down that may be back, counts."""
        model = self._fleet.launched(name)
        if model is None:
            return False
        hosts = [_without(_wait_for(host), without) for host in self._fleet._state.roster.hosts_for(name)]
        return isinstance(place(self._fleet.filled(model), hosts, {}, self._now), Placement)

    def backing_off(self, name: ModelName) -> Mapping[NodeId, float]:
        """For how many seconds more each node is not tried again."""
        return {node: until - self._now for node, until in self._fleet.backing_off(name).items()}

    def clock(self) -> float:
        """The server's."""
        return self._now


def _wait_for(host: Host) -> Host:
    return replace(host, standing=Standing.READY) if host.standing is Standing.SILENT else host


def _without(host: Host, gone: Replica | None) -> Host:
    shards = [shard for shard in gone.shards if shard.spec.node == host.id] if gone is not None else []
    if not shards:
        return host
    gpus = {gpu for shard in shards for gpu in shard.spec.gpus or ()}
    gb = sum(map(booked_gb_of, shards))
    booked = {gpu: name for gpu, name in host.booked.items() if gpu not in gpus}
    return replace(host, booked=booked, booked_gb=host.booked_gb - gb)
