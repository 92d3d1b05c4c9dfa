"""Models that are loaded because somebody asks: who waits, for how long, and what is said to those in vain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from lab.running import Llmgw, wait_for
from lab.wire import CHAT, Wire, chat, get, post

pytestmark = pytest.mark.slow
MODELS = {
    "quick": ({"min": 0, "max": 1}, ["--load-seconds", "1"]),
    "never": ({"min": 0, "max": 1}, ["--never-ready"]),
    "broken": ({"min": 0, "max": 1}, ["--crash-at-start", "--exit-code", "3"]),
    "off": ({"min": 0, "max": 0}, []),
}


@pytest.fixture
def llmgw(tmp_path: Path) -> Iterator[Llmgw]:
    source = tmp_path / "weights.fake"
    source.write_text("weights")
    models = [
        {
            "name": name,
            "source": str(source),
            "scaling": scaling,
            "profiles": [{"name": "p", "engine": "fake", "args": args}],
        }
        for name, (scaling, args) in MODELS.items()
    ]
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump({"models": models}))
    llmgw = Llmgw(tmp_path, "serve", str(file), on_demand_wait="5s")
    yield llmgw.start().wait_ready()
    llmgw.clean()


def test_whoever_asks_first_waits_and_is_served(llmgw: Llmgw) -> None:
    assert llmgw.engines() == []
    assert [row["id"] for row in llmgw.ask(get("/v1/models")).json["data"]] == ["quick", "never", "broken"]
    with llmgw.connect() as one, llmgw.connect() as two:
        one.send(post(CHAT, chat(model="quick")))
        two.send(post(CHAT, chat(model="quick", stream=True)))
        assert one.read_reply().json["model"] == "quick"
        assert two.read_reply().events[-1] == b"[DONE]"
    assert llmgw.stop() == 0
    assert llmgw.engines() == []


def test_whoever_waits_in_vain_is_told_when_to_come_back(llmgw: Llmgw) -> None:
    with llmgw.connect() as one, llmgw.connect() as two:
        one.send(post(CHAT, chat(model="never")))
        two.send(post(CHAT, chat(model="broken", stream=True)))
        for wire in (one, two):
            reply = wire.read_reply()
            assert (reply.status, reply.code) == (503, "model_loading")
            assert 1 <= int(reply.get("retry-after") or 0) <= 120
            # it is a refusal like any other: the connection goes on
            assert wire.ask(get()).status == 200
    assert llmgw.stop() == 0


def test_a_model_that_is_not_to_run_says_so_at_once(llmgw: Llmgw) -> None:
    reply = llmgw.ask(post(CHAT, chat(model="off")))
    assert (reply.status, reply.code, reply.get("retry-after")) == (503, "model_not_running", None)


@pytest.mark.parametrize("way", ["fin", "rst"])
def test_whoever_leaves_waits_no_longer(llmgw: Llmgw, way: str) -> None:
    with Wire(llmgw.address) as wire:
        wire.send(post(CHAT, chat(model="never")))
        wait_for(llmgw.engines, "the engine's start")
        wire.leave(way)
    line = wait_for(lambda: [line for line in llmgw.log.split("\n") if " client_left " in line], "its line in the log")
    assert "model=never" in line[0]
    assert llmgw.stop() == 0
