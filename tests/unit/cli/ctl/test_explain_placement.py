from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmgw.core.rejection import Reason

EXPLAINED: dict[str, Any] = {
    "explanation": {
        "model": "org/m",
        "candidates": [
            {
                "profile": "p",
                "nodes": ["n1"],
                "rejections": [{"node": "n1", "profile": "p", "reason": "cordoned", "detail": "uncordon it"}],
                "gpus": [],
            }
        ],
        "unlock": {"text": "uncordon n1", "profile": "p", "node": "n1", "steps": []},
    },
    "wanted": 2,
    "most": 2,
    "what_if": False,
    "replicas": [],
    "stops": [],
    "decisions": [],
}


def test_a_model_is_explained_by_its_name(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/placement/org%2Fm", EXPLAINED)
    ended = ctl("explain-placement", "org/m")
    assert (ended.status, ended.out) == (
        0,
        "org/m: 2 replicas wanted, 2 at most\n"
        "\n"
        "one more finds no place\n"
        "the smallest change that would make one: uncordon n1\n"
        "\n"
        "PROFILE  NODE  VERDICT   DETAIL\n"
        "p        n1    cordoned  uncordon it\n",
    )


def test_json_is_the_answer_as_it_is(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/placement/m", EXPLAINED)
    assert json.loads(ctl("explain-placement", "m", "--json").out) == EXPLAINED


def test_what_is_not_there_is_status_1(port: Any, ctl: Any) -> None:
    error = {"error": {"code": "unknown_model", "message": "there is no model m"}}
    port.will_answer("GET", "/placement/m", error, status=404)
    ended = ctl("explain-placement", "m")
    assert (ended.status, ended.err) == (1, "llmgw: there is no model m\n")


def test_a_file_is_explained_and_each_of_its_models(port: Any, ctl: Any, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("name: m\n")
    other = {**EXPLAINED, "explanation": {**EXPLAINED["explanation"], "model": "other"}}
    port.will_answer("POST", "/placement", {"models": [{**EXPLAINED, "what_if": True}, {**other, "what_if": True}]})
    said = ctl("explain-placement", "--what-if", str(file)).out
    assert port.heard[0].body == {"file": str(file), "text": "name: m\n"}
    assert said.count("as it is written: 2 replicas wanted") == 2
    assert ctl("explain-placement", "other", "--what-if", str(file)).out.splitlines()[0].startswith("other as it is")


def test_a_name_that_the_file_does_not_have_is_told_with_those_that_it_has(port: Any, ctl: Any, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("name: m\n")
    port.will_answer("POST", "/placement", {"models": [EXPLAINED]})
    ended = ctl("explain-placement", "m", "--what-if", str(file))
    assert (ended.status, ended.out) == (2, "")
    assert "has no model m; it has org/m" in ended.err


def test_what_is_wrong_with_a_file_is_told_with_its_place(port: Any, ctl: Any, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("nmae: m\n")
    problem = {"key": "nmae", "where": "m.yaml:1:1", "message": "unknown key (name?)"}
    error = {"error": {"code": "invalid_config", "message": "no", "problems": [problem]}}
    port.will_answer("POST", "/placement", error, status=400)
    ended = ctl("explain-placement", "--what-if", str(file))
    assert ended.status == 2
    assert "m.yaml:1:1 nmae: unknown key (name?)" in ended.err


def test_the_last_decisions_are_those_about_all_models(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/decisions", {"decisions": []})
    assert ctl("explain-placement", "--decisions").out.split() == ["WHEN", "MODEL", "REPLICA", "WHERE", "WHY"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say what to explain"),
        (["m", "--decisions"], "about all models"),
        (["--decisions", "--what-if", "m.yaml"], "about all models"),
        (["--what-if", "m.yaml", "--watch"], "leave out --watch"),
        (["--what-if", "/nowhere.yaml"], "can't be read"),
    ],
)
def test_what_does_not_go_together_is_told_before_anybody_is_asked(
    port: Any, ctl: Any, words: list[str], said: str
) -> None:
    ended = ctl("explain-placement", *words)
    assert ended.status == 2
    assert said in ended.err
    assert port.heard == []


def test_every_reason_has_its_line_in_the_docs() -> None:
    page = (Path(__file__).parents[4] / "docs/ctl.md").read_text()
    table = page.partition("## llmgw ctl explain-placement")[2].partition("\n## ")[0]
    told = {word for row in re.findall(r"^\| (`.+?`) \| ", table, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)}
    assert told - {"chosen", "second", "fits"} == set(Reason)
