"""What commands that serve have in common: their options, and the notices before they start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from llmgw.host.output import say

if TYPE_CHECKING:
    from llmgw.config.definition import Definition
    from llmgw.config.node import NodeConfig
    from llmgw.core.model import Model

Command = TypeVar("Command", bound=Callable[..., Any])


class Run(Protocol):
    """What serves models until it is told to stop: ``llmgw.standalone.tree.run``."""

    def __call__(
        self,
        config: NodeConfig,
        models: tuple[Model, ...],
        *,
        on_ready: Callable[[str], None],  # may block, and be left behind blocked
        ask: str | None = None,
    ) -> None: ...


def node_options(command: Command) -> Command:
    """--port, --config and --verbose."""
    port = click.option("--port", type=click.IntRange(0, 65535), help="Listen here; 0 takes any free port.")
    return port(file_options("node.yaml")(command))


def file_options(name: str) -> Callable[[Command], Command]:
    """--config, for a file of this name, and --verbose."""

    def decorate(command: Command) -> Command:
        verbose = click.option("-v", "--verbose", is_flag=True, help="Log what happens, not only what goes wrong.")
        kind = click.Path(path_type=Path, dir_okay=False)
        config = click.option("--config", type=kind, help=f"Another {name} than the usual one.")
        return config(verbose(command))

    return decorate


def say_not_in_effect(definitions: tuple[Definition, ...]) -> None:
    """A key that is understood and does nothing yet is named, or somebody would count on it."""
    for definition in definitions:
        if definition.not_in_effect:
            say(f"{definition.model.name}: not in effect yet: {', '.join(definition.not_in_effect)}")
