"""An authority that issues certificates for one test, right ones and wrong ones."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.core.effects import Desire
from llmgw.core.events import Event
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import ReplicaId, ShardId, ShardReport, ShardSpec, ShardState
from llmgw.core.weights import WeightsOrder

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Files:
    """As ``agent_tls`` of server.yaml and ``tls`` of agent.yaml have them."""

    ca: Path
    cert: Path
    key: Path


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


class Authority:
    """``ca`` is its certificate."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.name = _name(name)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.pem"
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(self.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + 3650 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        hosts: tuple[str, ...] = (),
        client: bool = True,
        server: bool = True,
        days: tuple[float, float] = (-1, 30),
        into: Files | None = None,
    ) -> Files:
        """A certificate with its key: valid from and to so many ``days`` from now; over ``into`` if given."""
        now = datetime.datetime.now(datetime.UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH] * client + [ExtendedKeyUsageOID.SERVER_AUTH] * server
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * DAY)
            .not_valid_after(now + days[1] * DAY)
        )
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False
            )
        number = len(list(self._folder.iterdir()))
        files = into or Files(
            ca=self.ca, cert=self._folder / f"{name}-{number}.pem", key=self._folder / f"{name}-{number}-key.pem"
        )
        files.key.touch(mode=0o600)
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        certificate = builder.sign(self.key, hashes.SHA256())
        files.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return files


MakeAuthority = Callable[..., Authority]


@pytest.fixture
def make_authority(tmp_path: Path) -> MakeAuthority:
    """Another authority, by another name."""

    def make(name: str = "authority") -> Authority:
        folder = tmp_path / name
        folder.mkdir()
        return Authority(folder, name)

    return make


@pytest.fixture
def authority(make_authority: MakeAuthority) -> Authority:
    return make_authority()


class FakeFleet:
    """The fleet as the server's end of the link sees it: takes events while it has room, desires what a test says."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.refused: list[NodeId] = []
        self.room = trio.Event()
        self.room.set()
        # How many events wait for room.
        self.waiting = 0
        self._desires: dict[NodeId, Desire] = {}
        self._followers: list[tuple[NodeId, Callable[[Desire], None]]] = []
        self._orders: dict[NodeId, WeightsOrder] = {}
        self.order_followers: list[tuple[NodeId, Callable[[WeightsOrder], None]]] = []
        self._changed = trio.Event()

    def desire(self, node: NodeId, revision: int, *shards: ShardSpec) -> None:
        self._desires[node] = Desire(node=node, revision=revision, shards=shards)
        for follower, tell in tuple(self._followers):
            if follower == node:
                tell(self._desires[node])

    def follow(self, node: NodeId, tell: Callable[[Desire], None]) -> Callable[[], None]:
        self._followers.append((node, tell))
        if node in self._desires:
            tell(self._desires[node])
        return lambda: self._followers.remove((node, tell))

    def order(self, node: NodeId, order: WeightsOrder) -> None:
        self._orders[node] = order
        for follower, tell in tuple(self.order_followers):
            if follower == node:
                tell(order)

    def follow_orders(self, node: NodeId, tell: Callable[[WeightsOrder], None]) -> Callable[[], None]:
        self.order_followers.append((node, tell))
        if node in self._orders:
            tell(self._orders[node])
        return lambda: self.order_followers.remove((node, tell))

    def refuse(self, node: NodeId) -> None:
        self.refused.append(node)

    async def report(self, event: Event) -> None:
        self.waiting += 1
        try:
            await self.room.wait()
        finally:
            self.waiting -= 1
        self.events.append(event)
        self._tell_change()

    async def wait_events(self, count: int) -> list[Event]:
        """The events, once there are so many."""
        with trio.fail_after(600):
            while len(self.events) < count:
                await self._changed.wait()
        return self.events

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


class Facts:
    """Small facts of a node to talk of."""

    @staticmethod
    def node(node: str = "gpu-01", *, free_gb: float = 50.0) -> Node:
        flags = frozenset({"avx2"})
        return Node(id=NodeId(node), cores=8, cpu_flags=flags, memory_gb=64.0, memory_available_gb=free_gb)

    @staticmethod
    def spec(node: str = "gpu-01", *, number: int = 1, epoch: int = 1) -> ShardSpec:
        return ShardSpec(
            id=ShardId(f"shd-m-{number}-0"),
            replica=ReplicaId(f"rep-m-{number}"),
            epoch=epoch,
            node=NodeId(node),
            model=Model(name=ModelName("m"), source="/models/m.gguf"),
            profile=Profile(name="cpu", engine="llamacpp"),
        )

    @staticmethod
    def report(spec: ShardSpec, state: ShardState = ShardState.READY) -> ShardReport:
        return ShardReport(shard=spec.id, replica=spec.replica, epoch=spec.epoch, state=state)


@pytest.fixture
def facts() -> Facts:
    return Facts()
