"""What an agent is told when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.config.agent import Discovery, FabricConfig, NodeTls, ServerAddress
from llmgw.config.server import Listen
from llmgw.core.node import NodeId
from llmgw.host.weights.sources.asker import AGENT, Asker


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often an agent looks, in seconds. ``health_limit`` is how long one poll may take.

    A starting engine is asked after ``loading_first``, then at growing intervals up to ``loading``. ``recheck``: how
    long a program that can't run is left alone before it is tried again, and twice as long from time to time.
    ``measure``: how long a look at what an engine holds will do; ``weights``: how often those that lie here are looked
    for.

    An engine without a sign of life for ``suspect`` seconds is asked for one token, one of a group also after ``idle``
    ones without a request. It is hung when neither that nor any other sign comes for ``canary`` seconds more, or for
    ``canary_blind`` ones where nobody can see whether it computes. ``computing`` is how long the use of processors
    counts as a sign of life.
    """

    inventory: float = 5.0
    health: float = 5.0
    health_limit: float = 4.0
    loading_first: float = 0.1
    loading: float = 1.0
    link_retry: float = 1.0
    recheck: float = 60.0
    measure: float = 5.0
    suspect: float = 30.0
    idle: float = 60.0
    canary: float = 60.0
    canary_blind: float = 300.0
    computing: float = 1800.0
    weights: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSettings:
    """Weights on this node: ``cache`` is the folder of what llmgw has fetched, and ``model_dirs`` are those that people
    have put some into. ``allow_hosts`` are those that may be fetched from, () for all; ``download_rate`` in bytes per
    second, None as fast as it goes. Others may take pieces at ``seed_listen``, where it is set, and prove themselves by
    certificates as this node does by ``tls``; without it this node takes nothing from others. ``server`` is by whom
    nodes take from each other that can't reach each other, where it does that. ``asker``: where all this is said."""

    cache: Path
    model_dirs: tuple[Path, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    hub_token: str | None = field(default=None, repr=False)
    seed_listen: Listen | None = None
    tls: NodeTls | None = None
    server: ServerAddress | None = None
    asker: Asker = AGENT
    download_rate: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """One node's agent. ``binaries`` are configured programs by engine name. With ``stop_on_exit`` engines are meant to
    end with the program: one that is left running is then worth a warning. ``fabrics`` are those that are declared, by
    name. ``discovery`` is how GPUs are found: None where nobody looks for them."""

    node_id: NodeId
    state: Path
    weights: WeightsSettings
    engine_ports: tuple[int, int] = (18000, 18999)
    binaries: Mapping[str, str] = field(default_factory=dict)
    stop_on_exit: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    fabrics: Mapping[str, FabricConfig] = field(default_factory=dict)
    discovery: Discovery | None = None
    pace: Pace = field(default_factory=Pace)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where something is written, or read that takes much room: how full their disks are is reported."""
        return (self.state, self.weights.cache, *self.weights.model_dirs)
