"""Where ``serve`` and ``demo`` keep what they keep: an ordinary user's home, or the machine's folders for root."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from llmgw.config.node import NodeConfig


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
    home = Path(base) if base.startswith("/") else Path(environ.get("HOME") or "~").expanduser() / ".local" / "share"
    return home / "llmgw"


def _is_root(root: bool | None) -> bool:
    return os.geteuid() == 0 if root is None else root
