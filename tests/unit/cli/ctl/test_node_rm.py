from __future__ import annotations

from typing import Any

from llmgw.cli.ctl.node_rm import draw


def test_a_node_is_removed_and_its_certificate_is_not_forgotten(port: Any, ctl: Any) -> None:
    port.will_answer("DELETE", "/nodes/gpu01", {"node": "gpu01", "connected": False, "running": []})
    ended = ctl("node", "rm", "gpu01")
    assert (ended.status, ended.out) == (
        0,
        "gpu01 is removed\nits certificate is valid until you revoke it: llmgw ctl cert revoke gpu01 --dir DIR\n",
    )


def test_an_agent_that_is_still_there_is_said_to_come_back() -> None:
    _, line, _ = draw({"node": "gpu01", "connected": True, "running": []})
    assert line == "its agent runs and comes back as a new node: stop it there"


def test_what_a_lost_node_may_run_still_is_named() -> None:
    _, line, _ = draw({"node": "gpu01", "connected": False, "running": ["rep-a-1", "rep-b-1"]})
    assert str(line).startswith("it was lost with rep-a-1, rep-b-1, which may run there still")


def test_a_no_is_status_1(port: Any, ctl: Any) -> None:
    error = {"error": {"code": "node_in_use", "message": "gpu01 is ready, with rep-a-1: cordon it"}}
    port.will_answer("DELETE", "/nodes/gpu01", error, status=409)
    ended = ctl("node", "rm", "gpu01")
    assert (ended.status, ended.out, ended.err) == (1, "", "llmgw: gpu01 is ready, with rep-a-1: cordon it\n")
