"""What the fleet says that is so, in the words that the invariants use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmgw.core.fleet import Fleet
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import Replica, ReplicaId, ShardSpec, ShardState

ON_ITS_WAY_OUT = (ShardState.STOPPING, ShardState.ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Nodes by id, every epoch of a replica once, and those that requests may go to."""

    hosts: Mapping[NodeId, Host]
    replicas: tuple[Replica, ...]
    models: Mapping[str, Model]
    ready: Mapping[ModelName, tuple[Replica, ...]]
    brake: bool

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
    )
