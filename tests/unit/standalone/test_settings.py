from __future__ import annotations

from pathlib import Path

from llmgw.config.node import NodeConfig
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
