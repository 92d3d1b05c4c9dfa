"""Each invariant can fail: a state or a move that it is there for is found, and its neighbour that is well is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

import pytest
from simulator import invariants
from simulator.books import Books
from simulator.invariants import MOVES, STATE, Move, State
from simulator.loop import Loop
from simulator.machine import Machine
from simulator.oracle import find_faults_at_rest, find_leftovers
from simulator.site import MODELS, Shape, site
from simulator.store import Store

from llmgw.core.effects import Announce, Desire, Drain, Happening
from llmgw.core.events import Demand, NodeMarked, Wakeup
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Model, ModelName
from llmgw.core.node import ForeignUse, NodeId
from llmgw.core.replica import (
    Endpoint,
    Replica,
    ReplicaId,
    Shard,
    ShardId,
    ShardSpec,
    ShardState,
    join_states,
    replica_id,
    shard_id,
)

SHAPES = {shape.id: shape for shape in site(12)}
AT = Endpoint(host="127.0.0.1", port=18000, served_name="m")


@dataclass(frozen=True, slots=True)
class Engine:
    spec: ShardSpec
    pid: int = 1000
    ready: bool = True


class Ground:
    """A node on which these engines run, ``whole``: their weights are there."""

    def __init__(self, shape: Shape, *engines: Engine, whole: bool = True) -> None:
        self.whole = whole
        self.id = shape.id
        self.shape = shape
        self._engines = engines

    def alive(self) -> Iterator[Engine]:
        return iter(self._engines)

    def gpu_names(self) -> tuple[str, ...]:
        return tuple(f"GPU-{self.id}-{index}" for index in range(self.shape.gpus or 0))

    def has(self, source: str) -> bool:
        return self.whole

    def free_gb(self, name: str) -> float:
        used = any(name in (engine.spec.gpus or ()) for engine in self._engines)
        return 0.0 if used else 40.0


def a_spec(node: str = "n05", *gpus: int, model: str = "couple", epoch: int = 1, **changes: object) -> ShardSpec:
    """A shard of the first replica of a model, on these GPUs."""
    found = MODELS[model]
    spec = ShardSpec(
        id=shard_id(found.name, 1, 0),
        replica=replica_id(found.name, 1),
        epoch=epoch,
        node=NodeId(node),
        model=found,
        profile=found.profiles[0],
        gpus=tuple(f"GPU-{node}-{index}" for index in gpus),
    )
    return replace(spec, **changes)


def a_replica(*specs: ShardSpec, state: ShardState = ShardState.READY) -> Replica:
    shards = tuple(Shard(spec=spec, state=state, since=0.0, endpoint=AT if not spec.rank else None) for spec in specs)
    first = specs[0]
    joined = join_states([state] * len(specs), first.count)
    return Replica(
        id=first.replica,
        model=first.model.name,
        profile=first.profile.name,
        epoch=first.epoch,
        shards=shards,
        state=joined,
        since=0.0,
    )


def a_host(node: str, *replicas: Replica, **changes: object) -> Host:
    """A node that has booked what is to be on it."""
    here = [(r, s.spec) for r in replicas for s in r.shards if s.spec.node == node and s.state is not ShardState.ENDED]
    given = {
        "node": Machine(
            SHAPES[NodeId(node)], Loop(), Random(0), is_group_there=lambda spec: True, moved=lambda: None
        ).look(),
        "labels": SHAPES[NodeId(node)].labels,
        "booked": {gpu: replica.id for replica, spec in here for gpu in spec.gpus or ()},
        "booked_gb": sum(spec.profile.min_memory_gb or 0.0 for _, spec in here),
    }
    return Host(**{**given, **changes})


def books_of(*replicas: Replica, hosts: Mapping[str, Host] | None = None, ready: bool = True) -> Books:
    nodes = sorted({node for replica in replicas for node in replica.nodes})
    found = {NodeId(node): a_host(node, *replicas) for node in nodes}
    found |= {NodeId(node): host for node, host in (hosts or {}).items()}
    by_model: dict[str, tuple[Replica, ...]] = {}
    for replica in replicas:
        if replica.state is ShardState.READY and ready:
            by_model[replica.model] = (*by_model.get(replica.model, ()), replica)
    return Books(hosts=found, replicas=replicas, models=MODELS, launched=MODELS, ready=by_model, brake=False)


def a_state(books: Books | None, *engines: Engine, linked: bool = True, whole: bool = True) -> State:
    grounds = {
        node: Ground(shape, *(e for e in engines if e.spec.node == node), whole=whole) for node, shape in SHAPES.items()
    }
    nodes = frozenset(books.hosts) if linked and books is not None else frozenset[NodeId]()
    return State(books=books, machines=grounds, linked=nodes)


def a_move(*specs: ShardSpec, **changes: object) -> Move:
    """Nodes are told to run this, and were told nothing before."""
    after = books_of(*(a_replica(spec, state=ShardState.PLACED) for spec in specs))
    effects = [
        Desire(node=node, revision=1, shards=tuple(spec for spec in specs if spec.node == node))
        for node in sorted({spec.node for spec in specs})
    ]
    move = Move(
        event=Wakeup(),
        effects=[*effects],
        before=books_of(),
        after=after,
        state=a_state(after),
        told={},
        known=frozenset(),
        braked=False,
    )
    return replace(move, **changes)


def group(*nodes: str, **changes: object) -> tuple[ShardSpec, ...]:
    """The two halves of a replica of sixteen GPUs."""
    name = MODELS["wide"].name
    given = {"count": 2, "fabric": "ib-a", "rendezvous": "10.0.0.1:29500", **changes}
    return tuple(
        a_spec(node, *range(8), model="wide", id=shard_id(name, 1, rank), rank=rank, **given)
        for rank, node in enumerate(nodes)
    )


WELL = a_spec("n05", 0, 1)
OTHER = a_spec("n05", 1, 2, replica=ReplicaId("rep-other-1"), id=ShardId("shd-other-1-0"))
CPU = a_spec("n10", model="plain", gpus=None)
FETCHED = a_spec("n06", 3, model="single")
NEXT = a_spec("n06", 0, 1, epoch=2)
LOST = a_host("n05", standing=Standing.LOST)
TOO_MANY = [
    replace(
        WELL,
        replica=ReplicaId(f"rep-{n}"),
        id=ShardId(f"shd-{n}"),
        node=NodeId(f"n0{n}"),
        gpus=(f"GPU-n0{n}-0", f"GPU-n0{n}-1"),
    )
    for n in (5, 6, 7)
]

# What is well, for each, and what is not.
STATES: dict[str, tuple[State, State]] = {
    "no_gpu_is_booked_twice": (
        a_state(books_of(a_replica(WELL))),
        a_state(books_of(a_replica(WELL), a_replica(OTHER, state=ShardState.STOPPING))),
    ),
    "no_gpu_is_used_twice": (a_state(None, Engine(WELL)), a_state(None, Engine(WELL), Engine(OTHER))),
    "every_booking_has_its_cause": (
        a_state(books_of(a_replica(WELL))),
        a_state(books_of(hosts={"n05": a_host("n05", booked={"GPU-n05-0": ReplicaId("rep-gone-1")})})),
    ),
    "no_node_is_booked_beyond_its_memory": (
        a_state(books_of(a_replica(CPU))),
        a_state(books_of(*(a_replica(replace(CPU, replica=ReplicaId(f"rep-{n}"))) for n in range(4)))),
    ),
    "no_replica_spans_fabrics": (
        a_state(books_of(a_replica(*group("n00", "n01")))),
        a_state(books_of(a_replica(*group("n02", "n03")))),
    ),
    "every_shard_is_as_wide_as_its_profile": (
        a_state(books_of(a_replica(WELL))),
        a_state(books_of(a_replica(a_spec("n05", 0)))),
    ),
    "one_epoch_is_alive": (
        a_state(books_of(a_replica(WELL), a_replica(NEXT), hosts={"n05": LOST})),
        a_state(books_of(a_replica(WELL), a_replica(NEXT))),
    ),
    "one_epoch_is_routable": (
        a_state(books_of(a_replica(WELL))),
        a_state(books_of(a_replica(WELL), a_replica(NEXT))),
    ),
    "no_request_goes_where_nobody_answers": (
        a_state(books_of(a_replica(WELL), hosts={"n05": LOST}, ready=False)),
        a_state(books_of(a_replica(WELL), hosts={"n05": LOST})),
    ),
    "no_more_run_than_may": (
        a_state(books_of(*map(a_replica, TOO_MANY[:2]))),
        a_state(books_of(*map(a_replica, TOO_MANY))),
    ),
    "what_runs_on_a_linked_node_is_in_the_books": (
        a_state(books_of(a_replica(WELL)), Engine(WELL)),
        a_state(books_of(a_replica(WELL)), Engine(replace(WELL, epoch=2))),
    ),
    "one_epoch_of_a_shard_runs_on_a_node": (
        a_state(None, Engine(WELL)),
        a_state(None, Engine(WELL), Engine(replace(WELL, epoch=2, gpus=()))),
    ),
    "nothing_runs_without_its_weights": (
        a_state(None, Engine(FETCHED), Engine(WELL)),
        a_state(None, Engine(FETCHED), Engine(WELL), whole=False),
    ),
}

FULL = a_host("n05")
FULL = replace(
    FULL,
    node=replace(
        FULL.node, gpus=tuple(replace(gpu, foreign=(ForeignUse(memory_gb=36.0),)) for gpu in FULL.node.gpus or ())
    ),
)


@dataclass(frozen=True, slots=True)
class Reckoning:
    """A fleet that wants one of each model."""

    room: bool = True
    now: float = 1000.0

    def wanted(self, name: ModelName) -> int:
        return 1

    def has_room(self, name: ModelName, without: Replica | None = None) -> bool:
        return self.room

    def backing_off(self, name: ModelName) -> Mapping[NodeId, float]:
        return {}

    def clock(self) -> float:
        return self.now


def a_stop(spec: ShardSpec, *, draining: str | None = None, in_flight: int = 0, drained_at: float = 0.0) -> Move:
    """A replica that was ready is to run no more."""
    before = books_of(replace(a_replica(spec), draining=draining))
    after = books_of(a_replica(spec, state=ShardState.STOPPING))
    answers = {(spec.replica, spec.epoch): in_flight}
    return a_move(
        before=before,
        after=after,
        told={spec.node: Desire(node=spec.node, revision=1, shards=(spec,))},
        effects=[Desire(node=spec.node, revision=2, shards=())],
        state=replace(a_state(after), in_flight=answers, now=700.0, reckoning=Reckoning()),
        drained_at={(spec.replica, spec.epoch): drained_at},
    )


def a_drain(spec: ShardSpec, *, room: bool) -> Move:
    """A replica that was ready gets no requests any more."""
    ready = a_replica(spec)
    after = books_of(replace(ready, draining="its definition has changed"), ready=False)
    return a_move(
        before=books_of(ready),
        after=after,
        effects=[Drain(replica=spec.replica, epoch=spec.epoch, number=1)],
        state=replace(a_state(after), reckoning=Reckoning(room=room)),
    )


def a_second_in_place(model: str) -> Move:
    """A replica goes so that the next has its room, and so does another one."""
    why = "its definition has changed, and there is no room for another beside it"
    second = replace(a_replica(WELL), draining=why)
    first = replace(a_replica(a_spec("n11", model=model, gpus=None)), draining=why)
    return a_move(
        before=books_of(first, a_replica(WELL)),
        after=books_of(first, second, ready=False),
        effects=[Drain(replica=WELL.replica, epoch=WELL.epoch, number=1)],
    )


def an_eviction(spec: ShardSpec, reckoning: Reckoning, **changes: object) -> Move:
    """A replica makes way for another model."""
    ready = a_replica(spec)
    text = f"{spec.replica} on {spec.node} is to stop: it is idle, and makes way for lazy"
    return a_move(
        before=books_of(ready),
        after=books_of(ready),
        effects=[Announce(model=spec.model.name, text=text, what=Happening.EVICTED)],
        state=replace(a_state(books_of(ready)), reckoning=reckoning),
        **changes,
    )


IDLE = a_spec("n11", model="turn-a", gpus=None)
AWAY = books_of(a_replica(WELL), hosts={"n05": LOST})
CORDONED = NodeMarked(node=NodeId("n05"), cordoned=True)
APART = a_spec("n05", 1, 2)

CASES: dict[str, tuple[Move, Move]] = {
    "nothing_is_launched_where_it_may_not": (
        a_move(WELL),
        a_move(WELL, state=replace(a_state(books_of()), marks={NodeId("n05"): CORDONED})),
    ),
    "nothing_is_launched_on_gpus_that_do_not_do": (a_move(WELL), a_move(WELL, after=books_of(hosts={"n05": FULL}))),
    "groups_are_launched_whole": (a_move(*group("n00", "n01")), a_move(*group("n00", "n01")[:1])),
    "no_epoch_is_given_twice": (
        a_move(NEXT, before=books_of(a_replica(WELL))),
        a_move(WELL, before=books_of(a_replica(NEXT))),
    ),
    "the_brake_stops_and_moves_nothing": (a_move(NEXT, before=AWAY), a_move(NEXT, before=AWAY, braked=True)),
    "what_is_desired_is_well_formed": (
        a_move(WELL),
        a_move(WELL, told={NodeId("n05"): Desire(node=NodeId("n05"), revision=1, shards=())}),
    ),
    "groups_of_ranks_are_joined_where_they_can_be": (a_move(WELL), a_move(APART)),
    "what_answers_is_stopped_after_its_last_request": (a_stop(WELL, draining="it is idle"), a_stop(WELL)),
    "our_own_doing_takes_no_service_down": (a_drain(WELL, room=False), a_drain(WELL, room=True)),
    "one_after_the_other_goes_in_place": (a_second_in_place("turn-a"), a_second_in_place("couple")),
    "only_what_is_idle_makes_way": (an_eviction(IDLE, Reckoning()), an_eviction(WELL, Reckoning())),
    "nobody_takes_the_place_of_what_is_about_to_begin_anew": (
        a_move(WELL, left={"GPU-n05-0": (ModelName("couple"), 60.0)}),
        a_move(WELL, left={"GPU-n05-0": (ModelName("east"), 60.0)}),
    ),
    "nothing_is_launched_again_and_again": (
        a_move(WELL, begun={ModelName("couple"): 20}),
        a_move(WELL, begun={ModelName("couple"): 100}),
    ),
    "what_is_held_starts_nothing": (
        a_move(WELL),
        a_move(WELL, after=replace(books_of(a_replica(WELL)), held={ModelName("couple")})),
    ),
    "groups_begin_together": (a_move(*group("n00", "n01", go=False)), a_move(*group("n00", "n01"))),
}


def test_every_invariant_has_its_case() -> None:
    assert [each.__name__ for each in STATE] == [*STATES]
    assert [each.__name__ for each in MOVES] == [*CASES]


@pytest.mark.parametrize("name", STATES)
def test_what_may_never_be_so_is_found(name: str) -> None:
    find: Callable[[State], Iterator[str]] = getattr(invariants, name)
    well, broken = STATES[name]
    assert [*find(well)] == []
    assert [*find(broken)] != []


@pytest.mark.parametrize("name", CASES)
def test_what_may_never_happen_is_found(name: str) -> None:
    find: Callable[[Move], Iterator[str]] = getattr(invariants, name)
    well, broken = CASES[name]
    assert [*find(well)] == []
    assert [*find(broken)] != []


@pytest.mark.parametrize(("drained_at", "in_flight", "wrong"), [(600.0, 0, False), (600.0, 2, True), (100.0, 2, False)])
def test_requests_in_flight_keep_a_replica_for_ten_minutes(drained_at: float, in_flight: int, wrong: bool) -> None:
    move = a_stop(WELL, draining="it is idle", in_flight=in_flight, drained_at=drained_at)
    assert bool([*invariants.what_answers_is_stopped_after_its_last_request(move)]) is wrong


@pytest.mark.parametrize(
    "move",
    [
        an_eviction(IDLE, Reckoning(now=100.0)),
        an_eviction(IDLE, Reckoning(room=False)),
        an_eviction(IDLE, Reckoning(), demands={IDLE.model.name: Demand(model=IDLE.model.name, waiting=1)}),
        an_eviction(IDLE, Reckoning(), evicted={(ReplicaId("rep-turn-b-1"), 1): ModelName("lazy")}),
        an_eviction(replace(IDLE, count=2, fabric="ib-a"), Reckoning()),
    ],
    ids=["too early", "not enough", "asked for", "one too many", "a group"],
)
def test_an_eviction_that_is_wrong_is_found(move: Move) -> None:
    assert [*invariants.only_what_is_idle_makes_way(move)] != []


def a_rest(*engines: Engine, books: Books, models: Mapping[str, Model]) -> list[str]:
    grounds = a_state(books, *engines).machines
    return [*find_faults_at_rest(Store(models=dict(models)), grounds, books)]


def test_a_model_that_lacks_a_replica_while_there_is_room_is_found() -> None:
    models = {"couple": MODELS["couple"]}
    assert a_rest(Engine(WELL), books=books_of(a_replica(WELL)), models=models) == []
    (fault,) = a_rest(books=books_of(), models=models)
    assert "0 replicas of couple are ready, 1 are to be, and there is room on n05" in fault


def test_an_engine_of_an_earlier_definition_is_found() -> None:
    model = MODELS["couple"]
    written = replace(model, profiles=(replace(model.profiles[0], args=("--again",)),))
    (fault,) = a_rest(Engine(WELL), books=books_of(a_replica(WELL)), models={"couple": written})
    assert "by an earlier definition" in fault


def test_what_is_left_on_a_drained_node_is_found() -> None:
    store = Store(models={"couple": MODELS["couple"]})
    books = books_of(a_replica(WELL))
    store.marks[WELL.node] = NodeMarked(node=WELL.node, draining=True)
    (fault,) = find_faults_at_rest(store, a_state(books, Engine(WELL)).machines, books, 100.0)
    assert "still runs on n05, which is drained, and there is room on n06" in fault


def test_what_a_hold_leaves_running_is_found() -> None:
    store = Store(models={"couple": MODELS["couple"]}, held={ModelName("couple"): None})
    books = books_of(a_replica(WELL))
    (fault,) = find_faults_at_rest(store, a_state(books, Engine(WELL)).machines, books, 100.0)
    assert fault == "1 replicas of couple run, and 0 are to"


def test_an_engine_that_nobody_wants_is_found() -> None:
    assert a_rest(Engine(WELL), books=books_of(a_replica(WELL)), models={}) == [
        "shd-couple-1-0 runs on n05, and its model is gone"
    ]


def test_whatever_is_left_without_a_model_is_found() -> None:
    grounds = a_state(None, Engine(WELL)).machines
    assert len([*find_leftovers(grounds, books_of(a_replica(WELL)))]) == 3
    assert [*find_leftovers(a_state(None).machines, books_of())] == []
