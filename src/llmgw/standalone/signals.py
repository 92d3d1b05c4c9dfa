"""Which signals ask the program to stop in good order."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM, and SIGHUP (the terminal was closed) unless it was told to outlive its terminal (nohup)."""
    stop = (signal.SIGINT, signal.SIGTERM)
    return stop if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*stop, signal.SIGHUP)
