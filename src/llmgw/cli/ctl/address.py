"""Where the operator port is: said, or read out of server.yaml as far as that can be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from llmgw.config.paths import expand_home
from llmgw.errors import ConfigError, UsageError

SYSTEM_FILE = Path("/etc/llmgw/server.yaml")
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 9090
# An address to listen on that stands for all of the machine's is reached at loopback.
_ALL = {"", "0.0.0.0", "::"}  # noqa: S104 - nobody binds to it here


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The port, and who said so, for when nothing answers there."""

    host: str
    port: int
    source: str

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


def find_address(
    server: str | None, config: Path | None, *, environ: Mapping[str, str], system_file: Path = SYSTEM_FILE
) -> Address:
    """What --server says, else LLMGW_ADMIN, else admin_listen of server.yaml, else the default."""
    if server is not None:
        return _read(server, "--server")
    if named := environ.get("LLMGW_ADMIN"):
        return _read(named, "LLMGW_ADMIN")
    named_file = environ.get("LLMGW_CONFIG")
    file = config or (Path(expand_home(named_file)) if named_file else system_file)
    default = Address(host=DEFAULT_HOST, port=DEFAULT_PORT, source="the default")
    try:
        listen = _admin_listen(file) if config or file.exists() else None
    except ConfigError as error:
        if config:
            raise
        # It may be the server's secret, or half written: its operator port is where most are all the same.
        return Address(host=DEFAULT_HOST, port=DEFAULT_PORT, source=f"the default, for {error.message}")
    except OSError:
        return default
    return _read(listen, f"admin_listen of {file}") if listen else default


def _admin_listen(file: Path) -> str | None:
    from llmgw.config.document import read_document

    return read_document(file)[0].text("admin_listen", None)


def _read(text: str, source: str) -> Address:
    """``http://host:port``, ``host:port``, ``:port`` or ``host``."""
    scheme, mark, rest = text.strip().partition("://")
    if not mark:
        scheme, rest = "http", scheme
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise UsageError(f"{source}: {text!r} is no address; write it as http://127.0.0.1:9090") from None
    odd = not rest.isprintable() or " " in rest
    if scheme != "http" or parts.path not in {"", "/"} or parts.query or "@" in rest or not rest or odd:
        raise UsageError(f"{source}: {text!r} is no address of an operator port; write it as http://127.0.0.1:9090")
    port = port if port is not None else 80 if mark else DEFAULT_PORT
    if port == 0:
        raise UsageError(
            f"{source}: port 0 is any free one: the server's log says which it took; name it with --server"
        )
    return Address(host=DEFAULT_HOST if host in _ALL else host, port=port, source=source)
