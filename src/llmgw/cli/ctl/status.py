"""``llmgw ctl status``: the whole in a few lines, and what needs somebody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.fetches import tell_sum
from llmgw.cli.ctl.figures import free_of, lasted, share_gb
from llmgw.units import format_size

STATES = {"ended": "failed"}
# Names in one line; the commands that it points to have all.
FEW = 8


@click.command("status")
@operator_options
def command(*, asked: Asked) -> None:
    """Show the whole in a few lines: nodes, models and replicas by state, free GPUs, the store, and what needs you."""
    show(asked, "/status", lambda answer: draw(answer, asked.operator.address.url))


def draw(answer: Any, url: str) -> list[Block]:
    blocks: list[Block] = [
        f"llmgw {shown(answer['version'])} at {url}, up {lasted(answer['up_seconds'])}",
        *(f"{name:<8}  {line}" for name, line in _lines(answer)),
    ]
    blocks += _braked(answer)
    concerns = answer["concerns"]
    if concerns:
        blocks.append("")
        blocks += [f"{each['kind']} {shown(each['name'])}: {shown(each['message'])}" for each in concerns]
    return blocks


def _lines(answer: Any) -> Iterator[tuple[str, str]]:
    for name in ("nodes", "models", "replicas"):
        yield name, _counted(answer[name])
    if answer["memory_gb"]:
        yield "memory", f"{share_gb(answer['memory_booked_gb'], answer['memory_gb'])} booked"
    for name, each in answer["classes"].items():
        yield "gpus", f"{shown(name)} {free_of(each['free'], each['total'])}"
    for name, each in answer["fabrics"].items():
        down = f", {each['down']} out of service" if each["down"] else ""
        yield "fabric", f"{shown(name)} {each['whole_free']}/{each['total']} nodes whole and free{down}"
    for name, each in (answer.get("holdings") or {}).items():
        if each["models"] or each["none"]:
            yield "weights", f"{shown(name)} {_held(each)}" if name else _held(each)
    for each in answer.get("fetching") or ():
        yield "fetching", tell_sum(each)
    yield "store", _store(answer["store"])


def _held(each: Any) -> str:
    """Which models lie on how many nodes of a fabric, and which on none: those can't be served there at once."""
    held = _few([f"{name} {count}/{each['nodes']}" for name, count in each["models"].items()])
    none = f"on no node {_few(each['none'])}" if each["none"] else ""
    return "; ".join(filter(None, (held, none)))


def _store(store: Any) -> str:
    size = store.get("size_bytes")
    size = "" if size is None else f", {format_size(size)}"
    return f"{shown(store['kind'])} {shown(store['where'])}{size}{', FAILING' if store.get('failing') else ''}"


def _braked(answer: Any) -> Iterator[Block]:
    """What holds all placing up, in words of its own: nothing else here explains why nothing happens."""
    held_up, brake = answer.get("held_up"), answer.get("brake")
    if held_up is None and brake is None:
        return
    yield ""
    if brake is None:
        yield f"nothing is placed: {shown(held_up)}"
        return
    yield (
        f"the brake holds for {lasted(brake['seconds_left'])}: {brake['lost']} of {brake['nodes']} nodes were lost "
        "together; until they are back nothing is stopped or placed anew for it"
    )
    yield f"  lost: {_few(brake['who'])}"
    if brake["held"]:
        yield f"  held: {_few(brake['held'])}"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(shown(name) for name in names[:FEW]) + more


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {shown(STATES.get(state, state))}" for state, number in counts.items()) or "none"
