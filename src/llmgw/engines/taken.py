"""Which of a definition's sources an engine could not be pointed at, told before anybody fetches them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from llmgw.core.model import Model
from llmgw.core.weights import Form, Source, parse_source
from llmgw.engines.types import EngineInfo, SourceKind
from llmgw.errors import Problem


def find_untaken(info: EngineInfo, model: Model) -> list[Problem]:
    """The sources that are fetched, and that this engine does not read by what is known of it.

    A file is fetched as a file, and what matches a pattern as a folder. Paths and repositories are the engine's own to
    judge.
    """
    problems = []
    for key, text in _sources(model):
        source = parse_source(text)
        if source.is_fetched and not _is_taken(info, source):
            problems.append(Problem(key=key, message=f"{_show(source)} {_say_why(info, source)}"))
    return problems


def _sources(model: Model) -> Iterator[tuple[str, str]]:
    yield "source", model.source
    if model.mmproj is not None:
        yield "mmproj", model.mmproj
    yield from ((f"loras[{index}].source", lora.source) for index, lora in enumerate(model.loras))


def _is_taken(info: EngineInfo, source: Source) -> bool:
    suffix = PurePosixPath(source.name).suffix.lower()
    if source.is_pattern and SourceKind.REPOSITORY in info.sources:
        return True
    if SourceKind.FILE not in info.sources:
        return False
    # A pattern may match such files, whatever its end: (*q4_k_m*).
    unsaid = source.is_pattern and (not suffix or "*" in suffix)
    return unsaid or not info.file_suffixes or suffix in info.file_suffixes


def _show(source: Source) -> str:
    # What stands behind the ? of an address may be a key to it.
    return source.text.partition("?")[0] if source.form is Form.URL else source.text


def _say_why(info: EngineInfo, source: Source) -> str:
    if SourceKind.FILE in info.sources:
        kinds = " or ".join(f"a {suffix} file" for suffix in info.file_suffixes)
        return f"is none that {info.title} reads: that is {kinds}"
    told = f"is one file, and {info.title} reads a folder or a repository: "
    if source.repo:
        return f"{told}write hf:{source.repo}/*, {source.repo} alone, or choose an engine that reads such a file"
    return f"{told}name those, or choose an engine that reads such a file"
