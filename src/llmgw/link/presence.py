"""Which nodes are here: their links, their leases, and what the fleet is told when one falls silent, or stays so.

It knows no socket: listener.py brings it links over TLS, a simulation those of its own memory.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from llmgw.core.events import NodeLost, NodeSilent
from llmgw.core.node import NodeId
from llmgw.link.agentlink import AgentLink, Agents, Pace, Proven
from llmgw.link.line import Line
from llmgw.link.sessions import Attention, Sessions
from llmgw.link.sparing import SparingLog
from llmgw.link.words import clean

log = logging.getLogger("llmgw.link")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """How the link of a node is, for whoever looks."""

    node: NodeId
    peer: str
    connected: bool
    heard_seconds_ago: float
    protocol: int
    version: str
    trunks: int


class TrunksHere(Protocol):
    """The trunks of all nodes, as far as links decide on them. ``trunk.Trunks`` are some."""

    def close_node(self, node: NodeId, reason: str) -> None:
        """End all trunks of a node at once, and with them their streams."""

    def goaway(self) -> None:
        """No new streams; each trunk ends with its last stream."""

    def count(self, node: NodeId) -> int:
        """How many trunks of a node take new streams."""


class Presence:
    """All links that there are. ``serve_link`` each; ``watch_leases`` and ``tell_silent`` are to run meanwhile."""

    def __init__(
        self,
        agents: Agents,
        *,
        trunks: TrunksHere,
        lease_seconds: float,
        pace: Pace,
        make_token: Callable[[], str] = secrets.token_hex,
        on_look: Callable[[], None] = lambda: None,
        on_lost: Callable[[NodeId], None] = lambda node: None,
        replace_after_seconds: float | None = None,
    ) -> None:
        """``on_look`` is called at each look at who is silent, ``on_lost`` when a lease is over.

        ``replace_after_seconds``: what agents are told of that; None: nothing.
        """
        self._agents = agents
        self._trunks = trunks
        self._pace = pace
        self._on_look = on_look
        self._on_lost = on_lost
        self._replace_after_seconds = replace_after_seconds
        self._gone = trio.Event()
        self._sessions = Sessions(lease_seconds=lease_seconds, make_token=make_token, on_gone=self._note_gone)
        self._words = SparingLog(summary="%d more lines about the links of node %s within %g s; the last: %s")
        self._stopping: str | None = None
        # (in the order in which they came: a set goes by addresses, which differ from run to run)
        self.links: dict[AgentLink, None] = {}

    def views(self) -> tuple[LinkView, ...]:
        """Every node that was connected since the start."""
        now = trio.current_time()
        return tuple(
            LinkView(
                node=session.claim.node,
                peer=session.claim.peer,
                connected=connected,
                heard_seconds_ago=max(0.0, now - heard_at),
                protocol=session.claim.protocol,
                version=session.claim.version,
                trunks=self._trunks.count(session.claim.node),
            )
            for session, connected, heard_at in self._sessions.views()
        )

    def set_lease(self, seconds: float) -> None:
        """How long a node counts as there without a word, from here on; agents that are connected were told the old."""
        self._sessions.lease_seconds = seconds

    def set_replace_after(self, seconds: float) -> None:
        """How long after its lease what a node runs is placed anew; agents that are connected were told the old."""
        self._replace_after_seconds = seconds

    def refuse_token(self, node: NodeId, token: str) -> str | None:
        """Why a trunk of ``node`` that presents ``token`` is refused; None when it is right."""
        return self._sessions.refuse_token(node, token)

    def goaway(self, reason: str) -> None:
        """The server stops: tell every agent, and every one that still comes. What is open stays open."""
        self._stopping = reason
        for link in tuple(self.links):
            link.goaway(reason)
        self._trunks.goaway()

    def let_go(self, node: NodeId, reason: str) -> None:
        """End the node's link, if it has one: an agent that is there dials anew, and registers as one that was never
        seen."""
        for link in tuple(self.links):
            if link.node == node:
                link.cut(None, reason)

    def cut_revoked(self, explain: Callable[[NodeId, int], str | None]) -> None:
        """End the links whose certificates ``explain`` has something against, and tell the fleet of their nodes; also
        of those whose link is down at the moment, for they may be there for others."""
        for link in tuple(self.links):
            problem = explain(link.node, link.serial)
            if problem is not None:
                link.cut("revoked", problem)
        for session, _, _ in self._sessions.views():
            if explain(session.claim.node, session.claim.serial) is not None:
                self._agents.refuse(session.claim.node)

    def note_revoked(self, node: NodeId, explain: Callable[[NodeId, int], str | None]) -> None:
        """A node has shown a revoked certificate: that says of it what it says of one that was cut, unless it has been
        here by a good one. (Whoever has an old one must not make others of the node's name do without it.)"""
        last = self._sessions.find_last(node)
        if last is None or explain(node, last.claim.serial) is not None:
            self._agents.refuse(node)

    async def serve_link(self, line: Line, proven: Proven, *, revoked: str | None = None) -> None:
        """Talk over ``line`` until it ends; ``revoked``: why the peer is refused at once.

        Raises Unwelcome when the agent was never let in, and told why.
        """
        link = AgentLink(
            line,
            proven,
            sessions=self._sessions,
            agents=self._agents,
            trunks=self._trunks,
            pace=self._pace,
            words=self._words,
            replace_after_seconds=self._replace_after_seconds,
        )
        if revoked is not None:
            link.cut("revoked", revoked)
        if self._stopping is not None:
            link.cut("stopping", self._stopping)
        self.links[link] = None
        try:
            await link.serve()
        finally:
            self.links.pop(link, None)
            last = self._sessions.find_last(link.node)
            if link.is_revoked and last is not None and last.end is link:
                # (what it said in its last moment may have come after the cut)
                self._agents.refuse(link.node)

    # -- for ever

    async def watch_leases(self) -> None:
        """Ask links that are silent, report nodes that stay so, and let the log say what it withholds."""
        attention = Attention(lease_seconds=self._sessions.lease_seconds, now=trio.current_time())
        while True:
            await trio.sleep(attention.look_seconds)
            self._words.sweep(trio.current_time())
            self._on_look()
            for link in tuple(self.links):
                link.look()
            if attention.look(trio.current_time()):
                for node in self._sessions.find_silent(trio.current_time()):
                    await self._lose(node)

    async def _lose(self, node: NodeId) -> None:
        registered, session = self._sessions.lose(node, trio.current_time())
        reason = f"nothing was heard of node {node} for {self._sessions.lease_seconds:g} s"
        if session is not None:
            # If it speaks again it has to dial, and to register with all that it runs.
            session.end.cut(None, reason)
        self._trunks.close_node(node, reason)
        self._on_lost(node)
        if registered:
            log.warning("%s: it counts as lost until it is back", reason)
            await self._tell(NodeLost(node=node))

    def _note_gone(self) -> None:
        self._gone.set()

    async def tell_silent(self) -> None:
        """Report nodes whose link has ended.

        A task of its own: a link may end by being cancelled, and what ends so can't wait for the fleet to listen.
        """
        while True:
            await self._gone.wait()
            self._gone = trio.Event()
            while (node := self._sessions.take_gone()) is not None:
                await self._tell(NodeSilent(node=node))

    async def _tell(self, event: NodeSilent | NodeLost) -> None:
        try:
            await self._agents.report(event)
        except Exception:
            # every other node is to be told of as well
            log.exception("the fleet can't be told of node %s", clean(event.node))
