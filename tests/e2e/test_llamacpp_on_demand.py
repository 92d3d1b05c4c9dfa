"""Two models of a real engine that load when somebody asks, on a node that has the memory for one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from lab.cluster import Lab
from lab.running import wait_for, write_model

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(500)]
NAMES = ("one", "two")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def test_two_models_with_room_for_one_take_turns_and_both_answer(lab: Lab, weights: Path, tmp_path: Path) -> None:
    server = lab.server(fleet={"on_demand_wait": "100s"})
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump({"gpus": [], "memory_gb": 4, "memory_foreign_gb": 0}))
    agent = lab.agent("n1", server, discovery={"fake": str(small)})
    wait_for(lambda: [node["state"] for node in server.look("nodes")["nodes"]] == ["ready"], "the node")
    # (one that has just been loaded may stay for two minutes, unless its own idle time is over)
    scaling = {"min": 0, "max": 1, "idle_timeout": "1s"}
    for name in NAMES:
        file = write_model(
            tmp_path / name,
            *("--threads", "1"),
            engine="llamacpp",
            source=weights,
            name=name,
            aliases=[],
            context_length=512,
            scaling=scaling,
        )
        text = yaml.safe_load(file.read_text())
        text["profiles"][0]["min_memory_gb"] = 3
        file.write_text(yaml.safe_dump(text))
        server.add(file)
    assert agent.engines() == []

    def ask(name: str) -> str:
        """Its answer, however often it has to be asked for that: it is asked again when the refusal says."""
        for _ in range(20):
            reply = server.chat(model=name, max_tokens=8)
            if reply.status == 200:
                break
            assert (reply.status, reply.code) == (503, "model_loading")
            time.sleep(int(reply.get("retry-after") or 0))
        return str(reply.json["model"]) if reply.json["choices"][0]["message"]["content"] else ""

    with ThreadPoolExecutor() as clients:
        assert sorted(clients.map(ask, NAMES * 2)) == sorted(NAMES * 2)
    assert [ask(name) for name in NAMES] == list(NAMES)
    wait_for(lambda: agent.engines() == [], "the end of both")
    server.check_health()
