"""A server and the agents of two nodes, as processes with mutual TLS: what they do together, and when one is gone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from lab.cluster import Agent, Authority, Lab, Server
from lab.running import FAKES, wait_for, write_model
from lab.wire import CHAT, Wire, chat, error_code, get, post

from llmgw.host.process import find_marked
from llmgw.host.state import StateFolder
from llmgw.pki.authority import certificate_pem, issue_node, key_pem
from llmgw.pki.files import AuthorityFolder

pytestmark = pytest.mark.slow
CROWD = Path(__file__).parents[1] / "bench" / "agents.py"
ENDLESS = {"tokens": 100_000, "interval_ms": 20}
LONG = {"stream": True, "max_tokens": 1900, "temperature": 1.5, "ignore_eos": True}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """A definition of the fake engine whose replicas don't fit on one node together."""

    def model(count: int = 1, folder: str = "model", **fields: Any) -> Path:
        half_gb = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 * 0.6)
        path = write_model(tmp_path / folder, scaling={"min": count, "max": count}, **fields)
        text = path.read_text().replace("engine: fake", f"engine: fake\n  min_memory_gb: {half_gb}")
        path.write_text(text)
        return path

    return model


def nodes(server: Server) -> dict[str, str]:
    return {node["node"]: node["state"] for node in server.look("nodes")["nodes"]}


def wait_nodes(server: Server, *names: str, state: str = "ready") -> None:
    wait_for(lambda: {name for name, each in nodes(server).items() if each == state} >= set(names), f"{names} {state}")


def begin_stream(server: Server, tag: str = "") -> Wire:
    """A stream that goes on until somebody ends it."""
    wire = Wire(server.address)
    wire.send(post(CHAT, chat(ENDLESS, user=tag, **LONG)))
    wire.read_until(b"data: ")
    wire.read_until(b"\n\n")
    return wire


def begin_on_each(server: Server, *agents: Agent) -> list[Wire]:
    """A stream on each node, in the order of the agents: held open together, they go to different ones."""
    wires = {tag: begin_stream(server, tag) for tag in map(str, range(len(agents)))}
    return [next(wire for tag, wire in wires.items() if agent.engine.find(tag)) for agent in agents]


def read_end(wire: Wire) -> str:
    """The code of the error that a stream ended with."""
    events = wire.read_to_end()
    assert b"[DONE]" not in events
    last = [line for line in events.split(b"\n") if line.startswith(b"data: ")][-1]
    return error_code(json.loads(last[6:]))


def check_going(wire: Wire) -> None:
    """More of it comes, though all that is here now is taken."""
    wire.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while wire.more():
            pass
    wire.sock.settimeout(60)
    wire.buffer = b""
    wire.read_until(b"data: ")


@pytest.fixture
def pair(lab: Lab, model: Callable[..., Path]) -> tuple[Server, Agent, Agent]:
    """A server and two nodes, each with one of two replicas."""
    server = lab.server()
    one, two = lab.agent("n1", server), lab.agent("n2", server)
    wait_nodes(server, "n1", "n2")
    server.add(model(2))
    assert {replica["node"] for replica in server.wait_ready(2)} == {"n1", "n2"}
    return server, one, two


def test_requests_are_answered_by_the_engine_on_each_node(pair: tuple[Server, Agent, Agent]) -> None:
    server, *agents = pair
    for wire in begin_on_each(server, *agents):
        with wire:
            check_going(wire)
    assert server.chat().json["choices"][0]["message"]["content"]
    table = server.ctl("models").stdout.split("\n")
    assert table[0].split() == ["MODEL", "SERVING", "REPLICAS", "STATUS", "ALIASES"]
    assert table[1].split() == ["m", "yes", "2/2", "ready", "other/name"]
    assert server.ctl("model", "rm", "m").returncode == 0
    wait_for(lambda: not any(agent.engines() for agent in agents), "the engines' end")
    assert server.chat().status == 404
    assert server.stop() == 0
    assert [agent.stop() for agent in agents] == [0, 0]
    server.check_log()


def test_a_client_that_leaves_is_felt_by_the_engine_behind_the_trunk(pair: tuple[Server, Agent, Agent]) -> None:
    server, *agents = pair
    with begin_stream(server, "left"):
        (agent,) = (agent for agent in agents if agent.engine.find("left"))
    assert agent.engine.wait_ended("left")["state"] != "done"


def test_an_agent_that_is_killed_takes_its_streams_with_it_and_leaves_its_engine(
    pair: tuple[Server, Agent, Agent],
) -> None:
    server, first, second = pair
    pids = [agent.engine.pid for agent in (first, second)]
    broken, going = begin_on_each(server, first, second)
    with broken, going:
        first.kill()
        assert read_end(broken) == "stream_broken"
        check_going(going)
        # the node counts as there for a while; whoever asks meanwhile is served by the other one
        assert [server.chat().status for _ in range(4)] == [200] * 4
        first.start()
        wait_for(lambda: first.log.count("connected to the server") == 2, "the agent's return")
        check_going(going)
    wait_for(lambda: len(server.replicas()) == 2, "both replicas")
    assert [agent.engine.pid for agent in (first, second)] == pids
    for wire in begin_on_each(server, first, second):
        wire.sock.close()
    server.check_health()


def test_a_server_that_is_killed_leaves_everything_running_and_the_next_one_finds_it(
    pair: tuple[Server, Agent, Agent],
) -> None:
    server, *agents = pair
    pids = [agent.engine.pid for agent in agents]
    with begin_stream(server):
        server.kill()
    server.start()
    # who asks at once is held until a node is back, and its trunk
    assert server.chat().status == 200
    wait_nodes(server, "n1", "n2")
    wait_for(lambda: len(server.replicas()) == 2, "both replicas")
    assert server.chat().status == 200
    assert [agent.engine.pid for agent in agents] == pids
    # nothing was started beside them while only one node had come back
    assert len(server.look("replicas")["replicas"]) == 2
    server.check_health()


def test_an_engine_that_is_killed_ends_its_streams_and_comes_back(pair: tuple[Server, Agent, Agent]) -> None:
    server, first, second = pair
    broken, going = begin_on_each(server, first, second)
    before = first.engine.pid
    with broken, going:
        os.kill(before, signal.SIGKILL)
        assert read_end(broken) == "stream_broken"
        check_going(going)
    wait_for(lambda: len(server.replicas()) == 2 and first.engines(), "the next try")
    assert first.engine.pid != before
    server.check_health()


@pytest.mark.parametrize("victim", ["agent", "server"])
def test_what_is_killed_while_an_engine_loads_finds_it_again(lab: Lab, tmp_path: Path, victim: str) -> None:
    server = lab.server()
    agent = lab.agent("n1", server)
    wait_nodes(server, "n1")
    path = write_model(tmp_path / "model", "--load-seconds", "6", scaling={"min": 1, "max": 1})
    server.add(path)
    wait_for(lambda: server.replicas("loading"), "an engine that loads")
    pid = agent.engine.pid
    killed: Agent | Server = agent if victim == "agent" else server
    killed.kill()
    killed.start()
    (replica,) = server.wait_ready()
    assert agent.engine.pid == pid
    assert (replica["replica"], replica["node"]) == ("rep-m-1", "n1")
    assert server.chat().status == 200
    server.check_health()


def test_a_model_that_is_removed_while_its_node_is_away_ends_when_it_is_back(pair: tuple[Server, Agent, Agent]) -> None:
    server, first, second = pair
    first.kill()
    assert server.ctl("model", "rm", "m").returncode == 0
    wait_for(lambda: not second.engines(), "the end of the engine that is told")
    assert first.engines()
    first.start()
    wait_for(lambda: not first.engines(), "the end of the other one")
    server.check_health()


def test_a_node_that_was_renamed_comes_back_and_its_old_engine_is_stopped(lab: Lab, model: Callable[..., Path]) -> None:
    server = lab.server()
    agent = lab.agent("n1", server)
    server.add(model())
    server.wait_ready()
    before = agent.engine.pid
    agent.stop()
    renamed = lab.agent("n9", server, tls=lab.authority.node("n9"), state=str(agent.state))
    wait_nodes(server, "n9")
    wait_for(lambda: before not in [engine.pid for engine in agent.engines()], "the end of the old name's engine")
    assert renamed.running.poll() is None
    server.check_health()


def test_an_agent_that_stood_still_for_longer_than_its_lease_is_let_in_again(
    lab: Lab, model: Callable[..., Path]
) -> None:
    server = lab.server(fleet={"lease": "10s"})
    agent = lab.agent("n1", server)
    server.add(model())
    server.wait_ready()
    pid = agent.engine.pid
    agent.running.send_signal(signal.SIGSTOP)
    try:
        wait_nodes(server, "n1", state="lost")
    finally:
        agent.running.send_signal(signal.SIGCONT)
    wait_nodes(server, "n1")
    wait_for(server.replicas, "the replica")
    assert agent.engine.pid == pid
    assert server.chat().status == 200
    assert "node n1: the link" in server.log
    # what is left in the old link when it is closed is nobody's fault
    assert "refused a connection" not in server.log
    server.check_health()


def test_a_cut_cable_is_noticed_and_mended_without_a_loss(lab: Lab, model: Callable[..., Path]) -> None:
    server = lab.server(fleet={"lease": "10s"})
    cable = lab.cable(server)
    far, near = lab.agent("n1", server, port=cable.port), lab.agent("n2", server)
    wait_nodes(server, "n1", "n2")
    server.add(model(2))
    server.wait_ready(2)
    pid = far.engine.pid
    broken, going = begin_on_each(server, far, near)
    with broken, going:
        cable.cut()
        assert read_end(broken) == "stream_broken"
        wait_nodes(server, "n1", state="lost")
        assert [server.chat().status for _ in range(4)] == [200] * 4
        check_going(going)
        cable.mend()
        wait_nodes(server, "n1", "n2")
        check_going(going)
    wait_for(lambda: len(server.replicas()) == 2, "both replicas")
    assert far.engine.pid == pid
    server.check_health()


@pytest.mark.needs("ip", "iproute2")
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are root's")
def test_a_host_whose_network_is_cut_is_found_out_and_comes_back(lab: Lab, model: Callable[..., Path]) -> None:
    host = lab.other_host()
    server = lab.server(hosts=(host.here,), host=host.here, fleet={"lease": "10s"})
    agent = lab.agent("n1", server, before=host.before)
    server.add(model())
    server.wait_ready()
    pid = agent.engine.pid
    with begin_stream(server) as broken:
        host.pull()
        began = time.monotonic()
        assert read_end(broken) == "stream_broken"
        # found out by silence alone; the rest is for a machine that is busy with other things
        assert time.monotonic() - began < 60
    wait_nodes(server, "n1", state="lost")
    refused = server.chat()
    assert (refused.status, refused.code) == (503, "model_unreachable")
    assert server.look("models")["models"][0]["serving"] is False
    host.plug()
    wait_nodes(server, "n1")
    wait_for(server.replicas, "the replica")
    assert agent.engine.pid == pid
    assert server.chat().status == 200
    server.check_health()


def test_a_reader_that_does_not_read_holds_up_nobody_on_its_trunk(lab: Lab, model: Callable[..., Path]) -> None:
    server = lab.server()
    lab.agent("n1", server, trunks=1)
    server.add(model())
    server.wait_ready()
    flood = {"flood": -1}
    with Wire(server.address, receive_bytes=4096) as deaf, Wire(server.address) as quick:
        for wire in (deaf, quick):
            wire.send(post(CHAT, chat(flood, stream=True)))
        # far more than all the buffers on the way hold
        for _ in range(64):
            quick.read(1_000_000)
        assert server.chat().status == 200
        deaf.read(1_000_000)
    server.check_health()


def test_tools_are_checked_at_the_engine_of_the_replica_that_is_named(pair: tuple[Server, Agent, Agent]) -> None:
    server, *agents = pair
    before = [len(agent.engine.requests()) for agent in agents]
    replica = next(replica for replica in server.replicas() if replica["node"] == "n2")
    checked = server.ctl("tool-check", "other/name", "--replica", replica["replica"])
    # the fake engine counts a prompt without a look at its tools, and calls none
    assert (checked.returncode, checked.stderr) == (4, "")
    assert checked.stdout.startswith(f"m at {replica['replica']} on n2\n")
    assert "template drops: " in checked.stdout
    asked = [len(agent.engine.requests()) - count for agent, count in zip(agents, before, strict=True)]
    assert asked == [0, 6]
    assert [word for word in ("Traceback", "crashed") if word in server.log] == []
    for words, said in (
        (("n",), "there is no model n"),
        (("m", "--replica", "rep-x"), "m has no replica rep-x; there is rep-m-1, rep-m-2"),
    ):
        refused = server.ctl("tool-check", *words)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert said in refused.stderr
    server.check_health()


class Binary:
    """An engine's program on one node, which may be replaced by another, as an upgrade does it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def engines(self) -> dict[str, dict[str, str]]:
        """What agent.yaml says of it."""
        return {"fake": {"bin": str(self.path)}}

    def put(self, probe: str = "", *, version: str = "1.0") -> Binary:
        """The fake engine of this version, whose ``--version`` and ``--help`` are spoiled so (FAKE_PROBE)."""
        run = f"exec '{sys.executable}' '{FAKES / 'fake_engine.py'}' \"$@\""
        if version != "1.0":
            run = f'[ "$1" = --version ] && echo fake_engine {version} && exit\n{run}'
        made = self.path.with_suffix(".new")
        made.write_text(f"#!/bin/sh\nexport FAKE_PROBE='{probe}'\n{run}\n")
        made.chmod(0o755)
        made.rename(self.path)
        return self


@pytest.fixture
def binary(tmp_path: Path) -> Binary:
    return Binary(tmp_path / "bin" / "fake-engine")


def wait_checked(server: Server, node: str, **facts: Any) -> dict[str, Any]:
    """The engine of a node, once all of this is said of it."""

    def look() -> dict[str, Any] | None:
        for each in server.look("engines")["nodes"]:
            for found in (each.get("engines") or ()) if each["node"] == node else ():
                if found["engine"] == "fake" and facts.items() <= found.items():
                    assert isinstance(found, dict)
                    return found
        return None

    return wait_for(look, f"{node}'s engine, {facts}")


def test_a_node_whose_binary_lacks_a_library_gets_nothing_until_that_is_repaired(
    lab: Lab, model: Callable[..., Path], binary: Binary
) -> None:
    server = lab.server()
    broken = lab.agent("n1", server, engines=binary.put("library").engines)
    found = wait_checked(server, "n1", checked=True)
    assert (found["starts"], found["missing_libraries"]) == (False, ["libfake.so.1"])
    server.add(model())
    why = "the shared library libfake.so.1 is missing"
    wait_for(lambda: server.look("status")["models"].get("waiting"), "its verdict")
    shown = json.loads(server.ctl("model", "show", "m", "--json").stdout)
    (rejection,) = shown["rejections"]
    assert (rejection["node"], rejection["reason"]) == ("n1", "engine_broken")
    assert f"{binary.path} can't run fake: {why}" in rejection["detail"]
    # each place that an operator looks at names it, with what to do about it
    remedy = "install what brings libfake.so.1"
    for words, state in ((("model", "show", "m"), "engine_broken"), (("engines",), "broken"), (("status",), "waiting")):
        said = server.ctl(*words).stdout
        assert state in said.replace(":", " ").split(), said
        assert why in said, said
        assert remedy in said, said
    checked = server.ctl("engine-check", "fake", "--node", "n1")
    assert checked.returncode == 1
    assert why in checked.stdout
    # another node that can run it gets it, and this one once it can
    lab.agent("n2", server)
    (replica,) = server.wait_ready()
    assert replica["node"] == "n2"
    assert (server.replicas("failed"), broken.engines()) == ([], [])
    assert server.ctl("model", "add", "--replace", "-f", str(model(2))).returncode == 0
    wait_for(lambda: server.look("status")["models"].get("waiting"), "the second one's verdict")
    assert broken.engines() == []
    binary.put()
    assert {replica["node"] for replica in server.wait_ready(2)} == {"n1", "n2"}
    assert wait_checked(server, "n1", checked=True, version="1.0")["problems"] == []
    assert server.look("status")["concerns"] == []
    assert server.ctl("engine-check", "fake", "--node", "n1").returncode == 0
    server.check_health()


def test_a_binary_that_is_replaced_is_checked_again_beside_its_running_engine(
    lab: Lab, model: Callable[..., Path], binary: Binary
) -> None:
    server = lab.server()
    agent = lab.agent("n1", server, engines=binary.put().engines)
    wait_checked(server, "n1", version="1.0")
    server.add(model())
    server.wait_ready()
    pid = agent.engine.pid
    binary.put(version="1.1")
    found = wait_checked(server, "n1", version="1.1")
    assert found.get("broken") is None
    rows = [line.split() for line in server.ctl("engines").stdout.splitlines()]
    assert ["n1", "fake", "1.1", "ok", str(binary.path)] in rows
    # a release that knows a flag no more: nothing new is placed on it, and what runs is left alone
    binary.put("without=--alias", version="2.0")
    found = wait_checked(server, "n1", version="2.0")
    assert found["starts"] is True
    assert "--alias" in found["broken"]
    assert "llmgw passes --alias" in server.ctl("status").stdout
    assert server.chat().status == 200
    assert agent.engine.pid == pid
    server.check_health()


def test_a_program_that_hangs_when_it_is_tried_is_ended_by_the_next_agent(
    lab: Lab, model: Callable[..., Path], binary: Binary
) -> None:
    server = lab.server()
    agent = lab.agent("n1", server, engines=binary.put("hang").engines)
    prefix = StateFolder(agent.state).marker_prefix()

    def find() -> list[int]:
        return [stat.pid for stat in find_marked(prefix)]

    try:
        agent.wait_said("is up")
        left = wait_for(find, "the probe")
        agent.kill()
        assert find() == left
        binary.put()
        agent.start()
        wait_for(lambda: not set(find()) & set(left), "the end of the probe")
        wait_checked(server, "n1", version="1.0")
        assert f"process {left[0]} is ours" in agent.log
        server.add(model())
        server.wait_ready()
        assert server.chat().status == 200
    finally:
        for pid in find():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    server.check_health()


def test_a_replica_that_failed_shows_what_to_do_above_its_last_lines(lab: Lab, tmp_path: Path) -> None:
    server = lab.server()
    agent = lab.agent("n1", server)
    lines = ("loading: layer 1", "fatal: the weights are corrupt", "giving up: loading failed")
    words = [f"--print-line={line}" for line in lines]
    path = write_model(tmp_path / "model", "--crash-at-start", "--exit-code=3", *words, scaling={"min": 1, "max": 1})
    server.add(path)
    # (it is tried again meanwhile, and fails again)
    (replica,) = wait_for(lambda: server.replicas("ended"), "its failure")
    assert (replica["cause"], replica["remedy"]) == ("the weights are corrupt", "fetch the weights again")
    assert replica["lines"] == list(lines)
    row = ["rep-m-1", "m", "n1", "failed"]

    def look() -> str | None:
        table, _, below = server.ctl("replicas").stdout.partition("\n\n")
        return below if row in [line.split()[:4] for line in table.splitlines()] else None

    assert wait_for(look, "its row").splitlines() == [
        "rep-m-1 on n1:",
        "cause   the weights are corrupt",
        "remedy  fetch the weights again",
        "the last lines of its engine:",
        *(f"  {line}" for line in lines),
    ]
    said = "model m: failed: rep-m-1 ended on n1: the weights are corrupt"
    wait_for(lambda: said in server.ctl("status").stdout, "its word in the status")
    assert "rep-m-1 ended on n1: the weights are corrupt (failure 1 in a row" in server.log
    assert server.ctl("model", "rm", "m").returncode == 0
    wait_for(lambda: not server.look("replicas")["replicas"], "its end")
    assert agent.engines() == []
    server.check_health()


def test_the_words_for_each_refused_certificate(lab: Lab) -> None:
    server = lab.server()
    stranger = Authority(lab.folder / "stranger")
    own = lab.authority.node("n1")
    cases = {
        "other": ({**lab.authority.node("other"), "node": "n3"}, "other", "n3"),
        "foreign": (stranger.node("n4"), "authority", ""),
        "mixed": ({**stranger.node("n5"), "ca": own["ca"]}, "issue", ""),
    }
    for folder, (tls, word, _) in cases.items():
        node = tls.pop("node", folder)
        agent = lab.agent(node if node == "n3" else tls["cert"].split("/")[-2], server, tls=tls)
        wait_for(lambda agent=agent: "WARNING" in agent.log.partition("is up")[2], "a word about it")
        said = agent.log.partition("is up")[2]
        assert word in said, said
        assert "Traceback" not in said
    assert nodes(server) == {}
    server.check_health()


def test_a_revoked_node_is_cut_at_once_and_kept_out(pair: tuple[Server, Agent, Agent], lab: Lab) -> None:
    server, first, second = pair
    broken, going = begin_on_each(server, first, second)
    with broken, going:
        # the list that the server watches lies beside its own copy of the authority
        (lab.folder / "server" / "revoked.txt").write_text("n1\n")
        assert read_end(broken) == "stream_broken"
        wait_for(lambda: "revoked" in first.log, "its word for it")
        check_going(going)
    assert "revoked" in server.log
    assert server.chat().status == 200
    server.check_health()


def test_a_second_agent_of_a_node_is_refused_while_the_first_one_lives(
    pair: tuple[Server, Agent, Agent], lab: Lab
) -> None:
    server, first, _ = pair
    twin = Agent(lab.folder / "twin", "n1", first.config["tls"], f"127.0.0.1:{server.agent_port}")
    try:
        twin.start()
        wait_for(lambda: "already connected from 127.0.0.1" in twin.log, "the refusal")
    finally:
        twin.clean()
    assert nodes(server)["n1"] == "ready"
    assert first.running.poll() is None


def test_certificates_are_renewed_under_load_without_a_failed_request(
    pair: tuple[Server, Agent, Agent], lab: Lab
) -> None:
    server, _, second = pair
    statuses: list[int] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            statuses.append(server.chat().status)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        lab.authority.server("127.0.0.1", "localhost", force=True)
        lab.authority.node("n2", force=True)
        # the next link is made with the new ones; the open ones go on
        second.kill()
        second.start()
        wait_for(lambda: second.log.count("connected to the server") == 2, "a link by the new certificate")
        done = len(statuses)
        wait_for(lambda: len(statuses) > done + 20, "more requests")
    finally:
        over.set()
        asking.join()
    # the killed agent's own streams aside, which are whole replies of no time at all
    assert set(statuses) <= {200, 502}
    assert statuses.count(502) <= 1
    server.check_health()


def test_a_node_is_cleared_by_stop_all(pair: tuple[Server, Agent, Agent]) -> None:
    server, first, second = pair
    first.kill()
    refused = first.stop_all()
    assert refused.returncode == 2
    assert "shd-m-" in refused.stderr
    assert "--force" in refused.stderr
    assert first.engines()
    done = first.stop_all("--force")
    assert done.returncode == 0, done.stderr
    assert first.engines() == []
    assert second.engines()
    assert server.ctl("model", "rm", "m").returncode == 0
    wait_for(lambda: not second.engines(), "the engine's end")
    second.stop()
    nothing = second.stop_all()
    assert nothing.returncode == 0


def test_a_server_that_stops_lets_streams_end_and_a_second_signal_ends_them(pair: tuple[Server, Agent, Agent]) -> None:
    server, *agents = pair
    with Wire(server.address) as short, begin_stream(server) as long:
        short.send(post(CHAT, chat({"tokens": 20, "interval_ms": 50}, stream=True)))
        short.read_until(b"data: ")
        server.interrupt()
        server.wait_said("running requests (2)")
        assert b"[DONE]" in short.read_to_end()
        server.interrupt()
        assert read_end(long) == "stopping"
        assert server.wait_ended() == 0
    assert all(agent.engines() for agent in agents)
    assert "the server is stopping" in agents[0].log


def test_an_agent_that_stops_lets_its_streams_end_and_a_second_signal_ends_them(
    pair: tuple[Server, Agent, Agent],
) -> None:
    server, first, second = pair
    long, going = begin_on_each(server, first, second)
    with long, going:
        first.interrupt()
        first.wait_said("running requests have")
        check_going(long)
        # nothing new goes there
        assert [server.chat().status for _ in range(4)] == [200] * 4
        first.interrupt()
        assert read_end(long) == "stream_broken"
        assert first.wait_ended() == 0
        check_going(going)
    assert first.engines()
    first.start()
    wait_for(lambda: len(server.replicas()) == 2, "both replicas")
    first.stop()
    assert "its last stream has ended (the agent is stopping)" in server.log
    server.check_health()


def test_server_yaml_is_read_again(lab: Lab, model: Callable[..., Path]) -> None:
    server = lab.server()
    lab.agent("n1", server)
    wait_nodes(server, "n1")
    server.write(models=[yaml.safe_load(model().read_text())])
    server.running.send_signal(signal.SIGHUP)
    server.wait_ready()
    server.path.write_text(server.path.read_text() + "\nlisten: nowhere\n")
    done = server.ctl("reload")
    assert done.returncode != 0
    assert "server.yaml" in done.stderr
    assert server.chat().status == 200
    refused = server.ctl("model", "rm", "m")
    assert refused.returncode == 1
    assert "server.yaml" in refused.stderr
    server.write(models=[], agent_listen="127.0.0.1:1")
    done = server.ctl("reload")
    assert done.returncode == 0, done.stderr
    assert "agent_listen" in done.stdout
    wait_for(lambda: server.chat().status == 404, "the end of the declared model")
    server.check_health()


def test_stored_models_outlive_the_server(pair: tuple[Server, Agent, Agent]) -> None:
    server, *_ = pair
    assert server.stop() == 0
    server.start()
    wait_for(lambda: len(server.replicas()) == 2, "both replicas")
    shown = server.ctl("model", "show", "m")
    assert "weights.fake" in shown.stdout
    server.check_health()


@pytest.mark.needs("faketime", "faketime")
@pytest.mark.parametrize("skew", ["-1h", "+1h"])
def test_a_clock_that_is_an_hour_off_does_no_harm(lab: Lab, model: Callable[..., Path], skew: str) -> None:
    server = lab.server()
    agent = lab.agent("n1", server, before=("env", "FAKETIME_DONT_FAKE_MONOTONIC=1", "faketime", "-f", skew))
    server.add(model())
    server.wait_ready()
    assert server.chat().status == 200
    with begin_stream(server) as wire:
        check_going(wire)
    assert agent.running.poll() is None
    server.check_health()


@pytest.mark.e2e
def test_the_real_llama_cpp_answers_over_a_trunk(lab: Lab, tmp_path: Path, weights: Path) -> None:
    server = lab.server()
    lab.agent("n1", server)
    server.add(write_model(tmp_path / "model", engine="llamacpp", source=weights, scaling={"min": 1, "max": 1}))
    server.wait_ready()
    client = openai.OpenAI(base_url=server.base_url, api_key="none")
    asked: Any = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content
    events = list(client.chat.completions.create(stream=True, **asked))
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices)


@pytest.mark.e2e
@pytest.mark.timeout(500)
def test_the_real_llama_cpp_is_checked_over_a_trunk(lab: Lab, tmp_path: Path, weights: Path) -> None:
    server = lab.server()
    lab.agent("n1", server)
    # several threads would wait for one another wherever something else runs, and this generates much
    facts: Any = {"engine": "llamacpp", "source": weights, "scaling": {"min": 1, "max": 1}}
    server.add(write_model(tmp_path / "model", "--threads", "1", **facts))
    server.wait_ready()
    checked = server.ctl("tool-check", "m", "--json")
    # the model's template knows no tools
    assert (checked.returncode, checked.stderr) == (4, "")
    answer = json.loads(checked.stdout)
    assert (answer["replica"], answer["node"], answer["engine"]) == ("rep-m-1", "n1", "llamacpp")
    check = answer["check"]
    assert check["tokens_without"] == check["tokens_with"] > 20
    assert {each["outcome"] for each in check["exchanges"]} <= {"answered", "cut"}
    # nobody's requests
    assert "/v1/chat/completions" not in server.log
    server.check_health()


def test_a_thousand_agents_are_held_by_one_server(lab: Lab) -> None:
    """Control links alone, all of one process."""
    count = 1000
    server = lab.server()
    folder = lab.folder / "crowd"
    folder.mkdir()
    authority = AuthorityFolder(lab.authority.pki).load(now=time.time())
    (folder / "ca.pem").write_bytes(certificate_pem(authority.certificate))
    nodes_of_crowd = [f"node{number:04d}" for number in range(count)]
    for node in nodes_of_crowd:
        issued = issue_node(authority, node, now=time.time())
        (folder / f"{node}.pem").write_bytes(certificate_pem(issued.certificate))
        (folder / f"{node}-key.pem").touch(mode=0o600)
        (folder / f"{node}-key.pem").write_bytes(key_pem(issued.key))
    argv = [sys.executable, str(CROWD), "--port", str(server.agent_port), "--folder", str(folder), "--over", "20"]
    before = server.descriptors()
    with (folder / "log").open("wb") as log:
        crowd = subprocess.Popen([*argv, *nodes_of_crowd], stdout=log, stderr=log)
    try:
        wait_for(
            lambda: len(server.look("status")["nodes"]) and server.look("status")["nodes"].get("ready") == count,
            f"{count} nodes",
            300,
        )
        assert server.ask(get("/health")).status == 200
    finally:
        crowd.kill()
        crowd.wait()
    wait_for(lambda: server.descriptors() <= before + 4, "the end of their connections", 100)
    wait_for(lambda: server.look("status")["nodes"].get("lost") == count, "the end of their leases", 100)
    server.check_health()
