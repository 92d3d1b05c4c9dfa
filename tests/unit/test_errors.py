from __future__ import annotations

import pytest

from llmgw.errors import ConfigError, EngineFailed, LinkLost, LlmgwError, Problem, UsageError, only_ours


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem(key="auth.x", message="unknown key"), "auth.x: unknown key"),
        (Problem(key="auth.x", message="unknown key", where="a.yaml:4:3"), "a.yaml:4:3 auth.x: unknown key"),
        (Problem(key="", message="not a mapping", where="a.yaml:1:1"), "a.yaml:1:1 not a mapping"),
        (Problem(key="", message="empty"), "empty"),
    ],
)
def test_a_problem_says_where_and_what(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_a_configuration_error_tells_all_its_problems() -> None:
    problems = [Problem(key="a", message="one"), Problem(key="b", message="two")]
    error = ConfigError(problems)
    assert str(error) == "a: one\nb: two"
    assert error.problems == tuple(problems)


def test_a_failed_engine_carries_its_last_lines() -> None:
    assert EngineFailed("out of memory", ("line 1", "line 2")).lines == ("line 1", "line 2")
    assert EngineFailed("out of memory").lines == ()


@pytest.mark.parametrize("error", [UsageError("m"), EngineFailed("m"), LinkLost("m")])
def test_every_error_of_ours_has_one_root_and_its_message(error: LlmgwError) -> None:
    assert isinstance(error, LlmgwError)
    assert error.message == str(error) == "m"


def test_a_configuration_error_has_the_same_root() -> None:
    assert isinstance(ConfigError([]), LlmgwError)


def test_the_one_error_of_ours_is_taken_out_of_its_wrapping() -> None:
    ours, odd = LlmgwError("x"), ValueError("y")
    assert only_ours(BaseExceptionGroup("a", [BaseExceptionGroup("b", [ours])])) is ours
    mixed = BaseExceptionGroup("a", [ours, odd])
    assert only_ours(mixed) is mixed
    alone = BaseExceptionGroup("a", [odd])
    assert only_ours(alone) is alone
