"""A model's definition: one mapping in a file of its own, or an entry of ``models:``, becomes a Model."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llmgw.config.document import Findings, Section, parse_document, read_document, tidy
from llmgw.config.paths import check_text, expand_home
from llmgw.config.profiles import learn_places, read_profiles
from llmgw.core.model import Lora, Model, ModelName, Prices, Profile, Scaling, Task
from llmgw.core.weights import Form, parse_source
from llmgw.errors import Problem

OVER_LIMIT = ("clamp", "refuse")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]*(/[A-Za-z0-9][A-Za-z0-9._:+-]*)*")
# Of a path, the longest that Linux takes.
_MAX_SOURCE_BYTES = 4095
_MAX_NAME = 200
_MAX_TOKENS = 100_000_000
_MAX_PRICE = 1_000_000
_MAX_TARGET = 100_000


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
    """What an engine says of a model before anybody runs it: ``llmgw.engines.registry.Engine`` does.

    ``check_gpus`` is about the GPUs that a profile asks for, where those of the nodes are counted and chosen.
    """

    def validate(self, model: Model, profile: Profile) -> list[Problem]: ...

    def check_gpus(self, profile: Profile) -> list[Problem]: ...


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
    profiles = read_profiles(section, engines, places, later)
    for key in ("routing_profile", "max_output", "over_limit", "prices"):
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
        prices=_prices(section) if section.has("prices") else None,
        scaling=_scaling(section),
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
        learn_places(places, f"loras[{index}]", stanza)
    return tuple(loras)


def _source(section: Section, key: str, folder: Path | None) -> str:
    """As written; a path that starts with ./ ../ or ~/ is one below the definition's folder, or the home.

    ``a/b`` without such a start is a repository's name, so it can't also mean a path. What is none of all that
    core.weights knows is noted as wrong: nobody could have it.
    """
    source = section.required_text(key)
    if source.startswith("-"):
        section.wrong(key, f"{source!r} begins with -, so an engine would read it as a flag")
    if len(source.encode()) > _MAX_SOURCE_BYTES:
        section.wrong(key, f"is longer than any path: {_MAX_SOURCE_BYTES} bytes at most")
        return ""
    if source.startswith(("./", "../", "~/")):
        if folder is None:
            section.wrong(key, f"{source!r} is a path on this machine; write the whole one that the nodes have")
            return source
        source = expand_home(source) if source.startswith("~/") else os.path.normpath(folder.absolute() / source)
        check_text(source, key)
    parsed = parse_source(source)
    if parsed.form is Form.UNKNOWN and source and not source.startswith("-"):
        # The text as it is told there: an address may hold a password.
        section.wrong(key, f"{parsed.text!r}: {parsed.why}")
    return source


def _scaling(section: Section) -> Scaling:
    stanza = section.section("scaling")
    default = Scaling()
    scaling = Scaling(
        min=stanza.count("min", default.min, low=0, high=1000),
        max=stanza.count("max", default.max, low=0, high=1000),
        idle_timeout_seconds=stanza.duration("idle_timeout", default.idle_timeout_seconds),
        target=stanza.count("target", default.target, low=1, high=_MAX_TARGET),
    )
    if scaling.min > scaling.max:
        stanza.wrong("min", f"{scaling.min} is more than max, which is {scaling.max}; write both")
    stanza.close()
    return scaling


def _prices(section: Section) -> Prices:
    stanza = section.section("prices")
    for key in ("prompt", "completion"):
        stanza.require(key)
    prices = Prices(
        prompt=stanza.amount("prompt", 0.0, high=_MAX_PRICE),
        completion=stanza.amount("completion", 0.0, high=_MAX_PRICE),
        cached=stanza.amount("cached", None, high=_MAX_PRICE),
    )
    stanza.close()
    return prices


def find_rejections(
    definitions: Iterable[Definition], engines: Mapping[str, Checker], *, gpus: bool = True
) -> list[Problem]:
    """What the engines themselves find wrong in these models, with its places; ``gpus`` says whether GPUs are booked
    for them."""
    found = [
        definition.locate(index, problem)
        for definition in definitions
        for index, profile in enumerate(definition.model.profiles)
        if (engine := engines.get(profile.engine)) is not None
        for problem in (*engine.validate(definition.model, profile), *(engine.check_gpus(profile) if gpus else ()))
    ]
    return list(dict.fromkeys(found))
