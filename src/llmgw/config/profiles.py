"""The profiles of a definition: the ways to run one model, each with its engine, its width and what it needs."""

from __future__ import annotations

import re
from collections.abc import Collection

from llmgw.config.document import Section, near
from llmgw.config.labels import read_labels
from llmgw.core.model import Profile

# More than any machine or GPU has: what is above was meant in another unit.
MAX_MEMORY_GB = 100_000
MAX_DISK_GB = 10_000_000
MAX_GPU_MEMORY_GB = 1_000

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_CLASS = 100
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# llmgw reads them, and the processes that it starts are found again by some of them.
_OWN_VARIABLES = "LLMGW_"
# What Linux lets one variable have, with its name, and one word of a command line.
_MAX_WORD_BYTES = 128 * 1024 - 1
# What it lets all of them have together is 2 MiB mostly: the rest is for what the engine inherits and llmgw passes.
_MAX_WORDS_BYTES = 1536 * 1024
# Its end, and the pointer to it.
_EACH_WORD_BYTES = 9
_MAX_WIDTH = 1024


def read_profiles(
    section: Section, engines: Collection[str], places: dict[str, str], later: list[str]
) -> tuple[Profile, ...]:
    """``profiles`` of this section; the places of their keys go to ``places``, keys without effect to ``later``."""
    stanzas = section.sections("profiles")
    if not stanzas:
        section.wrong("profiles", "needs at least one profile: a name and an engine")
    profiles: list[Profile] = []
    for index, stanza in enumerate(stanzas):
        profile = _profile(stanza, engines, places, later, f"profiles[{index}]")
        if profile.name and profile.name in {other.name for other in profiles}:
            stanza.wrong("name", f"{profile.name!r} is the name of another profile of this model")
        profiles.append(profile)
    return tuple(profiles)


def learn_places(places: dict[str, str], path: str, stanza: Section) -> None:
    """Note where a stanza and each of its keys stand, under ``path``."""
    places[path] = stanza.where("")
    places.update({f"{path}.{key}": stanza.where(key) for key in stanza.names()})


def unknown_engine(name: str, engines: Collection[str]) -> str:
    """What to say of an engine that is not installed."""
    if hint := near(name, engines):
        return f"no engine {name!r} is installed{hint}"
    return f"no engine {name!r} is installed; there is {', '.join(sorted(engines)) or 'none'}"


def _profile(stanza: Section, engines: Collection[str], places: dict[str, str], later: list[str], path: str) -> Profile:
    learn_places(places, path, stanza)
    default = Profile(name="", engine="")
    profile = Profile(
        name=stanza.required_text("name"),
        engine=stanza.required_text("engine"),
        weight=stanza.count("weight", default.weight, low=0, high=1_000_000),
        priority=stanza.count("priority", default.priority, low=-1_000_000, high=1_000_000),
        gpu_class=stanza.text("gpu_class", None),
        tp=stanza.count("tp", default.tp, low=1, high=_MAX_WIDTH),
        pp=stanza.count("pp", default.pp, low=1, high=_MAX_WIDTH),
        nodes=stanza.count("nodes", default.nodes, low=1, high=_MAX_WIDTH),
        labels=read_labels(stanza, "labels"),
        gpu_memory_gb=stanza.gigabytes("gpu_memory_gb", None, high=MAX_GPU_MEMORY_GB, zero=False),
        tool_parser=stanza.text("tool_parser", None),
        reasoning_parser=stanza.text("reasoning_parser", None),
        startup_timeout_seconds=stanza.duration("startup_timeout", default.startup_timeout_seconds),
        min_memory_gb=stanza.gigabytes("min_memory_gb", None, high=MAX_MEMORY_GB),
        min_disk_gb=stanza.gigabytes("min_disk_gb", None, high=MAX_DISK_GB),
        env=_environment(stanza, places, path),
        args=stanza.texts("args", numbers=True),
    )
    _check_words(stanza, profile)
    _check_width(stanza, profile)
    if profile.name and not _NAME.fullmatch(profile.name):
        stanza.wrong("name", f"{profile.name!r} may hold letters, digits and . _ - only")
    if profile.engine and profile.engine not in engines:
        stanza.wrong("engine", unknown_engine(profile.engine, engines))
    if profile.weight != default.weight:
        later.append("profiles.weight")
    stanza.close()
    return profile


def _check_width(stanza: Section, profile: Profile) -> None:
    """Each node runs one shard, with as many GPUs as every other."""
    world = profile.tp * profile.pp
    if world % profile.nodes:
        *others, last = (str(count) for count in range(1, min(world, _MAX_WIDTH) + 1) if world % count == 0)
        would_do = f"{', '.join(others)} or {last}" if others else last
        gpus = f"{world} GPUs" if world > 1 else "1 GPU"
        text = f"{gpus} (tp {profile.tp} x pp {profile.pp}) can't be shared out evenly among {profile.nodes} nodes"
        stanza.wrong("nodes", f"{text}: {would_do} would do, or another tp or pp")
    wanted = profile.gpu_class
    if wanted is not None and (why := wrong_class(wanted)) is not None:
        stanza.wrong("gpu_class", f"{why}, or any")


def wrong_class(name: str) -> str | None:
    """Why no class of GPUs can be called so; None when one can."""
    if len(name) <= _MAX_CLASS and _NAME.fullmatch(name):
        return None
    return f"{name[:_MAX_CLASS]!r} is no class of GPUs: write one as `llmgw ctl nodes` shows it (h100-80g)"


def _check_words(stanza: Section, profile: Profile) -> None:
    """What no program can be started with is no launch that fails again and again."""
    for key, words in (
        ("args", profile.args),
        ("tool_parser", (profile.tool_parser or "",)),
        ("reasoning_parser", (profile.reasoning_parser or "",)),
    ):
        for index, word in enumerate(words):
            if len(word.encode()) > _MAX_WORD_BYTES:
                which = f"its word {index + 1} " if key == "args" else ""
                stanza.wrong(key, f"{which}is longer than 128 KiB, which no program can be started with")
    variables = (f"{name}={value}" for name, value in profile.env.items())
    total = sum(len(word.encode()) + _EACH_WORD_BYTES for word in (*profile.args, *variables))
    if total > _MAX_WORDS_BYTES:
        text = f"is longer than 1.5 MiB together with env ({total} bytes), which no program can be started with"
        stanza.wrong("args", text)


def _environment(profile: Section, places: dict[str, str], path: str) -> dict[str, str]:
    """Variables for the engine. No message holds a value: it may be somebody's token."""
    stanza = profile.section("env")
    found = {}
    for name in stanza.names():
        why = _wrong_variable(name)
        if why is not None:
            # Of NAME=value, which is no mapping, the name alone.
            stanza.wrong(name, why, shown=name.partition("=")[0])
            continue
        found[name] = stanza.as_written(name, "")
        if len(f"{name}={found[name]}".encode()) > _MAX_WORD_BYTES:
            stanza.wrong(name, "is longer than 128 KiB, which no program can be started with")
        places[f"{path}.env.{name}"] = stanza.where(name)
    return found


def _wrong_variable(name: str) -> str | None:
    if "=" in name:
        return "is one word with a = in it: write NAME: value"
    if not _VARIABLE.fullmatch(name):
        return "may hold letters, digits and _ only, and starts with no digit"
    if name.startswith(_OWN_VARIABLES):
        return f"is llmgw's own, as all that begin with {_OWN_VARIABLES}: take it out"
    return None
