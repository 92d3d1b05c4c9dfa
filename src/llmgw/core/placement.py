"""Where a replica goes: the nodes and GPUs that cost the least, or every reason against every node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType

from llmgw.core.costs import Bid, Offer, Score, bid, find_best, score
from llmgw.core.filters import Need, describe, find_cards, find_reason, find_reasons, is_blind
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import NodeId
from llmgw.core.rejection import Reason, Rejection
from llmgw.core.topology import islands
from llmgw.core.unlock import Unlock, find_unlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One shard's place: the UUIDs of its GPUs in the order of its ranks, () for none, None where nobody chooses (a
    node that was not looked at, or has none to hide)."""

    node: NodeId
    gpus: tuple[str, ...] | None = None


# A reason against a node, with its words where they take more than the two.
_Found = tuple[Need, Host, Reason, str | None]


class Refusals:
    """Why nodes were turned away, as reasons. The words are found when somebody reads them, and once."""

    __slots__ = ("_counts", "_found", "_told")

    def __init__(self, found: Sequence[_Found] = ()) -> None:
        self._found = found
        self._told: tuple[Rejection, ...] | None = None
        self._counts: Mapping[Reason, int] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refusals) and self.tell() == other.tell()

    __hash__ = None  # type: ignore[assignment]

    def tell(self) -> tuple[Rejection, ...]:
        """By profile as they were tried, then by node."""
        if self._told is None:
            self._told = tuple(map(_reject, self._found))
        return self._told

    def first(self, count: int) -> tuple[Rejection, ...]:
        """As ``tell``, so many."""
        return tuple(map(_reject, self._found[:count])) if self._told is None else self._told[:count]

    def count(self) -> Mapping[Reason, int]:
        """How many times each reason was found."""
        if self._counts is None:
            self._counts = Counter(reason for _, _, reason, _ in self._found)
        return self._counts

    def keep(self, count: int) -> Refusals:
        """So many of them, and the counts of all, without the nodes that they were found for."""
        kept = Refusals()
        kept._told, kept._counts = self.first(count), self.count()
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Nodes and GPUs that can run this profile. ``shards`` are by rank, which goes by node id; ``fabric`` is what
    several nodes meet over."""

    profile: Profile
    shards: tuple[Assignment, ...]
    fabric: str | None = None
    score: Score = field(default_factory=Score)
    _refusals: Refusals | None = field(default=None, repr=False)

    @property
    def node(self) -> NodeId:
        """Where rank 0 is."""
        return self.shards[0].node

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """Of the nodes, and of the better profiles, that were turned away."""
        return self._refusals.tell() if self._refusals is not None else ()

    def keep(self) -> Placement:
        """The same without rejections, as ``Rejected.keep``."""
        return replace(self, _refusals=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """No node can run any profile now. Without rejections there was no node, or no profile, to look at."""

    _refusals: Refusals = field(default_factory=Refusals, repr=False)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The first reason against each node for each profile."""
        return self._refusals.tell()

    def keep(self, count: int) -> Rejected:
        """The same with so many rejections: for whoever keeps it, while the nodes that it was found for are long
        others."""
        return Rejected(_refusals=self._refusals.keep(count))

    def first(self, count: int) -> tuple[Rejection, ...]:
        """So many of them: the rest costs nothing."""
        return self._refusals.first(count)

    def reasons(self) -> Mapping[Reason, int]:
        """How many times each reason was found; costs little."""
        return self._refusals.count()

    def counted(self) -> str:
        """The reasons in one line, the most frequent first, without a word on any node."""
        found = sorted(self.reasons().items(), key=lambda each: -each[1])
        return ", ".join(f"{count} {reason}" for reason, count in found)


Verdict = Placement | Rejected

NOWHERE: Mapping[NodeId, int] = MappingProxyType({})
NOBODY: Mapping[NodeId, Standing] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node, or nodes of a fabric together, that a profile was held against.

    ``rejections`` are all that speaks against them; where nothing does they would do, at this ``score`` and with these
    GPUs, each node's as in an ``Assignment``.
    """

    profile: str
    nodes: tuple[NodeId, ...]
    fabric: str | None = None
    rejections: tuple[Rejection, ...] = ()
    score: Score | None = None
    gpus: tuple[tuple[str, ...] | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What ``place`` answers, and why: every profile against every node, in the order in which they were tried.

    ``runner_up`` is what would have been taken were the winner not there. ``unlock`` is the smallest change that would
    give a place to a model that has none.
    """

    model: ModelName
    placement: Placement | None
    runner_up: Candidate | None
    candidates: tuple[Candidate, ...]
    unlock: Unlock | None


def place(
    model: Model,
    hosts: Sequence[Host],
    backing_off: Mapping[NodeId, float],
    now: float,
    *,
    failed: Mapping[NodeId, int] = NOWHERE,
) -> Verdict:
    """Find nodes and GPUs for one more replica of ``model``: all that it needs, or none.

    ``backing_off`` says until when a node is not tried again, ``failed`` how often it failed there of late. The best
    profile that fits anywhere wins, where it costs the least; whatever the order of ``hosts``, the same.
    """
    by_id = sorted(hosts, key=attrgetter("id"))
    blind = is_blind(by_id)
    refused: list[_Found] = []
    for profile in by_priority(model):
        need = Need(model=model, profile=profile, backing_off=backing_off, now=now, blind=blind, failed=failed)
        fits = []
        for host in by_id:
            reason = find_reason(need, host)
            if reason is None:
                fits.append(host)
            else:
                refused.append((need, host, reason, None))
        best = find_best(need, fits)
        if best is not None:
            return Placement(
                profile=profile,
                shards=_assign(best.offers),
                fabric=best.fabric or None,
                score=score(need, best.offers),
                _refusals=Refusals(refused) if refused else None,
            )
        refused += _find_shortage(need, fits)
    return Rejected(_refusals=Refusals(refused))


def explain(
    model: Model,
    hosts: Sequence[Host],
    backing_off: Mapping[NodeId, float],
    now: float,
    *,
    failed: Mapping[NodeId, int] = NOWHERE,
    away: Mapping[NodeId, Standing] = NOBODY,
) -> Explanation:
    """All that ``place`` would go by, were it asked now.

    ``away`` are nodes that there are as well, and that nothing else is known of: silent or lost since before anybody
    here heard them.
    """
    verdict = place(model, hosts, backing_off, now, failed=failed)
    by_id = sorted(hosts, key=attrgetter("id"))
    candidates: list[Candidate] = []
    ranked: list[tuple[Need, Bid]] = []
    blind = is_blind(by_id)
    for profile in by_priority(model):
        need = Need(model=model, profile=profile, backing_off=backing_off, now=now, blind=blind, failed=failed)
        look = _look_at_nodes if profile.nodes == 1 else _look_at_fabrics
        candidates += look(need, by_id)
        candidates += (_miss(profile, name, standing) for name, standing in sorted(away.items()))
        fits = [host for host in by_id if find_reason(need, host) is None]
        ranked += [(need, each) for each in sorted(bid(need, fits))]
    # The same nodes by another class or fabric are no other place.
    others = (_candidate(need, each) for need, each in ranked if each.ids != ranked[0][1].ids)
    return Explanation(
        model=model.name,
        # (who was turned away is told by the candidates)
        placement=verdict.keep() if isinstance(verdict, Placement) else None,
        runner_up=next(others, None),
        candidates=tuple(candidates),
        unlock=find_unlock(model, by_id, backing_off, now, away=away) if isinstance(verdict, Rejected) else None,
    )


def by_priority(model: Model) -> list[Profile]:
    """Its profiles in the order in which they are tried."""
    return sorted(model.profiles, key=lambda profile: -profile.priority)


def _miss(profile: Profile, name: NodeId, standing: Standing) -> Candidate:
    reason = Reason.NODE_LOST if standing is Standing.LOST else Reason.NODE_SILENT
    detail = "it has not come since the server started, and what it has is not known"
    rejection = Rejection(node=name, profile=profile.name, reason=reason, detail=detail)
    return Candidate(profile=profile.name, nodes=(name,), rejections=(rejection,))


def _look_at_nodes(need: Need, hosts: Sequence[Host]) -> Iterator[Candidate]:
    for host in hosts:
        rejections = _reject_fully(need, host)
        if rejections:
            yield Candidate(profile=need.profile.name, nodes=(host.id,), rejections=rejections)
        else:
            yield _candidate(need, min(bid(need, [host])))


def _look_at_fabrics(need: Need, hosts: Sequence[Host]) -> Iterator[Candidate]:
    """Each fabric that is declared, in service or not, and each node that is on none."""
    names = sorted({fabric.name for host in hosts for fabric in host.node.fabrics})
    for name in names:
        of_fabric = Need(
            model=need.model,
            profile=need.profile,
            backing_off=need.backing_off,
            now=need.now,
            fabric=name,
            failed=need.failed,
        )
        members = [host for host in hosts if any(fabric.name == name for fabric in host.node.fabrics)]
        against = {host.id: _reject_fully(of_fabric, host) for host in members}
        fits = [host for host in members if not against[host.id]]
        best = min((each for each in bid(need, fits) if each.fabric == name), default=None)
        if best is None:
            short = map(_reject, _find_shortage(of_fabric, fits))
            ids = tuple(host.id for host in members)
            rejections = (*short, *(rejection for told in against.values() for rejection in told))
            yield Candidate(profile=need.profile.name, nodes=ids, fabric=name, rejections=rejections)
            continue
        yield _candidate(need, best)
        for host in members:
            if against[host.id]:
                yield Candidate(profile=need.profile.name, nodes=(host.id,), fabric=name, rejections=against[host.id])
    for host in hosts:
        if not host.node.fabrics:
            yield Candidate(profile=need.profile.name, nodes=(host.id,), rejections=_reject_fully(need, host))


def _reject_fully(need: Need, host: Host) -> tuple[Rejection, ...]:
    return tuple(_reject((need, host, reason, None)) for reason in find_reasons(need, host))


def _reject(found: _Found) -> Rejection:
    need, host, reason, text = found
    return Rejection(
        node=host.id,
        profile=need.profile.name,
        reason=reason,
        detail=text if text is not None else describe(reason, need, host),
    )


def _candidate(need: Need, best: Bid) -> Candidate:
    return Candidate(
        profile=need.profile.name,
        nodes=best.ids,
        fabric=best.fabric or None,
        score=score(need, best.offers),
        gpus=tuple(_name_gpus(offer) for offer in best.offers),
    )


def _assign(offers: Sequence[Offer]) -> tuple[Assignment, ...]:
    return tuple(Assignment(node=offer.id, gpus=_name_gpus(offer)) for offer in offers)


def _name_gpus(offer: Offer) -> tuple[str, ...] | None:
    if offer.pick is not None:
        return tuple(offer.host.free[place].uuid for place in offer.pick.places)
    return () if offer.host.node.gpus else None


def _find_shortage(need: Need, fits: Sequence[Host]) -> Iterator[_Found]:
    """Nodes that would do, were there more of them on one of their fabrics, with GPUs of one class."""
    told = {
        fabric: _tell_shortage(need, fabric, hosts)
        for fabric, hosts in islands(fits).items()
        if need.fabric in (None, fabric)
    }
    for host in fits:
        yield need, host, Reason.NOT_ENOUGH_NODES, "; ".join(told[each] for each in sorted(host.fabrics & told.keys()))


def _tell_shortage(need: Need, fabric: str, hosts: Sequence[Host]) -> str:
    fit = f"{len(hosts)} would do" if len(hosts) != 1 else f"only {hosts[0].id} would do"
    classes = {name for host in hosts for name, _ in find_cards(need, host)} if need.gpus else set()
    split = f", of different classes ({', '.join(sorted(classes))})" if len(hosts) >= need.profile.nodes else ""
    return f"needs {need.profile.nodes} nodes of fabric {fabric}; {fit}{split}"
