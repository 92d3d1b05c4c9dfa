from __future__ import annotations

from dataclasses import dataclass

import pytest

from llmgw.config.definition import Definition, parse_definitions
from llmgw.core.model import Lora, Model, ModelName, Profile
from llmgw.errors import Problem
from llmgw.server.names import find_claims, find_clashes, name_taken, what_it_is

MODEL = Model(
    name=ModelName("qwen"),
    source="/m.gguf",
    aliases=("coder",),
    loras=(Lora(name="sql", source="/sql"),),
    profiles=(Profile(name="p", engine="e"),),
)


@dataclass(frozen=True)
class Stored:
    model: Model = MODEL
    text: str = ""
    added_at: float = 0.0


def written(name: str, alias: str | None = None, file: str = "m.yaml") -> tuple[Definition, ...]:
    aliases = f"aliases: [{alias}]\n" if alias else ""
    text = f"name: {name}\n{aliases}source: /m.gguf\nprofiles:\n- name: p\n  engine: e\n"
    return parse_definitions(text, file, {"e"})


def clashes(
    *definitions: Definition, stored: bool = False, declared: tuple[Definition, ...] = (), replace: bool = False
) -> list[str]:
    there = (Stored(),) if stored else ()
    return [str(each) for each in find_clashes(definitions, stored=there, declared=declared, replace=replace)]


@pytest.mark.parametrize(
    ("name", "what"), [("qwen", "a model"), ("coder", "an alias of qwen"), ("sql", "an adapter of qwen")]
)
def test_each_name_of_a_model_is_told_for_what_it_is(name: str, what: str) -> None:
    assert what_it_is(MODEL, name) == what
    (problem,) = clashes(*written("new", alias=name), stored=True)
    assert f"it is {what}, stored (`llmgw ctl model rm qwen` removes it)" in problem


def test_a_stored_model_is_replaced_only_where_that_is_asked_for() -> None:
    assert clashes(*written("qwen"), stored=True, replace=True) == []
    assert clashes(*written("qwen"), stored=True) == [
        "m.yaml:1:1 name: 'qwen' is stored already; --replace puts this definition in its place"
    ]


def test_what_is_declared_is_never_replaced_and_its_place_is_named() -> None:
    there = written("qwen", file="server.yaml")
    for replace in (True, False):
        assert clashes(*written("qwen"), declared=there, replace=replace) == [
            "m.yaml:1:1 name: 'qwen' is taken already: it is a model, declared at server.yaml:1:1"
        ]


def test_names_that_nobody_has_clash_with_nothing() -> None:
    assert clashes(*written("new", alias="other"), stored=True, declared=written("declared")) == []


def test_what_is_declared_takes_a_stored_models_name_and_no_other_of_its_names() -> None:
    assert find_claims(written("qwen", alias="coder"), stored=(Stored(),)) == []
    (problem,) = find_claims(written("new", alias="coder"), stored=(Stored(),))
    assert (problem.key, problem.where) == ("aliases", "m.yaml:2:1")


def test_a_refusal_has_all_that_is_taken() -> None:
    problems = [Problem(key="name", message="a is taken"), Problem(key="aliases", message="b is taken")]
    refused = name_taken(problems)
    assert (refused.status, refused.code, refused.problems) == (409, "name_taken", tuple(problems))
    assert "a is taken" in refused.message
    assert "b is taken" in refused.message
