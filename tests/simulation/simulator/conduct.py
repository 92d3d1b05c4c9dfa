"""What an engine will do, drawn at its start: an ordinary one, or as bad as its node makes them at the moment."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from llmgw.core.replica import ShardSpec
from simulator.faults import Flaw, Mood
from simulator.store import find_flaw


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """In seconds: until it is ``ready`` and until it ends by itself, from its start; until it heeds TERM (``deaf``: it
    never does); from its end until its memory is free; and from its start until it answers nobody any more."""

    load_seconds: float
    exit_seconds: float
    ready: bool = True
    lives_seconds: float = math.inf
    deaf: bool = False
    frees_seconds: float = 0.5
    hangs_seconds: float = math.inf


def draw_conduct(rng: Random, moods: Iterable[Mood], spec: ShardSpec) -> Conduct:
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
            case Mood.HANGS_SERVING:
                conduct = replace(conduct, hangs_seconds=conduct.load_seconds + rng.uniform(1.0, 900.0))
            case Mood.SLOW_TO_PREPARE:
                # (before there is any engine)
                pass
    match find_flaw(spec.model):
        case Flaw.NEVER_READY:
            conduct = replace(conduct, ready=False)
        case Flaw.DIES_AT_ONCE:
            conduct = replace(conduct, lives_seconds=conduct.load_seconds + rng.uniform(0.5, 9.0))
    return conduct
