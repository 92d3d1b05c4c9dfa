"""Whether an engine on this node can be pointed at a model's source, and if not, why."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from llmgw.core.headers import Header, check_parts, list_parts_of
from llmgw.core.model import Model
from llmgw.core.safetensors import Wrong, read_index
from llmgw.core.weights import Form, Source, list_parts, parse_source
from llmgw.engines.registry import Engine
from llmgw.engines.types import SourceKind
from llmgw.errors import EngineFailed
from llmgw.host.weights.disk.heads import judge_open
from llmgw.host.weights.errors import show_url

_SAFETENSORS = ".safetensors"
_INDEX = ".index.json"
_MOST_INDEX_BYTES = 64 * 1024 * 1024
_PUT_WHOLE = "put the whole file there"
_PUT_ALL = "put all of its files beside each other on this node"


class SourceMissing(EngineFailed):
    """Nothing is at the path that a definition names."""


class SourceSpoiled(EngineFailed):
    """What is there can't be what a definition means: cut off, a page of HTML, a pointer."""


def check_sources(model: Model, engine: Engine) -> None:
    """Raise EngineFailed when the engine can't be pointed at all that the model is made of. What is to be fetched is
    not looked for. Blocks."""
    check_source(model.source, engine)
    if model.mmproj is not None:
        check_source(model.mmproj, engine, what="mmproj")
    for lora in model.loras:
        check_source(lora.source, engine, what=f"source of the adapter {lora.name}:")


def check_source(text: str, engine: Engine, *, what: str = "source") -> None:
    """Raise EngineFailed when the engine can't be pointed at this source, with what to do about it."""
    takes, title, source = engine.info.sources, engine.info.title, parse_source(text)
    named = f"{what} {show_url(text)}"
    match source.form:
        case Form.PATH:
            _check_path(text, takes, title, what)
        case Form.UNKNOWN:
            raise EngineFailed(f"{named}: {source.why}")
        case Form.REPOSITORY if SourceKind.REPOSITORY not in takes:
            raise EngineFailed(
                f"{named} is a repository, and {title} takes a file",
                remedy=f"write hf:{source.repo}/FILE for one that llmgw fetches, or the path of the model's file",
            )
        case Form.HUB | Form.URL if SourceKind.FILE not in takes and not source.is_pattern:
            raise EngineFailed(
                f"{named} is a file, and {title} takes a repository or a folder of one",
                remedy=f"write {source.repo} for the engine to fetch, or hf:{source.repo}/* for llmgw to"
                if source.repo
                else "write org/repo for the engine to fetch, hf:org/repo/* for llmgw to, or the path of a folder",
            )


def is_file_wanted(source: Source, engine: Engine) -> bool:
    """Whether an engine is pointed at the file that was fetched, rather than at the folder that it is in."""
    takes = engine.info.sources
    if SourceKind.FILE not in takes or SourceKind.REPOSITORY not in takes:
        return SourceKind.FILE in takes
    return not source.is_pattern or source.file.endswith(engine.info.file_suffixes)


def _check_path(source: str, takes: frozenset[SourceKind], title: str, what: str) -> None:
    told = f"{what} {source!r}"
    with _telling(told, "put it there on this node, or mend the path in the model's definition"):
        path = Path(source)
        if SourceKind.REPOSITORY in takes and stat.S_ISDIR(path.stat().st_mode):
            _check_folder(path, told)
            return
        header = _look_at(path, f"{what} {source}")
    _check_parts(path, header, what)
    if SourceKind.FILE not in takes:
        raise EngineFailed(f"{what} {source} is a file, and {title} takes a repository or a folder of one")


def _check_parts(path: Path, header: Header | None, what: str) -> None:
    """All that an engine finds beside the file that it is pointed at, and reads as well."""
    names = list_parts_of(path.name, header)
    if names[0] != path.name:
        raise EngineFailed(
            f"{what} {path} is one of {len(names)} parts, and not the first",
            remedy=f"write the path of the first: {path.with_name(names[0])}",
        )
    headers = {path.name: header}
    for name in names[1:]:
        headers[name] = _look_at_part(path.with_name(name), f"{what} {path}")
    _compare(path.parent, headers, f"{what} {path}")


def _check_folder(folder: Path, told: str) -> None:
    """What of the safetensors in a folder is there has to be whole, and of files that are parts of one model all have
    to be there. Which of several models in it an engine loads is not known here, and one that is not there at all is
    none of them."""
    names = sorted(
        name for name in os.listdir(folder) if name.lower().endswith(_SAFETENSORS) and not name.startswith(".")
    )
    headers = {name: _look_at_part(folder / name, told) for name in names}
    groups = {list_parts(name) for name in names if name in list_parts(name)}
    for group in sorted(
        each for each in (*groups, *_list_indexed(folder, told)) if not headers.keys().isdisjoint(each)
    ):
        for name in group:
            if name not in headers:
                headers[name] = _look_at_part(folder / name, told)
        _compare(folder, {name: headers[name] for name in group}, told)


def _list_indexed(folder: Path, told: str) -> Iterator[tuple[str, ...]]:
    """The files that each index in a folder names."""
    for path in sorted(folder.glob(f"*{_SAFETENSORS}{_INDEX}")):
        with _telling(told, _PUT_ALL):
            text = _read_index(path)
        if len(text) > _MOST_INDEX_BYTES:
            continue
        index = read_index(text)
        if isinstance(index, Wrong):
            raise SourceSpoiled(f"{told}: {path.name} {index.why}", remedy=_PUT_WHOLE)
        yield index.files


def _read_index(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):
        raise SourceSpoiled(f"the index {path} is not an ordinary file", remedy=_PUT_WHOLE)
    with path.open("rb") as file:
        return file.read(_MOST_INDEX_BYTES + 1)


def _compare(folder: Path, headers: Mapping[str, Header | None], what: str) -> None:
    """Of what is longer than is read nothing is said."""
    known = {name: header for name, header in headers.items() if header is not None}
    if len(known) == len(headers) > 1 and (wrong := check_parts(known)) is not None:
        raise SourceSpoiled(f"{what}: in {folder} {wrong}", remedy="put all parts of one and the same model there")


def _look_at_part(path: Path, told: str) -> Header | None:
    with _telling(f"{told} is not whole: {str(path)!r}", _PUT_ALL):
        if not stat.S_ISREG(path.stat().st_mode):
            raise SourceSpoiled(f"{told} is not whole: {path} is not an ordinary file", remedy=_PUT_WHOLE)
        return _look_at(path, f"{told} is not whole: {path}")


def _look_at(path: Path, told: str) -> Header | None:
    """The header of a file that is in order; None where it has none, or one that is longer than is read. Raises
    EngineFailed, and OSError where it can't be read."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise EngineFailed(f"{told} is not an ordinary file", remedy="write the path of the model's file itself")
    with path.open("rb", buffering=0) as file:
        judged = judge_open(file.fileno(), path.name)
    if judged.wrong is not None:
        # The engine would say the same, in other words, a minute later and again at each try.
        raise SourceSpoiled(f"{told} {judged.wrong}", remedy=_PUT_WHOLE)
    return judged.header


@contextmanager
def _telling(told: str, absent: str) -> Iterator[None]:
    """``absent``: what to do where nothing is there."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceMissing(f"{told} can't be read: {error.strerror}", remedy=absent) from error
    except PermissionError as error:
        raise EngineFailed(
            f"{told} can't be read: {error.strerror}",
            remedy="let the user that llmgw runs as read it, and enter each folder above it",
        ) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise EngineFailed(f"{told} can't be read: {why}") from error
