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


def test_the_help_lists_every_command_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == 0
    said = " ".join(capfd.readouterr().out.split())
    for name, line in COMMANDS.items():
        assert f"{name} {line}" in said


def test_every_command_of_the_table_can_be_had() -> None:
    for name in COMMANDS:
        with app.make_context("llmgw", [name, "--help"], resilient_parsing=True) as context:
            command = app.get_command(context, name)
        assert command is not None
        assert command.name == name


def test_the_version_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capfd.readouterr().out == f"llmgw {__version__}\n"


def test_an_unknown_command_suggests_the_near_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert status("serv") == 2
    assert "no command 'serv': did you mean 'serve'?" in capfd.readouterr().err


def test_a_command_like_no_other_is_told_what_there_is(capfd: pytest.CaptureFixture[str]) -> None:
    assert status("xyzzy") == 2
    assert f"no command 'xyzzy': there is {', '.join(sorted(COMMANDS))}" in capfd.readouterr().err


def test_a_wrong_option_is_the_operators_to_fix(capfd: pytest.CaptureFixture[str]) -> None:
    assert status("serve", "--prot", "3") == 2
    assert "--port" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("that is wrong"), 2, "llmgw: that is wrong"),
        (ConfigError([Problem(key="a", message="b"), Problem(key="c", message="d")]), 2, "llmgw: a: b\nc: d"),
        (LlmgwError("it broke"), 1, "llmgw: it broke"),
        (EngineFailed("it ended", ("line 1", "line 2")), 1, "llmgw: it ended\n  line 1\n  line 2"),
        (KeyboardInterrupt(), 130, ""),
        (BaseExceptionGroup("of trio", [BaseExceptionGroup("", [KeyboardInterrupt()])]), 130, ""),
        (click.Abort(), 130, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_of_end_has_its_status(
    error: BaseException, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        main([], program=failing)
    assert caught.value.code == code
    assert capfd.readouterr().err.strip() == said


def test_an_interrupt_hides_no_fault() -> None:
    @click.command()
    def failing() -> None:
        raise BaseExceptionGroup("of trio", [KeyboardInterrupt(), ValueError("a fault")])

    with pytest.raises(BaseExceptionGroup, match="of trio"):
        main([], program=failing)


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
    assert llmgw(**words).stdout.split() == ["plain,serve", "plain,server"]
    words |= {"COMP_WORDS": "llmgw agent st", "COMP_CWORD": "2"}
    assert llmgw(**words).stdout.split() == ["plain,stop-all"]
    words |= {"COMP_WORDS": "llmgw serve --po", "COMP_CWORD": "2"}
    assert llmgw(**words).stdout.split() == ["plain,--port"]


def shell(line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A line of a shell, in which $LLMGW is the program."""
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    environ = {**outside, "LLMGW": f"{sys.executable} -m llmgw", **environ}
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False, env=environ)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "completion bash", "--version"])
def test_a_full_disk_behind_stdout_is_one_line(words: str) -> None:
    done = shell(f"$LLMGW {words} >/dev/full")
    assert (done.returncode, done.stderr) == (1, "llmgw: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("$LLMGW --help >&-", 0),
        ("$LLMGW --version <&- >&- 2>&-", 0),
        ("$LLMGW serve /nowhere.gguf 2>/dev/full", 2),
        ("$LLMGW serve /nowhere.gguf 2>&-", 2),
        ("$LLMGW no-such-command 2>/dev/full", 2),
        ("$LLMGW demo --model /nowhere.gguf --ask hi <&- >&- 2>&-", 2),
    ],
)
def test_what_can_not_be_said_changes_no_end(line: str, code: int) -> None:
    done = shell(line)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "serve ~/x.gguf", "demo", "agent", "server", "ctl nodes"])
def test_a_user_without_a_home_gets_words(command: str) -> None:
    program = (
        "import os, pwd, sys\n"
        # as the system answers in a container, to a user who is in no file of accounts
        "def getpwuid(uid):\n    raise KeyError(uid)\n"
        "pwd.getpwuid, os.geteuid = getpwuid, lambda: 54321\n"
        f"sys.argv = {['llmgw', *command.split()]!r}\n"
        "from llmgw.__main__ import main\nmain()\n"
    )
    environ = {key: value for key, value in os.environ.items() if key not in ("HOME", "LLMGW_CONFIG", "XDG_DATA_HOME")}
    environ |= {"LLMGW_CONFIG": "~/llmgw.yaml"} if command in ("agent", "server", "ctl nodes") else {}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environ
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (1, 2)
    assert re.match(r"llmgw: .*(no home folder|which model)", done.stderr)


@pytest.mark.slow
def test_an_interrupt_while_it_is_loaded_is_quiet() -> None:
    """As early as can be: at the first import of llmgw's own."""
    program = (
        "import signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'llmgw.cli.commands':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from llmgw.__main__ import main\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
