"""What the operator port answers: facts at one moment, as plain values. Whoever implements Management fills them in.

A fact that is not known is None here and absent in JSON. Sizes are in GB of 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from llmgw.core.learned import Figure
from llmgw.core.model import Model
from llmgw.core.node import Disk, EngineFound, FabricFound, ForeignUse, MigInstance
from llmgw.core.placement import Explanation
from llmgw.core.rejection import Rejection
from llmgw.core.weights import Fetch
from llmgw.dialects.toolcheck import Report


class NodeState(StrEnum):
    """How a node stands: ``silent`` has lost its link and has its lease to come back, ``lost`` had it. ``unseen`` has
    never been here, and an operator has marked it."""

    READY = "ready"
    JOINING = "joining"
    SILENT = "silent"
    LOST = "lost"
    UNSEEN = "unseen"


class ModelStatus(StrEnum):
    """How a model stands.

    ``waiting``: no node can run it now, whatever has become of its last try. ``unreachable``: it may run, on a node
    that is lost. ``on-demand``: it loads when somebody asks. ``stopped``: it is known, and not to run: by its
    definition, or because an operator holds it.
    """

    READY = "ready"
    LOADING = "loading"
    STOPPING = "stopping"
    FAILED = "failed"
    WAITING = "waiting"
    UNREACHABLE = "unreachable"
    ON_DEMAND = "on-demand"
    STOPPED = "stopped"


class Origin(StrEnum):
    """Where a model's definition is kept: in server.yaml, or in the store."""

    DECLARED = "declared"
    STORED = "stored"


class Outcome(StrEnum):
    """What became of a definition: ``proven`` has served for a while, ``failed`` has not come to serve."""

    PROVEN = "proven"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """A GPU, in the words of ``core.node.Gpu``; ``booked_by`` is the replica that has it, ``kept_for`` the model whose
    next replica it is for (``KeptView``)."""

    uuid: str
    index: int
    gpu_class: str
    name: str
    memory_gb: float
    memory_used_gb: float
    pci: str | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None
    ecc_errors: int | None = None
    nvlink_peers: tuple[str, ...] | None = None
    mig: tuple[MigInstance, ...] | None = None
    foreign: tuple[ForeignUse, ...] | None = None
    broken: str | None = None
    booked_by: str | None = None
    kept_for: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptView:
    """Room of a node that nothing runs in, and that others don't get for a minute at most: a replica of ``model`` has
    left it for the next one, or was stopped to make way for it. ``gpus`` are UUIDs."""

    model: str
    gpus: tuple[str, ...] = ()
    memory_gb: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node and its link. ``version`` is llmgw's own there; ``replicas`` are those that have not ended.

    ``gpus_free`` counts those that no replica has and one could, ``classes`` are those that there are, and
    ``memory_free_gb`` is what a replica could still book. ``labels`` are the node's own with the operator's over
    them. ``heard_before_start``: it has not come since the server started, and was heard so long ago at most.
    ``clock_skew_seconds``: how far its clock is ahead of the server's. ``warnings`` has all that is the matter with
    the machine in words, one line each, without figures that move.

    ``draining``: what runs there goes elsewhere, or waits for room elsewhere until ``drain_seconds_left`` have passed
    (None: for ever); ``drain_waits_for`` says what still keeps it. ``kept`` is what of ``memory_booked_gb`` and of the
    GPUs no replica has at the moment.
    """

    node: str
    state: NodeState
    connected: bool
    cordoned: bool = False
    draining: bool = False
    drain_seconds_left: float | None = None
    drain_waits_for: str | None = None
    labels: Mapping[str, str] | None = None
    gpus: tuple[GpuView, ...] | None = None
    gpus_free: int | None = None
    gpu_driver: str | None = None
    classes: tuple[str, ...] | None = None
    fabrics: tuple[FabricFound, ...] | None = None
    warnings: tuple[str, ...] | None = None
    clock_skew_seconds: float | None = None
    memory_foreign_gb: float | None = None
    peer: str | None = None
    heard_seconds_ago: float | None = None
    heard_before_start: bool | None = None
    protocol: int | None = None
    version: str | None = None
    trunks: int | None = None
    cores: int | None = None
    memory_gb: float | None = None
    memory_available_gb: float | None = None
    memory_free_gb: float | None = None
    memory_booked_gb: float | None = None
    disks: tuple[Disk, ...] | None = None
    engines: tuple[EngineFound, ...] | None = None
    replicas: tuple[str, ...] = ()
    kept: tuple[KeptView, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """One engine process of a replica: where it is and which GPUs (UUIDs) are booked for it. ``cause``, ``kind`` and
    ``lines`` (the engine's last) are of one that ended. ``fetch``: the weights that it waits for."""

    shard: str
    node: str
    rank: int
    state: str
    seconds_in_state: float = 0.0
    gpus: tuple[str, ...] | None = None
    progress: str | None = None
    cause: str | None = None
    kind: str | None = None
    lines: tuple[str, ...] | None = None
    fetch: Fetch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """A replica. ``state`` is that of all its shards together, or ``unreachable`` while a node of it is lost; ``node``
    and ``shard`` are those of rank 0, which answers requests. ``fabric`` is what several nodes of it meet over.

    ``cause``, ``kind``, ``remedy`` and ``lines`` (the engine's last) are of one that failed: its state is ``ended``
    until its next try. ``context_length`` is how many tokens a request may have as the engine says,
    ``context_promised`` as its model does. The counters are the engine's own, since its start.

    ``draining``: why it is to go; it gets no new request, and goes when ``in_flight``, those that it still answers, is
    0. ``fetch``: the weights that it waits for; of several shards those that take the longest.
    """

    replica: str
    model: str
    profile: str
    engine: str
    node: str
    shard: str
    epoch: int
    state: str
    seconds_in_state: float
    draining: str | None = None
    in_flight: int | None = None
    progress: str | None = None
    cause: str | None = None
    kind: str | None = None
    remedy: str | None = None
    lines: tuple[str, ...] | None = None
    context_length: int | None = None
    context_promised: int | None = None
    running: int | None = None
    waiting: int | None = None
    cache_used: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    steps: int | None = None
    fabric: str | None = None
    fetch: Fetch | None = None
    shards: tuple[ShardView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model: ``ready`` of ``wanted`` replicas serve. ``detail`` is how far it is, or what holds it up.

    ``held``: an operator has stopped it. ``rolling``: how far its replicas are on their way to another definition.
    ``failed``: why its definition as it is written is not what runs; the one before goes on. ``fetch``: the weights
    that the replica waits for which will be there first.
    """

    name: str
    status: ModelStatus
    serving: bool
    ready: int
    wanted: int
    origin: Origin
    aliases: tuple[str, ...] = ()
    where: str | None = None
    detail: str | None = None
    held: bool = False
    rolling: str | None = None
    failed: str | None = None
    fetch: Fetch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDetail:
    """One model whole. ``rejections`` are the first few of the last answer, and ``more_rejections`` how many there were
    besides. ``text`` is what was written when it was added, ``added_at`` when (seconds since 1970). That text alone has
    addresses with what opens them: it is what is edited."""

    model: ModelView
    definition: Model
    replicas: tuple[ReplicaView, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    more_rejections: int = 0
    text: str | None = None
    added_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionView:
    """A definition that a model has had. ``number`` counts them from 1 for each model, and ``at`` is when it became the
    current one. ``where`` is its file and line, where it was declared; ``note`` says what brought it, where nobody has
    written it anew. ``outcome`` and ``why`` (of one that failed) are what became of it at ``outcome_at``.

    ``current``: it is the one that is written now; ``serving``: replicas run by it. Times are in seconds since 1970.
    """

    number: int
    at: float
    origin: Origin
    current: bool = False
    serving: bool = False
    outcome: Outcome | None = None
    outcome_at: float | None = None
    why: str | None = None
    where: str | None = None
    note: str | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """The last definitions of a model, the newest first."""

    model: str
    definitions: tuple[DefinitionView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """A model has its definition ``to`` again, which is now kept as number ``number``. ``rolls``: replicas run by
    another one, and are replaced one after the other, of a model that loads ``on_demand`` as far as it is asked for."""

    model: str
    number: int
    to: int
    rolls: bool = False
    on_demand: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What was stopped: a model, which is held at zero until it is loaded again, or a ``replica`` of it, which is
    replaced, but where it is ``idle``: nobody asks for it, and nothing takes its place. ``running`` are the replicas
    that go once their requests are answered; ``already``: it was so before. ``unscaled``: a model that is not to run in
    any case, since its scaling.max is 0."""

    model: str
    replica: str | None = None
    running: tuple[str, ...] = ()
    already: bool = False
    idle: bool = False
    unscaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBegun:
    """A model may run. ``held``: it was stopped until now. ``retried``: its definition had failed, and is tried again.
    ``running`` are the replicas that it has already, ``serving`` those of them that requests may go to; ``wanted``, how
    many it is to have. ``waits``: why nothing of it is on its way now. ``makes_way`` are replicas of other models that
    are about to stop so that it has their room."""

    model: str
    held: bool = False
    retried: bool = False
    running: tuple[str, ...] = ()
    serving: tuple[str, ...] = ()
    wanted: int = 0
    waits: str | None = None
    makes_way: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    """Something that has happened, ``at`` (seconds since 1970): ``what`` in one word, and ``text`` in a sentence.
    ``lines`` are an engine's last. ``number`` counts from 1 since the server's start."""

    number: int
    at: float
    what: str
    text: str
    model: str | None = None
    node: str | None = None
    lines: tuple[str, ...] = ()
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsView:
    """What has happened, the oldest first. ``last``: ask for what comes after this number next, whether or not an event
    of that number is among these. ``missed``: so many had happened in between that are no longer kept. ``began`` is
    when the numbers began (seconds since 1970): at the server's start, which tells it from an earlier one. ``unknown``
    says of each name that was asked for that there is no such model or node now, with one that may be meant."""

    events: tuple[EventView, ...]
    last: int
    began: float
    missed: int = 0
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FactView:
    """What launches of a model by these profiles have shown, on this version of the engine and class of GPU (None: on
    none): the usual seconds from start to ready, and the most memory, in GB of 10^9 bytes, of one GPU and of the
    machine."""

    profiles: tuple[str, ...]
    engine: str
    version: str | None = None
    gpu_class: str | None = None
    load_seconds: float | None = None
    gpu_gb: float | None = None
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsView:
    """All that is known of the launches of a model, the newest last; ``forgotten``: until now."""

    model: str
    facts: tuple[FactView, ...]
    forgotten: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginView:
    """An installed engine plugin. ``origin`` is what brought it, ``binary`` what is looked for on a node's PATH; the
    rest is what it can, in the words of a definition's keys."""

    name: str
    title: str
    binary: str
    tasks: tuple[str, ...]
    cpu: bool
    tp: bool
    pp: bool
    nodes: bool
    loras: bool
    mmproj: bool
    tool_parser: bool
    reasoning_parser: bool
    origin: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A plugin that is installed and can't be used, and why."""

    plugin: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEngines:
    """The binaries that a node would launch, None before it has said so. What is told of one is of before the node's
    last word, where it is not ``ready``."""

    node: str
    state: NodeState
    engines: tuple[EngineFound, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesView:
    """The plugins that this server has, and the binaries that the nodes have for them."""

    plugins: tuple[PluginView, ...]
    left_out: tuple[LeftOut, ...]
    nodes: tuple[NodeEngines, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Concern:
    """Something that an operator should look at: a node, a model or the store, and what is the matter."""

    kind: str
    name: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassView:
    """The GPUs of one class: those that a replica could have now, and all."""

    free: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricView:
    """The nodes of one fabric: those with all their GPUs free, those where the fabric is out of service, and all."""

    whole_free: int
    down: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BrakeView:
    """``lost`` of ``nodes`` nodes went together: nothing is stopped or placed anew for it before they are back, or so
    many seconds. ``who`` are all that are lost now, ``held`` the replicas that wait there."""

    lost: int
    nodes: int
    seconds_left: float
    who: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """Where accounts, models and marks are kept. ``failing``: why it can't be written now."""

    kind: str
    where: str
    size_bytes: int | None = None
    failing: str | None = None


class StoredState(StrEnum):
    """What is known of weights that a node has fetched: ``in use`` by a shard there, ``wanted`` by a model of the
    catalog, or neither."""

    IN_USE = "in use"
    WANTED = "wanted"
    FREE = "can be freed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredView:
    """One commit of a source on a node, ``whole`` or what is left of a fetch that has not ended; or, where ``wrong``
    says why, damaged. ``fetched_at`` is in seconds since 1970 by the node's clock, and ``models`` are those that are
    made of it. ``remedy``: what to do about what is damaged."""

    source: str
    commit: str
    size_bytes: int
    state: StoredState
    fetched_at: float
    whole: bool = True
    models: tuple[str, ...] = ()
    wrong: str | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWeightsView:
    """What a node has said of weights, None before it has said anything: what it has fetched, what it fetches, and
    (``seen``) what else lies in its ``model_dirs``. ``seed``: where other nodes may take pieces from it. ``shared``:
    other machines write to the same folder, ``shared_with`` are those nodes of which that is known. What could be freed
    takes up ``free_bytes``."""

    node: str
    state: NodeState
    stored: tuple[StoredView, ...] | None = None
    fetches: tuple[Fetch, ...] = ()
    free_bytes: int = 0
    seed: str | None = None
    shared: bool = False
    shared_with: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsView:
    """The weights on all nodes, by node."""

    nodes: tuple[NodeWeightsView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCollected:
    """What became of the order to remove ``items`` weights of ``bytes``: ``freed_bytes``, and of each that was
    ``kept`` why. ``why``: it has not answered, or was not asked. ``freed_bytes`` is None where it had begun, and nobody
    knows how far it came."""

    node: str
    items: int
    bytes: int
    freed_bytes: int | None = 0
    kept: tuple[str, ...] = ()
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedView:
    """What was removed, by node; without those where there was nothing."""

    nodes: tuple[NodeCollected, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePull:
    """How far a node is that is to have a source. ``ended``: it is over, and ``fetch`` says how; before that ``fetch``
    is None where the node has not said anything of it yet."""

    node: str
    state: NodeState
    ended: bool = False
    fetch: Fetch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PullView:
    """An order to have the newest commit of a source, by its ``number``."""

    number: int
    source: str
    nodes: tuple[NodePull, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingView:
    """What the nodes of a fabric hold: of how many ``nodes``, on how many of them each model's weights lie, and the
    models that lie on ``none`` of them."""

    nodes: int
    models: Mapping[str, int]
    none: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchingView:
    """A source that is on its way to ``nodes`` nodes, ``stalled`` of them without a byte for a minute: what has come
    to all of them together, of what (None: it is not known yet), and when the last of them will have it."""

    source: str
    nodes: int
    done_bytes: int
    total_bytes: int | None = None
    rate: float | None = None
    left_seconds: float | None = None
    stalled: int = 0
    origin_bytes: int = 0
    peer_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    """The whole in numbers; ``nodes``, ``models`` and ``replicas`` count by state, ``classes`` and ``fabrics`` by
    name. ``holdings`` are by fabric, "" for nodes that are on none, and ``fetching`` by source. ``held_up`` says what
    keeps the fleet from placing anything at all."""

    version: str
    up_seconds: float
    nodes: Mapping[str, int]
    models: Mapping[str, int]
    replicas: Mapping[str, int]
    memory_gb: float
    memory_booked_gb: float
    classes: Mapping[str, ClassView]
    fabrics: Mapping[str, FabricView]
    store: StoreView
    held_up: str | None = None
    brake: BrakeView | None = None
    concerns: tuple[Concern, ...] = ()
    holdings: Mapping[str, HoldingView] = field(default_factory=dict)
    fetching: tuple[FetchingView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedModel:
    """A model that was added. ``replaced``: it had a definition before; ``runs``: it has, or may get, replicas.
    ``rolls``: replicas run by another definition, and are replaced one after the other, of a model that loads
    ``on_demand`` as far as it is asked for. ``held``: an operator has stopped it. ``number`` is that of the definition
    in its history."""

    name: str
    replaced: bool
    runs: bool
    rolls: bool = False
    on_demand: bool = False
    held: bool = False
    number: int | None = None
    not_in_effect: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """A model that was removed. ``declared`` says where the file has it still, when it has."""

    name: str
    declared: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMarks:
    """What an operator has said of a node, as it is kept now: ``labels`` lie over the node's own, those in ``without``
    are taken from it. ``known``: the node has been here; ``close`` is the name of one that was and is much like it.
    ``running``: replicas that a cordoned node keeps, and that leave one which is ``draining``, after
    ``drain_seconds_left`` in any case (None: once there is room elsewhere)."""

    node: str
    cordoned: bool
    labels: Mapping[str, str]
    known: bool
    draining: bool = False
    drain_seconds_left: float | None = None
    without: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    close: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedNode:
    """A node that was removed. ``connected``: its agent is there and will register again. ``known``: it has been here.
    ``running``: replicas that a lost one had, and may still have. ``brake_before`` is the brake where that holds for
    less now, and ``brake`` what is left of it."""

    node: str
    connected: bool
    known: bool = True
    running: tuple[str, ...] = ()
    brake_before: BrakeView | None = None
    brake: BrakeView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionView:
    """A decision of the last hundred (``core.trace.Decision``), by its age."""

    seconds_ago: float
    model: str
    why: str
    replica: str | None = None
    profile: str | None = None
    nodes: tuple[str, ...] = ()
    reasons: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationView:
    """Why a model is where it is, or is nowhere, and what would come of one more replica now.

    ``held_up`` says what keeps the fleet from placing anything at all. ``decisions`` are those about this model. Of one
    that is only written ``what_if`` is true, ``stops`` are the replicas that would make way for it first, ``missing``
    counts those that it would get, and ``places`` those of them that find a place one after the other. ``numbers``
    are those that placement goes by, with where each comes from, and ``evicts`` is the idle replica that would make
    way, or when one will. ``unfilled``: by what was measured there is no place, and the answer is by what is written
    alone, as it is done where nothing of the model serves.
    """

    explanation: Explanation
    wanted: int
    most: int
    what_if: bool = False
    replicas: tuple[ReplicaView, ...] = ()
    stops: tuple[str, ...] = ()
    missing: int = 0
    places: int = 0
    numbers: tuple[Figure, ...] = ()
    unfilled: bool = False
    evicts: str | None = None
    decisions: tuple[DecisionView, ...] = ()
    held_up: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """A configuration that was read again: the keys that changed, and those that need a new start to. ``failed`` are
    models whose definition there has failed before and is as it was: they go on by the one before."""

    file: str
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    failed: tuple[Concern, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsChecked:
    """Whether tool calls work at a model, as one of its replicas showed."""

    model: str
    replica: str
    node: str
    engine: str
    check: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFit:
    """A node where a planned model would fit now: by this engine, on this many of its GPUs (None: it needs none)."""

    node: str
    engine: str
    gpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPlace:
    """One way to run it: on ``tp`` GPUs of this class with ``memory_gb`` free on each, or on none (no class) with so
    much memory of the machine. ``others`` has what speaks against the other nodes that have the class."""

    tp: int
    memory_gb: float
    gpu_class: str | None = None
    fits: tuple[PlanFit, ...] = ()
    others: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """Where a model of these sizes would fit now. ``engines`` are those here that read such weights; ``unseen`` are
    nodes that have not come since the server started."""

    engines: tuple[str, ...]
    places: tuple[PlanPlace, ...] = ()
    unseen: tuple[str, ...] = ()
    held_up: str | None = None


def encode(view: object) -> bytes:
    """A view as JSON, without what is not known."""
    return msgspec.json.encode(_known(msgspec.to_builtins(view)))


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _known(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_known(inner) for inner in value]
    return value
