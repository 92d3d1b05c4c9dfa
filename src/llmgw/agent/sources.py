"""Whether an engine on this node can be pointed at a model's source, and if not, why."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from llmgw.core.model import Model
from llmgw.engines.registry import Engine
from llmgw.engines.types import SourceKind
from llmgw.errors import EngineFailed

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_sources(model: Model, engine: Engine) -> None:
    """Raise EngineFailed when the engine can't be pointed at all that the model is made of. Blocks."""
    check_source(model.source, engine)
    if model.mmproj is not None:
        check_source(model.mmproj, engine, what="mmproj")
    for lora in model.loras:
        check_source(lora.source, engine, what=f"source of the adapter {lora.name}:")


def check_source(source: str, engine: Engine, *, what: str = "source") -> None:
    """Raise EngineFailed when the engine can't be pointed at this source, with what to do about it."""
    takes = engine.info.sources
    path = Path(source)
    # One below the folder that the agent was started in is nobody's meaning.
    if not path.is_absolute():
        if SourceKind.REPOSITORY in takes and HUB_NAME.fullmatch(source):
            return
        if "://" in source or not source.endswith(engine.info.file_suffixes or ("/",)):
            raise EngineFailed(
                f"{what} {source} is not fetched in this version: download it, and write the path of the file"
            )
        raise EngineFailed(f"{what} {source} is no whole path: write it from / on")
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode) and SourceKind.REPOSITORY in takes:
                return
            raise EngineFailed(f"{what} {source} is not a file: write the path of the model's file itself")
        with path.open("rb"):
            pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise EngineFailed(f"{what} {source!r} can't be read: {why}", remedy=_remedy(error)) from error
    if SourceKind.FILE not in takes:
        raise EngineFailed(f"{what} {source} is a file, and {engine.info.title} takes a repository or a folder of one")


def _remedy(error: Exception) -> str | None:
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return "put it there on this node, or mend the path in the model's definition"
        case PermissionError():
            return "let the user that llmgw runs as read it, and enter each folder above it"
        case _:
            return None
