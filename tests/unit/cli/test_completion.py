"""The shell's half of completion."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from llmgw.cli.completion import command


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_asks_llmgw_itself_for_its_words(shell: str) -> None:
    done = CliRunner().invoke(command, [shell])
    assert done.exit_code == 0
    assert f"_LLMGW_COMPLETE={shell}_complete" in done.output
    assert "llmgw" in done.output


def test_a_shell_that_is_not_served_is_refused_with_those_that_are() -> None:
    done = CliRunner().invoke(command, ["tcsh"])
    assert done.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in done.output
