"""What the commands of ``llmgw ctl`` have in common: their options, and how an answer is shown, once or for ever."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from llmgw.cli.ctl.address import find_address
from llmgw.cli.ctl.client import NoAnswer, Operator
from llmgw.cli.ctl.drawing import Block, paint, plain, write

WATCH_SECONDS = 2.0
# Figures that move all the time: of themselves they are no change that a reader of a pipe waits for.
_MEASURED = {
    "up_seconds",
    "heard_seconds_ago",
    "seconds_in_state",
    "memory_available_gb",
    "free_gb",
    "running",
    "waiting",
    "cache_used",
    "prompt_tokens",
    "cached_tokens",
    "steps",
    "clock_skew_seconds",
    "memory_foreign_gb",
    "memory_free_gb",
    "memory_used_gb",
    "temperature_c",
    "utilization_percent",
    "foreign",
    "seconds_left",
    "drain_seconds_left",
    "in_flight",
    "seconds_ago",
    "held_up",
    "size_bytes",
    "done_bytes",
    "rate",
    "left_seconds",
    "stalled_seconds",
    "origin_bytes",
    "peer_bytes",
}

Command = TypeVar("Command", bound=Callable[..., Any])
T = TypeVar("T")
Draw = Callable[[Any], list[Block]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Whom to ask, and how to show what comes."""

    operator: Operator
    as_json: bool = False
    watch: bool = False
    sleep: Callable[[float], None] = time.sleep


def operator_options(command: Command) -> Any:
    """--server, --config, --json and --watch; the command gets them as ``asked``."""

    @functools.wraps(command)
    def gather(*, server: str | None, config: Path | None, as_json: bool, watch: bool, **rest: Any) -> Any:
        address = find_address(server, config, environ=os.environ)
        return command(asked=Asked(operator=Operator(address), as_json=as_json, watch=watch), **rest)

    watching = click.option("--watch", is_flag=True, help="Look again every 2 s, until Ctrl-C.")
    as_it_is = click.option("--json", "as_json", is_flag=True, help="Write the server's answer as it is.")
    return server_options(as_it_is(watching(gather)))


def server_options(command: Command) -> Command:
    """--server and --config, which say where to ask."""
    file = click.Path(path_type=Path, dir_okay=False)
    config = click.option("--config", type=file, help="The server.yaml that names the port.")
    server = click.option("--server", metavar="URL", help="The operator port, as http://127.0.0.1:9090.")
    return server(config(command))


def show(asked: Asked, path: str, draw: Draw, *, until: Callable[[Any], bool] = lambda answer: False) -> None:
    """Ask for ``path`` and write what comes; with --watch again and again, until Ctrl-C or ``until`` says so."""
    if not asked.watch:
        tell(asked, asked.operator.ask("GET", path), draw)
        return
    answers = _answers(asked, path, until)
    try:
        if sys.stdout.isatty() and not asked.as_json:
            _redraw(asked, answers, draw)
        else:
            _write_changes(asked, answers, draw)
    except KeyboardInterrupt:
        # That is how one stops watching.
        return


def tell(asked: Asked, answer: bytes, draw: Draw) -> None:
    """One answer."""
    blocks = drawn(asked.operator, answer, draw)
    if asked.as_json:
        print(answer.decode("utf-8"), flush=True)
    else:
        write(blocks)


def drawn(operator: Operator, answer: bytes, use: Callable[[Any], T]) -> T:
    """What ``use`` makes of an answer. LlmgwError when that is not of llmgw's shape: who knows what has that port."""
    try:
        return use(json.loads(answer))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise operator.stranger(f"an answer to no question of llmgw: {type(error).__name__}") from error


def _answers(asked: Asked, path: str, until: Callable[[Any], bool]) -> Iterator[bytes | NoAnswer]:
    # Whoever names a wrong address is told at once; a server that is started anew comes back.
    answer = asked.operator.ask("GET", path)
    while True:
        yield answer
        if drawn(asked.operator, answer, until):
            return
        while True:
            asked.sleep(WATCH_SECONDS)
            try:
                answer = asked.operator.ask("GET", path)
                break
            except NoAnswer as silence:
                yield silence


def _redraw(asked: Asked, answers: Iterator[bytes | NoAnswer], draw: Draw) -> None:
    from rich.live import Live

    blocks: list[Block] = []
    with Live(auto_refresh=False) as live:
        for answer in answers:
            if isinstance(answer, bytes):
                blocks = drawn(asked.operator, answer, draw)
                live.update(paint(blocks), refresh=True)
            else:
                live.update(paint([*blocks, "", f"(as it was) {answer.message}"]), refresh=True)


def _write_changes(asked: Asked, answers: Iterator[bytes | NoAnswer], draw: Draw) -> None:
    """One document for each change, with an empty line between two tables."""
    before: Any = None
    for answer in answers:
        if not isinstance(answer, bytes):
            if before != answer.message:
                click.echo(f"llmgw: {answer.message}", err=True)
            before = answer.message
            continue
        blocks, lasting = drawn(asked.operator, answer, lambda facts: (draw(facts), _lasting(facts)))
        if lasting != before:
            if asked.as_json:
                print(answer.decode("utf-8"), flush=True)
            else:
                print(plain(blocks), end="\n\n", flush=True)
        before = lasting


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(inner) for key, inner in value.items() if key not in _MEASURED}
    return [_lasting(inner) for inner in value] if isinstance(value, list) else value
