from __future__ import annotations

from llmgw.core.weights import Fetch, FileListed, Listing, Phase
from llmgw.host.weights.progress_meter import STEP_BYTES, ProgressMeter

LISTING = Listing(source="hf:o/r/f", commit="c1", files=(FileListed(name="f", size_bytes=1000),))


class Watch:
    """A clock and an ear."""

    def __init__(self, paced: float | None = None) -> None:
        self.now = 100.0
        self.told: list[Fetch] = []
        self.meter = ProgressMeter("hf:o/r/f", self.told.append, lambda: self.now, paced=paced)

    @property
    def last(self) -> Fetch:
        return self.told[-1]

    def tick(self, seconds: float = 1.0) -> Fetch:
        self.now += seconds
        self.meter.tick()
        return self.last


def fetching(paced: float | None = None) -> Watch:
    watch = Watch(paced=paced)
    watch.meter.know(LISTING, 0)
    watch.meter.enter(Phase.FETCHING)
    return watch


def test_it_is_told_at_once_that_it_begins_and_for_whom() -> None:
    assert Watch().told == [Fetch(source="hf:o/r/f", phase=Phase.RESOLVING)]


def test_it_is_told_once_a_second_and_at_each_phase() -> None:
    watch = fetching()
    before = len(watch.told)
    for _ in range(8):
        watch.tick(0.25)
    assert len(watch.told) == before + 2
    watch.meter.enter(Phase.VERIFYING)
    watch.meter.enter(Phase.VERIFYING)
    assert len(watch.told) == before + 3


def test_the_rate_is_that_of_the_last_ten_seconds() -> None:
    watch = fetching()
    for _ in range(20):
        watch.meter.come(10, peer=False)
        watch.meter.lie(10)
        watch.tick()
    assert watch.last.rate == 10.0
    assert watch.last.left_seconds == 80.0
    for _ in range(11):
        watch.meter.come(20, peer=True)
        watch.meter.lie(20)
        watch.tick()
    assert watch.last.rate == 20.0
    assert (watch.last.done_bytes, watch.last.origin_bytes, watch.last.peer_bytes) == (420, 200, 220)


def test_what_stalls_says_since_when_and_has_no_time_left() -> None:
    watch = fetching()
    watch.meter.come(STEP_BYTES, peer=False)
    for _ in range(9):
        assert watch.tick().stalled_seconds is None
    assert watch.tick().stalled_seconds == 10.0
    watch.tick(5.0)
    assert (watch.last.stalled_seconds, watch.last.rate, watch.last.left_seconds) == (15.0, 0.0, None)
    watch.meter.come(STEP_BYTES, peer=False)
    assert watch.tick().stalled_seconds is None


def test_what_drips_stalls_until_so_much_has_come_that_it_is_something() -> None:
    watch = fetching()
    for _ in range(20):
        watch.meter.come(STEP_BYTES // 40, peer=False)
        watch.tick()
    assert watch.last.stalled_seconds == 20.0
    watch.meter.come(STEP_BYTES, peer=True)
    assert watch.tick().stalled_seconds is None


def test_a_piece_that_is_there_is_something_however_short() -> None:
    watch = fetching()
    watch.tick(9.0)
    watch.meter.lie(1)
    assert watch.tick(9.0).stalled_seconds is None
    watch.meter.lie(-1)
    assert watch.tick(1.0).stalled_seconds == 10.0


def test_what_is_held_back_on_purpose_does_not_stall() -> None:
    watch = fetching(paced=100.0)
    for _ in range(20):
        watch.meter.come(100, peer=False)
        assert watch.tick().stalled_seconds is None


def test_an_origin_that_does_not_say_what_there_is_stalls_too() -> None:
    watch = Watch()
    assert watch.tick(9.0).stalled_seconds is None
    assert watch.tick(1.0).stalled_seconds == 10.0


def test_what_is_looked_through_before_the_rest_comes_has_no_time_left() -> None:
    watch = Watch()
    watch.meter.know(LISTING, 0)
    watch.meter.enter(Phase.VERIFYING)
    watch.meter.verify(100)
    watch.tick()
    watch.meter.verify(200)
    assert (watch.tick().rate, watch.last.left_seconds, watch.last.total_bytes) == (100.0, None, 1000)


def test_it_is_never_all_before_it_is_ready() -> None:
    watch = fetching()
    watch.meter.lie(1000)
    watch.meter.enter(Phase.VERIFYING)
    assert watch.last.done_bytes == 999
    watch.meter.end("c1", 1000)
    assert (watch.last.phase, watch.last.done_bytes) == (Phase.READY, 1000)


def test_it_never_falls_where_bytes_prove_wrong() -> None:
    watch = fetching()
    watch.meter.lie(600)
    assert watch.tick().done_bytes == 600
    watch.meter.lie(-600)
    watch.meter.lie(100)
    assert watch.tick().done_bytes == 600


def test_another_commit_begins_anew() -> None:
    watch = fetching()
    watch.meter.lie(600)
    watch.tick()
    watch.meter.know(Listing(source="hf:o/r/f", commit="c2", files=LISTING.files), 0)
    assert (watch.last.commit, watch.last.done_bytes) == ("c2", 0)


def test_the_time_to_verify_is_told_too() -> None:
    watch = fetching()
    watch.meter.lie(1000)
    watch.meter.enter(Phase.VERIFYING)
    watch.meter.verify(100)
    watch.tick()
    watch.meter.verify(300)
    watch.tick()
    assert (watch.last.rate, watch.last.left_seconds) == (150.0, 700 / 150)


def test_a_failure_says_why_and_what_to_do() -> None:
    watch = fetching()
    watch.meter.lie(10)
    watch.meter.fail("the disk is full", "make room")
    assert (watch.last.phase, watch.last.cause, watch.last.remedy) == (Phase.FAILED, "the disk is full", "make room")
    assert (watch.last.done_bytes, watch.last.rate) == (10, None)


def test_what_another_program_fetches_names_that_and_stalls_with_it() -> None:
    watch = Watch()
    watch.meter.queue("pid 7 on host a")
    assert watch.last == Fetch(source="hf:o/r/f", phase=Phase.QUEUED, cause="pid 7 on host a holds the lock")
    for _ in range(4):
        assert watch.tick(9.0).stalled_seconds is None
        watch.meter.queue("pid 7 on host a")
    assert (watch.last.stalled_seconds, watch.last.remedy) == (None, None)
    watch.tick(70.0)
    assert (watch.last.stalled_seconds, watch.last.cause) == (70.0, "pid 7 on host a holds the lock")
    assert "see whether that program hangs" in str(watch.last.remedy)
    watch.meter.queue("another program")
    assert (watch.last.stalled_seconds, watch.last.cause) == (None, "another program holds the lock")
    watch.meter.enter(Phase.RESOLVING)
    assert (watch.last.cause, watch.last.remedy) == (None, None)


def test_when_it_went_on_last_is_known() -> None:
    watch = fetching()
    watch.tick(5.0)
    assert watch.meter.came_at == 100.0
    watch.meter.come(STEP_BYTES, peer=False)
    assert watch.meter.came_at == 105.0


def test_what_is_in_the_way_is_told_while_nothing_comes() -> None:
    watch = fetching()
    watch.meter.come(STEP_BYTES, peer=False)
    watch.meter.note_trouble("the hub answers 503", "wait")
    assert (watch.tick().cause, watch.last.remedy) == ("the hub answers 503", "wait")
    watch.meter.come(STEP_BYTES, peer=True)
    assert (watch.tick().cause, watch.last.remedy) == (None, None)


def test_what_is_in_the_way_of_one_while_others_bring_something_is_no_trouble() -> None:
    watch = fetching()
    for _ in range(5):
        watch.now += 0.9
        watch.meter.come(STEP_BYTES, peer=False)
        watch.meter.note_trouble("the hub answers 503", "wait")
        assert watch.tick(0.9).cause is None
        watch.meter.come(STEP_BYTES, peer=False)


def test_what_nothing_comes_from_is_told_after_ten_seconds() -> None:
    watch = Watch()
    said = ["the hub says nothing"]
    watch.meter.wait_for(said.pop)
    assert watch.tick(9.0).cause is None
    assert (watch.tick(1.0).cause, watch.last.phase) == ("the hub says nothing", Phase.RESOLVING)
    watch.meter.wait_for(None)
    assert watch.tick(50.0).cause is None


def test_what_failed_is_told_rather_than_what_is_waited_for() -> None:
    watch = Watch()
    watch.meter.wait_for(lambda: "the hub says nothing")
    watch.meter.note_trouble("the hub answers 503", "wait")
    assert watch.tick(20.0).cause == "the hub answers 503"


def test_trouble_is_over_in_the_next_phase_and_at_the_end() -> None:
    watch = Watch()
    watch.meter.note_trouble("the hub answers 503", "wait")
    watch.meter.enter(Phase.FETCHING)
    assert watch.tick(5.0).cause is None
    watch.meter.note_trouble("the hub answers 503", "wait")
    watch.meter.end("c1", 0)
    assert (watch.last.cause, watch.last.remedy) == (None, None)


def test_of_what_is_verified_or_waits_for_another_program_nothing_is_in_the_way() -> None:
    for phase in (Phase.QUEUED, Phase.VERIFYING):
        watch = Watch()
        watch.meter.wait_for(lambda: "the hub says nothing")
        watch.meter.enter(phase)
        assert watch.tick(100.0).cause is None


def test_what_lies_here_is_proven_with_how_much_and_how_long_and_never_falls() -> None:
    watch = Watch()
    watch.meter.enter(Phase.VERIFYING)
    watch.meter.prove(LISTING, 0, 0)
    watch.tick()
    watch.meter.prove(LISTING, 100, 100)
    told = watch.tick()
    assert (told.phase, told.commit, told.done_bytes, told.total_bytes) == (Phase.VERIFYING, "c1", 100, 1000)
    assert (told.rate, told.left_seconds) == (50, 18)
    watch.meter.prove(LISTING, 1000, 700)
    assert watch.tick(60).done_bytes == 700
    assert watch.last.stalled_seconds == 60
    watch.meter.mend("f is not what was fetched")
    watch.meter.enter(Phase.FETCHING)
    watch.meter.know(LISTING, 700)
    watch.meter.come(300, peer=True)
    watch.meter.lie(300)
    told = watch.tick()
    mended = "fetched anew, for what lay here of it was damaged: f is not what was fetched"
    assert (told.done_bytes, told.cause, told.remedy) == (999, mended, None)
    watch.meter.note_trouble("the hub answers 503", "wait")
    assert watch.tick(2).cause == "the hub answers 503"
    watch.meter.end("c1", 1000)
    assert (watch.last.phase, watch.last.cause) == (Phase.READY, mended)
