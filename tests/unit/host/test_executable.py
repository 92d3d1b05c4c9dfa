"""Why the system does not start a program, with files that it really does not start."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
from pathlib import Path

import pytest

from llmgw.host.executable import advise_write, explain_start, find_unusable

OTHERS = {"x86_64": (183, "aarch64"), "aarch64": (62, "x86_64")}


@pytest.fixture
def explain(tmp_path):
    """Write a program, try to start it, and explain what came of that."""

    def explain(content, mode=0o755, **start):
        path = tmp_path / "engine"
        path.write_bytes(content)
        path.chmod(mode)
        with pytest.raises(OSError, match="Errno") as raised:
            subprocess.run([path], check=False, **start)
        return explain_start(str(path), raised.value)

    return explain


def test_a_binary_for_another_cpu_names_both(explain):
    number, name = OTHERS[platform.machine()]
    binary = bytearray(Path(os.path.realpath("/bin/true")).read_bytes())
    binary[18:20] = number.to_bytes(2, "little")
    found = explain(bytes(binary))
    assert found.reason == f"wrong CPU architecture: it is built for {name}, and this machine is {platform.machine()}"
    assert found.remedy == f"install a build for {platform.machine()}"


def test_a_cpu_that_nobody_knows_is_told_by_its_number(explain):
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 11 + b"\xed\xed\1\0\0\0" + b"\0" * 40
    assert "another CPU (number 60909)" in explain(head).reason


def test_a_binary_that_is_cut_off_is_damaged(explain):
    head = Path(os.path.realpath("/bin/true")).read_bytes()[:30]
    assert explain(head).reason == "its file is damaged: it is no whole binary"


def test_what_only_begins_as_a_binary_is_damaged_and_of_no_other_cpu(explain):
    assert explain(b"\x7fELF" + b"a" * 200).reason == "its file is damaged: it is no whole binary"
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 11 + b"\xed\xed\1\0\0\0"
    assert explain(head).reason == "its file is damaged: it is no whole binary"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "make room on the disk of /srv/state"),
        (errno.EDQUOT, "make room on the disk of /srv/state"),
        (errno.EROFS, "see that llmgw may write to /srv/state"),
        (errno.EIO, None),
    ],
)
def test_a_file_that_can_not_be_written_is_told_with_what_to_do(number, said):
    assert advise_write(OSError(number, os.strerror(number)), "/srv/state") == said
    found = explain_start("/bin/engine", OSError(number, os.strerror(number), "/srv/state"))
    assert (found.reason, found.remedy) == (f"/srv/state: {os.strerror(number)}", said)


def test_what_can_be_no_program_is_told_before_anybody_starts_it(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("no program")
    assert find_unusable(str(plain)).reason == "it may not be executed"
    assert find_unusable(str(tmp_path)).reason == "it is a folder"
    assert find_unusable(str(tmp_path / "none")).reason == "it is not there"
    assert find_unusable(os.fsdecode(b"/bin/\xff")).remedy == "give the program a path that is"
    plain.chmod(0o755)
    assert find_unusable(str(plain)) is None


@pytest.mark.parametrize("content", [b"", b"exec llama-server\n", b"PK\x03\x04 a zip"])
def test_what_is_no_program_is_called_so(explain, content):
    assert "neither a binary nor a script" in explain(content).reason


def test_a_script_names_the_interpreter_that_is_not_there(explain):
    found = explain(b"#!/nowhere/python3 -I\nprint()\n")
    assert found.reason == "the interpreter /nowhere/python3, which its first line names, is not there"
    assert "install it again" in found.remedy


def test_a_binary_whose_loader_is_not_there_is_of_another_distribution(explain):
    binary = Path(os.path.realpath("/bin/true")).read_bytes()
    at = binary.index(b"/ld-linux")
    found = explain(binary[:at] + b"/no-linux" + binary[at + 9 :])
    assert found.reason == "the system's loader that it was built for is not there"


def test_a_file_without_the_right_says_how_to_give_it(explain):
    found = explain(b"#!/bin/sh\n", mode=0o644)
    assert found.reason == "Permission denied"
    assert "chmod +x" in found.remedy


def test_the_folder_that_it_is_to_run_in_is_named(explain):
    assert explain(b"#!/bin/sh\n", cwd="/nowhere").reason == "/nowhere: No such file or directory"


def test_what_is_not_there_is_not_explained_further():
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/nowhere/engine")
    assert explain_start("/nowhere/engine", error).reason == "No such file or directory"


def test_an_error_without_words_of_the_system_is_told_as_it_is():
    assert explain_start("/bin/true", OSError("odd")).reason == "odd"
