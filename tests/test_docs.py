"""The docs against the program: links lead somewhere, and the lines that the README promises are the ones that work."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from llmgw.config.definition import find_rejections, load_definitions
from llmgw.core.model import Task
from llmgw.engines.registry import load_engines

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    headings = re.findall(r"^#{1,6} (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_every_page_is_named_in_the_readme_or_beside_it() -> None:
    """A page that no other leads to is never found."""
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:", target)
    }
    lost = [page for page in PAGES if page.parent != ROOT and page.resolve() not in linked]
    assert [page.relative_to(ROOT).as_posix() for page in lost] == []


def test_the_readme_has_one_line_that_runs_and_one_that_tests() -> None:
    lines = README.splitlines()
    assert [line for line in lines if line.endswith("llmgw demo") and line.startswith("python3 -m venv")] == [
        "python3 -m venv .venv && .venv/bin/pip install '.[demo]' && .venv/bin/llmgw demo"
    ]
    assert [line for line in lines if line.endswith("pytest") and line.startswith("python3 -m venv")] == [
        "python3 -m venv .venv && .venv/bin/pip install -e '.[demo,dev]' && .venv/bin/pytest"
    ]


def test_the_extras_that_the_readme_installs_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {extra for group in re.findall(r"'\.\[([a-z,]+)\]'", README) for extra in group.split(",")}
    assert named == set(project["optional-dependencies"])


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "models").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_of_a_model_is_one_that_its_engines_take(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    definitions = load_definitions(path, project["entry-points"]["llmgw.engines"].keys())
    assert find_rejections(definitions, load_engines()) == []


def test_the_examples_show_what_models_are_for_and_what_engines_are_told() -> None:
    paths = (ROOT / "examples" / "models").glob("*.yaml")
    models = [each.model for path in paths for each in load_definitions(path, {"llamacpp", "vllm"})]
    assert {model.task for model in models} > {Task.CHAT}
    assert any(model.loras for model in models)
    assert any(profile.tool_parser for model in models for profile in model.profiles if profile.engine == "vllm")
