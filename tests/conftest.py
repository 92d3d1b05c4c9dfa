"""What tests of several rooms need: the small real model, had as the demo has it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

from llmgw.config.node import NodeConfig
from llmgw.errors import LlmgwError
from llmgw.standalone.model_file import DEMO_FILE, find_model
from llmgw.standalone.settings import weights_cache

# A deadline for each example would measure the machine, and what else runs on it.
settings.register_profile("llmgw", deadline=None)
settings.load_profile("llmgw")


class Silent:
    """Nobody watches the download."""

    def say(self, text: str) -> None: ...

    def advance(self, done: int, total: int | None) -> None: ...


def do_without(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        program, package = mark.args
        if shutil.which(program) is None:
            do_without(f"there is no {program}: apt-get install {package}")


@pytest.fixture(scope="session")
def weights() -> Path:
    """The demo's model, fetched as the demo fetches it."""
    if importlib.util.find_spec("xllamacpp") is None and shutil.which("llama-server") is None:
        do_without("there is no llama.cpp: pip install '.[demo]'")
    try:
        return find_model(DEMO_FILE, weights_cache(NodeConfig()), Silent())
    except LlmgwError as error:
        do_without(f"the model can't be had: {error.message}")
