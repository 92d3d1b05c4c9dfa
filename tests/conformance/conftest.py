"""llmgw as a process, over the fake engine as another, once for each module that asks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lab.running import Llmgw, write_model


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Llmgw]]:
    """Start it with these keys of node.yaml; whatever is left of it in the end is killed."""
    started: list[Llmgw] = []

    def launch(**node: Any) -> Llmgw:
        folder = tmp_path_factory.mktemp("llmgw")
        llmgw = Llmgw(folder, "serve", str(write_model(folder)), **node)
        started.append(llmgw)
        return llmgw.start().wait_ready()

    yield launch
    for llmgw in started:
        llmgw.clean()
