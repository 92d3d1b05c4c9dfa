"""Hung is not busy: what the polls of an engine amount to, by a clock that jumps."""

from __future__ import annotations

import itertools

import pytest
import trio

from llmgw.agent.canary import Ask, Missed
from llmgw.agent.pulse import RETRY_SECONDS, Finding, Pulse, Sign, Suspicion, ask_for_life
from llmgw.agent.settings import Pace
from llmgw.core.replica import Load
from llmgw.host.http import REFUSED, Reply
from llmgw.host.usage import Usage

WELL, ASK, WAIT, HUNG = Finding.WELL, Finding.ASK, Finding.WAIT, Finding.HUNG
POLL_SECONDS = 5
# One that steps forward at each poll, and one that stands still with somebody waiting.
BUSY = [Load(running=2, waiting=3, steps=steps) for steps in range(1000)]
STILL = [Load(running=2, waiting=1, steps=7)] * 1000
IDLE = [Load(running=0, waiting=0, steps=7)] * 1000
SILENT = [None] * 1000
# Its metrics are off, or not understood.
MUTE = [Load()] * 1000


def start(*, is_group=False, on_processors=False, can_ask=True):
    return Pulse(Pace(), 0.0, is_group=is_group, on_processors=on_processors, can_ask=can_ask)


class Days:
    """An engine that is polled every few seconds; what was found, and when."""

    def __init__(self, pulse):
        self.pulse = pulse
        self.now = 0.0
        self.found = []

    def pass_by(self, loads, seconds, *, healthy=True, cores=None, pids=frozenset({1})):
        """Polls that see this, until something else than WELL or WAIT is found."""
        for load in loads[: int(seconds // POLL_SECONDS)]:
            self.now += POLL_SECONDS
            self.pulse.note_health(self.now, healthy=healthy)
            if load is not None:
                self.pulse.note_load(load, self.now)
            if cores is not None:
                self.pulse.note_usage(Usage(pids=pids, cpu_seconds=cores * self.now), self.now)
            finding = self.pulse.judge(self.now)
            self.found.append((finding, self.now))
            if finding in (ASK, HUNG):
                return finding
        return WELL if self.pulse.suspicion is None else WAIT


@pytest.mark.parametrize("loads", [IDLE, BUSY, MUTE])
def test_an_engine_that_is_idle_or_computes_is_asked_for_nothing(loads):
    assert Days(start()).pass_by(loads, 4000) is WELL


def test_requests_that_wait_for_nothing_make_it_suspected_and_then_hung():
    days = Days(start())
    assert days.pass_by(IDLE, 100) is WELL
    assert days.pass_by(STILL, 100) is ASK
    assert days.now == 130
    assert days.pulse.tell(131) == "asked for one token: 3 requests wait and nothing was computed for 31 s"
    assert days.pass_by(STILL, 1000) is HUNG
    assert days.now == 190
    said = "hung: 3 requests wait and nothing was computed for 90 s, and it did not answer a request for one token"
    assert days.pulse.explain(days.now) == said


def test_a_token_that_comes_late_shows_it_busy_and_the_next_suspicion_starts_anew():
    days = Days(start())
    assert days.pass_by(STILL, 100) is ASK
    assert days.pass_by(STILL, 55) is WAIT
    days.pulse.note_answer(days.pulse.suspicion, None, days.now)
    began = days.now
    assert days.pass_by(STILL, POLL_SECONDS) is WELL
    assert days.pulse.tell(days.now) is None
    assert days.pass_by(STILL, 100) is ASK
    assert days.now == began + POLL_SECONDS + Pace().suspect


def test_a_token_behind_long_answers_never_comes_and_the_steps_show_it_busy():
    days = Days(start())
    assert days.pass_by(STILL, 100) is ASK
    assert days.pass_by(STILL, 50) is WAIT
    assert days.pass_by(BUSY, 4000) is WELL


def test_a_prefill_whose_steps_come_every_other_minute_is_busy():
    days = Days(start())
    for steps in range(20):
        assert days.pass_by([Load(running=1, waiting=0, steps=steps)] * 24, 25) is WELL
        days.pass_by([Load(running=1, waiting=0, steps=steps)] * 24, 5)
        assert days.pass_by([Load(running=1, waiting=0, steps=steps)] * 24, 55) is not HUNG


def test_where_steps_are_counted_at_the_end_of_an_answer_the_cache_shows_it_busy():
    loads = [Load(running=2, waiting=3, cache_used=share / 1000, steps=7) for share in range(1000)]
    assert Days(start()).pass_by(loads, 4000) is WELL


def test_an_idle_hour_does_not_count_against_the_request_that_comes_then():
    days = Days(start())
    days.pass_by(IDLE, 3600)
    assert days.pass_by(STILL, 25) is WELL


def test_one_that_is_wholly_silent_is_hung():
    days = Days(start())
    days.pass_by(IDLE, 100)
    assert days.pass_by(SILENT, 100, healthy=False) is ASK
    assert days.pulse.suspicion.missed is Sign.HEALTH
    assert days.pass_by(SILENT, 1000, healthy=False) is HUNG
    assert days.now == 190
    said = "hung: its health check had no good answer for 90 s, and it did not answer a request for one token"
    assert days.pulse.explain(days.now) == said


def test_one_whose_health_is_silent_and_whose_steps_grow_is_not_even_asked():
    assert Days(start()).pass_by(BUSY, 4000, healthy=False) is WELL


def test_one_that_answers_again_was_not_hung():
    days = Days(start())
    assert days.pass_by(SILENT, 100, healthy=False) is ASK
    assert days.pass_by(SILENT, 50, healthy=False) is WAIT
    assert days.pass_by(IDLE, 4000) is WELL


def test_where_nobody_sees_its_steps_a_token_may_stand_behind_long_answers():
    days = Days(start())
    days.pass_by(STILL, 20)
    assert days.pass_by(SILENT, 100) is ASK
    assert days.pulse.suspicion.missed is Sign.LOAD
    began = days.now
    assert days.pass_by(SILENT, 1000) is HUNG
    assert days.now == began + Pace().canary_blind


def test_without_figures_health_alone_is_a_sign_of_life():
    days = Days(start())
    assert days.pass_by(MUTE, 100, healthy=False) is ASK
    assert days.pass_by(MUTE, 100, healthy=True) is WELL
    assert days.pass_by(MUTE, 100, healthy=False) is ASK
    began = days.now
    assert days.pass_by(MUTE, 1000, healthy=False) is HUNG
    assert days.now == began + Pace().canary_blind


def test_an_idle_group_is_asked_for_a_token_every_minute():
    days = Days(start(is_group=True))
    for number in range(1, 4):
        assert days.pass_by(IDLE, 1000) is ASK
        assert days.now == number * (Pace().idle + POLL_SECONDS) - POLL_SECONDS
        assert days.pulse.tell(days.now) is None
        days.pulse.note_answer(days.pulse.suspicion, None, days.now)
        days.pass_by(IDLE, POLL_SECONDS)


def test_an_idle_group_with_a_dead_rank_is_hung_while_its_health_is_good():
    days = Days(start(is_group=True))
    assert days.pass_by(IDLE, 1000) is ASK
    assert days.pass_by(STILL, 1000) is HUNG
    assert days.now == 120
    said = "hung: no token of it was seen for 120 s, and it did not answer a request for one token"
    assert days.pulse.explain(days.now) == said


def test_a_group_that_computes_is_asked_for_nothing():
    assert Days(start(is_group=True)).pass_by(BUSY, 4000) is WELL


def test_an_engine_that_takes_no_such_request_is_judged_by_its_steps_alone():
    days = Days(start(can_ask=False))
    assert days.pass_by(STILL, 100) is ASK
    began = days.now
    assert days.pulse.tell(began) == "may be hung: 3 requests wait and nothing was computed for 30 s"
    assert days.pass_by(STILL, 1000) is HUNG
    assert days.now == began + Pace().canary_blind
    assert days.pulse.explain(days.now) == "hung: 3 requests wait and nothing was computed for 330 s"
    assert Days(start(can_ask=False, is_group=True)).pass_by(IDLE, 4000) is WELL


def test_a_refusal_is_no_token_and_no_silence():
    days = Days(start(is_group=True))
    assert days.pass_by(IDLE, 100) is ASK
    days.pulse.note_answer(days.pulse.suspicion, Missed(words="no such model", refused=True), days.now)
    assert days.pass_by(IDLE, POLL_SECONDS) is WELL
    assert days.pass_by(STILL, 100) is ASK
    began = days.now
    days.pulse.note_answer(days.pulse.suspicion, Missed(words="no such model", refused=True), days.now)
    assert days.pass_by(STILL, 1000) is HUNG
    assert days.now == began + Pace().canary_blind
    assert days.pulse.explain(days.now).endswith("and a request for one token was in vain: no such model")


def test_a_step_of_minutes_on_processors_is_seen_by_their_use():
    days = Days(start(on_processors=True))
    assert days.pass_by(STILL, 1000, cores=4.0) is WELL
    assert days.pass_by(SILENT, 500, healthy=False, cores=4.0) is WELL


@pytest.mark.parametrize(("on_processors", "cores"), [(True, 0.02), (False, 4.0)])
def test_polls_alone_and_a_cards_driver_use_processors_too(on_processors, cores):
    days = Days(start(on_processors=on_processors))
    assert days.pass_by(STILL, 1000, cores=cores) is ASK
    assert days.pass_by(STILL, 1000, cores=cores) is HUNG


def test_one_that_turns_in_a_circle_is_hung_in_the_end():
    days = Days(start(on_processors=True))
    assert days.pass_by(STILL, 4000, cores=1.0) is ASK
    assert Pace().computing < days.now < Pace().computing + 60
    assert days.pass_by(STILL, 4000, cores=1.0) is HUNG


def test_compilers_that_it_starts_show_it_busy():
    days = Days(start())
    for pid in range(2, 40):
        assert days.pass_by(STILL, 10, cores=1.0, pids=frozenset({1, pid})) is WELL
    assert days.pass_by(STILL, 100, cores=1.0, pids=frozenset({1})) is ASK


def test_one_request_is_not_several():
    suspicion = Suspicion(missed=Sign.STEPS, since=0.0, began=31.0, requests=1)
    assert suspicion.describe(31.4) == "a request waits and nothing was computed for 31 s"


class Answers:
    """Hands to which an engine gives these answers, each after so many seconds."""

    def __init__(self, *answers):
        self.answers = itertools.chain(answers, itertools.repeat(answers[-1]))
        self.asked_at = []

    async def post(self, port, path, body):
        self.asked_at.append(trio.current_time())
        seconds, reply = next(self.answers)
        await trio.sleep(seconds)
        return reply


async def ask(hands, limit_seconds=300.0):
    pulse = start()
    suspicion = Suspicion(missed=Sign.HEALTH, since=0.0, began=trio.current_time())
    asks = (Ask(path="/v1/completions", body={}),)
    await ask_for_life(pulse, suspicion, hands, 1, asks, hide=str, limit_seconds=limit_seconds)
    return suspicion


async def test_one_token_is_a_sign_of_life(autojump_clock):
    hands = Answers((200.0, Reply(status=200, body="")))
    suspicion = await ask(hands)
    assert suspicion.answered
    assert len(hands.asked_at) == 1


async def test_no_token_is_waited_for_no_longer_than_it_may_take(autojump_clock):
    began = trio.current_time()
    suspicion = await ask(Answers((10_000.0, REFUSED)))
    assert trio.current_time() - began == 300.0
    assert not suspicion.answered


async def test_one_that_fails_or_has_no_time_is_asked_again(autojump_clock):
    full, gone, done = (Reply(status=status, body="") for status in (503, 429, 200))
    hands = Answers((0.0, full), (0.0, gone), (0.0, REFUSED), (0.0, done))
    suspicion = await ask(hands)
    assert suspicion.answered
    assert hands.asked_at[-1] - hands.asked_at[0] == 3 * RETRY_SECONDS


async def test_one_that_refuses_is_asked_once(autojump_clock):
    hands = Answers((0.0, Reply(status=400, body="no")))
    suspicion = await ask(hands)
    assert suspicion.said == Missed(words="/v1/completions answered 400 no", refused=True)
    assert len(hands.asked_at) == 1
