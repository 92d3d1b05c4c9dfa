"""Plugins are found where they are installed and in a folder of one's own; what can't be read is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.engines.sources import GROUP, Source, find_sources


@pytest.fixture(autouse=True)
def _same_path_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("llmgw_plugin_", "sources_")):
            del sys.modules[name]


def install(folder: Path, name: str, entry: str, *modules: str, version: str = "1.0") -> None:
    """A distribution as ``pip install --target`` leaves it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n")
    (info / "RECORD").write_text("".join(f"{module}.py,,\n" for module in modules))
    for module in modules:
        (folder / f"{module}.py").write_text(f"name = {module!r}\n")


def found_in(folder: Path) -> dict[str, Source]:
    sources, problems = find_sources(str(folder))
    assert problems == []
    return {source.name: source for source in sources if str(folder) in source.origin + source.title}


def test_each_file_is_the_plugin_of_the_engine_that_it_is_named_after(tmp_path: Path) -> None:
    for name in ("parrot.py", "magpie.py", "_shared.py", ".hidden.py", "notes.txt", "parrot.pyc"):
        (tmp_path / name).write_text("answer = 42\n")
    (tmp_path / "folder.py").mkdir()
    found = found_in(tmp_path)
    assert found.keys() == {"parrot", "magpie"}
    parrot = found["parrot"]
    assert (parrot.origin, parrot.title) == (str(tmp_path / "parrot.py"), f"plugin {tmp_path / 'parrot.py'}")
    assert parrot.load().answer == 42  # type: ignore[attr-defined]
    assert parrot.load() is found_in(tmp_path)["parrot"].load()


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "_parrot_words.py").write_text("answer = 42\n")
    (tmp_path / "parrot.py").write_text("from _parrot_words import answer\n")
    assert found_in(tmp_path)["parrot"].load().answer == 42  # type: ignore[attr-defined]
    # Last, so that nothing there is taken for a module of anybody else's.
    assert sys.path[-1] == str(tmp_path)


def test_a_file_has_a_module_that_its_dataclasses_find(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass, KW_ONLY\n"
    (tmp_path / "parrot.py").write_text(f"{text}@dataclass\nclass Fact:\n    _: KW_ONLY\n    a: int = 1\n")
    assert found_in(tmp_path)["parrot"].load().Fact(a=2).a == 2  # type: ignore[attr-defined]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "parrot.py").write_text(f"where = {folder!r}\n")
    plugins = [found_in(tmp_path / folder)["parrot"].load() for folder in ("a", "b")]
    assert [plugin.where for plugin in plugins] == ["a", "b"]  # type: ignore[attr-defined]


def test_a_file_that_fails_is_tried_anew(tmp_path: Path) -> None:
    path = tmp_path / "parrot.py"
    path.write_text("raise KeyError('not yet')\n")
    source = found_in(tmp_path)["parrot"]
    for _ in range(2):
        with pytest.raises(KeyError, match="not yet"):
            source.load()
    assert "llmgw_plugin_parrot" not in sys.modules


def test_what_is_installed_into_the_folder_gives_its_entry_points(tmp_path: Path) -> None:
    install(tmp_path, "Sources-Parrot", "parrot = sources_parrot", "sources_parrot", "sources_needed")
    (tmp_path / "magpie.py").write_text("")
    sources, problems = find_sources(str(tmp_path))
    assert problems == []
    # A module that came with the distribution is no plugin by itself.
    ours = [source for source in sources if source.name in ("parrot", "magpie", "sources_parrot", "sources_needed")]
    assert [source.name for source in ours] == ["parrot", "magpie"]
    assert ours[0].origin == "distribution Sources-Parrot 1.0"
    assert ours[0].title == "plugin sources_parrot of distribution Sources-Parrot 1.0"
    assert ours[0].load().name == "sources_parrot"  # type: ignore[attr-defined]


def test_the_folder_shadows_nothing(tmp_path: Path) -> None:
    install(tmp_path, "sources-json", "parrot = sources_json", "sources_json", "json")
    find_sources(str(tmp_path))
    find_sources(str(tmp_path))
    assert [place for place in sys.path if place == str(tmp_path)] == [str(tmp_path)]
    assert sys.path[-1] == str(tmp_path)


def test_asking_again_finds_the_same(tmp_path: Path) -> None:
    install(tmp_path, "sources-parrot", "parrot = sources_parrot", "sources_parrot")
    install(tmp_path, "sources-early", "aaa = sources_early", "sources_early")
    (tmp_path / "magpie.py").write_text("")
    first, _ = find_sources(str(tmp_path))
    again, _ = find_sources(str(tmp_path))
    assert [(each.name, each.value, each.origin) for each in first] == [
        (each.name, each.value, each.origin) for each in again
    ]
    assert [each.name for each in first][-3:] == ["aaa", "parrot", "magpie"]


def test_an_installed_plugin_comes_before_one_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "llamacpp.py").write_text("")
    sources, _ = find_sources(str(tmp_path))
    assert [each.origin for each in sources if each.name == "llamacpp"][1:] == [str(tmp_path / "llamacpp.py")]


def test_what_is_shadowed_gives_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "new", "Sources.Twin", "twin = sources_new", version="2.0")
    install(tmp_path / "old", "sources-twin", "twin = sources_old", version="1.0")
    for folder in ("old", "new"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    sources, problems = find_sources(None)
    assert [each.value for each in sources if each.name == "twin"] == ["sources_new"]
    assert problems == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, reason in (("absent", "No such file or directory"), ("file", "Not a directory")):
        sources, (problem,) = find_sources(str(tmp_path / name))
        assert "llamacpp" in {source.name for source in sources}
        assert problem.key == "LLMGW_PLUGINS"
        assert problem.message.startswith(f"{tmp_path / name} can't be read: {reason}; ")


def test_a_folder_may_be_named_from_home_or_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parrot.py").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path.parent)
    for written in (f"~/{tmp_path.name}", tmp_path.name):
        sources, _ = find_sources(written)
        assert sources[-1].origin == str(tmp_path / "parrot.py")


def test_without_a_folder_the_installed_ones_are_all() -> None:
    for unset in (None, ""):
        sources, problems = find_sources(unset)
        assert "llamacpp" in {source.name for source in sources}
        assert problems == []


def test_entry_points_that_cannot_be_read_are_named_and_the_others_stay(tmp_path: Path) -> None:
    install(tmp_path, "sources-broken", "this is no entry point")
    install(tmp_path, "sources-parrot", "parrot = sources_parrot", "sources_parrot")
    sources, (problem,) = find_sources(str(tmp_path))
    assert "parrot" in {source.name for source in sources}
    assert problem.key == GROUP
    assert problem.message.startswith(
        f"the entry points of {tmp_path / 'sources_broken-1.0.dist-info'} can't be read: "
    )
