"""agent.yaml becomes an AgentConfig: which file is read, what this version refuses, and everything that is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from llmgw.config.addresses import read_server, wrong_node
from llmgw.config.agent import AgentConfig, NodeTls
from llmgw.config.document import Section, read_document
from llmgw.config.files import find_system_file, read_existing, read_path
from llmgw.config.parts import read_engines

SYSTEM_FILE = Path("/etc/llmgw/agent.yaml")
MAX_TRUNKS = 8

# Understood and refused: whoever wrote one counts on what it does, and nothing here does it yet.
LATER = frozenset({"discovery", "fabrics", "labels", "limits", "model_dirs", "seed_listen", "weights"})
NOT_YET = "is not in this version; leave it out"


def find_agent_file(path: Path | None, *, environ: Mapping[str, str], system_file: Path = SYSTEM_FILE) -> Path:
    """The file to read: the one that was named, else the machine's. ConfigError when there is none."""
    return find_system_file(path, environ=environ, system_file=system_file)


def load_agent(path: Path, *, engines: Collection[str], host_name: str, check_files: bool = True) -> AgentConfig:
    """The configuration of ``llmgw agent``. ConfigError with everything that is wrong in it.

    ``host_name`` is this machine's, and the node's where the file names none. ``check_files`` False does not ask
    whether the certificate's files are there: what only stops engines has no use for them.
    """
    top, findings = read_document(path)
    node = _node(top, host_name)
    server = read_server(top, "server")
    tls = _tls(top.section("tls"), check_files=check_files)
    default = AgentConfig(node=node, server=server, tls=tls)
    config = AgentConfig(
        node=node,
        server=server,
        tls=tls,
        state=read_path(top, "state", default.state),
        engine_ports=top.ports("engine_ports", default.engine_ports),
        trunks=top.count("trunks", default.trunks, low=1, high=MAX_TRUNKS),
        engines=read_engines(top.section("engines"), engines),
    )
    top.refuse(LATER, NOT_YET)
    top.close()
    findings.raise_if_any()
    return config


def _node(top: Section, host_name: str) -> str:
    # DNS names have no case, and a machine may tell its own in capitals.
    node = top.text("node", host_name.lower())
    if why := wrong_node(node):
        top.wrong("node", why if top.has("node") else f"is not written, and this machine's name won't do: {why}")
    return node


def _tls(section: Section, *, check_files: bool) -> NodeTls:
    tls = NodeTls(
        ca=read_existing(section, "ca", check=check_files),
        cert=read_existing(section, "cert", check=check_files),
        key=read_existing(section, "key", secret=True, check=check_files),
    )
    section.close()
    return tls
