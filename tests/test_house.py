"""The rules of the house that no linter knows: where things are, what has a test, what has a line in the docs."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import click
import pytest

from llmgw import cli
from llmgw.config.node import NodeConfig

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "llmgw"
PLUGINS = ROOT / "plugins"
TESTS = ROOT / "tests"
DOCS = ROOT / "docs"

# The only places where tasks are planted: who waits for whom is to be read off a few files.
NURSERIES = {
    "server/tree.py",
    "server/program.py",
    "server/pages.py",
    "agent/depot.py",
    "agent/tree.py",
    "agent/program.py",
    "agent/shards.py",
    "standalone/tree.py",
    "reactor/loop.py",
    "host/weights/fetch.py",
    "host/weights/seed.py",
    "pool/peers.py",
}
NURSERY_FOLDERS = ("link/",)
# A module that only hands over to another, and is run rather than imported.
UNTESTED = {"__main__.py"}

PURE = {"core", "wire", "dialects", "errors", "units", "counters"}
PLUGIN_MAY_SEE = {"engines", "core", "errors", "units", "counters"}
QUART_LIVES_IN = {"api", "admin", "web"}
KINDS = "feature|fix|breaking|docs|internal"
HOOK = re.compile(r"^(engine_[a-z_]+)$")


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def rooms() -> set[str]:
    """The names of llmgw's own modules and packages, those of its top floor of folders."""
    packages = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
    return packages | {path.stem for path in SOURCES.glob("*.py") if path.stem != "__init__"}


def plugins() -> set[str]:
    return {path.parent.name for path in PLUGINS.glob("*/__init__.py")}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def public_files() -> list[Path]:
    """What a clone holds; where there is no git, everything that a build does not make."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0:
        found = [ROOT / name for name in os.fsdecode(listing.stdout).split("\0") if name]
    else:
        made = {".venv", ".nox", ".git", ".hypothesis", "__pycache__", "build", "dist"}
        found = [path for path in ROOT.rglob("*") if not made & set(path.parts) and "cache" not in str(path.parent)]
    return [path for path in found if path.is_file()]


def does_something(tree: ast.Module) -> bool:
    """Whether a module decides or computes: facts alone (fields, enumerations, declarations) have nothing to test."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            told = [
                line for line in node.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
            if told:
                return True
    return False


def shipped_code() -> list[Path]:
    return [*python_files(SOURCES), *python_files(PLUGINS)]


def text_of(pages: Iterator[Path] | list[Path]) -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


# What has a test


def test_every_module_that_does_something_has_its_tests() -> None:
    missing = [
        str(expected.relative_to(ROOT))
        for file in python_files(SOURCES)
        if file.name not in UNTESTED and does_something(parse(file))
        for expected in [TESTS / "unit" / mirrored(file.relative_to(SOURCES))]
        if not expected.exists()
    ]
    assert missing == []


def mirrored(module: Path) -> Path:
    """Where the tests of a module are; those of a package's own code carry the package's name."""
    if module.name == "__init__.py":
        return module.parent / f"test_{module.parent.name}.py"
    return module.with_name(f"test_{module.name}")


def test_every_unit_test_has_its_module() -> None:
    mirrors = {TESTS / "unit" / mirrored(file.relative_to(SOURCES)) for file in python_files(SOURCES)}
    strays = [str(file.relative_to(ROOT)) for file in python_files(TESTS / "unit") if file.name.startswith("test_")]
    assert [stray for stray in strays if ROOT / stray not in mirrors] == []


def test_every_plugin_has_tests_of_its_own() -> None:
    for plugin in plugins():
        engine = plugin.removeprefix("llmgw_")
        assert list((TESTS / "plugins" / engine).glob("test_*.py")), f"tests/plugins/{engine} holds no test"


def test_no_test_sits_where_it_is_not_run() -> None:
    found = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert {name for name in found if not name.endswith(".py")} <= {
        "unit",
        "fakes",
        "plugins",
        "simulation",
        "conformance",
        "e2e",
        "bench",
        "examples",
    }


# What the code may not do


def test_nurseries_are_opened_in_few_places() -> None:
    found = set()
    for file in python_files(SOURCES):
        place = file.relative_to(SOURCES).as_posix()
        if not place.startswith(NURSERY_FOLDERS) and "open_nursery" in names_used(parse(file)):
            found.add(place)
    assert found - NURSERIES == set()


def names_used(tree: ast.Module) -> set[str]:
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_nothing_is_awaited_unshielded_in_a_finally() -> None:
    """It would be cancelled at once, and what it was to close would stay open."""
    found = []
    for file in shipped_code():
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.Try | ast.TryStar):
                lines = [line for statement in node.finalbody for line in unshielded_awaits(statement)]
                found += [f"{file.relative_to(ROOT)}:{line}" for line in lines]
    assert found == []


def unshielded_awaits(node: ast.AST) -> Iterator[int]:
    if isinstance(node, ast.With) and any("shield=True" in ast.unparse(item) for item in node.items):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    if isinstance(node, ast.Await) and ast.unparse(node.value).startswith("trio.aclose_forcefully("):
        # does all its work before it could be cancelled
        return
    if isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor):
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from unshielded_awaits(child)


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(file.relative_to(ROOT)) for file in shipped_code() if needs_words(file)]
    assert silent == []


def needs_words(file: Path) -> bool:
    first = (ast.get_docstring(parse(file)) or "").split("\n\n")[0]
    return not first.endswith((".", ":"))


@pytest.mark.parametrize("phrase", [r"pragma: no cover", r"\bTODO\b", r"\bFIXME\b", r"raise NotImplementedError"])
def test_nothing_is_left_half_done(phrase: str) -> None:
    pattern = re.compile(phrase)
    found = [str(file.relative_to(ROOT)) for file in shipped_code() if pattern.search(file.read_text())]
    assert found == []


def test_no_name_is_one_of_those_that_say_nothing() -> None:
    hollow = re.compile(r"(Manager|Handler|Helper|Util|Utils|Service|Base)$")
    found = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in shipped_code()
        for node in ast.walk(parse(file))
        if isinstance(node, ast.ClassDef) and hollow.search(node.name)
    ]
    assert found == []


# Who knows whom


def contracts() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / ".importlinter", encoding="utf-8")
    return found


def listed(section: str, key: str) -> set[str]:
    return set(contracts()[section][key].split())


def test_the_linter_knows_every_package() -> None:
    assert listed("importlinter", "root_packages") == {"llmgw"} | plugins()


def test_the_pure_rooms_are_kept_pure() -> None:
    assert listed("importlinter:contract:pure", "source_modules") == {f"llmgw.{room}" for room in PURE & rooms()}


def test_no_plugin_is_left_out_of_its_contracts() -> None:
    assert listed("importlinter:contract:no-engine-is-named", "forbidden_modules") == plugins()
    assert listed("importlinter:contract:plugins-see-one-room", "source_modules") == plugins()
    if len(plugins()) > 1:
        assert listed("importlinter:contract:plugins-apart", "modules") == plugins()


def test_plugins_are_kept_out_of_every_other_room() -> None:
    closed = {f"llmgw.{room}" for room in rooms() - PLUGIN_MAY_SEE - {"__main__"}}
    named = listed("importlinter:contract:plugins-see-one-room", "forbidden_modules")
    assert {name for name in named if name.startswith("llmgw.")} == closed


def test_plugins_import_the_plugin_floor_and_nothing_deeper() -> None:
    found = []
    for file in python_files(PLUGINS):
        for node in ast.walk(parse(file)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [
                f"{file.relative_to(ROOT)}:{node.lineno} {name}"
                for name in names
                if name.split(".")[0] == "llmgw" and name != "llmgw.engines"
            ]
    assert found == []


def test_quart_is_kept_out_of_every_other_room() -> None:
    may_not = rooms() - QUART_LIVES_IN - PURE - {"__main__"}
    assert listed("importlinter:contract:home-of-quart", "source_modules") == {f"llmgw.{room}" for room in may_not}


@pytest.mark.slow
def test_every_contract_is_kept() -> None:
    run = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


# What has a line in the docs


def test_every_hook_has_its_heading() -> None:
    hooks = {
        node.name
        for node in parse(SOURCES / "engines" / "hookspecs.py").body
        if isinstance(node, ast.FunctionDef) and HOOK.match(node.name)
    }
    page = (DOCS / "engine-plugins.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^#{2,4} .*?`?\b(engine_[a-z_]+)\b", page, re.MULTILINE))
    assert headings == hooks


def commands(group: click.Group, words: str) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{words} {name}")
        else:
            yield f"{words} {name}"


def test_every_command_has_its_line() -> None:
    text = text_of([ROOT / "README.md", *DOCS.rglob("*.md")])
    assert [line for line in commands(cli.app, "llmgw") if line not in text] == []


def config_keys(tree: type, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a configuration; a name that the operator chooses is written <name>."""
    hints = get_type_hints(tree)
    for field in dataclasses.fields(tree):
        kind, key = hints[field.name], f"{prefix}{field.name}"
        inner = get_args(kind)[1] if get_origin(kind) is dict else None
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from config_keys(kind, f"{key}.")
        elif inner is not None and dataclasses.is_dataclass(inner):
            yield from config_keys(inner, f"{key}.<name>.")
        else:
            yield key


def test_every_configuration_key_has_its_line() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)) | set(re.findall(r"^#+ (.+)$", page, re.MULTILINE))
    assert set(config_keys(NodeConfig)) - told == set()


def counters_declared() -> set[str]:
    return {
        node.args[0].value
        for file in python_files(SOURCES)
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "counter"
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def test_every_counter_has_its_line_and_every_line_its_counter() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(llmgw_[a-z_]+)`", page, re.MULTILINE)) == counters_declared()


def refusal_codes() -> set[str]:
    """Every code that a client can get from the door, as it is written where the refusal is made."""
    found = set()
    for room in ("door", "dialects", "web", "server"):
        for file in python_files(SOURCES / room):
            for node in ast.walk(parse(file)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in {"Refusal", "Problem"}:
                    codes = [word.value for word in node.keywords if word.arg == "code"] or node.args[1:2]
                    found |= {code.value for code in codes if isinstance(code, ast.Constant)}
    return found


def test_every_refusal_has_its_line() -> None:
    page = (DOCS / "door.md").read_text(encoding="utf-8")
    assert refusal_codes() - set(re.findall(r"^\| [0-9, ]+ \| `([a-z_]+)` \|", page, re.MULTILINE)) == set()


def test_decisions_are_numbered_without_gaps_and_say_three_things() -> None:
    records = sorted((DOCS / "decisions").glob("*.md"))
    assert [record.name[:5] for record in records] == [f"{number:04}-" for number in range(1, len(records) + 1)]
    for record in records:
        headings = re.findall(r"^## (.+)$", record.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == ["Context", "Choice", "What we gave up"], record.name


def test_news_fragments_are_named_for_the_changelog() -> None:
    fragment = re.compile(rf"[a-z0-9]+(-[a-z0-9]+)*\.({KINDS})\.md")
    names = [path.name for path in (ROOT / "changes").iterdir() if path.name not in {"README.md", "template.md"}]
    assert [name for name in names if not fragment.fullmatch(name)] == []
    for name in names:
        assert (ROOT / "changes" / name).read_text(encoding="utf-8").strip(), f"{name} says nothing"


# What a stranger gets


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    # (in two pieces, for this file is public too)
    private = [name + end for name, end in (("pypi", r"\.org"), ("pythonhosted", r"\.org"), ("npmjs", r"\.org"))]
    here = str(ROOT)
    if len(ROOT.parts) > 2:  # A short path like /app is a word that anybody may write.
        private.append(re.escape(here) + r"\b")
    pattern = re.compile("|".join(private))
    found = []
    for file in public_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if match := pattern.search(text):
            found.append(f"{file.relative_to(ROOT)}: {match.group()}")
    assert found == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that a user installs, built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("llmgw-*.whl")
    return zipfile.ZipFile(built)


@pytest.mark.slow
def test_the_wheel_holds_all_that_runs_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {path.relative_to(SOURCES.parent).as_posix() for path in shipped(SOURCES)}
    wanted |= {path.relative_to(PLUGINS).as_posix() for plugin in plugins() for path in shipped(PLUGINS / plugin)}
    assert packed == wanted


def shipped(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "cache" not in path.parent.name)


@pytest.mark.slow
def test_the_wheel_says_what_it_offers(wheel: zipfile.ZipFile) -> None:
    (folder,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    points = wheel.read(f"{folder}/entry_points.txt").decode()
    assert "llmgw = llmgw.__main__:main" in points
    for plugin in plugins():
        assert f"= {plugin}\n" in points + "\n"
    metadata = wheel.read(f"{folder}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()


def test_every_plugin_is_found_by_its_entry_point() -> None:
    declared = project()["project"]["entry-points"]["llmgw.engines"]
    assert set(declared.values()) == plugins()
    assert declared == {name: f"llmgw_{name}" for name in declared}
    installed = {point.name for point in importlib.metadata.entry_points(group="llmgw.engines")}
    assert set(declared) <= installed


def test_the_wheel_packs_every_plugin() -> None:
    packed = project()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packed) == {"src/llmgw"} | {f"plugins/{plugin}" for plugin in plugins()}
