from __future__ import annotations

import io

from llmgw.cli.progress import Shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_now_and_then() -> None:
    out = io.StringIO()
    with Shown(out) as shown:
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
        shown.say("done")
    assert "1.0/2.0 MB" in out.getvalue() or "2.0/2.0 MB" in out.getvalue()
    assert out.getvalue().endswith("done\n")
