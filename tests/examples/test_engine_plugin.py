"""The example of an engine plugin: what the docs show of it is what it is, and a stranger can install and use it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "engine-plugin"
PAGE = ROOT / "docs" / "engine-plugins.md"


def parts(code: str) -> dict[str, str]:
    """Its functions and constants by name, as the parser sees them."""
    found: dict[str, str] = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = ast.dump(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.dump(node)
    return found


def test_the_docs_show_the_plugin_as_it_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    shown = {name: part for block in blocks for name, part in parts(block).items()}
    assert shown == parts((EXAMPLE / "src" / "parrot_engine.py").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_its_own_tests_pass() -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "--rootdir",
            EXAMPLE,
            "-p",
            "no:cacheprovider",
            "tests",
        ],
        cwd=EXAMPLE,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\d+ passed", ran.stdout)
