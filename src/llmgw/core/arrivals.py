"""Whose word is taken for what: nodes that come with what they run, report, fall silent, are lost or removed."""

from __future__ import annotations

import math

from llmgw.core import adoption, lives
from llmgw.core.effects import Announce, Happening
from llmgw.core.events import NodeRegistered
from llmgw.core.hosts import Standing
from llmgw.core.model import ModelName
from llmgw.core.node import Gpu, Node, NodeId
from llmgw.core.replica import ShardState
from llmgw.core.roster import Life, LifeKey, ShardKey
from llmgw.core.state import FEW, State
from llmgw.core.weights import NodeWeights

# What a node reports is looked at by those that wait for room so often at most.
LOOK_SECONDS = 1.0

# Nothing runs of it yet.
UNLAUNCHED = frozenset({ShardState.PLACED, ShardState.PREPARING, ShardState.PREPARED})


def expect(state: State, nodes: frozenset[NodeId], until: float) -> None:
    """These were there before this server: nothing is placed before they have come, or their time is over."""
    state.known, state.settled_at = nodes, until
    state.expected = set(nodes) - state.roster.members.keys()


def register(state: State, event: NodeRegistered, now: float) -> None:
    """A node is here, for the first time or again, and has said all that it runs."""
    name = event.node.id
    was_lost = name in state.roster.lost_at
    member = state.roster.enrol(event.node)
    if was_lost:
        state.effects.append(Announce(model=None, node=name, text=f"{name} is back", what=Happening.NODE))
    state.expected.discard(name)
    state.absent.pop(name, None)
    state.replace_at.pop(name, None)
    named: set[LifeKey] = set()
    # A look at all replicas of a model for each of a thousand shards would take seconds.
    room: dict[ModelName, int] = {}
    said = len(state.effects)
    # The newest epoch first: were there two of a replica, that is the one to keep.
    for spec, report in sorted(event.running, key=lambda pair: -pair[0].epoch):
        life = state.roster.at(name, spec.replica, spec.epoch)
        if life is not None:
            lives.observe(state, life, name, report, now)
            adoption.find_again(state, life, name, report, now)
            if was_lost and life.alive:
                fate = "; it is to stop, another has its place" if life.given_up else ""
                text = f"{life.replica.id} can be reached again: {name} is back{fate}"
                state.announce(life.replica, text, what=Happening.NODE)
        else:
            life = adoption.find_running(state, member, spec, report, room=room, now=now)
        if life is not None:
            named.add(life.key)
        if spec.epoch < adoption.MOST_EPOCHS and adoption.may_be_named(state, spec):
            state.roster.see_epoch(spec.replica, spec.epoch)
    for life in list(state.roster.on(name)):
        if life.key not in named and life.shard_on(name).state is not ShardState.ENDED:
            _miss(state, life, name, now)
    _cut_short(state, said, name)
    if _is_everybody_here(state):
        # What is missing of a replica is on no node.
        state.whole_at = dict.fromkeys(state.whole_at, now)
    for model in state.catalog:
        state.plan_later(model.name)


def _is_everybody_here(state: State) -> bool:
    """Each node that was there before this server began has said what it runs."""
    away = state.expected or state.absent or state.roster.lost_at
    return bool(state.known) and not away


def _cut_short(state: State, said: int, node: NodeId) -> None:
    """A node may come with a thousand shards: the log gets the first few, and how many more."""
    more = state.effects[said + FEW :]
    if more:
        del state.effects[said + FEW :]
        text = f"and {len(more)} more changes with the registration of {node}"
        state.effects.append(Announce(model=None, node=node, text=text, warning=True, what=Happening.NODE))


def _miss(state: State, life: Life, node: NodeId, now: float) -> None:
    """Its node has registered without it."""
    if node in life.heard and life.shard_on(node).state not in UNLAUNCHED:
        cause = "it no longer ran when its node registered again"
        lives.end(state, life, node, lives.End(cause=cause, blames_node=True), now)
        return
    # It never saw it, or prepared it and began anew, or it ran and ended and both words were lost: only another epoch
    # is sure to be launched.
    if life.count > 1:
        lives.take_back(state, life, f"{node} never launched its part", now)
    state.roster.withdraw(life)
    lives.gone(state, life, node, now)


def take_report(state: State, node: Node, applied: int | None, now: float) -> None:
    """What a node has now, and the number of the desired set that it took last: what it said nothing of, it never
    launched."""
    member = state.roster.members.get(node.id)
    if member is None:
        return
    before = member.node
    state.roster.set_node(member, node)
    # Most reports bring other figures of the same things, and a thousand nodes bring many.
    if _offer(before) != _offer(node):
        _look_again(state, now)
    # (a node that is not there says nothing of what it launches, nor anything else)
    for key in [key for key, at in state.launched_at.items() if key[0] == node.id and at <= now]:
        del state.launched_at[key]
        _find_unlaunched(state, key, now)
    if applied is not None:
        member.tells = True
        for key in [key for key in state.forget_at if key[0] == node.id]:
            life = state.roster.owner(key)
            # It has taken the set without this shard and never spoke of it: it never saw the set with it.
            if applied >= life.withdrawn_by.get(node.id, math.inf):
                lives.gone(state, life, node.id, now)


def take_weights(state: State, node: NodeId, weights: NodeWeights, now: float) -> None:
    """What a node has on its disks: where it has more, there may be room for those that wait."""
    sources = frozenset(each.source for each in weights.whole).union(weights.seen)
    begun = {each.source: each.size_bytes / 1e9 for each in weights.cached if not each.whole}
    if state.roster.note_stored(node, sources, begun):
        _look_again(state, now)


def _look_again(state: State, now: float) -> None:
    """There may be room for those that wait. Figures of a thousand nodes may move all the time, and a look costs."""
    if now >= state.looked_at + LOOK_SECONDS:
        state.looked_at = now
        state.plan_waiting()
    else:
        state.look_again_at = min(state.look_again_at, state.looked_at + LOOK_SECONDS)


def _find_unlaunched(state: State, key: ShardKey, now: float) -> None:
    """A node was told to launch it, and speaks of everything else."""
    node, name, epoch = key
    life = state.roster.at(node, name, epoch)
    if life is None or not state.roster.is_desired(life):
        return
    cause = "its node was told to launch it and says nothing of it"
    lives.fail(state, life, node, lives.End(cause=cause, blames_node=True), now)
    lives.stop_shards(state, life, now)
    state.plan_later(life.replica.model)


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


def fall_silent(state: State, name: NodeId) -> None:
    """Its link is down, and its lease is not over: it gets nothing new."""
    member = state.roster.members.get(name)
    if member is not None and member.standing is Standing.READY:
        state.roster.set_standing(member, Standing.SILENT)


def lose(state: State, name: NodeId, now: float) -> None:
    """What runs there may serve on, unseen: it keeps its room, and gets no requests."""
    member = state.roster.members.get(name)
    if member is None or member.standing is Standing.LOST:
        return
    state.roster.set_standing(member, Standing.LOST, now)
    text = f"{name} is lost: it has been silent for longer than its lease"
    state.effects.append(Announce(model=None, node=name, text=text, warning=True, what=Happening.NODE))
    for life in state.roster.on(name):
        if life.alive and not life.given_up:
            state.replace_at[name] = now + state.replace_after
            text = f"{life.replica.id} can't be reached: {name} is silent; no request goes there until it is back"
            state.announce(life.replica, text, warning=True, what=Happening.NODE)
    state.plan_waiting()


def remove(state: State, name: NodeId, now: float) -> None:
    """Forget a node that is lost or empty; one that runs something stays."""
    member = state.roster.members.get(name)
    state.absent.pop(name, None)
    state.expected.discard(name)
    if member is None:
        return
    there = [life for life in state.roster.on(name) if life.shard_on(name).state is not ShardState.ENDED]
    if member.standing is not Standing.LOST and there:
        text = f"{name} is not removed: {', '.join(sorted(life.replica.id for life in there))} runs there"
        state.effects.append(Announce(model=None, node=name, text=text, warning=True, what=Happening.NODE))
        return
    state.replace_at.pop(name, None)
    for tries in state.failures.values():
        tries.pop(name, None)
    for life in there:
        lives.take_back(state, life, f"{name} was removed", now)
        lives.gone(state, life, name, now)
    last, rest = state.roster.remove(name)
    state.effects.append(last)
    for life in rest:
        if not life.alive:
            lives.forget(state, life)
    state.plan_waiting()


def change_rules(state: State, replace_after: float, brake: float) -> None:
    """Those that are lost by now have waited as long as they have."""
    later = replace_after - state.replace_after
    state.replace_after, state.brake_seconds = replace_after, brake
    for name in state.replace_at:
        state.replace_at[name] += later
