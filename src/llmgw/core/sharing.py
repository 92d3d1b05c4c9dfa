"""Who takes weights from whom: for each node that fetches a source those that have it or fetch it too; and what nobody
wants any more.

A source is looked at anew when something of it has changed, and no other. Of many nodes that fetch the same each is
told of a part, so that what is told grows with their number and not with its square.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple
from zlib import crc32

from llmgw.core.node import Node, NodeId
from llmgw.core.weights import RELAY, Cached, Form, Member, NodeWeights, Phase, Swarm, find_wanted, parse_source

# Nodes of one fabric that fetch the same and are told of each other: each such group asks the origin for one copy.
MOST_FETCHING = 64
# Of those that have all of it: as many can serve a whole group.
MOST_WHOLE = 16
# Of each of these groups so many are taken from through the server at most: there all of them have one rate together,
# and each costs it a question a second of every other one.
MOST_RELAYED = 8
MOST_WHOLE_RELAYED = 4

# Somebody waits for it. One that is QUEUED waits for another program on its machine, and takes nothing itself.
ACTIVE = frozenset({Phase.RESOLVING, Phase.FETCHING, Phase.VERIFYING})


class _Part(NamedTuple):
    """What of one source matters on one node: whether it fetches it, which commit (None: it does not know yet), and
    whether because an operator wants the newest; and the commits that it has whole, with when they were fetched."""

    fetches: bool = False
    commit: str | None = None
    pulled: bool = False
    whole: tuple[tuple[str, float], ...] = ()


_NOTHING = _Part()


@dataclass(slots=True, eq=False)
class _Known:
    """A node: ``here`` while it can be told anything."""

    here: bool = False
    seed: str | None = None
    fabrics: tuple[str, ...] = ()
    parts: dict[str, _Part] = field(default_factory=dict)
    # as a member, by whether it has all of it, and whether it is taken from through the server
    views: dict[tuple[bool, bool], Member] = field(default_factory=dict)

    @property
    def home(self) -> str:
        """The fabric that it is counted on where it is on several."""
        return self.fabrics[0] if self.fabrics else ""


# A group of those that fetch one commit on one fabric.
_Group = tuple[str | None, str, int]


class Sharing:
    """The swarms of the whole cluster. ``seeds`` False: nobody takes anything from another node. ``relays``: through
    the server, but for those that reach each other over a fabric."""

    def __init__(self, *, seeds: bool = True, relays: bool = False) -> None:
        self._seeds = seeds
        self._relays = relays
        self._sources: frozenset[str] = frozenset()
        self._nodes: dict[NodeId, _Known] = {}
        # by source, those that have it or fetch it
        self._on: dict[str, set[NodeId]] = {}
        self._dirty: dict[str, None] = {}
        self._swarms: dict[str, dict[_Group, Swarm]] = {}
        self._told: dict[str, dict[NodeId, tuple[Swarm, ...]]] = {}
        self._of: dict[NodeId, dict[str, tuple[Swarm, ...]]] = {}
        # which group each that fetches is in: it stays there, whoever comes or goes
        self._groups: dict[str, dict[NodeId, _Group]] = {}

    # -- what is known

    def see(self, node: Node) -> None:
        """The node is there, on these fabrics."""
        # (as placement counts them: without an address there nobody is reached over it)
        fabrics = tuple(sorted(each.name for each in node.fabrics if each.down is None and each.address is not None))
        known = self._nodes.setdefault(node.id, _Known())
        if not known.here or known.fabrics != fabrics:
            known.here, known.fabrics = True, fabrics
            self._touch(known)

    def lose(self, node: NodeId) -> None:
        """Its lease is over, or its certificate was revoked: it is named to nobody, and nobody to it, until it is seen
        again. What it said last is kept. (A link that is down alone says nothing of the roads between nodes.)"""
        known = self._nodes.get(node)
        if known is not None and known.here:
            known.here = False
            self._touch(known)

    def forget(self, node: NodeId) -> None:
        """It was removed."""
        known = self._nodes.get(node)
        if known is not None:
            self._touch(known)
            for source in known.parts:
                self._on[source].discard(node)
            del self._nodes[node]

    def report(self, node: NodeId, weights: NodeWeights) -> None:
        """What a node says that it has and fetches; how far it is with it changes nothing."""
        known = self._nodes.setdefault(node, _Known())
        parts = _take_apart(weights)
        if known.seed != weights.seed:
            known.seed = weights.seed
            self._touch(known)
        for source in {**known.parts, **parts}:
            part = parts.get(source, _NOTHING)
            if part != known.parts.get(source, _NOTHING):
                self._dirty[source] = None
                if source in parts:
                    self._on.setdefault(source, set()).add(node)
                else:
                    self._on[source].discard(node)
        known.parts = parts

    def allow(self, sources: frozenset[str]) -> None:
        """Only these may be taken from other nodes."""
        self._dirty.update(dict.fromkeys(sorted(self._sources ^ sources)))
        self._sources = sources

    def _touch(self, known: _Known) -> None:
        known.views.clear()
        self._dirty.update(dict.fromkeys(known.parts))

    # -- what follows

    @property
    def settled(self) -> bool:
        return not self._dirty

    def settle(self, most: int) -> list[NodeId]:
        """Look at so many of the sources at most of which something has changed; the nodes whose swarms did."""
        changed: dict[NodeId, None] = {}
        for source in tuple(islice(self._dirty, most)):
            del self._dirty[source]
            before, after = self._told.pop(source, {}), self._share(source)
            if after:
                self._told[source] = after
            for node in {**before, **after}:
                swarms = after.get(node, ())
                if swarms != before.get(node, ()):
                    self._enter(node, source, swarms)
                    changed[node] = None
        return list(changed)

    def swarms(self, node: NodeId) -> tuple[Swarm, ...]:
        """What a node is to be told, by source. Of two of one source the first is of the commit that it fetches."""
        return tuple(swarm for _, swarms in sorted(self._of.get(node, {}).items()) for swarm in swarms)

    def _enter(self, node: NodeId, source: str, swarms: tuple[Swarm, ...]) -> None:
        of = self._of.setdefault(node, {})
        if swarms:
            of[source] = swarms
            return
        of.pop(source, None)
        if not of:
            del self._of[node]

    def _share(self, source: str) -> dict[NodeId, tuple[Swarm, ...]]:
        """The swarms of a source, by the nodes that are told of them: none where nobody fetches it."""
        here = {
            node: self._nodes[node].parts[source] for node in sorted(self._on.get(source, ())) if self._nodes[node].here
        }
        earlier, self._swarms[source] = self._swarms.pop(source, {}), {}
        groups = self._find_groups(source, here) if source in self._sources else {}
        if not groups:
            del self._swarms[source]
            self._groups.pop(source, None)
            if not self._on.get(source, True):
                del self._on[source]
            return {}
        told: dict[NodeId, list[Swarm]] = {}
        later: dict[NodeId, list[Swarm]] = {}
        holders = self._list_whole(here)
        for key, fetching in groups.items():
            whole = self._choose_whole(key, fetching, holders.get(key[0], ()))
            members = {node: self._view(node, key[1], whole=False) for node in fetching}
            members |= {node: self._view(node, key[1], whole=True) for node in whole}
            swarm = Swarm(source=source, commit=key[0], members=tuple(members[node] for node in sorted(members)))
            known = earlier.get(key)
            # (the same object: a thousand that are told of it are compared in no time)
            swarm = self._swarms[source][key] = known if known == swarm else swarm
            for node in fetching:
                told.setdefault(node, []).append(swarm)
            for node in whole:
                later.setdefault(node, []).append(swarm)
        return {node: (*told.get(node, ()), *later.get(node, ())) for node in {**told, **later}}

    def _find_groups(self, source: str, here: Mapping[NodeId, _Part]) -> dict[_Group, list[NodeId]]:
        """Those that fetch it, by the commit and the fabric, so many together at most."""
        before, now = self._groups.get(source, {}), {}
        usual, pulled = self._find_commit(source, here), _find_fetched(here, pulled=True)
        wanted: dict[NodeId, tuple[str | None, str]] = {
            node: (part.commit or (pulled if part.pulled else usual), self._nodes[node].home)
            for node, part in here.items()
            if part.fetches
        }
        sizes: Counter[_Group] = Counter()
        relayed: Counter[_Group] = Counter()
        for node, place in wanted.items():
            group = before.get(node)
            if group is not None and group[:2] == place:
                now[node] = group
                sizes[group] += 1
                relayed[group] += self._is_relayed(node, group[1])
        for node, (commit, home) in wanted.items():
            if node not in now:
                group, by_relay = (commit, home, 0), self._is_relayed(node, home)
                while sizes[group] >= MOST_FETCHING or (by_relay and relayed[group] >= MOST_RELAYED):
                    group = (commit, home, group[2] + 1)
                now[node] = group
                sizes[group] += 1
                relayed[group] += by_relay
        self._groups[source] = now
        groups: dict[_Group, list[NodeId]] = {}
        for node in wanted:
            groups.setdefault(now[node], []).append(node)
        return groups

    def _find_commit(self, source: str, here: Mapping[NodeId, _Part]) -> str | None:
        """What a node takes that has none yet: the newest that a node has, so that all run the same; else what others
        fetch."""
        # What an address gives away is gone there once it is another: then only a node can give it.
        given = parse_source(source).form is not Form.URL
        whole = [
            (fetched_at, commit)
            for node, part in here.items()
            for commit, fetched_at in part.whole
            if given or self._is_asked(node)
        ]
        return max(whole)[1] if whole else _find_fetched(here)

    def _list_whole(self, here: Mapping[NodeId, _Part]) -> dict[str | None, list[NodeId]]:
        """Those that have all of a commit and can be asked, by commit."""
        found: dict[str | None, list[NodeId]] = {}
        for node, part in here.items():
            if part.whole and self._is_asked(node):
                for commit, _ in part.whole:
                    found.setdefault(commit, []).append(node)
        return found

    def _choose_whole(self, key: _Group, fetching: Iterable[NodeId], holders: Iterable[NodeId]) -> list[NodeId]:
        """Some of those that have all of it, of the group's own fabric first."""
        _, home, number = key
        own = frozenset(fetching)
        found = [node for node in holders if node not in own]

        def far(node: NodeId) -> tuple[bool, int]:
            fabrics = self._nodes[node].fabrics
            # (each group has others of them, and the same ones for as long as they are there)
            return home not in fabrics and bool(home or fabrics), crc32(f"{number} {node}".encode())

        relayed = {node for node in found if self._is_relayed(node, home)}
        kept = []
        for nodes, most in (
            ([node for node in found if node not in relayed], MOST_WHOLE),
            ([node for node in found if node in relayed], MOST_WHOLE_RELAYED),
        ):
            kept += nodes if len(nodes) <= most else nsmallest(most, nodes, key=far)
        return kept

    def _view(self, node: NodeId, home: str, *, whole: bool) -> Member:
        """The same object while nothing of it changes: it is made, and compared, a thousand times a second."""
        known = self._nodes[node]
        relayed = self._is_relayed(node, home)
        found = known.views.get((whole, relayed))
        if found is None:
            seed = RELAY if relayed else known.seed if self._seeds else None
            found = Member(node=node, seed=seed, fabrics=known.fabrics, whole=whole)
            known.views[whole, relayed] = found
        return found

    def _is_asked(self, node: NodeId) -> bool:
        """Whether others can take from it."""
        return self._seeds and (self._relays or self._nodes[node].seed is not None)

    def _is_relayed(self, node: NodeId, home: str) -> bool:
        """Whether those of this fabric take from it through the server: all do but those that reach its address over
        the fabric. (Of nodes on none nobody says that they reach each other.)"""
        known = self._nodes[node]
        return self._relays and (known.seed is None or home not in known.fabrics)


def _take_apart(weights: NodeWeights) -> dict[str, _Part]:
    whole: dict[str, list[tuple[str, float]]] = {}
    for each in weights.whole:
        whole.setdefault(each.source, []).append((each.commit, each.fetched_at))
    parts = {source: _Part(whole=tuple(sorted(found))) for source, found in whole.items()}
    for fetch in weights.fetches:
        if fetch.phase in ACTIVE:
            had = parts.get(fetch.source, _NOTHING).whole
            parts[fetch.source] = _Part(True, fetch.commit, fetch.pull is not None, had)
    return parts


def _find_fetched(here: Mapping[NodeId, _Part], *, pulled: bool = False) -> str | None:
    """The commit that most nodes fetch, of those that do for an operator where that is asked."""
    counts = Counter(
        part.commit for part in here.values() if part.fetches and part.commit is not None and part.pulled >= pulled
    )
    return min(counts, key=lambda commit: (-counts[commit], commit), default=None)


def find_copies(nodes: Mapping[NodeId, NodeWeights]) -> dict[NodeId, dict[tuple[str, str], tuple[NodeId, ...]]]:
    """What of a node lies in a folder that others have too, by source and commit, with these others: what several have
    that was fetched at the very same moment is one and the same, on a shared filesystem or on one machine."""
    found: dict[tuple[str, str, float], list[NodeId]] = {}
    for node, weights in nodes.items():
        for each in weights.cached:
            found.setdefault(_place(each), []).append(node)
    copies: dict[NodeId, dict[tuple[str, str], tuple[NodeId, ...]]] = {}
    for (source, commit, _), of in found.items():
        for node in of if len(of) > 1 else ():
            copies.setdefault(node, {})[source, commit] = tuple(sorted(other for other in of if other != node))
    return copies


def count_once(free: Mapping[NodeId, tuple[Cached, ...]], able: Collection[NodeId]) -> dict[NodeId, tuple[Cached, ...]]:
    """The same, with what several nodes have in one folder on one of them alone: on one that is ``able``, if any is."""
    seen: set[tuple[str, str, float]] = set()
    once = {}
    for node in sorted(free, key=lambda node: (node not in able, node)):
        found = [each for each in free[node] if _place(each) not in seen]
        seen.update(map(_place, found))
        if found:
            once[node] = tuple(found)
    return once


def _place(each: Cached) -> tuple[str, str, float]:
    return each.source, each.commit, each.fetched_at


def find_free(
    catalog: Iterable[str],
    nodes: Mapping[NodeId, NodeWeights],
    running: Mapping[NodeId, frozenset[str]] | None = None,
) -> dict[NodeId, tuple[Cached, ...]]:
    """What each of these nodes has fetched that no source of the catalog wants and nobody uses.

    What a shard on any of several nodes uses that have one folder is kept on all: none of them can see what the others
    run. On a filesystem that several machines write to that holds for whatever is of the same commit. ``running`` has
    the sources of all shards that are not known to have ended, by node: one that is away can't say what they use.
    """
    named, running = frozenset(catalog), running or {}
    used = {node: _find_used(weights, running.get(node, frozenset())) for node, weights in nodes.items()}
    places = {_place(each) for found in used.values() for each in found}
    elsewhere = {(each.source, each.commit) for node in used if nodes[node].shared for each in used[node]}
    # (of what is gone under a shard, as far as its node can see, nobody knows where it lay)
    nowhere = {(each.source, each.commit) for found in used.values() for each in found if not each.size_bytes}
    unseen = {
        source for node, sources in running.items() for source in sources if not _tells_of(nodes.get(node), source)
    }
    found = {}
    for node, weights in nodes.items():
        wanted = find_wanted(named, weights.cached) | nowhere
        if weights.shared:
            wanted |= elsewhere
        free = [each for each in weights.cached if (each.source, each.commit) not in wanted]
        if free := [each for each in free if _place(each) not in places and each.source not in unseen]:
            found[node] = tuple(free)
    return found


def _find_used(weights: NodeWeights, running: frozenset[str]) -> list[Cached]:
    """What shards on this node run by, or may: of the sources of those that run there the newest, which a launch takes,
    and all where the node has said of none that it is in use."""
    told = {each.source for each in weights.cached if each.in_use}
    newest = find_wanted(running, weights.cached) if running else frozenset()
    return [
        each
        for each in weights.cached
        if each.in_use or (each.source in running and (each.source not in told or (each.source, each.commit) in newest))
    ]


def _tells_of(weights: NodeWeights | None, source: str) -> bool:
    """Whether what a node has said last tells which commits of this source something there can run by."""
    if weights is None:
        return False
    return source in {each.source for each in weights.cached} | {fetch.source for fetch in weights.fetches}
