"""Many GPUs that are not there: a server and agents as processes, with fake inventories and the fake engine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.cluster import Agent, Lab
from lab.running import EngineProcess, wait_for, write_model

pytestmark = pytest.mark.slow


class Fleet:
    """A server, two nodes of 8 GPUs in the fabric ib-a and one of 4 in none."""

    def __init__(self, lab: Lab, folder: Path, **fleet: str) -> None:
        self.lab = lab
        self.folder = folder
        self.server = lab.server(fleet=fleet) if fleet else lab.server()
        self.inventories: dict[str, dict[str, Any]] = {}
        self.agents = {name: self.add(name, count) for name, count in (("n1", 8), ("n2", 8), ("n3", 4))}
        self.wait_nodes("ready")

    def add(self, name: str, count: int) -> Agent:
        fabrics = {"ib-a": {"interface": "lo", "hcas": ["mlx5_0"]}} if count == 8 else {}
        self.inventories[name] = {
            "gpus": [{"class": "h100-80g" if count == 8 else "a100-40g", "count": count, "nvlink": "all"}],
            "fabrics": {fabric: {"interface": "lo", "address": "127.0.0.1"} for fabric in fabrics},
            "memory_gb": 1000,
            "memory_foreign_gb": 0,
        }
        self.write(name)
        discovery = {"fake": str(self.path(name))}
        return self.lab.agent(name, self.server, discovery=discovery, fabrics=fabrics)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.yaml"

    def write(self, name: str) -> None:
        self.path(name).write_text(yaml.safe_dump(self.inventories[name]))

    def wait_nodes(self, state: str, *names: str) -> None:
        def look() -> bool:
            found = {node["node"]: node["state"] for node in self.server.look("nodes")["nodes"]}
            return all(found.get(name) == state for name in names or self.agents)

        wait_for(look, f"{names or 'all nodes'} {state}")

    def model(self, name: str, count: int = 1, **profile: Any) -> Path:
        path = write_model(self.folder / name, name=name, aliases=[], scaling={"min": count, "max": count})
        written = yaml.safe_load(path.read_text())
        written["profiles"][0] |= profile
        path.write_text(yaml.safe_dump(written))
        return path

    def explain(self, *words: str) -> dict[str, Any]:
        done = self.server.ctl("explain-placement", *words, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

    def replica(self, model: str) -> dict[str, Any]:
        """The only one of that model, once it is ready."""

        def look() -> dict[str, Any] | None:
            found = [each for each in self.server.replicas() if each["model"] == model]
            return found[0] if len(found) == 1 else None

        return wait_for(look, f"a replica of {model}") or {}

    def find(self, node: str, model: str) -> tuple[EngineProcess, str]:
        """The engine of that model there, and the cards that it sees, in the order of the PCI bus."""
        (engine,) = [each for each in self.agents[node].engines() if model in command_line(each.pid)]
        seen = environment(engine.pid)
        assert seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        return engine, seen["CUDA_VISIBLE_DEVICES"]

    def pids(self) -> dict[str, set[int]]:
        return {name: {engine.pid for engine in agent.engines()} for name, agent in self.agents.items()}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    lab = Lab(tmp_path)
    yield lambda **rules: Fleet(lab, tmp_path, **rules)
    lab.close()


def environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


def test_models_of_two_cards_of_two_nodes_and_of_none_find_their_places_and_keep_them(
    fleet: Callable[..., Fleet],
) -> None:
    cluster = fleet()
    server = cluster.server
    server.add(cluster.model("pair", gpu_class="a100-40g", tp=2))
    server.add(cluster.model("plain", min_memory_gb=4))
    server.add(cluster.model("wide", gpu_class="h100-80g", tp=16, nodes=2))
    wide, pair, plain = (cluster.replica(name) for name in ("wide", "pair", "plain"))
    # two cards on the node that has that class, by their indices
    assert pair["node"] == "n3"
    (shard,) = pair["shards"]
    assert len(shard["gpus"]) == 2
    # two whole nodes of one fabric, which meet at the first one's address on it
    assert (wide["node"], wide["fabric"]) == ("n1", "ib-a")
    assert [(each["node"], each["rank"], len(each["gpus"])) for each in wide["shards"]] == [("n1", 0, 8), ("n2", 1, 8)]
    rank, cards = cluster.find("n2", "wide")
    assert cards == "0,1,2,3,4,5,6,7"
    assert cluster.find("n3", "pair")[1] == "0,1"
    # one that asks for none sees none of those that others have
    assert cluster.find(plain["node"], "plain")[1] == ""
    words = command_line(rank.pid)
    assert words[words.index("--rank") + 1] == "1"
    assert words[words.index("--meet") + 1].startswith("127.0.0.1:")
    for name in ("wide", "pair", "plain"):
        assert server.chat(model=name).status == 200

    # each is explained, the one that is placed as well as the one that can't be
    for name, node in (("pair", "n3"), ("plain", plain["node"])):
        assert node in server.ctl("explain-placement", name).stdout
    refused = cluster.explain("wide")["explanation"]
    assert "placement" not in refused
    assert {no["reason"] for each in refused["candidates"] for no in each["rejections"]} >= {"not_enough_gpus"}
    assert refused["unlock"]
    before = server.look("models")
    one_more = cluster.explain("pair", "--what-if", str(cluster.model("pair", gpu_class="a100-40g", tp=2)))
    assert one_more
    assert server.look("models") == before
    table = server.ctl("nodes").stdout.splitlines()
    assert [line.split()[2:4] for line in table[1:3]] == [["0/8", "free"]] * 2
    assert "2/4 free" in table[3]
    status = server.ctl("status").stdout
    assert "h100-80g" in status
    assert "ib-a" in status

    # an agent that is killed, and the server too: each engine goes on
    pids = cluster.pids()
    cluster.agents["n2"].kill()
    cluster.wait_nodes("silent", "n2")
    cluster.agents["n2"].start()
    cluster.wait_nodes("ready")
    server.kill()
    server.start()
    cluster.wait_nodes("ready")
    wait_for(lambda: len(server.replicas()) == 3, "all three")
    assert cluster.pids() == pids
    assert [server.chat(model=name).status for name in ("wide", "pair", "plain")] == [200] * 3
    server.check_health()

    # the end of one shard ends the other, and both come back together
    first = cluster.find("n1", "wide")[0].pid
    os.kill(rank.pid, signal.SIGKILL)
    wait_for(lambda: first not in cluster.pids()["n1"], "the end of rank 0")
    again = cluster.replica("wide")
    assert again["epoch"] == wide["epoch"] + 1
    assert cluster.pids()["n3"] == pids["n3"]
    for name in ("wide", "pair", "plain"):
        assert server.ctl("model", "rm", name).returncode == 0
    wait_for(lambda: not any(cluster.pids().values()), "the end of all engines")
    wait_for(lambda: server.ctl("nodes").stdout.count(" free") == 3, "the cards")
    assert "8/8 free" in server.ctl("nodes").stdout


def test_what_ran_on_a_node_that_is_gone_comes_up_elsewhere_and_the_old_engine_ends_when_it_is_back(
    fleet: Callable[..., Fleet],
) -> None:
    cluster = fleet(lease="10s", replace_after="10s")
    server = cluster.server
    server.add(cluster.model("one", gpu_class="h100-80g"))
    gone = cluster.agents[cluster.replica("one")["node"]]
    (old,) = gone.engines()
    gone.kill()
    other = {"n1": "n2", "n2": "n1"}[gone.node]
    wait_for(cluster.agents[other].engines, "another one")
    again = cluster.replica("one")
    assert (again["replica"], again["epoch"], again["node"]) == ("rep-one-1", 2, other)
    assert [engine.pid for engine in gone.engines()] == [old.pid]
    assert server.chat(model="one").status == 200
    gone.start()
    wait_for(lambda: not gone.engines(), "the end of the old one")
    wait_for(lambda: len(server.look("replicas")["replicas"]) == 1, "the word of its end")
    server.check_health()


def test_a_card_that_another_program_fills_is_passed_over_and_the_program_named(fleet: Callable[..., Fleet]) -> None:
    cluster = fleet()
    server = cluster.server
    use = {"memory_gb": 30, "pid": 4711, "name": "jupyter"}
    cluster.inventories["n3"]["gpus"] = [{"class": "a100-40g", "foreign": [use]}, {"class": "a100-40g"}]
    cluster.write("n3")
    wait_for(lambda: "1/2 free" in server.ctl("nodes").stdout or "2/2 free" in server.ctl("nodes").stdout, "two cards")
    wait_for(lambda: "jupyter" in json.dumps(server.look("nodes")), "the other program")
    server.add(cluster.model("small", gpu_class="a100-40g"))
    cluster.replica("small")
    assert cluster.find("n3", "small")[1] == "1"
    server.add(cluster.model("more", gpu_class="a100-40g"))
    said = server.ctl("explain-placement", "more").stdout
    assert "jupyter" in said
    assert "4711" in said
    # it ends, and the model that waited is started at once
    cluster.inventories["n3"]["gpus"][0].pop("foreign")
    cluster.write("n3")
    assert cluster.replica("more")["node"] == "n3"
    server.check_health()


def test_a_cordoned_node_stays_so_over_a_restart_and_a_lost_one_can_be_removed(fleet: Callable[..., Fleet]) -> None:
    cluster = fleet(lease="10s")
    server = cluster.server
    assert server.ctl("cordon", "n3").returncode == 0
    assert server.ctl("label", "n1", "room=a").returncode == 0
    server.kill()
    server.start()
    cluster.wait_nodes("ready")
    found = {node["node"]: node for node in server.look("nodes")["nodes"]}
    assert [found[name]["cordoned"] for name in ("n1", "n3")] == [False, True]
    assert found["n1"]["labels"] == {"room": "a"}
    server.add(cluster.model("small", gpu_class="a100-40g"))
    said = wait_for(lambda: server.ctl("explain-placement", "small").stdout, "an explanation")
    assert "uncordon n3" in said
    assert server.ctl("uncordon", "n3").returncode == 0
    cluster.replica("small")
    refused = server.ctl("node", "rm", "n3")
    assert refused.returncode == 1
    assert "n3" in refused.stderr
    # one that is drained goes, and comes back as a new one while its agent runs
    assert server.ctl("cordon", "n1").returncode == 0
    assert "comes back" in server.ctl("node", "rm", "n1").stdout
    wait_for(lambda: cluster.agents["n1"].log.count("connected to the server") > 2, "its return")
    cluster.wait_nodes("ready")
    assert not any(node.get("cordoned") for node in server.look("nodes")["nodes"])
    cluster.agents["n2"].kill()
    cluster.wait_nodes("lost", "n2")
    removed = server.ctl("node", "rm", "n2")
    assert removed.returncode == 0
    assert "revoke" in removed.stdout
    assert "n2" not in server.ctl("nodes").stdout
    server.check_health()
