"""Parsers that a profile chooses, against those that a binary lists, and the one that fits a model."""

from __future__ import annotations

import pytest

from llmgw.engines import (
    Flag,
    FlagStyle,
    Model,
    ModelName,
    ParserFlag,
    Profile,
    Takes,
    Task,
    Version,
    check_parsers,
    name_tool_parser,
)

STYLE = FlagStyle()
FLAGS = {"tool_parser": "--tools", "reasoning_parser": "--thoughts"}
TOOLS = Flag(names=("--tools",), takes=Takes.ONE, choices=frozenset({"hermes", "xml"}), widened_by="--more-tools")
VERSION = Version(number="1", flags=(TOOLS, Flag(names=("--thoughts",), takes=Takes.ONE)))
FITTING = ((r"distill", None), (r"qwen-?3", "hermes"), (r"qwen", "xml"))


def check(*args: str, version: Version | None = VERSION, **facts: str) -> list[str]:
    profile = Profile(name="p", engine="e", args=args, **facts)  # type: ignore[arg-type]
    return [f"{problem.key}: {problem.message}" for problem in check_parsers(profile, version, STYLE, FLAGS)]


def test_one_that_the_binary_lacks_is_refused_where_it_was_written() -> None:
    said = "this release has no parser 'herms' for --tools: did you mean hermes?"
    assert check(tool_parser="herms") == [f"tool_parser: {said}"]
    assert check("--tools", "herms") == [f"args: {said}"]
    assert check(tool_parser="zzz") == ["tool_parser: this release has no parser 'zzz' for --tools: it has hermes, xml"]


def test_one_that_can_not_be_known_is_let_through() -> None:
    assert check(tool_parser="hermes", reasoning_parser="anything") == []
    assert check("--more-tools", "ours.py", tool_parser="ours") == []
    for version in (None, Version(number="1"), Version(number="1", flags=VERSION.flags[1:])):
        assert check(tool_parser="herms", version=version) == []


def test_one_that_is_given_twice_is_refused() -> None:
    assert check("--thoughts=a", reasoning_parser="b") == [
        "args: --thoughts is not for args: the profile has reasoning_parser b"
    ]


@pytest.mark.parametrize(
    ("source", "name", "suggested"),
    [
        ("org/Qwen3-8B", "m", "hermes"),
        ("org/QWEN 3", "m", "hermes"),
        ("/srv/qwen_3", "m", "hermes"),
        ("/srv/m1", "qwen2", "xml"),
        ("org/Distill-Qwen", "m", None),
        ("org/other", "m", None),
    ],
)
def test_the_first_pattern_that_fits_the_source_or_the_name_counts(
    source: str, name: str, suggested: str | None
) -> None:
    model, profile = Model(name=ModelName(name), source=source, profiles=()), Profile(name="p", engine="e")
    found = name_tool_parser(model, profile, STYLE, "--tools", iter(FITTING))
    assert found == ParserFlag(flag="--tools", suggested=suggested)


def test_what_is_given_is_told_and_a_model_without_chats_has_none() -> None:
    model = Model(name=ModelName("m"), source="org/m", profiles=())
    for profile in (
        Profile(name="p", engine="e", tool_parser="xml"),
        Profile(name="p", engine="e", args=("--tools", "xml")),
    ):
        assert name_tool_parser(model, profile, STYLE, "--tools", ()) == ParserFlag(flag="--tools", given="xml")
    embed = Model(name=ModelName("m"), source="org/qwen3", task=Task.EMBED, profiles=())
    assert name_tool_parser(embed, Profile(name="p", engine="e"), STYLE, "--tools", FITTING) is None
