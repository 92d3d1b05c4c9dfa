"""The docs against the program: links lead somewhere, and the lines that the README promises are the ones that work."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from llmgw.config.definition import find_rejections, load_definitions
from llmgw.core.model import Model, ModelName, Profile, Task
from llmgw.engines.registry import Engine, load_engines
from llmgw.engines.samples import sample_launches
from llmgw.engines.testing import EngineContract, flags_in
from llmgw.engines.types import CauseKind

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENGINES = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
# Of several nodes' replicas, which are not placed in this version, and which the page does not tell of.
OF_GROUPS = {
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--distributed-executor-backend",
    "--headless",
}


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
    assert [line for line in lines if "/pytest" in line and line.startswith("python3 -m venv")] == [
        "python3 -m venv .venv && .venv/bin/pip install -e '.[demo,dev]' && .venv/bin/pytest -n 2"
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


def shipped_engines() -> list[Engine]:
    return [engine for _, engine in sorted(load_engines({}).items())]


def part_of(page: str, heading: str) -> str:
    """What stands below a heading of the second rank."""
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("engine", shipped_engines(), ids=lambda engine: engine.name)
def test_every_flag_that_an_engine_is_given_is_told(engine: Engine) -> None:
    told = set(re.findall(r"--[a-z][\w-]*", part_of(ENGINES, "What becomes of a definition")))
    given = {
        flag
        for launch in sample_launches(engine.info, EngineContract.launch).values()
        # How cards are chosen comes with GPUs that are counted.
        if launch.gpus is None
        for flag in flags_in(engine.build_command(launch).argv)
    }
    assert given - told - OF_GROUPS == set()


@pytest.mark.parametrize("engine", shipped_engines(), ids=lambda engine: engine.name)
def test_every_flag_that_is_told_to_be_refused_is(engine: Engine) -> None:
    (row,) = re.findall(
        rf"^\| {engine.info.title} \| (.+) \|$", part_of(ENGINES, "What a profile may not say"), re.MULTILINE
    )
    flags = re.findall(r"`(--[\w-]+)`", row)
    assert len(flags) > 10
    model = Model(name=ModelName("m"), source="/srv/m")
    taken = [
        flag
        for flag in flags
        if not any(
            flag in problem.message
            for problem in engine.validate(model, Profile(name="p", engine=engine.name, args=(flag, "1")))
        )
    ]
    assert taken == []


@pytest.mark.parametrize("engine", shipped_engines(), ids=lambda engine: engine.name)
def test_every_variable_that_an_engine_is_given_is_told(engine: Engine) -> None:
    section = (
        part_of(ENGINES, "Environment") + part_of(ENGINES, "Weights") + part_of(ENGINES, "GPUs, and several machines")
    )
    told = set(re.findall(r"\b[A-Z][A-Z0-9_]{3,}", section))
    given = {
        name
        for launch in sample_launches(engine.info, EngineContract.launch).values()
        if launch.gpus is None and launch.count == 1
        for command in [engine.build_command(launch)]
        for name in (*command.env, *command.defaults)
    }
    assert given
    assert given - told == set()


def test_every_cause_has_its_line_and_every_line_its_cause() -> None:
    page = part_of((ROOT / "docs" / "agents.md").read_text(encoding="utf-8"), "Why an engine ended")
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(CauseKind)


def test_the_engines_that_are_told_are_those_that_are_shipped() -> None:
    table = ENGINES.partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \| `([\w-]+)` \|", table, re.MULTILINE)
    assert sorted(named) == [(engine.name, engine.info.default_binary) for engine in shipped_engines()]
