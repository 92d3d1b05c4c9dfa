from __future__ import annotations

from typing import Any

from llmgw.cli.ctl.node import COMMANDS


def test_each_command_of_the_table_has_its_help(ctl: Any) -> None:
    for name in COMMANDS:
        assert ctl("node", name, "--help").status == 0


def test_a_word_that_is_none_is_told_what_there_is(ctl: Any) -> None:
    ended = ctl("node", "remove")
    assert ended.status == 2
    assert "there is rm" in ended.err
