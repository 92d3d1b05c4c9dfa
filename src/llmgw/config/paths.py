"""Paths as people give them: below a home that may be missing, in bytes that may be no text."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from llmgw.errors import UsageError


def find_home(environ: Mapping[str, str]) -> Path | None:
    """The home of whoever runs this; None where nobody says: a container's user often has no account."""
    home = environ.get("HOME", "")
    if home.startswith("/"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def expand_home(text: str) -> str:
    """A path that begins with ~ as a whole one. UsageError where there is no such home, or its name is no text."""
    path = os.path.expanduser(text)
    if path == "~" or path.startswith("~/"):
        raise UsageError(
            f"{text}: there is no home folder (HOME is not set, no account here has this uid): write it whole"
        )
    check_text(path, text)
    return path


def check_text(text: str, what: str) -> None:
    """UsageError when ``text`` holds bytes that are no UTF-8: they could be told to nobody, and kept in no file."""
    if not is_text(text):
        shown = os.fsencode(text).decode("utf-8", "backslashreplace")
        name = what if is_text(what) and what != text else ""
        raise UsageError(f"{f'{name}: ' if name else ''}{shown} is not UTF-8: give it a name that is")


def is_text(text: str) -> bool:
    """Whether it can be written down as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_there(path: Path) -> bool:
    """Whether anything is at this path. UsageError where that can't be seen."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UsageError(f"{path} can't be looked for: {error.strerror}") from error
    return True
