"""A launch for each thing that an engine says it can do: what a plugin's tests build commands from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmgw.core.model import Lora, Model, ModelName, Profile
from llmgw.engines.types import EngineInfo, Fabric, Launch

__all__ = ["definition_of", "sample_launches"]

RENDEZVOUS = "192.0.2.1:29571"


def sample_launches(info: EngineInfo, launch: Launch) -> dict[str, Launch]:
    """By a word or two each: this launch, one with no more than it needs, and one for whatever ``info`` offers."""
    bare = replace(launch, context_length=None, max_output=None, threads=None)
    samples = {"the launch": launch, "a bare launch": bare, "no GPU": replace(launch, gpus=())}
    samples |= {"one GPU": replace(launch, gpus=(2,)), "a cache": replace(launch, cache="/var/cache/llmgw/engine")}
    samples |= {f"task {task}": replace(launch, task=task) for task in sorted(info.tasks)}
    samples |= dict(_widths(info, launch))
    samples |= dict(_groups(info, launch))
    suffix = next(iter(info.file_suffixes), "")
    if info.projector:
        samples["a projector"] = replace(launch, mmproj=f"/var/lib/models/some mmproj{suffix}")
    if info.loras:
        loras = (("sql", "/var/lib/loras/first"), ("prose", "/var/lib/loras/second"))
        adapters = tuple(Lora(name=ModelName(name), source=f"{source}{suffix}") for name, source in loras)
        samples["adapters"] = replace(launch, loras=adapters)
    if info.tool_parser:
        samples["a tool parser"] = replace(launch, tool_parser="some_tool_parser")
    if info.reasoning_parser:
        samples["a reasoning parser"] = replace(launch, reasoning_parser="some_reasoning_parser")
    return samples


def definition_of(launch: Launch) -> tuple[Model, Profile]:
    """The model and the profile that a launch comes from."""
    profile = Profile(
        name="only",
        engine="engine",
        tp=launch.tp,
        pp=launch.pp,
        tool_parser=launch.tool_parser,
        reasoning_parser=launch.reasoning_parser,
        env=launch.env,
        args=launch.args,
    )
    model = Model(
        name=ModelName(launch.served_name),
        source=launch.source,
        task=launch.task,
        mmproj=launch.mmproj,
        loras=launch.loras,
        context_length=launch.context_length,
        max_output=launch.max_output,
        profiles=(profile,),
    )
    return model, profile


def _widths(info: EngineInfo, launch: Launch) -> Iterator[tuple[str, Launch]]:
    if info.tensor_parallel:
        yield "tensor parallel", replace(launch, tp=3, gpus=(1, 4, 5))
    if info.pipeline_parallel:
        yield "pipeline parallel", replace(launch, pp=3, gpus=(1, 4, 5))
    if info.tensor_parallel and info.pipeline_parallel:
        yield "tensor and pipeline parallel", replace(launch, tp=3, pp=2, gpus=(0, 1, 4, 5, 6, 7))


def _groups(info: EngineInfo, launch: Launch) -> Iterator[tuple[str, Launch]]:
    if not info.span_nodes:
        return
    wide = replace(launch, tp=8) if info.tensor_parallel else replace(launch, pp=8)
    for rank in (0, 1):
        fabric = Fabric(address=f"192.0.2.{rank + 1}", interface="ib0", hcas=("mlx5_0", "mlx5_3"))
        group = replace(wide, rank=rank, count=2, rendezvous=RENDEZVOUS, fabric=fabric, gpus=(1, 4, 5, 7))
        yield f"rank {rank} of 2", group
        yield f"rank {rank} of 2 without RDMA", replace(group, fabric=replace(fabric, hcas=()))
