from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.cli.ctl import address
from llmgw.cli.ctl.address import Address, find_address
from llmgw.config import load_server
from llmgw.config.server import ServerConfig
from llmgw.errors import ConfigError, UsageError


def find(
    server: str | None = None, config: Path | None = None, *, file: Path = Path("/none"), **environ: str
) -> Address:
    return find_address(server, config, environ=environ, system_file=file)


def written(folder: Path, text: str) -> Path:
    path = folder / "server.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:9090", "http://127.0.0.1:9090"),
        ("http://gw.internal:9191/", "http://gw.internal:9191"),
        ("http://gw.internal", "http://gw.internal:80"),
        ("gw.internal:9191", "http://gw.internal:9191"),
        ("gw.internal", "http://gw.internal:9090"),
        ("[::1]:9090", "http://[::1]:9090"),
        (":9191", "http://127.0.0.1:9191"),
        ("0.0.0.0:9191", "http://127.0.0.1:9191"),
    ],
)
def test_an_address_may_be_written_in_several_ways(text: str, url: str) -> None:
    assert find(text).url == url


@pytest.mark.parametrize(
    "text",
    [
        "https://gw.internal:9090",
        "http://gw:9090/path",
        "http://gw:9090?x=1",
        "http://gw:port",
        "",
        "a@b:1",
        "gw:70000",
        "http://a b",
        "http://a\tb:1",
        "http://a\x7fb:1",
    ],
)
def test_what_is_no_such_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"--server: .* write it as http://127\.0\.0\.1:9090"):
        find(text)


def test_port_0_is_no_port_to_ask_at(tmp_path: Path) -> None:
    path = written(tmp_path, "admin_listen: 127.0.0.1:0\n")
    with pytest.raises(UsageError, match=r"admin_listen of .*: port 0 is any free one: the server's log says"):
        find(config=path)


def test_what_is_said_last_wins(tmp_path: Path) -> None:
    file = written(tmp_path, "admin_listen: 127.0.0.1:9191\n")
    assert find("here:1", file=file, LLMGW_ADMIN="there:2").source == "--server"
    assert find(file=file, LLMGW_ADMIN="there:2") == Address(host="there", port=2, source="LLMGW_ADMIN")
    assert find(file=file) == Address(host="127.0.0.1", port=9191, source=f"admin_listen of {file}")
    assert find() == Address(host="127.0.0.1", port=9090, source="the default")


def test_a_file_that_is_named_comes_before_the_machines(tmp_path: Path) -> None:
    file = written(tmp_path, "admin_listen: '[::1]:9191'\n")
    assert find(config=file).url == "http://[::1]:9191"
    assert find(LLMGW_CONFIG=str(file)).url == "http://[::1]:9191"


def test_a_file_without_the_key_leaves_the_default(tmp_path: Path) -> None:
    assert find(file=written(tmp_path, "listen: ':8080'\nanything: else\n")).source == "the default"


@pytest.mark.parametrize("text", ["models: [", "- a list\n", "admin_listen: [1]\n"])
def test_a_file_that_is_wrong_holds_nobody_up(tmp_path: Path, text: str) -> None:
    found = find(file=written(tmp_path, text))
    assert found.url == "http://127.0.0.1:9090"
    assert found.source.startswith("the default")


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    assert find(file=tmp_path).source == f"the default, for {tmp_path} can't be read: Is a directory"


def test_a_path_that_can_not_even_be_looked_at_holds_nobody_up() -> None:
    assert find(file=Path("/" + "x" * 5000)).source == "the default"


def test_a_file_that_is_named_and_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        find(config=tmp_path / "none.yaml")


def test_the_defaults_are_the_servers_own() -> None:
    assert address.SYSTEM_FILE == load_server.SYSTEM_FILE
    default = {field.name: field for field in ServerConfig.__dataclass_fields__.values()}["admin_listen"].default
    assert (default.host, default.port) == (address.DEFAULT_HOST, address.DEFAULT_PORT)
