"""Whether an engine that is ready still lives: hung is not busy, and one token is asked for where polls don't tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

import trio

from llmgw.agent.canary import Ask, Missed, ask_for_token
from llmgw.agent.hands import Hands
from llmgw.agent.settings import Pace
from llmgw.core.replica import Load
from llmgw.host.usage import Usage

# One that sleeps in a lock uses next to nothing of its processors, also where others leave it little.
COMPUTING_CORES = 0.1
RETRY_SECONDS = 5.0

REMEDY = (
    "its last lines may tell what it waits for; if it comes back, try another release of the engine, and look at the "
    "kernel's log (dmesg) and, of one on several nodes, at the network between them"
)
UNANSWERED = "it did not answer a request for one token"


class Finding(Enum):
    """What the polls amount to: nothing is wrong, one token has to be asked for now, its answer is waited for, or the
    engine is hung."""

    WELL = auto()
    ASK = auto()
    WAIT = auto()
    HUNG = auto()


class Sign(StrEnum):
    """What is missed of an engine."""

    STEPS = "steps"
    HEALTH = "health"
    LOAD = "load"
    # of a group that nobody has asked for anything: one with a dead rank still answers its health check
    TOKENS = "tokens"


@dataclass(slots=True, kw_only=True)
class Suspicion:
    """What is missed, since when, and what has come of the token that was asked for when it ``began``; ``requests`` ran
    or waited then."""

    missed: Sign
    since: float
    began: float
    requests: int = 0
    answered: bool = False
    said: Missed | None = None

    @property
    def is_routine(self) -> bool:
        """It is asked as any idle group is, and answers within a second."""
        return self.missed is Sign.TOKENS

    def describe(self, now: float) -> str:
        """Why it is suspected, in words."""
        seconds = f"{now - self.since:.0f} s"
        match self.missed:
            case Sign.STEPS:
                waiting = "a request waits" if self.requests == 1 else f"{self.requests} requests wait"
                return f"{waiting} and nothing was computed for {seconds}"
            case Sign.HEALTH:
                return f"its health check had no good answer for {seconds}"
            case Sign.LOAD:
                return f"it did not tell its load for {seconds}"
            case Sign.TOKENS:
                return f"no token of it was seen for {seconds}"


class Pulse:
    """What the polls of one engine tell of its life, from the moment that it is ready. Times are those of one clock.

    Busy is one whose steps or cache move, or that answers with a token, also late. Processes that it has just started
    (compilers of kernels) are a sign of life too, and so is, of one ``on_processors``, that it uses them: one step may
    take minutes then. ``is_group``: it is one of several processes. ``can_ask``: its API has a request for one token.
    """

    __slots__ = (
        "_alive_at",
        "_can_ask",
        "_computed",
        "_computed_at",
        "_healthy_at",
        "_idle_at",
        "_is_group",
        "_moved_at",
        "_on_processors",
        "_pace",
        "_requests",
        "_steps_at",
        "_told_at",
        "_usage",
        "_usage_at",
        "suspicion",
    )

    def __init__(self, pace: Pace, now: float, *, is_group: bool, on_processors: bool, can_ask: bool) -> None:
        self._pace = pace
        self._is_group = is_group
        self._on_processors = on_processors
        self._can_ask = can_ask
        self._computed: tuple[int, float | None] | None = None
        self._requests = 0
        self._usage: Usage | None = None
        self._usage_at = now
        # When its steps were last told, when they last grew or a token came, and when nobody last waited.
        self._steps_at = -math.inf
        self._moved_at = self._idle_at = now
        self._healthy_at = self._told_at = now
        self._computed_at = -math.inf
        # When a suspicion was last laid to rest: the next one starts anew.
        self._alive_at = now
        self.suspicion: Suspicion | None = None

    def note_health(self, now: float, *, healthy: bool) -> None:
        """It was asked for its health, and said that it is ready, or said anything else or nothing."""
        if healthy:
            self._healthy_at = now

    def note_load(self, load: Load, now: float) -> None:
        """It has answered when it was asked for its load, or is not asked for that at all."""
        self._told_at = now
        if load.steps is not None:
            self._steps_at = now
            # Where steps are only counted at the end of a request, the cache fills before that.
            computed = (load.steps, load.cache_used)
            if self._computed is not None and computed != self._computed:
                self._moved_at = now
            self._computed = computed
        self._requests = (load.running or 0) + (load.waiting or 0)
        if not self._requests:
            self._idle_at = now

    def note_usage(self, usage: Usage, now: float) -> None:
        """What it takes of its machine."""
        last, elapsed = self._usage, now - self._usage_at
        if last is not None and elapsed > 0:
            has_started_some = bool(last.pids and usage.pids - last.pids)
            computes = usage.cpu_seconds - last.cpu_seconds >= COMPUTING_CORES * elapsed
            if has_started_some or (self._on_processors and computes):
                self._computed_at = now
        self._usage, self._usage_at = usage, now

    def note_answer(self, suspicion: Suspicion, missed: Missed | None, now: float) -> None:
        """What came when it was asked for a token; None is the token."""
        suspicion.said = missed
        if missed is None:
            suspicion.answered = True
            self._moved_at = now

    def judge(self, now: float) -> Finding:
        """What all of it amounts to now."""
        suspicion = self.suspicion
        if suspicion is None:
            self.suspicion = self._suspect(now)
            return Finding.WELL if self.suspicion is None else Finding.ASK
        if self._has_shown_life(suspicion):
            self.suspicion, self._alive_at = None, now
            return Finding.WELL
        return Finding.HUNG if now >= suspicion.began + self._choose_patience(suspicion) else Finding.WAIT

    def _suspect(self, now: float) -> Suspicion | None:
        pace = self._pace
        alive_at = max(self._alive_at, self._moved_at, self._find_computed_at())
        if now - alive_at < pace.suspect:
            return None
        working_since = max(self._moved_at, self._idle_at)
        # By what was seen: of one whose figures are silent nobody knows whether they stand still.
        if self._requests and self._steps_at - working_since >= pace.suspect:
            return Suspicion(missed=Sign.STEPS, since=working_since, began=now, requests=self._requests)
        if now - self._healthy_at >= pace.suspect:
            return Suspicion(missed=Sign.HEALTH, since=self._healthy_at, began=now)
        if now - self._told_at >= pace.suspect:
            return Suspicion(missed=Sign.LOAD, since=self._told_at, began=now)
        if self._is_group and self._can_ask and now - alive_at >= pace.idle:
            return Suspicion(missed=Sign.TOKENS, since=self._moved_at, began=now)
        return None

    def _find_computed_at(self) -> float:
        """When it was last seen to compute, by what it takes of its machine; one that only does that, and gets nowhere,
        turns in a circle."""
        forever = self._computed_at - max(self._moved_at, self._idle_at) > self._pace.computing
        return -math.inf if forever else self._computed_at

    def _has_shown_life(self, suspicion: Suspicion) -> bool:
        if suspicion.answered or max(self._moved_at, self._find_computed_at()) > suspicion.began:
            return True
        # That it answers at all is no sign that it computes.
        if suspicion.missed is Sign.STEPS:
            return False
        refused = suspicion.said is not None and suspicion.said.refused
        answers = suspicion.missed is not Sign.TOKENS and min(self._healthy_at, self._told_at) > suspicion.began
        return refused or answers

    def _choose_patience(self, suspicion: Suspicion) -> float:
        """How long a token may take. Where nobody sees whether it computes it may stand behind long answers."""
        cannot_ask = not self._can_ask or (suspicion.said is not None and suspicion.said.refused)
        is_seen_still = self._steps_at > suspicion.began
        is_silent = max(self._healthy_at, self._told_at) <= suspicion.began
        return self._pace.canary if (is_seen_still or is_silent) and not cannot_ask else self._pace.canary_blind

    def tell(self, now: float) -> str | None:
        """The suspicion in progress, for a person; None where there is none to speak of."""
        suspicion = self.suspicion
        if suspicion is None or (suspicion.is_routine and now - suspicion.began < self._pace.suspect):
            return None
        return f"{'asked for one token' if self._can_ask else 'may be hung'}: {suspicion.describe(now)}"

    def explain(self, now: float) -> str:
        """Why it is called hung, in one line."""
        suspicion = self.suspicion
        if suspicion is None:
            return "hung"
        said = suspicion.said
        if not self._can_ask:
            return f"hung: {suspicion.describe(now)}"
        token = UNANSWERED if said is None or said.silent else f"a request for one token was in vain: {said.words}"
        return f"hung: {suspicion.describe(now)}, and {token}"


async def ask_for_life(
    pulse: Pulse,
    suspicion: Suspicion,
    hands: Hands,
    port: int,
    asks: tuple[Ask, ...],
    *,
    hide: Callable[[str], str],
    limit_seconds: float,
) -> None:
    """Ask for one token, again where the engine says something else, and note what comes of it; for so long at most."""
    with trio.move_on_after(limit_seconds):
        while asks:
            missed = await ask_for_token(hands, port, asks, hide, limit_seconds)
            pulse.note_answer(suspicion, missed, trio.current_time())
            if missed is None or missed.refused:
                return
            await trio.sleep(RETRY_SECONDS)
