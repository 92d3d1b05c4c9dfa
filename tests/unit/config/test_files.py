from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llmgw.config.document import Section, parse_document
from llmgw.config.files import find_system_file, named_file, read_existing, read_path, read_value
from llmgw.errors import ConfigError


def told(value: object, read: Callable[[Section], object]) -> tuple[object, list[str]]:
    """What is read of the key ``a`` with this value, and what is said against it."""
    section, findings = parse_document(f"a: '{value}'\n", "f")
    return read(section), [problem.message for problem in findings.problems()]


def value_of(text: object) -> tuple[object, list[str]]:
    return told(text, lambda section: read_value(section, "a", "default"))


def secret(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_the_command_line_names_the_file_before_the_environment_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert named_file(None, environ={}) is None
    assert named_file(None, environ={"LLMGW_CONFIG": "~/c.yaml"}) == Path("/home/me/c.yaml")
    assert named_file(Path("/f.yaml"), environ={"LLMGW_CONFIG": "/c.yaml"}) == Path("/f.yaml")


def test_a_file_that_has_to_be_there_and_is_not_is_told_what_to_write() -> None:
    with pytest.raises(ConfigError, match=re.escape("/nowhere/x.yaml is not there: write it (examples/x.yaml is")):
        find_system_file(None, environ={}, system_file=Path("/nowhere/x.yaml"))


def test_a_path_is_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert told("/x", lambda section: read_path(section, "a", None)) == (Path("/x"), [])
    assert told("~/x", lambda section: read_path(section, "a", None)) == (Path("/home/me/x"), [])
    assert told("/x", lambda section: read_path(section, "b", Path("/d"))) == (Path("/d"), [])
    assert told("x", lambda section: read_path(section, "a", Path("/d"))) == (
        Path("/d"),
        ["'x' must be a whole path, from / or ~/"],
    )


def test_a_value_in_a_secret_file_is_its_first_line(tmp_path: Path) -> None:
    path = secret(tmp_path, b"  word \nmore\n", 0o640)
    assert value_of(f"@{path}") == ("word", [])
    assert value_of("word") == ("word", [])


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"hunter2", 0o644, "can be read by everybody on this machine: chmod o-rwx"),
        (b"", 0o600, "has nothing on its first line"),
        (b"\nhunter2\n", 0o600, "has nothing on its first line"),
        (b"hunter2 \xff", 0o600, "is not UTF-8"),
    ],
)
def test_a_secret_file_that_can_not_be_used_is_named_and_not_shown(
    tmp_path: Path, content: bytes, mode: int, said: str
) -> None:
    path = secret(tmp_path, content, mode)
    found, (message,) = value_of(f"@{path}")
    assert found == "default"
    assert message.startswith(f"{path} {said}")
    assert "hunter2" not in message


def test_a_secret_file_that_is_not_there_or_no_file_is_named(tmp_path: Path) -> None:
    assert value_of("@/nowhere/x") == ("default", ["/nowhere/x can't be read: No such file or directory"])
    assert value_of(f"@{tmp_path}") == ("default", [f"{tmp_path} can't be read: Is a directory"])
    assert value_of("@x") == ("default", ["'@x' must be @ and a whole path, as @/etc/llmgw/secrets/store"])


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert value_of(f"@{pipe}") == ("default", [f"{pipe} can't be read: it is no ordinary file"])


def test_a_file_that_has_to_exist_is_looked_for_once_it_is_named(tmp_path: Path) -> None:
    path = secret(tmp_path, b"", 0o644)
    assert told(path, lambda section: read_existing(section, "a")) == (path, [])
    assert told(path, lambda section: read_existing(section, "b"))[1] == ["is missing"]
    assert told("x", lambda section: read_existing(section, "a"))[1] == ["'x' must be a whole path, from / or ~/"]
    (said,) = told(path, lambda section: read_existing(section, "a", secret=True))[1]
    assert said == f"{path} can be read by everybody on this machine: chmod o-rwx {path}"
    missing = tmp_path / "missing"
    assert told(missing, lambda section: read_existing(section, "a"))[1] == [
        f"{missing} can't be read: No such file or directory"
    ]
    assert told(missing, lambda section: read_existing(section, "a", check=False)) == (missing, [])
