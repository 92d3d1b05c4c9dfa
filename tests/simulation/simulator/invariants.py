"""What has to hold after every step, each in a function of its own: it yields what is wrong, or nothing.

A new one is a function put at the end of STATE (what may never be so) or MOVES (what may never happen).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations

from llmgw.core.effects import Desire, Effect
from llmgw.core.events import CatalogChanged, Event, NodeMarked, NodeRegistered, NodeRemoved, ShardChanged
from llmgw.core.model import ANY_CLASS
from llmgw.core.node import Gpu, NodeId
from llmgw.core.replica import ReplicaId, ShardId, ShardSpec, ShardState
from simulator.books import ON_ITS_WAY_OUT, Books
from simulator.stage import Ground, Running

ShardTry = tuple[NodeId, ShardId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How everything is: what the fleet says (None while there is no server), what really runs, which nodes the server
    has a link to that has registered, and what operators have said of them."""

    books: Books | None
    machines: Mapping[NodeId, Ground]
    linked: frozenset[NodeId]
    marks: Mapping[NodeId, NodeMarked] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What the fleet did about one event. ``told`` is what each node was to run before; ``known`` is whatever was ever
    to be launched, or said to run; ``braked``: the brake holds, as the simulation counts the nodes that are lost."""

    event: Event
    effects: list[Effect]
    before: Books
    after: Books
    state: State
    told: Mapping[NodeId, Desire]
    known: Set[ShardTry]
    braked: bool

    def launches(self) -> list[ShardSpec]:
        """The shards that are to be launched now, and were not before."""
        return [
            spec
            for effect in self.effects
            if isinstance(effect, Desire)
            for spec in effect.shards
            if (spec.node, spec.id, spec.epoch) not in self.known
        ]


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


def every_booking_has_its_cause(state: State) -> Iterator[str]:
    """Each GPU and each GB belongs to a life that is alive, or on its way out; and each life has what it takes."""
    if state.books is None:
        return
    gpus: dict[NodeId, dict[str, ReplicaId]] = {node: {} for node in state.books.hosts}
    memory_gb: Counter[NodeId] = Counter()
    for replica, spec in state.books.alive_shards():
        if spec.node in gpus:
            gpus[spec.node] |= dict.fromkeys(spec.gpus or (), replica.id)
            memory_gb[spec.node] += spec.profile.min_memory_gb or 0.0  # type: ignore[assignment]
    for node, host in state.books.hosts.items():
        if dict(host.booked) != gpus[node]:
            yield f"{node} has {dict(host.booked)} booked, and there is cause for {gpus[node]}"
        if abs(host.booked_gb - memory_gb[node]) > 1e-6:
            yield f"{node} has {host.booked_gb:g} GB booked, and there is cause for {memory_gb[node]:g} GB"


def no_node_is_booked_beyond_its_memory(state: State) -> Iterator[str]:
    if state.books is not None:
        for node, host in state.books.hosts.items():
            if host.booked_gb > host.node.memory_gb:
                yield f"{node} has {host.node.memory_gb:g} GB, and {host.booked_gb:g} GB of it are booked"


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
    """What is on its way out holds its room, and counts; what is fenced does not."""
    if state.books is None:
        return
    alive = Counter(
        replica.model
        for replica in state.books.replicas
        if replica.state is not ShardState.ENDED and not state.books.is_fenced(replica)
    )
    wanted = Counter(
        replica.model
        for replica in state.books.replicas
        if replica.state not in ON_ITS_WAY_OUT and not state.books.is_fenced(replica)
    )
    for name, count in wanted.items():
        model = state.books.models.get(name)
        if model is not None and count > max(model.scaling.max, 0):
            yield f"{count} replicas of {name} are to run (and {alive[name]} do), and {model.scaling.max} may"


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
    """What an operator asks for is done, and what ended by itself has ended."""
    if not move.braked or isinstance(move.event, CatalogChanged | NodeRegistered | NodeRemoved | ShardChanged):
        return
    for effect in move.effects:
        if isinstance(effect, Desire):
            now = {(spec.id, spec.epoch) for spec in effect.shards}
            told = move.told[effect.node].shards if effect.node in move.told else ()
            gone = [spec for spec in told if (spec.id, spec.epoch) not in now]
            if gone:
                yield f"{', '.join(spec.id for spec in gone)} is to stop on {effect.node} while the brake holds"
    fenced = {
        replica.id: replica.epoch
        for replica in move.before.replicas
        if replica.state is not ShardState.ENDED and move.before.is_fenced(replica)
    }
    for spec in move.launches():
        # (what took its place before the brake held, and failed, may be tried again)
        if fenced.get(spec.replica) == spec.epoch - 1:
            yield f"{spec.replica} is placed anew on {spec.node} while the brake holds"


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


MOVES: tuple[Callable[[Move], Iterator[str]], ...] = (
    nothing_is_launched_where_it_may_not,
    nothing_is_launched_on_gpus_that_do_not_do,
    groups_are_launched_whole,
    no_epoch_is_given_twice,
    the_brake_stops_and_moves_nothing,
    what_is_desired_is_well_formed,
    groups_of_ranks_are_joined_where_they_can_be,
)


def _free_gb(gpu: Gpu) -> float:
    return gpu.memory_gb - sum(foreign.memory_gb for foreign in gpu.foreign)


def _is_joined(gpus: Mapping[str, Gpu], names: Sequence[str]) -> bool:
    return all(other in (gpus[name].nvlink_peers or ()) for name in names for other in names if other != name)


def _name(process: Running) -> str:
    return f"{process.spec.id} epoch {process.spec.epoch} (pid {process.pid})"
