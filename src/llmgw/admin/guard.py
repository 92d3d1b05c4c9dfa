"""Who may speak to the operator port: programs of this machine, and pages that came from the port itself.

A web page that somebody opens elsewhere runs in a browser of this machine, and reaches loopback with its requests.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from llmgw.admin.management import Refused


def check_caller(listen_host: str, *, host: str, origin: str | None, fetch_site: str | None) -> None:
    """Refused unless a request with these headers names this port as its host, and no page of elsewhere sent it."""
    if not _is_here(host, listen_host):
        # A name of elsewhere that resolves to loopback would make this port the page's own origin.
        raise Refused(
            "the request's Host is not this machine: ask for the port as 127.0.0.1, localhost or its own address",
            status=403,
            code="wrong_host",
        )
    same_origin = origin is None or origin.lower() == f"http://{host}".lower()
    if not same_origin or fetch_site not in {None, "none", "same-origin"}:
        raise Refused("a page of another site may not use this port", status=403, code="cross_site")


def _is_here(host: str, listen_host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    if name is None or any(mark in host for mark in "@/?#\\"):
        return False
    if name in {"localhost", listen_host.lower()}:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
