"""``llmgw ctl model show``: everything about one model."""

from __future__ import annotations

import re
import time
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show
from llmgw.cli.ctl.client import as_word
from llmgw.cli.ctl.drawing import Block, Grid, listed, shown
from llmgw.cli.ctl.figures import lasted
from llmgw.cli.ctl.replicas import draw as draw_replicas
from llmgw.host.weights.errors import show_url

# An address in a definition, and what opens it. In quotes YAML takes some signs in other words, and goes on in the next
# line behind a backslash.
_FOLD = r"\\\r?\n[ \t]*"
# (one begins where another does, or reading a text of many would take the square of their number)
_OPENED = re.compile(
    rf"(?P<place>[A-Za-z][A-Za-z0-9+.-]{{0,30}}:(?:\\?/){{2}}(?:{_FOLD}|\\/|(?!:(?:\\?/){{2}})[^\s?#\\])*)"
    rf"(?P<sign>[?#]|\\x3[fF]|\\u003[fF])(?P<query>(?:{_FOLD}|\S)*)"
)
_CLOSING = "]}\"',"


@click.command("show")
@click.argument("name")
@operator_options
def command(*, name: str, asked: Asked) -> None:
    """Show the model NAME (or of that alias): its definition, its replicas, and why it can't be placed."""
    show(asked, f"/models/{as_word(name)}", draw)


def draw(answer: Any) -> list[Block]:
    model, definition = answer["model"], answer["definition"]
    blocks: list[Block] = [
        f"{shown(model['name'])}: {shown(model['status'])}, {model['ready']}/{model['wanted']} replicas ready",
        *_facts(model, definition, answer.get("added_at")),
        "",
        _profiles(definition),
    ]
    if answer["replicas"]:
        blocks += ["", *draw_replicas(answer)]
    if answer["rejections"]:
        columns = ("NODE", "PROFILE", "REASON", "DETAIL")
        rows = tuple(tuple(shown(no[column.lower()]) for column in columns) for no in answer["rejections"])
        blocks += ["", Grid(columns=columns, rows=rows)]
    if more := answer["more_rejections"]:
        blocks.append(f"and {more} more: llmgw ctl explain-placement {shown(model['name'])}")
    if text := answer.get("text"):
        written = hide_queries(text)
        head = "as it was added:" if written == text else "as it was added, but for what opens its addresses:"
        blocks += ["", head, *(f"  {shown(line)}" for line in written.splitlines())]
    return blocks


def hide_queries(text: str) -> str:
    """A definition as it was written, with an ellipsis for what stands behind the ? of its addresses."""

    def hide(found: re.Match[str]) -> str:
        query = found["query"]
        return f"{found['place']}{found['sign']}…{query[len(query.rstrip(_CLOSING)) :]}"

    return _OPENED.sub(hide, text)


def _facts(model: dict[str, Any], definition: dict[str, Any], added_at: float | None) -> list[str]:
    scaling = definition["scaling"]
    where = model.get("where")
    kept = f"declared at {where}" if where else "stored"
    if added_at is not None:
        kept += time.strftime(", added %Y-%m-%d %H:%M", time.localtime(added_at))
    rolling = model.get("rolling")
    facts = {
        "status": model.get("detail"),
        "rollout": rolling if rolling != model.get("detail") else None,
        "aliases": ", ".join(definition["aliases"]) or None,
        "kept": kept,
        "task": definition.get("task"),
        # (a server of an earlier version told all of an address)
        "source": show_url(definition["source"]),
        "mmproj": show_url(definition["mmproj"]) if "mmproj" in definition else None,
        "loras": ", ".join(lora["name"] for lora in definition.get("loras", ())) or None,
        "context": definition.get("context_length"),
        "output": definition.get("max_output"),
        "prices": _prices(definition.get("prices")),
        "scaling": f"min {scaling['min']}, max {scaling['max']}, target {scaling['target']}, "
        f"idle {lasted(scaling['idle_timeout_seconds'])}",
    }
    return [f"{name:<8}  {shown(value)}" for name, value in facts.items() if value is not None]


def _prices(prices: dict[str, Any] | None) -> str | None:
    if prices is None:
        return None
    told = ", ".join(f"{key} {prices[key]:g}" for key in ("prompt", "completion", "cached") if key in prices)
    return f"{told} per million tokens"


def _profiles(definition: dict[str, Any]) -> Grid:
    return Grid(
        columns=("PROFILE", "ENGINE", "PRIORITY", "CLASS", "TP", "PP", "NODES", "NEEDS", "LABELS", "PARSERS", "ARGS"),
        rows=tuple(
            (
                shown(profile["name"]),
                shown(profile["engine"]),
                str(profile["priority"]),
                shown(profile.get("gpu_class")),
                str(profile["tp"]),
                shown(profile.get("pp")),
                shown(profile.get("nodes")),
                listed(_needs(profile)),
                listed([f"{name}={value}" for name, value in profile.get("labels", {}).items()]),
                listed([profile[key] for key in ("tool_parser", "reasoning_parser") if profile.get(key)]),
                shown(" ".join(profile["args"])),
            )
            for profile in definition["profiles"]
        ),
    )


def _needs(profile: dict[str, Any]) -> list[str]:
    """Memory of each GPU, memory and disk of the node, as far as they are asked for."""
    kinds = {"gpu_memory_gb": "gpu", "min_memory_gb": "mem", "min_disk_gb": "disk"}
    return [f"{word}:{profile[key]:g}GB" for key, word in kinds.items() if profile.get(key)]
