"""agent.yaml: what ``llmgw agent`` is told. Defaults stand here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from llmgw.config.node import EngineConfig, WeightsConfig
from llmgw.config.server import Listen


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTls:
    """What a node proves itself with, and the authority that it believes."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where the agents' port of the server is; ``host`` is a name or an IP address, as it must stand in the server's
    certificate."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"https://[{self.host}]:{self.port}" if ":" in self.host else f"https://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricConfig:
    """A network that this node is on, as it is declared: its adapters there as the kernel calls them (``mlx5_0``), and
    the interface whose address other nodes reach it at, None for that of the first adapter. One of the two is there."""

    hcas: tuple[str, ...] = ()
    interface: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """How GPUs are found. ``nvidia_smi`` is asked where the driver's library is not there, None for the one on PATH;
    ``classes`` are those of certain GPUs, by their product's name or UUID; ``fake`` is a file that stands in for what
    the machine has."""

    nvidia_smi: Path | None = None
    classes: dict[str, str] = field(default_factory=dict)
    fake: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWeights(WeightsConfig):
    """The same of an agent, and ``cache``: the folder of what is fetched."""

    cache: Path = Path("/var/lib/llmgw-models/.cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """``download_rate``: bytes per second of weights that are fetched, None for no limit."""

    download_rate: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The whole of agent.yaml. ``trunks``: connections that carry requests to this node. ``model_dirs``: folders that
    are looked through for models. ``seed_listen``: where other nodes take weights from this one, None where they can't.
    """

    node: str
    server: ServerAddress
    tls: NodeTls
    state: Path = Path("/var/lib/llmgw-agent")
    engine_ports: tuple[int, int] = (18000, 18999)
    trunks: int = 2
    labels: dict[str, str] = field(default_factory=dict)
    fabrics: dict[str, FabricConfig] = field(default_factory=dict)
    discovery: Discovery = field(default_factory=Discovery)
    weights: AgentWeights = field(default_factory=AgentWeights)
    model_dirs: tuple[Path, ...] = ()
    seed_listen: Listen | None = None
    limits: AgentLimits = field(default_factory=AgentLimits)
    engines: dict[str, EngineConfig] = field(default_factory=dict)
