"""What has to hold after every step, each in a function of its own: it yields what is wrong, or nothing.

A new one is a function put at the end of STATE (what may never be so) or MOVES (what may never happen).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations
from typing import Protocol

from llmgw.core.effects import Announce, Desire, Drain, Effect, Happening
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Event,
    NodeLost,
    NodeMarked,
    NodeRegistered,
    NodeRemoved,
    ShardChanged,
)
from llmgw.core.lives import PREPARED_OR_LATER
from llmgw.core.model import ANY_CLASS, ModelName
from llmgw.core.node import Gpu, NodeId
from llmgw.core.replica import Replica, ReplicaId, ShardId, ShardSpec, ShardState, booked_gb_of
from llmgw.core.rolling import defines
from llmgw.core.weights import list_fetched
from simulator.books import ON_ITS_WAY_OUT, Books
from simulator.stage import Ground, Running

# A few replicas, each on node after node that fails at once.
MOST_LAUNCHES = 80

ShardTry = tuple[NodeId, ShardId, int]
Epoch = tuple[ReplicaId, int]


class Reckoner(Protocol):
    """What the fleet would answer now."""

    def wanted(self, name: ModelName) -> int:
        """How many replicas there are to be."""

    def has_room(self, name: ModelName, without: Replica | None = None) -> bool:
        """Whether one more would find its place, once ``without`` is gone."""

    def backing_off(self, name: ModelName) -> Mapping[NodeId, float]:
        """For how many seconds more each node is not tried again."""

    def clock(self) -> float:
        """The server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How everything is: what the fleet says (None while there is no server), what really runs, which nodes the server
    has a link to that has registered, what operators have said of them (times by the wall), and which epochs of
    replicas they have recalled; how many requests each epoch answers, whatever the fleet has heard of that; and what
    the fleet would answer."""

    books: Books | None
    machines: Mapping[NodeId, Ground]
    linked: frozenset[NodeId]
    marks: Mapping[NodeId, NodeMarked] = field(default_factory=dict)
    recalled: Set[Epoch] = frozenset()
    in_flight: Mapping[Epoch, int] = field(default_factory=dict)
    now: float = 0.0
    reckoning: Reckoner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What the fleet did about one event. ``told`` is what each node was to run before; ``known`` is whatever was ever
    to be launched, or said to run; ``braked``: the brake holds, as the simulation counts the nodes that are lost.
    ``drained_at`` is when each epoch began to serve out its last requests, ``demands`` what the fleet was last told of
    each model, and ``evicted`` what makes way already, and for whom. ``left`` are the GPUs that a model has left for
    its next replica, and until when it is waited for; ``begun`` is how many shards of each were launched of late."""

    event: Event
    effects: list[Effect]
    before: Books
    after: Books
    state: State
    told: Mapping[NodeId, Desire]
    known: Set[ShardTry]
    braked: bool
    drained_at: Mapping[Epoch, float] = field(default_factory=dict)
    demands: Mapping[ModelName, Demand] = field(default_factory=dict)
    evicted: Mapping[Epoch, ModelName] = field(default_factory=dict)
    left: Mapping[str, tuple[ModelName, float]] = field(default_factory=dict)
    begun: Mapping[ModelName, int] = field(default_factory=dict)

    def launches(self) -> list[ShardSpec]:
        """The shards that are to be launched now, and were not before."""
        return [
            spec
            for effect in self.effects
            if isinstance(effect, Desire)
            for spec in effect.shards
            if (spec.node, spec.id, spec.epoch) not in self.known
        ]

    def stopped(self) -> list[Replica]:
        """Replicas that answered requests and are not to run any more, by nobody's doing but the fleet's."""
        found: dict[Epoch, Replica] = {}
        for effect in self.effects:
            told = self.told.get(effect.node) if isinstance(effect, Desire) else None
            if told is None or not isinstance(effect, Desire):
                continue
            now = {(spec.id, spec.epoch) for spec in effect.shards}
            for spec in told.shards:
                replica = self.before.find(spec.replica, spec.epoch)
                if (spec.id, spec.epoch) not in now and replica is not None and self._answers(replica):
                    found[spec.replica, spec.epoch] = replica
        return [*found.values()]

    def retired(self) -> list[Replica]:
        """Those that are to stop, by nobody's doing but the fleet's, and answer nobody new."""
        drained = [self.before.find(each.replica, each.epoch) for each in self.effects if isinstance(each, Drain)]
        return [*(replica for replica in drained if replica is not None and self._answers(replica)), *self.stopped()]

    def _answers(self, replica: Replica) -> bool:
        """Its state is not the fleet's doing where it fell over, or a node of it did."""
        event = self.event
        match event:
            case ShardChanged(report=report) if (report.replica, report.epoch) == (replica.id, replica.epoch):
                return report.state is ShardState.READY
            case NodeRegistered(node=node) if node.id in replica.nodes:
                return False
            case NodeRemoved(node=name) | NodeLost(node=name) if name in replica.nodes:
                return False
        well = replica.state is ShardState.READY
        return well and not self.before.is_fenced(replica) and not self.after.is_fenced(replica)

    def is_late(self, replica: Replica) -> bool:
        """The deadline of a drain of its node has come."""
        marks = (self.state.marks.get(node) for node in replica.nodes)
        limits = (mark.drain_until for mark in marks if mark is not None and mark.draining)
        return any(limit is not None and limit <= self.state.now + 1e-3 for limit in limits)

    def evictions(self) -> list[tuple[Replica, ModelName]]:
        """Whatever makes way from now on, and for whom."""
        told = (each for each in self.effects if isinstance(each, Announce) and each.what is Happening.EVICTED)
        found = []
        for each in told:
            name, asker = each.text.split(" ", 1)[0], each.text.rsplit(" ", 1)[1]
            victims = [r for r in self.before.replicas if r.id == name and r.state not in ON_ITS_WAY_OUT]
            found += [(victim, ModelName(asker)) for victim in victims]
        return found


# -- what may never be so


def no_gpu_is_booked_twice(state: State) -> Iterator[str]:
    if state.books is None:
        return
    holders: dict[str, str] = {}
    for replica, spec in state.books.alive_shards():
        for gpu in spec.gpus or ():
            name = f"{replica.id} (epoch {replica.epoch})"
            if gpu in holders:
                yield f"{gpu} is booked for {holders[gpu]} and for {name}"
            holders[gpu] = name


def no_gpu_is_used_twice(state: State) -> Iterator[str]:
    """Whatever the books say: also by one that is told to stop, or that nobody knows of any more."""
    for machine in state.machines.values():
        users: dict[str, Running] = {}
        for process in machine.alive():
            for gpu in process.spec.gpus or ():
                earlier = users.setdefault(gpu, process)
                if earlier is not process:
                    yield f"{gpu} is used by {_name(earlier)} and by {_name(process)}"


def nothing_runs_without_its_weights(state: State) -> Iterator[str]:
    """What is fetched is whole on that node before an engine is launched by it."""
    for machine in state.machines.values():
        for process in machine.alive():
            for source in list_fetched([process.spec.model]):
                if not machine.has(source):
                    yield f"{_name(process)} runs on {machine.id} without {source}"


def every_booking_has_its_cause(state: State) -> Iterator[str]:
    """Each GPU and each GB belongs to a life that is alive, on its way out, or about to be followed by another; and
    each life has what it takes."""
    if state.books is None:
        return
    gpus: dict[NodeId, dict[str, ReplicaId]] = {node: {} for node in state.books.hosts}
    memory_gb: Counter[NodeId] = Counter()
    alive = [s for each in state.books.replicas for s in each.shards if s.state is not ShardState.ENDED]
    kept = [shard for shards in state.books.reserved.values() for shard in shards]
    for shard in (*kept, *alive):
        spec = shard.spec
        if spec.node in gpus:
            gpus[spec.node] |= dict.fromkeys(spec.gpus or (), spec.replica)
            memory_gb[spec.node] += booked_gb_of(shard)  # type: ignore[assignment]
    for node, host in state.books.hosts.items():
        if dict(host.booked) != gpus[node]:
            yield f"{node} has {dict(host.booked)} booked, and there is cause for {gpus[node]}"
        if abs(host.booked_gb - memory_gb[node]) > 1e-6:
            yield f"{node} has {host.booked_gb:g} GB booked, and there is cause for {memory_gb[node]:g} GB"


def no_node_is_booked_beyond_its_memory(state: State) -> Iterator[str]:
    """By what its profiles ask for: nobody knew before what else they would take."""
    if state.books is None:
        return
    asked_gb: dict[NodeId, float] = {}
    for _, spec in state.books.alive_shards():
        asked_gb[spec.node] = asked_gb.get(spec.node, 0.0) + (spec.profile.min_memory_gb or 0.0)
    for node, host in state.books.hosts.items():
        if asked_gb.get(node, 0.0) > host.node.memory_gb:
            yield f"{node} has {host.node.memory_gb:g} GB, and {asked_gb[node]:g} GB of it are booked"


def no_replica_spans_fabrics(state: State) -> Iterator[str]:
    if state.books is None:
        return
    for replica in state.books.replicas:
        if len(replica.shards) == 1 and replica.shard.count == 1:
            continue
        if len(set(replica.nodes)) < len(replica.nodes):
            yield f"{replica.id} (epoch {replica.epoch}) has two shards on one node: {', '.join(replica.nodes)}"
        fabrics = {shard.spec.fabric for shard in replica.shards}
        if len(fabrics) > 1 or None in fabrics:
            yield f"{replica.id} (epoch {replica.epoch}) meets over {fabrics}"
            continue
        for shard in replica.shards:
            real = state.machines[shard.spec.node].shape.fabric
            if real != shard.spec.fabric:
                yield f"{replica.id} meets over {shard.spec.fabric}, and {shard.spec.node} is on {real}"


def every_shard_is_as_wide_as_its_profile(state: State) -> Iterator[str]:
    if state.books is None:
        return
    for replica, spec in state.books.alive_shards():
        wide = spec.profile.gpus_per_node
        if len(spec.gpus or ()) != wide or spec.count != spec.profile.nodes:
            yield (
                f"{replica.id} (epoch {replica.epoch}) has {len(spec.gpus or ())} GPUs on {spec.node}, as one of "
                f"{spec.count}; its profile asks for {wide}, as one of {spec.profile.nodes}"
            )
        strangers = [gpu for gpu in spec.gpus or () if gpu not in state.machines[spec.node].gpu_names()]
        if strangers:
            yield f"{replica.id} is to use {', '.join(strangers)}, which {spec.node} does not have"


def one_epoch_is_alive(state: State) -> Iterator[str]:
    """Those that are fenced don't count, nor those that were told to end."""
    if state.books is None:
        return
    alive: dict[ReplicaId, int] = {}
    for replica in state.books.replicas:
        if replica.state in ON_ITS_WAY_OUT or state.books.is_fenced(replica):
            continue
        earlier = alive.setdefault(replica.id, replica.epoch)
        if earlier != replica.epoch:
            yield f"epochs {earlier} and {replica.epoch} of {replica.id} are alive"


def one_epoch_is_routable(state: State) -> Iterator[str]:
    if state.books is None:
        return
    for name, replicas in state.books.ready.items():
        seen: set[ReplicaId] = set()
        for replica in replicas:
            if replica.id in seen:
                yield f"requests for {name} go to two epochs of {replica.id}"
            seen.add(replica.id)


def no_request_goes_where_nobody_answers(state: State) -> Iterator[str]:
    """Not to a lost node, not to half of a group, not to what is on its way out."""
    if state.books is None:
        return
    for replicas in state.books.ready.values():
        for replica in replicas:
            if state.books.is_fenced(replica):
                yield f"requests go to {replica.id} (epoch {replica.epoch}), and one of its nodes is lost"
            ready = sum(shard.state is ShardState.READY for shard in replica.shards)
            if ready < replica.shard.count:
                yield f"requests go to {replica.id}, and {ready} of its {replica.shard.count} shards are ready"
            if replica.endpoint is None:
                yield f"requests go to {replica.id}, which says not where"


def no_more_run_than_may(state: State) -> Iterator[str]:
    """One more while another takes a place, and none of what is held; what is fenced does not count, nor what is on
    its way out."""
    if state.books is None:
        return
    if state.books.busy:
        # (it has not had its turn yet)
        return
    wanted: dict[str, list[Replica]] = {}
    for replica in state.books.replicas:
        gone = replica.state in ON_ITS_WAY_OUT or replica.draining is not None or state.books.is_fenced(replica)
        if not gone:
            wanted.setdefault(replica.model, []).append(replica)
    for name, replicas in wanted.items():
        model = state.books.models.get(name)
        if model is not None:
            moving = any(_is_moving(state, state.books, replica) for replica in replicas)
            most = 0 if name in state.books.held else max(model.scaling.max, 0)
            if len(replicas) > most + (moving and most > 0):
                which = ", ".join(f"{each.id} ({each.state})" for each in replicas)
                yield f"{len(replicas)} replicas of {name} are to run ({which}), and {most} may"


def _is_moving(state: State, books: Books, replica: Replica) -> bool:
    """Another is to take its place, and may run beside it."""
    launched = books.launched.get(replica.model)
    marks = (state.marks.get(node) for node in replica.nodes)
    return (
        launched is None
        or not defines(launched, replica.shard)
        or (replica.id, replica.epoch) in state.recalled
        or any(mark is not None and mark.draining for mark in marks)
    )


def what_runs_on_a_linked_node_is_in_the_books(state: State) -> Iterator[str]:
    """An engine that the server does not know of would run for ever, on GPUs that it gives away."""
    if state.books is None:
        return
    known = {(spec.node, spec.id, spec.epoch) for _, spec in state.books.alive_shards()}
    for node in state.linked:
        for process in state.machines[node].alive():
            spec = process.spec
            if (node, spec.id, spec.epoch) not in known:
                yield f"{_name(process)} runs on {node}, and the fleet does not know of it"


def one_epoch_of_a_shard_runs_on_a_node(state: State) -> Iterator[str]:
    for machine in state.machines.values():
        running: dict[ShardId, Running] = {}
        for process in machine.alive():
            earlier = running.setdefault(process.spec.id, process)
            if earlier is not process:
                yield f"{_name(earlier)} and {_name(process)} run on {machine.id} at once"


STATE: tuple[Callable[[State], Iterator[str]], ...] = (
    no_gpu_is_booked_twice,
    no_gpu_is_used_twice,
    every_booking_has_its_cause,
    no_node_is_booked_beyond_its_memory,
    no_replica_spans_fabrics,
    every_shard_is_as_wide_as_its_profile,
    one_epoch_is_alive,
    one_epoch_is_routable,
    no_request_goes_where_nobody_answers,
    no_more_run_than_may,
    what_runs_on_a_linked_node_is_in_the_books,
    one_epoch_of_a_shard_runs_on_a_node,
    nothing_runs_without_its_weights,
)


# -- what may never happen


def nothing_is_launched_where_it_may_not(move: Move) -> Iterator[str]:
    """Not on a node that is silent, lost or cordoned, nor on one without the labels."""
    for spec in move.launches():
        if spec.node not in move.state.linked:
            yield f"{spec.id} is to run on {spec.node}, which is not there"
        mark = move.state.marks.get(spec.node)
        if mark is not None and mark.cordoned:
            yield f"{spec.id} is to run on {spec.node}, which is cordoned"
        labels = {**move.state.machines[spec.node].shape.labels, **(mark.labels if mark is not None else {})}
        if not spec.profile.labels.items() <= labels.items():
            yield f"{spec.id} is to run on {spec.node}, whose labels are {labels}"


def nothing_is_launched_on_gpus_that_do_not_do(move: Move) -> Iterator[str]:
    """All of one class, the profile's; none of them broken; and with the memory that is asked for, less what somebody
    else holds."""
    classes: dict[ReplicaId, set[str]] = {}
    for spec in move.launches():
        host = move.after.hosts.get(spec.node)
        gpus = [gpu for gpu in (host.node.gpus or () if host else ()) if gpu.uuid in (spec.gpus or ())]
        kinds = classes.setdefault(spec.replica, set())
        kinds |= {gpu.gpu_class for gpu in gpus}
        if len(kinds) > 1 or (spec.profile.gpu_class not in (None, ANY_CLASS) and kinds - {spec.profile.gpu_class}):
            yield f"{spec.id} is to run on GPUs of class {', '.join(sorted(kinds))}"
        for gpu in gpus:
            if gpu.broken is not None or gpu.mig is not None:
                yield f"{spec.id} is to run on {gpu.uuid}, which takes nothing"
            if _free_gb(gpu) + 1e-6 < (spec.profile.gpu_memory_gb or 0.9 * gpu.memory_gb):
                yield f"{spec.id} is to run on {gpu.uuid}, of which {_free_gb(gpu):g} GB are free"


def groups_are_launched_whole(move: Move) -> Iterator[str]:
    found: dict[tuple[ReplicaId, int], list[ShardSpec]] = {}
    for spec in move.launches():
        found.setdefault((spec.replica, spec.epoch), []).append(spec)
    for (name, epoch), specs in found.items():
        ranks = sorted(spec.rank for spec in specs)
        if ranks != list(range(specs[0].count)):
            yield f"{name} (epoch {epoch}) is launched with ranks {ranks} of {specs[0].count}"
        ordered = [spec.node for spec in sorted(specs, key=lambda each: each.rank)]
        if ordered != sorted(ordered):
            yield f"{name} (epoch {epoch}) has its ranks on {', '.join(ordered)}: not in the order of the nodes"
        if len({spec.rendezvous for spec in specs}) > 1 or (len(specs) > 1 and specs[0].rendezvous is None):
            yield f"the shards of {name} (epoch {epoch}) don't meet at one place"


def no_epoch_is_given_twice(move: Move) -> Iterator[str]:
    """A launch has a higher epoch than whatever the books had of that replica."""
    for spec in move.launches():
        for replica in move.before.replicas:
            if replica.id == spec.replica and replica.epoch >= spec.epoch:
                yield f"{spec.id} is launched with epoch {spec.epoch}, and there was {replica.epoch}"


def the_brake_stops_and_moves_nothing(move: Move) -> Iterator[str]:
    """Of what can't be reached; what an operator asks for is done, and what ended by itself has ended."""
    if not move.braked or isinstance(move.event, CatalogChanged | NodeRegistered | NodeRemoved | ShardChanged):
        return
    for effect in move.effects:
        if isinstance(effect, Desire):
            now = {(spec.id, spec.epoch) for spec in effect.shards}
            told = move.told[effect.node].shards if effect.node in move.told else ()
            mark = move.state.marks.get(effect.node)
            if mark is not None and mark.draining:
                # (an operator wants that)
                continue
            gone = [spec for spec in told if (spec.id, spec.epoch) not in now and _is_unreachable(move.before, spec)]
            if gone:
                yield f"{', '.join(spec.id for spec in gone)} is to stop on {effect.node} while the brake holds"
    fenced = {
        replica.id: replica.epoch
        for replica in move.before.replicas
        if replica.state not in ON_ITS_WAY_OUT and move.before.is_fenced(replica)
    }
    for spec in move.launches():
        # (what took its place before the brake held, and failed, may be tried again)
        if fenced.get(spec.replica) == spec.epoch - 1:
            yield f"{spec.replica} is placed anew on {spec.node} while the brake holds"


def _is_unreachable(books: Books, spec: ShardSpec) -> bool:
    replica = books.find(spec.replica, spec.epoch)
    # (one that served out its last requests before was to stop already)
    return replica is not None and replica.draining is None and books.is_fenced(replica)


def what_is_desired_is_well_formed(move: Move) -> Iterator[str]:
    """A node is told of its own shards, of each once, and by revisions that grow."""
    for effect in move.effects:
        if not isinstance(effect, Desire):
            continue
        if len({spec.id for spec in effect.shards}) < len(effect.shards):
            yield f"{effect.node} is to run a shard twice"
        if any(spec.node != effect.node for spec in effect.shards):
            yield f"{effect.node} is to run another node's shard"
        told = move.told.get(effect.node)
        if told is not None and told.revision >= effect.revision:
            yield f"{effect.node} is told revision {effect.revision} after {told.revision}"


def groups_of_ranks_are_joined_where_they_can_be(move: Move) -> Iterator[str]:
    """A group that straddles bridges answers at a fraction of the speed of one that does not, and nothing says so."""
    for spec in move.launches():
        host = move.after.hosts.get(spec.node)
        chosen = spec.gpus or ()
        if host is None or len(chosen) != spec.profile.tp or len(chosen) < 2:
            continue
        gpus = {gpu.uuid: gpu for gpu in host.node.gpus or ()}
        if _is_joined(gpus, chosen):
            continue
        wants_gb = spec.profile.gpu_memory_gb
        might = [gpu.uuid for gpu in host.free if _free_gb(gpu) >= (wants_gb or 0.9 * gpu.memory_gb)]
        other = next((few for few in combinations([*chosen, *might], len(chosen)) if _is_joined(gpus, few)), None)
        if other is not None:
            yield f"{spec.id} is to run on {', '.join(chosen)}, while {', '.join(other)} are joined"


def what_answers_is_stopped_after_its_last_request(move: Move) -> Iterator[str]:
    """Or after ten minutes, or at the deadline of its node's drain."""
    for replica in move.stopped():
        if move.is_late(replica):
            continue
        key = (replica.id, replica.epoch)
        name = f"{replica.id} (epoch {replica.epoch})"
        if replica.draining is None:
            yield f"{name} is stopped though it is ready, and its requests were not waited for"
        elif move.state.in_flight.get(key) and move.state.now < move.drained_at.get(key, move.state.now) + 599.9:
            yield f"{name} is stopped, and {move.state.in_flight[key]} requests are in flight there"


def our_own_doing_takes_no_service_down(move: Move) -> Iterator[str]:
    """As many serve after it as did before, or as are to, while there is room for another one; at the deadline of a
    node's drain nobody waits for that."""
    evicted = {victim.id for victim, _ in move.evictions()}
    reckoning = move.state.reckoning
    for replica in move.retired():
        name = replica.model
        if replica.id in evicted or name not in move.after.models or name in move.after.held or reckoning is None:
            continue
        if replica.draining is not None:
            # (that was done before)
            continue
        if move.is_late(replica):
            continue
        well = [each for each in move.before.ready.get(name, ()) if move._answers(each)]
        serve = len(move.after.ready.get(name, ()))
        least = min(len(well), reckoning.wanted(name))
        if serve < least and reckoning.has_room(name):
            yield f"{serve} replicas of {name} serve without {replica.id}, {least} are to, and there is room for more"


def one_after_the_other_goes_in_place(move: Move) -> Iterator[str]:
    """While one that goes so that the next has its room still answers somebody, no other of its model goes."""
    going = {(each.id, each.epoch): each for each in move.before.replicas if _goes_in_place(each)}
    for effect in move.effects:
        if not isinstance(effect, Drain):
            continue
        replica = move.after.find(effect.replica, effect.epoch)
        if replica is None or not _goes_in_place(replica):
            continue
        for each in going.values():
            if each.model == replica.model:
                yield f"{replica.id} goes in place while {each.id} does"
        going[replica.id, replica.epoch] = replica


def _goes_in_place(replica: Replica) -> bool:
    return replica.state is ShardState.READY and "no room for another beside it" in (replica.draining or "")


def only_what_is_idle_makes_way(move: Move) -> Iterator[str]:
    """Of another model that loads on demand, on one node, two minutes after it was loaded, and where its room is
    enough; one after another."""
    reckoning = move.state.reckoning
    for victim, asker in move.evictions():
        name = f"{victim.id} makes way for {asker}"
        launched = move.after.launched.get(victim.model)
        if launched is not None and not launched.scaling.on_demand:
            yield f"{name}, and does not load on demand"
        if victim.model == asker or victim.shard.count > 1:
            yield f"{name}: it is of the same model, or of several nodes"
        told = move.demands.get(victim.model)
        if told is not None and (told.waiting or told.in_flight.get(victim.id)):
            yield f"{name}, and is asked for"
        if reckoning is None:
            continue
        resident = reckoning.clock() - victim.since
        if victim.state is ShardState.READY and resident < 119.9:
            yield f"{name} after {resident:.0f} s"
        if not reckoning.has_room(asker, victim):
            yield f"{name}, and that is not room enough"
        earlier = [each for each, other in move.evicted.items() if other == asker]
        if earlier:
            yield f"{name}, and so does {earlier[0][0]} already"


def nobody_takes_the_place_of_what_is_about_to_begin_anew(move: Move) -> Iterator[str]:
    """A model that is always to run, and that stopped so that its next replica has room, or fell over a moment ago."""
    for spec in move.launches():
        for gpu in spec.gpus or ():
            name, until = move.left.get(gpu, (spec.model.name, 0.0))
            model = move.after.launched.get(name)
            mark = move.state.marks.get(spec.node)
            closed = mark is not None and (mark.cordoned or mark.draining)
            if name == spec.model.name or move.state.now >= until or model is None or closed:
                continue
            few = len(move.after.serving(name)) < model.scaling.min
            if few and name not in move.after.held:
                yield f"{spec.id} is to run on {gpu}, which {name} has just left for its next replica"


def nothing_is_launched_again_and_again(move: Move) -> Iterator[str]:
    """Whatever is the matter, within five minutes: nodes that fail are waited for longer each time."""
    for name, count in move.begun.items():
        if count > MOST_LAUNCHES:
            yield f"{count} shards of {name} were launched within five minutes"


def what_is_held_starts_nothing(move: Move) -> Iterator[str]:
    for spec in move.launches():
        if spec.model.name in move.after.held:
            yield f"{spec.id} is to run, and its model is held"


def groups_begin_together(move: Move) -> Iterator[str]:
    """No shard of several is let go before each of them is prepared."""
    for effect in move.effects:
        for spec in effect.shards if isinstance(effect, Desire) else ():
            before = move.told.get(spec.node)
            old = next((s for s in before.shards if (s.id, s.epoch) == (spec.id, spec.epoch)), None) if before else None
            if spec.count == 1 or not spec.go or (old is not None and old.go) or _says_it_went(move.event, spec):
                continue
            replica = move.after.find(spec.replica, spec.epoch)
            states = [shard.state for shard in replica.shards] if replica is not None else []
            if len(states) < spec.count or any(state not in PREPARED_OR_LATER for state in states):
                yield f"{spec.id} is let go while its group is {', '.join(states)}"


def _says_it_went(event: Event, spec: ShardSpec) -> bool:
    if not isinstance(event, NodeRegistered):
        return False
    return any((each.id, each.epoch, each.go) == (spec.id, spec.epoch, True) for each, _ in event.running)


MOVES: tuple[Callable[[Move], Iterator[str]], ...] = (
    nothing_is_launched_where_it_may_not,
    nothing_is_launched_on_gpus_that_do_not_do,
    groups_are_launched_whole,
    no_epoch_is_given_twice,
    the_brake_stops_and_moves_nothing,
    what_is_desired_is_well_formed,
    groups_of_ranks_are_joined_where_they_can_be,
    what_answers_is_stopped_after_its_last_request,
    our_own_doing_takes_no_service_down,
    one_after_the_other_goes_in_place,
    only_what_is_idle_makes_way,
    nobody_takes_the_place_of_what_is_about_to_begin_anew,
    nothing_is_launched_again_and_again,
    what_is_held_starts_nothing,
    groups_begin_together,
)


def _free_gb(gpu: Gpu) -> float:
    return gpu.memory_gb - sum(foreign.memory_gb for foreign in gpu.foreign)


def _is_joined(gpus: Mapping[str, Gpu], names: Sequence[str]) -> bool:
    return all(other in (gpus[name].nvlink_peers or ()) for name in names for other in names if other != name)


def _name(process: Running) -> str:
    return f"{process.spec.id} epoch {process.spec.epoch} (pid {process.pid})"
