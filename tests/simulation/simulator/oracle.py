"""What has to be so once the faults have stopped, found by the simplest means and from what really runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from llmgw.core.model import ANY_CLASS, Model, ModelName, Profile
from llmgw.core.node import NodeId
from llmgw.core.replica import ReplicaId, ShardState
from llmgw.core.rolling import defines
from simulator.books import Books
from simulator.faults import Flaw
from simulator.site import CARD_GB
from simulator.stage import Ground, Running
from simulator.store import Store, find_flaw

# From the deadline of a drain: the last requests, and the engine's own time.
CLEARED_SECONDS = 700.0


def find_faults_at_rest(
    store: Store, machines: Mapping[NodeId, Ground], books: Books, now: float = 0.0
) -> Iterator[str]:
    """Each thing that is not as the catalog asks for."""
    running = [process for machine in machines.values() for process in machine.alive()]
    ready = _whole_replicas([process for process in running if process.ready])
    for model in store.models.values():
        have = sum(process.spec.model.name == model.name for process in ready.values())
        routable = len(books.ready.get(model.name, ()))
        if have != routable:
            yield f"{have} replicas of {model.name} are ready, and requests go to {routable}"
        launched = find_launched(model, store)
        if launched is None or model.name in store.held:
            continue
        if have < model.scaling.min:
            place = find_place(launched, store, machines)
            if place is not None:
                yield f"{have} replicas of {model.name} are ready, {model.scaling.min} are to be, and there is {place}"
        yield from _outdated(model, launched, store, running)
    yield from _undrained(store, machines, now)
    yield from _unwanted(store, running, books)


def find_launched(model: Model, store: Store) -> Model | None:
    """What its engines are to be started by: what is written, and where that comes to nothing what served last; None
    where nothing has, and where it waits for a place that does not come."""
    if model.name in store.failed:
        # (a good one may have met two bad nodes)
        return store.proven.get(model.name)
    match find_flaw(model):
        case None:
            return model
        case Flaw.FITS_NOWHERE:
            return None
        case _:
            proven = store.proven.get(model.name)
            # (one whose node is cut off right after it was ready passes for one that serves, until that is noticed)
            return proven if proven is not None and find_flaw(proven) is None else None


def _outdated(model: Model, launched: Model, store: Store, running: list[Running]) -> Iterator[str]:
    """A definition that is good is what everything runs by, in the place of the old where there is no other; but not
    where nothing new may begin."""
    for process in running:
        spec = process.spec
        mark = store.marks.get(spec.node)
        closed = mark is not None and (mark.cordoned or mark.draining)
        if spec.model.name == model.name and spec.count == 1 and not closed and not defines(launched, spec):
            yield f"{spec.id} (epoch {spec.epoch}) runs on {spec.node} by an earlier definition"


def _undrained(store: Store, machines: Mapping[NodeId, Ground], now: float) -> Iterator[str]:
    """What is on a node that is drained waits for room, and not past the deadline."""
    for node, mark in store.marks.items():
        machine = machines.get(node)
        if not mark.draining or machine is None:
            continue
        late = mark.drain_until is not None and now > mark.drain_until + CLEARED_SECONDS
        for process in machine.alive():
            model = store.models.get(process.spec.model.name)
            launched = find_launched(model, store) if model is not None else None
            if model is not None and launched is None:
                # (what has no place at all is replaced as it was when it served)
                launched = store.proven.get(model.name)
            place = find_place(launched, store, machines) if launched is not None else None
            if late or place is not None:
                yield f"{process.spec.id} still runs on {node}, which is drained, and there is {place}"


def _whole_replicas(ready: list[Running]) -> dict[ReplicaId, Running]:
    """Rank 0 of those all of whose shards are ready."""
    counts = Counter((process.spec.replica, process.spec.epoch) for process in ready)
    return {
        process.spec.replica: process
        for process in ready
        if process.spec.rank == 0 and counts[process.spec.replica, process.spec.epoch] == process.spec.count
    }


def _unwanted(store: Store, running: list[Running], books: Books) -> Iterator[str]:
    wanted = {(spec.node, spec.id, spec.epoch) for _, spec in books.alive_shards()}
    replicas: dict[str, set[ReplicaId]] = {}
    for process in running:
        spec = process.spec
        model = store.models.get(spec.model.name)
        if model is None:
            yield f"{spec.id} runs on {spec.node}, and its model is gone"
        elif (spec.node, spec.id, spec.epoch) not in wanted:
            yield f"{spec.id} (epoch {spec.epoch}) runs on {spec.node}, and nobody wants it"
        replicas.setdefault(spec.model.name, set()).add(spec.replica)
    for name, several in replicas.items():
        model = store.models.get(name)
        # nobody has asked for anything for long
        most = 0 if model is None or ModelName(name) in store.held else min(model.scaling.min, model.scaling.max)
        if model is not None and len(several) > most:
            yield f"{len(several)} replicas of {name} run, and {most} are to"


def find_place(model: Model, store: Store, machines: Mapping[NodeId, Ground]) -> str | None:
    """Room for one more replica, in words; None where there is none."""
    for profile in model.profiles:
        able = {node: room for node, machine in machines.items() if (room := _room(profile, store, machine))}
        if profile.nodes == 1 and able:
            return f"room on {min(able)} for profile {profile.name}"
        on: dict[tuple[str, str], list[NodeId]] = {}
        for node in able:
            shape = machines[node].shape
            if shape.fabric is not None:
                on.setdefault((shape.fabric, shape.gpu_class), []).append(node)
        for (fabric, _), nodes in on.items():
            if len(nodes) >= profile.nodes > 1:
                return f"room on {', '.join(nodes)} of {fabric} for profile {profile.name}"
    return None


def find_place_on_demand(model: Model, store: Store, machines: Mapping[NodeId, Ground]) -> str | None:
    """Room for the first replica of a model that loads on demand and may, in words; None where there is none."""
    if not model.scaling.on_demand or model.name in store.held:
        return None
    # (to find out that one is no good takes as long as its engines are given)
    if find_flaw(model) is not None or model.name in store.failed:
        return None
    return find_place(model, store, machines)


def _room(profile: Profile, store: Store, machine: Ground) -> bool:
    """Whether one shard of this profile could run there now."""
    mark = store.marks.get(machine.id)
    labels: dict[str, str | None] = {**machine.shape.labels, **(mark.labels if mark else {})}
    closed = mark is not None and (mark.cordoned or mark.draining)
    if closed or any(labels.get(key) != value for key, value in profile.labels.items()):
        return False
    taken_gb = sum(process.spec.profile.min_memory_gb or 0.0 for process in machine.alive())
    if machine.shape.memory_gb - taken_gb < (profile.min_memory_gb or 0.0):
        return False
    if not profile.gpus:
        return True
    if profile.gpu_class not in (None, ANY_CLASS, machine.shape.gpu_class):
        return False
    used = {gpu for process in machine.alive() for gpu in process.spec.gpus or ()}
    wants_gb = profile.gpu_memory_gb or 0.9 * CARD_GB.get(machine.shape.gpu_class, 0.0)
    free = [gpu for gpu in machine.gpu_names() if gpu not in used and machine.free_gb(gpu) >= wants_gb]
    return len(free) >= profile.gpus_per_node


def find_leftovers(machines: Mapping[NodeId, Ground], books: Books) -> Iterator[str]:
    """What is there although no model is."""
    for machine in machines.values():
        for process in machine.alive():
            yield f"{process.spec.id} (epoch {process.spec.epoch}) still runs on {machine.id}"
    for node, host in books.hosts.items():
        if host.booked or host.booked_gb:
            yield f"{node} has {dict(host.booked)} and {host.booked_gb:g} GB booked, and there is no model"
    for replica in books.replicas:
        if replica.state is not ShardState.ENDED:
            yield f"{replica.id} (epoch {replica.epoch}) is {replica.state}, and there is no model"
