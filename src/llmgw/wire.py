"""The messages between a server and its agents: JSON, tagged, bounded, and versioned.

A desired set is sent whole once and then by what changes; whoever finds that a change does not fit asks for the whole
(``Resync``). Fields that are not known are passed over: a newer peer may send them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, cast

import msgspec
import msgspec.structs

from llmgw.core.effects import Desire
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import ShardId, ShardReport, ShardSpec
from llmgw.errors import LlmgwError

PROTOCOL = 3
# A server is upgraded before its agents: it speaks what they spoke before.
OLDEST = 1
# From here on agents tell what they have applied; and know all that a definition may ask for.
TELLS_APPLIED = 2
KNOWS_ALL_KEYS = 3

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# Of names and ids, of any other text (an engine's argument may be a chat template), and of anything counted.
NAME_CHARS = 700
TEXT_CHARS = 256 * 1024
LIST_ITEMS = 8192
# The numbers that every JSON reader keeps exact.
INT_LIMIT = 2**53

# What a person is to read at a glance; agents cut theirs before they send it.
WORDS_CHARS = 4000
# A node is told, and runs, a few; each is looked at one by one.
SHARDS = 1024
# Of an engine, those that there is something to tell of.
FLAGS = 100

_NAME_FIELDS = frozenset({"id", "node", "shard", "replica"})
_WORDS_FIELDS = frozenset({"cause", "remedy", "progress", "broken", "flag", "given_by", "detail"})
_LENGTHS = {"running": SHARDS, "shards": SHARDS, "put": SHARDS, "drop": SHARDS, "flags": FLAGS}
# What can be so: a try's number is counted on from here, and sizes are added up and shown.
_RANGES: dict[str, tuple[float, float]] = {
    "epoch": (0, 2**40),
    "cores": (0, 1e5),
    "memory_gb": (0, 1e7),
    "memory_available_gb": (0, 1e7),
    "free_gb": (0, 1e9),
    "total_gb": (0, 1e9),
    "port": (0, 65535),
    "cache_used": (0, 1),
    "flags_ok": (0, 1e5),
}

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Said = Annotated[str, msgspec.Meta(max_length=2000)]


class WireError(LlmgwError):
    """A message that breaks the protocol: which field, and how."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """An agent's first word. ``run`` is random per process, ``dial`` counts its dials from 1."""

    protocol: int
    node: Name
    run: Word
    dial: Annotated[int, msgspec.Meta(ge=1)]
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


class Resync(msgspec.Struct, frozen=True, kw_only=True, tag="resync"):
    """The last change did not fit what the agent has: it needs the whole set."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The agent may register. ``session`` is what its trunks have to present."""

    protocol: int
    session: Word
    lease_seconds: Annotated[float, msgspec.Meta(gt=0)]


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


class Goaway(msgspec.Struct, frozen=True, kw_only=True, tag="goaway"):
    """The server is about to end this link: the agent goes on with its work and dials anew."""

    reason: Said


class _OldNodeWord(msgspec.Struct, frozen=True, kw_only=True, tag="node"):
    node: Node


AgentMessage = Hello | Register | NodeWord | ShardWord | Resync
ServerMessage = Welcome | Refused | Desired | DesiredDelta | Goaway
M = TypeVar("M")

_ENCODE = msgspec.json.Encoder().encode
_FROM_AGENT = msgspec.json.Decoder(AgentMessage)
_OldAgentMessage = Hello | Register | _OldNodeWord | ShardWord | Resync
_FROM_OLD_AGENT: msgspec.json.Decoder[_OldAgentMessage] = msgspec.json.Decoder(_OldAgentMessage)
_FROM_SERVER = msgspec.json.Decoder(ServerMessage)


def refuse_protocol(theirs: int) -> str | None:
    """Why a server can't speak with an agent of protocol ``theirs``, and what to do; None when it can."""
    if OLDEST <= theirs <= PROTOCOL:
        return None
    older = "server" if theirs > PROTOCOL else "agent"
    return f"the agent speaks protocol {theirs}, the server {OLDEST} to {PROTOCOL}: upgrade the {older}"


def encode(message: AgentMessage | ServerMessage) -> bytes:
    """The message as it goes out. Raises WireError for one that the other end would refuse."""
    _check(message, "$")
    try:
        data = _ENCODE(message)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise WireError(f"{_tag(message)}: can't be written: {_clip(error)}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"{_tag(message)}: {len(data)} bytes; a message may have {MAX_MESSAGE_BYTES}")
    return data


def decode_from_agent(data: bytes, protocol: int) -> AgentMessage:
    """What an agent of ``protocol`` said; ``Hello`` reads the same in all. Raises WireError, and nothing else."""
    if protocol >= KNOWS_ALL_KEYS:
        return _decode(_FROM_AGENT, data)
    message = _decode(_FROM_AGENT, data) if protocol >= TELLS_APPLIED else _decode(_FROM_OLD_AGENT, data)
    match message:
        case _OldNodeWord():
            return NodeWord(node=_outdate(message.node), applied=None)
        case NodeWord() | Register():
            return msgspec.structs.replace(message, node=_outdate(message.node))
        case _:
            return message


def _outdate(node: Node) -> Node:
    return dataclasses.replace(node, outdated=True)


def decode_from_server(data: bytes) -> ServerMessage:
    """What the server said. Raises WireError, and nothing else."""
    return _decode(_FROM_SERVER, data)


def _decode(decoder: msgspec.json.Decoder[M], data: bytes) -> M:
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes; it may have {MAX_MESSAGE_BYTES}")
    try:
        message = decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise WireError(f"a message that can't be read: {_clip(error)}") from error
    _check(message, "$")
    return message


# -- bounds: the same at both ends, so that nothing is sent that the other end refuses for ever


def _check(value: object, path: str) -> None:
    match value:
        case str():
            if len(value) > TEXT_CHARS:
                raise WireError(f"{path}: {len(value)} characters; {TEXT_CHARS} are allowed")
        case bool() | None:
            pass
        case int():
            if not -INT_LIMIT <= value <= INT_LIMIT:
                raise WireError(f"{path}: the number is out of range")
        case float():
            if not math.isfinite(value):
                raise WireError(f"{path}: {value} is no number that can be sent")
        case tuple() | frozenset():
            _check_items(value, path)
        case Mapping():
            _check_items(tuple(value), path)
            _check_items(tuple(value.values()), path)
        case _:
            _check_fields(value, path)


def _check_items(values: tuple[object, ...] | frozenset[str], path: str) -> None:
    if len(values) > LIST_ITEMS:
        raise WireError(f"{path}: {len(values)} entries; {LIST_ITEMS} are allowed")
    if isinstance(values, frozenset):
        # Words by their type, and many in each report: one look at the longest.
        return _check(max(values, key=len, default=""), f"{path}[]")
    for number, value in enumerate(values):
        _check(value, f"{path}[{number}]")


def _check_fields(value: object, path: str) -> None:
    for name in _names(type(value)):
        part = getattr(value, name)
        if name in _NAME_FIELDS and isinstance(part, str) and not 0 < len(part) <= NAME_CHARS:
            raise WireError(f"{path}.{name}: a name has 1 to {NAME_CHARS} characters, this one {len(part)}")
        if name in _WORDS_FIELDS and isinstance(part, str) and len(part) > WORDS_CHARS:
            raise WireError(f"{path}.{name}: {len(part)} characters; {WORDS_CHARS} are allowed")
        if name in _LENGTHS and isinstance(part, tuple) and len(part) > _LENGTHS[name]:
            raise WireError(f"{path}.{name}: {len(part)} entries; {_LENGTHS[name]} are allowed")
        if name in _RANGES and isinstance(part, int | float) and not _is_within(part, *_RANGES[name]):
            raise WireError(f"{path}.{name}: {part} is out of range")
        _check(part, f"{path}.{name}")


def _is_within(value: float, low: float, high: float) -> bool:
    # infinities and NaN have their own words
    return low <= value <= high or not math.isfinite(value)


_known: dict[type, tuple[str, ...]] = {}


def _names(kind: type) -> tuple[str, ...]:
    found = _known.get(kind)
    if found is None:
        if issubclass(kind, msgspec.Struct):
            found = kind.__struct_fields__
        else:
            found = tuple(field.name for field in dataclasses.fields(cast("Any", kind)))
        _known[kind] = found
    return found


def _tag(message: object) -> str:
    return type(message).__name__


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
