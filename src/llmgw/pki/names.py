"""Which names and addresses a certificate may hold, and how a serial number is written."""

from __future__ import annotations

import ipaddress
import re

from llmgw.errors import UsageError

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MAX_HOST = 253
# What a common name holds at most, by the standard.
MAX_NAME = 64
_HEX = re.compile(r"[0-9a-f]+")
# Numbers of certificates are 160 bits; what is much shorter is a name.
_MIN_SERIAL_DIGITS = 16
_MAX_SERIAL_DIGITS = 40

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def check_name(name: str, what: str) -> str:
    """The name itself, when it can be the common name of a node or a server. UsageError otherwise.

    ``what`` is how the text calls it. Lower case only, for DNS names have no case: Node1 and node1 would be two nodes
    to the server and one to the network.
    """
    if name != name.lower() and _is_dns_name(name.lower()):
        raise UsageError(f"{what} {name!r} has capital letters: write {name.lower()!r}")
    if len(name) > MAX_NAME:
        raise UsageError(f"{what} {name!r} is longer than {MAX_NAME} characters, which is all that a certificate holds")
    if not _is_dns_name(name):
        raise UsageError(
            f"{what} {name!r} is not a host name: a-z, 0-9 and - in parts joined by dots, "
            "each part beginning and ending with a letter or digit"
        )
    if _address(name) is not None or _all_digits(name):
        raise UsageError(f"{what} {name!r} looks like an address: give it a name, and the address with --host")
    if read_serial(name) is not None:
        raise UsageError(f"{what} {name!r} looks like a certificate's serial number: choose another name")
    return name


def is_name(text: str) -> bool:
    """Whether a node or a server could be called so."""
    try:
        check_name(text, "name")
    except UsageError:
        return False
    return True


def read_host(host: str) -> str | Address:
    """What somebody dials, as a certificate holds it: a DNS name in lower case, or an address. UsageError otherwise."""
    text = host.strip()
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    address = _address(bare)
    if address is not None:
        if address.is_unspecified or address.is_multicast or "%" in bare:
            raise UsageError(f"--host {host!r} is an address that nobody can dial: give the one that will be dialled")
        return address
    if "://" in text or "/" in text or re.search(r"[^:]:\d+$", text):
        raise UsageError(f"--host {host!r}: only the name or the address, without a scheme, port or path")
    if not text.isascii():
        raise UsageError(f"--host {host!r} is not ASCII: {_ascii_form(text)}")
    name = text.lower()
    if len(name) > _MAX_HOST or not _is_dns_name(name):
        raise UsageError(
            f"--host {host!r} is neither a host name nor an IP address (each one is written in full, without *)"
        )
    if _all_digits(name.rpartition(".")[2]):
        raise UsageError(f"--host {host!r} is not an IP address, and no host name ends in a number")
    return name


def read_hosts(hosts: tuple[str, ...]) -> tuple[str | Address, ...]:
    """All of them in the order given, each once."""
    return tuple(dict.fromkeys(read_host(host) for host in hosts))


def read_serial(text: str) -> int | None:
    """A serial number as people write it (hex, perhaps with 0x or colons), or None where the text is none."""
    digits = text.strip().lower().removeprefix("0x").replace(":", "")
    if not _MIN_SERIAL_DIGITS <= len(digits) <= _MAX_SERIAL_DIGITS or not _HEX.fullmatch(digits):
        return None
    return int(digits, 16)


def write_serial(serial: int) -> str:
    """In hex, always of the same length, so that tables line up and no name is taken for one."""
    return f"{serial:0{_MAX_SERIAL_DIGITS}x}"


def _is_dns_name(name: str) -> bool:
    return all(_LABEL.fullmatch(label) for label in name.split("."))


def _all_digits(text: str) -> bool:
    return text.isascii() and text.replace(".", "").isdigit()


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _ascii_form(text: str) -> str:
    try:
        return f"write {text.encode('idna').decode()!r}"
    except UnicodeError:
        return "write its xn-- form"
