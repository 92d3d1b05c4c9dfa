"""Numbers of releases, and what they say of flags."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.engines import Flag, FlagChange, Version, knows, list_changes, order_release


def test_releases_are_in_their_order() -> None:
    for numbers in (("0.9.2", "0.10.1", "0.11", "0.11.1", "1.0"), ("b9999", "b10000"), ("", "0.1")):
        assert sorted(numbers, key=order_release) == list(numbers)


@pytest.mark.parametrize("number", ["0.11", "0.11.0", "v0.11", "0.11.0+cpu", "0.11.0.post1", "0.11.0rc2", "0.11-dev"])
def test_what_stands_beside_the_number_counts_for_nothing(number: str) -> None:
    assert order_release(number) == (0, 11)


@given(st.text())
def test_any_text_has_an_order(text: str) -> None:
    assert order_release(text) >= ()


def test_a_help_tells_what_a_release_takes_whatever_its_number() -> None:
    version = Version(number="0.1", flags=(Flag(names=("--new", "-n")),))
    assert knows(version, "-n", since="0.5")
    assert not knows(version, "--old", until="0.5")


@pytest.mark.parametrize(
    ("number", "new", "old"),
    [
        ("0.4.9", False, True),
        ("0.5", True, False),
        ("0.5.1", True, False),
        ("nightly", True, False),
        (None, True, False),
    ],
)
def test_without_a_help_the_number_tells(number: str | None, new: bool, old: bool) -> None:
    version = Version(number=number) if number is not None else None
    assert knows(version, "--new", since="0.5") is new
    assert knows(version, "--old", until="0.5.0") is old
    assert knows(version, "--any")


@pytest.mark.parametrize("version", [None, Version(number="nightly")])
def test_what_an_unknown_release_takes_may_be_said(version: Version | None) -> None:
    assert not knows(version, "--new", since="0.5", unknown=False)
    assert knows(version, "--old", until="0.5", unknown=True)


def test_changes_are_listed_by_the_release_that_dropped_them() -> None:
    assert list_changes({"0.5": {"--a": None, "--b": "--c"}, "0.6": {"--c": None}}) == (
        FlagChange(flag="--a", gone_in="0.5"),
        FlagChange(flag="--b", gone_in="0.5", instead="--c"),
        FlagChange(flag="--c", gone_in="0.6"),
    )
