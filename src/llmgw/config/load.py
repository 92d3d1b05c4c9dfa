"""node.yaml becomes a NodeConfig: which file is read, what the environment changes, and everything that is wrong."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from llmgw.config.definition import Definition, read_definitions, unknown_engine
from llmgw.config.document import Section, read_document
from llmgw.config.node import EngineConfig, Limits, NodeConfig, Timeouts
from llmgw.errors import ConfigError, Problem

SYSTEM_FILE = Path("/etc/llmgw/node.yaml")
# Off is a sensible wish for these alone: without the others a silent peer would hold its place for ever.
_MAY_BE_ZERO = {"generation", "stream_open_after", "drain"}
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_LEAST_BYTES = 1024


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
        config = replace(config, cache=str(Path(models).expanduser().absolute() / ".cache"))
    if port is not None:
        _refuse_engine_port(port, config.engine_ports)
        config = replace(config, port=port)
    return replace(loaded, config=config)


def find_node_file(path: Path | None, *, environ: Mapping[str, str], system_file: Path = SYSTEM_FILE) -> Path | None:
    """The file to read: the one that was named, else the machine's, else the user's; None when there is none."""
    if path is not None:
        return path
    if named := environ.get("LLMGW_CONFIG"):
        return Path(named).expanduser()
    base = environ.get("XDG_CONFIG_HOME", "")
    home = Path(base) if base.startswith("/") else Path(environ.get("HOME") or "~").expanduser() / ".config"
    for candidate in (system_file, home / "llmgw" / "node.yaml"):
        if candidate.exists():
            return candidate
    return None


def _read_node(path: Path, engines: Collection[str]) -> Loaded:
    top, findings = read_document(path)
    default = NodeConfig()
    definitions = read_definitions(top.sections("models"), engines, path.parent)
    config = NodeConfig(
        host=_host(top, default.host),
        port=top.count("port", default.port, low=0, high=65535),
        cors_origins=_origins(top),
        engine_ports=top.ports("engine_ports", default.engine_ports),
        on_demand_wait=top.duration("on_demand_wait", default.on_demand_wait, zero=True),
        state=_path(top, "state"),
        cache=_path(top, "cache"),
        timeouts=_timeouts(top.section("timeouts")),
        limits=_limits(top.section("limits")),
        engines=_engines(top.section("engines"), engines),
        models=tuple(definition.model for definition in definitions),
    )
    if config.engine_ports[0] <= config.port <= config.engine_ports[1]:
        top.wrong("engine_ports", f"holds {config.port}, which is the port that clients use")
    top.close()
    findings.raise_if_any()
    return Loaded(config=config, path=path, definitions=definitions)


def _host(top: Section, default: str) -> str:
    host = top.text("host", default)
    if why := _open_host(host):
        top.wrong("host", why)
    return host


def _open_host(host: str) -> str | None:
    """Why this address can't be listened on; None when it can."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
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


def _origins(top: Section) -> tuple[str, ...]:
    origins = top.texts("cors_origins")
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            top.wrong("cors_origins", f"{origin!r} is not an origin; write it as https://app.example.com")
    return origins


def _path(section: Section, key: str) -> str | None:
    """An absolute path, or one in the home; others would depend on where the program was started."""
    text = section.text(key, None)
    if text is None:
        return None
    path = Path(text).expanduser() if text.startswith("~/") else Path(text)
    if not path.is_absolute():
        section.wrong(key, f"{text!r} must be a whole path, from / or ~/")
    return str(path)


def _timeouts(section: Section) -> Timeouts:
    default = Timeouts()
    values = {
        field.name: section.duration(field.name, getattr(default, field.name), zero=field.name in _MAY_BE_ZERO)
        for field in fields(Timeouts)
    }
    section.close()
    return Timeouts(**values)


def _limits(section: Section) -> Limits:
    default = Limits()
    limits = Limits(
        max_head=section.size("max_head", default.max_head, low=_LEAST_BYTES),
        max_body=section.size("max_body", default.max_body, low=_LEAST_BYTES),
        bodies_total=section.size("bodies_total", default.bodies_total, low=_LEAST_BYTES),
        max_connections=section.count("max_connections", default.max_connections, low=1, high=1_000_000),
        max_pipelined=section.count("max_pipelined", default.max_pipelined, low=1, high=10_000),
    )
    if limits.max_body > limits.bodies_total:
        section.wrong("max_body", "is more than bodies_total: no body of that size could ever be taken")
    section.close()
    return limits


def _engines(section: Section, engines: Collection[str]) -> dict[str, EngineConfig]:
    found: dict[str, EngineConfig] = {}
    for name in section.names():
        stanza = section.section(name)
        if name in engines:
            found[name] = EngineConfig(bin=_path(stanza, "bin"))
            stanza.close()
        else:
            section.wrong(name, unknown_engine(name, engines))
    section.close()
    return found
