"""Which shard has which GPU of this node: two are never launched on one, whatever the server says."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from llmgw.core.replica import ShardId, ShardSpec

log = logging.getLogger(__name__)


class Taken:
    """The GPUs of the shards that live here, by UUID, from just before a launch until its processes are gone."""

    __slots__ = ("_by", "_changed")

    def __init__(self) -> None:
        # By shard: two that were taken over may have one GPU between them.
        self._by: dict[ShardId, tuple[str, ...]] = {}
        self._changed = trio.Event()

    def hold(self, spec: ShardSpec) -> None:
        """They are its own: it was found running on them."""
        self._by[spec.id] = spec.gpus or ()

    async def take(self, spec: ShardSpec, tell: Callable[[str | None], None]) -> None:
        """Return once they are its own. ``tell`` is told what it waits for, and None when that is over.

        It takes all of them at once: two that each had what the other waits for would wait for ever.
        """
        while others := self._find_others(spec):
            text = f"waits for {', '.join(f'{uuid} that {shard} still has' for uuid, shard in others.items())}"
            log.info("shard %s %s", spec.id, text)
            tell(text)
            await self._changed.wait()
        tell(None)
        self.hold(spec)

    def _find_others(self, spec: ShardSpec) -> dict[str, ShardId]:
        by = {uuid: shard for shard, uuids in self._by.items() if shard != spec.id for uuid in uuids}
        return {uuid: by[uuid] for uuid in spec.gpus or () if uuid in by}

    def give_back(self, shard: ShardId) -> None:
        """It has none any more."""
        if self._by.pop(shard, None):
            self._changed.set()
            self._changed = trio.Event()
