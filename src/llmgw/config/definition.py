"""A model's definition: one mapping in a file of its own, or an entry of ``models:``, becomes a Model."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llmgw.config.document import Findings, Section, near, parse_document, read_document, tidy
from llmgw.config.paths import check_text, expand_home
from llmgw.core.model import Lora, Model, ModelName, Profile, Scaling, Task
from llmgw.errors import Problem

OVER_LIMIT = ("clamp", "refuse")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]*(/[A-Za-z0-9][A-Za-z0-9._:+-]*)*")
_PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# llmgw reads them, and the processes that it starts are found again by some of them.
_OWN_VARIABLES = "LLMGW_"
# What Linux lets one variable have, with its name, and one word of a command line.
_MAX_WORD_BYTES = 128 * 1024 - 1
# What it lets all of them have together is 2 MiB mostly: the rest is for what the engine inherits and llmgw passes.
_MAX_WORDS_BYTES = 1536 * 1024
# Its end, and the pointer to it.
_EACH_WORD_BYTES = 9
# Of a path, the longest that Linux takes.
_MAX_SOURCE_BYTES = 4095
_MAX_NAME = 200
_MAX_TOKENS = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A model, and what its text tells besides.

    ``scaled``: whether the text says how many replicas. ``not_in_effect``: keys that are understood and have no effect
    in this version. ``places``: ``file:line:column`` by dotted path below the model ("" is the model itself). ``text``:
    its own part of the file.
    """

    model: Model
    scaled: bool
    not_in_effect: tuple[str, ...]
    places: Mapping[str, str]
    text: str = ""

    def claims(self) -> Iterator[tuple[str, str]]:
        """Each name that clients ask for, after the key that it stands at."""
        yield "name", self.model.name
        yield from (("aliases", alias) for alias in self.model.aliases)
        yield from ((f"loras[{index}].name", lora.name) for index, lora in enumerate(self.model.loras))

    def sources(self) -> Iterator[tuple[str, str]]:
        """Each thing that an engine reads, after the key that it stands at."""
        yield "source", self.model.source
        if self.model.mmproj is not None:
            yield "mmproj", self.model.mmproj
        yield from ((f"loras[{index}].source", lora.source) for index, lora in enumerate(self.model.loras))

    def locate(self, profile: int, problem: Problem) -> Problem:
        """A problem that an engine found in the profile of this number, with its key's path and place."""
        prefix = f"profiles[{profile}]"
        # An engine may say which of several it means (env.NAME, loras[1]); what isn't written stands in its profile.
        keys = (problem.key, re.split(r"[.\[]", problem.key)[0])
        candidates = (*(path for key in keys for path in (f"{prefix}.{key}", key)), prefix)
        path = next((path for path in candidates if path in self.places), "")
        key = f"{self.model.name}: {path or problem.key}"
        # A plugin's words may hold what is written there, as it is.
        where, message = self.places.get(path, self.places[""]), tidy(problem.message)
        return replace(problem, key=tidy(key), message=message, where=where)


class Checker(Protocol):
    """What an engine says of a model before anybody runs it: ``llmgw.engines.registry.Engine`` does."""

    def validate(self, model: Model, profile: Profile) -> list[Problem]: ...


def load_definitions(path: Path, engines: Collection[str]) -> tuple[Definition, ...]:
    """All the models of a definition file. ConfigError with everything that is wrong in it."""
    return _definitions(*read_document(path), engines, path.parent)


def parse_definitions(text: str, file: str, engines: Collection[str]) -> tuple[Definition, ...]:
    """All the models of a definition for other machines. ConfigError with everything that is wrong, placed in ``file``.

    What it names lies on the nodes, so that a path beside the text means nothing.
    """
    return _definitions(*parse_document(text, file), engines, None)


def _definitions(
    top: Section, findings: Findings, engines: Collection[str], folder: Path | None
) -> tuple[Definition, ...]:
    sections = top.sections("models") if top.has("models") else (top,)
    if top.has("models"):
        top.close()
        if not sections:
            top.wrong("models", "has no model in it")
    definitions = read_definitions(sections, engines, folder)
    findings.raise_if_any()
    return definitions


def read_definitions(
    sections: tuple[Section, ...], engines: Collection[str], folder: Path | None
) -> tuple[Definition, ...]:
    """The models of these sections; a name, alias or adapter that two of them claim is noted as wrong.

    ``folder`` is the one that a source's path may begin in, None where the sources lie on other machines.
    """
    claims = _Claims()
    return tuple(_definition(section, engines, folder, claims) for section in sections)


class _Claims:
    """Who has each name that clients ask for, so that none means two things."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def add(self, section: Section, key: str, name: str) -> None:
        """Note that what stands at this key claims a name; where it is taken that is wrong."""
        if name and name in self._places:
            section.wrong(key, f"{name!r} is taken already by the name, alias or adapter at {self._places[name]}")
        self._places.setdefault(name, section.where(key))


def _definition(section: Section, engines: Collection[str], folder: Path | None, claims: _Claims) -> Definition:
    later: list[str] = []
    places = {"": section.where("")} | {key: section.where(key) for key in section.names()}
    profiles = _profiles(section, engines, places, later)
    for key in ("routing_profile", "max_output", "over_limit"):
        if section.has(key):
            later.append(key)
    model = Model(
        name=ModelName(_name(section, claims)),
        source=_source(section, "source", folder),
        task=Task(section.choice("task", Task.CHAT, [str(task) for task in Task])),
        aliases=_aliases(section, claims),
        mmproj=_source(section, "mmproj", folder) if section.has("mmproj") else None,
        loras=_loras(section, folder, places, claims),
        routing_profile=section.text("routing_profile", None),
        context_length=section.count("context_length", None, low=1, high=_MAX_TOKENS),
        max_output=section.count("max_output", None, low=1, high=_MAX_TOKENS),
        over_limit=section.choice("over_limit", "clamp", OVER_LIMIT),
        scaling=_scaling(section, later),
        profiles=profiles,
    )
    if model.context_length and model.max_output and model.max_output > model.context_length:
        section.wrong("max_output", f"is more than context_length ({model.context_length})")
    section.close()
    return Definition(
        model=model,
        scaled=section.has("scaling"),
        not_in_effect=tuple(dict.fromkeys(later)),
        places=places,
        text=section.written(),
    )


def _name(section: Section, claims: _Claims) -> str:
    name = section.required_text("name")
    if name and (why := wrong_name(name)):
        section.wrong("name", why)
    claims.add(section, "name", name)
    return name


def wrong_name(name: str) -> str | None:
    """Why this can't be the name of a model, or of an adapter; None when it can."""
    if len(name) > _MAX_NAME:
        return f"is longer than {_MAX_NAME} characters"
    if not _NAME.fullmatch(name):
        return f"{name!r} may hold letters, digits and . _ : + - / only, and each part starts with a letter or digit"
    return None


def _aliases(section: Section, claims: _Claims) -> tuple[str, ...]:
    aliases = section.texts("aliases")
    for alias in aliases:
        if why := wrong_name(alias):
            section.wrong("aliases", why)
        claims.add(section, "aliases", alias)
    return aliases


def _loras(section: Section, folder: Path | None, places: dict[str, str], claims: _Claims) -> tuple[Lora, ...]:
    loras = []
    for index, stanza in enumerate(section.sections("loras")):
        name = _name(stanza, claims)
        loras.append(Lora(name=ModelName(name), source=_source(stanza, "source", folder)))
        stanza.close()
        _learn_places(places, f"loras[{index}]", stanza)
    return tuple(loras)


def _learn_places(places: dict[str, str], path: str, stanza: Section) -> None:
    places[path] = stanza.where("")
    places.update({f"{path}.{key}": stanza.where(key) for key in stanza.names()})


def _source(section: Section, key: str, folder: Path | None) -> str:
    """As written; a path that starts with ./ ../ or ~/ is one below the definition's folder, or the home.

    ``a/b`` without such a start is a repository's name, so it can't also mean a path.
    """
    source = section.required_text(key)
    if source.startswith("-"):
        section.wrong(key, f"{source!r} begins with -, so an engine would read it as a flag")
    if len(source.encode()) > _MAX_SOURCE_BYTES:
        section.wrong(key, f"is longer than any path: {_MAX_SOURCE_BYTES} bytes at most")
        return ""
    if folder is None:
        if source.startswith(("./", "../", "~/")):
            section.wrong(key, f"{source!r} is a path on this machine; write the whole one that the nodes have")
        return source
    if source.startswith(("./", "../")):
        source = os.path.normpath(folder.absolute() / source)
        check_text(source, key)
    return expand_home(source) if source.startswith("~/") else source


def _scaling(section: Section, later: list[str]) -> Scaling:
    stanza = section.section("scaling")
    default = Scaling()
    scaling = Scaling(
        min=stanza.count("min", default.min, low=0, high=1000),
        max=stanza.count("max", default.max, low=0, high=1000),
        idle_timeout_seconds=stanza.duration("idle_timeout", default.idle_timeout_seconds),
    )
    if scaling.min > scaling.max:
        stanza.wrong("min", f"{scaling.min} is more than max, which is {scaling.max}; write both")
    if stanza.has("idle_timeout"):
        later.append("scaling.idle_timeout")
    stanza.close()
    return scaling


def _profiles(
    section: Section, engines: Collection[str], places: dict[str, str], later: list[str]
) -> tuple[Profile, ...]:
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


def _profile(stanza: Section, engines: Collection[str], places: dict[str, str], later: list[str], path: str) -> Profile:
    _learn_places(places, path, stanza)
    default = Profile(name="", engine="")
    profile = Profile(
        name=stanza.required_text("name"),
        engine=stanza.required_text("engine"),
        weight=stanza.count("weight", default.weight, low=0, high=1_000_000),
        priority=stanza.count("priority", default.priority, low=-1_000_000, high=1_000_000),
        gpu_class=stanza.text("gpu_class", None),
        tp=stanza.count("tp", default.tp, low=1, high=1024),
        pp=stanza.count("pp", default.pp, low=1, high=1024),
        tool_parser=stanza.text("tool_parser", None),
        reasoning_parser=stanza.text("reasoning_parser", None),
        startup_timeout_seconds=stanza.duration("startup_timeout", default.startup_timeout_seconds),
        min_memory_gb=stanza.gigabytes("min_memory_gb", None),
        min_disk_gb=stanza.gigabytes("min_disk_gb", None),
        env=_environment(stanza, places, path),
        args=stanza.texts("args", numbers=True),
    )
    _check_words(stanza, profile)
    if profile.name and not _PROFILE_NAME.fullmatch(profile.name):
        stanza.wrong("name", f"{profile.name!r} may hold letters, digits and . _ - only")
    if profile.engine and profile.engine not in engines:
        stanza.wrong("engine", unknown_engine(profile.engine, engines))
    if profile.weight != default.weight:
        later.append("profiles.weight")
    if profile.gpu_class is not None:
        later.append("profiles.gpu_class")
    stanza.close()
    return profile


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


def find_rejections(definitions: Iterable[Definition], engines: Mapping[str, Checker]) -> list[Problem]:
    """What the engines themselves find wrong in these models, with its places."""
    found = [
        definition.locate(index, problem)
        for definition in definitions
        for index, profile in enumerate(definition.model.profiles)
        if profile.engine in engines
        for problem in engines[profile.engine].validate(definition.model, profile)
    ]
    return list(dict.fromkeys(found))


def unknown_engine(name: str, engines: Collection[str]) -> str:
    """What to say of an engine that is not installed."""
    if hint := near(name, engines):
        return f"no engine {name!r} is installed{hint}"
    return f"no engine {name!r} is installed; there is {', '.join(sorted(engines)) or 'none'}"
