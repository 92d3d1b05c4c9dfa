"""A real vLLM on the CPU, in the environment that LLMGW_TEST_VLLM names, and a model that is small enough for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))


@pytest.fixture(scope="session")
def environment() -> Path:
    """The folder of the environment."""
    return Path(os.environ["LLMGW_TEST_VLLM"])


@pytest.fixture(scope="session")
def vllm(environment: Path) -> Path:
    """Its program."""
    return environment / "bin" / "vllm"


@pytest.fixture(scope="session")
def tiny(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 0.7 MB."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    script = Path(__file__).with_name("make_model.py")
    subprocess.run([environment / "bin" / "python", script, folder], check=True, timeout=300)
    return folder
