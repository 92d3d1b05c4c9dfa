"""``llmgw ctl events``: what has happened of late, and what happens."""

from __future__ import annotations

import functools
import json
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from llmgw.cli.ctl.address import find_address
from llmgw.cli.ctl.asking import WATCH_SECONDS, drawn, server_options
from llmgw.cli.ctl.client import NoAnswer, Operator, as_name
from llmgw.cli.ctl.drawing import UNKNOWN, shown
from llmgw.errors import LlmgwError
from llmgw.host.output import STDOUT
from llmgw.units import printable

# As many as the server keeps.
MOST_LINES = 1000
USUAL_LINES = 30
# Less than what an answer may take: one without news is no silence.
FOLLOW_SECONDS = 20


_Answer = tuple[list[str], int, float, int, tuple[str, ...]]


@click.command("events")
@click.option("--follow", "--watch", "follow", is_flag=True, help="Go on with what happens, until Ctrl-C.")
@click.option("--model", metavar="NAME", help="Only what is about this model.")
@click.option("--node", metavar="NODE", help="Only what is about this node.")
@click.option(
    "--lines",
    type=click.IntRange(0, MOST_LINES),
    default=USUAL_LINES,
    show_default=True,
    metavar="N",
    help="So many of what has happened already.",
)
@click.option("--verbose", is_flag=True, help="With the last lines of engines that ended.")
@click.option("--json", "as_json", is_flag=True, help="One object a line.")
@server_options
def command(
    *,
    server: str | None,
    config: Path | None,
    follow: bool,
    model: str | None,
    node: str | None,
    lines: int,
    verbose: bool,
    as_json: bool,
) -> None:
    """Show what has happened and why, the newest last: when (local time), what, of which model or node, and in words.

    The server keeps the last thousand, and not over a restart. --follow goes on after one, and says so. Of a model or
    node that is gone those that are kept are shown, and it is said that it is.
    """
    following = Following(
        operator=Operator(find_address(server, config, environ=os.environ)),
        filters={name: as_name(value) for name, value in (("model", model), ("node", node)) if value is not None},
        shape=shape_json if as_json else functools.partial(shape_text, verbose=verbose),
    )
    try:
        for event in following.read(lines, follow=follow):
            click.echo(event)
    except KeyboardInterrupt:
        # That is how one stops following.
        if not follow:
            raise


@dataclass(slots=True, kw_only=True)
class Following:
    """How far somebody has come with the events of a server: ``began`` tells it from one that was started anew.
    ``shape`` makes text of an event."""

    operator: Operator
    filters: Mapping[str, str]
    shape: Callable[[Any], str]
    sleep: Callable[[float], None] = time.sleep
    last: int = 0
    began: float | None = None
    unknown: tuple[str, ...] = ()

    def read(self, lines: int, *, follow: bool) -> Iterator[str]:
        """The last ``lines`` of what has happened, and with ``follow`` what happens, for ever. A server that does not
        answer then is waited for. LlmgwError where nothing has ever happened to what there is not: it is a wrong name.
        BrokenPipeError when nobody reads any more."""
        events = self._look(0)
        if self.unknown and not events and not follow:
            raise LlmgwError("; ".join(self.unknown))
        for text in self.unknown:
            say(text)
        yield from events[max(len(events) - lines, 0) :]
        while follow:
            yield from self._wait()

    def _look(self, wait_seconds: int) -> list[str]:
        """What has happened since the last look; of a server that was started anew all that it has."""
        events, last, began, missed, self.unknown = self._ask(self.last, wait_seconds)
        if self.began not in (None, began):
            say(f"the server was started anew {_when(began)}: its events count from 1 again")
            events, last, began, missed, self.unknown = self._ask(0, 0)
        elif self.began is not None and missed:
            say(f"{missed} events are missing here: the server did not keep them for so long")
        self.last, self.began = last, began
        return events

    def _wait(self) -> list[str]:
        """What happens next; nothing, if that takes long."""
        _check_reader()
        try:
            events = self._look(FOLLOW_SECONDS)
        except NoAnswer as silence:
            say(f"{silence.message}; waiting for it")
            events = self._await_server()
        if not events:
            # A server that has many followers answers at once.
            self.sleep(WATCH_SECONDS)
        return events

    def _await_server(self) -> list[str]:
        before = self.began
        while True:
            self.sleep(WATCH_SECONDS)
            _check_reader()
            try:
                events = self._look(0)
            except NoAnswer:
                continue
            if self.began == before:
                say("it answers again")
            return events

    def _ask(self, after: int, wait_seconds: int) -> _Answer:
        query = urlencode({"after": after, "wait": wait_seconds, **self.filters})
        return drawn(self.operator, self.operator.ask("GET", f"/events?{query}"), self._read)

    def _read(self, answer: Any) -> _Answer:
        events = [self.shape(event) for event in answer["events"]]
        unknown = tuple(map(str, answer.get("unknown", ())))
        return events, int(answer["last"]), float(answer["began"]), int(answer["missed"]), unknown


def _check_reader() -> None:
    """Else one whose pipe was closed would stay until something happens."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    if any(found & select.POLLERR for _, found in poll.poll(0)):
        raise BrokenPipeError


def say(text: str) -> None:
    """Beside what is followed, which may go into a file."""
    click.echo(f"llmgw: {printable(text)}", err=True)


def shape_json(event: Any) -> str:
    """One object in a line."""
    return json.dumps(event, ensure_ascii=False)


def shape_text(event: Any, *, verbose: bool) -> str:
    """A line, and with ``verbose`` the engine's last below it."""
    about = ", ".join(shown(event[key]) for key in ("model", "node") if event.get(key) is not None)
    line = f"{_when(event['at'])}  {shown(event['what']):<9}  {about or UNKNOWN:<16}  {shown(event['text'])}"
    said = [f"    {shown(each)}" for each in event["lines"]] if verbose else []
    return "\n".join([click.style(line, fg="yellow") if event["warning"] else line, *said])


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
