"""Where a source may point, and where nobody is led."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from llmgw.errors import ConfigError
from llmgw.host.weights.errors import Broken, FetchFailed, Kind
from llmgw.host.weights.sources.asker import Asker
from llmgw.host.weights.sources.redirects import (
    Place,
    Proxies,
    check_allowed,
    check_dialled,
    choose_next,
    find_places,
    is_same_origin,
    read_place,
    read_proxies,
)

NAMES = {
    "hub.example": ["203.0.113.7"],
    "cdn.example": ["203.0.113.8", "2001:db8::8"],
    "sly.example": ["203.0.113.9", "127.0.0.1"],
    "cloud.example": ["169.254.169.254"],
    "mine.example": ["127.0.0.1"],
}


class Names(trio.abc.HostnameResolver):
    """A resolver that knows the names above."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def getaddrinfo(self, host: Any, port: Any, *_: Any, **__: Any) -> Any:
        await trio.lowlevel.checkpoint()
        name = host.decode() if isinstance(host, bytes) else host
        self.asked.append(name)
        if name == "slow.example":
            await trio.sleep_forever()
        if name == "again.example":
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        if name not in NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in text else socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, port))
            for text in NAMES[name]
        ]

    async def getnameinfo(self, sockaddr: Any, flags: Any) -> Any:
        raise OSError


@pytest.fixture
async def names() -> Any:
    found = Names()
    trio.socket.set_custom_hostname_resolver(found)
    yield found
    trio.socket.set_custom_hostname_resolver(None)


async def follow(
    location: str, *, start: str = "https://hub.example/x", proxies: Proxies | None = None, at: Place | None = None
) -> str:
    allowed = frozenset() if at is None else frozenset({at})
    found = await choose_next(httpx.URL(start), location, allowed=allowed, proxies=proxies or Proxies(), wait_seconds=1)
    return str(found)


async def refused(location: str, **options: Any) -> str:
    with pytest.raises(FetchFailed) as raised:
        await follow(location, **options)
    assert raised.value.kind is Kind.REFUSED
    assert "secret" not in str(raised.value)
    return raised.value.message


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("127.0.0.1", Place.OWN),
        ("127.8.9.1", Place.OWN),
        ("127.1", Place.OWN),
        ("2130706433", Place.OWN),
        ("0x7f000001", Place.OWN),
        ("0.0.0.0", Place.OWN),
        ("0.1.2.3", Place.OWN),
        ("::1", Place.OWN),
        ("::", Place.OWN),
        ("::ffff:127.0.0.1", Place.OWN),
        ("64:ff9b::7f00:1", Place.OWN),
        ("localhost", Place.OWN),
        ("LOCALHOST.", Place.OWN),
        ("x.localhost", Place.OWN),
        ("169.254.1.1", Place.LINK),
        ("fe80::1", Place.LINK),
        ("fe80::1%eth0", Place.LINK),
        ("169.254.169.254", Place.METADATA),
        ("::ffff:169.254.169.254", Place.METADATA),
        ("fd00:ec2::254", Place.METADATA),
        ("100.100.100.200", Place.METADATA),
        ("192.0.0.192", Place.METADATA),
        ("fd00:ec2::23", Place.METADATA),
        ("fd20:ce::254", Place.METADATA),
        ("fd00:42::42", Place.METADATA),
        ("metadata.google.internal", Place.METADATA),
        ("metadata.goog", Place.METADATA),
        # A network's own translator, by prefixes of 96, 64, 56 and 48 bits.
        ("64:ff9b:1::a9fe:a9fe", Place.METADATA),
        ("64:ff9b:1:2:a9:fea9:fe00:0", Place.METADATA),
        ("64:ff9b:1:2a9:fe:a9fe::", Place.METADATA),
        ("64:ff9b:1:a9fe:a9:fe00::", Place.METADATA),
        ("64:ff9b:1:2:3::7f00:1", Place.OWN),
        ("64:ff9b:1::a9fe:101", Place.LINK),
        ("64:ff9b:1::cb00:7107", None),
        ("64:ff9b:1:2:cb:71:700:0", None),
        ("64:ff9b:1:2cb:0:7107::", None),
        ("64:ff9b:1:cb00:71:700::", None),
        ("10.0.0.1", None),
        ("192.168.1.1", None),
        ("203.0.113.7", None),
        ("2001:db8::8", None),
        ("hub.example", None),
    ],
)
def test_an_address_says_where_it_is(host: str, place: Place | None) -> None:
    assert read_place(host) is place


async def test_a_redirect_to_another_host_is_followed(names: Names) -> None:
    assert await follow("https://cdn.example/y?secret") == "https://cdn.example/y?secret"


async def test_a_redirect_on_the_same_host_asks_nobody(names: Names) -> None:
    assert await follow("/y") == "https://hub.example/y"
    assert names.asked == []


@pytest.mark.parametrize(
    "location",
    [
        "https://127.0.0.1/y?secret",
        "https://[::1]/y",
        "https://localhost:9200/",
        "https://0/",
        "https://169.254.169.254/latest/meta-data",
        "https://[::ffff:a9fe:a9fe]/",
        "https://sly.example/y",
        "https://cloud.example/",
    ],
)
async def test_no_redirect_leads_to_what_only_this_machine_reaches(names: Names, location: str) -> None:
    assert "not followed" in await refused(location)


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("http://cdn.example/y?secret", "without TLS"),
        ("http://hub.example/y", "without TLS"),
        ("ftp://cdn.example/y", "ftp:"),
        ("file:///etc/shadow", "file:"),
        ("https://user:secret@cdn.example/y", "with a name and password"),
        ("https://cdn.example:99999/", "a port that nobody has"),
        ("https://[::/y", "no address"),
    ],
)
async def test_what_is_not_followed_says_why(names: Names, location: str, words: str) -> None:
    assert words in await refused(location)


@pytest.mark.parametrize(
    ("location", "remedy"),
    [
        ("https://127.0.0.1/y", "name the last address itself as the source"),
        ("http://cdn.example/y", "name the last address itself as the source"),
        ("https://user:secret@cdn.example/y", "name an address that the file has without one"),
        ("file:///etc/shadow", "see what hub.example answers"),
        ("gopher:///y", "see what hub.example answers"),
        ("https://cdn.example:99999/", "see what hub.example answers"),
        ("https://[::/y", "see what hub.example answers"),
    ],
)
async def test_only_what_can_be_a_source_is_to_be_named_as_one(names: Names, location: str, remedy: str) -> None:
    with pytest.raises(FetchFailed) as raised:
        await follow(location)
    assert remedy in str(raised.value.remedy)
    assert "secret" not in f"{raised.value.message} {raised.value.remedy}"


async def test_a_source_on_this_machine_may_lead_about_on_it(names: Names) -> None:
    for target in ("http://127.0.0.1:2/y", "http://sly.example/y"):
        assert await follow(target, start="http://mine.example:1/x", at=Place.OWN) == target
    # (by where it was when it was asked, and not by what its name says now)
    assert "this machine's own" in await refused("http://127.0.0.1:2/y", start="http://mine.example:1/x")


async def test_but_not_to_a_clouds_metadata(names: Names) -> None:
    assert "metadata" in await refused("http://169.254.169.254/", start="http://127.0.0.1/x", at=Place.OWN)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "fe80::1%eth0", "169.254.169.254", "64:ff9b:1::a9fe:a9fe"])
def test_who_is_led_somewhere_is_connected_to_no_such_place(address: str) -> None:
    with pytest.raises(FetchFailed, match=r"leads to sly\.example, .* address: not followed") as raised:
        check_dialled(frozenset(), "sly.example", address)
    assert raised.value.kind is Kind.REFUSED
    check_dialled(frozenset(Place), "sly.example", address)
    check_dialled(frozenset(), "sly.example", "203.0.113.9")


async def test_behind_a_proxy_names_are_the_proxys_and_addresses_still_refused(names: Names) -> None:
    proxies = Proxies(https="http://proxy.example:3128")
    assert await follow("https://unknown.example/y", proxies=proxies) == "https://unknown.example/y"
    assert names.asked == []
    assert "this machine's own" in await refused("https://127.0.0.1/y", proxies=proxies)


async def test_a_name_that_nobody_has_is_told_as_such(names: Names) -> None:
    with pytest.raises(FetchFailed, match=r"no host of the name unknown\.example") as raised:
        await follow("https://unknown.example/y")
    assert raised.value.kind is Kind.DNS


async def test_a_resolver_that_is_in_trouble_may_be_asked_again(names: Names) -> None:
    with pytest.raises(Broken) as raised:
        await follow("https://again.example/y")
    assert raised.value.give_up().kind is Kind.DNS


async def test_a_resolver_that_says_nothing_is_not_waited_for(
    names: Names, autojump_clock: trio.testing.MockClock
) -> None:
    with pytest.raises(Broken, match=r"slow\.example") as raised:
        await find_places("slow.example", 443, wait_seconds=10)
    assert raised.value.kind is Kind.DNS
    assert trio.current_time() == pytest.approx(10)


@pytest.mark.parametrize(
    "allowed",
    ["models.internal", "MODELS.internal", "*.internal", "models.internal:8080", "other.example, models.internal"],
)
def test_a_host_that_is_allowed(allowed: str) -> None:
    check_allowed(httpx.URL("http://models.internal:8080/x"), tuple(allowed.split(", ")))


def test_without_a_list_all_hosts_are_allowed() -> None:
    check_allowed(httpx.URL("http://models.internal/x"), ())


def test_an_address_of_two_colons_may_be_allowed() -> None:
    check_allowed(httpx.URL("http://[2001:db8::8]:81/x"), ("[2001:db8::8]:81",))
    check_allowed(httpx.URL("http://[2001:db8::8]:81/x"), ("2001:db8::8",))


@pytest.mark.parametrize("allowed", ["internal", "*.models.internal", "models.internal:80", "xmodels.internal"])
def test_a_host_that_is_not_allowed_is_named(allowed: str) -> None:
    with pytest.raises(FetchFailed, match=r"models\.internal is not among") as raised:
        check_allowed(httpx.URL("http://models.internal:8080/x"), (allowed,))
    assert raised.value.kind is Kind.REFUSED
    assert "weights.allow_hosts in agent.yaml, which has" in (raised.value.remedy or "")
    with pytest.raises(FetchFailed) as raised:
        check_allowed(httpx.URL("http://models.internal:8080/x"), (allowed,), Asker(file="node.yaml"))
    assert "weights.allow_hosts in node.yaml, which has" in (raised.value.remedy or "")


def test_a_port_that_is_no_port_allows_nothing() -> None:
    with pytest.raises(FetchFailed):
        check_allowed(httpx.URL("http://models.internal:8080/x"), ("models.internal:" + "9" * 5000,))


def test_an_origin_is_a_scheme_a_host_and_a_port() -> None:
    url = httpx.URL("https://hub.example/a")
    assert is_same_origin(url, httpx.URL("https://HUB.example:443/b"))
    for other in ("http://hub.example", "https://hub.example:444", "https://cdn.hub.example", "http://hub.example:443"):
        assert not is_same_origin(url, httpx.URL(other))


def test_proxies_are_read_as_others_read_them() -> None:
    proxies = read_proxies(
        {"HTTPS_PROXY": "proxy:3128", "http_proxy": "http://p2:1", "NO_PROXY": "models.internal,.lan"}
    )
    assert proxies.find(httpx.URL("https://hub.example/x")) == "http://proxy:3128"
    assert proxies.find(httpx.URL("http://hub.example/x")) == "http://p2:1"
    assert proxies.find(httpx.URL("https://models.internal:8080/x")) is None
    assert proxies.find(httpx.URL("http://a.lan/x")) is None
    for own in ("http://localhost:8080/x", "http://127.0.0.1/x", "https://[::1]/x"):
        assert proxies.find(httpx.URL(own)) is None
    assert read_proxies({"NO_PROXY": "*", "HTTPS_PROXY": "http://p:1"}).find(httpx.URL("https://hub.example")) is None
    assert read_proxies({}).find(httpx.URL("https://hub.example")) is None


def test_a_proxy_that_nobody_here_can_speak_to_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match="HTTPS_PROXY") as raised:
        read_proxies({"HTTPS_PROXY": "socks5://me:secret@proxy:1080"})
    assert "secret" not in str(raised.value)
    assert "secret" not in repr(read_proxies({"HTTPS_PROXY": "http://me:secret@proxy:1080"}))
