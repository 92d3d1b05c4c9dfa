"""``llmgw ctl model edit``: a model that was added, in an editor, and back to the server."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, drawn, operator_options, show, tell
from llmgw.cli.ctl.client import ToldNo, as_word
from llmgw.cli.ctl.model_add import draw, read_file
from llmgw.cli.ctl.model_show import draw as draw_model
from llmgw.errors import ConfigError, LlmgwError, UsageError
from llmgw.host.output import say
from llmgw.units import printable

# What a machine has where nobody has said which is to be taken.
USUAL_EDITORS = ("sensible-editor", "editor", "vim", "vi", "nano")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A model as the server has it: its definition as it was written, and when that was."""

    name: str
    text: str
    added_at: float


@click.command("edit")
@click.argument("name")
@operator_options
def command(*, name: str, asked: Asked) -> None:
    """Edit the definition of the model NAME, which was added with `llmgw ctl model add`.

    $VISUAL or $EDITOR is started on it as it was written; what you save takes its place once the server has checked it.
    Where something in it is wrong you are told and may go on. Without a change nothing is sent, and what can't be sent
    is kept in its file. With --watch the model is shown afterwards.
    """
    kept = fetch(asked, name)
    editor = find_editor(os.environ, is_terminal=sys.stdin.isatty() and sys.stdout.isatty())
    with keep_draft(kept) as path:
        answer = _edit(asked, kept, editor, path)
    if answer is None:
        click.echo(f"{printable(kept.name)} is as it was, and nothing is sent", err=asked.as_json)
        return
    tell(asked, answer, draw)
    if asked.watch:
        show(asked, f"/models/{as_word(kept.name)}", draw_model)


def fetch(asked: Asked, name: str) -> Kept:
    """The model of this name or alias. LlmgwError where the server has none, or server.yaml declares it."""

    def read(answer: Any) -> Kept:
        model = answer["model"]
        if where := model.get("where"):
            raise _Declared(f"{model['name']} is declared at {where}: edit it there, then `llmgw ctl reload`")
        return Kept(name=str(model["name"]), text=str(answer["text"]), added_at=float(answer["added_at"]))

    return drawn(asked.operator, asked.operator.ask("GET", f"/models/{as_word(name)}"), read)


def find_editor(environ: Mapping[str, str], *, is_terminal: bool) -> tuple[str, ...]:
    """The words of the command, less the file. UsageError where there is none, or nobody who could use a usual one."""
    for variable in ("VISUAL", "EDITOR"):
        if not environ.get(variable, "").strip():
            continue
        try:
            words = tuple(shlex.split(environ[variable]))
        except ValueError as error:
            raise UsageError(f"{variable}: {environ[variable]!r} is no command: {error}") from None
        if not words or shutil.which(words[0]) is None:
            raise UsageError(f"{variable}: {environ[variable]!r} begins with no program that can be run")
        return words
    if not is_terminal:
        raise UsageError(
            "there is no terminal to edit on: name a program that edits by itself in EDITOR, or write the definition "
            "to a file and send that with `llmgw ctl model add --replace -f FILE`"
        )
    for program in USUAL_EDITORS:
        if shutil.which(program) is not None:
            return (program,)
    raise UsageError(f"there is no editor here ({', '.join(USUAL_EDITORS)}): name yours in VISUAL or EDITOR")


@contextmanager
def keep_draft(kept: Kept) -> Iterator[Path]:
    """A file with the definition, gone in the end. Where that is an error, and somebody has written in it, it stays and
    the error says where."""
    # Nobody else's business: a definition may hold a token.
    folder = Path(tempfile.mkdtemp(prefix="llmgw-edit-"))
    path = folder / f"{re.sub(r'[^A-Za-z0-9._:+-]', '-', kept.name)}.yaml"
    lost = False
    try:
        path.write_bytes(kept.text.encode())
        yield path
    except LlmgwError as error:
        lost = _is_written(path, kept)
        if not lost:
            raise
        raise LlmgwError(f"{error.message}\n{_where(path, kept.name, error)}") from None
    except BaseException:
        lost = _is_written(path, kept)
        if lost:
            say(f"llmgw: {_where(path, kept.name)}")
        raise
    finally:
        if not lost:
            shutil.rmtree(folder, ignore_errors=True)


def _is_written(path: Path, kept: Kept) -> bool:
    try:
        return path.read_bytes() != kept.text.encode()
    except FileNotFoundError:
        return False
    except OSError:
        # Whatever it is: nothing is thrown away that was not looked at.
        return True


def _where(path: Path, name: str, error: BaseException | None = None) -> str:
    file = printable(shlex.quote(str(path)))
    if isinstance(error, _Overtaken):
        return f"what you wrote is kept in {file}; {error.way.format(file=file)}"
    # Nobody is told to send what can't be, or would take the place of another model.
    sendable = not isinstance(error, _Declared) and _is_of(path, name)
    way = f"; `llmgw ctl model add --replace -f {file}` sends it" if sendable else ""
    return f"what you wrote is kept in {file}{way}"


def _is_of(path: Path, name: str) -> bool:
    """Whether this is a definition of that model and no other, right or wrong."""
    from llmgw.config.document import parse_document  # brings YAML along, which --help can do without

    try:
        text = read_file(str(path))
        _check_name(text, path.name, name)
        top, _ = parse_document(text, path.name)
        stanza = top.sections("models")[0] if top.has("models") else top
        return stanza.text("name", "") == name
    except (LlmgwError, LookupError):
        return False


class _Declared(LlmgwError):  # noqa: N818 - named by what is so
    """The model is server.yaml's."""


class _Overtaken(LlmgwError):  # noqa: N818 - named by what happened, like all of them
    """Somebody else changed the model meanwhile. ``way`` says what may be done with ``{file}``."""

    def __init__(self, message: str, way: str) -> None:
        super().__init__(message)
        self.way = way


def _edit(asked: Asked, kept: Kept, editor: tuple[str, ...], path: Path) -> bytes | None:
    """The server's answer to what was written, None where that is no other than before."""
    while True:
        _run(editor, path)
        try:
            text = read_file(str(path))
            if text == kept.text:
                return None
            _check_name(text, path.name, kept.name)
            _check_unchanged(asked, kept)
            return asked.operator.ask("POST", "/models", {"file": path.name, "text": text, "replace": True})
        except (ConfigError, UsageError) as error:
            _ask_to_go_on(error)


def _run(editor: tuple[str, ...], path: Path) -> None:
    try:
        with _left_to_the_editor(signal.SIGINT), _left_to_the_editor(signal.SIGQUIT):
            status = subprocess.run([*editor, str(path)], check=False).returncode
    except OSError as error:
        raise UsageError(f"{editor[0]} can't be started: {error.strerror}") from None
    if status:
        how = f"with status {status}" if status > 0 else f"by signal {-status}"
        raise LlmgwError(f"{editor[0]} ended {how}: nothing is sent")


@contextmanager
def _left_to_the_editor(number: signal.Signals) -> Iterator[None]:
    """A key of the terminal that the editor has a use for is no end of this program, which would leave it alone there.

    Ignoring the signal would be inherited; a function is not.
    """

    def pass_over(signum: int, frame: FrameType | None) -> None: ...

    before = signal.signal(number, pass_over)
    try:
        yield
    finally:
        signal.signal(number, before)


def _check_name(text: str, file: str, name: str) -> None:
    """ConfigError where this is no definition of that one model: what it is called is what it is known by."""
    from llmgw.config.document import parse_document  # brings YAML along, which --help can do without

    top, findings = parse_document(text, file)
    stanzas = top.sections("models") if top.has("models") else (top,)
    for number, stanza in enumerate(stanzas):
        written = stanza.text("name", "") if stanza.has("name") else ""
        if number:
            stanza.wrong("name", f"is of another model than {name}: take it out, and add it with `llmgw ctl model add`")
        elif written and written != name:
            way = f"write {name}; `llmgw ctl model add` makes another model of it"
            stanza.wrong("name", f"{written!r}: a name can't be changed in an edit: {way}")
    findings.raise_if_any()


def _check_unchanged(asked: Asked, kept: Kept) -> None:
    """LlmgwError where the server has another definition now than the one that was edited, or none."""
    try:
        now = fetch(asked, kept.name)
    except ToldNo as error:
        if error.code != "unknown_model":
            raise
        message = f"{kept.name} was removed from the server while you edited it: nothing is sent"
        raise _Overtaken(message, "`llmgw ctl model add -f {file}` adds it again") from None
    if now != kept:
        message = f"{kept.name} was changed on the server while you edited it: nothing is sent"
        way = f"look at what it is now (`llmgw ctl model show {kept.name}`), and edit that"
        raise _Overtaken(message, way)


def _ask_to_go_on(
    refused: LlmgwError, *, is_terminal: Callable[[], bool] = lambda: sys.stdin.isatty() and sys.stderr.isatty()
) -> None:
    """Nothing where somebody wants to go on with what was written. LlmgwError else: what was refused."""
    if is_terminal():
        say("\n".join(map(printable, refused.message.split("\n"))))
        try:
            if click.confirm("Go on editing it?", default=True, err=True):
                return
        except click.Abort:
            say("")
        raise LlmgwError("nothing is sent")
    raise refused
