"""A server and agents that fetch what their models are made of, with an operator's view of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster import HOST, Place, log_of_agent, make_place, run_agent, run_cluster_server
from harness.programs import free_port, on_cpus, wait_until
from harness.servers import Running, Site, StartError, make_environment, tail, write_yaml
from llmgw.cli.ctl.address import Address
from llmgw.cli.ctl.client import Operator

JOIN_SECONDS = 120.0
READY_SECONDS = 900.0
FIRST_ENGINE_PORT, ENGINE_PORTS = 18000, 10
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetchers:
    """The server's place and processes, its nodes, and their agents' processes."""

    site: Site
    place: Place
    server: Running
    nodes: tuple[str, ...]
    agents: tuple[subprocess.Popen[bytes], ...]

    @property
    def caches(self) -> tuple[Path, ...]:
        return tuple(cache_of(self.place, node) for node in self.nodes)

    def clear(self) -> None:
        """What was fetched is on the disk no more."""
        for cache in self.caches:
            shutil.rmtree(cache, ignore_errors=True)

    def look(self, what: str) -> Any:
        """What ``llmgw ctl`` writes of it with ``--json``."""
        operator = Operator(Address(host=HOST, port=self.place.operators, source="the bench"))
        return json.loads(operator.ask("GET", f"/{what}"))

    def count_ready(self, model: str) -> int:
        """Its replicas that are ready. StartError where one has failed: what is measured then is something else."""
        replicas = [each for each in self.look("replicas")["replicas"] if each["model"] == model]
        if failed := next((each for each in replicas if each.get("cause")), None):
            raise StartError(f"a replica of {model} has failed: {failed['cause']}")
        return sum(each["state"] == "ready" for each in replicas)

    def add(self, name: str, source: str, count: int = 1) -> float:
        """`llmgw ctl model add`; returns when that began, of ``time.monotonic``."""
        definition = {
            "name": name,
            "source": source,
            "scaling": {"min": count, "max": count},
            "profiles": [{"name": "mock", "engine": "bench"}],
        }
        file = write_yaml(self.place.folder / f"model-{name}.yaml", definition)
        began = time.monotonic()
        self._ctl("model", "add", "-f", str(file))
        return began

    def remove(self, name: str) -> None:
        """`llmgw ctl model rm`, and its engines are gone."""
        self._ctl("model", "rm", name)
        self.wait(
            lambda: all(each["model"] != name for each in self.look("replicas")["replicas"]), f"the end of {name}"
        )

    def wait_ready(self, name: str, count: int = 1) -> float:
        """Until so many replicas are; returns when that was, of ``time.monotonic``."""
        self.wait(lambda: self.count_ready(name) == count, f"{count} replicas of {name}")
        return time.monotonic()

    def wait(self, holds: Callable[[], bool], what: str, seconds: float = READY_SECONDS) -> None:
        def look() -> bool:
            for node, agent in zip(self.nodes, self.agents, strict=True):
                if agent.poll() is not None:
                    raise StartError(f"the agent of {node} ended:\n{tail(log_of_agent(self.place, node))}")
            return holds()

        try:
            wait_until(look, seconds=seconds, every=LOOK_SECONDS)
        except TimeoutError:
            log = tail(log_of_agent(self.place, self.nodes[0]))
            raise StartError(f"waited {seconds:.0f} s for {what}; an agent's log:\n{log}") from None

    def _ctl(self, *words: str) -> None:
        env = make_environment(self.place.folder) | {"LLMGW_ADMIN": f"http://{HOST}:{self.place.operators}"}
        argv = [str(self.site.llmgw), "ctl", *words]
        with on_cpus(self.site.cpus.every):
            done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=JOIN_SECONDS)
        if done.returncode != 0:
            raise StartError(f"llmgw ctl {' '.join(words)} ended with {done.returncode}:\n{done.stderr}")


@contextmanager
def run_fetchers(site: Site, count: int) -> Iterator[Fetchers]:
    """Agents with nothing in their caches, on all cpus, that give to each other what they have."""
    nodes = tuple(f"n{number}" for number in range(1, count + 1))
    place = make_place(site, nodes)
    with ExitStack() as stack:
        server = stack.enter_context(run_cluster_server(site, place, []))
        agents = []
        for number, node in enumerate(nodes):
            first = FIRST_ENGINE_PORT + number * ENGINE_PORTS
            settings = {
                "weights": {"cache": str(cache_of(place, node))},
                "seed_listen": f"{HOST}:{free_port()}",
                "engine_ports": f"{first}-{first + ENGINE_PORTS - 1}",
            }
            agents.append(stack.enter_context(run_agent(site, place, node, cpus=site.cpus.every, **settings)))
        fetchers = Fetchers(site=site, place=place, server=server, nodes=nodes, agents=tuple(agents))

        def joined() -> bool:
            states = [node["state"] for node in fetchers.look("nodes")["nodes"]]
            return states.count("ready") == count

        fetchers.wait(joined, "the nodes", JOIN_SECONDS)
        yield fetchers


def cache_of(place: Place, node: str) -> Path:
    return place.folder / f"cache-{node}"
