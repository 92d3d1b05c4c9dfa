"""Where a fetch may go: which hosts a source may name, where a redirect may lead, and which way leads there.

A definition may name any host, and that host may answer with any other; the second must not be a way to ask what only
this machine can reach: its own services, and those that give away a cloud machine's identity.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import httpx
import trio

from llmgw.errors import ConfigError, Problem
from llmgw.host.weights.errors import Broken, FetchFailed, Kind
from llmgw.host.weights.sources.asker import AGENT, Asker
from llmgw.units import printable

MAX_REDIRECTS = 10
MAX_PORT = 65535
_REFUSED_REMEDY = "name the last address itself as the source"
SCHEMES = ("http", "https")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
        "fd00:42::42",
    )
)
_METADATA_NAMES = frozenset({"metadata.google.internal", "metadata.goog", "metadata", "instance-data"})
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_OWN_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")
_HERE = ipaddress.IPv4Network("0.0.0.0/8")
# Answers of a resolver that another moment may change; any other says that there is no such name.
_AGAIN = frozenset({socket.EAI_AGAIN, socket.EAI_SYSTEM, socket.EAI_MEMORY})


class Place(StrEnum):
    """Where nobody is led to who did not ask for it."""

    OWN = "this machine's own"
    LINK = "a link-local"
    METADATA = "a cloud's metadata"


def find_place(address: _Address) -> Place | None:
    """None: an address like any other."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return find_place(inner)
        if address in _OWN_NAT64:
            return _find_place_behind(int(address))
        address = ipaddress.IPv6Address(int(address))
    if address in _METADATA:
        return Place.METADATA
    # All of 0.0.0.0/8 reaches this machine on some systems.
    if address.is_loopback or address.is_unspecified or address in _HERE:
        return Place.OWN
    return Place.LINK if address.is_link_local else None


def _find_place_behind(address: int) -> Place | None:
    """The same for an address of a network's own translator. Which of its bits are the address behind it depends on how
    long that translator's prefix is, which nobody here knows: one way to read it is enough."""
    # Prefixes of 96, 64, 56 and 48 bits. The bits from 64 to 71 belong to neither.
    upper, lower = address >> 64, address & 0xFFFFFFFFFFFFFF
    read = (lower & 0xFFFFFFFF, lower >> 24, (upper & 0xFF) << 24 | lower >> 32, (upper & 0xFFFF) << 16 | lower >> 40)
    # (read by a prefix of another length than it has, any address may begin with zeros)
    inner = [found for each in read if (found := ipaddress.IPv4Address(each)) not in _HERE]
    places = {find_place(each) for each in inner}
    return next((place for place in (Place.METADATA, Place.OWN, Place.LINK) if place in places), None)


def read_place(host: str) -> Place | None:
    """The same by what is written, without asking anybody."""
    host = host.rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return Place.OWN
    if host in _METADATA_NAMES:
        return Place.METADATA
    try:
        return find_place(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        # 127.1, 0x7f000001 and 2130706433 are addresses too.
        return find_place(ipaddress.IPv4Address(socket.inet_aton(host)))
    except (OSError, UnicodeError):
        return None


def is_own(host: str) -> bool:
    """What is sent to it does not leave this machine."""
    return read_place(host) is Place.OWN


async def find_places(host: str, port: int, *, wait_seconds: float) -> frozenset[Place]:
    """What this host is, by all addresses that its name has."""
    if (place := read_place(host)) is not None:
        return frozenset({place})
    try:
        with trio.fail_after(wait_seconds):
            found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except trio.TooSlowError:
        raise Broken(f"nobody says which address {host} has", kind=Kind.DNS, remedy=DNS_REMEDY) from None
    except (socket.gaierror, UnicodeError) as error:
        raise name_dns(host, error) from None
    addresses = (ipaddress.ip_address(str(place[4][0])) for place in found)
    return frozenset(place for address in addresses if (place := find_place(address)) is not None)


DNS_REMEDY = "check the name in the source, and this machine's resolver (getent hosts NAME)"


def name_dns(host: str, error: Exception) -> FetchFailed | Broken:
    if isinstance(error, socket.gaierror) and error.errno in _AGAIN:
        return Broken(f"the name {host} can't be looked up at the moment", 1.0, kind=Kind.DNS, remedy=DNS_REMEDY)
    return FetchFailed(f"there is no host of the name {host}", Kind.DNS, remedy=DNS_REMEDY)


def check_dialled(allowed: frozenset[Place], host: str, address: str) -> None:
    """Whether who was led to ``host`` may be connected to ``address``: FetchFailed where it is in a place that is not
    ``allowed``. A name may have another address by now than it had when it was looked at."""
    place = find_place(ipaddress.ip_address(address))
    if place is not None and place not in allowed:
        raise FetchFailed(
            f"a redirect leads to {host}, {place} address: not followed", Kind.REFUSED, remedy=_REFUSED_REMEDY
        )


def check_allowed(url: httpx.URL, allow_hosts: tuple[str, ...], asker: Asker = AGENT) -> None:
    """Whether a source may name this host: FetchFailed where it may not."""
    if not allow_hosts or any(_matches(url, allowed.lower()) for allowed in allow_hosts):
        return
    raise FetchFailed(
        f"{url.host} is not among the hosts that weights may come from",
        Kind.REFUSED,
        remedy=f"add it to {asker.allowed_key}, which has {', '.join(allow_hosts)}",
    )


def _matches(url: httpx.URL, allowed: str) -> bool:
    host = url.host.rstrip(".").lower()
    name, colon, port = allowed.rpartition(":")
    if colon and port.isdecimal() and (":" not in name or name.endswith("]")):
        if port.lstrip("0") != str(port_of(url)):
            return False
        allowed = name
    allowed = allowed.strip("[]").rstrip(".")
    return host.endswith(allowed[1:]) if allowed.startswith("*.") else host == allowed


def port_of(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def is_same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    """Who may read a secret that was meant for the other."""
    return (one.scheme, one.host, port_of(one)) == (other.scheme, other.host, port_of(other))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxies:
    """What the environment says of proxies: addresses, which may hold a password, and ``bypass``, as in NO_PROXY."""

    http: str | None = field(default=None, repr=False)
    https: str | None = field(default=None, repr=False)
    bypass: str = ""

    def find(self, url: httpx.URL) -> str | None:
        """The proxy that leads there; None: none does."""
        proxy = self.https if url.scheme == "https" else self.http
        # (a proxy would look for itself there, and be told what does not leave this machine otherwise)
        if (
            proxy is None
            or is_own(url.host)
            or urllib.request.proxy_bypass_environment(  # type: ignore[attr-defined]
                f"{url.host}:{port_of(url)}", {"no": self.bypass}
            )
        ):
            return None
        return proxy


def read_proxies(environ: Mapping[str, str]) -> Proxies:
    """ConfigError where one is no address of a proxy that can be spoken to."""

    def read(name: str) -> str | None:
        told = environ.get(name.lower()) or environ.get(name)
        if not told:
            return None
        told = told if "://" in told else f"http://{told}"
        if read_web_address(told) is None:
            raise ConfigError([Problem(key=name, message="is no address of a proxy: write http://host:port")])
        return told

    bypass = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    return Proxies(http=read("HTTP_PROXY"), https=read("HTTPS_PROXY"), bypass=bypass)


def read_web_address(text: str) -> httpx.URL | None:
    """None: it is no address of a web server."""
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, UnicodeError):
        return None
    return url if url.scheme in SCHEMES and url.host and port_of(url) <= MAX_PORT else None


async def choose_next(
    url: httpx.URL, location: str, *, allowed: frozenset[Place], proxies: Proxies, wait_seconds: float
) -> httpx.URL:
    """Where ``url`` leads on: FetchFailed where we do not follow. ``allowed``: the places where the source itself
    is."""
    try:
        target = url.join(location)
    except (httpx.InvalidURL, UnicodeError):
        raise _refuse(url, "something that is no address", remedy=_astray(url)) from None
    if target.scheme not in SCHEMES:
        raise _refuse(url, f"{printable(target.scheme)}:, which nobody here speaks", remedy=_astray(url))
    if not target.host:
        raise _refuse(url, "an address without a host", remedy=_astray(url))
    if port_of(target) > MAX_PORT:
        raise _refuse(url, "a port that nobody has", remedy=_astray(url))
    if url.scheme == "https" and target.scheme == "http":
        raise _refuse(url, f"{target.host} without TLS, where anybody may change what comes")
    if target.userinfo:
        raise _refuse(
            url, f"{target.host} with a name and password", remedy="name an address that the file has without one"
        )
    if is_same_origin(url, target):
        return target
    # A source that is on this machine may lead about on it.
    if places := await _find_places(target, proxies, wait_seconds) - allowed:
        raise _refuse(url, f"{target.host}, {min(places)} address")
    return target


async def _find_places(url: httpx.URL, proxies: Proxies, wait_seconds: float) -> frozenset[Place]:
    if proxies.find(url) is not None:
        # The proxy looks the name up, maybe by other servers than this machine's, which need not know it at all.
        place = read_place(url.host)
        return frozenset() if place is None else frozenset({place})
    return await find_places(url.host, port_of(url), wait_seconds=wait_seconds)


def name_lost(url: httpx.URL, status: int) -> FetchFailed:
    """An answer that leads on, and does not say where to."""
    return FetchFailed(
        f"{url.host} answers {status} for {printable(url.path)}, which leads on, and does not say where (no Location)",
        Kind.UNSUPPORTED,
        remedy=_astray(url),
    )


def _astray(url: httpx.URL) -> str:
    """What to do where there is no address to be named instead."""
    return f"see what {url.host} answers (curl -I): it is set up wrongly, or something on the way answers in its place"


def _refuse(url: httpx.URL, where: str, *, remedy: str = _REFUSED_REMEDY) -> FetchFailed:
    return FetchFailed(f"{url.host} leads to {where}: not followed", Kind.REFUSED, remedy=remedy)
