"""What a place costs: each node that would do with its price in seconds, and the cheapest of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter
from typing import NamedTuple

from llmgw.core.filters import Need, find_cards
from llmgw.core.hosts import Host
from llmgw.core.node import NodeId
from llmgw.core.topology import Pick, islands, pick_gpus

# What a place costs, in seconds: what it takes to fetch the weights, and what of the fleet's shape it is worth waiting
# that long for.
FETCH_GB_PER_SECOND = 0.1
UNKNOWN_FETCH_SECONDS = 600.0
# A path is never fetched. A node where it was read is still the surer place, though not at the price of two replicas on
# one node.
PATH_SECONDS = 30.0
# Small weights are not worth a second copy for the sake of the fleet's shape: where a node that holds them fits, it is
# taken.
LEAST_FETCH_SECONDS = 300.0
CROWDING_SECONDS = 60.0
# Else of two nodes where it never works the better one would be tried again, and a third one never.
FAILED_SECONDS = 120.0
# So often in a row, and any other node is the better one.
OFTEN = 3
OFTEN_SECONDS = 10_000.0
WHOLE_NODE_SECONDS = 30.0
STRADDLING_SECONDS = 45.0
GPU_NODE_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a place costs, in seconds over all its nodes: less is better.

    ``fetch``: weights that they don't hold have to come first. ``failures``: the model failed there of late.
    ``crowding``: replicas of the same model are there.
    ``whole_nodes``: nodes all of whose GPUs were free, and are not any more. ``straddling``: TP groups that NVLink
    doesn't join, though others are. ``gpu_nodes``: nodes with GPUs under a profile that needs none.
    """

    seconds: float = 0.0
    fetch_seconds: float = 0.0
    failures_seconds: float = 0.0
    crowding_seconds: float = 0.0
    whole_nodes_seconds: float = 0.0
    straddling_seconds: float = 0.0
    gpu_nodes_seconds: float = 0.0


class Offer(NamedTuple):
    """One node for one shard, in the order in which nodes are preferred: by cost, then by what would be left there."""

    seconds: float
    left: float
    id: NodeId
    card_gb: float
    gpu_class: str
    host: Host
    pick: Pick | None


class Bid(NamedTuple):
    """As many nodes as a replica needs, in the order in which they are preferred."""

    seconds: float
    left: float
    ids: tuple[NodeId, ...]
    card_gb: float
    gpu_class: str
    fabric: str
    offers: tuple[Offer, ...]


def find_best(need: Need, fits: Sequence[Host]) -> Bid | None:
    """The cheapest of what can be had of the nodes that nothing speaks against."""
    if need.profile.nodes > 1:
        return min(bid(need, fits), default=None)
    offer = min(_offer(need, fits), default=None)
    return None if offer is None else _join((offer,), "")


def bid(need: Need, fits: Sequence[Host]) -> Iterator[Bid]:
    """What can be had of the nodes that nothing speaks against: each of them, or the best two groups of each fabric and
    class."""
    nodes = need.profile.nodes
    if nodes == 1:
        for offer in _offer(need, fits):
            yield _join((offer,), "")
        return
    for fabric, hosts in islands(fits).items():
        of_class: dict[str, list[Offer]] = {}
        for offer in _offer(need, hosts):
            of_class.setdefault(offer.gpu_class, []).append(offer)
        for offers in of_class.values():
            # What a node costs is its own: the cheapest nodes are the cheapest group. The next one replaces the last.
            best = nsmallest(nodes + 1, offers)
            if len(best) >= nodes:
                yield _join(tuple(best[:nodes]), fabric)
            if len(best) > nodes:
                yield _join((*best[: nodes - 1], best[nodes]), fabric)


def _offer(need: Need, hosts: Sequence[Host]) -> Iterator[Offer]:
    source, name, gpus, tp = need.model.source, need.model.name, need.gpus, need.profile.tp
    fetch_seconds, failed = _fetch_seconds(need), need.failed
    for host in hosts:
        seconds = CROWDING_SECONDS * host.replicas.get(name, 0)
        if failed:
            seconds += _failures_seconds(failed.get(host.id, 0))
        if source not in host.holds:
            seconds += fetch_seconds
        if not gpus:
            if host.node.gpus:
                seconds += GPU_NODE_SECONDS
            yield Offer(seconds, -host.free_gb, host.id, 0.0, "", host, None)
            continue
        if host.whole and len(host.free) > gpus:
            seconds += WHOLE_NODE_SECONDS
        for gpu_class, usable in find_cards(need, host):
            pick = pick_gpus(host.links, usable, gpus, tp)
            cost = seconds + STRADDLING_SECONDS * pick.straddling
            card_gb = host.free[pick.places[0]].memory_gb
            yield Offer(cost, len(host.free) - gpus, host.id, card_gb, gpu_class, host, pick)


def _failures_seconds(count: int) -> float:
    return FAILED_SECONDS * count + (OFTEN_SECONDS if count >= OFTEN else 0.0)


def _fetch_seconds(need: Need) -> float:
    size_gb = need.profile.min_disk_gb
    if need.model.source.startswith("/"):
        return PATH_SECONDS
    if size_gb is None:
        return UNKNOWN_FETCH_SECONDS
    return max(size_gb / FETCH_GB_PER_SECOND, LEAST_FETCH_SECONDS)


def _join(offers: tuple[Offer, ...], fabric: str) -> Bid:
    if len(offers) == 1:
        (offer,) = offers
        return Bid(offer.seconds, offer.left, (offer.id,), offer.card_gb, offer.gpu_class, fabric, offers)
    in_order = tuple(sorted(offers, key=attrgetter("id")))
    return Bid(
        sum(offer.seconds for offer in offers),
        sum(offer.left for offer in offers),
        tuple(offer.id for offer in in_order),
        max(offer.card_gb for offer in offers),
        in_order[0].gpu_class,
        fabric,
        in_order,
    )


def score(need: Need, offers: Sequence[Offer]) -> Score:
    """Where the price of these nodes comes from."""
    fetching = sum(need.model.source not in offer.host.holds for offer in offers)
    crowding = sum(offer.host.replicas.get(need.model.name, 0) for offer in offers)
    whole = sum(need.gpus > 0 and offer.host.whole and len(offer.host.free) > need.gpus for offer in offers)
    straddling = sum(offer.pick.straddling for offer in offers if offer.pick is not None)
    with_gpus = sum(need.gpus == 0 and bool(offer.host.node.gpus) for offer in offers)
    return Score(
        seconds=sum(offer.seconds for offer in offers),
        fetch_seconds=fetching * _fetch_seconds(need),
        failures_seconds=sum(_failures_seconds(need.failed.get(offer.id, 0)) for offer in offers),
        crowding_seconds=crowding * CROWDING_SECONDS,
        whole_nodes_seconds=whole * WHOLE_NODE_SECONDS,
        straddling_seconds=straddling * STRADDLING_SECONDS,
        gpu_nodes_seconds=with_gpus * GPU_NODE_SECONDS,
    )
