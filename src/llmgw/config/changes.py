"""What a new server.yaml means for a server that runs: what it takes over at once, and what waits for a restart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

from llmgw.config.server import Listen, ServerConfig

# Everything else is a socket that is bound, or a store that is open.
WHILE_RUNNING = ("cors_origins", "fleet", "limits", "models", "timeouts")


def changed(old: ServerConfig, new: ServerConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dotted keys that differ: those that can change while the server runs, and those that need a restart."""
    keys = tuple(_differences(old, new, ""))
    applied = tuple(key for key in keys if key.partition(".")[0] in WHILE_RUNNING)
    return applied, tuple(key for key in keys if key not in applied)


def take_changes(old: ServerConfig, new: ServerConfig) -> ServerConfig:
    """What a running server goes on with: the new, but for the keys that need a restart. Those keep differing from the
    file, so that each reload names them again."""
    return replace(old, **{key: getattr(new, key) for key in WHILE_RUNNING})


def _differences(old: object, new: object, path: str) -> Iterator[str]:
    # An address is written as one value.
    if is_dataclass(old) and not isinstance(old, Listen):
        for field in fields(old):
            prefix = f"{path}.{field.name}" if path else field.name
            yield from _differences(getattr(old, field.name), getattr(new, field.name), prefix)
    elif old != new:
        yield path
