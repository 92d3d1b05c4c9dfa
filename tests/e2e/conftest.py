"""The real llama.cpp with a real model, as whoever types ``llmgw demo`` gets them; skipped where they can't be had."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from lab.running import Llmgw, write_model

ENGINES = ["fake", pytest.param("llamacpp", marks=pytest.mark.e2e)]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Llmgw]]:
    """Make an llmgw with this command line and these keys of node.yaml; what is left of it in the end is killed."""
    made: list[Llmgw] = []

    def launch(*words: str, folder: Path | None = None, **node: Any) -> Llmgw:
        made.append(Llmgw(folder or tmp_path_factory.mktemp("llmgw"), *words, **node))
        return made[-1]

    yield launch
    for llmgw in made:
        llmgw.clean()


@pytest.fixture(params=ENGINES)
def definition(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A model ``m``, of the fake engine and of the real one."""
    if request.param == "fake":
        return str(write_model(tmp_path / "model"))
    return str(write_model(tmp_path / "model", engine="llamacpp", source=request.getfixturevalue("weights")))
