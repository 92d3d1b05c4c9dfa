"""The ports inside of an engine, so that two of one node never share one.

Beside its HTTP port SGLang takes one where its ranks meet. With attention data parallelism it counts on from there, up
to 13 (0.5.23), and it counts from the HTTP port where no such port is given: into those of its neighbours. So each
engine is given a place of its own to count from, by its HTTP port, below the range that the kernel takes ports for
connections from (32768 on). The places of two HTTP ports are the same where these are 900 apart: then the later engine
finds its port taken, and is started with another one.
"""

from __future__ import annotations

_FIRST = 20000
_PLACES = 900
_WIDTH = 14


def rendezvous(port: int) -> int:
    """Where the ranks meet that one node has all of."""
    return _FIRST + _WIDTH * (port % _PLACES)


def engine_info(port: int) -> int:
    """Where an engine tells others how to copy its weights, in case it is told to: by default 6789 for all."""
    # One that attention data parallelism does not take: that ends at 6, and goes on with 13.
    return rendezvous(port) + 9
