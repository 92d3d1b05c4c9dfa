from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def added(name: str = "m", **facts: Any) -> dict[str, Any]:
    return {"name": name, "replaced": False, "runs": True, "not_in_effect": [], **facts}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("m.yaml")
    path.write_bytes("\ufeffname: m  # käse\n".encode())
    return path


def test_the_file_goes_as_it_is_and_by_the_name_it_was_given(port: Any, ctl: Any, file: Path) -> None:
    port.will_answer("POST", "/models", {"models": [added()]})
    ended = ctl("model", "add", "-f", str(file))
    assert (ended.status, ended.out) == (0, "m is added\n")
    (heard,) = port.heard
    assert heard.body == {"file": "m.yaml", "text": "name: m  # käse\n", "replace": False}


def test_a_file_may_have_any_bytes_for_a_name(port: Any, ctl: Any, file: Path) -> None:
    port.will_answer("POST", "/models", {"models": [added()]})
    odd = os.fsdecode(b"m\xff.yaml")
    file.rename(odd)
    assert ctl("model", "add", "-f", odd).status == 0
    assert port.heard[0].body["file"] == "m\N{REPLACEMENT CHARACTER}.yaml"


def test_replacing_is_said(port: Any, ctl: Any, file: Path) -> None:
    port.will_answer("POST", "/models", {"models": [added(replaced=True)]})
    assert ctl("model", "add", "--replace", "-f", str(file)).out == "m is replaced\n"
    assert port.heard[0].body["replace"] is True


def test_what_it_does_to_replicas_and_a_hold_is_told(port: Any, ctl: Any, file: Path) -> None:
    port.will_answer("POST", "/models", {"models": [added(replaced=True, rolls=True), added("n", held=True)]})
    assert ctl("model", "add", "-f", str(file), "--replace").out.splitlines() == [
        "m is replaced",
        "m: its replicas of another definition are replaced, one after the other: llmgw ctl replicas m",
        "n is added",
        "n is stopped: `llmgw ctl load n` lets it run",
    ]


def test_what_becomes_of_replicas_that_nothing_takes_the_place_of_is_told(port: Any, ctl: Any, file: Path) -> None:
    models = [
        added("a", rolls=True, runs=False),
        added("b", rolls=True, on_demand=True),
        added("c", rolls=True, held=True),
    ]
    port.will_answer("POST", "/models", {"models": models})
    assert ctl("model", "add", "-f", str(file)).out.splitlines() == [
        "a is added, and does not run: scaling.max is 0",
        "a: its replicas go once their requests are answered: llmgw ctl replicas a",
        "b is added",
        "b: its replicas are replaced where somebody asks for it, and go where nobody does: llmgw ctl replicas b",
        "c is added",
        "c is stopped: `llmgw ctl load c` lets it run",
    ]


def test_what_does_nothing_yet_and_what_does_not_run_is_told(port: Any, ctl: Any, file: Path) -> None:
    models = [added("a", not_in_effect=["profiles.tp", "over_limit"]), added("b", runs=False)]
    port.will_answer("POST", "/models", {"models": models})
    assert ctl("model", "add", "-f", str(file)).out == (
        "a is added\na: not in effect yet: profiles.tp, over_limit\nb is added, and does not run: scaling.max is 0\n"
    )


def test_the_definition_may_come_from_stdin(port: Any, ctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    port.will_answer("POST", "/models", {"models": [added()]})
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"name: m\n")))
    ctl("model", "add", "-f", "-")
    assert port.heard[0].body == {"file": "stdin", "text": "name: m\n", "replace": False}


def test_what_is_wrong_is_told_with_its_place_and_status_2(port: Any, ctl: Any, file: Path) -> None:
    problems = [
        {"key": "nmae", "where": "m.yaml:1:1", "message": "unknown key (name?)"},
        {"key": "source", "where": "m.yaml:1:1", "message": "is missing"},
    ]
    error = {"error": {"code": "invalid_config", "message": "wrong", "problems": problems}}
    port.will_answer("POST", "/models", error, status=400)
    ended = ctl("model", "add", "-f", str(file))
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == "llmgw: m.yaml:1:1 nmae: unknown key (name?)\nm.yaml:1:1 source: is missing\n"


def test_a_file_that_is_none_asks_nobody(port: Any, ctl: Any, tmp_path: Path) -> None:
    ended = ctl("model", "add", "-f", str(tmp_path / "none.yaml"))
    assert (ended.status, ended.err) == (2, f"llmgw: {tmp_path}/none.yaml can't be read: No such file or directory\n")
    (tmp_path / "bytes.yaml").write_bytes(b"name: m\nsource: \xff\n")
    assert ctl("model", "add", "-f", str(tmp_path / "bytes.yaml")).err.endswith("is not UTF-8 (line 2)\n")
    assert port.heard == []


def test_a_file_without_an_end_is_not_read_to_it(port: Any, ctl: Any) -> None:
    ended = ctl("model", "add", "-f", "/dev/zero")
    assert (ended.status, ended.err) == (2, "llmgw: /dev/zero is larger than 1024 KiB: not a definition\n")
    assert port.heard == []


@pytest.mark.parametrize(("names", "path"), [(["org/m"], "/models/org%2Fm"), (["a", "b"], "/models")])
def test_with_watch_what_was_added_is_shown(port: Any, ctl: Any, file: Path, names: list[str], path: str) -> None:
    port.will_answer("POST", "/models", {"models": [added(name) for name in names]})
    # A server that says no ends the watching.
    ended = ctl("model", "add", "-f", str(file), "--watch", "--json")
    assert ended.status == 1
    assert [heard.path for heard in port.heard] == ["/models", path]
