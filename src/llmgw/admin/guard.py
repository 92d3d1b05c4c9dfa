"""Who may speak to the operator port: programs of this machine, and pages that came from the port itself.

A web page that somebody opens elsewhere runs in a browser of this machine, and reaches loopback with its requests.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from llmgw.admin.management import Refused

# All of it: a lenient reader would take what it knows and skip what an attacker has put behind.
_HOST = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]+)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::[0-9]{1,5})?", re.ASCII)


def check_caller(listen_host: str, *, hosts: Sequence[str], origins: Sequence[str], fetch_sites: Sequence[str]) -> None:
    """Refused unless a request with these headers names this port as its host, and no page of elsewhere sent it.

    All values that each of the headers has: of two that differ nobody knows which is meant.
    """
    host = hosts[0] if len(hosts) == 1 else ""
    if not _is_here(host, listen_host):
        # A name of elsewhere that resolves to loopback would make this port the page's own origin.
        raise Refused(
            "the request's Host is not this machine: ask for the port as 127.0.0.1, localhost or its own address",
            status=403,
            code="wrong_host",
        )
    same_origin = all(origin.lower() == f"http://{host}".lower() for origin in origins)
    if not same_origin or not {"none", "same-origin"}.issuperset(fetch_sites):
        raise Refused("a page of another site may not use this port", status=403, code="cross_site")


def _is_here(host: str, listen_host: str) -> bool:
    written = _HOST.fullmatch(host)
    if written is None:
        return False
    name = (written["name"] or written["address"]).lower()
    if name in {"localhost", listen_host.lower()}:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
