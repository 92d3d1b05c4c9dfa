"""What of a commit an engine is pointed at."""

from __future__ import annotations

import posixpath

from llmgw.core.weights import Manifest, list_parts, parse_source
from llmgw.host.weights.errors import FetchFailed, Kind

# What is one file, and a model: the first that there is any of counts.
_MODEL_SUFFIXES = (".gguf", ".safetensors")
# A model's eyes lie beside it, by the habit of those who publish GGUF files.
_EYES = "mmproj"


def find_entry_file(manifest: Manifest) -> str:
    """The file of a model that is one, or the first part of it. Raises FetchFailed when it could be several."""
    names = [file.name for file in manifest.files]
    named = parse_source(manifest.source)
    if not named.is_pattern and named.file in names:
        return list_parts(named.file)[0] if list_parts(named.file)[0] in names else named.file
    firsts = list(dict.fromkeys(part if (part := list_parts(name)[0]) in names else name for name in names))
    if len(firsts) == 1:
        return firsts[0]
    for suffix in _MODEL_SUFFIXES:
        fitting = [name for name in firsts if name.lower().endswith(suffix)]
        models = [name for name in fitting if not posixpath.basename(name).lower().startswith(_EYES)] or fitting
        if len(models) == 1:
            return models[0]
        if models:
            raise _several(manifest, models)
    raise _several(manifest, firsts)


def find_entry_folder(manifest: Manifest) -> str:
    """The folder that all files are in, ``""`` for the commit's own."""
    return posixpath.commonpath([posixpath.dirname(file.name) for file in manifest.files])


def _several(manifest: Manifest, names: list[str]) -> FetchFailed:
    told = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    source = parse_source(manifest.source)
    return FetchFailed(
        f"this engine takes one file, and {source.file or source.name} is several: {told}",
        Kind.NO_FILE,
        remedy=f"name one of them, as hf:{source.repo}/{names[0]}" if source.repo else "name one of them",
    )
