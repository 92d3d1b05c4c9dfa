"""``llmgw ctl load``: a model that was stopped may run again, and one that loads on demand loads now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, drawn, operator_options, show, tell
from llmgw.cli.ctl.client import as_name, as_word
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.fetches import tell_fetch
from llmgw.cli.ctl.model_show import draw as draw_model
from llmgw.errors import LlmgwError, UsageError


@click.command("load")
@click.argument("model")
@click.option("--wait", is_flag=True, help="Follow it until it serves.")
@operator_options
def command(*, model: str, wait: bool, asked: Asked) -> None:
    """Load MODEL (or the model of that alias): one that was stopped, that loads on demand, or whose definition failed.

    After `llmgw ctl stop` it may run again. One that loads when somebody asks loads now, and stays for as long as it
    would then. A definition that has failed, so that the one before goes on, is tried again.

    --wait ends with status 0 once the model serves and no replica runs by an earlier definition, and with 1 when an
    engine of it fails, or it is stopped. With --watch the model is shown until Ctrl-C.
    """
    if wait and asked.watch:
        raise UsageError("--wait follows it until it serves, --watch for ever: give one of them")
    answer = asked.operator.ask("POST", "/load", {"model": as_name(model)})
    tell(asked, answer, draw)
    name = drawn(asked.operator, answer, lambda facts: str(facts["model"]))
    if wait:
        follow(asked, name)
    elif asked.watch:
        show(asked, f"/models/{as_word(name)}", draw_model)


def draw(answer: Any) -> list[Block]:
    name, serving, running = shown(answer["model"]), answer["serving"], answer["running"]
    blocks: list[Block] = []
    if answer["held"]:
        blocks.append(f"{name} is no longer stopped")
    if answer["retried"]:
        blocks.append(f"{name}: its definition, which had failed, is tried again")
    if serving:
        blocks.append(f"{name} is served by {', '.join(map(shown, serving))}")
    if not serving or len(serving) < answer["wanted"]:
        on_the_way = [shown(each) for each in running if each not in serving]
        blocks.append(f"{name} loads: {', '.join(on_the_way)}" if on_the_way else _tell_start(answer))
    return blocks


def _tell_start(answer: Mapping[str, Any]) -> str:
    """Of a model that nothing is on its way of yet."""
    name, makes_way, waits = shown(answer["model"]), answer.get("makes_way"), answer.get("waits")
    if makes_way:
        return f"{name} loads as soon as {', '.join(map(shown, makes_way))} has stopped, which makes way for it"
    return f"{name} loads" if waits is None else f"{name} waits for a place: {shown(waits)}"


def follow(asked: Asked, name: str) -> None:
    """Show how far it is until it serves, and by nothing but its definition as it is written. LlmgwError when an engine
    has failed since, or somebody has stopped it; Abort at Ctrl-C: who goes on after this command must know that it
    serves."""
    # Of an earlier try it says nothing about this one.
    failed_before: set[tuple[str, int]] | None = None
    ends: list[str | None] = []

    def is_over(answer: Any) -> bool:
        nonlocal failed_before
        model = answer["model"]
        failed = {
            (replica["replica"], replica["epoch"]): replica.get("cause")
            for replica in answer["replicas"]
            if replica["state"] == "ended"
        }
        if failed_before is None:
            failed_before = set(failed)
        new = [cause for key, cause in failed.items() if key not in failed_before]
        if model.get("held"):
            ends.append(f"{name} was stopped meanwhile")
        elif (why := model.get("failed")) is not None:
            ends.append(f"{name}: its definition has failed ({why}), and the one before goes on")
        elif model["serving"] and model.get("rolling") is None:
            ends.append(None)
        elif new:
            ends.append(f"{name} has failed ({_last(new)}) and is tried again: `llmgw ctl replicas {name}` says more")
        return bool(ends)

    show(replace(asked, watch=True), f"/models/{as_word(name)}", _draw_progress, until=is_over)
    if not ends:
        raise click.Abort
    if ends[-1] is not None:
        raise LlmgwError(ends[-1])


def _last(causes: list[str | None]) -> str:
    return causes[-1] or "its engine has ended"


def _draw_progress(answer: Mapping[str, Any]) -> list[Block]:
    model = answer["model"]
    fetch = model.get("fetch")
    detail = model.get("detail") if fetch is None else tell_fetch(fetch)
    status = f"{shown(model['name'])}: {shown(model['status'])}, {model['ready']}/{model['wanted']} replicas ready"
    return [status if detail is None else f"{status}: {shown(detail)}"]
