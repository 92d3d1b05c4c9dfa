"""The messages between a server and its agents: JSON, tagged, bounded, and versioned.

A desired set is sent whole once and then by what changes; whoever finds that a change does not fit asks for the whole
(``Resync``). Fields that are not known are passed over: a newer peer may send them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, NewType, TypeVar, Union

import msgspec
import msgspec.structs

from llmgw.core.effects import Desire
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import ShardId, ShardReport, ShardSpec
from llmgw.core.weights import NodeWeights, WeightsOrder
from llmgw.errors import LlmgwError

PROTOCOL = 6
# A server is upgraded before its agents: it speaks what they spoke before.
OLDEST = 1
# From here on agents tell what they have applied; know all that a definition of protocol 3 may ask for; and look for
# GPUs and take those that are booked for a shard, and no others. Since 5 they wait for ``ShardSpec.go``, which those
# before pass over: they launch at once, and say so. Since 6 they fetch weights, and are told of others that have them.
TELLS_APPLIED = 2
KNOWS_ALL_KEYS = 3
TELLS_GPUS = 4
FETCHES_WEIGHTS = 6

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# Of names and ids, of any other text (an engine's argument may be a chat template), and of anything counted.
NAME_CHARS = 700
TEXT_CHARS = 256 * 1024
LIST_ITEMS = 8192
# The numbers that every JSON reader keeps exact.
INT_LIMIT = 2**53

# What a person is to read at a glance, and what a device, a fabric or a label is called; agents cut theirs before they
# send it.
WORDS_CHARS = 4000
SHORT_CHARS = 256
ADDRESS_CHARS = 100
# A node is told, and runs, a few; each is looked at one by one.
SHARDS = 1024
# Of an engine, those that there is something to tell of.
FLAGS = 100
# Of a node, and of one of its GPUs: what a machine may have, with room for what is still to be built.
GPUS = 64
FOREIGN_USES = 64
MIG_INSTANCES = 64
FABRICS = 16
LABELS = 64
WARNINGS = 20
# Of a node, and of what it is told of weights.
WEIGHTS = 1024

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[!-~]+\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=INT_LIMIT)]
Said = Annotated[str, msgspec.Meta(max_length=2000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=10**9)]

_Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS)]
_Words = Annotated[str, msgspec.Meta(max_length=WORDS_CHARS)]
_Short = Annotated[str, msgspec.Meta(max_length=SHORT_CHARS)]
_ShortName = Annotated[str, msgspec.Meta(min_length=1, max_length=SHORT_CHARS)]
# What other nodes' engines are told to connect to, as an argument: nothing that could be taken for a flag.
_Address = Annotated[str, msgspec.Meta(max_length=ADDRESS_CHARS, pattern=r"^[0-9A-Za-z\[:][0-9A-Za-z._:%\[\]-]*\Z")]
_Host = Annotated[str, msgspec.Meta(max_length=SHORT_CHARS, pattern=r"^[0-9A-Za-z\[:][0-9A-Za-z._:%\[\]-]*\Z")]

# By field, or by type and field: of a text, or of each in a list or mapping of them. Any other is ``_Text``.
_TEXTS: Mapping[str, Any] = {
    **dict.fromkeys(("id", "node", "shard", "replica"), Name),
    **dict.fromkeys(
        ("cause", "remedy", "progress", "broken", "flag", "given_by", "detail", "down", "warnings", "kept"), _Words
    ),
    **dict.fromkeys(("uuid", "nvlink_peers", "ShardSpec.gpus", "fabric", "FabricFound.name", "hcas"), _ShortName),
    **dict.fromkeys(("gpu_driver", "pci", "shape", "interface", "labels", "Gpu.gpu_class"), _Short),
    **dict.fromkeys(("commit", "Swarm.commit"), _ShortName),
    # (as an argument of a dial: nothing but a host and a port)
    "seed": _Address,
    "Member.fabrics": _ShortName,
    **dict.fromkeys(("Gpu.name", "ForeignUse.name", "Measured.version"), _Short),
    # (what the server makes of an address, with a port, has to pass as well)
    "address": _Address,
    "rendezvous": _Host,
}
_LENGTHS: Mapping[str, int] = {
    **dict.fromkeys(("running", "shards", "put", "drop"), SHARDS),
    "flags": FLAGS,
    "gpus": GPUS,
    "nvlink_peers": GPUS,
    "mig": MIG_INSTANCES,
    "foreign": FOREIGN_USES,
    "fabrics": FABRICS,
    "hcas": GPUS,
    "labels": LABELS,
    "warnings": WARNINGS,
    **dict.fromkeys(("cached", "fetches", "seen", "swarms", "members", "pulls", "items", "kept"), WEIGHTS),
}
# What can be so: a try's number is counted on from here, and sizes are added up and shown.
_RANGES: Mapping[str, tuple[int, int]] = {
    "epoch": (0, 2**40),
    "cores": (0, 100_000),
    **dict.fromkeys(("memory_gb", "memory_available_gb", "memory_used_gb", "memory_foreign_gb"), (0, 10**7)),
    **dict.fromkeys(("load_seconds", "gpu_gb"), (0, 10**7)),
    **dict.fromkeys(("free_gb", "total_gb"), (0, 10**9)),
    **dict.fromkeys(
        ("done_bytes", "total_bytes", "origin_bytes", "peer_bytes", "size_bytes", "freed_bytes"), (0, INT_LIMIT)
    ),
    **dict.fromkeys(("rate", "left_seconds", "stalled_seconds", "fetched_at"), (0, 10**15)),
    **dict.fromkeys(("number", "pull"), (0, INT_LIMIT)),
    **dict.fromkeys(("gpu_memory_gb", "min_memory_gb", "min_disk_gb"), (0, 10**9)),
    **dict.fromkeys(("tp", "pp", "count"), (1, 10**6)),
    **dict.fromkeys(("rank", "min", "max"), (0, 10**6)),
    "port": (0, 65535),
    "cache_used": (0, 1),
    "flags_ok": (0, 100_000),
    "index": (0, 100_000),
    "temperature_c": (-1000, 10_000),
    "utilization_percent": (0, 1000),
    "ecc_errors": (0, INT_LIMIT),
    # a clock may be wrong by years, which is for others to find odd
    "clock": (0, 10**12),
    "nodes": (1, SHARDS),
    **dict.fromkeys(("prompt", "completion", "cached"), (0, 10**9)),
}


class WireError(LlmgwError):
    """A message that breaks the protocol: which field, and how."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """An agent's first word. ``run`` is random per process, ``dial`` counts its dials from 1."""

    protocol: int
    node: Name
    run: Word
    dial: Annotated[int, msgspec.Meta(ge=1, le=INT_LIMIT)]
    version: Word


class Register(msgspec.Struct, frozen=True, kw_only=True, tag="register"):
    """All that the agent knows of itself; of shards that have ended, those whose end the server may not know."""

    node: Node
    running: tuple[tuple[ShardSpec, ShardReport], ...]


class NodeWord(msgspec.Struct, frozen=True, kw_only=True, tag="node"):
    """What the node has now: every few seconds, and the sign that the agent lives. ``applied``: the revision of the
    last desired set it took; None before the first, and of an agent that speaks protocol 1, which does not tell."""

    node: Node
    applied: Count | None


class ShardWord(msgspec.Struct, frozen=True, kw_only=True, tag="shard"):
    """How one shard is."""

    report: ShardReport


class WeightsWord(msgspec.Struct, frozen=True, kw_only=True, tag="weights"):
    """Which weights the node has and fetches: all of it, whenever that changes."""

    weights: NodeWeights


class Resync(msgspec.Struct, frozen=True, kw_only=True, tag="resync"):
    """The last change did not fit what the agent has: it needs the whole set."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The agent may register. ``session`` is what its trunks have to present.

    ``replace_after_seconds`` after its lease is over, the server places anew what runs there; None from one that does
    not say.
    """

    protocol: int
    session: Word
    lease_seconds: Seconds
    replace_after_seconds: Seconds | None = None


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The agent is told no, and the link is closed.

    Codes: protocol, connected, replaced, revoked, stopping, violation.
    """

    code: Word
    reason: Said


class Desired(msgspec.Struct, frozen=True, kw_only=True, tag="desired"):
    """The whole set that is to run."""

    revision: Count
    shards: tuple[ShardSpec, ...]


class DesiredDelta(msgspec.Struct, frozen=True, kw_only=True, tag="change"):
    """What differs from the set of revision ``base``."""

    revision: Count
    base: Count
    put: tuple[ShardSpec, ...]
    drop: tuple[ShardId, ...]


class OrderWord(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """All that the agent is told of weights, in place of what it was told before; not to one before protocol 6."""

    order: WeightsOrder


class Goaway(msgspec.Struct, frozen=True, kw_only=True, tag="goaway"):
    """The server is about to end this link: the agent goes on with its work and dials anew."""

    reason: Said


class _OldNodeWord(msgspec.Struct, frozen=True, kw_only=True, tag="node"):
    node: Node


AgentMessage = Hello | Register | NodeWord | ShardWord | WeightsWord | Resync
ServerMessage = Welcome | Refused | Desired | DesiredDelta | OrderWord | Goaway
_OldAgentMessage = Hello | Register | _OldNodeWord | ShardWord | Resync
M = TypeVar("M")
T = TypeVar("T")


# -- bounds: the same at both ends, so that nothing is sent that the other end refuses for ever


# (made here out of what is found, which no type checker could follow)
_Union: Any = Union
_Tuple: Any = tuple
_List: Any = list
_Dict: Any = dict


def _bound(kind: Any, field: str, known: dict[Any, Any]) -> Any:
    """The type of those values of ``kind`` that may be sent in ``field``, as ``Gpu.uuid``.

    Facts become structs that only a decoder ever sees: it compares in C what would take Python longer than all the
    rest of a report. ``known`` are those that there are already.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    inner = [_bound(part, field, known) for part in parts if part is not Ellipsis] if origin is not Annotated else []
    most = msgspec.Meta(max_length=_look_up(_LENGTHS, field, LIST_ITEMS))
    found: Any = kind
    if isinstance(kind, NewType):
        found = _bound(kind.__supertype__, field, known)
    elif kind is str:
        found = _look_up(_TEXTS, field, _Text)
    elif kind in (int, float):
        low, high = _look_up(_RANGES, field, (-INT_LIMIT, INT_LIMIT) if kind is int else (None, None))
        found = Annotated[kind, msgspec.Meta(ge=low, le=high)]
    elif origin in (Union, types.UnionType):
        found = _Union[tuple(inner)]
    elif origin is tuple and Ellipsis not in parts:
        found = _Tuple[tuple(inner)]
    elif origin in (tuple, frozenset):
        found = Annotated[_List[inner[0]], most]
    elif origin is Mapping:
        found = Annotated[_Dict[tuple(inner)], most]
    elif dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__"):
        found = known[kind] = known.get(kind) or _bound_fields(kind, known)
    return found


def _bound_fields(kind: Any, known: dict[Any, Any]) -> type:
    hints = typing.get_type_hints(kind, include_extras=True)
    # What is missing is missed by who reads the message itself.
    fields: list[tuple[str, Any, Any]] = [
        (name, _bound(hint, f"{kind.__name__}.{name}", known), None) for name, hint in hints.items() if name[0] != "_"
    ]
    tag = kind.__struct_config__.tag if hasattr(kind, "__struct_config__") else None
    return msgspec.defstruct(kind.__name__, fields, kw_only=True, gc=False, tag=tag)


def _look_up(table: Mapping[str, T], field: str, otherwise: T) -> T:
    return table.get(field, table.get(field.partition(".")[2], otherwise))


_known: dict[Any, Any] = {}


_ENCODE = msgspec.json.Encoder().encode
_FROM_AGENT: msgspec.json.Decoder[AgentMessage] = msgspec.json.Decoder(AgentMessage)
_FROM_OLD_AGENT: msgspec.json.Decoder[_OldAgentMessage] = msgspec.json.Decoder(_OldAgentMessage)
_FROM_SERVER: msgspec.json.Decoder[ServerMessage] = msgspec.json.Decoder(ServerMessage)
_BOUNDS_OF_AGENT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_bound(AgentMessage, "", _known))
_BOUNDS_OF_SERVER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_bound(ServerMessage, "", _known))


# -- there and back


def refuse_protocol(theirs: int) -> str | None:
    """Why a server can't speak with an agent of protocol ``theirs``, and what to do; None when it can."""
    if OLDEST <= theirs <= PROTOCOL:
        return None
    older = "server" if theirs > PROTOCOL else "agent"
    return f"the agent speaks protocol {theirs}, the server {OLDEST} to {PROTOCOL}: upgrade the {older}"


def encode(message: AgentMessage | ServerMessage) -> bytes:
    """The message as it goes out. Raises WireError for one that the other end would refuse.

    A float that is no number goes out as null, which is refused where there has to be one.
    """
    what = type(message).__name__
    try:
        data = _ENCODE(message)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise WireError(f"{what}: can't be written: {_clip(error)}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"{what}: {len(data)} bytes; a message may have {MAX_MESSAGE_BYTES}")
    try:
        (_BOUNDS_OF_SERVER if isinstance(message, ServerMessage) else _BOUNDS_OF_AGENT).decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"{what}: {_clip(error)}") from error
    return data


def decode_from_agent(data: bytes, protocol: int) -> AgentMessage:
    """What an agent of ``protocol`` said; ``Hello`` reads the same in all. Raises WireError, and nothing else."""
    if protocol >= FETCHES_WEIGHTS:
        return _decode(_FROM_AGENT, _BOUNDS_OF_AGENT, data)
    message: AgentMessage | _OldNodeWord
    if protocol >= TELLS_APPLIED:
        message = _decode(_FROM_AGENT, _BOUNDS_OF_AGENT, data)
    else:
        message = _decode(_FROM_OLD_AGENT, _BOUNDS_OF_AGENT, data)
    match message:
        case _OldNodeWord():
            return NodeWord(node=_know_less(message.node, protocol), applied=None)
        case NodeWord() | Register():
            return msgspec.structs.replace(message, node=_know_less(message.node, protocol))
        case _:
            return message


def _know_less(node: Node, protocol: int) -> Node:
    """The node as an agent of ``protocol`` can know it, whatever it sends."""
    if protocol >= TELLS_GPUS:
        return dataclasses.replace(node, fetches=False)
    return dataclasses.replace(node, gpus=None, fabrics=(), fetches=False, outdated=protocol < KNOWS_ALL_KEYS)


def decode_from_server(data: bytes) -> ServerMessage:
    """What the server said. Raises WireError, and nothing else."""
    return _decode(_FROM_SERVER, _BOUNDS_OF_SERVER, data)


def _decode(decoder: msgspec.json.Decoder[M], bounds: msgspec.json.Decoder[Any], data: bytes) -> M:
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes; it may have {MAX_MESSAGE_BYTES}")
    try:
        bounds.decode(data)
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise WireError(f"a message that can't be read: {_clip(error)}") from error


def _clip(error: BaseException) -> str:
    """What it says, safe for a log: a message may quote what the peer sent."""
    text = str(error)
    return ascii(text if len(text) <= 300 else text[:300] + "...")[1:-1]


# -- desired sets


def diff(old: Desire | None, new: Desire) -> Desired | DesiredDelta:
    """What to send to an agent that has ``old``; ``patch`` makes exactly ``new`` of it."""
    if old is not None and old.node == new.node and old.revision < new.revision:
        had = {spec.id: spec for spec in old.shards}
        wanted = {spec.id for spec in new.shards}
        change = DesiredDelta(
            revision=new.revision,
            base=old.revision,
            put=tuple(spec for spec in new.shards if had.get(spec.id) != spec),
            drop=tuple(spec.id for spec in old.shards if spec.id not in wanted),
        )
        # Another order, or a shard twice, is nothing that a change can say.
        if patch(old, change, node=new.node) == new:
            return change
    return Desired(revision=new.revision, shards=new.shards)


def patch(have: Desire | None, message: Desired | DesiredDelta, *, node: NodeId) -> Desire | None:
    """The set that ``message`` makes of what the agent ``have``s. None: it does not fit, and the whole is needed."""
    if isinstance(message, Desired):
        return Desire(node=node, revision=message.revision, shards=message.shards)
    if have is None or have.revision != message.base or message.revision <= message.base:
        return None
    shards = {spec.id: spec for spec in have.shards}
    for shard in message.drop:
        if shards.pop(shard, None) is None:
            return None
    shards.update((spec.id, spec) for spec in message.put)
    return Desire(node=node, revision=message.revision, shards=tuple(shards.values()))
