from __future__ import annotations

from typing import Any

import pytest

FILE = "/etc/llmgw/server.yaml"


@pytest.mark.parametrize(
    ("changed", "needs_restart", "said"),
    [
        ([], [], f"{FILE}: nothing has changed\n"),
        (["models", "timeouts.idle"], [], f"{FILE}: models, timeouts.idle changed and in effect\n"),
        ([], ["listen"], f"{FILE}: listen changed, in effect after a restart of the server\n"),
        (
            ["models"],
            ["listen"],
            f"{FILE}: models changed and in effect\n{FILE}: listen changed, in effect after a restart of the server\n",
        ),
    ],
)
def test_what_changed_is_told_apart_from_what_waits(
    port: Any, ctl: Any, changed: list[str], needs_restart: list[str], said: str
) -> None:
    port.will_answer("POST", "/reload", {"file": FILE, "changed": changed, "needs_restart": needs_restart})
    assert ctl("reload").out == said


def test_a_definition_that_failed_before_is_named(port: Any, ctl: Any) -> None:
    failed = [{"kind": "model", "name": "m", "message": f"the definition in {FILE}:4:3 failed: out of memory"}]
    port.will_answer("POST", "/reload", {"file": FILE, "changed": [], "needs_restart": [], "failed": failed})
    assert ctl("reload").out.splitlines() == [
        f"{FILE}: nothing has changed",
        f"m: the definition in {FILE}:4:3 failed: out of memory",
    ]


def test_with_watch_the_models_are_shown_afterwards(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/reload", {"file": FILE, "changed": [], "needs_restart": []})
    # A server that says no ends the watching.
    assert ctl("reload", "--watch").status == 1
    assert [(heard.method, heard.path) for heard in port.heard] == [("POST", "/reload"), ("GET", "/models")]


def test_a_file_that_is_wrong_is_told_with_its_places_and_status_2(port: Any, ctl: Any) -> None:
    problem = {"key": "listen", "where": f"{FILE}:1:1", "message": "no port"}
    error = {"error": {"code": "invalid_config", "message": "wrong", "problems": [problem]}}
    port.will_answer("POST", "/reload", error, status=400)
    ended = ctl("reload")
    assert (ended.status, ended.err) == (2, f"llmgw: {FILE}:1:1 listen: no port\n")
