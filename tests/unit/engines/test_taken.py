from __future__ import annotations

import pytest

from llmgw.core.model import Lora, Model, ModelName
from llmgw.engines.taken import find_untaken
from llmgw.engines.types import EngineInfo, SourceKind


def info(*sources: SourceKind, suffixes: tuple[str, ...] = ()) -> EngineInfo:
    return EngineInfo(title="Toy", default_binary="toy", sources=frozenset(sources), file_suffixes=suffixes)


FILES = info(SourceKind.FILE, suffixes=(".toy", ".gguf"))
FOLDERS = info(SourceKind.REPOSITORY)
BOTH = info(SourceKind.FILE, SourceKind.REPOSITORY, suffixes=(".gguf",))
ANY_FILE = info(SourceKind.FILE)


def said(engine: EngineInfo, source: str, mmproj: str | None = None, *loras: str) -> list[str]:
    adapters = tuple(Lora(name=ModelName(f"l{number}"), source=lora) for number, lora in enumerate(loras))
    model = Model(name=ModelName("m"), source=source, mmproj=mmproj, loras=adapters)
    return [f"{problem.key}: {problem.message}" for problem in find_untaken(engine, model)]


@pytest.mark.parametrize(
    ("engine", "source"),
    [
        (FILES, "hf:org/repo/m.gguf"),
        (FILES, "hf:org/repo/M.GGUF@main"),
        (FILES, "hf:org/repo/m-00001-of-00003.gguf@v1.0"),
        (FILES, "https://host/m.toy?x=.bin"),
        (FILES, "hf:org/repo/*.gguf"),
        (FILES, "hf:org/repo/*q4_k_m*"),
        (FILES, "hf:org/repo/*.gg*"),
        (ANY_FILE, "https://host/m.bin"),
        (FOLDERS, "hf:org/repo/*"),
        (FOLDERS, "hf:org/repo/*.safetensors@0123abc"),
        (BOTH, "hf:org/repo/*.safetensors"),
        (BOTH, "hf:org/repo/m.gguf"),
        # what is not fetched is the engine's own to judge
        (FILES, "org/repo"),
        (FILES, "/m.bin"),
        (FOLDERS, "/m.gguf"),
        (FOLDERS, "odd"),
    ],
)
def test_what_an_engine_reads_is_taken(engine: EngineInfo, source: str) -> None:
    assert said(engine, source) == []


@pytest.mark.parametrize(
    ("engine", "source", "why"),
    [
        (FILES, "hf:org/repo/m.bin", "hf:org/repo/m.bin is none that Toy reads: that is a .toy file or a .gguf file"),
        (
            FILES,
            "hf:org/repo/*.safetensors",
            "hf:org/repo/*.safetensors is none that Toy reads: that is a .toy file or",
        ),
        (FILES, "https://host/m?token=secret", "https://host/m is none that Toy reads: that is a .toy file or a .gguf"),
        (BOTH, "hf:org/repo/m.safetensors", "hf:org/repo/m.safetensors is none that Toy reads: that is a .gguf file"),
        (
            FOLDERS,
            "hf:org/repo/m.gguf@main",
            "hf:org/repo/m.gguf@main is one file, and Toy reads a folder or a repository: write hf:org/repo/*,",
        ),
        (
            FOLDERS,
            "https://host/m.gguf?x",
            "https://host/m.gguf is one file, and Toy reads a folder or a repository: n",
        ),
    ],
)
def test_what_an_engine_does_not_read_is_told_before_it_is_fetched(engine: EngineInfo, source: str, why: str) -> None:
    (told,) = said(engine, source)
    assert told.startswith(f"source: {why}")


def test_the_other_parts_of_a_model_are_looked_at_too() -> None:
    told = said(FILES, "/m.gguf", "hf:a/b/eyes.bin", "hf:a/b/l.gguf", "https://host/l.bin")
    assert [line.partition(": ")[0] for line in told] == ["mmproj", "loras[1].source"]
