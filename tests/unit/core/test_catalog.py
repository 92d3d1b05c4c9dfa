from __future__ import annotations

from llmgw.core.catalog import Catalog, clashes
from llmgw.core.model import Model, ModelName


def a_model(name: str, *aliases: str, source: str = "/m.gguf") -> Model:
    return Model(name=ModelName(name), source=source, aliases=aliases)


def test_a_model_is_found_by_its_name_and_by_each_alias() -> None:
    small = a_model("small", "tiny", "s")
    catalog = Catalog([a_model("large"), small])
    assert catalog.resolve("small") is catalog.resolve("tiny") is catalog.resolve("s") is small


def test_an_unknown_name_is_none() -> None:
    assert Catalog().resolve("small") is None
    assert Catalog([a_model("large")]).resolve("small") is None


def test_only_a_name_is_a_name() -> None:
    small = a_model("small", "tiny")
    catalog = Catalog([small])
    assert catalog.named(ModelName("small")) is small
    assert catalog.named(ModelName("tiny")) is None
    assert catalog.named(ModelName("large")) is None


def test_models_are_listed_in_the_order_given() -> None:
    names = ["b", "a", "c"]
    catalog = Catalog(a_model(name) for name in names)
    assert [model.name for model in catalog] == names
    assert len(catalog) == 3


def test_distinct_names_and_aliases_do_not_clash() -> None:
    assert clashes([a_model("a", "x"), a_model("b", "y")]) == []


def test_a_name_given_twice_is_a_problem_of_the_later_model() -> None:
    (problem,) = clashes([a_model("a"), a_model("b"), a_model("a")])
    assert problem.key == "models.2.name"
    assert "'a'" in problem.message


def test_an_alias_that_is_taken_is_a_problem_wherever_the_model_stands() -> None:
    (problem,) = clashes([a_model("a", "x", "b"), a_model("b")])
    assert problem.key == "models.0.aliases.1"
    assert "'b' already means the model 'b'" in problem.message


def test_an_alias_of_two_models_and_one_given_twice_are_problems() -> None:
    problems = clashes([a_model("a", "x", "x"), a_model("b", "x")])
    assert [problem.key for problem in problems] == ["models.0.aliases.1", "models.1.aliases.0"]


def test_where_names_clash_names_beat_aliases_and_the_earlier_wins() -> None:
    first, second = a_model("a", "b"), a_model("b", "x")
    catalog = Catalog([first, second, a_model("a", source="/other.gguf"), a_model("c", "x")])
    assert catalog.resolve("a") is first
    assert catalog.resolve("b") is catalog.resolve("x") is second
    assert [model.name for model in catalog] == ["a", "b", "c"]
