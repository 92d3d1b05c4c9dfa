"""agent.yaml becomes an AgentConfig: which file is read, what this version refuses, and everything that is wrong."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from llmgw.config.addresses import read_listen, read_server, show_listen, wrong_node, wrong_to_tell
from llmgw.config.agent import AgentConfig, AgentLimits, AgentWeights, Discovery, FabricConfig, NodeTls
from llmgw.config.document import Section, read_document
from llmgw.config.files import find_system_file, read_existing, read_path, whole_path
from llmgw.config.labels import read_labels
from llmgw.config.parts import read_download_rate, read_engines, read_weights
from llmgw.config.server import Listen
from llmgw.core.model import ANY_CLASS

SYSTEM_FILE = Path("/etc/llmgw/agent.yaml")
MAX_TRUNKS = 8
# What a report to the server holds at most.
MAX_LABELS = 64
MAX_FABRICS = 16
MAX_HCAS = 64
MAX_NAME = 100
MAX_MODEL_DIRS = 32
# For messages: there is no default, since it is an address of this machine.
SEED_EXAMPLE = Listen(host="10.0.0.141", port=7444)

# Understood and refused: whoever wrote one counts on what it does, and nothing here does it yet.
LATER_LIMITS = frozenset({"max_memory_gb"})
NOT_YET = "is not in this version; leave it out"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What the kernel takes: it is a folder's name there.
_HCA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_INTERFACE = re.compile(r"(?!\.\.?$)[^\s/:]{1,15}")


def find_agent_file(path: Path | None, *, environ: Mapping[str, str], system_file: Path = SYSTEM_FILE) -> Path:
    """The file to read: the one that was named, else the machine's. ConfigError when there is none."""
    return find_system_file(path, environ=environ, system_file=system_file)


def load_agent(path: Path, *, engines: Collection[str], host_name: str, check_files: bool = True) -> AgentConfig:
    """The configuration of ``llmgw agent``. ConfigError with everything that is wrong in it.

    ``host_name`` is this machine's, and the node's where the file names none. ``check_files`` False does not ask
    whether the certificate's files are there, and reads no secret: what only stops engines has no use for them.
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
        labels=_labels(top),
        fabrics=_fabrics(top),
        discovery=_discovery(top.section("discovery")),
        weights=_weights(top.section("weights"), secrets=check_files),
        model_dirs=_model_dirs(top),
        seed_listen=_seed_listen(top),
        limits=_limits(top.section("limits")),
    )
    low, high = config.engine_ports
    if config.seed_listen is not None and low <= config.seed_listen.port <= high:
        top.wrong("seed_listen", f"{config.seed_listen.port} is one of engine_ports ({low}-{high}); take another port")
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


def _labels(top: Section) -> dict[str, str]:
    labels = read_labels(top, "labels")
    if len(labels) > MAX_LABELS:
        top.wrong("labels", f"are {len(labels)}; a node has {MAX_LABELS} at most")
    return labels


def _fabrics(top: Section) -> dict[str, FabricConfig]:
    section = top.section("fabrics")
    # An adapter's port is on one network: written under two, one of them is a mistake that a replica would hang on.
    taken: dict[str, str] = {}
    fabrics = {}
    for name in section.names():
        if why := wrong_name(name):
            section.wrong(name, why)
        stanza = section.section(name)
        if not stanza.has("hcas") and not stanza.has("interface"):
            section.wrong(name, "names no adapter and no interface: write hcas: [mlx5_0], interface: ib0, or both")
        fabrics[name] = _fabric(stanza, name, taken)
    if len(fabrics) > MAX_FABRICS:
        top.wrong("fabrics", f"are {len(fabrics)}; a node has {MAX_FABRICS} at most")
    return fabrics


def _fabric(section: Section, name: str, taken: dict[str, str]) -> FabricConfig:
    hcas = section.texts("hcas")
    for hca in hcas:
        if why := _wrong_hca(hca):
            section.wrong("hcas", why)
        elif hca in taken:
            twice = "is written twice" if taken[hca] == name else f"is on {taken[hca]} already: it is on one network"
            section.wrong("hcas", f"{hca} {twice}")
        taken.setdefault(hca, name)
    if len(hcas) > MAX_HCAS:
        section.wrong("hcas", f"are {len(hcas)}; a fabric has {MAX_HCAS} adapters of a node at most")
    interface = section.text("interface", None)
    if interface is not None and not _INTERFACE.fullmatch(interface):
        section.wrong("interface", f"{interface!r} is no interface's name: write it as `ip link` shows it (ib0)")
    if section.has("hcas") and not hcas:
        section.wrong("hcas", "has no adapter in it: write one (mlx5_0), or leave it out and write interface alone")
    section.close()
    return FabricConfig(hcas=hcas, interface=interface)


def wrong_name(name: str) -> str | None:
    """Why this can't be what a fabric or a class of GPUs is called; None when it can."""
    if not _NAME.fullmatch(name):
        return f"{name!r} may hold letters, digits and . _ - only, and starts with a letter or digit"
    if len(name) > MAX_NAME:
        return f"is longer than {MAX_NAME} characters"
    return None


def _wrong_hca(hca: str) -> str | None:
    device, colon, _ = hca.partition(":")
    if colon and _HCA.fullmatch(device):
        return f"{hca!r} has a port in it; write the adapter alone: {device}"
    if not _HCA.fullmatch(hca):
        return f"{hca!r} is no adapter's name: write it as `ls /sys/class/infiniband` shows it (mlx5_0)"
    return None


def _discovery(section: Section) -> Discovery:
    discovery = Discovery(
        nvidia_smi=read_path(section, "nvidia_smi", None),
        classes=_classes(section.section("classes")),
        fake=read_path(section, "fake", None),
    )
    if section.has("fake"):
        for key in ("nvidia_smi", "classes"):
            if section.has(key):
                section.wrong(
                    key, "has no effect beside fake, whose file says what GPUs there are; leave one of them out"
                )
    section.close()
    return discovery


def _classes(section: Section) -> dict[str, str]:
    classes = {}
    for product in section.names():
        classes[product] = name = section.required_text(product)
        if name == ANY_CLASS:
            section.wrong(product, f"{ANY_CLASS} stands for every class, so no class can be called so")
        elif name and (why := wrong_name(name)):
            section.wrong(product, why)
    section.close()
    return classes


def _weights(section: Section, *, secrets: bool) -> AgentWeights:
    common = read_weights(section, secrets=secrets)
    weights = AgentWeights(
        allow_hosts=common.allow_hosts,
        hub_token=common.hub_token,
        cache=read_path(section, "cache", AgentWeights().cache),
    )
    section.close()
    return weights


def _model_dirs(top: Section) -> tuple[Path, ...]:
    found = []
    for text in top.texts("model_dirs"):
        path = whole_path(text)
        if path is None:
            top.wrong("model_dirs", f"{text!r} must be a whole path, from / or ~/")
        elif path in found:
            top.wrong("model_dirs", f"{path} is written twice")
        else:
            found.append(path)
    if len(found) > MAX_MODEL_DIRS:
        top.wrong("model_dirs", f"are {len(found)}; a node has {MAX_MODEL_DIRS} at most")
    return tuple(found)


def _seed_listen(top: Section) -> Listen | None:
    listen = read_listen(top, "seed_listen", SEED_EXAMPLE)
    if listen is SEED_EXAMPLE:
        return None
    if why := wrong_to_tell(listen):
        top.wrong("seed_listen", f"{why}; write it as {show_listen(SEED_EXAMPLE)}")
    return listen


def _limits(section: Section) -> AgentLimits:
    limits = AgentLimits(download_rate=read_download_rate(section))
    section.refuse(LATER_LIMITS, NOT_YET)
    section.close()
    return limits
