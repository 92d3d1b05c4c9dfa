"""``llmgw ctl replicas``: the replicas, how far they have come, and why one failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, drawn, operator_options, show
from llmgw.cli.ctl.client import ToldNo, as_word
from llmgw.cli.ctl.drawing import Block, Grid, listed, shown
from llmgw.cli.ctl.fetches import tell_fetch, tell_whole
from llmgw.cli.ctl.figures import ago, percent

COLUMNS = ("REPLICA", "MODEL", "NODE", "STATE", "SINCE", "RUNNING", "WAITING", "CACHE", "HITS", "DETAIL")
SHARD_COLUMNS = ("REPLICA", "RANK", "NODE", "STATE", "SINCE", "GPUS", "DETAIL")


@click.command("replicas")
@click.argument("model", required=False)
@click.option(
    "--verbose", is_flag=True, help="Each shard of all of them, its weights on their way, its engine's last lines."
)
@operator_options
def command(*, model: str | None, verbose: bool, asked: Asked) -> None:
    """Show the replicas, all or those of MODEL (or of the model of that alias).

    STATE is placed, preparing, prepared (waits for its other nodes), launching, loading, ready, draining (it gets no
    new request, and DETAIL says why it goes), stopping, failed or unreachable (its node is lost);
    RUNNING and WAITING are requests in the engine, CACHE is the used share of its KV cache, HITS the share of the
    prompts' tokens that its prefix cache had, since it started. A dash is what an engine does not say.
    Below the table stand the shards of those that span nodes; which of them takes shorter requests than its model
    promises; and, of each that failed, the cause, what to do about it, and the last lines of its engine.
    """
    path = "/replicas" if model is None else f"/replicas?model={as_word(_find_name(asked, model))}"
    show(asked, path, lambda answer: draw(answer, verbose=verbose))


def _find_name(asked: Asked, name: str) -> str:
    """The model's own name. ToldNo when there is none, nor replicas of one that was removed."""
    try:
        answer = asked.operator.ask("GET", f"/models/{as_word(name)}")
    except ToldNo as refused:
        left = asked.operator.ask("GET", f"/replicas?model={as_word(name)}")
        if refused.code == "unknown_model" and drawn(asked.operator, left, lambda facts: facts["replicas"]):
            return name
        raise
    return drawn(asked.operator, answer, lambda facts: str(facts["model"]["name"]))


def draw(answer: Any, *, verbose: bool = False) -> list[Block]:
    replicas = answer["replicas"]
    blocks: list[Block] = [Grid(columns=COLUMNS, rows=tuple(_row(replica) for replica in replicas))]
    if shards := [row for replica in replicas for row in _shards(replica, verbose=verbose)]:
        blocks += ["", Grid(columns=SHARD_COLUMNS, rows=tuple(shards))]
    for replica in replicas:
        blocks += _short_of_context(replica)
        blocks += _last_words(replica)
        if verbose:
            blocks += _fetches(replica)
            blocks += _last_words_of_shards(replica)
    return blocks


def _shards(replica: dict[str, Any], *, verbose: bool) -> list[tuple[str, ...]]:
    """Of one on one node its own line says all."""
    shards = replica.get("shards") or ()
    if len(shards) < 2 and not verbose:
        return []
    return [
        (
            shown(replica["replica"]),
            str(shard["rank"]),
            shown(shard["node"]),
            # (one that was told to end, since another had failed or is lost, has no cause of its own)
            _state(shard["state"]) if shard.get("cause") else shown(shard["state"]),
            ago(shard["seconds_in_state"]),
            listed(shard.get("gpus")),
            _tell_progress(shard),
        )
        for shard in shards
    ]


def _fetches(replica: dict[str, Any]) -> list[Block]:
    """The weights that its shards wait for, with all that is known of them."""
    shards = [shard for shard in replica.get("shards") or () if shard.get("fetch") is not None]
    lines = [f"{shown(replica['replica'])} on {shown(each['node'])}: {tell_whole(each['fetch'])}" for each in shards]
    return ["", *lines] if lines else []


def _short_of_context(replica: dict[str, Any]) -> list[Block]:
    """Of one whose engine takes less than clients are told."""
    takes, promised = replica.get("context_length"), replica.get("context_promised")
    if takes is None or promised is None or takes >= promised:
        return []
    name, model = shown(replica["replica"]), shown(replica["model"])
    return ["", f"{name} takes {takes} tokens a request, and {model} promises context_length {promised}"]


def _last_words(replica: dict[str, Any]) -> list[Block]:
    """Of one that failed: the line that names the cause first, for the engine's last line seldom does."""
    cause, remedy, lines = replica.get("cause"), replica.get("remedy"), replica.get("lines") or ()
    if cause is None and not lines:
        return []
    blocks: list[Block] = ["", f"{shown(replica['replica'])} on {shown(replica['node'])}:"]
    blocks += [f"{name:<6}  {shown(text)}" for name, text in (("cause", cause), ("remedy", remedy)) if text is not None]
    return [*blocks, *_tell_lines(lines)]


def _last_words_of_shards(replica: dict[str, Any]) -> list[Block]:
    """Those that are not the replica's own, which are told anyway."""
    blocks: list[Block] = []
    for shard in replica.get("shards") or ():
        lines = shard.get("lines") or ()
        if lines and lines != replica.get("lines"):
            blocks += ["", f"{shown(shard['shard'])} on {shown(shard['node'])}:", *_tell_lines(lines)]
    return blocks


def _tell_lines(lines: Sequence[str]) -> list[Block]:
    return ["the last lines of its engine:", *(f"  {shown(line)}" for line in lines)] if lines else []


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    return (
        shown(replica["replica"]),
        shown(replica["model"]),
        shown(replica["node"]),
        "draining" if _is_draining(replica) else _state(replica["state"]),
        ago(replica["seconds_in_state"]),
        shown(replica.get("running")),
        shown(replica.get("waiting")),
        percent(replica.get("cache_used"), 1.0),
        percent(replica.get("cached_tokens"), replica.get("prompt_tokens")),
        _detail(replica),
    )


def _is_draining(replica: dict[str, Any]) -> bool:
    # What happens to it after that says more.
    return replica.get("draining") is not None and replica["state"] == "ready"


def _detail(replica: dict[str, Any]) -> str:
    if _is_draining(replica):
        count = replica.get("in_flight")
        left = "" if count is None else f"; {count} {'request' if count == 1 else 'requests'} in flight"
        return f"{shown(replica['draining'])}{left}"
    return _tell_progress(replica)


def _tell_progress(each: dict[str, Any]) -> str:
    """How far a replica or a shard is, or why it ended."""
    cause, fetch = each.get("cause"), each.get("fetch")
    if cause is None and fetch is not None:
        return tell_fetch(fetch)
    return shown(cause or each.get("progress") or "")


def _state(state: str) -> str:
    # What has ended and is still shown is what is to be tried again.
    return "failed" if state == "ended" else shown(state)
