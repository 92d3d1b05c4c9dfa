"""Who asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever sent a request. Until there are keys everybody who reaches the port is the same caller."""

    id: str


ANYONE = Caller(id="anyone")
