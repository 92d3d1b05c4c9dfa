"""node.yaml becomes a NodeConfig: which file is read, what the environment changes, and everything that is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llmgw.config.addresses import is_loopback
from llmgw.config.definition import Definition, read_definitions
from llmgw.config.document import Section, read_document
from llmgw.config.files import named_file, read_path
from llmgw.config.node import NodeConfig, WeightsConfig
from llmgw.config.parts import read_engines, read_node_limits, read_origins, read_timeouts, read_weights
from llmgw.config.paths import expand_home, find_home, is_there
from llmgw.errors import ConfigError, Problem

SYSTEM_FILE = Path("/etc/llmgw/node.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration, the file it came from (None: there is none, all is default) and the models written in it."""

    config: NodeConfig
    path: Path | None = None
    definitions: tuple[Definition, ...] = ()


def load_node(
    path: Path | None,
    *,
    environ: Mapping[str, str],
    engines: Collection[str],
    port: int | None = None,
    system_file: Path = SYSTEM_FILE,
) -> Loaded:
    """The configuration of ``serve`` and ``demo``. ConfigError with everything that is wrong in it.

    ``path`` and ``port`` come from the command line and win over the environment, which wins over the file.
    """
    chosen = find_node_file(path, environ=environ, system_file=system_file)
    loaded = _read_node(chosen, engines) if chosen else Loaded(config=NodeConfig())
    config = loaded.config
    if host := environ.get("LLMGW_HOST"):
        _refuse_open_host(host, Problem(key="LLMGW_HOST", message=""))
        config = replace(config, host=host)
    if models := environ.get("LLMGW_MODELS"):
        config = replace(config, cache=str(Path(expand_home(models)).absolute() / ".cache"))
    if port is not None:
        _refuse_engine_port(port, config.engine_ports)
        config = replace(config, port=port)
    return replace(loaded, config=config)


def find_node_file(path: Path | None, *, environ: Mapping[str, str], system_file: Path = SYSTEM_FILE) -> Path | None:
    """The file to read: the one that was named, else the machine's, else the user's; None when there is none."""
    if named := named_file(path, environ=environ):
        return named
    base = environ.get("XDG_CONFIG_HOME", "")
    home = find_home(environ)
    folders = [Path(base)] if base.startswith("/") else [home / ".config"] if home else []
    candidates = (system_file, *(folder / "llmgw" / "node.yaml" for folder in folders))
    return next(filter(is_there, candidates), None)


def _read_node(path: Path, engines: Collection[str]) -> Loaded:
    top, findings = read_document(path)
    default = NodeConfig()
    definitions = read_definitions(top.sections("models"), engines, path.parent)
    config = NodeConfig(
        host=_host(top, default.host),
        port=top.count("port", default.port, low=0, high=65535),
        cors_origins=read_origins(top),
        engine_ports=top.ports("engine_ports", default.engine_ports),
        on_demand_wait=top.duration("on_demand_wait", default.on_demand_wait, zero=True),
        state=_text_path(top, "state"),
        cache=_text_path(top, "cache"),
        timeouts=read_timeouts(top.section("timeouts")),
        limits=read_node_limits(top.section("limits")),
        weights=_weights(top.section("weights")),
        engines=read_engines(top.section("engines"), engines),
        models=tuple(definition.model for definition in definitions),
    )
    if config.engine_ports[0] <= config.port <= config.engine_ports[1]:
        top.wrong("engine_ports", f"holds {config.port}, which is the port that clients use")
    top.close()
    findings.raise_if_any()
    return Loaded(config=config, path=path, definitions=definitions)


def _weights(section: Section) -> WeightsConfig:
    weights = read_weights(section)
    section.refuse({"cache"}, "is a key of its own in this file: write cache beside weights")
    section.close()
    return weights


def _host(top: Section, default: str) -> str:
    host = top.text("host", default)
    if why := _open_host(host):
        top.wrong("host", why)
    return host


def _open_host(host: str) -> str | None:
    """Why this address can't be listened on; None when it can."""
    loopback = is_loopback(host)
    if loopback is None:
        return f"{host!r} is not an address; write 127.0.0.1 or ::1"
    if loopback:
        return None
    return (
        f"{host} can be reached from other machines, and this version has no keys to ask them for. "
        "Keep 127.0.0.1 and come in by a tunnel (ssh -L 17434:127.0.0.1:17434 HOST), "
        "or put a reverse proxy that asks for a password before it"
    )


def _refuse_open_host(host: str, problem: Problem) -> None:
    if why := _open_host(host):
        raise ConfigError([replace(problem, message=why)])


def _refuse_engine_port(port: int, engine_ports: tuple[int, int]) -> None:
    low, high = engine_ports
    if low <= port <= high:
        text = f"{port} is one of the ports kept for engines ({low}-{high}); take another, or move engine_ports"
        raise ConfigError([Problem(key="--port", message=text)])


def _text_path(top: Section, key: str) -> str | None:
    path = read_path(top, key, None)
    return None if path is None else str(path)
