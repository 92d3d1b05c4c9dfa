"""An engine is tried for what it offers, and for nothing that it does not."""

from __future__ import annotations

from dataclasses import replace

from llmgw.core.model import Task
from llmgw.engines import EngineInfo, Launch, SourceKind
from llmgw.engines.registry import find_unable
from llmgw.engines.samples import definition_of, sample_launches

LAUNCH = Launch(
    program=("t",), source="/m.tiny", served_name="m", host="h", port=1, context_length=2, max_output=1, threads=3
)
LITTLE = EngineInfo(title="Tiny", default_binary="tiny", sources=frozenset({SourceKind.FILE}), file_suffixes=(".tiny",))
MUCH = replace(
    LITTLE,
    tasks=frozenset(Task),
    tensor_parallel=True,
    pipeline_parallel=True,
    span_nodes=True,
    loras=True,
    projector=True,
    tool_parser=True,
    reasoning_parser=True,
)


def test_an_engine_of_few_gifts_gets_ordinary_launches() -> None:
    samples = sample_launches(LITTLE, LAUNCH)
    assert list(samples) == ["the launch", "a bare launch", "no GPU", "one GPU", "a cache", "task chat"]
    assert samples["the launch"] == LAUNCH
    assert samples["a bare launch"] == replace(LAUNCH, context_length=None, max_output=None, threads=None)


def test_each_gift_has_a_launch_of_its_own() -> None:
    samples = sample_launches(MUCH, LAUNCH)
    assert samples.keys() - sample_launches(LITTLE, LAUNCH).keys() == {
        "task embed",
        "task rerank",
        "tensor parallel",
        "pipeline parallel",
        "tensor and pipeline parallel",
        "rank 0 of 2",
        "rank 1 of 2",
        "rank 0 of 2 without RDMA",
        "rank 1 of 2 without RDMA",
        "a projector",
        "adapters",
        "a tool parser",
        "a reasoning parser",
    }


def test_a_launch_has_as_many_cards_as_its_width() -> None:
    for info in (MUCH, replace(MUCH, tensor_parallel=False), replace(MUCH, pipeline_parallel=False)):
        for launch in sample_launches(info, LAUNCH).values():
            if launch.gpus and launch.tp * launch.pp > 1:
                assert len(launch.gpus) * launch.count == launch.tp * launch.pp


def test_no_engine_is_asked_for_what_it_cannot_do() -> None:
    for info in (LITTLE, MUCH, replace(MUCH, tensor_parallel=False), replace(MUCH, pipeline_parallel=False)):
        for launch in sample_launches(info, LAUNCH).values():
            assert find_unable(info, *definition_of(launch)) == []


def test_a_definition_has_the_facts_of_its_launch() -> None:
    launch = sample_launches(MUCH, LAUNCH)["adapters"]
    model, profile = definition_of(replace(launch, tp=2, tool_parser="x", args=("--a",), env={"B": "c"}))
    assert (model.name, model.source, model.loras, model.context_length) == ("m", "/m.tiny", launch.loras, 2)
    assert (profile.tp, profile.tool_parser, profile.args, profile.env) == (2, "x", ("--a",), {"B": "c"})
    assert model.profiles == (profile,)
