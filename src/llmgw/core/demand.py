"""How much each model is asked for, and how many replicas that is worth once it has settled."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from llmgw.core.events import Demand
from llmgw.core.model import Model, ModelName
from llmgw.core.replica import ReplicaId

# Somebody who asked has waited, was told to come back, and came or gave up within this time: a model that fails for
# nobody is not tried for ever.
DEMAND_SECONDS = 300.0

# More load has to last before another replica is loaded for it, and less of it before one is stopped: what was loaded
# costs a load to have again.
UP_SECONDS = 10.0
DOWN_SECONDS = 300.0
STEP_SECONDS = 1.0


@dataclass(slots=True)
class _Asked:
    """``asked_at``: when somebody last was answered, or told to come back, and ``owed_at`` the latter, since the model
    was last ready. ``since`` is from when on somebody has been waiting for it, inf while nobody is. ``steps`` is how
    many replicas were worth having, by when that began; ``found_at``: when such were found that had been loaded before,
    for a load that nobody here has seen."""

    waiting: int = 0
    in_flight: dict[ReplicaId, int] = field(default_factory=dict)
    asked_at: float = -math.inf
    owed_at: float = -math.inf
    since: float = math.inf
    steps: deque[tuple[float, int]] = field(default_factory=deque)
    found_at: float = -math.inf


_NOBODY = _Asked()


class Demands:
    """Of each model that somebody has asked for, as the door has last told it."""

    __slots__ = ("_asked",)

    def __init__(self) -> None:
        self._asked: dict[ModelName, _Asked] = {}

    def note(self, model: Model, demand: Demand, now: float, *, ready: bool) -> None:
        """Take in how much it is asked for now, while it is ``ready`` to answer or not."""
        asked = self._asked.setdefault(model.name, _Asked())
        if ready:
            asked.since = math.inf
        elif demand.waiting or demand.asked:
            self._begin(model.name, asked, now)
        asked.waiting = demand.waiting
        # Whoever was answered until now has asked until now.
        was_answered = bool(asked.in_flight)
        asked.in_flight = {replica: count for replica, count in demand.in_flight.items() if count}
        if demand.asked or demand.answered or was_answered or asked.in_flight:
            asked.asked_at = now
        if demand.asked and not ready:
            asked.owed_at = now
        if not asked.waiting and not self.is_owed(model.name, now):
            # (whoever waited has hung up)
            asked.since = math.inf
        worth = math.ceil((asked.waiting + sum(asked.in_flight.values())) / max(model.scaling.target, 1))
        steps = asked.steps
        if steps and now < steps[-1][0] + STEP_SECONDS:
            # What was so for a moment only is nothing to go by, and thousands may come and go in one.
            now, _ = steps.pop()
        if not steps or steps[-1][1] != worth:
            steps.append((now, worth))
        # The one that began before the window is what was so at its beginning.
        while len(steps) > 1 and steps[1][0] + DOWN_SECONDS <= now:
            steps.popleft()

    def note_call(self, name: ModelName, now: float) -> None:
        """An operator wants it loaded."""
        asked = self._asked.setdefault(name, _Asked())
        self._begin(name, asked, now)
        asked.asked_at = asked.owed_at = now

    def note_found(self, name: ModelName, now: float) -> None:
        """Replicas of it ran before anything was known of them."""
        self._asked.setdefault(name, _Asked()).found_at = now

    def _begin(self, name: ModelName, asked: _Asked, now: float) -> None:
        """Somebody waits for it: since now, unless somebody has before."""
        if asked.since == math.inf or not (asked.waiting or self.is_owed(name, now)):
            asked.since = now

    def note_ready(self, name: ModelName) -> None:
        """Whoever was told to come back is owed nothing any more."""
        if name in self._asked:
            self._asked[name].owed_at = -math.inf
            self._asked[name].since = math.inf

    def forget(self, name: ModelName) -> None:
        self._asked.pop(name, None)

    def waiting(self, name: ModelName) -> int:
        return self._asked.get(name, _NOBODY).waiting

    def since(self, name: ModelName) -> float:
        """From when on somebody has been waiting for it; inf when nobody has asked in vain."""
        return self._asked.get(name, _NOBODY).since

    def in_flight(self, name: ModelName, replica: ReplicaId) -> int:
        return self._asked.get(name, _NOBODY).in_flight.get(replica, 0)

    def asked_at(self, name: ModelName, now: float) -> float:
        """When somebody last asked for it who has not hung up: now while one is answered; -inf when nobody has."""
        asked = self._asked.get(name, _NOBODY)
        return now if asked.in_flight else asked.asked_at

    def is_answered(self, name: ModelName) -> bool:
        """Some request of it is in flight."""
        return bool(self._asked.get(name, _NOBODY).in_flight)

    def is_owed(self, name: ModelName, now: float) -> bool:
        """Somebody was told to come back, not long ago, and it has not been ready since."""
        return now - self._asked.get(name, _NOBODY).owed_at < DEMAND_SECONDS

    def owed_until(self, name: ModelName) -> float:
        """When nobody who was told to come back is waited for any more; -inf when nobody is."""
        return self._asked.get(name, _NOBODY).owed_at + DEMAND_SECONDS

    def settled(self, name: ModelName, running: int, now: float) -> int:
        """How many replicas the load is worth, of which there are ``running``: as many, unless it has been more, or
        less, for long enough."""
        asked = self._asked.get(name, _NOBODY)
        least = min(_list_worth(asked.steps, UP_SECONDS, now))
        if now < asked.found_at + DOWN_SECONDS:
            return max(running, least)
        most = max(_list_worth(asked.steps, DOWN_SECONDS, now))
        return max(running, least) if least > running else min(running, most)

    def settles_at(self, name: ModelName, now: float) -> float:
        """When ``settled`` may next answer otherwise though nobody says anything; inf when it won't."""
        asked = self._asked.get(name, _NOBODY)
        times = [began + wait for began, _ in asked.steps for wait in (UP_SECONDS, DOWN_SECONDS)]
        times.append(asked.found_at + DOWN_SECONDS)
        return min((at for at in times if at > now), default=math.inf)


def _list_worth(steps: deque[tuple[float, int]], seconds: float, now: float) -> list[int]:
    """All that was so within that time; 0 where nothing was said so early. It reckons as ``settles_at`` does: sums that
    differ in the last bit would leave a step in the window at the moment that it was to leave it."""
    found = [] if steps and steps[0][0] + seconds <= now else [0]
    for at, (_, worth) in enumerate(steps):
        if at + 1 == len(steps) or steps[at + 1][0] + seconds > now:
            found.append(worth)
    return found
