"""How models come and go, with real processes: on demand, by a changed definition, from a node that is drained."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.cluster import Agent, Lab, Server, run_llmgw
from lab.running import FAKES, wait_for, write_model
from lab.wire import CHAT, Wire, chat, get, post

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


class Site:
    """A server and nodes with so many cards, one fabric over all; each model takes a card, unless it asks for none."""

    def __init__(
        self, lab: Lab, folder: Path, cards: dict[str, int], programs: dict[str, Path] | None = None, **config: Any
    ) -> None:
        """``programs``: what nodes run in place of the fake engine; ``config``: keys of server.yaml."""
        self.lab, self.folder = lab, folder
        self._programs = programs or {}
        self.server: Server = lab.server(**config)
        self.agents: dict[str, Agent] = {name: self._add(name, count) for name, count in cards.items()}
        self.wait_nodes()

    def _add(self, name: str, count: int) -> Agent:
        inventory = {
            "gpus": [{"class": "h100-80g", "count": count, "nvlink": "all"}],
            "fabrics": {"ib-a": {"interface": "lo", "address": "127.0.0.1"}},
            "memory_gb": 100,
            "memory_foreign_gb": 0,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(inventory))
        fabrics = {"ib-a": {"interface": "lo", "hcas": ["mlx5_0"]}}
        engines = {"fake": {"bin": str(self._programs[name])}} if name in self._programs else {}
        return self.lab.agent(name, self.server, discovery={"fake": str(path)}, fabrics=fabrics, engines=engines)

    def wait_nodes(self) -> None:
        def look() -> bool:
            states = [node["state"] for node in self.nodes().values()]
            return states == ["ready"] * len(self.agents)

        wait_for(look, "the nodes")

    def nodes(self) -> dict[str, Any]:
        return {node["node"]: node for node in self.server.look("nodes")["nodes"]}

    # -- models

    def write(self, name: str, *args: str, profile: dict[str, Any] | None = None, **fields: Any) -> Path:
        """A definition: without ``scaling`` it has one replica, always; ``profile`` {} asks for no card."""
        path = write_model(
            self.folder / name, *args, **{"name": name, "aliases": [], "scaling": {"min": 1, "max": 1}, **fields}
        )
        written = yaml.safe_load(path.read_text())
        written["profiles"][0] |= {"gpu_class": "h100-80g", "tp": 1} if profile is None else profile
        path.write_text(yaml.safe_dump(written))
        return path

    def model(self, name: str) -> dict[str, Any]:
        (found,) = (model for model in self.server.look("models")["models"] if model["name"] == name)
        assert isinstance(found, dict)
        return found

    def replicas(self, name: str) -> list[dict[str, Any]]:
        return [replica for replica in self.server.look("replicas")["replicas"] if replica["model"] == name]

    def wait_ready(self, name: str, node: str | None = None) -> dict[str, Any]:
        """Its only replica, once that is ready there."""

        def look() -> dict[str, Any] | None:
            found = self.replicas(name)
            there = [each for each in found if each["state"] == "ready" and node in (None, each["node"])]
            return there[0] if len(found) == 1 and there and "draining" not in there[0] else None

        return wait_for(look, f"{name} on {node or 'any node'}") or {}

    def engines(self, name: str) -> dict[int, str]:
        """The processes of that model: where each is."""
        found = {}
        for node, agent in self.agents.items():
            for engine in agent.engines():
                with contextlib.suppress(OSError, ValueError):
                    words = Path(f"/proc/{engine.pid}/cmdline").read_bytes().decode().split("\0")
                    if words[words.index("--alias") + 1] == name:
                        found[engine.pid] = node
        return found

    def listed(self) -> list[str]:
        return [row["id"] for row in self.server.ask(get("/v1/models")).json["data"]]

    # -- the operator

    def ctl(self, *words: str) -> str:
        done = self.server.ctl(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def refuse(self, *words: str) -> str:
        done = self.server.ctl(*words)
        assert done.returncode == 1, (words, done.stdout, done.stderr)
        return done.stderr

    def events(self, name: str, what: str) -> list[str]:
        """What has happened to a model, of that kind, since the server's start."""
        lines = self.ctl("events", "--model", name, "--lines", "1000", "--json").splitlines()
        return [event["text"] for event in map(json.loads, lines) if event["what"] == what]

    def history(self, name: str) -> dict[int, dict[str, Any]]:
        found = json.loads(self.ctl("model", "history", name, "--json"))["definitions"]
        return {each["number"]: each for each in found}

    def edit(self, name: str, sed: str) -> str:
        """By ``model edit``, with an editor that edits by itself."""
        done: subprocess.CompletedProcess[str] = run_llmgw(
            "ctl", "model", "edit", name, LLMGW_ADMIN=f"http://127.0.0.1:{self.server.operator_port}",
            EDITOR=f"sed -i '{sed}'",
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    lab = Lab(tmp_path)
    yield lambda cards, **config: Site(lab, tmp_path, cards, **config)
    lab.close()


class Gate:
    """Engines that are started while it is shut load until it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.args = ("--bind-when", str(path))

    def open(self) -> None:
        self.path.touch()

    def shut(self) -> None:
        self.path.unlink(missing_ok=True)


class Slow:
    """The fake engine's program, which does not tell its version as long as it is held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = path.with_name("held")
        path.parent.mkdir()
        self._write("")

    def _write(self, comment: str) -> None:
        made = self.path.with_suffix(".new")
        wait = f'[ "$1" = --version ] && while [ -e {self._held} ]; do sleep 0.05; done'
        run = f"exec '{sys.executable}' '{FAKES / 'fake_engine.py'}' \"$@\""
        made.write_text(f"#!/bin/sh\n{comment}\n{wait}\n{run}\n")
        made.chmod(0o755)
        made.rename(self.path)

    def hold(self) -> None:
        """It is another program from now on, which is to be tried anew, and that takes its time."""
        self._held.touch()
        self._write("# another one")

    def go_on(self) -> None:
        self._held.unlink()


@contextlib.contextmanager
def asking(server: Server, name: str) -> Iterator[Counter[str]]:
    """A client that asks every 50 ms; what came of each: "ok", or an error with its Retry-After."""
    found: Counter[str] = Counter()
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.05):
            reply = server.chat(model=name)
            said = "ok" if reply.status == 200 else f"{reply.status} {reply.code} {reply.get('retry-after')}"
            found[said] += 1

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield found
    finally:
        ended.set()
        client.join()


def begin(server: Server, name: str, fake: dict[str, Any] | None = None, **fields: Any) -> Wire:
    """A request whose answer is to be read later."""
    wire = Wire(server.address)
    wire.send(post(CHAT, chat(fake, model=name, **fields)))
    return wire


def return_as_told(server: Server, name: str) -> None:
    """Ask, and come back after the time that each refusal names, until it is answered."""
    for _ in range(10):
        reply = server.chat(model=name)
        if reply.status == 200:
            return
        assert (reply.status, reply.code) == (503, "model_loading")
        time.sleep(int(reply.get("retry-after") or 0))
    pytest.fail("refused ten times")


def test_a_model_comes_when_somebody_asks_and_goes_when_nobody_does(site: Callable[..., Site], tmp_path: Path) -> None:
    here = site({"n1": 1}, fleet={"on_demand_wait": "60s"})
    server, gate = here.server, Gate(tmp_path / "gate")
    on_demand = {"min": 0, "max": 1, "idle_timeout": "3s"}
    server.add(here.write("m", *gate.args, scaling=on_demand))
    server.add(here.write("other", scaling=on_demand))
    server.add(here.write("off", scaling={"min": 0, "max": 0}))
    assert here.model("m")["status"] == "on-demand"
    assert here.listed() == ["m", "other"]
    assert server.chat(model="off").code == "model_not_running"
    assert "max" in here.refuse("load", "off")
    assert here.engines("m") == {}

    # who asks first waits, and is answered
    with begin(server, "m") as first:
        wait_for(lambda: server.replicas("loading"), "its load")
        gate.open()
        assert first.read_reply().status == 200
    wait_for(lambda: not here.engines("m"), "its end")
    wait_for(lambda: here.model("m")["status"] == "on-demand", "the word of it")
    assert any("nobody has asked for it for 3s" in text for text in here.events("m", "stopping"))

    # one that loads for nobody any more makes way for one that somebody waits for, on the only card
    gate.shut()
    with begin(server, "m"):
        wait_for(lambda: server.replicas("loading"), "its load")
    assert server.chat(model="other").status == 200
    assert here.engines("m") == {}
    assert any("other" in text for text in here.events("m", "evicted"))

    # one that an operator stops is not loaded by whoever asks, and at zero a model is known, by the next server too
    assert "is stopped" in here.ctl("stop", "other")
    wait_for(lambda: not here.engines("other"), "its end")
    refused = server.chat(model="other")
    assert (refused.status, refused.code) == (503, "model_not_running")
    here.edit("m", "s/idle_timeout: 3s/idle_timeout: 10m/")
    server.write(fleet={"on_demand_wait": "500ms"})
    server.kill()
    server.start()
    assert here.listed() == ["m"]
    here.wait_nodes()
    assert server.chat(model="other").code == "model_not_running"
    assert here.model("other")["status"] == "stopped"
    refused = server.chat(model="m")
    assert (refused.status, refused.code) == (503, "model_loading")
    assert 1 <= int(refused.get("retry-after") or 0) <= 120
    gate.open()
    return_as_told(server, "m")

    # how long it may be idle is heeded at once, and nothing is started anew for that
    assert "replaced, one" not in here.edit("m", "s/idle_timeout: 10m/idle_timeout: 1s/")
    assert "no longer stopped" in here.ctl("load", "other")
    wait_for(lambda: here.engines("other") and not here.engines("m"), "the other one, once this one has gone")
    assert "other" in here.listed()
    assert here.history("m").keys() == {1, 2, 3}
    server.check_health()


def test_a_changed_definition_takes_its_place_without_an_error_and_a_bad_one_does_not(
    site: Callable[..., Site], tmp_path: Path
) -> None:
    declared = tmp_path / "declared" / "model.yaml"
    here = site({"n1": 2}, fleet={"on_demand_wait": "60s"})
    server = here.server
    here.write("declared", "--print-line", "one", profile={})
    text = yaml.safe_load(declared.read_text())
    server.write(models=[text])
    here.ctl("reload")
    server.add(here.write("m", "--print-line", "one"))
    before, recalled = here.wait_ready("m"), here.wait_ready("declared")["replica"]
    (old,) = here.engines("m")
    gate = Gate(tmp_path / "gate")
    with begin(server, "m", {"tokens": 5, "hold": str(gate.path)}, stream=True, user="long") as stream:
        engine = next(engine for engine in here.agents["n1"].engines() if engine.pid == old)
        wait_for(lambda: engine.find("long"), "its way to the engine")
        with asking(server, "m") as answers:
            # there is a spare card: another one first, and the old one goes when nobody is answered by it any more
            assert "replaced" in here.edit("m", "s/- one/- two/")
            assert f"{recalled} of declared is replaced" in here.ctl("stop", recalled)
            wait_for(lambda: any(each.get("draining") for each in here.replicas("m")), "the old one to be drained")
            (draining,) = (each for each in here.replicas("m") if each.get("draining"))
            assert (draining["replica"], draining["state"]) == (before["replica"], "ready")
            assert len(here.engines("m")) == 2
            gate.open()
            assert stream.read_reply().events[-1] == b"[DONE]"
            again = here.wait_ready("m")
            assert again["replica"] != before["replica"]
            assert old not in here.engines("m")
            wait_for(lambda: here.history("m")[2].get("outcome") == "proven", "the word that it serves")

            assert here.wait_ready("declared")["replica"] != recalled

            # bad ones: the old one goes on, the stored model has its definition again, the declared one's file is named
            (pid,) = here.engines("m")
            (declared_pid,) = here.engines("declared")
            here.edit("m", "s/- two/- two\\n  - --crash-at-start/")
            text["profiles"][0]["args"] = ["--crash-at-start"]
            server.write(models=[text])
            here.ctl("reload")
            wait_for(lambda: here.events("m", "reverted"), "the return")
            wait_for(lambda: here.model("declared").get("failed"), "the return of the other")
            assert (list(here.engines("m")), list(here.engines("declared"))) == ([pid], [declared_pid])
            history = wait_for(lambda: (found := here.history("m")) and len(found) == 4 and found, "four definitions")
            assert [history[number].get("outcome") for number in (2, 3, 4)] == ["proven", "failed", "proven"]
            assert (history[4]["current"], history[4]["serving"]) == (True, True)
            assert "--crash-at-start" not in json.loads(here.ctl("model", "show", "m", "--json"))["text"]
            for words in (("models",), ("status",), ("events", "--model", "declared")):
                assert str(server.path) in here.ctl(*words), words
            assert str(server.path) in here.refuse("model", "rollback", "declared")

            # no spare card: the old one goes first, and who asks waits for the other
            server.add(here.write("full"))
            here.wait_ready("full")
            here.ctl("model", "rollback", "m", "--to", "1")
            wait_for(lambda: pid not in here.engines("m"), "the end of the old one")
            here.wait_ready("m")
            assert any("no room for another beside it" in text for text in here.events("m", "stopping"))
        assert answers.keys() == {"ok"}

    # all of this is known to the next server
    pids = here.engines("m"), here.engines("declared")
    server.kill()
    server.start()
    here.wait_nodes()
    assert here.model("declared")["failed"]
    assert str(server.path) in here.ctl("models")
    assert here.history("m")[5]["current"]
    wait_for(lambda: len(server.replicas()) == 3, "all three")
    assert (here.engines("m"), here.engines("declared")) == pids
    assert [server.chat(model=name).status for name in ("m", "declared")] == [200, 200]
    server.check_health()


def test_a_node_is_emptied_without_an_error_and_only_where_there_is_room(site: Callable[..., Site]) -> None:
    here = site({"n1": 1, "n2": 1}, fleet={"on_demand_wait": "3s"})
    server = here.server
    server.add(here.write("m"))
    server.add(here.write("plain", profile={}))
    first = here.wait_ready("m")["node"]
    other = {"n1": "n2", "n2": "n1"}[first]
    here.wait_ready("plain")
    with asking(server, "m") as answers:
        said = here.ctl("drain", first, "--wait")
        assert "nothing runs there" in said
        assert here.agents[first].engines() == []
        assert set(here.engines("m").values()) == {other}
        assert set(here.engines("plain").values()) == {other}
        assert "drain" in here.ctl("nodes")

        # without room it says so, and waits, also over a restart of the server
        assert "still there:" in here.ctl("drain", other)
        for name in (replica["replica"] for replica in server.replicas()):
            wait_for(lambda name=name: name in here.nodes()[other].get("drain_waits_for", ""), f"the word of {name}")
        before = here.engines("m"), here.engines("plain")
    assert answers.keys() == {"ok"}
    server.kill()
    server.start()
    here.wait_nodes()
    assert [node["draining"] for node in here.nodes().values()] == [True, True]
    wait_for(lambda: len(server.replicas()) == 2, "both")
    assert (here.engines("m"), here.engines("plain")) == before
    wait_for(lambda: here.nodes()[other].get("drain_waits_for"), "what it waits for")

    # there is some again
    here.ctl("uncordon", first)
    wait_for(lambda: here.agents[other].engines() == [], "the end of the drain")
    assert [set(here.engines(name).values()) for name in ("m", "plain")] == [{first}, {first}]

    # what has no room elsewhere stops at the deadline, and comes back when it may
    here.ctl("drain", first, "--deadline", "2s")
    wait_for(lambda: here.agents[first].engines() == [], "the deadline")
    assert server.chat(model="m").status == 503
    here.ctl("uncordon", other)
    here.wait_ready("m", other)
    assert (here.nodes()[other]["draining"], here.nodes()[first]["draining"]) == (False, True)
    assert server.chat(model="m").status == 200
    server.check_health()


def test_whoever_is_killed_in_the_midst_of_it_all_is_as_it_was_to_be(site: Callable[..., Site], tmp_path: Path) -> None:
    here, gate = site({"n1": 1, "n2": 1}), Gate(tmp_path / "gate")
    server = here.server
    server.add(here.write("m"))
    first = here.wait_ready("m")["node"]
    other = {"n1": "n2", "n2": "n1"}[first]

    def kill_all_while_it_loads(node: str) -> None:
        wait_for(lambda: server.replicas("loading"), "the load")
        assert sorted(here.engines("m").values()) == ["n1", "n2"]
        for program in (server, here.agents[node]):
            program.kill()
            program.start()
        here.wait_nodes()
        assert server.chat(model="m").status == 200
        gate.open()
        here.wait_ready("m", node)
        assert list(here.engines("m").values()) == [node]
        assert server.chat(model="m").status == 200

    # a rollout
    replaced = server.ctl("model", "add", "--replace", "-f", str(here.write("m", *gate.args)))
    assert "replaced" in replaced.stdout
    kill_all_while_it_loads(other)
    assert here.history("m")[2]["serving"]
    # a drain
    gate.shut()
    here.ctl("drain", other)
    kill_all_while_it_loads(first)
    assert here.agents[other].engines() == []
    assert here.nodes()[other]["draining"]
    server.check_health()


def test_a_group_is_launched_once_all_its_nodes_are_prepared(site: Callable[..., Site], tmp_path: Path) -> None:
    slow = Slow(tmp_path / "bin" / "fake-engine")
    here = site({"n1": 2, "n2": 2}, programs={"n2": slow.path})
    server = here.server
    slow.hold()
    server.add(here.write("wide", profile={"gpu_class": "h100-80g", "tp": 4, "nodes": 2}))

    def states() -> dict[str, str]:
        last = [{"shards": ()}, *here.replicas("wide")][-1]
        return {shard["node"]: shard["state"] for shard in last["shards"]}

    wait_for(lambda: states() == {"n1": "prepared", "n2": "preparing"}, "the one, which waits for the other")
    assert here.engines("wide") == {}
    # nothing that is killed now leaves anything behind, or is missed
    here.agents["n1"].kill()
    here.agents["n1"].start()
    here.wait_nodes()
    wait_for(lambda: states() == {"n1": "prepared", "n2": "preparing"}, "the one, which waits for the other again")
    assert here.engines("wide") == {}
    slow.go_on()
    wide = here.wait_ready("wide")
    assert sorted(here.engines("wide").values()) == ["n1", "n2"]
    assert server.chat(model="wide").status == 200
    # the end of one is the end of both: the next epoch, and no more of them, for a slow one is waited for
    assert wide["epoch"] == 2
    server.check_health()
