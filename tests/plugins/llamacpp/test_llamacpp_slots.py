"""The rule by which a slot holds what the model promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw_llamacpp import slots


@pytest.mark.parametrize(
    ("args", "context_length", "added"),
    [
        ((), 4096, ("--ctx-size", "4096", "--parallel", "1")),
        ((), None, ("--parallel", "1")),
        (("--ctx-size", "65536"), 32768, ("--parallel", "2")),
        (("-c", "65536"), 40000, ("--parallel", "1")),
        (("-c", "65536"), None, ("--parallel", "1")),
        (("-c", "0"), 4096, ("--parallel", "1")),
        (("--parallel", "3"), 4096, ("--ctx-size", "12288")),
        (("-np", "-1"), 4096, ("--ctx-size", "4096")),
        (("-np", "3"), None, ()),
        (("-np", "3", "--kv-unified-per-slot", "4096"), 4096, ()),
        (("-c", "8192", "-np", "2"), 4096, ()),
    ],
)
def test_what_is_added_gives_a_slot_its_context(
    args: tuple[str, ...], context_length: int | None, added: tuple[str, ...]
) -> None:
    assert slots.share(args, context_length) == added


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (("-c", "8192", "-np", "4"), "give it --ctx-size 16384 or --parallel 2"),
        (("-c", "2048", "-np", "2"), "give it --ctx-size 8192"),
        (("-c", "2048"), "give it --ctx-size 4096"),
        (("-c", "2048", "--kv-unified", "-np", "2"), "give it --ctx-size 4096"),
    ],
)
def test_a_slot_that_is_too_small_is_refused_with_the_number_that_would_do(args: tuple[str, ...], advice: str) -> None:
    (problem,) = slots.check(args, 4096)
    assert problem.key == "args"
    assert problem.message.endswith(advice)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("-c", "8192", "-np", "2"),
        ("-c", "4096", "-np", "2", "-kvu"),
        ("-c", "0", "-np", "2"),
        ("-c", "4096", "-np", "-1"),
        ("-np", "8"),
    ],
)
def test_a_slot_that_is_large_enough_passes(args: tuple[str, ...]) -> None:
    assert slots.check(args, 4096) == []


@pytest.mark.parametrize("value", ["64k", "", "²", "1.5", "9" * 5000])
def test_what_is_no_number_is_named(value: str) -> None:
    (problem,) = slots.check(("--ctx-size", value), 4096)
    assert problem.message.startswith("--ctx-size needs a whole number")
    assert slots.share(("--ctx-size", value), 4096) == ("--parallel", "1")


def test_no_slots_at_all_is_refused() -> None:
    (problem,) = slots.check(("--parallel", "0"), None)
    assert "--parallel 0" in problem.message


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 64))
def test_what_the_rule_adds_always_passes_its_own_check(ctx_size: int, context_length: int, parallel: int) -> None:
    for args in ((), ("--ctx-size", str(ctx_size)), ("--parallel", str(parallel))):
        full = (*args, *slots.share(args, context_length))
        refused = slots.check(args, context_length)
        assert bool(slots.check(full, context_length)) == bool(refused)


def test_a_negative_context_is_refused() -> None:
    for context_length in (None, 4096):
        (problem,) = slots.check(("-c", "-5"), context_length)
        assert problem.message == "--ctx-size -5 is no size: give it the tokens, or 0 for the model's own"
    assert slots.check(("-c", "0"), 4096) == []


@pytest.mark.parametrize("batch", ["0", "-5"])
def test_a_batch_of_nothing_is_refused(batch: str) -> None:
    (problem,) = slots.check(("-b", batch), None)
    assert problem.message == f"--batch-size {batch} is no batch: give it 1 or more"
    assert slots.check(("-b", "1", "-ub", "-5"), None) == []
