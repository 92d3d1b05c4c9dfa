from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.core.model import Lora, Model, ModelName, Prices, Profile, Scaling, Task, launch_facts, newer_keys

PROFILE = Profile(name="p", engine="e", args=("--x",))
MODEL = Model(name=ModelName("m"), source="/m.gguf", context_length=4096, profiles=(PROFILE,))


@pytest.mark.parametrize(
    "other",
    [
        replace(MODEL, source="/n.gguf"),
        replace(MODEL, name=ModelName("n")),
        replace(MODEL, context_length=8192),
        replace(MODEL, max_output=1),
        replace(MODEL, task=Task.EMBED),
        replace(MODEL, mmproj="/eyes.gguf"),
        replace(MODEL, loras=(Lora(name=ModelName("sql"), source="/sql.gguf"),)),
    ],
)
def test_a_model_that_would_be_launched_otherwise_has_other_launch_facts(other: Model) -> None:
    assert launch_facts(other, PROFILE) != launch_facts(MODEL, PROFILE)


@pytest.mark.parametrize(
    "other",
    [
        replace(PROFILE, name="q"),
        replace(PROFILE, engine="f"),
        replace(PROFILE, args=()),
        replace(PROFILE, tp=2),
        replace(PROFILE, gpu_class="h100-80g"),
        # (it asks for a GPU, and there was none)
        replace(PROFILE, gpu_memory_gb=8.0),
        replace(PROFILE, tp=4, nodes=2),
        replace(PROFILE, pp=2),
        replace(PROFILE, tool_parser="hermes"),
        replace(PROFILE, reasoning_parser="r1"),
        replace(PROFILE, env={"A": "1"}),
    ],
)
def test_a_profile_that_would_be_launched_otherwise_has_other_launch_facts(other: Profile) -> None:
    assert launch_facts(MODEL, other) != launch_facts(MODEL, PROFILE)


def test_another_share_of_the_same_gpus_is_no_launch_fact() -> None:
    first, second = (replace(PROFILE, gpu_class="any", gpu_memory_gb=amount) for amount in (8.0, 9.0))
    assert launch_facts(MODEL, first) == launch_facts(MODEL, second)


def test_what_an_engine_never_sees_is_no_launch_fact() -> None:
    model = replace(MODEL, aliases=("x",), scaling=Scaling(min=1, max=3), over_limit="refuse", routing_profile="r")
    profile = replace(PROFILE, priority=3, weight=2, min_memory_gb=4.0, min_disk_gb=1.0, startup_timeout_seconds=1.0)
    model, profile = replace(model, prices=Prices(prompt=1.0, completion=2.0)), replace(profile, labels={"zone": "a"})
    assert launch_facts(model, profile) == launch_facts(MODEL, PROFILE)


ADAPTED = replace(
    MODEL,
    aliases=("x", "y"),
    loras=tuple(Lora(name=ModelName(name), source=f"/{name}") for name in ("sql", "poem", "x")),
)


def test_every_name_that_can_be_asked_for_is_named() -> None:
    assert list(ADAPTED.names()) == ["m", "x", "y", "sql", "poem", "x"]


def test_an_adapter_is_found_by_its_name_unless_that_means_the_model_itself() -> None:
    assert ADAPTED.find_lora("poem") is ADAPTED.loras[1]
    for name in ("m", "x", "none"):
        assert ADAPTED.find_lora(name) is None


def test_what_is_in_the_environment_is_not_shown() -> None:
    model = replace(MODEL, profiles=(replace(PROFILE, env={"HF_TOKEN": "s3cret"}),))
    assert "s3cret" not in repr(model)


def test_what_an_older_agent_would_pass_over_is_named_by_its_keys() -> None:
    assert newer_keys(replace(MODEL, context_length=1), replace(PROFILE, tp=2, gpu_class="x")) == ()
    model = replace(ADAPTED, task=Task.EMBED, mmproj="/e")
    profile = replace(PROFILE, pp=2, tool_parser="a", reasoning_parser="b", env={"A": ""})
    assert newer_keys(model, profile) == ("task", "mmproj", "loras", "pp", "tool_parser", "reasoning_parser", "env")
    # whatever an engine is told and older agents knew nothing of
    assert launch_facts(MODEL, PROFILE) != launch_facts(model, profile)
