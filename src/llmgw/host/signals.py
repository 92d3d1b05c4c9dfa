"""Which signals ask the program to stop in good order."""

from __future__ import annotations

import signal

ALWAYS = (signal.SIGINT, signal.SIGTERM)


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM, and unless it was told to ignore them SIGHUP (the terminal was closed; nohup ignores it) and
    SIGQUIT (Ctrl-\\, which would leave engines running)."""
    return (*ALWAYS, *_heard(signal.SIGHUP, signal.SIGQUIT))


def stop_signals_of_a_server() -> tuple[signal.Signals, ...]:
    """The same without SIGHUP, which tells it to read its configuration again."""
    return (*ALWAYS, *_heard(signal.SIGQUIT))


def _heard(*signals: signal.Signals) -> tuple[signal.Signals, ...]:
    return tuple(each for each in signals if signal.getsignal(each) is not signal.SIG_IGN)
