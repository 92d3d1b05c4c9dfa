"""Interfaces of this machine, and files that look like the kernel's."""

from __future__ import annotations

import pytest

from llmgw.host.interfaces import find_address, is_down

# From /proc/net/if_inet6: a link-local address is first, as the kernel has them in no order.
IF_INET6 = (
    "fe800000000000000202c9fffe000001 03 40 20 80 ib0\n"
    "fd000000000000000000000000000007 03 40 00 80 ib0\n"
    "fe800000000000000202c9fffe000002 04 40 20 80 ib1\n"
)


def test_the_loopback_has_its_address():
    assert find_address("lo") == "127.0.0.1"


@pytest.mark.parametrize("name", ["nope0", "a-name-longer-than-any"])
def test_an_interface_that_is_not_there_has_none(tmp_path, name):
    assert find_address(name, tmp_path / "none") is None


def test_without_an_ipv4_address_it_is_an_ipv6_one_that_others_reach(tmp_path):
    (tmp_path / "if_inet6").write_text(IF_INET6)
    assert find_address("ib0", tmp_path / "if_inet6") == "fd00::7"
    assert find_address("ib1", tmp_path / "if_inet6") is None


@pytest.mark.parametrize(
    ("text", "down"),
    [("up\n", False), ("unknown\n", False), ("down\n", True), ("lowerlayerdown\n", True), (None, False)],
)
def test_an_interface_is_down_when_the_kernel_says_so(tmp_path, text, down):
    if text is not None:
        (tmp_path / "ib0").mkdir()
        (tmp_path / "ib0" / "operstate").write_text(text)
    assert is_down("ib0", tmp_path) is down
