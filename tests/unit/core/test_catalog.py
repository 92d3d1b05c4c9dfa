from __future__ import annotations

from llmgw.core.catalog import Catalog, clashes
from llmgw.core.model import Lora, Model, ModelName


def a_model(name: str, *aliases: str, source: str = "/m.gguf", loras: tuple[str, ...] = ()) -> Model:
    adapters = tuple(Lora(name=ModelName(lora), source=f"/{lora}") for lora in loras)
    return Model(name=ModelName(name), source=source, aliases=aliases, loras=adapters)


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


def test_an_adapter_s_name_means_its_model_and_is_no_name_of_it() -> None:
    small = a_model("small", loras=("sql", "poem"))
    catalog = Catalog([a_model("large"), small])
    assert catalog.resolve("sql") is catalog.resolve("poem") is small
    assert catalog.named(ModelName("sql")) is None


def test_an_adapter_of_a_name_that_is_taken_is_a_problem_wherever_its_model_stands() -> None:
    models = [a_model("a", loras=("c", "y", "x", "x")), a_model("b", "y", loras=("x",)), a_model("c")]
    problems = clashes(models)
    assert [problem.key for problem in problems] == [
        "models.0.loras.0.name",
        "models.0.loras.1.name",
        "models.0.loras.3.name",
        "models.1.loras.0.name",
    ]
    assert problems[0].message == "'c' already means the model 'c': give the adapter another name"
    assert problems[1].message.startswith("'y' already means the model 'b'")


def test_where_names_clash_an_adapter_gives_way() -> None:
    first, second, third = a_model("a", loras=("b", "x", "s")), a_model("b", "x"), a_model("c", loras=("s",))
    catalog = Catalog([first, second, third])
    assert catalog.resolve("b") is catalog.resolve("x") is second
    assert catalog.resolve("s") is first


def test_where_names_clash_names_beat_aliases_and_the_earlier_wins() -> None:
    first, second = a_model("a", "b"), a_model("b", "x")
    catalog = Catalog([first, second, a_model("a", source="/other.gguf"), a_model("c", "x")])
    assert catalog.resolve("a") is first
    assert catalog.resolve("b") is catalog.resolve("x") is second
    assert [model.name for model in catalog] == ["a", "b", "c"]
