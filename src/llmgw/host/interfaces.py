"""Network interfaces of this machine: whether one is up, and the address that others reach it at."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

NET = Path("/sys/class/net")
IF_INET6 = Path("/proc/net/if_inet6")

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16
_ADDRESS_AT = 20
_REQUEST_BYTES = 256
# Of /proc/net/if_inet6: an address that reaches no further than its own cable, and means nothing without its interface.
_LINK_LOCAL = 0x20
# There is no such interface, or none with such an address.
_ABSENT = frozenset({errno.ENODEV, errno.ENXIO, errno.EADDRNOTAVAIL})


def find_address(interface: str, if_inet6: Path = IF_INET6) -> str | None:
    """Its first IPv4 address, else its first IPv6 one that reaches further than its link; None when it has neither, or
    is not there. OSError for what the kernel refuses besides."""
    return _find_ipv4(interface) or _find_ipv6(interface, if_inet6)


def _find_ipv4(interface: str) -> str | None:
    name = interface.encode()
    if len(name) >= _NAME_BYTES:
        return None
    request = struct.pack(f"{_NAME_BYTES}sH{_REQUEST_BYTES - _NAME_BYTES - 2}x", name, socket.AF_INET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
        try:
            reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise
    return socket.inet_ntoa(reply[_ADDRESS_AT : _ADDRESS_AT + 4])


def _find_ipv6(interface: str, if_inet6: Path) -> str | None:
    try:
        lines = if_inet6.read_text(encoding="ascii").splitlines()
    except OSError:
        # a kernel without IPv6
        return None
    for line in lines:
        address, _, _, scope, _, name = line.split()
        if name == interface and int(scope, 16) != _LINK_LOCAL:
            return str(ipaddress.IPv6Address(bytes.fromhex(address)))
    return None


def is_down(interface: str, net: Path = NET) -> bool:
    """Whether nothing comes through: it is switched off, or its cable is out. One that does not say is taken for up."""
    try:
        return (net / interface / "operstate").read_text(encoding="ascii").strip() in {"down", "lowerlayerdown"}
    except OSError:
        return False
