from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from llmgw import __version__
from llmgw.cli import COMMANDS, app, main
from llmgw.errors import ConfigError, EngineFailed, LlmgwError, Problem, UsageError

HEAVY = ("quart", "trio", "httpx", "hypercorn", "rich", "yaml", "asyncio")


def llmgw(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmgw", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "LLMGW_CONFIG": "", **environ},
    )


def status(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    return caught.value.code


@pytest.mark.slow
@pytest.mark.parametrize("args", [("--help",), *((name, "--help") for name in sorted(COMMANDS))], ids=" ".join)
def test_help_loads_nothing_heavy(args: tuple[str, ...]) -> None:
    program = (
        "import sys, llmgw.cli\n"
        "try:\n    llmgw.cli.main(sys.argv[1:])\n"
        f"except SystemExit as end:\n    print('LOADED', end.code, [name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Usage: llmgw" in done.stdout
    assert done.stdout.splitlines()[-1] == "LOADED 0 []"


def test_the_help_lists_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    for name, line in COMMANDS.items():
        assert f"{name} {line}" in said


def test_every_command_of_the_table_can_be_had() -> None:
    for name in COMMANDS:
        with app.make_context("llmgw", [name, "--help"], resilient_parsing=True) as context:
            command = app.get_command(context, name)
        assert command is not None
        assert command.name == name


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capsys.readouterr().out == f"llmgw {__version__}\n"


def test_an_unknown_command_suggests_the_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("serv") == 2
    assert "no command 'serv': did you mean 'serve'?" in capsys.readouterr().err


def test_a_command_like_no_other_is_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("xyzzy") == 2
    assert "no command 'xyzzy': there is completion, demo, serve" in capsys.readouterr().err


def test_a_wrong_option_is_the_operators_to_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("serve", "--prot", "3") == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("that is wrong"), 2, "llmgw: that is wrong"),
        (ConfigError([Problem(key="a", message="b"), Problem(key="c", message="d")]), 2, "llmgw: a: b\nc: d"),
        (LlmgwError("it broke"), 1, "llmgw: it broke"),
        (EngineFailed("it ended", ("line 1", "line 2")), 1, "llmgw: it ended\n  line 1\n  line 2"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_of_end_has_its_status(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        main([], program=failing)
    assert caught.value.code == code
    assert capsys.readouterr().err.strip() == said


def test_a_command_that_is_done_ends_with_status_0() -> None:
    with pytest.raises(SystemExit) as caught:
        main([], program=click.Command("done"))
    assert caught.value.code == 0


@pytest.mark.slow
def test_a_wrong_command_ends_in_plain_words_and_status_2(tmp_path: Path) -> None:
    done = llmgw("completion", "tcsh")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


DOCS = ("configuration.md", "quickstart.md")


def commands_in_the_docs() -> list[str]:
    docs = Path(__file__).parents[3] / "docs"
    text = "\n".join((docs / name).read_text() for name in DOCS)
    return sorted(set(re.findall(r"^    (?:\.venv/bin/)?(llmgw [^>\n]*)", text, re.MULTILINE)))


@pytest.mark.parametrize("line", commands_in_the_docs())
def test_the_manuals_commands_are_commands(line: str) -> None:
    _, *words = shlex.split(line, comments=True)
    with app.make_context("llmgw", list(words)) as context:
        _, command, rest = app.resolve_command(context, words)
        assert command is not None
        # Wrong options, or too many words, would raise.
        command.make_context(command.name, rest).close()


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_crash() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "llmgw", "--help"],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_printed(shell: str) -> None:
    done = llmgw("completion", shell)
    assert done.returncode == 0
    assert f"_LLMGW_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.slow
def test_the_shell_completes_commands_and_options() -> None:
    words = {"_LLMGW_COMPLETE": "bash_complete", "COMP_WORDS": "llmgw se", "COMP_CWORD": "1"}
    assert llmgw(**words).stdout.split() == ["plain,serve"]
    words |= {"COMP_WORDS": "llmgw serve --po", "COMP_CWORD": "2"}
    assert llmgw(**words).stdout.split() == ["plain,--port"]
