"""Paths below a home that may be missing, and in bytes that may be no text."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.config.paths import check_text, expand_home, find_home, is_text, is_there
from llmgw.errors import UsageError

NO_TEXT = os.fsdecode(b"/models/\xff.gguf")


def test_the_home_is_what_the_environment_says_else_the_accounts() -> None:
    assert find_home({"HOME": "/home/me"}) == Path("/home/me")
    account = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for unset in ({}, {"HOME": ""}, {"HOME": "relative"}):
        assert find_home(unset) == account


@pytest.mark.slow
def test_a_user_without_an_account_has_no_home() -> None:
    program = (
        "import os, pwd\n"
        # as the system answers in a container, to a user who is in no file of accounts
        "def getpwuid(uid):\n    raise KeyError(uid)\n"
        "pwd.getpwuid = getpwuid\nos.environ.pop('HOME', None)\n"
        "from llmgw.errors import UsageError\nfrom llmgw.config.paths import expand_home, find_home\n"
        "print(find_home({}))\n"
        "try:\n    expand_home('~/x')\nexcept UsageError as error:\n    print(error.message)\n"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert said[0] == "None"
    assert said[1].startswith("~/x: there is no home folder (HOME is not set")


def test_a_path_below_the_home_is_made_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expand_home("~/x") == "/home/me/x"
    assert expand_home("~nobody-of-that-name/x") == "~nobody-of-that-name/x"
    assert expand_home("a~/x") == "a~/x"


def test_a_home_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", os.fsdecode(b"/home/\xff"))
    with pytest.raises(UsageError, match=r"^~/x: /home/\\xff/x is not UTF-8"):
        expand_home("~/x")


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert is_text("/models/ü.gguf")
    assert not is_text(NO_TEXT)
    check_text("/models/ü.gguf", "MODEL")
    with pytest.raises(UsageError, match=r"^MODEL: /models/\\xff\.gguf is not UTF-8: give it a name that is$"):
        check_text(NO_TEXT, "MODEL")


def test_what_can_not_be_looked_for_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert is_there(tmp_path / "file")
    assert not is_there(tmp_path / "none")
    assert not is_there(tmp_path / "file" / "below")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match=r"loop can't be looked for: Too many levels"):
        is_there(tmp_path / "loop")
