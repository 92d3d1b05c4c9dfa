"""server.yaml: what ``llmgw server`` is told. Defaults stand here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from llmgw.config.node import Limits, Timeouts
from llmgw.core.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """An address to listen on; ``host`` is an IP address, or empty for all of the machine's."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTls:
    """What the agents' port proves itself with, whom it believes, and (``revoked``) whom no more; the latter is
    ``revoked.txt`` beside ``ca`` unless something else is said."""

    ca: Path
    cert: Path
    key: Path
    revoked: Path | None = None

    @property
    def revoked_file(self) -> Path:
        return self.revoked or self.ca.with_name("revoked.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """``store``: a file for SQLite. ``enabled`` must be written false while there are no accounts."""

    enabled: bool = True
    store: str = "/var/lib/llmgw/llmgw.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """In seconds. ``lease``: how long a node counts as there without a word. ``replace_after``: how long after that its
    replicas are placed anew. ``brake``: how long nothing is where most nodes were lost together; 0 is no brake.
    ``on_demand_wait``: what a request for a model that is not ready waits for it."""

    lease: float = 15.0
    replace_after: float = 60.0
    brake: float = 600.0
    on_demand_wait: float = 20.0


class Seeding(StrEnum):
    """Whether nodes take weights from one another. DIRECT: from those that have a ``seed_listen``. RELAY: through the
    server, but for those that reach each other over a fabric."""

    DIRECT = "direct"
    RELAY = "relay"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The whole of server.yaml. ``relay_rate``: bytes of weights per second through the server, over all."""

    agent_tls: AgentTls
    listen: Listen = Listen(host="127.0.0.1", port=8080)
    admin_listen: Listen = Listen(host="127.0.0.1", port=9090)
    agent_listen: Listen = Listen(host="", port=7443)
    auth: Auth = field(default_factory=Auth)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    seeding: Seeding = Seeding.DIRECT
    relay_rate: int = 100_000_000
    cors_origins: tuple[str, ...] = ()
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    models: tuple[Model, ...] = ()

    @property
    def host(self) -> str:
        """Where clients come in."""
        return self.listen.host

    @property
    def on_demand_wait(self) -> float:
        return self.fleet.on_demand_wait
