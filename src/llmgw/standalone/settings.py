"""Where ``serve`` and ``demo`` keep what they keep: an ordinary user's home, or the machine's folders for root."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from llmgw.config.node import NodeConfig
from llmgw.config.paths import check_text, find_home
from llmgw.errors import UsageError


def state_folder(config: NodeConfig, *, environ: Mapping[str, str] = os.environ, root: bool | None = None) -> Path:
    """What is remembered between starts, and the engines' logs."""
    if config.state is not None:
        return Path(config.state)
    return Path("/var/lib/llmgw-agent") if _is_root(root) else _own_folder(environ) / "state"


def weights_cache(config: NodeConfig, *, environ: Mapping[str, str] = os.environ, root: bool | None = None) -> Path:
    """Weights that llmgw fetched itself; it may be emptied at any time that llmgw isn't running."""
    if config.cache is not None:
        return Path(config.cache)
    return Path("/var/lib/llmgw-models/.cache") if _is_root(root) else _own_folder(environ) / "models" / ".cache"


def _own_folder(environ: Mapping[str, str]) -> Path:
    # A relative XDG_DATA_HOME is to be ignored, says its specification: it would follow the working directory.
    base = environ.get("XDG_DATA_HOME", "")
    home = find_home(environ)
    if base.startswith("/"):
        folder = Path(base)
    elif home is not None:
        folder = home / ".local" / "share"
    else:
        raise UsageError(
            "there is no home folder to keep state and weights in (HOME is not set, and no account here has uid "
            f"{os.geteuid()}): set HOME or XDG_DATA_HOME, or write state and cache in node.yaml"
        )
    check_text(str(folder), "XDG_DATA_HOME or HOME")
    return folder / "llmgw"


def _is_root(root: bool | None) -> bool:
    return os.geteuid() == 0 if root is None else root
