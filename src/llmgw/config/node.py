"""node.yaml: what ``llmgw serve`` and ``llmgw demo`` are told. Defaults stand here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmgw.core.model import Model

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """All in seconds; 0 switches ``generation`` off.

    ``response_header``: a stream's time to its first event. ``idle``: between bytes of a stream, either way.
    ``generation``: a whole reply in all. ``stream_open_after``: how long a status stays open before a silent stream is
    opened and kept alive with comments, each ``keep_alive_comment`` apart. ``head``: a request's head from its first
    byte. ``body``: between bytes of a request's body. ``keep_alive``: an idle client connection. ``connect``: to an
    engine. ``drain``: what running requests get when the program stops.
    """

    response_header: float = 60.0
    idle: float = 120.0
    generation: float = 600.0
    stream_open_after: float = 30.0
    keep_alive_comment: float = 15.0
    head: float = 10.0
    body: float = 30.0
    keep_alive: float = 75.0
    connect: float = 5.0
    drain: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the door takes: sizes in bytes, the rest are counts."""

    max_head: int = 64 * 1024
    max_body: int = 64 * MIB
    bodies_total: int = 512 * MIB
    max_connections: int = 4096
    max_pipelined: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits(Limits):
    """The same of ``serve``, and ``download_rate``: bytes per second of weights that are fetched, None for no limit."""

    download_rate: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """How weights are fetched: from these hosts alone (empty: from all), and what the hub knows us by."""

    allow_hosts: tuple[str, ...] = ()
    hub_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Where an engine's binary is, when it is not on PATH under its own name."""

    bin: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The whole of node.yaml. ``state`` and ``cache`` None mean the per-user (or root's) defaults."""

    host: str = "127.0.0.1"
    port: int = 17434
    cors_origins: tuple[str, ...] = ()
    engine_ports: tuple[int, int] = (18000, 18999)
    on_demand_wait: float = 20.0
    state: str | None = None
    cache: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: NodeLimits = field(default_factory=NodeLimits)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    engines: dict[str, EngineConfig] = field(default_factory=dict)
    models: tuple[Model, ...] = ()
