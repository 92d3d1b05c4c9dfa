from __future__ import annotations

import io

import pytest
from rich.console import Console

from llmgw.cli.ctl.drawing import Grid, listed, paint, plain, shown, write

GRID = Grid(columns=("NAME", "STATE", "LAST"), rows=(("a-long-name", "ready", ""), ("b", "[red]", "x")))


def test_columns_are_aligned_and_nothing_trails() -> None:
    assert plain([GRID, "", "below"]) == (
        "NAME         STATE  LAST\na-long-name  ready\nb            [red]  x\n\nbelow"
    )


def test_nothing_is_wrapped_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    write([Grid(columns=("A",), rows=(("x" * 500,),))])
    assert capsys.readouterr().out == "A\n" + "x" * 500 + "\n"


def test_a_terminal_gets_the_same_words_in_colours() -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=80).print(paint([GRID, "below"]))
    text = out.getvalue()
    assert "\x1b[32mready" in text
    assert "[red]" in text, "a name is no markup"
    assert "below" in text


@pytest.mark.parametrize(
    ("cell", "colour"),
    [("ready,draining", "33"), ("lost,cordoned", "31"), ("current,serving", None), ("proven", "32"), ("a,b", None)],
)
def test_of_several_words_the_worst_gives_the_colour(cell: str, colour: str | None) -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=80).print(paint([Grid(columns=("A",), rows=((cell,),))]))
    row = out.getvalue().splitlines()[1]
    assert (f"\x1b[{colour}m{cell}" in row) if colour is not None else ("\x1b" not in row)


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (None, "-"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        (0, "0"),
        ("", ""),
        ("näme", "näme"),
        ("\x1b[2Jgone\n", "\N{REPLACEMENT CHARACTER}[2Jgone\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_value_is_shown_and_can_not_move_the_cursor(value: object, cell: str) -> None:
    assert shown(value) == cell


def test_a_list_is_one_cell() -> None:
    assert listed(["a", "b"]) == "a,b"
    assert (listed([]), listed(None)) == ("-", "-")
