from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmgw.cli.given import FileOptions
from llmgw.cli.serve import serve
from llmgw.core.model import Scaling
from llmgw.engines.registry import Engine
from llmgw.errors import ConfigError, UsageError

PROFILES = "profiles: [{name: a, engine: toy}]"


@pytest.fixture
def call(tmp_path: Path, engines: dict[str, Engine], ran: Any) -> Any:
    def serve_here(model: Path | None, node: str = "", options: FileOptions | None = None, **more: Any) -> None:
        path = None
        if node:
            path = tmp_path / "node.yaml"
            path.write_text(node)
        environ = {"HOME": str(tmp_path), "LLMGW_CONFIG": str(path or "")}
        more = {"config": None, "port": None, "environ": environ, "engines": engines, "run": ran, **more}
        serve(str(model) if model else None, options or FileOptions(), **more)

    return serve_here


def test_a_weights_file_is_served_and_its_address_printed(
    call: Any, ran: Any, weights: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    call(weights, port=8001)
    assert [model.name for model in ran.models] == ["my-model-q4"]
    assert (ran.config.port, ran.config.models, ran.ask) == (8001, ran.models, None)
    said = capfd.readouterr()
    assert said.out == "http://127.0.0.1:17434/v1 is ready; Ctrl-C stops it\n"
    assert said.err == "starting my-model-q4\n"


def test_keys_without_effect_are_named_once_at_the_start(
    call: Any, weights: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(f"name: m\nsource: '{weights}'\nmax_output: 9\nrouting_profile: chat\n{PROFILES}\n")
    call(path)
    assert "m: not in effect yet: routing_profile, max_output\n" in capfd.readouterr().err


def test_the_models_of_node_yaml_are_served_with_the_given_one(call: Any, ran: Any, weights: Path) -> None:
    node = f"models: [{{name: b, source: '{weights}', scaling: {{min: 1, max: 1}}, {PROFILES}}}]\n"
    call(weights, node)
    assert [model.name for model in ran.models] == ["my-model-q4", "b"]
    call(None, node)
    assert [model.name for model in ran.models] == ["b"]


def test_a_model_of_node_yaml_without_scaling_stays_down(call: Any, ran: Any, weights: Path) -> None:
    call(weights, f"models: [{{name: b, source: /none, {PROFILES}}}]\n")
    assert ran.models[1].scaling == Scaling(min=0, max=0)


def test_one_name_can_not_be_given_and_written(call: Any, weights: Path) -> None:
    node = f"models: [{{name: b, aliases: [my-model-q4], source: /w, {PROFILES}}}]\n"
    with pytest.raises(ConfigError, match=r"my-model-q4: 'my-model-q4' is a model of node\.yaml too"):
        call(weights, node)


@pytest.mark.parametrize("node", ["", f"models: [{{name: b, source: /w, {PROFILES}}}]\n"])
def test_without_any_model_to_run_it_asks_which(call: Any, ran: Any, node: str) -> None:
    with pytest.raises(UsageError, match=r"^which model"):
        call(None, node)
    assert ran.calls == 0


def test_a_definition_that_runs_nothing_is_refused(call: Any, weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(f"name: m\nsource: '{weights}'\nscaling: {{min: 0, max: 0}}\n{PROFILES}\n")
    with pytest.raises(UsageError, match=r"nothing would run: scaling\.max is 0"):
        call(path)
