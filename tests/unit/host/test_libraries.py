"""The libraries that a program lacks, with programs whose loader really does not find them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from llmgw.engines.types import Command, ProbeOutput
from llmgw.host.libraries import find_missing, name_packages, read_missing
from llmgw.host.process import run_probe

MARKER = "/tmp/state:probe-libraries:0"

GLIBC = "engine: error while loading shared libraries: libgomp.so.1: cannot open shared object file: No such file"
MUSL = "Error loading shared library libgomp.so.1: No such file or directory (needed by /opt/engine)"
PYTHON = "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (GLIBC, ("libgomp.so.1",)),
        (MUSL, ("libgomp.so.1",)),
        (f"Traceback\n{PYTHON}\nagain: {PYTHON}", ("libcudart.so.12",)),
        ("OSError: libnuma.so.1: cannot open shared object file: No such file or directory", ("libnuma.so.1",)),
        ("error: /opt/x/libfoo.so: undefined symbol: bar", ()),
        ("", ()),
    ],
)
def test_the_library_is_read_from_what_loaders_and_python_say(text, names):
    assert read_missing(text) == names


@pytest.fixture
def broken(tmp_path):
    """A binary of this machine that wants two libraries which are not there."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt install gcc")
    for name in ("one", "two"):
        (tmp_path / f"{name}.c").write_text(f"int {name}(void) {{ return 1; }}\n")
        library = tmp_path / f"lib{name}.so"
        soname = f"-Wl,-soname,lib{name}.so.7"
        subprocess.run([compiler, "-shared", "-fPIC", soname, "-o", library, tmp_path / f"{name}.c"], check=True)
    (tmp_path / "main.c").write_text("int one(void); int two(void); int main(void) { return one() + two(); }\n")
    binary = tmp_path / "engine"
    subprocess.run([compiler, "-o", binary, tmp_path / "main.c", f"-L{tmp_path}", "-lone", "-ltwo"], check=True)
    return str(binary)


@pytest.mark.slow
async def test_all_that_a_binary_lacks_is_found_and_not_only_the_first(broken):
    command = Command(argv=(broken, "--version"))
    output = await run_probe(command, 60, marker=MARKER)
    assert output.code == 127
    assert len(read_missing(output.stderr)) == 1
    assert set(await find_missing(command, output, 60, marker=MARKER)) == {"libone.so.7", "libtwo.so.7"}


@pytest.mark.slow
async def test_what_python_names_is_found_though_its_own_loader_misses_nothing():
    code = f"import sys; sys.exit({PYTHON!r})"
    command = Command(argv=(sys.executable, "-c", code))
    output = await run_probe(command, 60, marker=MARKER)
    assert await find_missing(command, output, 60, marker=MARKER) == ("libcudart.so.12",)


@pytest.mark.slow
async def test_a_program_that_can_not_be_asked_still_tells_the_first(tmp_path):
    command = Command(argv=(str(tmp_path / "gone"),))
    output = ProbeOutput(code=127, stdout="", stderr=GLIBC)
    assert await find_missing(command, output, 60, marker=MARKER) == ("libgomp.so.1",)


async def test_a_program_that_failed_for_another_reason_is_not_run_again(tmp_path):
    asked = tmp_path / "asked"
    command = Command(argv=("/bin/sh", "-c", f"touch {asked}"))
    assert await find_missing(command, ProbeOutput(code=1, stdout="", stderr="no"), 60, marker=MARKER) == ()
    assert list(tmp_path.iterdir()) == []


def test_a_known_library_names_its_package_or_what_it_comes_with():
    assert name_packages(["libgomp.so.1", "libnuma.so.1"]) == "on Debian and Ubuntu: apt install libgomp1 libnuma1"
    assert name_packages(["libcuda.so.1"]) == "install the NVIDIA driver (libcuda.so.1 comes with it)"
    assert name_packages(["libcublasLt.so.12"]) == "install CUDA 12 (libcublasLt.so.12 comes with it)"


def test_what_is_not_known_is_named_beside_what_is():
    text = name_packages(["libfoo.so.3", "libssl.so.3", "libcrypto.so.3"])
    assert text.startswith("on Debian and Ubuntu: apt install libssl3; install what brings libfoo.so.3")
    assert name_packages([]) is None
