"""Whether a network that a node was declared to be on works here: its adapters' ports, and an address on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from llmgw.core.node import FabricFound
from llmgw.host.interfaces import NET, find_address, is_down

INFINIBAND = Path("/sys/class/infiniband")

ACTIVE = "ACTIVE"
SHOWN_NAMES = 20
# What an adapter's port tells of its cable while it is not up.
_UNPLUGGED = frozenset({"Polling", "Sleep", "LinkErrorRecovery"})


def read_fabric(
    name: str,
    hcas: tuple[str, ...] = (),
    interface: str | None = None,
    *,
    adapters: Path = INFINIBAND,
    interfaces: Path = NET,
    find_address: Callable[[str], str | None] = find_address,
) -> FabricFound:
    """The fabric as it is now. All of its adapters have to be there and up: an engine is given all of them, and one
    that is missing hangs it in its first all-reduce, long after its health was good."""
    found = [interface] if interface is not None else _find_interfaces(hcas, adapters)
    addresses = {each: find_address(each) for each in found}
    # An adapter with several ports has an interface for each of them.
    chosen = next((each for each, address in addresses.items() if address is not None), next(iter(found), None))
    address = None if chosen is None else addresses[chosen]
    down = _explain_adapters(hcas, adapters) or _explain_interface(hcas, chosen, address, interfaces)
    return FabricFound(name=name, interface=chosen, address=address, hcas=hcas, down=down)


def _find_interfaces(hcas: tuple[str, ...], adapters: Path) -> list[str]:
    return [each for hca in hcas for each in _list(adapters / hca / "device" / "net")]


def _explain_adapters(hcas: tuple[str, ...], adapters: Path) -> str | None:
    for hca in hcas:
        if not (adapters / hca).is_dir():
            others = _show(_list(adapters))
            there = f"there is {others}" if others else "there is none: is its driver loaded (modprobe mlx5_ib)?"
            return f"the adapter {hca} is not there; {there}; `ibv_devices` (rdma-core) lists them"
        ports = list(_read_ports(adapters / hca))
        if not any(state == ACTIVE for _, state, _, _ in ports):
            return _explain_port(hca, ports)
    return None


def _read_ports(adapter: Path) -> Iterator[tuple[str, str, str, str]]:
    """Number, state, state of the cable, and kind (InfiniBand, Ethernet) of each port, in the kernel's words."""
    for number in _list(adapter / "ports"):
        port = adapter / "ports" / number
        # as "4: ACTIVE", "5: LinkUp"
        state, cable = (_read(port / name).rpartition(":")[2].strip() for name in ("state", "phys_state"))
        yield number, state, cable, _read(port / "link_layer")


def _explain_port(hca: str, ports: list[tuple[str, str, str, str]]) -> str:
    if not ports:
        return f"the adapter {hca} shows no port; look for it in the kernel's log (dmesg)"
    # The one that is nearest to being up is the one that was meant.
    number, state, cable, kind = max(ports, key=lambda port: port[1] in {"INIT", "ARMED"})
    what = f"port {number} of {hca} is {state or 'in a state that can not be read'}"
    if state in {"INIT", "ARMED"} and kind != "Ethernet":
        return f"{what}: its cable is in, and no subnet manager has set it up; start one (opensm) on that network"
    if cable == "Disabled":
        return f"{what}, for it is switched off; switch it on (`ip link set dev NAME up`, or `ibportstate … enable`)"
    if cable in _UNPLUGGED:
        return f"{what}, and nothing answers at the other end; look at its cable and the switch"
    if kind == "Ethernet":
        return f"{what}; bring its interface up (`ip link set dev NAME up`), and look at its cable"
    return f"{what}; look at its cable, the switch and the subnet manager (`ibstat {hca}`)"


def _explain_interface(hcas: tuple[str, ...], chosen: str | None, address: str | None, interfaces: Path) -> str | None:
    if chosen is None:
        return f"{hcas[0]} has no network interface; load ib_ipoib, or write the fabric's interface in agent.yaml"
    if not (interfaces / chosen).exists():
        others = _show(_list(interfaces)) or "none"
        return f"the interface {chosen} is not there; there is {others}; `ip link` shows them"
    if is_down(chosen, interfaces):
        return f"the interface {chosen} is down; `ip link set dev {chosen} up`, or look at its cable"
    if address is None:
        return (
            f"the interface {chosen} has no address; give it one (`ip address add … dev {chosen}`), or write in "
            "agent.yaml the interface that has"
        )
    return None


def _show(names: list[str]) -> str:
    """Of a machine full of containers, whose interfaces are hundreds, a few."""
    more = ["…"] if len(names) > SHOWN_NAMES else []
    return ", ".join([*names[:SHOWN_NAMES], *more])


def _list(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
