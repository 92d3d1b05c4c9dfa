"""What ``serve`` and ``demo`` have in common: their options, and the notices before they start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

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
        on_ready: Callable[[str], None],
        ask: str | None = None,
    ) -> None: ...


def node_options(command: Command) -> Command:
    """--port, --config and --verbose."""
    for decorate in (
        click.option("-v", "--verbose", is_flag=True, help="Log what happens, not only what goes wrong."),
        click.option(
            "--config", type=click.Path(path_type=Path, dir_okay=False), help="A node.yaml other than the usual ones."
        ),
        click.option("--port", type=click.IntRange(0, 65535), help="Listen here; 0 takes any free port."),
    ):
        command = decorate(command)
    return command


def say_not_in_effect(definitions: tuple[Definition, ...]) -> None:
    """A key that is understood and does nothing yet is named, or somebody would count on it."""
    for definition in definitions:
        if definition.not_in_effect:
            click.echo(f"{definition.model.name}: not in effect yet: {', '.join(definition.not_in_effect)}", err=True)
