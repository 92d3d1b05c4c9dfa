"""The files that a configuration names: where they may lie, who may read them, and what ``@/path`` stands for."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from llmgw.config.document import Section
from llmgw.config.ordinary import read_with_stat
from llmgw.config.paths import expand_home, is_there
from llmgw.errors import ConfigError, Problem

MAX_VALUE_BYTES = 64 * 1024

T = TypeVar("T")


def named_file(path: Path | None, *, environ: Mapping[str, str]) -> Path | None:
    """The file that the command line names, or failing that the environment."""
    if path is not None:
        return path
    named = environ.get("LLMGW_CONFIG")
    return Path(expand_home(named)) if named else None


def find_system_file(path: Path | None, *, environ: Mapping[str, str], system_file: Path) -> Path:
    """The file to read where there has to be one. ConfigError with what to write when there is none."""
    found = named_file(path, environ=environ)
    if found is None and not is_there(system_file):
        text = f"is not there: write it (examples/{system_file.name} is a start), or name another with --config"
        raise ConfigError([Problem(key="", message=text, where=str(system_file))])
    return found or system_file


def read_path(section: Section, key: str, default: T) -> Path | T:
    """An absolute path, or one in the home; others would depend on where the program was started."""
    text = section.text(key, None)
    if text is None:
        return default
    path = whole_path(text)
    if path is None:
        section.wrong(key, f"{text!r} must be a whole path, from / or ~/")
        return default
    return path


def whole_path(text: str) -> Path | None:
    """The path that this text is, wherever the program was started; None when it is none."""
    path = Path(expand_home(text)) if text.startswith("~/") else Path(text)
    return path if path.is_absolute() else None


def read_existing(section: Section, key: str, *, secret: bool = False, check: bool = True) -> Path:
    """The path of a file that has to be there and readable; of a secret one, by nobody outside its group.

    ``check`` False asks for the path alone.
    """
    section.require(key)
    path = read_path(section, key, None)
    if path is None:
        return Path("/")
    if check:
        try:
            _read(path, 0, secret=secret)
        except ValueError as error:
            section.wrong(key, str(error))
    return path


def read_value(section: Section, key: str, default: T) -> str | T:
    """A text; ``@/path`` is the first line of that file, which holds a secret."""
    text = section.text(key, None)
    if text is None:
        return default
    if not text.startswith("@"):
        return text
    try:
        return _first_line(text.removeprefix("@"))
    except ValueError as error:
        section.wrong(key, str(error))
        return default


def _first_line(name: str) -> str:
    path = whole_path(name)
    if path is None:
        raise ValueError(f"'@{name}' must be @ and a whole path, as @/etc/llmgw/secrets/store")
    try:
        lines = _read(path, MAX_VALUE_BYTES, secret=True).decode().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    if not lines or not lines[0].strip():
        raise ValueError(f"{path} has nothing on its first line")
    return lines[0].strip()


def _read(path: Path, size: int, *, secret: bool) -> bytes:
    """The first bytes of a file. ValueError says why it can't be used."""
    try:
        data, facts = read_with_stat(path, size)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    if secret and facts.st_mode & stat.S_IROTH:
        raise ValueError(f"{path} can be read by everybody on this machine: chmod o-rwx {path}")
    return data
