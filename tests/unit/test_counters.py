from __future__ import annotations

from llmgw.counters import MAX_SERIES, Counter, Counters


def test_a_counter_grows_by_its_labels() -> None:
    counter = Counter("requests", "Requests by model and status.", ("model", "status"))
    counter.bump("m", "200")
    counter.bump("m", "200", by=2.5)
    counter.bump("m", "500")
    assert counter.values == {("m", "200"): 3.5, ("m", "500"): 1.0}


def test_a_counter_without_labels_is_one_number() -> None:
    counter = Counter("starts", "Starts.")
    counter.bump()
    counter.bump()
    assert counter.values == {(): 2.0}


def test_invented_labels_are_counted_together_and_cost_no_memory() -> None:
    counter = Counter("paths", "Requests by path.", ("path",))
    for number in range(MAX_SERIES + 50):
        counter.bump(f"/{number}")
    counter.bump("/0")
    assert len(counter.values) == MAX_SERIES + 1
    assert counter.values["other",] == 50.0
    assert counter.values["/0",] == 2.0


def test_a_counter_of_a_name_is_made_once() -> None:
    counters = Counters()
    first = counters.counter("requests", "Requests.", ("model",))
    first.bump("m")
    assert counters.counter("requests", "Requests.", ("model",)) is first
    assert counters.by_name == {"requests": first}
