"""Which model a name means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from llmgw.core.model import Model, ModelName
from llmgw.errors import Problem


def clashes(models: Iterable[Model]) -> list[Problem]:
    """Each name, alias or adapter that more than one definition claims; ``key`` is where the later claim stands."""
    owners: dict[str, str] = {}
    problems: list[Problem] = []
    # All names before any alias, and these before any adapter: one that takes a later model's name is at fault,
    # wherever it stands.
    models = tuple(models)
    for index, model in enumerate(models):
        if model.name in owners:
            problems.append(
                Problem(
                    key=f"models.{index}.name",
                    message=f"{model.name!r} is the name of an earlier model too: give one of them another name",
                )
            )
        owners[model.name] = model.name
    aliases = (
        (f"models.{index}.aliases.{position}", alias, "take the alias out", model)
        for index, model in enumerate(models)
        for position, alias in enumerate(model.aliases)
    )
    loras = (
        (f"models.{index}.loras.{position}.name", lora.name, "give the adapter another name", model)
        for index, model in enumerate(models)
        for position, lora in enumerate(model.loras)
    )
    for key, name, remedy, model in chain(aliases, loras):
        if name in owners:
            problems.append(Problem(key=key, message=f"{name!r} already means the model {owners[name]!r}: {remedy}"))
        else:
            owners[name] = model.name
    return problems


class Catalog:
    """The models that there are, in the order in which they were given. It never changes: another one replaces it."""

    __slots__ = ("_by_name", "models")

    def __init__(self, models: Iterable[Model] = ()) -> None:
        """Where names clash (``clashes`` tells) a name beats an alias, that beats an adapter, and the earlier
        definition beats the later."""
        by_name: dict[str, Model] = {}
        for model in models:
            by_name.setdefault(model.name, model)
        self.models = tuple(by_name.values())
        for model in self.models:
            for alias in model.aliases:
                by_name.setdefault(alias, model)
        for model in self.models:
            for lora in model.loras:
                by_name.setdefault(lora.name, model)
        self._by_name = by_name

    def __iter__(self) -> Iterator[Model]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def resolve(self, name: str) -> Model | None:
        """The model of that name or alias, or that has the adapter of that name; None when there is none."""
        return self._by_name.get(name)

    def named(self, name: ModelName) -> Model | None:
        """The model of exactly that name; None when it only is an alias, an adapter, or nothing at all."""
        found = self._by_name.get(name)
        return found if found is not None and found.name == name else None
