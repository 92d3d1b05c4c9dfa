from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.core.model import Model, ModelName, Profile, Scaling, launch_facts

PROFILE = Profile(name="p", engine="e", args=("--x",))
MODEL = Model(name=ModelName("m"), source="/m.gguf", context_length=4096, profiles=(PROFILE,))


@pytest.mark.parametrize(
    "other",
    [
        replace(MODEL, source="/n.gguf"),
        replace(MODEL, name=ModelName("n")),
        replace(MODEL, context_length=8192),
        replace(MODEL, max_output=1),
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
    ],
)
def test_a_profile_that_would_be_launched_otherwise_has_other_launch_facts(other: Profile) -> None:
    assert launch_facts(MODEL, other) != launch_facts(MODEL, PROFILE)


def test_what_an_engine_never_sees_is_no_launch_fact() -> None:
    model = replace(MODEL, aliases=("x",), scaling=Scaling(min=1, max=3), over_limit="refuse", routing_profile="r")
    profile = replace(PROFILE, priority=3, weight=2, min_memory_gb=4.0, min_disk_gb=1.0, startup_timeout_seconds=1.0)
    assert launch_facts(model, profile) == launch_facts(MODEL, PROFILE)
