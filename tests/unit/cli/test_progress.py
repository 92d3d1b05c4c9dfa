from __future__ import annotations

import io
import sys

from llmgw.cli.progress import Bars, Shown, terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_now_and_then() -> None:
    out = io.StringIO()
    with Shown(None, lambda line: print(line, file=out)) as shown:
        shown.say("fetching")
        for done in range(0, 50_000_001, 1_000_000):
            shown.moved(done, 100_000_000)
        shown.say("again")
        shown.moved(10_000_000, 100_000_000)
    assert out.getvalue().splitlines() == [
        "fetching",
        *(f"{percent} % of 100 MB" for percent in range(10, 60, 10)),
        "again",
        "10 % of 100 MB",
    ]


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    out = Terminal()
    with Shown(out) as shown:
        shown.moved(1_000_000, 2_000_000)
        shown.moved(2_000_000, 2_000_000)
    assert "1.0/2.0 MB" in out.getvalue() or "2.0/2.0 MB" in out.getvalue()


def test_a_line_takes_the_place_of_the_bar() -> None:
    out, lines = Terminal(), []
    with Shown(out, lines.append) as shown:
        shown.moved(1_000_000, 2_000_000)
        shown.say("done")
        gone = out.getvalue()
    assert lines == ["done"]
    assert out.getvalue() == gone


def test_a_bar_is_for_a_terminal_only() -> None:
    assert (terminal() is None) is not sys.stderr.isatty()


def test_of_several_each_has_a_line_now_and_then() -> None:
    lines: list[str] = []
    with Bars(None, lines.append) as bars:
        for percent in range(0, 30, 5):
            bars.show("n1", percent, 100, f"fetching {percent} %, {40 - percent}s left", doing="fetching")
        bars.show("n2", 0, None, "waits", doing="waits")
        bars.show("n2", 0, None, "waits", doing="waits")
        bars.say("nobody answers")
        for seconds in (10, 11):
            bars.show("n1", 25, 100, f"fetching 25 %, stalled for {seconds}s", doing="fetching, stalled")
        bars.show("n1", 100, 100, "ready", doing="ready")
    assert lines == [
        "n1: fetching 0 %, 40s left",
        "n1: fetching 10 %, 30s left",
        "n1: fetching 20 %, 20s left",
        "n2: waits",
        "nobody answers",
        "n1: fetching 25 %, stalled for 10s",
        "n1: ready",
    ]


def test_of_several_a_terminal_gets_a_bar_for_each() -> None:
    out = Terminal()
    with Bars(out) as bars:
        bars.show("n[b]1", 1_000_000, 2_000_000, "fetching [50 %]", doing="fetching")
        bars.show("n2", 0, None, "waits", doing="waits")
        bars.say("nobody [answers]")
        bars.show("n[b]1", 2_000_000, 2_000_000, "ready", doing="ready")
    shown = out.getvalue()
    assert "n[b]1" in shown
    assert "2.0/2.0 MB" in shown
    assert "nobody [answers]" in shown
