"""Where the engines of this node listen, for who brings requests: by shard and epoch, and never another port."""

from __future__ import annotations

from llmgw.core.replica import ShardId, ShardReport, ShardState

NO_SHARD = "no_shard"
WRONG_EPOCH = "wrong_epoch"


class Places:
    """What the shards here last said of themselves."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[ShardId, ShardReport] = {}

    def note(self, report: ShardReport) -> None:
        """The newest word of a shard."""
        if report.state is ShardState.ENDED:
            known = self._known.get(report.shard)
            if known is not None and known.epoch == report.epoch:
                del self._known[report.shard]
        else:
            self._known[report.shard] = report

    def find(self, shard: ShardId, epoch: int) -> int | str:
        """The port on 127.0.0.1 of that shard in that epoch, or why there is none."""
        known = self._known.get(shard)
        if known is None:
            return NO_SHARD
        if known.epoch != epoch:
            return WRONG_EPOCH
        return NO_SHARD if known.endpoint is None else known.endpoint.port
