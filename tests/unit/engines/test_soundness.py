"""Answers of plugins that are of the right kind, and hold what is not."""

from __future__ import annotations

import dataclasses

import pytest

from llmgw.core.replica import Load
from llmgw.engines import (
    READY,
    Cause,
    CauseKind,
    Command,
    Embedded,
    EngineInfo,
    Flag,
    FlagChange,
    Health,
    HealthState,
    LogFact,
    ParserFlag,
    RequestRules,
    SourceKind,
    Task,
    Version,
)
from llmgw.engines.soundness import MAX_SECONDS, find_fault, find_wrong

INFO = EngineInfo(
    title="Tiny",
    default_binary="tiny",
    sources=frozenset({SourceKind.FILE}),
    file_suffixes=(".tiny",),
    api_paths=frozenset({"/v1/completions"}),
    load_path="/metrics",
    flag_changes=(FlagChange(flag="--a", gone_in="2", instead="--b"), FlagChange(flag="--c", gone_in="3")),
)
COMMAND = Command(argv=("tiny", "-x"), env={"A": "1"}, defaults={"B": "2"}, scrub=("C_",), cwd="/tmp", serves=False)
SOUND = [
    COMMAND,
    Command(argv=("tiny",)),
    Version(number="1.2", flags=(Flag(names=("--a", "-a")),)),
    Embedded(module="tiny", requires="tiny", install="pip install tiny"),
    READY,
    Health(state=HealthState.BROKEN, reason="so it is"),
    LogFact(progress="half"),
    Cause(kind=CauseKind.OTHER, line="bad", remedy="mend it"),
    ParserFlag(flag="--parser", suggested="hermes"),
    RequestRules(loras={"sql": {"model": "sql"}}, base={}),
    # What is looked at elsewhere, or not at all.
    Load(running=-1),
    ("tiny",),
]


@pytest.mark.parametrize("answer", SOUND, ids=lambda answer: type(answer).__name__)
def test_a_sound_answer_has_no_fault(answer: object) -> None:
    assert find_fault(answer) is None


@pytest.mark.parametrize(
    ("answer", "parts", "fault"),
    [
        (COMMAND, {"argv": ["tiny"]}, "a Command whose argv is not a tuple of text that begins with the program"),
        (COMMAND, {"argv": ()}, "a Command whose argv is not a tuple of text that begins with the program"),
        (COMMAND, {"argv": ("tiny", 8080)}, "a Command whose argv is not a tuple of text that begins with the program"),
        (COMMAND, {"env": None}, "a Command whose env is not a mapping of text"),
        (COMMAND, {"env": {"A": 1}}, "a Command whose env is not a mapping of text"),
        (COMMAND, {"defaults": {1: "A"}}, "a Command whose defaults is not a mapping of text"),
        (COMMAND, {"scrub": "C_"}, "a Command whose scrub is not a tuple of text"),
        (COMMAND, {"cwd": 1}, "a Command whose cwd is not text or None"),
        (COMMAND, {"serves": None, "scrub": (1,)}, "a Command whose scrub is not a tuple of text, and serves is not"),
        (SOUND[2], {"number": 1.2}, "a Version whose number is not text"),
        (SOUND[2], {"flags": ("--a",)}, "a Version whose flags is not a tuple of Flag"),
        (SOUND[2], {"flags": (Flag(names=("--a", None)),)}, "a Version whose flags"),  # type: ignore[arg-type]
        (SOUND[2], {"flags": [Flag(names=("--a",))]}, "a Version whose flags"),
        (SOUND[3], {"requires": None}, "an Embedded whose requires is not text"),
        (SOUND[5], {"state": "broken"}, "a Health whose state is not a HealthState"),
        (SOUND[6], {"progress": 50}, "a LogFact whose progress is not text"),
        (SOUND[7], {"kind": "odd"}, "a Cause whose kind is not a CauseKind"),
        (SOUND[7], {"remedy": ("a", "b")}, "a Cause whose remedy is not text or None"),
        (SOUND[8], {"flag": None}, "a ParserFlag whose flag is not text"),
        (SOUND[9], {"loras": ["sql"]}, "a RequestRules whose loras is not a mapping"),
    ],
)
def test_a_part_that_is_not_what_it_has_to_be_is_named(answer: object, parts: dict[str, object], fault: str) -> None:
    found = find_fault(dataclasses.replace(answer, **parts))  # type: ignore[type-var]
    assert found is not None
    assert found.startswith(fault)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"tasks": {Task.EMBED}, "sources": set(), "api_paths": set()},
        {"stop_grace_seconds": 0, "probe_seconds": MAX_SECONDS},
        {"load_path": None, "flag_changes": (), "file_suffixes": ()},
    ],
)
def test_a_sound_description_has_nothing_wrong(parts: dict[str, object]) -> None:
    assert find_wrong(dataclasses.replace(INFO, **parts)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "wrong"),
    [
        ({"probe_seconds": float("nan")}, ["probe_seconds is nan"]),
        ({"probe_seconds": float("inf")}, ["probe_seconds is inf"]),
        ({"probe_seconds": 10**400}, [f"probe_seconds is {10**400}"]),
        ({"stop_grace_seconds": float("nan")}, ["stop_grace_seconds is nan"]),
        ({"stop_grace_seconds": -1}, ["stop_grace_seconds is -1"]),
        ({"flag_changes": ("--a", "--b")}, ["flag_changes has str in it, not FlagChange"]),
        (
            {"flag_changes": (FlagChange(flag="--a", gone_in=2),)},  # type: ignore[arg-type]
            ["flag_changes has a FlagChange whose gone_in is not text"],
        ),
        ({"flag_style": None}, ["flag_style is NoneType"]),
        ({"tasks": {"chat", "cook"}}, ["tasks has str in it, not Task"]),
        ({"sources": frozenset({None})}, ["sources has NoneType in it, not SourceKind"]),
        (
            {"api_paths": {1}, "file_suffixes": (b".x",)},
            ["api_paths has int in it, not str", "file_suffixes has bytes"],
        ),
        ({"load_path": 1, "owned_by": b"x"}, ["load_path is int", "owned_by is bytes"]),
    ],
)
def test_what_is_wrong_in_a_description_is_named_once(parts: dict[str, object], wrong: list[str]) -> None:
    found = find_wrong(dataclasses.replace(INFO, **parts))  # type: ignore[arg-type]
    assert len(found) == len(wrong)
    for words, expected in zip(found, wrong, strict=True):
        assert words.startswith(expected)
