"""Whether an engine on this node can be pointed at a model's source, and if not, why."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from llmgw.core.headers import HEAD_BYTES, check_header
from llmgw.core.model import Model
from llmgw.core.weights import Form, Source, parse_source
from llmgw.engines.registry import Engine
from llmgw.engines.types import SourceKind
from llmgw.errors import EngineFailed
from llmgw.host.weights.errors import show_url


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
    try:
        path = Path(source)
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode) and SourceKind.REPOSITORY in takes:
                return
            raise EngineFailed(
                f"{what} {source} is not an ordinary file", remedy="write the path of the model's file itself"
            )
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            wrong = check_header(path.name, file.read(min(size, HEAD_BYTES)), size)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceMissing(
            f"{what} {source!r} can't be read: {error.strerror}",
            remedy="put it there on this node, or mend the path in the model's definition",
        ) from error
    except PermissionError as error:
        raise EngineFailed(
            f"{what} {source!r} can't be read: {error.strerror}",
            remedy="let the user that llmgw runs as read it, and enter each folder above it",
        ) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise EngineFailed(f"{what} {source!r} can't be read: {why}") from error
    if wrong is not None:
        # The engine would say the same, in other words, a minute later and again at each try.
        raise SourceSpoiled(f"{what} {source} {wrong}", remedy="put the whole file there")
    if SourceKind.FILE not in takes:
        raise EngineFailed(f"{what} {source} is a file, and {title} takes a repository or a folder of one")
