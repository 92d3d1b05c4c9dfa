"""engine-check over releases of SGLang: which flags each of them would not take, and what to write instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import llmgw_sglang
from llmgw.engines import Flag, Launch, Lora, ModelName, Takes, Task, Version
from llmgw.engines.check import FlagFinding, FlagState, check_launch, launch_of, sample_model
from llmgw.engines.registry import open_engine

HERE = Path(__file__).parent
ENGINE = open_engine("sglang", llmgw_sglang)
OK, RENAMED, REMOVED, UNKNOWN = FlagState.OK, FlagState.RENAMED, FlagState.REMOVED, FlagState.UNKNOWN
DEPRECATED, WRONG = FlagState.DEPRECATED, FlagState.WRONG_VALUE


def read(table: Path) -> Version:
    flags = []
    for row in table.read_text(encoding="utf-8").splitlines():
        if not row.startswith("#"):
            names, takes, choices, deprecated = (*row.split("\t"), "", "", "")[:4]
            allowed = frozenset(choices.split(",")) - {""}
            flags.append(
                Flag(
                    names=tuple(names.split()),
                    takes=Takes(takes),
                    choices=allowed,
                    deprecated=deprecated or None,
                )
            )
    return Version(number=table.stem, flags=tuple(flags))


RELEASES = {table.stem: read(table) for table in (HERE / "flags").glob("*.txt")}


def launch(version: Version | None, *args: str) -> Launch:
    model, profile = sample_model(ENGINE)
    return launch_of(model, replace(profile, args=args), ("/opt/sglang/bin/sglang",), version)


def judge(release: str, *args: str) -> FlagFinding:
    """What is found of the first flag of the profile's."""
    found = check_launch(ENGINE, launch(RELEASES[release], *args))
    return next(finding for finding in found if finding.given_by == "profile")


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_every_release_takes_what_llmgw_passes(release: str) -> None:
    asked = launch(RELEASES[release])
    more = replace(
        asked,
        tp=2,
        pp=2,
        rank=1,
        count=2,
        rendezvous="10.0.0.1:29600",
        tool_parser="llama3",
        reasoning_parser="qwen3",
        loras=(Lora(name=ModelName("sql"), source="/srv/sql"),),
    )
    python = replace(asked, program=("/opt/venv/bin/python3",), task=Task.EMBED)
    for each in (asked, more, python):
        assert {finding.state for finding in check_launch(ENGINE, each)} == {OK}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        # in 0.5.1, 0.5.10, 0.5.18, 0.5.20 and 0.5.23; None where it is not there yet
        (("--cuda-graph-max-bs", "8"), (OK, OK, DEPRECATED, RENAMED, RENAMED)),
        (("--cuda-graph-max-bs-decode", "8"), (RENAMED, RENAMED, OK, OK, OK)),
        (("--max-micro-batch-size", "8"), (OK, RENAMED, RENAMED, RENAMED, RENAMED)),
        (("--enable-ep-moe",), (DEPRECATED, RENAMED, RENAMED, RENAMED, RENAMED)),
        (("--enable-double-sparsity",), (OK, OK, REMOVED, REMOVED, REMOVED)),
        # with no value it only says that it is on its way out
        (("--hybrid-kvcache-ratio", "0.5"), (OK, WRONG, RENAMED, RENAMED, RENAMED)),
        (("--torchao-config", "int8wo"), (OK, OK, REMOVED, REMOVED, REMOVED)),
        (("--nsa-prefill-backend", "fa3"), (None, OK, DEPRECATED, RENAMED, RENAMED)),
        # Of several that became one none is the one that is meant.
        (("--cp-strategy", "zigzag"), (UNKNOWN, RENAMED, OK, OK, OK)),
        (("--incremental-streaming-output",), (RENAMED, OK, OK, OK, OK)),
        # Not there yet, and gone again in 0.5.20.
        (("--prefill-round-robin-balance", "x"), (UNKNOWN, WRONG, WRONG, REMOVED, REMOVED)),
        (("--stream-output",), (OK, DEPRECATED, DEPRECATED, RENAMED, RENAMED)),
        (("--collect-tokens-histogram",), (OK, OK, DEPRECATED, REMOVED, REMOVED)),
        (("--prefill-round-robin-balance",), (None, OK, OK, REMOVED, REMOVED)),
        (("--disable-cuda-graph",), (OK, OK, DEPRECATED, DEPRECATED, DEPRECATED)),
        (("--enable-dp-attention",), (OK, OK, OK, OK, DEPRECATED)),
        (("--attn-dp-size", "2"), (UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, OK)),
        (("--keep-mm-feature-on-device",), (None, OK, DEPRECATED, DEPRECATED, RENAMED)),
        (("--impl", "auto"), (RENAMED, RENAMED, RENAMED, RENAMED, RENAMED)),
        (("--enable-flashmla",), (RENAMED, RENAMED, RENAMED, RENAMED, RENAMED)),
        (("--n-share-experts-fusion", "1"), (REMOVED, REMOVED, REMOVED, REMOVED, REMOVED)),
        (("--schedule-policy", "fcfs"), (OK, OK, OK, OK, OK)),
        (("--schedule-policy", "fsfc"), (WRONG, WRONG, WRONG, WRONG, WRONG)),
        (("--enable-lora", "on"), (WRONG, WRONG, WRONG, WRONG, WRONG)),
        (("--mem-fraction-static",), (WRONG, WRONG, WRONG, WRONG, WRONG)),
        (("--context_length", "8192"), (UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)),
        (("--tool-call-parser", "auto"), (WRONG, WRONG, OK, OK, OK)),
        (("--ep", "2"), (OK, OK, OK, OK, OK)),
        (("--dp", "2"), (DEPRECATED, DEPRECATED, DEPRECATED, DEPRECATED, DEPRECATED)),
        (("--nope",), (UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)),
    ],
)
def test_a_flag_over_the_releases(args: tuple[str, ...], expected: tuple[FlagState | None, ...]) -> None:
    releases = ("0.5.1", "0.5.10", "0.5.18", "0.5.20", "0.5.23")
    found = [judge(release, *args) for release in releases]
    for each, state in zip(found, expected, strict=True):
        assert each.breaks if state is None else each.state is state


def test_the_new_name_is_told() -> None:
    assert judge("0.5.23", "--max-micro-batch-size", "8").detail == "this release calls it --pp-max-micro-batch-size"
    assert judge("0.5.10", "--cuda-graph-max-bs-decode", "8").detail == "this release calls it --cuda-graph-max-bs"
    assert "--dsa-prefill-backend" in str(judge("0.5.18", "--nsa-prefill-backend", "fa3").detail)
    assert "gone since 0.5.18" in str(judge("0.5.23", "--torchao-config", "int8wo").detail)


def test_what_is_short_for_several_is_told_with_all_of_them() -> None:
    found = judge("0.5.23", "--pp", "2")
    assert found.state is UNKNOWN
    assert found.detail == "could be any of --pp-async-batch-depth, --pp-max-micro-batch-size, --pp-size"


def test_a_parser_that_is_nearly_right_is_told() -> None:
    assert "did you mean qwen3_coder?" in str(judge("0.5.23", "--tool-call-parser", "qwen3-coder").detail)


def test_without_a_help_the_number_tells_what_is_gone() -> None:
    found = check_launch(ENGINE, launch(Version(number="0.5.21"), "--cuda-graph-bs", "1"))
    assert found[-1].state is RENAMED
    found = check_launch(ENGINE, launch(Version(number="0.5.19"), "--cuda-graph-bs", "1"))
    assert {finding.state for finding in found} == {FlagState.UNCHECKED}
