from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.config.node import NodeConfig
from llmgw.errors import UsageError
from llmgw.standalone.settings import state_folder, weights_cache

DEFAULT = NodeConfig()


def test_an_ordinary_user_keeps_all_in_the_home() -> None:
    environ = {"HOME": "/home/me"}
    assert state_folder(DEFAULT, environ=environ, root=False) == Path("/home/me/.local/share/llmgw/state")
    assert weights_cache(DEFAULT, environ=environ, root=False) == Path("/home/me/.local/share/llmgw/models/.cache")


def test_xdg_data_home_moves_both_unless_it_is_relative() -> None:
    environ = {"HOME": "/home/me", "XDG_DATA_HOME": "/data"}
    assert state_folder(DEFAULT, environ=environ, root=False) == Path("/data/llmgw/state")
    assert weights_cache(DEFAULT, environ=environ, root=False) == Path("/data/llmgw/models/.cache")
    environ["XDG_DATA_HOME"] = "data"
    assert state_folder(DEFAULT, environ=environ, root=False) == Path("/home/me/.local/share/llmgw/state")


def test_root_uses_the_machines_folders() -> None:
    environ = {"HOME": "/root", "XDG_DATA_HOME": "/data"}
    assert state_folder(DEFAULT, environ=environ, root=True) == Path("/var/lib/llmgw-agent")
    assert weights_cache(DEFAULT, environ=environ, root=True) == Path("/var/lib/llmgw-models/.cache")


def test_what_is_configured_wins() -> None:
    config = NodeConfig(state="/s", cache="/c")
    assert state_folder(config, environ={}, root=True) == Path("/s")
    assert weights_cache(config, environ={}, root=False) == Path("/c")


def test_a_home_that_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="XDG_DATA_HOME or HOME: "):
        state_folder(DEFAULT, environ={"HOME": os.fsdecode(b"/home/\xff")}, root=False)


@pytest.mark.slow
def test_a_user_without_a_home_is_told_what_to_set() -> None:
    program = (
        "import pwd\n"
        # as the system answers in a container, to a user who is in no file of accounts
        "def getpwuid(uid):\n    raise KeyError(uid)\n"
        "pwd.getpwuid = getpwuid\n"
        "from llmgw.config.node import NodeConfig\nfrom llmgw.errors import UsageError\n"
        "from llmgw.standalone.settings import state_folder\n"
        "try:\n    state_folder(NodeConfig(), environ={}, root=False)\n"
        "except UsageError as error:\n    print(error.message)\n"
        "print(state_folder(NodeConfig(state='/s'), environ={}, root=False))\n"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert f"no account here has uid {os.geteuid()}): set HOME or XDG_DATA_HOME, or write state and cache" in said[0]
    assert said[1] == "/s"
