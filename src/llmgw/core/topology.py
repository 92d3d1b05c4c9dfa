"""What sits close together: nodes that one replica may span, and GPUs that are joined by NVLink."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from llmgw.core.hosts import Host


def islands(hosts: Iterable[Host]) -> dict[str, tuple[Host, ...]]:
    """The nodes that one replica may span, by the fabric that is in service on them, in the order given.

    A node by itself is an island too, which nobody has to work out.
    """
    found: dict[str, list[Host]] = {}
    for host in hosts:
        for fabric in host.fabrics:
            found.setdefault(fabric, []).append(host)
    return {fabric: tuple(found[fabric]) for fabric in sorted(found)}


class Pick(NamedTuple):
    """GPUs by their places in ``Host.free``, in the order of the ranks, and how many TP groups of them straddle
    bridges."""

    places: tuple[int, ...]
    straddling: int


# A thousand equal nodes ask the same question.
@lru_cache(maxsize=4096)
def pick_gpus(links: tuple[int, ...] | None, usable: int, count: int, tp: int) -> Pick:
    """Which ``count`` of the ``usable`` GPUs (bits, at least so many) a shard takes.

    They come in TP groups; where groups do not end with the node (``tp`` is wider than it, or no part of it) the whole
    shard is one. ``links`` has of each GPU those that it is joined to, as bits. A group is joined wherever one that is
    can be had, from the smallest part of the box that has it, so that large parts stay whole; else it takes whole parts
    rather than halves of others. Where links are not known it is the lowest places.
    """
    if links is None:
        return Pick(tuple(_places(usable))[:count], 0)
    size = tp if count % tp == 0 else count
    groups: list[int] = []
    straddling = 0
    left = usable
    for _ in range(count // size):
        group = _take_joined(links, left, size)
        if group is None:
            group = _take_straddling(links, left, size)
            straddling += 1
        groups.append(group)
        left &= ~group
    # By their lowest places: ranks go up with indices as far as links let them.
    groups.sort(key=lambda group: group & -group)
    return Pick(tuple(place for group in groups for place in _places(group)), straddling)


def _take_joined(links: tuple[int, ...], left: int, size: int) -> int | None:
    enough = [part for part in _parts(links, left) if part.bit_count() >= size]
    if not enough:
        return None
    smallest = min(part.bit_count() for part in enough)
    grown = {
        _grow(links, part, start, size) for part in enough if part.bit_count() == smallest for start in _places(part)
    }
    # Where not each is joined to each, the rest of a part may fall apart, or hold together by fewer links.
    return min(
        grown,
        key=lambda group: (
            -sum(part.bit_count() // size for part in _parts(links, left & ~group)),
            -sum((links[place] & group).bit_count() for place in _places(group)),
            tuple(_places(group)),
        ),
    )


def _grow(links: tuple[int, ...], part: int, start: int, size: int) -> int:
    """``size`` of a part, from one on, each joined to as many of those before it as can be."""
    group = 1 << start
    for _ in range(size - 1):
        best = max(
            _places(part & ~group),
            key=lambda place: ((links[place] & group).bit_count(), -place),
        )
        group |= 1 << best
    return group


def _take_straddling(links: tuple[int, ...], left: int, size: int) -> int:
    """As few whole parts as come to this size; where none do, as near as they come, and the rest out of one more."""
    parts = _parts(links, left)
    reached: dict[int, tuple[int, ...]] = {0: ()}
    for number, part in enumerate(parts):
        for total, chosen in list(reached.items()):
            more, longer = total + part.bit_count(), (*chosen, number)
            known = reached.get(more)
            if more <= size and (known is None or (len(longer), longer) < (len(known), known)):
                reached[more] = longer
    most = max(reached)
    group = 0
    for number in reached[most]:
        group |= parts[number]
    if most < size:
        halved = min((part for part in parts if not part & group), key=lambda part: (part.bit_count(), part & -part))
        for place in list(_places(halved))[: size - most]:
            group |= 1 << place
    return group


def _parts(links: tuple[int, ...], left: int) -> list[int]:
    """The parts of a box that NVLink holds together, by their lowest places."""
    parts = []
    while left:
        part, edge = 0, left & -left
        while edge:
            part |= edge
            reach = 0
            for place in _places(edge):
                reach |= links[place]
            edge = reach & left & ~part
        parts.append(part)
        left &= ~part
    return parts


def _places(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
