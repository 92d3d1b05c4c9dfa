from __future__ import annotations

import pytest

from llmgw.admin.guard import check_caller
from llmgw.admin.management import Refused


def code(*, host: str = "127.0.0.1:9090", origin: str | None = None, fetch_site: str | None = None) -> str | None:
    return code_of_all(
        hosts=[host],
        origins=[] if origin is None else [origin],
        fetch_sites=[] if fetch_site is None else [fetch_site],
    )


def code_of_all(*, hosts: list[str], origins: list[str], fetch_sites: list[str]) -> str | None:
    try:
        check_caller("127.0.0.2", hosts=hosts, origins=origins, fetch_sites=fetch_sites)
    except Refused as refused:
        return refused.code if refused.status == 403 else str(refused.status)
    return None


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:9090", "127.0.0.1", "localhost:9090", "LocalHost", "[::1]:9090", "127.0.0.2:9090", "localhost:19090"],
)
def test_this_machine_has_several_names(host: str) -> None:
    assert code(host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example:9090",
        "localhost.evil.example",
        "10.0.0.1:9090",
        "0.0.0.0:9090",
        "user@localhost",
        "evil.example#@localhost",
        "localhost/x",
        "[::1",
        "[nonsense]:9090",
        "[::1]evil.com",
        "[::1]:9090evil.com",
        "evil.com[::1]",
        "[localhost]",
        "localhost:evil",
        "localhost:",
        "localhost:90:90",
        "localhost:9090\n",
        "localhost ",
        "[::1%evil]",
        "127.0.0.1,evil.com",
    ],
)
def test_a_name_of_elsewhere_is_refused(host: str) -> None:
    assert code(host=host) == "wrong_host"


def test_a_port_that_listens_on_a_name_may_be_called_by_it() -> None:
    check_caller("gw.internal", hosts=["GW.internal:9090"], origins=[], fetch_sites=[])


def test_headers_that_come_twice_all_count() -> None:
    here = {"hosts": ["localhost"], "origins": ["http://localhost"], "fetch_sites": ["same-origin"]}
    assert code_of_all(**here) is None
    assert code_of_all(**{**here, "hosts": ["localhost", "evil.com"]}) == "wrong_host"
    assert code_of_all(**{**here, "hosts": ["localhost", "localhost"]}) == "wrong_host"
    assert code_of_all(**{**here, "hosts": []}) == "wrong_host"
    assert code_of_all(**{**here, "origins": ["http://localhost", "http://evil.com"]}) == "cross_site"
    assert code_of_all(**{**here, "fetch_sites": ["same-origin", "cross-site"]}) == "cross_site"


@pytest.mark.parametrize("fetch_site", ["none", "same-origin"])
def test_a_page_of_this_port_may_use_it(fetch_site: str) -> None:
    assert code(origin="http://127.0.0.1:9090", fetch_site=fetch_site) is None
    assert code(fetch_site=fetch_site) is None


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://127.0.0.1:3000", "https://127.0.0.1:9090", "null", ""]
)
def test_a_page_of_anywhere_else_may_not(origin: str) -> None:
    assert code(origin=origin) == "cross_site"


@pytest.mark.parametrize("fetch_site", ["cross-site", "same-site", ""])
def test_a_browser_that_says_where_its_page_is_from_is_believed(fetch_site: str) -> None:
    assert code(fetch_site=fetch_site) == "cross_site"
