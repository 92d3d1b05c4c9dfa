from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.config.definition import load_definitions
from llmgw.config.profiles import unknown_engine
from llmgw.core.model import Profile
from llmgw.errors import ConfigError

ENGINES = {"llamacpp", "vllm"}


def written(folder: Path, text: str) -> Path:
    path = folder / "m.yaml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_definitions(written(folder, text), ENGINES)
    return [str(problem).replace(str(folder), "") for problem in caught.value.problems]


def read(folder: Path, profile: str) -> Profile:
    """A profile as it stands in the only model of a file."""
    text = f"name: m\nsource: /m.gguf\nprofiles:\n- {profile}\n"
    ((model, later),) = [(each.model, each.not_in_effect) for each in load_definitions(written(folder, text), ENGINES)]
    assert later == ()
    return model.profiles[0]


def test_a_model_without_a_profile_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, "name: m\nsource: /m.gguf\nprofiles: []\n") == [
        "/m.yaml:3:1 profiles: needs at least one profile: a name and an engine"
    ]


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("{name: cpu, engine: llamacp}", "engine: no engine 'llamacp' is installed (llamacpp?)"),
        ("{name: cpu, engine: tgi}", "engine: no engine 'tgi' is installed; there is llamacpp, vllm"),
        ("{name: 'c p', engine: vllm}", "name: 'c p' may hold letters, digits and . _ - only"),
        ("{name: cpu, engine: vllm, tp: 0}", "tp: must be from 1 to 1024, not 0"),
        ("{name: cpu, engine: vllm, min_memory_gb: 8GB}", "min_memory_gb: must be a number of gigabytes"),
        ("{name: cpu, engine: vllm, min_disk_gb: true}", "min_disk_gb: must be a number of gigabytes"),
        ("{name: cpu, engine: vllm, args: --x}", "args: must be a list, not a single value"),
        ("{name: cpu, engine: vllm, args: [true]}", "args[0]: must be text, not 'true'"),
        ("{name: cpu, engine: vllm, argz: []}", "argz: unknown key (args?)"),
        ("{name: cpu, engine: vllm, pp: 0}", "pp: must be from 1 to 1024, not 0"),
        ("{name: cpu, engine: vllm, tool_parser: true}", "tool_parser: must be text, not 'true'"),
        ("{name: cpu, engine: vllm, reasoning_parser: ''}", "reasoning_parser: must not be empty"),
        ("{name: cpu, engine: vllm, evn: {}}", "evn: unknown key (env?)"),
        ("{name: cpu, engine: vllm, env: [A=s3cret]}", "env: must be a mapping (key: value), not a list"),
        ("{name: cpu, engine: vllm, env: A=s3cret}", "env: must be a mapping (key: value), not a single value"),
        ("{name: cpu, engine: vllm, env: {A=s3cret: 1}}", "env.A: is one word with a = in it: write NAME: value"),
        ("{name: cpu, engine: vllm, env: {A=s3cret}}", "env.A: is one word with a = in it: write NAME: value"),
        ("{name: cpu, engine: vllm, env: {A: }}", 'env.A: has no value; write "" for an empty one'),
        ("{name: cpu, engine: vllm, env: {A: [s3cret]}}", "env.A: must be a single value, not a list"),
        ("{name: cpu, engine: vllm, env: {A: {B: s3cret}}}", "env.A: must be a single value, not a mapping"),
        ("{name: cpu, engine: vllm, env: {1A: s3cret}}", "env.1A: may hold letters, digits and _ only"),
        ("{name: cpu, engine: vllm, env: {A-B: s3cret}}", "env.A-B: may hold letters, digits and _ only"),
        ("{name: cpu, engine: vllm, env: {'': s3cret}}", "env.: may hold letters, digits and _ only"),
        ("{name: cpu, engine: vllm, env: {LLMGW_AUTH: s3cret}}", "env.LLMGW_AUTH: is llmgw's own"),
        ('{name: cpu, engine: vllm, env: {A: "s3cret\\0"}}', "env.A: holds a NUL character: take it out"),
        ('{name: cpu, engine: vllm, env: {A: "s3cret\\uD83D"}}', "env.A: holds half a character"),
        ('{name: cpu, engine: vllm, args: ["\\0"]}', "args[0]: holds a NUL character: take it out"),
        ("{name: cpu, engine: vllm, env: {A: " + "ü" * 65536 + "}}", "env.A: is longer than 128 KiB"),
        ("{name: cpu, engine: vllm, args: [--a, " + "ü" * 65536 + "]}", "args: its word 2 is longer than 128 KiB"),
        ("{name: cpu, engine: vllm, tool_parser: " + "x" * 131072 + "}", "tool_parser: is longer than 128 KiB"),
        ("{name: cpu, engine: vllm, env: {A: s3cret, A: s3cret}}", "env.A: written twice (first on line 4)"),
        ("{name: , engine: vllm}", "name: has no value, and needs one"),
        ("{name: cpu, engine: }", "engine: has no value, and needs one"),
        ("{name: g, engine: vllm, nodes: 0}", "nodes: must be from 1 to 1024, not 0"),
        (
            "{name: g, engine: vllm, tp: 8, pp: 2, nodes: 3}",
            "nodes: 16 GPUs (tp 8 x pp 2) can't be shared out evenly among 3 nodes: 1, 2, 4, 8 or 16 would do, or",
        ),
        (
            "{name: g, engine: vllm, nodes: 2}",
            "nodes: 1 GPU (tp 1 x pp 1) can't be shared out evenly among 2 nodes: 1 would do, or another tp or pp",
        ),
        (
            "{name: g, engine: vllm, gpu_class: h100 80g}",
            "gpu_class: 'h100 80g' is no class of GPUs: write one as `llmgw",
        ),
        ("{name: g, engine: vllm, gpu_class: 80}", "gpu_class: must be text, not '80'; write \"80\""),
        ("{name: g, engine: vllm, gpu_memory_gb: 0}", "gpu_memory_gb: must be more than 0"),
        ("{name: g, engine: vllm, gpu_memory_gb: -1}", "gpu_memory_gb: must be a number of gigabytes, as 8 or 7.5"),
        ("{name: g, engine: vllm, gpu_memory_gb: 40960}", "gpu_memory_gb: must be 1000 GB at most, not 40960"),
        (
            "{name: g, engine: vllm, min_memory_gb: 8000000000}",
            "min_memory_gb: must be 100000 GB at most, not 8000000000",
        ),
        ("{name: g, engine: vllm, min_disk_gb: 10000001}", "min_disk_gb: must be 10000000 GB at most"),
        ("{name: g, engine: vllm, labels: [zone=a]}", "labels: must be a mapping (key: value), not a list"),
        ("{name: g, engine: vllm, labels: {zone=a}}", "labels.zone=a: is one word with a = in it: write NAME: value"),
        ("{name: g, engine: vllm, labels: {zone: }}", 'labels.zone: has no value; write "" for an empty one'),
        ("{name: g, engine: vllm, labels: {zone: [a]}}", "labels.zone: must be a single value, not a list"),
        ("{name: g, engine: vllm, lables: {}}", "lables: unknown key (labels?)"),
    ],
)
def test_a_wrong_profile_is_placed_and_explained(tmp_path: Path, profile: str, said: str) -> None:
    (found,) = problems(tmp_path, f"name: m\nsource: /m.gguf\nprofiles:\n- {profile}\n")
    assert found.startswith("/m.yaml:4:")
    assert f"profiles[0].{said}" in found
    # what somebody may have put into a variable stays there
    assert "s3cret" not in found


def test_two_profiles_of_one_name_are_refused(tmp_path: Path) -> None:
    text = "name: m\nsource: /m\nprofiles:\n- {name: a, engine: vllm}\n- {name: a, engine: llamacpp}\n"
    assert problems(tmp_path, text) == [
        "/m.yaml:5:4 profiles[1].name: 'a' is the name of another profile of this model"
    ]


def test_what_no_program_can_be_started_with_is_refused_as_a_whole(tmp_path: Path) -> None:
    words = ", ".join(["&long " + "x" * 100_000, *["*long"] * 15])
    text = f"name: m\nsource: /m.gguf\nprofiles:\n- {{name: p, engine: vllm, args: [{words}]}}\n"
    (found,) = problems(tmp_path, text)
    assert found.startswith("/m.yaml:4:27 profiles[0].args: is longer than 1.5 MiB together with env (1600144 bytes)")
    assert load_definitions(written(tmp_path, text.replace(", *long]", "]")), ENGINES)


def test_a_profile_as_in_the_manual_for_gpus_is_read(tmp_path: Path) -> None:
    profile = read(tmp_path, "{name: tp2, engine: vllm, gpu_class: h100-80g, tp: 2, priority: 100}")
    assert profile == Profile(name="tp2", engine="vllm", gpu_class="h100-80g", tp=2, priority=100)
    assert (profile.gpus, profile.gpus_per_node) == (2, 2)


@pytest.mark.parametrize(
    ("keys", "gpus", "per_node"),
    [
        ("", 0, 0),
        ("labels: {zone: a}", 0, 0),
        ("min_memory_gb: 8", 0, 0),
        ("gpu_class: any", 1, 1),
        ("gpu_memory_gb: 7.5", 1, 1),
        ("pp: 2", 2, 2),
        ("tp: 8, pp: 2, nodes: 2", 16, 8),
        ("tp: 16, nodes: 2", 16, 8),
        ("pp: 3, nodes: 3", 3, 1),
    ],
)
def test_what_asks_for_a_gpu_says_how_many(tmp_path: Path, keys: str, gpus: int, per_node: int) -> None:
    profile = read(tmp_path, f"{{name: p, engine: vllm, {keys}}}")
    assert (profile.gpus, profile.gpus_per_node) == (gpus, per_node)


def test_labels_are_the_text_that_is_written(tmp_path: Path) -> None:
    profile = read(tmp_path, "{name: p, engine: vllm, labels: {zone: 1, ssd: true, rack/row: 010, note: ''}}")
    assert profile.labels == {"zone": "1", "ssd": "true", "rack/row": "010", "note": ""}


def test_an_engine_that_is_not_installed_is_told_with_those_that_are() -> None:
    assert unknown_engine("vlm", ENGINES) == "no engine 'vlm' is installed (vllm?)"
    assert unknown_engine("vlm", ()) == "no engine 'vlm' is installed; there is none"
