"""The cluster on one machine: certificates, `llmgw server` on the gateway's cpu, and an agent beside the mock."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.programs import free_port, settled_processes, started
from harness.servers import (
    Running,
    Site,
    StartError,
    describe_engines,
    describe_model,
    make_environment,
    run_server,
    tail,
    write_yaml,
)
from llmgw.pki.authority import Authority, Issued, certificate_pem, issue_node, issue_server, key_pem, make_authority

HOST = "127.0.0.1"
NODE = "n1"
TRUNKS = 2
NO_SUCH_MODEL = 404


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One cluster's folder and ports: a server that is started here again finds what it left, and agents find it."""

    folder: Path
    clients: int = field(default_factory=free_port)
    operators: int = field(default_factory=free_port)
    agents: int = field(default_factory=free_port)


def make_place(site: Site, nodes: Iterable[str]) -> Place:
    """A new folder with an authority, the server's certificate, and one for each of the nodes."""
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir=site.folder))
    authority = make_authority(now=time.time())
    (folder / "ca.pem").write_bytes(certificate_pem(authority.certificate))
    write_identity(folder, "server", issue_server(authority, "bench", (HOST,), now=time.time()))
    issue_nodes(folder, authority, nodes)
    return Place(folder=folder)


def issue_nodes(folder: Path, authority: Authority, nodes: Iterable[str]) -> None:
    for node in nodes:
        write_identity(folder, node, issue_node(authority, node, now=time.time()))


def write_identity(folder: Path, name: str, issued: Issued) -> None:
    (folder / f"{name}.pem").write_bytes(certificate_pem(issued.certificate))
    key = folder / f"{name}-key.pem"
    key.touch(mode=0o600)
    key.write_bytes(key_pem(issued.key))


def describe_identity(folder: Path, name: str) -> dict[str, str]:
    return {"ca": str(folder / "ca.pem"), "cert": str(folder / f"{name}.pem"), "key": str(folder / f"{name}-key.pem")}


@contextmanager
def run_cluster_server(site: Site, place: Place, models: list[dict[str, object]]) -> Iterator[Running]:
    """`llmgw server`, once a completion of its model is answered, or where it has none, refused."""
    folder = place.folder
    configuration = {
        "listen": f"{HOST}:{place.clients}",
        "admin_listen": f"{HOST}:{place.operators}",
        "agent_listen": f"{HOST}:{place.agents}",
        "agent_tls": describe_identity(folder, "server"),
        "auth": {"enabled": False, "store": str(folder / "llmgw.db")},
        "models": models,
    }
    argv = [str(site.llmgw), "server", "--config", str(write_yaml(folder / "server.yaml", configuration))]
    env, answer = make_environment(folder), 200 if models else NO_SUCH_MODEL
    with run_server(site, "llmgw-cluster", argv, place.clients, env, answer=answer) as running:
        yield running


@contextmanager
def run_agent(
    site: Site, place: Place, node: str, *, cpus: Iterable[int], **more: object
) -> Iterator[subprocess.Popen[bytes]]:
    """`llmgw agent` of a node that ``place`` has a certificate for, while it runs. ``more``: keys of its agent.yaml."""
    folder = place.folder
    configuration = {
        "node": node,
        "server": f"https://{HOST}:{place.agents}",
        "tls": describe_identity(folder, node),
        "state": str(folder / f"state-{node}"),
        "trunks": TRUNKS,
        "engines": describe_engines(site),
        **more,
    }
    argv = [str(site.llmgw), "agent", "--config", str(write_yaml(folder / f"agent-{node}.yaml", configuration))]
    with started(argv, log=log_of_agent(place, node), cpus=cpus, env=make_environment(folder)) as agent:
        yield agent


def log_of_agent(place: Place, node: str) -> Path:
    return place.folder / f"agent-{node}.log"


@contextmanager
def run_cluster(site: Site) -> Iterator[Running]:
    """A server and one agent, with the mock as the agent's engine: what a request goes through on its way to a node."""
    place = make_place(site, [NODE])
    with run_agent(site, place, NODE, cpus={site.cpus.load}) as agent:
        try:
            with run_cluster_server(site, place, [describe_model(site, place.folder)]) as running:
                yield replace(running, beside=settled_processes(agent.pid, site.mock))
        except StartError as problem:
            raise StartError(f"{problem}\nand its agent:\n{tail(log_of_agent(place, NODE))}") from None
