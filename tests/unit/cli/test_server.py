from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.cli.server import serve
from llmgw.config.load_server import LoadedServer
from llmgw.engines.registry import Engine
from llmgw.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A server.yaml with all that is needed."""
    for name in ("ca.pem", "server.pem", "server-key.pem"):
        (tmp_path / name).write_text("pem\n")
        (tmp_path / name).chmod(0o600)
    path = tmp_path / "server.yaml"
    path.write_text(
        f"agent_tls: {{ca: {tmp_path}/ca.pem, cert: {tmp_path}/server.pem, key: {tmp_path}/server-key.pem}}\n"
        "auth: {enabled: false}\n"
        "models: [{name: m, source: /on/the/nodes.toy, max_output: 9, profiles: [{name: a, engine: toy}]}]\n"
    )
    return path


def test_what_was_read_is_handed_over_with_its_file(
    path: Path, engines: dict[str, Engine], capfd: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[LoadedServer, Path]] = []

    def run(loaded: LoadedServer, path: Path) -> None:
        ran.append((loaded, path))

    serve(config=path, environ={}, engines=engines, run=run)
    serve(config=None, environ={"LLMGW_CONFIG": str(path)}, engines=engines, run=run)
    assert ran[0] == ran[1]
    ((loaded, where), _) = ran
    assert where == path
    assert [model.name for model in loaded.config.models] == ["m"]
    said = capfd.readouterr()
    assert said.err == "m: not in effect yet: max_output\n" * 2
    assert said.out == ""


def test_a_file_that_is_wrong_starts_nothing(path: Path, engines: dict[str, Engine]) -> None:
    def run(loaded: LoadedServer, path: Path) -> None:
        raise AssertionError("it was started")

    path.write_text(path.read_text().replace("engine: toy", "engine: toy, args: [--bad]") + "lisen: 1\n")
    with pytest.raises(ConfigError) as caught:
        serve(config=path, environ={}, engines=engines, run=run)
    assert [problem.key for problem in caught.value.problems] == ["lisen", "m: profiles[0].args"]
