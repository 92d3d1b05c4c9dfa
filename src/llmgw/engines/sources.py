"""Where engine plugins lie: in the distributions that are installed, and in the folder that LLMGW_PLUGINS names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import Distribution, distributions
from importlib.util import module_from_spec
from pathlib import Path

from llmgw.errors import Problem

__all__ = ["GROUP", "Source", "find_sources"]

GROUP = "llmgw.engines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A plugin that is not imported yet. ``value`` is the same for the same plugin found twice, ``title`` names it in
    a sentence, and ``origin`` in a table. ``folder`` is where its modules are, when no other program looks there."""

    name: str
    value: str
    title: str
    origin: str
    load: Callable[[], object]
    folder: str | None = None


def find_sources(folder: str | None) -> tuple[list[Source], list[Problem]]:
    """Every plugin by name, the installed ones first, and what in the metadata or the folder can't be read."""
    problems: list[Problem] = []
    place = Path(os.path.abspath(os.path.expanduser(folder))) if folder else None
    # Of what this process has already made importable the folder's own reading comes later.
    installed = [each for each in distributions() if not _lies_in(each, place)]
    found = _read_distributions(installed, problems)
    return ([*found, *_read_folder(place, problems)] if place else found), problems


def _read_distributions(all_of_them: Iterable[Distribution], problems: list[Problem]) -> list[Source]:
    found = []
    known = set()
    for distribution in all_of_them:
        # Each alone: a broken one of anybody's would take the plugins of all others with it.
        try:
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            # What lies further down the path under the same name is shadowed, and so are its modules.
            name = re.sub(r"[-_.]+", "-", str(distribution.name)).lower()
            if name in known:
                continue
            known.add(name)
            origin = f"distribution {distribution.name} {distribution.version}"
            for point in distribution.entry_points.select(group=GROUP):
                title = f"plugin {point.value} of {origin}"
                found.append(Source(name=point.name, value=point.value, title=title, origin=origin, load=point.load))
        except Exception as failed:
            text = f"the entry points of {_place_of(distribution)} can't be read: {type(failed).__name__}: {failed}"
            problems.append(Problem(key=GROUP, message=text))
    # Whatever the order of the path: of two that claim a name the same one has it in every process.
    return sorted(found, key=lambda source: (source.name, source.value, source.origin))


def _read_folder(folder: Path, problems: list[Problem]) -> list[Source]:
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".py" and path.is_file())
    except OSError as failed:
        text = f"{folder} can't be read: {failed.strerror}; name a folder of plugins, or unset it"
        problems.append(Problem(key="LLMGW_PLUGINS", message=text))
        return []
    inside = [each for each in distributions(path=[str(folder)]) if _lies_in(each, folder)]
    found = _read_distributions(inside, problems)
    # A module that came with a distribution is that one's, and no plugin by itself.
    brought = {str(file) for each in inside for file in each.files or ()}
    brought |= {f"{source.value.partition(':')[0]}.py" for source in found}
    own = [path for path in files if not path.name.startswith((".", "_")) and path.name not in brought]
    if (found or own) and str(folder) not in sys.path:
        # For what they import of their own. Last: nothing there shadows what llmgw itself imports.
        sys.path.append(str(folder))
    return [replace(source, folder=str(folder)) for source in (*found, *map(_file, own))]


def _file(path: Path) -> Source:
    title = f"plugin {path}"
    return Source(name=path.stem, value=str(path), title=title, origin=str(path), load=lambda: _import(path))


def _import(path: Path) -> object:
    # Under a name of llmgw's: a plugin vllm.py is not the package vllm.
    name = f"llmgw_plugin_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    loader = SourceFileLoader(name, str(path))
    spec = ModuleSpec(name, loader, origin=str(path))
    spec.has_location = True
    module = module_from_spec(spec)
    # Dataclasses with annotations look their module up by its name.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _lies_in(distribution: Distribution, folder: Path | None) -> bool:
    return folder is not None and Path(str(distribution.locate_file(""))) == folder


def _place_of(distribution: Distribution) -> str:
    return str(getattr(distribution, "_path", None) or distribution.locate_file(""))
