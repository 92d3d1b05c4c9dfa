"""Each hook has its heading, its reason and an example in the documentation."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmgw.engines import hookspecs
from llmgw.engines.registry import REQUIRED

PAGE = Path(__file__).parents[3] / "docs" / "engine-plugins.md"
HOOKS = [name for name in vars(hookspecs) if name.startswith("engine_")]


def sections() -> dict[str, str]:
    """The text below each heading that names a hook."""
    parts = re.split(r"^### `(engine_\w+)`.*$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_hook_has_a_heading_and_no_heading_is_left_over() -> None:
    assert list(sections()) == HOOKS


def test_every_example_is_python_that_defines_its_hook() -> None:
    for hook, text in sections().items():
        example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
        assert example is not None, f"{hook} has no example"
        names = {node.name for node in ast.walk(ast.parse(example[1])) if isinstance(node, ast.FunctionDef)}
        assert hook in names


def test_every_hook_says_why_it_is_there() -> None:
    for hook, text in sections().items():
        assert "Why: " in text, f"{hook} has no reason"


def test_the_required_hooks_are_marked_so() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for hook in HOOKS:
        heading = re.search(rf"^### `{hook}`(.*)$", page, re.MULTILINE)
        assert heading is not None
        assert ("required" in heading[1]) == (hook in REQUIRED)


@pytest.mark.slow
def test_the_examples_together_are_a_plugin_that_passes_the_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reader copies has to work: all the examples in one module, over all the tests of the kit."""
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    plugin = ModuleType("parrot_engine")
    code = "\n".join(block for block in blocks if "EngineContract" not in block)
    exec(compile(f"from __future__ import annotations\n{code}", str(PAGE), "exec"), plugin.__dict__)
    (tmp_path / f"{plugin.engine_embedded().module}.py").touch()
    flags = next(block for block in blocks if "EngineContract" in block)
    monkeypatch.setitem(sys.modules, "parrot_engine", plugin)
    shown: dict[str, Any] = {}
    exec(compile(flags, str(PAGE), "exec"), shown)
    checked = shown["TestParrot"]()
    tests = [name for name in dir(checked) if name.startswith("test_")]
    assert tests
    for name in tests:
        getattr(checked, name)()
