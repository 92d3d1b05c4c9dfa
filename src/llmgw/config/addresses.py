"""Addresses as an operator writes them: what a server listens on, and where an agent finds it."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

from llmgw.config.agent import ServerAddress
from llmgw.config.document import Section
from llmgw.config.server import Listen

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII | re.IGNORECASE)
# The longest common name that a certificate can hold.
MAX_NODE = 64
MAX_HOST = 253
SERVER_EXAMPLE = "write it as https://HOST:7443"


def is_loopback(host: str) -> bool | None:
    """Whether only this machine can reach an address; None when it is no address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return None


def read_listen(section: Section, key: str, default: Listen) -> Listen:
    """An address and a port to listen on: ``127.0.0.1:8080``, ``[::1]:8080``, or ``:8080`` for all addresses."""
    text = section.text(key, None)
    if text is None:
        return default
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        section.wrong(key, f"{text!r} has no port at its end; write it as {show_listen(default)}")
        return default
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        section.wrong(key, f"{text!r}: an IPv6 address stands in brackets; write it as [{host}]:{port}")
        return default
    if host == "localhost":
        host = "127.0.0.1"
    elif host and is_loopback(host) is None:
        section.wrong(key, f"{host!r} is not an IP address; write it as {show_listen(default)}")
        return default
    return Listen(host=host, port=int(port))


def show_listen(listen: Listen) -> str:
    """As it is written."""
    return f"[{listen.host}]:{listen.port}" if ":" in listen.host else f"{listen.host}:{listen.port}"


def wrong_to_tell(listen: Listen) -> str | None:
    """Why no other machine could use this address if it were told; None when one could."""
    shown = show_listen(listen)
    if _is_any(listen.host):
        return f"{shown} is all addresses of this machine, and others are told one that they can reach"
    address = ipaddress.ip_address(listen.host)
    if address.is_multicast:
        return f"{shown} is a group's address"
    if isinstance(address, ipaddress.IPv6Address) and address.is_link_local:
        return f"{shown} means something on its own link alone"
    return None


def overlap(one: Listen, other: Listen) -> bool:
    """Whether the two can't be listened on at once."""
    if one.port != other.port or one.port == 0:
        return False
    return one.host == other.host or _is_any(one.host) or _is_any(other.host)


def _is_any(host: str) -> bool:
    return not host or ipaddress.ip_address(host).is_unspecified


def read_server(section: Section, key: str) -> ServerAddress:
    """The agents' port of the server: ``https://HOST:7443``."""
    text = section.required_text(key)
    nowhere = ServerAddress(host="", port=0)
    if not text:
        return nowhere
    try:
        url = urlsplit(text)
        why = _wrong_url(url)
        port = url.port
    except ValueError as error:
        # Some of its errors show the text, some don't say what they are about.
        section.wrong(key, f"{text!r} is not an address ({error}); {SERVER_EXAMPLE}")
        return nowhere
    if why is None and url.hostname and port:
        return ServerAddress(host=url.hostname, port=port)
    section.wrong(key, f"{text!r} {why or 'has no port'}; {SERVER_EXAMPLE}")
    return nowhere


def _wrong_url(url: SplitResult) -> str | None:
    if url.scheme != "https":
        return "does not begin with https://, and agents are spoken to by TLS only"
    if url.username is not None or url.password is not None:
        return "has a user in it, and an agent is known by its certificate"
    if url.path not in {"", "/"} or url.query or url.fragment:
        return "has more than a host and a port"
    if not url.hostname:
        return "has no host"
    return wrong_host(url.hostname)


def wrong_host(host: str) -> str | None:
    """Why this can't be a machine's name or IP address; None when it can."""
    if is_loopback(host) is not None:
        return None
    if len(host) > MAX_HOST or not all(map(_LABEL.fullmatch, host.split("."))):
        return f"has {host!r} for a host, which is neither a DNS name nor an IP address"
    return None


def wrong_node(name: str) -> str | None:
    """Why this can't be a node's name, which is the common name of its certificate too; None when it can."""
    if len(name) > MAX_NODE:
        return f"is longer than {MAX_NODE} characters"
    if is_loopback(name) is not None and name != "localhost":
        return f"{name!r} is an address; give the node a name"
    if name != name.lower() or not all(map(_LABEL.fullmatch, name.split("."))):
        return f"{name!r} is not a DNS name in lower case: letters, digits and -, and dots between such labels"
    return None
