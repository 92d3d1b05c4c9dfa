"""Which ready replica serves a request."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from llmgw.core.replica import Replica, ReplicaId


def choose(
    replicas: Sequence[Replica], in_flight: Mapping[ReplicaId, int], without: Container[str] = ()
) -> Replica | None:
    """The replica with the fewest requests in flight that is not in ``without``; None when none is left.

    Of equal ones the first in the order given, so that the same fleet in the same state gives the same answer.
    """
    best: Replica | None = None
    fewest = 0
    for replica in replicas:
        if replica.id in without:
            continue
        count = in_flight.get(replica.id, 0)
        if best is None or count < fewest:
            best, fewest = replica, count
    return best
