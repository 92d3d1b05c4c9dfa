"""What has happened of late, by number: for whoever looks on, and for whoever follows. Nothing of it is stored."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import trio

from llmgw.core.effects import Announce
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId

KEPT = 1000
# An agent's words are in it, and an engine's: a thousand of the longest are still no burden.
MOST_LINES = 20
LONGEST_LINE = 500
LONGEST_TEXT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One thing that has happened: ``number`` counts from 1 since the server's start, ``at`` is in seconds since 1970,
    ``what`` is one word (``effects.Happening``, or an act's). The words are as they came: not all may be printable."""

    number: int
    at: float
    what: str
    text: str
    model: ModelName | None = None
    node: NodeId | None = None
    lines: tuple[str, ...] = ()
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """What has happened after a number, the oldest first. ``last`` is the newest number, given here or not: ask after
    it next. ``missed``: so many had happened in between that are no longer kept."""

    happened: tuple[Happened, ...]
    last: int
    missed: int


class Chronicle:
    """The last thousand happenings; older ones give way. ``began`` is when their numbers did, in seconds since 1970."""

    def __init__(self, *, kept: int = KEPT, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._kept: deque[Happened] = deque(maxlen=kept)
        self._more = trio.Event()
        self.last = 0
        self.began = wall()

    def add(self, announced: Announce) -> None:
        """What the fleet tells."""
        self.note(
            announced.what,
            announced.text,
            model=announced.model,
            node=announced.node,
            lines=announced.lines,
            warning=announced.warning,
        )

    def note(
        self,
        what: str,
        text: str,
        *,
        model: ModelName | None = None,
        node: NodeId | None = None,
        lines: tuple[str, ...] = (),
        warning: bool = False,
    ) -> None:
        """What somebody here has done or seen."""
        self.last += 1
        self._kept.append(
            Happened(
                number=self.last,
                at=self._wall(),
                what=str(what),
                text=text[:LONGEST_TEXT],
                model=model,
                node=node,
                lines=tuple(line[:LONGEST_LINE] for line in lines[-MOST_LINES:]),
                warning=warning,
            )
        )
        self._more.set()
        self._more = trio.Event()

    def since(self, number: int, *, model: ModelName | None = None, node: NodeId | None = None) -> Excerpt:
        """What came after this number, of this model and of this node. A number that is yet to come is of an earlier
        server: all that is kept comes after it."""
        after = number if 0 <= number <= self.last else 0
        first = self.last - len(self._kept) + 1
        return Excerpt(
            happened=tuple(
                each
                for each in islice(self._kept, max(after + 1 - first, 0), None)
                if model in (None, each.model) and node in (None, each.node)
            ),
            last=self.last,
            missed=max(first - 1 - after, 0),
        )

    async def wait(self, number: int) -> None:
        """Wait until something has happened after this number."""
        while self.last == max(number, 0):
            await self._more.wait()
