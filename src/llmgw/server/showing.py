"""What the fleet is, as the first page shows it."""

from __future__ import annotations

from llmgw import __version__
from llmgw.core.picture import FleetStatistics, ModelStatistics, NodeStatistics
from llmgw.core.placement import Rejected
from llmgw.core.replica import Replica, ShardState
from llmgw.server.shortage import find_shortage, tell_shortage
from llmgw.web.snapshot import ModelShown, ModelState, NodeShown, Snapshot

# The nearer to serving, the more a replica says about its model.
_ORDER = (
    ShardState.READY,
    ShardState.LOADING,
    ShardState.LAUNCHING,
    ShardState.PREPARED,
    ShardState.PREPARING,
    ShardState.PLACED,
    ShardState.STOPPING,
    ShardState.ENDED,
)


def show(fleet: FleetStatistics, base_url: str) -> Snapshot:
    """The page's facts at this moment."""
    return Snapshot(
        version=__version__,
        base_url=f"{base_url}/v1",
        models=tuple(_show_model(each) for each in fleet.models),
        nodes=tuple(_show_node(each) for each in fleet.nodes),
    )


def _show_node(each: NodeStatistics) -> NodeShown:
    node = each.node
    return NodeShown(
        id=node.id,
        cores=node.cores,
        memory_gb=node.memory_gb,
        memory_available_gb=node.memory_available_gb,
        engines=tuple(f"{found.engine} {found.version}" if found.version else found.engine for found in node.engines),
    )


def _show_model(each: ModelStatistics) -> ModelShown:
    model = each.model
    best = min(each.replicas, key=lambda replica: _ORDER.index(_state_of(replica)), default=None)
    state, detail, lines = _judge(each, best)
    return ModelShown(
        name=model.name,
        state=state,
        aliases=model.aliases,
        engine=best.shard.profile.engine if best is not None else None,
        node=best.shard.node if best is not None else None,
        detail=detail,
        lines=lines,
    )


def _judge(each: ModelStatistics, best: Replica | None) -> tuple[ModelState, str | None, tuple[str, ...]]:
    state = None if best is None else _state_of(best)
    if state is ShardState.READY:
        return ModelState.SERVING, None, ()
    if each.held:
        return ModelState.STOPPED, None, ()
    if best is not None and state is ShardState.ENDED and find_shortage(each.verdict) is None:
        return ModelState.FAILED, best.cause, best.lines
    if best is not None and state not in {ShardState.STOPPING, ShardState.ENDED}:
        return ModelState.LOADING, best.progress or str(state), ()
    if isinstance(each.verdict, Rejected):
        # Anybody may see this page.
        return ModelState.WAITING, f"it can't be placed now: {tell_shortage(each.verdict.reasons())}", ()
    return ModelState.STOPPED, None, ()


def _state_of(replica: Replica) -> ShardState:
    """One that is to go gets no request any more: to who asks it has stopped serving."""
    return ShardState.STOPPING if replica.draining else replica.state
