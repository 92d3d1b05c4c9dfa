"""Who is connected to a seed port before it has shown whose it is."""

from __future__ import annotations

import pytest

from llmgw.host.weights.strangers import OF_ONE_ADDRESS, PLACES, SAFE_SECONDS, Strangers, name_network


def fill(strangers: Strangers, addresses: int, each: int) -> None:
    for number in range(each):
        for address in range(addresses):
            assert strangers.admit(f"10.0.0.{address}", float(number))[0] is not None


def test_one_address_has_so_many_places_and_its_oldest_give_way() -> None:
    strangers = Strangers()
    first, _ = strangers.admit("10.0.0.1", 0.0)
    for _ in range(OF_ONE_ADDRESS - 1):
        strangers.admit("10.0.0.1", 0.5)
    assert strangers.admit("10.0.0.1", SAFE_SECONDS - 0.1) == (None, None)
    came, evicted = strangers.admit("10.0.0.1", SAFE_SECONDS)
    assert came is not None
    assert evicted is first
    assert evicted is not None
    assert evicted.scope.cancel_called
    assert strangers.admit("10.0.0.1", SAFE_SECONDS) == (None, None)
    strangers.free(came)
    assert strangers.admit("10.0.0.1", SAFE_SECONDS)[1] is None


def test_where_all_places_are_taken_the_address_with_most_gives_way_at_once() -> None:
    strangers = Strangers()
    fill(strangers, PLACES // OF_ONE_ADDRESS, OF_ONE_ADDRESS)
    now = float(OF_ONE_ADDRESS - 1)
    came, evicted = strangers.admit("192.168.0.1", now)
    assert came is not None
    assert evicted is not None
    assert (evicted.address, evicted.since) == ("10.0.0.0", 0.0)


def test_where_all_have_as_many_only_the_oldest_give_way() -> None:
    strangers = Strangers()
    fill(strangers, PLACES, 1)
    assert strangers.admit("192.168.0.1", SAFE_SECONDS - 0.1) == (None, None)
    assert strangers.admit("192.168.0.1", SAFE_SECONDS)[0] is not None


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("fd00:1:2:3:4::5", "fd00:1:2:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("an address that is gone", "an address that is gone"),
    ],
)
def test_of_ipv6_a_network_counts_as_one_address(address: str, network: str) -> None:
    assert name_network(address) == network
