from __future__ import annotations

import ipaddress

import pytest

from llmgw.errors import UsageError
from llmgw.pki.names import check_name, is_name, read_host, read_hosts, read_serial, write_serial


@pytest.mark.parametrize("name", ["node01", "llmgw-ctl", "a", "7", "n1.rack-2.example", "x" * 63, "3com"])
def test_a_host_name_in_lower_case_is_a_name(name: str) -> None:
    if name == "7":
        assert not is_name(name)
    else:
        assert check_name(name, "node name") == name
        assert is_name(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Node01", "write 'node01'"),
        ("", "is not a host name"),
        ("a b", "is not a host name"),
        ("-a", "is not a host name"),
        ("a-", "is not a host name"),
        ("a..b", "is not a host name"),
        ("a.", "is not a host name"),
        ("a_b", "is not a host name"),
        ("knöten", "is not a host name"),
        ("../../etc", "is not a host name"),
        ("a\n", "is not a host name"),
        ("*", "is not a host name"),
        ("x" * 64, "is not a host name"),
        ("x." * 32 + "xx", "longer than 64"),
        ("10.0.0.1", "looks like an address"),
        ("10.0.0", "looks like an address"),
        ("٣", "is not a host name"),
        ("deadbeefdeadbeef", "looks like a certificate's serial number"),
    ],
)
def test_any_other_is_refused_with_what_to_write(name: str, said: str) -> None:
    with pytest.raises(UsageError, match="node name") as caught:
        check_name(name, "node name")
    assert said in caught.value.message
    assert not is_name(name)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("localhost", "localhost"),
        (" Llmgw-Ctl.Internal ", "llmgw-ctl.internal"),
        ("10.0.0.140", ipaddress.ip_address("10.0.0.140")),
        ("::1", ipaddress.ip_address("::1")),
        ("[fd00::2]", ipaddress.ip_address("fd00::2")),
    ],
)
def test_a_host_is_a_name_or_an_address(text: str, host: object) -> None:
    assert read_host(text) == host


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("https://llmgw-ctl", "without a scheme"),
        ("llmgw-ctl:7443", "without a scheme"),
        ("10.0.0.1:7443", "without a scheme"),
        ("[::1]:7443", "without a scheme"),
        ("10.0.0.0/24", "without a scheme"),
        ("0.0.0.0", "nobody can dial"),
        ("::", "nobody can dial"),
        ("224.0.0.1", "nobody can dial"),
        ("fe80::1%eth0", "nobody can dial"),
        ("10.0.0.300", "no host name ends in a number"),
        ("*.internal", "without *"),
        ("", "neither a host name"),
        ("a b", "neither a host name"),
        (".".join(["abcdefgh"] * 40), "neither a host name"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("ü" * 300, "xn-- form"),
    ],
)
def test_what_nobody_can_dial_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match="--host") as caught:
        read_host(text)
    assert said in caught.value.message


def test_a_host_that_is_given_twice_counts_once() -> None:
    assert read_hosts(("b", "A", "b", "a")) == ("b", "a")


def test_a_serial_number_is_read_however_it_is_written() -> None:
    serial = 0x00AB_CDEF_0123_4567_89AB_CDEF
    text = write_serial(serial)
    assert len(text) == 40
    colons = ":".join(text[at : at + 2] for at in range(0, 40, 2))
    for written in (text, text.upper(), f"0x{text}", colons, f" {text} ", f"{serial:x}"):
        assert read_serial(written) == serial


@pytest.mark.parametrize("text", ["", "beef", "node01", "g" * 20, "a" * 41, "-aaaaaaaaaaaaaaaaaaaa", "0x", "a_" * 10])
def test_what_is_no_serial_number_is_none(text: str) -> None:
    assert read_serial(text) is None
