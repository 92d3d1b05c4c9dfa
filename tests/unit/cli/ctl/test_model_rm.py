from __future__ import annotations

from typing import Any


def test_a_model_is_removed_by_its_name(port: Any, ctl: Any) -> None:
    port.will_answer("DELETE", "/models/org%2Fm", {"name": "org/m"})
    ended = ctl("model", "rm", "org/m")
    assert (ended.status, ended.out) == (0, "org/m is removed\n")


def test_one_that_is_declared_too_stays(port: Any, ctl: Any) -> None:
    port.will_answer("DELETE", "/models/m", {"name": "m", "declared": "server.yaml:4:3"})
    assert "the one declared at server.yaml:4:3 stays" in ctl("model", "rm", "m").out


def test_a_no_is_status_1(port: Any, ctl: Any) -> None:
    error = {"error": {"code": "unknown_model", "message": "there is no model m"}}
    port.will_answer("DELETE", "/models/m", error, status=404)
    ended = ctl("model", "rm", "m")
    assert (ended.status, ended.out, ended.err) == (1, "", "llmgw: there is no model m\n")


def test_with_watch_it_ends_with_the_last_replica(port: Any, ctl: Any) -> None:
    port.will_answer("DELETE", "/models/a%2Bb", {"name": "a+b"})
    port.will_answer("GET", "/replicas?model=a%2Bb", {"replicas": []})
    ended = ctl("model", "rm", "a+b", "--watch", "--json")
    assert (ended.status, ended.out) == (0, '{"name": "a+b"}\n{"replicas": []}\n')
