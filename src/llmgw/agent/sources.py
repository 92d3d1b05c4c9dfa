"""Whether an engine on this node can be pointed at a model's source, and if not, why."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from llmgw.engines.registry import Engine
from llmgw.engines.types import SourceKind
from llmgw.errors import EngineFailed

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_source(source: str, engine: Engine) -> None:
    """Raise EngineFailed when the engine can't be pointed at this source, with what to do about it."""
    takes = engine.info.sources
    path = Path(source)
    if not path.is_absolute() and not path.exists():
        if SourceKind.REPOSITORY in takes and HUB_NAME.fullmatch(source):
            return
        if "://" in source or not source.endswith(engine.info.file_suffixes or ("/",)):
            raise EngineFailed(
                f"source {source} is not fetched in this version: download it, and write the path of the file as source"
            )
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode) and SourceKind.REPOSITORY in takes:
                return
            raise EngineFailed(f"source {source} is not a file: write the path of the model's file itself")
        with path.open("rb"):
            pass
    except OSError as error:
        raise EngineFailed(f"source {source} can't be read: {error.strerror}") from error
    if SourceKind.FILE not in takes:
        raise EngineFailed(f"source {source} is a file, and {engine.info.title} takes a repository or a folder of one")
