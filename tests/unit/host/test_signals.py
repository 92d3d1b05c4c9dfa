"""Which signals stop the program."""

from __future__ import annotations

import signal

from llmgw.host.signals import stop_signals, stop_signals_of_a_server


def test_a_closed_terminal_stops_it_unless_it_is_to_outlive_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert set(stop_signals()) >= {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_quit_key_stops_what_was_not_told_to_ignore_it() -> None:
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    try:
        assert signal.SIGQUIT in stop_signals()
        assert stop_signals_of_a_server() == (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        assert signal.SIGQUIT not in stop_signals()
        assert stop_signals_of_a_server() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGQUIT, before)
