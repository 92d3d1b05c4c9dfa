from __future__ import annotations

import subprocess
import sys
from typing import Any

import click
import pytest

from llmgw.cli.ctl import COMMANDS, command
from llmgw.cli.ctl import model as model_table
from llmgw.cli.ctl import node as node_table

HEAVY = ("trio", "httpx", "quart", "hypercorn", "asyncio")
# Those that can do without a server, each with options of its own.
ELSEWHERE = {"cert", "engine-check", "tool-check"}
TABLES = (("model",), ("node",))


def asking() -> list[tuple[str, ...]]:
    """The words of every command that asks the server, and nobody else."""
    alone = [(name,) for name in COMMANDS if name not in {*ELSEWHERE, "model", "node"}]
    of_models = [("model", name) for name in model_table.COMMANDS if name != "plan"]
    return [*alone, *of_models, *(("node", name) for name in node_table.COMMANDS)]


def run_in_program(*words: str) -> str:
    """What a program of its own has loaded when such a command has ended."""
    program = (
        "import sys, llmgw.cli\n"
        "try:\n    llmgw.cli.main(['ctl', *sys.argv[1:]])\n"
        "except SystemExit as end:\n    print('LOADED', end.code, *sorted(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(), ("model",), ("node",), ("weights", "pull"), ("engine-check",), ("tool-check",), *asking()],
    ids=" ".join,
)
def test_help_loads_nothing_heavy(words: tuple[str, ...]) -> None:
    _, code, *loaded = run_in_program(*words, "--help").split()
    assert code == "0"
    assert not {*HEAVY, "rich", "yaml", "ssl", "cryptography", "msgspec"} & set(loaded)


@pytest.mark.slow
def test_a_command_that_ran_loaded_nothing_heavy_either(port: Any) -> None:
    port.will_answer("GET", "/nodes", {"nodes": []})
    _, code, *loaded = run_in_program("nodes", "--server", port.url).split()
    assert code == "0"
    assert not set(HEAVY) & set(loaded)


@pytest.mark.parametrize("words", asking(), ids=" ".join)
def test_each_can_be_asked_for_json_and_watched(words: tuple[str, ...]) -> None:
    found: click.Command | None = command
    for word in words:
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), word)
    assert found is not None
    options = {option for parameter in found.params for option in parameter.opts}
    assert {"--json", "--watch", "--server", "--config"} <= options


def test_nothing_that_answers_is_told_with_the_address_and_the_ways_out(ctl: Any) -> None:
    ended = ctl("status", "--server", "http://127.0.0.1:1")
    assert ended.status == 1
    assert ended.err == (
        "llmgw: nothing answers at http://127.0.0.1:1 (--server): Connection refused. "
        "Start it there with `llmgw server`, or say where it is with --server URL or LLMGW_ADMIN\n"
    )
