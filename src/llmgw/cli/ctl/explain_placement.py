"""``llmgw ctl explain-placement``: why a model is where it is, or is nowhere, and what would change that."""

from __future__ import annotations

import os
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, drawn, operator_options, show, tell
from llmgw.cli.ctl.client import as_word
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.model_add import read_file
from llmgw.cli.ctl.verdicts import draw_decisions, draw_explanation
from llmgw.errors import UsageError


@click.command("explain-placement")
@click.argument("model", required=False)
@click.option("--what-if", "file", metavar="FILE", help="A definition (.yaml) that is not added; - is stdin.")
@click.option("--decisions", is_flag=True, help="The last hundred decisions, about all models.")
@click.option("--all", "whole", is_flag=True, help="A line for each node, however many there are.")
@operator_options
def command(*, model: str | None, file: str | None, decisions: bool, whole: bool, asked: Asked) -> None:
    """Explain where MODEL is, and where one more replica of it would go now.

    Each node and profile has its verdict. Where there is a place, that and the second best are shown with what they
    cost, in seconds; where there is none, the smallest change that would make one. With more than 30 nodes those with
    the same verdict are counted. With --what-if the models of a file are explained as if they had been added, each
    after those before it have got their replicas.

    \b
    llmgw ctl explain-placement qwen-coder
    llmgw ctl explain-placement --what-if qwen-coder.yaml
    llmgw ctl explain-placement --decisions
    """
    if decisions:
        if model is not None or file is not None:
            raise UsageError("--decisions is about all models: give neither MODEL nor --what-if with it")
        show(asked, "/decisions", draw_decisions)
    elif file is not None:
        _ask_what_if(asked, file, model, whole=whole)
    elif model is not None:
        show(asked, f"/placement/{as_word(model)}", lambda answer: draw_explanation(answer, whole=whole))
    else:
        raise UsageError("say what to explain: MODEL, --what-if FILE, or --decisions")


def _ask_what_if(asked: Asked, file: str, model: str | None, *, whole: bool) -> None:
    if asked.watch:
        raise UsageError("--what-if asks once: leave out --watch")
    name = "stdin" if file == "-" else os.fsencode(file).decode("utf-8", "replace")
    answer = asked.operator.ask("POST", "/placement", {"file": name, "text": read_file(file)})

    names = drawn(asked.operator, answer, lambda facts: [view["explanation"]["model"] for view in facts["models"]])
    if model is not None and model not in names:
        raise UsageError(f"{name} has no model {model}; it has {', '.join(map(shown, names))}")

    def draw(facts: Any) -> list[Block]:
        chosen = [view for view in facts["models"] if model in {None, view["explanation"]["model"]}]
        blocks = [block for view in chosen for block in (*draw_explanation(view, whole=whole), "")]
        return blocks[:-1]

    tell(asked, answer, draw)
