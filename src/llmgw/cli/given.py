"""What the MODEL of a command line means: weights that an installed engine reads, here or fetched, or a definition."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from llmgw.config.definition import Definition, load_definitions, wrong_name
from llmgw.config.node import NodeConfig
from llmgw.config.paths import check_text, expand_home
from llmgw.core.model import Model, ModelName, Profile, Scaling
from llmgw.core.weights import HUB_PREFIX, Form, Source, parse_source
from llmgw.engines.registry import Engine
from llmgw.engines.types import SourceKind
from llmgw.errors import ConfigError, Problem, UsageError

DEFINITION_SUFFIXES = {".yaml", ".yml"}
ONE = Scaling(min=1, max=1)
NO_FILE, A_FOLDER = "no such file", "is a folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """How to run bare weights; a definition says all this itself."""

    name: str | None = None
    context_length: int | None = None
    args: tuple[str, ...] = ()


def read_given(given: str, options: FileOptions, engines: Mapping[str, Engine]) -> tuple[Definition, ...]:
    """The models that a MODEL argument stands for. UsageError or ConfigError when it stands for none."""
    source = parse_source(given)
    if source.is_fetched:
        return (describe_fetched(source, options, engines),)
    if source.form is Form.UNKNOWN and given.startswith((HUB_PREFIX, "http://", "https://")):
        # As it is told there: an address may hold a password.
        raise UsageError(f"{source.text}: {source.why}")
    path = existing_file(given, engines)
    if path.suffix.lower() not in DEFINITION_SUFFIXES:
        return (describe_file(path, options, engines),)
    if options != FileOptions():
        raise UsageError(f"{path} is a definition: name, context length and engine arguments are written in it")
    # What is handed to serve is to run: only a definition that says how many may say none.
    return tuple(
        definition if definition.scaled else replace(definition, model=replace(definition.model, scaling=ONE))
        for definition in load_definitions(path, engines)
    )


def existing_file(given: str, engines: Mapping[str, Engine], *, definitions: bool = True) -> Path:
    """A readable file. UsageError with the ways out when it is anything else; ``definitions`` may be one of them."""
    try:
        path = Path(expand_home(given)).absolute()
    except FileNotFoundError:
        raise UsageError(f"{given}: the folder that this is started in is gone; give the whole path") from None
    check_text(str(path), "MODEL")
    why = why_unusable(path)
    if why is None:
        return path
    if why == NO_FILE:
        raise UsageError(f"{given}: {why}{_way_to_fetch(given)}")
    if why == A_FOLDER:
        why += f"; give the weights file in it ({_what_is_taken(engines, definitions)})"
    raise UsageError(f"{given} {why}")


def _way_to_fetch(given: str) -> str:
    """What to write for weights that are not here, where it looks as if that was meant."""
    source = parse_source(given)
    if source.form is Form.REPOSITORY:
        one = f"llmgw serve {HUB_PREFIX}{given}/FILE fetches one of its files"
        return f"; if it is a repository, {one}, and a definition names all of it (docs/configuration.md)"
    remote = source.is_fetched or "://" in given or given.startswith(HUB_PREFIX)
    return f"; llmgw serve fetches {HUB_PREFIX}org/repo/file and https://… by itself" if remote else ""


def why_unusable(path: Path) -> str | None:
    """What keeps this path from being read as a file; None when nothing does."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return NO_FILE
    except (OSError, ValueError) as error:
        return f"can't be read: {error.strerror if isinstance(error, OSError) else error}"
    if stat.S_ISDIR(found.st_mode):
        return A_FOLDER
    if not stat.S_ISREG(found.st_mode) or not os.access(path, os.R_OK):
        return "can't be read: check its permissions, and that it is an ordinary file"
    return None if found.st_size else "is empty: was its download cut off?"


def describe_file(
    path: Path, options: FileOptions, engines: Mapping[str, Engine], *, definitions: bool = True
) -> Definition:
    """A definition of a bare weights file: one replica, by the engine that reads such files. UsageError when none does;
    ``definitions``: whether one could have been given instead."""
    return _describe(str(path), PurePosixPath(path.name), options, engines, definitions=definitions)


def describe_fetched(source: Source, options: FileOptions, engines: Mapping[str, Engine]) -> Definition:
    """The same of weights that are fetched. Of several files, by a pattern, the name is their repository's."""
    name = PurePosixPath(source.name)
    if source.is_pattern:
        name = PurePosixPath(source.repo.rpartition("/")[2] + name.suffix)
    return _describe(source.text, name, options, engines, definitions=False)


def _describe(
    source: str, file: PurePosixPath, options: FileOptions, engines: Mapping[str, Engine], *, definitions: bool
) -> Definition:
    candidates = [name for name, engine in sorted(engines.items()) if file.suffix.lower() in engine.info.file_suffixes]
    shown = source.partition("?")[0] if "://" in source else source
    if not candidates:
        raise UsageError(
            f"{shown}: no installed engine reads such files; it is to be {_what_is_taken(engines, definitions)}"
        )
    for word in options.args:
        check_text(word, "--arg")
    if options.name is not None and (why := wrong_name(options.name)):
        raise UsageError(f"--name: {why}")
    model = Model(
        name=ModelName(options.name or safe_name(file.stem)),
        source=source,
        context_length=options.context_length,
        scaling=ONE,
        profiles=tuple(Profile(name=name, engine=name, args=options.args) for name in candidates),
    )
    return Definition(model=model, scaled=True, not_in_effect=(), places={"": shown})


def safe_name(stem: str) -> str:
    """A file's stem as a model's name: lower case, and nothing that a URL or a shell would trip over."""
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._") or "model"


def check_runnable(definitions: tuple[Definition, ...], engines: Mapping[str, Engine], config: NodeConfig) -> None:
    """That each model can be started here: its engine accepts it, has a program, and its weights are there."""
    problems = [problem for definition in definitions for problem in _rejections(definition, engines)]
    if problems:
        raise ConfigError(problems)
    for definition in definitions:
        if definition.model.scaling.max:
            check_programs(definition.model, engines, config)


def check_programs(model: Model, engines: Mapping[str, Engine], config: NodeConfig) -> None:
    """That one of the model's engines can be started here. UsageError with what to install when none can."""
    wanted = [engines[profile.engine] for profile in model.profiles]
    if any(has_program(engine, config) for engine in wanted):
        return
    ways = [way for engine in wanted for way in _ways_to_install(engine)]
    raise UsageError(f"{model.name}: its engine is not on this machine; " + "; or ".join(dict.fromkeys(ways)))


def has_program(engine: Engine, config: NodeConfig) -> bool:
    """Whether there is a binary, or failing that a program of the plugin's own, that would run this engine."""
    configured = config.engines.get(engine.name)
    if configured and configured.bin is not None:
        if not os.access(configured.bin, os.X_OK) or Path(configured.bin).is_dir():
            raise UsageError(f"engines.{engine.name}.bin: {configured.bin} is not a program that can be run")
        return True
    if shutil.which(engine.info.default_binary):
        return True
    return engine.embedded is not None and importlib.util.find_spec(engine.embedded.requires) is not None


def _rejections(definition: Definition, engines: Mapping[str, Engine]) -> list[Problem]:
    model = definition.model
    if model.scaling.max == 0:
        return []
    problems = []
    for index, profile in enumerate(model.profiles):
        engine = engines[profile.engine]
        found = list(engine.validate(model, profile))
        if SourceKind.REPOSITORY not in engine.info.sources:
            refused = {problem.key.partition("[")[0] for problem in found}
            files = [(key, source) for key, source in definition.sources() if key.partition("[")[0] not in refused]
            found += [problem for key, source in files for problem in _rejections_of_file(key, source)]
        problems += [definition.locate(index, problem) for problem in found]
    return list(dict.fromkeys(problems))


def _rejections_of_file(key: str, source: str) -> list[Problem]:
    """What an engine that reads one file would find wrong here, again at each try."""
    path = Path(source)
    if parse_source(source).is_fetched:
        return []
    why = why_unusable(path)
    if not path.is_absolute():
        hint = f"a path begins with /, ~/ or ./, and what is fetched with {HUB_PREFIX} or https://"
        message = f"{source} is no path of a file: {hint}"
    elif why == NO_FILE:
        message = f"{source} is no file on this machine"
    elif why is not None:
        message = f"{source} {why}"
    else:
        return []
    return [Problem(key=key, message=message)]


def _ways_to_install(engine: Engine) -> list[str]:
    embedded = [engine.embedded.install] if engine.embedded else []
    return [*embedded, f"put {engine.info.default_binary} on PATH, or its path under engines.{engine.name}.bin"]


def _what_is_taken(engines: Mapping[str, Engine], definitions: bool) -> str:
    suffixes = sorted({suffix for engine in engines.values() for suffix in engine.info.file_suffixes})
    kinds = [f"a {suffix} file" for suffix in suffixes] or ["a weights file"]
    return " or ".join([*kinds, *(["a .yaml definition"] if definitions else [])])
