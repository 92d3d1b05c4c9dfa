from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from llmgw.cli.commands import CommandTable

MODULE = """
import click

@click.command({name!r})
def command() -> None:
    click.echo("{name} ran")
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandTable:
    for name in ("show", "tool-check"):
        (tmp_path / f"cmd_{name.replace('-', '_')}.py").write_text(MODULE.format(name=name))
    (tmp_path / "cmd_broken.py").write_text("command = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    return CommandTable(
        "table", prefix="cmd_", table={"show": "Show it.", "tool-check": "Check it.", "broken": "No command."}
    )


def run(table: CommandTable, *words: str) -> None:
    table.main(words, standalone_mode=False)


def test_a_command_is_imported_when_it_runs(table: CommandTable, capsys: pytest.CaptureFixture[str]) -> None:
    sys.modules.pop("cmd_show", None)
    table.main(["--help"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "show        Show it." in said
    assert "cmd_show" not in sys.modules
    run(table, "show")
    assert capsys.readouterr().out == "show ran\n"
    assert "cmd_show" in sys.modules


def test_a_name_with_a_hyphen_is_a_module_with_an_underscore(
    table: CommandTable, capsys: pytest.CaptureFixture[str]
) -> None:
    run(table, "tool-check")
    assert capsys.readouterr().out == "tool-check ran\n"


def test_a_near_word_is_suggested(table: CommandTable) -> None:
    with pytest.raises(click.UsageError, match="no command 'sohw': did you mean 'show'"):
        run(table, "sohw")


def test_for_a_far_word_all_are_named(table: CommandTable) -> None:
    with pytest.raises(click.UsageError, match="no command 'xyz': there is broken, show, tool-check"):
        run(table, "xyz")


def test_a_module_without_a_command_is_told_apart(table: CommandTable) -> None:
    with pytest.raises(TypeError, match=r"cmd_broken\.command is not a command"):
        run(table, "broken")


def test_what_is_not_in_the_table_is_no_command(table: CommandTable) -> None:
    context = click.Context(table)
    assert table.get_command(context, "missing") is None
    assert table.list_commands(context) == ["broken", "show", "tool-check"]


def test_an_interrupt_is_no_line_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """click writes one, and hangs where nobody reads it."""

    class Interrupted(CommandTable):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            raise KeyboardInterrupt

    table = Interrupted("table", prefix="cmd_", table={"show": "Show it."})
    with pytest.raises(click.Abort):
        run(table, "show")
    assert capfd.readouterr().err == ""
