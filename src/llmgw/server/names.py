"""Who has each name, alias and adapter already, and what is said to who wants it too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from llmgw.admin.management import Refused
from llmgw.config.definition import Definition
from llmgw.core.model import Model, ModelName
from llmgw.errors import Problem


class StoredModel(Protocol):
    """A model that was added, what was written, and when it was (in seconds since 1970)."""

    @property
    def model(self) -> Model: ...
    @property
    def text(self) -> str: ...
    @property
    def added_at(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """Who has a name already. ``words`` say who it is, for the end of a sentence."""

    model: ModelName
    words: str


def find_clashes(
    definitions: Iterable[Definition],
    *,
    stored: Iterable[StoredModel],
    declared: Iterable[Definition],
    replace: bool,
) -> list[Problem]:
    """What keeps these from being stored; with ``replace`` a stored model of the same name does not."""
    definitions, stored = tuple(definitions), tuple(stored)
    names = {definition.model.name for definition in definitions}
    owners = _owners_of_stored(stored, without=names) | _owners_of_declared(declared)
    there = {each.model.name for each in stored}
    problems = []
    for definition in definitions:
        name = definition.model.name
        if name in there and name not in owners and not replace:
            message = f"{name!r} is stored already; --replace puts this definition in its place"
            problems.append(Problem(key="name", message=message, where=definition.places["name"]))
        problems += _taken(definition, owners)
    return problems


def find_claims(declared: Iterable[Definition], *, stored: Iterable[StoredModel]) -> list[Problem]:
    """Names of stored models that these take; a stored model of the same name just makes way."""
    declared = tuple(declared)
    owners = _owners_of_stored(stored, without={definition.model.name for definition in declared})
    return [problem for definition in declared for problem in _taken(definition, owners)]


def name_taken(problems: list[Problem]) -> Refused:
    message = "; ".join(str(problem) for problem in problems)
    return Refused(message, status=409, code="name_taken", problems=tuple(problems))


def what_it_is(model: Model, name: str) -> str:
    """What this name of the model is."""
    if name == model.name:
        return "a model"
    return f"an {'alias' if model.find_lora(name) is None else 'adapter'} of {model.name}"


def _owners_of_stored(stored: Iterable[StoredModel], *, without: set[ModelName]) -> dict[str, _Owner]:
    """Those named in ``without`` are about to be replaced."""
    return {
        name: _Owner(
            model=each.model.name,
            words=f"{what_it_is(each.model, name)}, stored (`llmgw ctl model rm {each.model.name}` removes it)",
        )
        for each in stored
        if each.model.name not in without
        for name in each.model.names()
    }


def _owners_of_declared(declared: Iterable[Definition]) -> dict[str, _Owner]:
    return {
        name: _Owner(
            model=definition.model.name,
            words=f"{what_it_is(definition.model, name)}, declared at {definition.places[key]}",
        )
        for definition in declared
        for key, name in definition.claims()
    }


def _taken(definition: Definition, owners: Mapping[str, _Owner]) -> Iterator[Problem]:
    for key, name in definition.claims():
        if owner := owners.get(name):
            message = f"{name!r} is taken already: it is {owner.words}"
            yield Problem(key=key, message=message, where=definition.places[key])
