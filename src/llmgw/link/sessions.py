"""Decides which of a node's connections counts: by its agent's run and dial, with tokens for its trunks and a lease.

Pure: ``now`` and ``heard_at`` are seconds of one clock. What is decided here is carried out by presence.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from llmgw.core.node import NodeId

# A token is given with each registration, and trunks may be dialled with one that is a few registrations old.
TOKENS = 16


class End(Protocol):
    """The server's end of a control link."""

    @property
    def heard_at(self) -> float:
        """When the peer was last heard."""

    def cut(self, code: str | None, reason: str) -> None:
        """Take nothing more from the peer and end the link, with ``code`` after a last word; returns at once."""

    async def is_alive(self, seconds: float) -> bool:
        """Whether the peer answers within ``seconds``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who wants to be a node's agent: what it says of itself, and what its certificate proves (node, serial)."""

    node: NodeId
    run: str
    dial: int
    protocol: int
    version: str
    peer: str
    serial: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Session:
    """A link that was let in. ``token`` is what the node's trunks present."""

    claim: Claim
    token: str
    since: float
    end: End


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """The claim may enter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Another run is connected: the claim may enter if ``session`` does not answer a ping."""

    session: Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """The claim may not enter."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A claim has entered. ``replaced`` has lost its standing to it; with ``new_run`` the trunks are void too."""

    session: Session
    replaced: Session | None
    new_run: bool


@dataclass(slots=True, kw_only=True)
class _Standing:
    """What is known of one node. ``registered``: the fleet counts on it, and is to be told of its loss. ``told``: the
    link that it registered over last; None since the fleet was told that it is gone."""

    run: str
    dial: int
    last: Session
    tokens: list[str] = field(default_factory=list)
    connected: bool = True
    heard_at: float = 0.0
    registered: bool = False
    told: Session | None = None


class Sessions:
    """The standing of every node that was ever connected; their number is bounded by the certificates there are."""

    __slots__ = ("_gone", "_make_token", "_on_gone", "_standings", "lease_seconds")

    def __init__(
        self,
        *,
        lease_seconds: float,
        make_token: Callable[[], str] = secrets.token_hex,
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_gone`` is called when a link has lost its standing: ``take_gone`` may have a node to tell of."""
        self.lease_seconds = lease_seconds
        self._make_token = make_token
        self._on_gone = on_gone
        self._standings: dict[NodeId, _Standing] = {}
        self._gone: dict[NodeId, None] = {}

    def consider(self, claim: Claim) -> Free | Held | Turned:
        """May ``claim`` enter now?"""
        standing = self._standings.get(claim.node)
        if standing is None:
            return Free()
        if standing.run == claim.run:
            if claim.dial > standing.dial:
                return Free()
            reason = f"a later connection of this agent (dial {standing.dial}) was here before this one ({claim.dial})"
            return Turned(code="replaced", reason=reason)
        return Held(session=standing.last) if standing.connected else Free()

    def enter(self, claim: Claim, end: End, now: float) -> Entry:
        """Let ``claim`` in, whoever was there; the caller ends what it replaced."""
        session = Session(claim=claim, token=self._make_token(), since=now, end=end)
        standing = self._standings.get(claim.node)
        if standing is None:
            standing = _Standing(run=claim.run, dial=claim.dial, last=session)
            self._standings[claim.node] = standing
            replaced, new_run = None, False
        else:
            replaced = standing.last if standing.connected else None
            new_run = standing.run != claim.run
        if new_run:
            standing.tokens.clear()
        standing.run, standing.dial, standing.last = claim.run, claim.dial, session
        standing.connected = True
        standing.heard_at = now
        standing.tokens = [*standing.tokens, session.token][-TOKENS:]
        if replaced is not None:
            self._note_gone(claim.node)
        return Entry(session=session, replaced=replaced, new_run=new_run)

    def find_last(self, node: NodeId) -> Session | None:
        """The link of a node that came last, open or not; None where there was none."""
        standing = self._standings.get(node)
        return None if standing is None else standing.last

    def is_current(self, session: Session) -> bool:
        """Whether ``session`` still speaks for its node: what any other says has no effect."""
        standing = self._standings.get(session.claim.node)
        return standing is not None and standing.connected and standing.last is session

    def register(self, session: Session) -> None:
        """The fleet is about to be told of the node by this link: whatever is said of an earlier one would come late,
        and what comes of this one has to be said."""
        standing = self._standings[session.claim.node]
        standing.registered = True
        standing.told = session

    def leave(self, session: Session) -> None:
        """The link of ``session`` is gone. The node keeps its lease and its tokens."""
        if self.is_current(session):
            standing = self._standings[session.claim.node]
            standing.connected = False
            standing.heard_at = max(standing.heard_at, session.end.heard_at)
            self._note_gone(session.claim.node)

    def _note_gone(self, node: NodeId) -> None:
        self._gone[node] = None
        self._on_gone()

    def take_gone(self) -> NodeId | None:
        """A node whose link the fleet counts on and is gone; None when there is no more. Each loss is given once.

        The caller tells the fleet without waiting first: a registration that it is told of afterwards is a later one.
        """
        while self._gone:
            node = next(iter(self._gone))
            del self._gone[node]
            standing = self._standings[node]
            if standing.told is not None and not self.is_current(standing.told):
                standing.told = None
                return node
        return None

    def find_silent(self, now: float) -> tuple[NodeId, ...]:
        """Nodes that have a standing to lose and have been silent for longer than the lease."""
        return tuple(node for node, standing in self._standings.items() if self._is_silent(standing, now))

    def _is_silent(self, standing: _Standing, now: float) -> bool:
        may_lose = standing.connected or standing.registered or bool(standing.tokens)
        return may_lose and now - _heard_at(standing) > self.lease_seconds

    def lose(self, node: NodeId, now: float) -> tuple[bool, Session | None]:
        """Take a silent node's standing: whether the fleet must be told, and the link to end, if one is open still.

        The tokens are void. A node that was heard since ``find_silent`` keeps everything.
        """
        standing = self._standings[node]
        if not self._is_silent(standing, now):
            return False, None
        was_registered, session = standing.registered, standing.last if standing.connected else None
        if session is not None:
            self.leave(session)
        standing.registered = False
        # the loss says it all
        standing.told = None
        standing.tokens.clear()
        return was_registered, session

    def refuse_token(self, node: NodeId, token: str) -> str | None:
        """Why a trunk of ``node`` that presents ``token`` is refused; None when it is right."""
        standing = self._standings.get(node)
        if standing is None or not standing.tokens:
            return f"node {node} has no session"
        if token not in standing.tokens:
            return f"the session is not one of the agent that is now connected as {node}"
        return None

    def list_connected(self) -> tuple[Session, ...]:
        """Every link that counts."""
        return tuple(standing.last for standing in self._standings.values() if standing.connected)

    def views(self) -> Iterator[tuple[Session, bool, float]]:
        """Of every node that was ever connected: its last session, whether that is connected, and when it was heard."""
        for standing in self._standings.values():
            yield standing.last, standing.connected, _heard_at(standing)


class Attention:
    """Whether silence may be judged: a process that was stopped, or held up, has heard nobody, whoever spoke."""

    __slots__ = ("_deaf_until", "_lease_seconds", "_looked_at", "look_seconds")

    def __init__(self, *, lease_seconds: float, now: float) -> None:
        """``look`` is to be called each ``look_seconds``."""
        self.look_seconds = min(1.0, lease_seconds / 4)
        self._lease_seconds = lease_seconds
        self._looked_at = now
        self._deaf_until = now

    def look(self, now: float) -> bool:
        """Whether whoever has been silent for a lease is lost. Not within a lease after a pause of our own."""
        paused_seconds = now - self._looked_at - self.look_seconds
        self._looked_at = now
        if paused_seconds > self._lease_seconds / 4:
            self._deaf_until = now + self._lease_seconds
        return now >= self._deaf_until


def _heard_at(standing: _Standing) -> float:
    return max(standing.heard_at, standing.last.end.heard_at) if standing.connected else standing.heard_at
