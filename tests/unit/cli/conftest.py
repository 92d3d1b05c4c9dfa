from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmgw.config.node import NodeConfig
from llmgw.core.model import Model, Profile
from llmgw.engines import (
    READY,
    Command,
    Embedded,
    EngineInfo,
    Health,
    Launch,
    Problem,
    SourceKind,
    hookimpl,
)
from llmgw.engines.registry import Engine, open_engine


class Plugin:
    """An engine that reads .toy files and refuses the argument --bad."""

    def __init__(self, binary: str, requires: str | None) -> None:
        self.binary = binary
        self.requires = requires

    @hookimpl
    def engine_describe(self) -> EngineInfo:
        return EngineInfo(
            title="Toy",
            default_binary=self.binary,
            cpu=True,
            sources=frozenset({SourceKind.FILE}),
            file_suffixes=(".toy", ".gguf"),
        )

    @hookimpl
    def engine_embedded(self) -> Embedded | None:
        if self.requires is None:
            return None
        return Embedded(module="toy", requires=self.requires, install="pip install 'llmgw[toy]'")

    @hookimpl
    def engine_validate(self, model: Model, profile: Profile) -> list[Problem]:
        problems = [Problem(key="args", message="--bad is not a flag")] if "--bad" in profile.args else []
        if model.source == "org/bad":
            problems.append(Problem(key="source", message="org/bad is not for toys"))
        return problems

    @hookimpl
    def engine_build_command(self, launch: Launch) -> Command:
        return Command(argv=launch.program)

    @hookimpl
    def engine_read_health(self, status: int, body: str) -> Health:
        return READY


def toy(binary: str = "sh", requires: str | None = None) -> dict[str, Engine]:
    return {"toy": open_engine("toy", Plugin(binary, requires))}


@pytest.fixture
def engines() -> dict[str, Engine]:
    """One engine, with a program that every machine has."""
    return toy()


@pytest.fixture
def engines_without_program() -> dict[str, Engine]:
    return toy("no-such-program-anywhere", "no_such_package_anywhere")


@pytest.fixture
def make_engines() -> Callable[..., dict[str, Engine]]:
    return toy


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "My-Model Q4.toy"
    path.write_bytes(b"weights")
    return path


@dataclass
class Ran:
    """A ``run`` that is ready at once and tells what it was given."""

    config: NodeConfig | None = None
    models: tuple[Model, ...] = ()
    ask: str | None = None
    calls: int = field(default=0)

    def __call__(
        self,
        config: NodeConfig,
        models: tuple[Model, ...],
        *,
        on_ready: Callable[[str], None],
        ask: str | None = None,
    ) -> None:
        self.config, self.models, self.ask = config, models, ask
        self.calls += 1
        on_ready("http://127.0.0.1:17434")


@pytest.fixture
def ran() -> Ran:
    return Ran()
