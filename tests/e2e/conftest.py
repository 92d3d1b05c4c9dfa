"""The real llama.cpp with a real model, as whoever types ``llmgw demo`` gets them; skipped where they can't be had."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from llmgw.config.node import NodeConfig
from llmgw.errors import LlmgwError
from llmgw.standalone.model_file import DEMO_FILE, find_model
from llmgw.standalone.settings import weights_cache

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from lab.running import Llmgw, write_model

ENGINES = ["fake", pytest.param("llamacpp", marks=pytest.mark.e2e)]


class Silent:
    """Nobody watches the download."""

    def say(self, text: str) -> None: ...

    def advance(self, done: int, total: int | None) -> None: ...


def do_without(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def weights() -> Path:
    """The demo's model, fetched as the demo fetches it."""
    if importlib.util.find_spec("xllamacpp") is None and shutil.which("llama-server") is None:
        do_without("there is no llama.cpp: pip install '.[demo]'")
    try:
        return find_model(DEMO_FILE, weights_cache(NodeConfig()), Silent())
    except LlmgwError as error:
        do_without(f"the model can't be had: {error.message}")


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
