"""A cluster of real processes: an authority, a server, agents with their nodes' state, and what may be cut between."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import yaml

from lab.running import EngineProcess, Program, engine_ports, free_port, wait_for
from lab.wire import CHAT, Reply, Wire, chat, get, post
from llmgw.cli import app
from llmgw.cli.ctl.address import Address
from llmgw.cli.ctl.client import Operator
from llmgw.host.process import find_marked
from llmgw.host.state import StateFolder


def run_llmgw(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "llmgw", *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**{key: value for key, value in os.environ.items() if not key.startswith("LLMGW_")}, **environ},
    )


class Authority:
    """Certificates, made by the commands that an operator uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pki = folder / "pki"
        self._run("init-ca")

    def _run(self, *words: str) -> None:
        # (here and not as a process: every test of a cluster needs four of them)
        app.main(["ctl", "cert", *words, "--dir", str(self.pki)], prog_name="llmgw", standalone_mode=False)

    def server(self, *hosts: str, name: str = "server", force: bool = False) -> dict[str, str]:
        """``agent_tls`` of a server that agents dial by these hosts."""
        out = self.folder / name
        named = [word for host in hosts for word in ("--host", host)]
        self._run("issue-server", name, *named, "--out", str(out), *(["--force"] if force else []))
        files = {"ca": "ca.pem", "cert": "server.pem", "key": "server-key.pem"}
        return {key: str(out / file) for key, file in files.items()}

    def node(self, name: str, *, force: bool = False) -> dict[str, str]:
        """``tls`` of a node's agent."""
        out = self.folder / name
        self._run("issue-node", name, "--out", str(out), *(["--force"] if force else []))
        files = {"ca": "ca.pem", "cert": "node.pem", "key": "node-key.pem"}
        return {key: str(out / file) for key, file in files.items()}


class Server(Program):
    """``llmgw server``, with the operator's commands and a client's requests."""

    def __init__(self, folder: Path, tls: dict[str, str], *, host: str = "127.0.0.1", **config: Any) -> None:
        self.path = folder / "server.yaml"
        super().__init__(folder, "server", "-v", "--config", str(self.path))
        self.port, self.operator_port, self.agent_port = free_port(), free_port(), free_port()
        self.host = host
        self.config = {
            "listen": f"127.0.0.1:{self.port}",
            "admin_listen": f"127.0.0.1:{self.operator_port}",
            "agent_listen": f"{host}:{self.agent_port}",
            "agent_tls": tls,
            "auth": {"enabled": False, "store": str(folder / "llmgw.db")},
            **config,
        }
        self.write()

    def write(self, **config: Any) -> None:
        """server.yaml, with these keys changed."""
        self.config.update(config)
        self.path.write_text(yaml.safe_dump(self.config))

    def start(self) -> Server:
        begun = self.log_file.stat().st_size if self.log_file.exists() else 0
        super().start()
        self.wait_said("serving clients at", where=lambda: self.log[begun:])
        return self

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_llmgw("ctl", *words, LLMGW_ADMIN=f"http://127.0.0.1:{self.operator_port}")

    def look(self, what: str) -> Any:
        """What ``ctl`` writes of it with ``--json``. (By its client, and without a process: this is asked for ever.)"""
        operator = Operator(Address(host="127.0.0.1", port=self.operator_port, source="the test"))
        return json.loads(operator.ask("GET", f"/{what}"))

    def add(self, path: Path) -> None:
        done = self.ctl("model", "add", "-f", str(path))
        assert done.returncode == 0, done.stderr

    def replicas(self, state: str = "ready") -> list[dict[str, Any]]:
        """Those of that state."""
        return [replica for replica in self.look("replicas")["replicas"] if replica["state"] == state]

    def wait_ready(self, count: int = 1) -> list[dict[str, Any]]:
        """So many replicas are ready."""
        return wait_for(lambda: (found := self.replicas()) and len(found) == count and found, f"{count} replicas")

    def connect(self) -> Wire:
        return Wire(self.address)

    def ask(self, request: bytes) -> Reply:
        with self.connect() as wire:
            return wire.ask(request)

    def chat(self, fake: dict[str, Any] | None = None, /, **fields: Any) -> Reply:
        return self.ask(post(CHAT, chat(fake, **fields)))

    def check_health(self) -> None:
        """It still answers, and nothing of it has failed."""
        assert self.running.poll() is None, f"it ended with {self.running.returncode}:\n{self.log[-5000:]}"
        assert self.ask(get("/health")).status == 200
        self.check_log()

    def check_log(self) -> None:
        for word in ("Traceback", "callback of", "failed too", " crashed "):
            assert word not in self.log, self.log[max(0, self.log.index(word) - 500) :][:5000]


class Agent(Program):
    """``llmgw agent`` of one node, and the engines that it leaves running."""

    def __init__(
        self, folder: Path, node: str, tls: dict[str, str], at: str, *, before: tuple[str, ...] = (), **config: Any
    ) -> None:
        """``at``: host and port of the server, as it is dialled."""
        self.path = folder / "agent.yaml"
        super().__init__(folder, "agent", "-v", "--config", str(self.path), before=before)
        self.node = node
        self.state = folder / "state"
        self.config = {
            "node": node,
            "server": f"https://{at}",
            "tls": tls,
            "state": str(self.state),
            "engine_ports": engine_ports(),
            **config,
        }
        self.path.write_text(yaml.safe_dump(self.config))

    def engines(self) -> list[EngineProcess]:
        """Those that run, whoever started them."""
        found = []
        for stat in find_marked(StateFolder(self.state).marker_prefix()):
            with contextlib.suppress(OSError, ValueError):
                words = Path(f"/proc/{stat.pid}/cmdline").read_bytes().decode().split("\0")
                found.append(EngineProcess(stat.pid, int(words[words.index("--port") + 1])))
        return found

    @property
    def engine(self) -> EngineProcess:
        (engine,) = self.engines()
        return engine

    def stop_all(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_llmgw("agent", "--config", str(self.path), "stop-all", *words)

    def clean(self) -> None:
        super().clean()
        for engine in self.engines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGKILL)


class Cable:
    """A way between agents and their server that can go dead without a word, as a pulled cable does."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._whole = threading.Event()
        self._whole.set()
        self._ended = False
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Nothing passes from here on, in either direction; nobody is told."""
        self._whole.clear()

    def mend(self) -> None:
        """What was held passes on."""
        self._whole.set()

    def close(self) -> None:
        self._ended = True
        self._whole.set()
        for sock in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while not self._ended:
            try:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._to)
            except OSError:
                continue
            self._sockets += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self._whole.wait()
                other.sendall(data)
        self._whole.wait()
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)


class OtherHost:
    """Another machine as far as the network goes: a namespace, and a cable to it that can be pulled out.

    Needs root and ``ip`` (Debian: iproute2).
    """

    def __init__(self) -> None:
        number = os.getpid() % 250 + 1
        self.name = f"llmgw-{os.getpid()}"
        self._cable = f"lg{os.getpid()}"
        self.here, self.there = f"10.203.{number}.1", f"10.203.{number}.2"
        self._ip("netns", "add", self.name)
        self._ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        self._ip("addr", "add", f"{self.here}/24", "dev", self._cable)
        self._ip("link", "set", self._cable, "up")
        for words in (
            ("addr", "add", f"{self.there}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            self._ip("-n", self.name, *words)

    @property
    def before(self) -> tuple[str, ...]:
        """What runs a program there."""
        return ("ip", "netns", "exec", self.name)

    def pull(self) -> None:
        self._ip("link", "set", self._cable, "down")

    def plug(self) -> None:
        self._ip("link", "set", self._cable, "up")

    def close(self) -> None:
        self._ip("netns", "del", self.name)

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


class Lab:
    """What one test has made, ended in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self._ends = contextlib.ExitStack()

    def server(self, *, hosts: tuple[str, ...] = ("127.0.0.1", "localhost"), **config: Any) -> Server:
        tls = self.authority.server(*hosts)
        server = Server(self.folder / "srv", tls, **config)
        self._ends.callback(server.clean)
        return server.start()

    def agent(self, node: str, server: Server, *, port: int | None = None, **config: Any) -> Agent:
        tls = config.pop("tls", None) or self.authority.node(node)
        agent = Agent(self.folder / f"agent-{node}", node, tls, f"{server.host}:{port or server.agent_port}", **config)
        self._ends.callback(agent.clean)
        return agent.start()

    def cable(self, server: Server) -> Cable:
        cable = Cable(("127.0.0.1", server.agent_port))
        self._ends.callback(cable.close)
        return cable

    def other_host(self) -> OtherHost:
        host = OtherHost()
        self._ends.callback(host.close)
        return host

    def close(self) -> None:
        self._ends.close()
