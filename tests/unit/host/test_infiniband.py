"""Fabrics, from folders that look like /sys/class/infiniband and /sys/class/net."""

from __future__ import annotations

import pytest

from llmgw.core.node import FabricFound
from llmgw.host.infiniband import read_fabric


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


class Machine:
    """Adapters, interfaces and addresses that a test makes."""

    def __init__(self, root):
        self.adapters, self.interfaces = root / "infiniband", root / "net"
        self.interfaces.mkdir()
        self.addresses = {}

    def adapter(self, name, *states, nets=(), kind="InfiniBand", cable="5: LinkUp"):
        self.adapters.mkdir(exist_ok=True)
        for number, state in enumerate(states, start=1):
            port = self.adapters / name / "ports" / str(number)
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")
            (port / "phys_state").write_text(f"{cable}\n")
            (port / "link_layer").write_text(f"{kind}\n")
        for net in nets:
            (self.adapters / name / "device" / "net" / net).mkdir(parents=True)

    def interface(self, name, address="10.0.0.1", state="up"):
        (self.interfaces / name).mkdir()
        (self.interfaces / name / "operstate").write_text(f"{state}\n")
        self.addresses[name] = address

    def read(self, *hcas, interface=None):
        return read_fabric(
            "ib-a",
            hcas,
            interface,
            adapters=self.adapters,
            interfaces=self.interfaces,
            find_address=self.addresses.get,
        )


def test_a_fabric_that_works_has_the_interface_of_its_adapter_and_an_address(machine):
    machine.adapter("mlx5_0", "4: ACTIVE", nets=["ib0"])
    machine.interface("ib0")
    assert machine.read("mlx5_0") == FabricFound(
        name="ib-a", interface="ib0", address="10.0.0.1", hcas=("mlx5_0",), down=None
    )


def test_adapters_on_ethernet_count_too(machine):
    machine.adapter("mlx5_0", "4: ACTIVE", nets=["eth1"], kind="Ethernet")
    machine.interface("eth1")
    assert machine.read("mlx5_0").down is None


def test_one_active_port_is_enough(machine):
    machine.adapter("mlx4_0", "1: DOWN", "4: ACTIVE", nets=["ib0", "ib1"])
    machine.interface("ib0", address=None)
    machine.interface("ib1")
    found = machine.read("mlx4_0")
    assert (found.interface, found.address, found.down) == ("ib1", "10.0.0.1", None)


def test_what_is_declared_as_interface_is_taken_before_the_adapters_own(machine):
    machine.adapter("mlx5_0", "4: ACTIVE", nets=["ib0"])
    machine.interface("ib0")
    machine.interface("bond0", address="10.0.0.9")
    assert machine.read("mlx5_0", interface="bond0").address == "10.0.0.9"


def test_an_ordinary_interface_alone_is_a_fabric(machine):
    machine.interface("eth0")
    assert machine.read(interface="eth0") == FabricFound(name="ib-a", interface="eth0", address="10.0.0.1")


def test_an_adapter_that_is_missing_takes_the_fabric_out_of_service(machine):
    assert "the adapter mlx5_0 is not there; there is none: is its driver loaded" in machine.read("mlx5_0").down
    machine.adapter("mlx5_0", "4: ACTIVE", nets=["ib0"])
    machine.interface("ib0")
    down = machine.read("mlx5_0", "mlx5_1").down
    assert down == "the adapter mlx5_1 is not there; there is mlx5_0; `ibv_devices` (rdma-core) lists them"


def test_all_adapters_have_to_be_up_and_the_one_that_is_not_is_named(machine):
    machine.adapter("mlx5_0", "4: ACTIVE", nets=["ib0"])
    machine.adapter("mlx5_1", "2: INIT")
    machine.interface("ib0")
    down = machine.read("mlx5_0", "mlx5_1").down
    assert down.startswith("port 1 of mlx5_1 is INIT: ")


@pytest.mark.parametrize(
    ("state", "kind", "cable", "said"),
    [
        ("2: INIT", "InfiniBand", "5: LinkUp", "is INIT: its cable is in, and no subnet manager has set it up"),
        ("3: ARMED", "InfiniBand", "5: LinkUp", "is ARMED: its cable is in, and no subnet manager has set it up"),
        ("1: DOWN", "InfiniBand", "2: Polling", "is DOWN, and nothing answers at the other end; look at its cable"),
        ("1: DOWN", "Ethernet", "3: Disabled", "is DOWN, for it is switched off; switch it on"),
        ("1: DOWN", "Ethernet", "", "is DOWN; bring its interface up"),
        ("1: DOWN", "InfiniBand", "", "is DOWN; look at its cable, the switch and the subnet manager"),
        ("", "InfiniBand", "", "is in a state that can not be read; look at its cable"),
    ],
)
def test_a_port_that_is_not_active_is_told_with_what_to_do(machine, state, kind, cable, said):
    machine.adapter("mlx5_0", state, nets=["ib0"], kind=kind, cable=cable)
    machine.interface("ib0")
    assert f"port 1 of mlx5_0 {said}" in machine.read("mlx5_0").down


def test_of_two_ports_the_one_that_is_nearly_up_is_told(machine):
    machine.adapter("mlx4_0", "1: DOWN", "2: INIT", nets=["ib0"])
    assert machine.read("mlx4_0").down.startswith("port 2 of mlx4_0 is INIT")


def test_an_adapter_without_ports_is_told(machine):
    machine.adapter("mlx5_0", nets=["ib0"])
    assert machine.read("mlx5_0").down.startswith("the adapter mlx5_0 shows no port")


@pytest.mark.parametrize(
    ("interface", "said"),
    [
        ("ib7", "the interface ib7 is not there; there is ib0, ib1; `ip link` shows them"),
        ("ib0", "the interface ib0 is down; `ip link set dev ib0 up`, or look at its cable"),
        ("ib1", "the interface ib1 has no address; give it one (`ip address add … dev ib1`), or write in agent.yaml"),
    ],
)
def test_an_interface_that_others_can_not_reach_takes_it_out_of_service(machine, interface, said):
    machine.adapter("mlx5_0", "4: ACTIVE")
    machine.interface("ib0", state="down")
    machine.interface("ib1", address=None)
    assert machine.read("mlx5_0", interface=interface).down.startswith(said)


def test_of_hundreds_of_interfaces_a_few_are_told(machine):
    for number in range(300):
        machine.interface(f"veth{number:03}")
    down = machine.read(interface="ib0").down
    assert down.endswith("veth018, veth019, …; `ip link` shows them")


def test_an_adapter_without_an_interface_is_told(machine):
    machine.adapter("mlx5_0", "4: ACTIVE")
    found = machine.read("mlx5_0")
    assert (found.interface, found.address) == (None, None)
    assert found.down.startswith("mlx5_0 has no network interface; load ib_ipoib")


def test_a_machine_without_any_of_it_has_none_of_its_fabrics():
    found = read_fabric("ib-a", ("no_such_adapter",))
    assert (found.interface, found.address) == (None, None)
    assert "no_such_adapter is not there" in found.down
    assert read_fabric("eth", interface="lo").address == "127.0.0.1"
