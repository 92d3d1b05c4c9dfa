"""Which model a name means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmgw.core.model import Model, ModelName
from llmgw.errors import Problem


def clashes(models: Iterable[Model]) -> list[Problem]:
    """Each name or alias that more than one definition claims; ``key`` is where the later claim stands."""
    owners: dict[str, str] = {}
    problems: list[Problem] = []
    # All names before any alias: an alias that takes a later model's name is the alias's fault, wherever it stands.
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
    for index, model in enumerate(models):
        for position, alias in enumerate(model.aliases):
            if alias in owners:
                problems.append(
                    Problem(
                        key=f"models.{index}.aliases.{position}",
                        message=f"{alias!r} already means the model {owners[alias]!r}: take the alias out",
                    )
                )
            else:
                owners[alias] = model.name
    return problems


class Catalog:
    """The models that there are, in the order in which they were given. It never changes: another one replaces it."""

    __slots__ = ("_by_name", "models")

    def __init__(self, models: Iterable[Model] = ()) -> None:
        """Where names clash (``clashes`` tells) a name beats an alias, and the earlier definition the later."""
        by_name: dict[str, Model] = {}
        for model in models:
            by_name.setdefault(model.name, model)
        self.models = tuple(by_name.values())
        for model in self.models:
            for alias in model.aliases:
                by_name.setdefault(alias, model)
        self._by_name = by_name

    def __iter__(self) -> Iterator[Model]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def resolve(self, name: str) -> Model | None:
        """The model of that name or alias; None when there is none."""
        return self._by_name.get(name)

    def named(self, name: ModelName) -> Model | None:
        """The model of exactly that name; None when it only is an alias or nothing at all."""
        found = self._by_name.get(name)
        return found if found is not None and found.name == name else None
