from __future__ import annotations

import json
import os
import pty
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llmgw.cli.ctl.model_edit import USUAL_EDITORS, find_editor
from llmgw.errors import UsageError

TEXT = "name: m\n# größer\nsource: /m.gguf\n"
KEPT = {"model": {"name": "m", "status": "ready"}, "definition": {}, "text": TEXT, "added_at": 12.5}
REPLACED = {"models": [{"name": "m", "replaced": True, "runs": True, "not_in_effect": []}]}
WRONG = {"error": {"code": "invalid_config", "message": "wrong", "problems": [
    {"key": "nmae", "where": "m.yaml:4:1", "message": "unknown key (name?)"},
    {"key": "profiles", "where": "m.yaml:1:1", "message": "needs at least one profile"},
]}}  # fmt: skip

Editor = Callable[[str], Path]

# The terminal's own program, as one that a shell starts.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@pytest.fixture
def drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where definitions lie while they are edited."""
    folder = tmp_path / "drafts"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def editor(tmp_path: Path, drafts: Path, monkeypatch: pytest.MonkeyPatch) -> Editor:
    """Makes an editor of a shell script, which has the file's path in $1."""

    def make(script: str) -> Path:
        path = tmp_path / "an editor"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("EDITOR", f"'{path}'")
        return path

    monkeypatch.delenv("VISUAL", raising=False)
    return make


def kept_file(said: str) -> Path:
    """The file that a message says is kept."""
    (found,) = re.findall(r"what you wrote is kept in (\S+); `llmgw ctl model add --replace -f \1` sends it", said)
    return Path(found)


def kept_only(said: str) -> Path:
    """The same where nobody is told to send it."""
    assert "model add --replace" not in said
    (found,) = re.findall(r"what you wrote is kept in (\S+?)(?:;|$)", said.strip())
    return Path(found)


def posts(port: Any) -> list[Any]:
    return [heard.body for heard in port.heard if heard.method == "POST"]


def test_what_is_saved_takes_the_place_of_what_was(port: Any, ctl: Any, editor: Editor, drafts: Path) -> None:
    port.will_answer("GET", "/models/m", KEPT)
    port.will_answer("POST", "/models", REPLACED)
    editor(f'cp "$1" "{drafts}/seen"; basename "$1" >> "{drafts}/seen"; echo "task: chat" >> "$1"')
    ended = ctl("model", "edit", "m")
    assert (ended.status, ended.out, ended.err) == (0, "m is replaced\n", "")
    assert posts(port) == [{"file": "m.yaml", "text": f"{TEXT}task: chat\n", "replace": True}]
    assert (drafts / "seen").read_text() == f"{TEXT}m.yaml\n"
    assert os.listdir(drafts) == ["seen"]


def test_without_a_change_nothing_is_sent(port: Any, ctl: Any, editor: Editor, drafts: Path) -> None:
    port.will_answer("GET", "/models/m", KEPT)
    editor('touch "$1"')
    ended = ctl("model", "edit", "m")
    assert (ended.status, ended.out) == (0, "m is as it was, and nothing is sent\n")
    assert ctl("model", "edit", "m", "--json").out == ""
    assert posts(port) == []
    assert os.listdir(drafts) == []


def test_a_declared_model_opens_no_editor_and_names_its_place(
    port: Any, ctl: Any, editor: Editor, drafts: Path
) -> None:
    declared = {"model": {"name": "m", "where": "/etc/llmgw/server.yaml:4:5"}, "definition": {}}
    port.will_answer("GET", "/models/m", declared)
    editor(f'touch "{drafts}/opened"')
    ended = ctl("model", "edit", "m")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == ("llmgw: m is declared at /etc/llmgw/server.yaml:4:5: edit it there, then `llmgw ctl reload`\n")
    assert os.listdir(drafts) == []


def test_a_model_that_there_is_not_opens_no_editor(port: Any, ctl: Any, editor: Editor, drafts: Path) -> None:
    editor(f'touch "{drafts}/opened"')
    assert ctl("model", "edit", "m").status == 1
    assert os.listdir(drafts) == []


def test_an_alias_is_its_model_and_a_path_of_names_one_file(port: Any, ctl: Any, editor: Editor) -> None:
    kept = {**KEPT, "model": {"name": "org/m:8b"}, "text": "name: org/m:8b\n"}
    port.will_answer("GET", "/models/a", kept)
    port.will_answer("GET", "/models/org%2Fm%3A8b", kept)
    port.will_answer("POST", "/models", REPLACED)
    editor('echo "task: chat" >> "$1"')
    assert ctl("model", "edit", "a").status == 0
    assert [body["file"] for body in posts(port)] == ["org-m:8b.yaml"]


def test_what_is_refused_without_a_terminal_is_kept_and_named(port: Any, ctl: Any, editor: Editor) -> None:
    port.will_answer("GET", "/models/m", KEPT)
    port.will_answer("POST", "/models", WRONG, status=400)
    editor('echo "nmae: x" >> "$1"')
    ended = ctl("model", "edit", "m")
    assert (ended.status, ended.out) == (1, "")
    *said, last = ended.err.splitlines()
    assert said == [
        "llmgw: m.yaml:4:1 nmae: unknown key (name?)",
        "m.yaml:1:1 profiles: needs at least one profile",
    ]
    file = kept_file(last)
    assert file.read_text() == f"{TEXT}nmae: x\n"
    # a definition may hold a token
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            'sed -i s/m$/n/ "$1"',
            "m.yaml:1:1 name: 'n': a name can't be changed in an edit: write m; `llmgw ctl model add`",
        ),
        (
            'echo "models: [{name: m}, {name: n}]" > "$1"',
            "m.yaml:1:22 models[1].name: is of another model than m: take",
        ),
        ('echo "a: [" > "$1"', "m.yaml:2:1 is not YAML: "),
        ('echo > "$1"', "m.yaml is empty"),
        ('printf "a: \\\\377" > "$1"', "m.yaml is not UTF-8 (line 1)"),
        ('rm "$1"; mkdir "$1"', "m.yaml can't be read: Is a directory"),
        ('head -c 2000000 /dev/zero > "$1"', "m.yaml is larger than 1024 KiB: not a definition"),
    ],
)
def test_what_can_not_be_this_model_is_not_sent_and_kept(
    port: Any, ctl: Any, editor: Editor, script: str, said: str
) -> None:
    port.will_answer("GET", "/models/m", KEPT)
    editor(script)
    ended = ctl("model", "edit", "m")
    assert ended.status == 1
    assert said in ended.err
    # to send it would replace another model, or can't work
    assert kept_only(ended.err).exists()
    assert posts(port) == []


def test_a_file_that_the_editor_took_away_is_no_change(port: Any, ctl: Any, editor: Editor, drafts: Path) -> None:
    port.will_answer("GET", "/models/m", KEPT)
    editor('rm "$1"')
    ended = ctl("model", "edit", "m")
    assert ended.status == 2
    assert "m.yaml can't be read: No such file or directory" in ended.err
    assert posts(port) == os.listdir(drafts) == []


def test_one_model_of_a_list_stays_one(port: Any, ctl: Any, editor: Editor) -> None:
    port.will_answer("GET", "/models/m", {**KEPT, "text": "models:\n- name: m\n"})
    port.will_answer("POST", "/models", REPLACED)
    editor('echo "  task: chat" >> "$1"')
    assert ctl("model", "edit", "m").status == 0
    assert posts(port)[0]["text"] == "models:\n- name: m\n  task: chat\n"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({**KEPT, "added_at": 13.5}, "m was changed on the server while you edited it: nothing is sent"),
        (
            {**KEPT, "text": "name: m\nsource: /other.gguf\n"},
            "look at what it is now (`llmgw ctl model show m`), and edit that",
        ),
        ({"model": {"name": "m", "where": "server.yaml:1:1"}, "definition": {}}, "m is declared at server.yaml:1:1"),
    ],
)
def test_what_somebody_else_changed_meanwhile_is_not_overwritten(
    port: Any, ctl: Any, editor: Editor, now: dict[str, Any], said: str
) -> None:
    port.will_answer("GET", "/models/m", KEPT, now)
    editor('echo "task: chat" >> "$1"')
    ended = ctl("model", "edit", "m")
    assert ended.status == 1
    assert said in ended.err
    assert kept_only(ended.err).read_text() == f"{TEXT}task: chat\n"
    assert posts(port) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("unknown_model", "m was removed from the server while you edited it: nothing is sent"),
        ("failed", "the disk is full"),
    ],
)
def test_one_that_was_removed_meanwhile_is_added_again_only_by_who_says_so(
    port: Any, ctl: Any, editor: Editor, code: str, said: str
) -> None:
    port.will_answer("GET", "/models/m", KEPT)
    error = {"error": {"code": code, "message": "the disk is full"}}
    port.answers[("GET", "/models/m")].append((404, "application/json", json.dumps(error).encode()))
    editor('echo "task: chat" >> "$1"')
    ended = ctl("model", "edit", "m")
    assert (ended.status, said in ended.err, posts(port)) == (1, True, [])
    if code == "unknown_model":
        file = kept_only(ended.err)
        assert f"`llmgw ctl model add -f {file}` adds it again" in ended.err
    else:
        assert kept_file(ended.err).exists()


def test_without_a_name_in_it_nobody_is_told_to_send_it(port: Any, ctl: Any, editor: Editor) -> None:
    port.will_answer("GET", "/models/m", KEPT)
    port.will_answer("POST", "/models", WRONG, status=400)
    editor('sed -i /name/d "$1"')
    assert kept_only(ctl("model", "edit", "m").err).read_text() == "# größer\nsource: /m.gguf\n"


def test_without_a_terminal_no_editor_is_guessed(
    port: Any, ctl: Any, drafts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vim was started on /dev/null, and hung."""
    port.will_answer("GET", "/models/m", KEPT)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.delenv("EDITOR", raising=False)
    ended = ctl("model", "edit", "m")
    assert (ended.status, ended.err) == (
        2,
        "llmgw: there is no terminal to edit on: name a program that edits by itself in EDITOR, or write the "
        "definition to a file and send that with `llmgw ctl model add --replace -f FILE`\n",
    )
    assert os.listdir(drafts) == []


def test_a_server_that_has_gone_meanwhile_costs_nothing_that_was_written(port: Any, ctl: Any, editor: Editor) -> None:
    port.will_answer("GET", "/models/m", KEPT)
    port.will_answer("POST", "/models", {"error": {"code": "store_unavailable", "message": "no store"}}, status=503)
    editor('echo "task: chat" >> "$1"')
    ended = ctl("model", "edit", "m")
    assert (ended.status, ended.err.splitlines()[0]) == (1, "llmgw: no store")
    assert kept_file(ended.err).read_text() == f"{TEXT}task: chat\n"


@pytest.mark.parametrize(
    "ending", [("exit 3", "ended with status 3: nothing is sent"), ("kill -9 $$", "ended by signal 9: nothing is sent")]
)
def test_an_editor_that_failed_sends_nothing(
    port: Any, ctl: Any, editor: Editor, drafts: Path, ending: tuple[str, str]
) -> None:
    script, how = ending
    port.will_answer("GET", "/models/m", KEPT)
    editor(script)
    ended = ctl("model", "edit", "m")
    assert ended.status == 1
    assert how in ended.err
    assert os.listdir(drafts) == []
    editor(f'echo "task: chat" >> "$1"; {script}')
    assert kept_file(ctl("model", "edit", "m").err).read_text() == f"{TEXT}task: chat\n"
    assert posts(port) == []


@pytest.mark.slow
def test_a_key_that_the_editor_has_a_use_for_ends_nothing(port: Any, editor: Editor, drafts: Path) -> None:
    """Ctrl-C at a terminal goes to the whole group: many editors take it as a key like any other."""
    port.will_answer("GET", "/models/m", KEPT)
    port.will_answer("POST", "/models", REPLACED)
    # (the test's own group may hold others: it is sent to that program alone; the editor itself would end by it)
    editor('kill -INT $PPID; echo "task: chat" >> "$1"; kill -INT $$; echo "and: more" >> "$1"')
    environ = os.environ | {"LLMGW_ADMIN": port.url, "TMPDIR": str(drafts)}
    command = [sys.executable, "-m", "llmgw", "ctl", "model", "edit", "m"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "ended by signal 2: nothing is sent" in ended.stderr
    assert kept_file(ended.stderr).read_text() == f"{TEXT}task: chat\n"


def test_with_watch_the_model_is_shown_afterwards(port: Any, ctl: Any, editor: Editor) -> None:
    port.will_answer("GET", "/models/m", KEPT, KEPT)
    # a server that says no ends the watching
    port.answers[("GET", "/models/m")].append((404, "application/json", b'{"error": {"code": "x", "message": "gone"}}'))
    port.will_answer("POST", "/models", REPLACED)
    editor('echo "task: chat" >> "$1"')
    ended = ctl("model", "edit", "m", "--watch", "--json")
    assert (ended.status, ended.err) == (1, "llmgw: gone\n")
    assert '"replaced": true' in ended.out


def test_the_editor_is_the_named_one_else_a_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ed", "vi", "nano"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_editor({"VISUAL": "vi -p", "EDITOR": "nano"}, is_terminal=False) == ("vi", "-p")
    assert find_editor({"VISUAL": " ", "EDITOR": "nano"}, is_terminal=True) == ("nano",)
    assert find_editor({}, is_terminal=True) == ("vi",)
    for value, said in (
        ("code --wait", "EDITOR: 'code --wait' begins with no program"),
        ("'vi", 'EDITOR: "\'vi" is no command'),
        ("''", "EDITOR: \"''\" begins with no program"),
    ):
        with pytest.raises(UsageError, match=f"^{re.escape(said)}"):
            find_editor({"EDITOR": value}, is_terminal=True)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"^there is no editor here \(sensible-editor, .*\): name yours in VISUAL or"):
        find_editor({}, is_terminal=True)
    assert "vi" in USUAL_EDITORS


def test_no_editor_is_told_and_leaves_nothing(
    port: Any, ctl: Any, drafts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port.will_answer("GET", "/models/m", KEPT)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", str(drafts.parent / "odd"))
    (drafts.parent / "odd").write_bytes(b"\x7fELF")
    (drafts.parent / "odd").chmod(0o755)
    ended = ctl("model", "edit", "m")
    assert (ended.status, "can't be started: Exec format error" in ended.err) == (2, True)
    assert os.listdir(drafts) == []


@pytest.mark.slow
@pytest.mark.parametrize(("word", "status"), [("y\n", 0), ("n\n", 1), ("\x04", 1)])
def test_on_a_terminal_the_editor_is_opened_again_on_what_was_written(
    port: Any, editor: Editor, drafts: Path, word: str, status: int
) -> None:
    port.will_answer("GET", "/models/m", KEPT)
    port.will_answer("POST", "/models", WRONG, status=400)
    port.will_answer("POST", "/models", REPLACED)
    # the second time it finds what it wrote the first time
    editor('if grep -q nmae "$1"; then sed -i s/nmae.*/task:\\ chat/ "$1"; else echo "nmae: x" >> "$1"; fi')
    environ = os.environ | {"LLMGW_ADMIN": port.url, "TMPDIR": str(drafts), "TERM": "dumb"}
    ours, theirs = pty.openpty()
    with open(ours, "r+b", buffering=0) as terminal, closing(os.fdopen(theirs, "r+b", buffering=0)) as side:
        command = [sys.executable, "-c", TAKE_TERMINAL, "-m", "llmgw", "ctl", "model", "edit", "m"]
        streams: dict[str, Any] = {"stdin": side, "stdout": side, "stderr": side}
        with subprocess.Popen(command, env=environ, start_new_session=True, **streams) as running:
            side.close()
            said = _read_until(terminal, b"[Y/n]: ")
            terminal.write(word.encode())
            said += _read_until(terminal, b"\0")
            ended = running.wait(60)
    assert ended == status
    assert "m.yaml:4:1 nmae: unknown key (name?)\nm.yaml:1:1 profiles: needs at least one profile\n" in said
    if status == 0:
        assert [body["text"] for body in posts(port)] == [f"{TEXT}nmae: x\n", f"{TEXT}task: chat\n"]
        assert "m is replaced" in said
        assert os.listdir(drafts) == []
    else:
        assert len(posts(port)) == 1
        assert kept_file(said).read_text() == f"{TEXT}nmae: x\n"


def _read_until(terminal: Any, mark: bytes) -> str:
    """What a program writes, to this mark or to its end."""
    said = b""
    while mark not in said:
        try:
            piece = terminal.read(4096)
        except OSError:
            break
        if not piece:
            break
        said += piece
    return said.decode().replace("\r\n", "\n")
