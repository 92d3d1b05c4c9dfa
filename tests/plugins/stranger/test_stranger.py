"""A stranger's plugin passes the conformance kit, and llmgw finds it once its distribution is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from llmgw.engines.registry import find_engines
from llmgw.engines.testing import EngineContract

SOURCE = Path(__file__).parent / "stranger_engine.py"


def load_stranger() -> ModuleType:
    spec = spec_from_file_location("stranger_engine", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestStranger(EngineContract):
    plugin = load_stranger()
    takes_context = False
    flag_tables: ClassVar[Mapping[str, frozenset[str]]] = {
        "1.0": frozenset({"--weights", "--name", "--listen", "--listen-port"}),
    }


def test_an_installed_plugin_is_found_beside_the_built_in_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "parrot_engine-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot-engine\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[llmgw.engines]\nparrot = stranger_engine\n")
    (tmp_path / SOURCE.name).write_bytes(SOURCE.read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_engines({})
    assert {"parrot", "llamacpp"} <= set(found.engines)
    assert found.engines["parrot"].info.title == "Parrot"
    assert found.origins["parrot"] == "distribution parrot-engine 1.0"
    assert found.problems == ()


def test_a_plugin_that_is_one_file_needs_no_installing(tmp_path: Path) -> None:
    (tmp_path / "polly.py").write_bytes(SOURCE.read_bytes())
    found = find_engines({"LLMGW_PLUGINS": str(tmp_path)})
    assert found.engines["polly"].info.title == "Parrot"
    assert found.origins["polly"] == str(tmp_path / "polly.py")
    assert found.problems == ()
