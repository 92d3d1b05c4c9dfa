from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(("words", "number"), [((), None), (("--to", "3"), 3)])
def test_a_model_has_an_earlier_definition_again(port: Any, ctl: Any, words: tuple[str, ...], number: int) -> None:
    port.will_answer("POST", "/rollback", {"model": "qwen", "number": 5, "to": 3, "rolls": True})
    ended = ctl("model", "rollback", "coder", *words)
    assert (ended.status, ended.out) == (
        0,
        "qwen has definition 3 again, kept as number 5\n"
        "its replicas of another definition are replaced, one after the other: llmgw ctl replicas qwen\n",
    )
    assert port.heard[0].body == {"model": "coder", "number": number}


def test_of_one_that_loads_on_demand_only_those_that_are_asked_for_are_replaced(port: Any, ctl: Any) -> None:
    answer = {"model": "qwen", "number": 5, "to": 3, "rolls": True, "on_demand": True}
    port.will_answer("POST", "/rollback", answer)
    assert "replaced where somebody asks for it, and go where nobody does" in ctl("model", "rollback", "qwen").out


def test_where_no_engine_notices_nothing_is_said_of_replicas(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/rollback", {"model": "qwen", "number": 5, "to": 3, "rolls": False})
    assert ctl("model", "rollback", "qwen").out == "qwen has definition 3 again, kept as number 5\n"


def test_a_declared_model_is_refused_with_its_place(port: Any, ctl: Any) -> None:
    message = "qwen is declared at server.yaml:4:3: write the earlier definition there, then `llmgw ctl reload`"
    port.will_answer("POST", "/rollback", {"error": {"code": "declared_model", "message": message}}, status=409)
    ended = ctl("model", "rollback", "qwen", "--to", "1")
    assert (ended.status, ended.out, ended.err) == (1, "", f"llmgw: {message}\n")


def test_there_is_no_definition_0(port: Any, ctl: Any) -> None:
    ended = ctl("model", "rollback", "qwen", "--to", "0")
    assert (ended.status, port.heard) == (2, [])
