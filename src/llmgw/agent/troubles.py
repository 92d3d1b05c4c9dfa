"""Says what is out of service on this node: when that begins, when its reason changes, and when it is over."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Troubles:
    """What was said last of each, so that what is looked at every few seconds is not told every few seconds."""

    __slots__ = ("_said", "_warned")

    def __init__(self) -> None:
        self._said: dict[str, str] = {}
        self._warned: frozenset[str] = frozenset()

    def note(self, what: str, trouble: str | None) -> None:
        """Why ``what`` is out of service, None while it is not."""
        said = self._said.pop(what, None)
        if trouble is not None:
            self._said[what] = trouble
            if trouble != said:
                log.warning("%s is out of service on this node: %s", what, trouble)
        elif said is not None:
            log.info("%s is in service again", what)

    def warn(self, warnings: tuple[str, ...]) -> None:
        """All that there is to be warned of now."""
        for warning in warnings:
            if warning not in self._warned:
                log.warning("%s", warning)
        self._warned = frozenset(warnings)
