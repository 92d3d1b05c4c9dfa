"""engine-check over releases of llama.cpp: which flags each of them would not take, and what to write instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import llmgw_llamacpp
from llmgw.engines import Flag, Launch, ProbeOutput, Version
from llmgw.engines.check import FlagState, check_launch, launch_of, sample_model
from llmgw.engines.registry import open_engine
from llmgw.engines.testing import read_flags
from llmgw_llamacpp.options import help_text

HERE = Path(__file__).parent
ENGINE = open_engine("llamacpp", llmgw_llamacpp)
OK, RENAMED, REMOVED, UNKNOWN = FlagState.OK, FlagState.RENAMED, FlagState.REMOVED, FlagState.UNKNOWN
DEPRECATED, WRONG = FlagState.DEPRECATED, FlagState.WRONG_VALUE


def known(release: str) -> Version:
    """The flags of a release by name alone, from its table."""
    flags = read_flags((HERE / "flags" / f"llama-server-{release}.txt").read_text())
    return Version(number=release[1:], flags=tuple(Flag(names=(name,)) for name in sorted(flags)))


def probed(text: str) -> Version:
    outputs = [
        ProbeOutput(code=0, stdout="", stderr="version: 0.1.0-dev (build 1, commit a)\n"),
        ProbeOutput(code=0, stdout=text, stderr=""),
    ]
    version = ENGINE.read_probe(outputs)
    assert version is not None
    return version


RELEASES = {release: known(release) for release in ("b8672", "b10068", "b10434", "b11549")}
HELPED = probed((HERE / "help" / "b10434.txt").read_text(encoding="utf-8"))
EMBEDDED = probed(help_text())


def launch(version: Version, *args: str) -> Launch:
    model, profile = sample_model(ENGINE)
    return launch_of(model, replace(profile, args=args), ("llama-server",), version)


def states(version: Version, *args: str) -> dict[str, FlagState]:
    found = check_launch(ENGINE, launch(version, *args))
    return {finding.flag: finding.state for finding in found if finding.given_by == "profile"}


@pytest.mark.parametrize("version", [*RELEASES.values(), HELPED, EMBEDDED], ids=[*RELEASES, "help", "embedded"])
def test_every_release_takes_what_llmgw_passes(version: Version) -> None:
    for asked in (launch(version), replace(launch(version), gpus=()), replace(launch(version), threads=2)):
        assert {finding.state for finding in check_launch(ENGINE, asked)} == {OK}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--draft-max", "3"), (OK, RENAMED, RENAMED, RENAMED)),
        (("--spec-draft-n-max", "3"), (RENAMED, OK, OK, OK)),
        (("--ctx-size-draft", "3"), (OK, REMOVED, REMOVED, REMOVED)),
        (("--verbose-prompt",), (REMOVED, REMOVED, REMOVED, REMOVED)),
        (("--clear-idle",), (OK, RENAMED, RENAMED, RENAMED)),
        (("--mlock",), (OK, OK, OK, RENAMED)),
        (("--load-mode", "mlock"), (RENAMED, RENAMED, OK, OK)),
        (("--kv-unified-per-slot", "64"), (UNKNOWN, UNKNOWN, UNKNOWN, OK)),
        (("--jinja",), (OK, OK, OK, OK)),
    ],
)
def test_a_flag_that_came_or_went_is_told_of_each_release(
    args: tuple[str, ...], expected: tuple[FlagState, ...]
) -> None:
    assert tuple(states(version, *args)[args[0]] for version in RELEASES.values()) == expected


@pytest.mark.parametrize(
    ("args", "state", "words"),
    [
        (("--mlock",), DEPRECATED, "--load-mode"),
        (("--draft-max", "3"), RENAMED, "--spec-draft-n-max"),
        (("--spec-ngram-size-n", "3"), RENAMED, "--spec-ngram-simple-size-n"),
        (("--flash-attn",), WRONG, "it needs a value"),
        (("--flash-attn", "maybe"), WRONG, "'maybe' is none of"),
        (("--flash_attn", "on"), OK, None),
        (("-fa", "1"), OK, None),
        (("--cache-type-k", "q8"), WRONG, "q8_0"),
        (("--pooling", "most"), WRONG, "'most' is none of"),
        (("--warmup", "on"), WRONG, "it takes no value"),
        (("--ctx-siez", "9"), UNKNOWN, "--ctx-size"),
    ],
)
def test_the_help_of_a_release_tells_more(args: tuple[str, ...], state: FlagState, words: str | None) -> None:
    (finding,) = (each for each in check_launch(ENGINE, launch(HELPED, *args)) if each.given_by == "profile")
    assert finding.state is state
    assert (finding.detail is None) if words is None else (words in str(finding.detail))
