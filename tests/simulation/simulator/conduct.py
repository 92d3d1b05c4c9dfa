"""What an engine will do, drawn at its start: an ordinary one, or as bad as its node makes them at the moment."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from simulator.faults import Mood


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """In seconds: until it is ``ready`` and until it ends by itself, from its start; until it heeds TERM (``deaf``: it
    never does); and from its end until its memory is free."""

    load_seconds: float
    exit_seconds: float
    ready: bool = True
    lives_seconds: float = math.inf
    deaf: bool = False
    frees_seconds: float = 0.5


def draw_conduct(rng: Random, moods: Iterable[Mood]) -> Conduct:
    """Of the next engine that is started."""
    conduct = Conduct(load_seconds=rng.uniform(20.0, 90.0), exit_seconds=rng.uniform(0.2, 4.0))
    for mood in moods:
        match mood:
            case Mood.NEVER_READY:
                conduct = replace(conduct, ready=False)
            case Mood.DIES_LOADING:
                conduct = replace(conduct, lives_seconds=rng.uniform(1.0, conduct.load_seconds))
            case Mood.DIES_SERVING:
                conduct = replace(conduct, lives_seconds=conduct.load_seconds + rng.uniform(1.0, 900.0))
            case Mood.DEAF:
                conduct = replace(conduct, deaf=True)
            case Mood.SLOW:
                conduct = replace(conduct, load_seconds=conduct.load_seconds * 4)
            case Mood.FREES_LATE:
                conduct = replace(conduct, frees_seconds=rng.uniform(2.0, 8.0))
            case Mood.FREES_NEVER:
                conduct = replace(conduct, frees_seconds=600.0)
    return conduct
