"""How the next epoch of a replica begins: its name, its shards, and where they meet."""

from __future__ import annotations

from llmgw.core import lives
from llmgw.core.costs import Score
from llmgw.core.effects import Happening
from llmgw.core.model import Model
from llmgw.core.placement import Placement
from llmgw.core.replica import Replica, Shard, ShardSpec, ShardState, replica_id, shard_id
from llmgw.core.rolling import is_same_launch
from llmgw.core.roster import Life
from llmgw.core.state import State
from llmgw.core.trace import Decision

# An agent says at once that it launches what it was told to. Where it does not, something keeps the word from it, or it
# from the word.
LAUNCH_SECONDS = 60.0

# Where the shards of one replica meet: of these ports one that no other replica's rank 0 has on that node.
RENDEZVOUS_PORTS = range(29500, 30000)


def start(state: State, model: Model, placement: Placement, now: float) -> None:
    number = 1
    while state.roster.is_alive(replica_id(model.name, number)):
        number += 1
    name = replica_id(model.name, number)
    epoch = state.roster.next_epoch(name)
    rendezvous = _meet(state, placement, epoch)
    served = state.rolls.proven(model.name)
    on_trial = served is not None and not is_same_launch(served, model)
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
            go=len(placement.shards) == 1,
            on_trial=on_trial,
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
    # (what is left of the room that was kept is given back when this one is proven)
    state.roster.use(model.name, specs)
    if model.name not in state.roster.reserved:
        state.reserved_until.pop(model.name, None)
    for spec in specs:
        state.roster.desire(spec)
        state.launched_at[spec.node, name, epoch] = now + LAUNCH_SECONDS
    stands_in = model is not state.launched(model.name)
    lives.enter(state, Life(replica, count=len(specs), launched_at=now, stands_in=stands_in))
    why = _word(placement.score)
    by = f"profile {placement.profile.name!r}{' of the earlier definition' if stands_in else ''}"
    text = f"{name} goes to {', '.join(replica.nodes)} by {by} (epoch {epoch}): {why}"
    state.announce(replica, text, what=Happening.PLACED)
    state.trace.add(
        Decision(
            at=now,
            model=model.name,
            why=why,
            replica=name,
            profile=placement.profile.name,
            nodes=replica.nodes,
        )
    )


def _word(score: Score) -> str:
    return f"the least cost: {score.seconds:.0f} s" if score.seconds else "nothing speaks against it"


def _meet(state: State, placement: Placement, epoch: int) -> str | None:
    """Where the shards of one replica find one another: at rank 0's address on their fabric."""
    if placement.fabric is None:
        return None
    node = state.roster.members[placement.node].node
    address = next(found.address for found in node.fabrics if found.name == placement.fabric)
    taken = {life.replica.shard.rendezvous for life in state.roster.on(node.id) if life.alive}
    host = f"[{address}]" if ":" in str(address) else address
    # Another one with each try: this one may be some other program's.
    ports = (RENDEZVOUS_PORTS[(epoch - 1 + n) % len(RENDEZVOUS_PORTS)] for n in range(len(RENDEZVOUS_PORTS)))
    places = (f"{host}:{port}" for port in ports)
    # Only a node that lies has none left.
    return next((place for place in places if place not in taken), f"{host}:{RENDEZVOUS_PORTS[0]}")
