"""Tables and lines, for a person on a terminal (colours, wrapped) or a program behind a pipe (plain, unwrapped)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group

UNKNOWN = "-"
# Engines colour their logs; the colours are no part of the text.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STYLES = {
    **dict.fromkeys(("ready", "yes", "ok", "chosen", "proven"), "green"),
    **dict.fromkeys(("placed", "preparing", "prepared", "launching", "loading", "waiting", "stopping"), "yellow"),
    **dict.fromkeys(("cordoned", "draining", "joining", "silent", "unseen", "problems", "deprecated"), "yellow"),
    **dict.fromkeys(("broken", "renamed", "removed", "unknown", "wrong value", "failed", "lost", "unreachable"), "red"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table: cells are text, an empty one is shown as it is."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block = Grid | str


def shown(value: Any) -> str:
    """A value of an answer as a cell: ``-`` when it isn't known; nothing of it can move the terminal's cursor."""
    if value is None:
        return UNKNOWN
    text = _COLOURS.sub("", str(value))
    return "".join(mark if mark.isprintable() else "\N{REPLACEMENT CHARACTER}" for mark in text)


def listed(values: Sequence[Any] | None) -> str:
    return shown(",".join(str(value) for value in values)) if values else UNKNOWN


def write(blocks: Iterable[Block]) -> None:
    """To stdout."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(paint(blocks), highlight=False)
    else:
        print(plain(blocks), flush=True)


def plain(blocks: Iterable[Block]) -> str:
    """Aligned columns, two spaces apart, nothing wrapped."""
    return "\n".join(_plain_grid(block) if isinstance(block, Grid) else shown(block) for block in blocks)


def _plain_grid(grid: Grid) -> str:
    lines = (grid.columns, *(tuple(map(shown, row)) for row in grid.rows))
    widths = [max(len(line[index]) for line in lines) for index in range(len(grid.columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def paint(blocks: Iterable[Block]) -> Group:
    """The same for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    painted: list[Table | Text] = []
    for block in blocks:
        if isinstance(block, str):
            painted.append(Text(shown(block)))
            continue
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in block.columns:
            table.add_column(column, overflow="fold")
        for row in block.rows:
            # Text, not markup: a name with [brackets] is a name.
            table.add_row(*(Text(cell, style=_style(cell)) for cell in map(shown, row)))
        painted.append(table)
    return Group(*painted)


def _style(cell: str) -> str:
    """Of several words ("lost,cordoned") that of the one which needs somebody most."""
    styles = {_STYLES.get(word) for word in cell.split(",")}
    return next((style for style in ("red", "yellow", "green") if style in styles), "")
