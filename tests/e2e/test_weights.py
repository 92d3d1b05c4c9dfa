"""Weights that are fetched, with real processes: once for several nodes, resumed, shared, shown, and removed."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.cluster import Agent, Lab, Server
from lab.running import FAKES, free_port, wait_for, write_model

sys.path.insert(0, str(FAKES / "origin"))

from fake_origin import FakeOrigin

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

MIB = 1024 * 1024
KEY = "org/repo/m.fake"
SOURCE = f"hf:{KEY}"


class Site:
    """A hub with one file, a server, and agents that fetch from it."""

    def __init__(self, folder: Path, origin: FakeOrigin, lab: Lab, **server: Any) -> None:
        self.folder = folder
        self.origin = origin
        self.lab = lab
        self.server: Server = lab.server(**server)
        self.agents: list[Agent] = []

    def put(self, size_bytes: int, key: str = KEY) -> Path:
        path = self.origin.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(key).randbytes(size_bytes))
        return path

    def cache(self, name: str) -> Path:
        return self.folder / f"cache-{name}"

    def join(self, *names: str, seeds: bool = True, **config: Any) -> list[Agent]:
        for name in names:
            seed = {"seed_listen": f"127.0.0.1:{free_port()}"} if seeds else {}
            weights = {"cache": str(self.cache(name)), **config.pop("weights", {})}
            self.agents.append(self.lab.agent(name, self.server, weights=weights, **seed, **config))
        wait_for(lambda: len(self.nodes("ready")) == len(self.agents), "the nodes")
        return self.agents[-len(names) :]

    def nodes(self, state: str) -> list[str]:
        return [node["node"] for node in self.server.look("nodes")["nodes"] if node["state"] == state]

    def add(self, *, count: int = 1, source: str = SOURCE, name: str = "m") -> None:
        scaling = {"min": count, "max": count}
        file = write_model(self.folder / name, name=name, source=source, aliases=[], scaling=scaling)
        self.server.add(file)

    def fetches(self) -> list[dict[str, Any]]:
        """Of all nodes, as the server shows them."""
        return [fetch for node in self.server.look("weights")["nodes"] for fetch in node["fetches"]]

    def done_bytes(self) -> int:
        return sum(fetch["done_bytes"] for fetch in self.fetches())

    def taken(self, key: str = KEY) -> int:
        return self.origin.sent.get(key, 0)


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOrigin]:
    (tmp_path / "hub").mkdir()
    with FakeOrigin(tmp_path / "hub") as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield origin


@pytest.fixture
def site(tmp_path: Path, origin: FakeOrigin) -> Iterator[Site]:
    lab = Lab(tmp_path)
    yield Site(tmp_path, origin, lab)
    lab.close()


@pytest.mark.parametrize("count", [4, 8])
def test_several_nodes_cost_one_download(site: Site, count: int) -> None:
    # (a few pieces may come twice on a machine where a node stands still for a while, of however many)
    path = site.put(64 * MIB)
    site.origin.fault(KEY, bytes_per_s=MIB)
    site.join(*(f"n{number}" for number in range(count)))
    site.add(count=count)
    seen: dict[str, int] = {}
    most = 0

    def look() -> bool:
        nonlocal most
        for node in site.server.look("weights")["nodes"]:
            for fetch in node["fetches"]:
                # never backwards, and never all of it before it is proven
                assert fetch["done_bytes"] >= seen.get(node["node"], 0)
                assert fetch["done_bytes"] < path.stat().st_size or fetch["phase"] in ("verifying", "ready")
                seen[node["node"]] = fetch["done_bytes"]
                most = max(most, len(seen))
        return len(site.server.replicas()) == count

    wait_for(look, "all of them", 200)
    assert most == count
    assert site.taken() <= 1.1 * path.stat().st_size
    for agent in site.agents:
        (file,) = site.cache(agent.node).glob("*/*/m.fake")
        assert file.read_bytes() == path.read_bytes()
    site.server.check_health()


def test_a_node_that_dies_while_others_take_from_it_holds_up_nobody(site: Site) -> None:
    path = site.put(16 * MIB)
    # (for each of a dozen requests at once: its middle lasts for some seconds)
    site.origin.fault(KEY, bytes_per_s=MIB // 6)
    agents = site.join("n0", "n1", "n2")
    site.add(count=3)
    wait_for(lambda: len(site.fetches()) == 3 and site.done_bytes() > 8 * MIB, "the middle of it", 100)
    agents[0].kill()
    wait_for(lambda: len(site.server.replicas()) >= 2, "the two others", 200)
    agents[0].start()
    site.server.wait_ready(3)
    # what it had on its disk, and what the others have, is not asked for again
    assert site.taken() <= 1.5 * path.stat().st_size
    site.server.check_health()


def test_an_agent_that_is_killed_again_and_again_goes_on_where_it_was(site: Site) -> None:
    path = site.put(24 * MIB)
    site.origin.fault(KEY, bytes_per_s=4 * MIB)
    (agent,) = site.join("n0", seeds=False)
    site.add()
    kills = 10
    for number in range(kills):
        target = (number + random.Random(number).random()) * path.stat().st_size / (kills + 1)
        wait_for(lambda target=target: site.taken() >= target, "some more of it", 100)
        agent.kill()
        agent.start()
    site.server.wait_ready()
    (file,) = site.cache("n0").glob("*/*/m.fake")
    assert file.read_bytes() == path.read_bytes()
    # of each of them no more is lost than what was on its way: four requests, and what the kernel had taken in
    assert site.taken() <= path.stat().st_size + kills * 8 * MIB
    assert not list(site.cache("n0").glob("*/*.part"))
    assert agent.engine
    site.server.check_health()


def test_two_agents_on_one_folder_make_one_download(site: Site) -> None:
    path = site.put(12 * MIB)
    site.origin.fault(KEY, bytes_per_s=4 * MIB)
    shared = {"cache": str(site.folder / "shared")}
    site.join("n0", seeds=False, weights=shared)
    site.join("n1", seeds=False, weights=shared)
    site.add(count=2)
    site.server.wait_ready(2)
    assert path.stat().st_size <= site.taken() <= 1.1 * path.stat().st_size
    assert len(list((site.folder / "shared").glob("*/*/m.fake"))) == 1
    site.server.check_health()


def test_a_pull_is_followed_listed_and_freed_once_nobody_wants_it(site: Site) -> None:
    path = site.put(3 * MIB)
    site.join("n0", "n1")
    done = site.server.ctl("weights", "pull", SOURCE)
    assert done.returncode == 0, done.stderr
    assert "n0: ready" in done.stdout
    assert "n1: ready" in done.stdout
    assert site.taken() <= 1.1 * path.stat().st_size
    site.add()
    site.server.wait_ready()
    # a launch asks nobody for what is there
    assert site.taken() <= 1.1 * path.stat().st_size
    assert "nothing can be freed" in site.server.ctl("weights", "--collect").stdout
    strangers = site.cache("n0") / "mine.gguf"
    strangers.write_bytes(b"GGUF")
    assert site.server.ctl("model", "rm", "m").returncode == 0
    wait_for(lambda: "to delete what can be freed" in site.server.ctl("weights").stdout, "what can be freed")
    wait_for(lambda: not any(agent.engines() for agent in site.agents), "the end of the engine")
    wait_for(lambda: "in use" not in site.server.ctl("weights").stdout, "the end of its use")
    collected = site.server.ctl("weights", "--collect")
    assert collected.returncode == 0, collected.stderr
    assert collected.stdout.count("are free again") == 2
    assert strangers.exists()
    assert not [*site.folder.glob("cache-*/*/*/m.fake")]
    site.server.check_health()


def spoil(file: Path, content: bytes, at: int = 0) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


def test_what_was_damaged_on_its_disk_is_fetched_anew_and_only_where_nothing_runs_by_it(site: Site) -> None:
    path = site.put(6 * MIB)
    (agent,) = site.join("n0", seeds=False)
    site.add()
    site.server.wait_ready()
    (file,) = site.cache("n0").glob("*/*/m.fake")
    # its first piece, as a login page would begin
    spoil(file, b"<html>")
    assert site.server.ctl("stop", "m").returncode == 0
    wait_for(lambda: not agent.engines(), "the end of the engine")
    assert site.server.ctl("load", "m").returncode == 0
    site.server.wait_ready()
    assert file.read_bytes() == path.read_bytes()
    # that piece, and no other
    assert site.taken() == path.stat().st_size + MIB
    assert "is damaged: m.fake is an HTML page" in agent.log
    events = site.server.ctl("events").stdout
    assert "was damaged on its disk, and is fetched anew: m.fake is an HTML page" in events

    # in its middle, where no look finds it, and while an engine runs by it
    spoil(file, b"?" * 20, at=3 * MIB)
    refused = site.server.ctl("weights", "pull", SOURCE)
    assert refused.returncode == 1
    assert "m.fake is not what was fetched in 1 of its 6 pieces" in refused.stdout
    assert "llmgw ctl stop" in refused.stdout
    wait_for(lambda: "damaged, in use" in site.server.ctl("weights").stdout, "what is damaged")
    assert f"llmgw ctl weights pull {SOURCE} --node n0" in site.server.ctl("weights").stdout
    assert site.server.ctl("stop", "m").returncode == 0
    wait_for(lambda: not agent.engines(), "the end of the engine")
    mended = site.server.ctl("weights", "pull", SOURCE)
    assert mended.returncode == 0, mended.stdout
    assert "1MB from its origin" in mended.stdout
    assert file.read_bytes() == path.read_bytes()
    assert site.taken() == path.stat().st_size + 2 * MIB
    assert "it had the newest already, and all of it is right" in site.server.ctl("weights", "pull", SOURCE).stdout
    assert site.server.ctl("load", "m").returncode == 0
    site.server.wait_ready()
    assert site.taken() == path.stat().st_size + 2 * MIB
    wait_for(lambda: "damaged" not in site.server.ctl("weights").stdout, "that nothing is damaged")
    site.server.check_health()


def test_what_is_gated_says_what_to_do_and_the_token_is_nowhere(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "hf_very-secret-token"
    site.put(2 * MIB)
    site.origin.gated["org/repo"] = token
    (agent,) = site.join("n0", seeds=False)
    site.add()

    def look() -> str:
        return next((each["cause"] for each in site.server.look("replicas")["replicas"] if each.get("cause")), "")

    wait_for(look, "the failure")
    assert "org/repo" in look()
    shown = site.server.ctl("replicas").stdout
    assert "hub_token" in shown or "HF_TOKEN" in shown
    agent.stop()
    monkeypatch.setenv("HF_TOKEN", token)
    agent.start()
    site.server.wait_ready()
    told = "\n".join([agent.log, site.server.log, json.dumps(site.server.look("replicas")), *map(str, agent.words)])
    assert token not in told
    assert token not in "".join(path.read_text(errors="replace") for path in site.folder.rglob("*.json"))


def test_a_stall_is_seen_and_overcome(site: Site) -> None:
    site.put(6 * MIB)
    site.origin.fault(KEY, stall_after=MIB // 2)
    site.join("n0", seeds=False)
    site.add()

    def is_stalled() -> bool:
        return any(fetch.get("stalled_seconds") for fetch in site.fetches())

    wait_for(is_stalled, "the stall", 100)
    assert "stalled" in site.server.ctl("replicas").stdout
    site.origin.clear()
    site.server.wait_ready()
    site.server.check_health()


def test_a_disk_that_is_too_small_is_told_before_the_first_byte(site: Site) -> None:
    path = site.put(1)
    with path.open("r+b") as file:
        # (as much as no disk has, and nothing of it is written)
        file.truncate(2**42)
    site.origin._hashes[str(path), path.stat().st_mtime_ns, path.stat().st_size] = "0" * 64
    site.join("n0", seeds=False)
    site.add()

    def look() -> str:
        return next((each["cause"] for each in site.server.look("replicas")["replicas"] if each.get("cause")), "")

    wait_for(look, "the failure")
    assert "GB" in look()
    assert str(site.folder) in look()
    assert site.taken() == 0


@pytest.mark.e2e
def test_a_real_model_is_fetched_and_answers(site: Site, weights: Path) -> None:
    key = "org/small/small.gguf"
    file = site.put(0, key)
    file.unlink()
    shutil.copy(weights, file)
    site.join("n0", "n1")
    text = write_model(
        site.folder / "real",
        *("--threads", "1"),
        engine="llamacpp",
        source=f"hf:{key}",
        aliases=[],
        context_length=512,
        scaling={"min": 2, "max": 2},
    )
    began = time.monotonic()
    site.server.add(text)
    wait_for(lambda: len(site.server.replicas()) == 2, "both", 300)
    print(f"from model add to ready on two nodes: {time.monotonic() - began:.1f} s")
    reply = site.server.chat(max_tokens=4)
    assert reply.status == 200
    assert site.taken(key) <= 1.1 * weights.stat().st_size
    site.server.check_health()


def test_nodes_that_can_not_reach_each_other_take_through_the_server(tmp_path: Path, origin: FakeOrigin) -> None:
    lab = Lab(tmp_path)
    try:
        site = Site(tmp_path, origin, lab, seeding="relay")
        path = site.put(24 * MIB)
        origin.fault(KEY, bytes_per_s=4 * MIB)
        site.join("n0", "n1", "n2", seeds=False)
        chatting = write_model(tmp_path / "chatting", name="chatting", aliases=[], scaling={"min": 1, "max": 1})
        site.server.add(chatting)
        site.server.wait_ready()
        site.add(count=3)
        asked = 0

        def look() -> bool:
            nonlocal asked
            assert site.server.chat(model="chatting", max_tokens=4).status == 200
            asked += 1
            return len(site.server.replicas()) == 4

        wait_for(look, "all of them", 200)
        assert asked > 5
        assert path.stat().st_size <= site.taken() <= 1.2 * path.stat().st_size
        for agent in site.agents:
            (file,) = site.cache(agent.node).glob("*/*/m.fake")
            assert file.read_bytes() == path.read_bytes()
            assert "can't be given" not in agent.log
        site.server.check_health()
    finally:
        lab.close()


@pytest.mark.parametrize("seeding", ["relay", "direct"])
def test_a_server_that_is_killed_in_the_middle_costs_no_second_copy(
    tmp_path: Path, origin: FakeOrigin, seeding: str
) -> None:
    lab = Lab(tmp_path)
    try:
        site = Site(tmp_path, origin, lab, seeding=seeding)
        path = site.put(32 * MIB)
        # (for each of a dozen requests at once: its middle lasts for some seconds)
        origin.fault(KEY, bytes_per_s=MIB // 6)
        site.join("n0", "n1", "n2", seeds=seeding == "direct")
        site.add(count=3)
        wait_for(lambda: len(site.fetches()) == 3 and site.done_bytes() > 12 * MIB, "the middle of it", 100)
        site.server.kill()
        site.server.start()
        site.server.wait_ready(3)
        # a little may be asked for twice while a machine stands still
        assert path.stat().st_size <= site.taken() <= 1.2 * path.stat().st_size
        for agent in site.agents:
            (file,) = site.cache(agent.node).glob("*/*/m.fake")
            assert file.read_bytes() == path.read_bytes()
            assert "is not asked for m.fake for 60 s" not in agent.log
        site.server.check_health()
    finally:
        lab.close()
