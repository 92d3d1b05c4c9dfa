"""What an agent is told when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.config.agent import Discovery, FabricConfig
from llmgw.core.node import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often an agent looks, in seconds. ``health_limit`` is how long one poll may take.

    A starting engine is asked after ``loading_first``, then at growing intervals up to ``loading``. ``recheck``: how
    long a program that can't run is left alone before it is tried again, and twice as long from time to time.
    ``measure``: how long a look at what an engine holds will do.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """One node's agent. ``binaries`` are configured programs by engine name; ``folders`` are further places (weights)
    whose disks are reported. With ``stop_on_exit`` engines are meant to end with the program: one that is left
    running is then worth a warning. ``fabrics`` are those that are declared, by name. ``discovery`` is how GPUs are
    found: None where nobody looks for them."""

    node_id: NodeId
    state: Path
    engine_ports: tuple[int, int] = (18000, 18999)
    binaries: Mapping[str, str] = field(default_factory=dict)
    stop_on_exit: bool = False
    folders: tuple[Path, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    fabrics: Mapping[str, FabricConfig] = field(default_factory=dict)
    discovery: Discovery | None = None
    pace: Pace = field(default_factory=Pace)
