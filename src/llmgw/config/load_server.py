"""server.yaml becomes a ServerConfig: which file is read, what this version refuses, and everything that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmgw.config.addresses import is_loopback, overlap, read_listen, show_listen
from llmgw.config.definition import Checker, Definition, find_rejections, read_definitions
from llmgw.config.document import Section, read_document
from llmgw.config.files import find_system_file, read_existing, read_path, read_value, whole_path
from llmgw.config.parts import read_limits, read_origins, read_timeouts
from llmgw.config.server import AgentTls, Auth, FleetConfig, Listen, Seeding, ServerConfig
from llmgw.errors import ConfigError
from llmgw.units import format_duration

SYSTEM_FILE = Path("/etc/llmgw/server.yaml")
# Two words of an agent; with less, one that comes a little late would be a node lost.
LEAST_LEASE_SECONDS = 10.0
# With less, a node that takes a piece among others would take its silence for its end.
LEAST_RELAY_RATE = 1_000_000

# Understood and refused: whoever wrote one counts on what it does, and nothing here does it yet.
LATER = frozenset({"landing", "metrics_listen", "ollama_api", "threads", "trusted_proxies"})
LATER_AUTH = frozenset({"allow_open", "default_rpm", "default_tpm", "signup_open"})
NOT_YET = "is not in this version; leave it out"
ACCOUNTS_NOT_YET = "is not in this version, which has no accounts and keys; leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedServer:
    """A configuration, and the models written in it with their places."""

    config: ServerConfig
    definitions: tuple[Definition, ...] = ()


def find_server_file(path: Path | None, *, environ: Mapping[str, str], system_file: Path = SYSTEM_FILE) -> Path:
    """The file to read: the one that was named, else the machine's. ConfigError when there is none."""
    return find_system_file(path, environ=environ, system_file=system_file)


def load_server(path: Path, *, engines: Mapping[str, Checker]) -> LoadedServer:
    """The configuration of ``llmgw server``. ConfigError with everything that is wrong in it.

    What it names has to be there: an agents' port without its certificate could be reached by nobody.
    """
    top, findings = read_document(path)
    definitions = read_definitions(top.sections("models"), engines, None)
    agent_tls = _agent_tls(top.section("agent_tls"))
    default = ServerConfig(agent_tls=agent_tls)
    seeding = Seeding(top.choice("seeding", Seeding.DIRECT, tuple(Seeding)))
    config = ServerConfig(
        agent_tls=agent_tls,
        listen=read_listen(top, "listen", default.listen),
        admin_listen=read_listen(top, "admin_listen", default.admin_listen),
        agent_listen=read_listen(top, "agent_listen", default.agent_listen),
        auth=_auth(top.section("auth")),
        fleet=_fleet(top.section("fleet")),
        seeding=seeding,
        relay_rate=_relay_rate(top, seeding, default.relay_rate),
        cors_origins=read_origins(top),
        timeouts=read_timeouts(top.section("timeouts")),
        limits=read_limits(top.section("limits")),
        models=tuple(definition.model for definition in definitions),
    )
    _check_open(top, config)
    _check_apart(top, config)
    top.refuse(LATER, NOT_YET)
    top.close()
    problems = [*findings.problems(), *find_rejections(definitions, engines)]
    if problems:
        raise ConfigError(problems)
    return LoadedServer(config=config, definitions=definitions)


def _agent_tls(section: Section) -> AgentTls:
    tls = AgentTls(
        ca=read_existing(section, "ca"),
        cert=read_existing(section, "cert"),
        key=read_existing(section, "key", secret=True),
        # It need not be there before the first certificate is revoked.
        revoked=read_path(section, "revoked", None),
    )
    section.close()
    return tls


def _auth(section: Section) -> Auth:
    default = Auth()
    if section.truth("enabled", default=default.enabled):
        why = "is true" if section.has("enabled") else "is not written, which means true"
        text = f"{why}, and this version has no accounts and keys to ask for; write enabled: false to serve everybody "
        section.wrong("enabled", f"{text}who reaches listen")
    auth = Auth(enabled=False, store=_store(section, default.store))
    section.refuse(LATER_AUTH, ACCOUNTS_NOT_YET)
    section.close()
    return auth


def _store(section: Section, default: str) -> str:
    # What is wrong is told without the value: it may come from a secret file, and hold a password.
    store = read_value(section, "store", default)
    if store.startswith(("postgres://", "postgresql://")):
        section.wrong("store", "is a PostgreSQL address, and this version keeps its store in a file; write a path")
        return default
    path = whole_path(store)
    if path is None:
        section.wrong("store", f"must be the whole path of a file, as {default}")
        return default
    return str(path)


def _fleet(section: Section) -> FleetConfig:
    default = FleetConfig()
    lease = section.duration("lease", default.lease)
    if lease < LEAST_LEASE_SECONDS:
        section.wrong("lease", f"must be at least {LEAST_LEASE_SECONDS:g}s, for agents are heard every 5s")
        lease = default.lease
    fleet = FleetConfig(
        lease=lease,
        # Where a long lease is all that is written, the others are no shorter.
        replace_after=section.duration("replace_after", max(default.replace_after, lease)),
        brake=section.duration("brake", max(default.brake, lease), zero=True),
        on_demand_wait=section.duration("on_demand_wait", default.on_demand_wait, zero=True),
    )
    least = f"must be at least the lease, which is {format_duration(lease)}"
    if fleet.replace_after < lease:
        # A group of several nodes ends by itself when it is without a link for so long.
        section.wrong("replace_after", f"{least}: what is down for less than that is no node lost, and nothing moves")
    if 0 < fleet.brake < lease:
        section.wrong("brake", f"{least}, or 0 for none: nodes that go together are missed up to a lease apart")
    section.close()
    return fleet


def _relay_rate(top: Section, seeding: Seeding, default: int) -> int:
    rate = top.size("relay_rate", default, low=LEAST_RELAY_RATE)
    if top.has("relay_rate") and seeding is not Seeding.RELAY:
        top.wrong("relay_rate", f"is for seeding: {Seeding.RELAY}, and seeding is {seeding}; leave it out")
    return rate


def _check_open(top: Section, config: ServerConfig) -> None:
    """Nobody is asked for a key in this version: only who is on this machine may come in."""
    for key, why, ways in (
        (
            "listen",
            "this version has no keys to ask them for",
            ", or put a reverse proxy that asks for a password before it",
        ),
        (
            "admin_listen",
            "whoever reaches this port may do everything",
            "; what others may see of it (metrics_listen, /admin) is not in this version",
        ),
    ):
        listen: Listen = getattr(config, key)
        if not is_loopback(listen.host):
            here = f"127.0.0.1:{listen.port}"
            text = (
                f"{show_listen(listen)} can be reached from other machines, and {why}. Write {here} and come in by a "
            )
            top.wrong(key, f"{text}tunnel (ssh -L {listen.port}:{here} HOST){ways}")


def _check_apart(top: Section, config: ServerConfig) -> None:
    taken: list[tuple[str, Listen]] = []
    for key in ("listen", "admin_listen", "agent_listen"):
        listen: Listen = getattr(config, key)
        for other, theirs in taken:
            if overlap(listen, theirs):
                top.wrong(key, f"{show_listen(listen)} is taken by {other} ({show_listen(theirs)}); take another port")
        taken.append((key, listen))
