"""``python -m llmgw_llamacpp.embedded``: a llama-server for machines that have none, over the package xllamacpp.

It takes llama-server's flags and behaves as it does: the same HTTP, the log on stderr, exit status 1 with a line that
names the cause, 0 when it is told to stop. While it loads it answers 503, and a signal then ends it at once.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from llmgw_llamacpp.options import Given, MisuseError, help_text, move, parse

_STOP = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str]) -> int:
    """Serves until a signal ends it; the exit status."""
    try:
        if {"--help", "-h", "--usage"} & set(argv):
            sys.stdout.write(help_text())
            return 0
        asks_version = "--version" in argv
        given = [] if asks_version else parse(argv)
        if not asks_version and not any(each.flag in ("--model", "-m") and each.value for each in given):
            raise MisuseError("error: --model is required: the embedded llama.cpp has no router")
        xllamacpp = _load()
        if asks_version:
            sys.stderr.write(_version(xllamacpp))
            return 0
        return _serve(xllamacpp, _params(xllamacpp, given))
    except MisuseError as misused:
        sys.stderr.write(f"{misused}\n")
        return 1


def _load() -> ModuleType:
    # By name and late: the plugin is installed, asked and tested where this package is not.
    try:
        return importlib.import_module("xllamacpp")
    except ImportError as failed:
        text = f"error: the embedded llama.cpp can't be loaded ({failed}): pip install 'llmgw[demo]'"
        raise MisuseError(text) from failed


def _version(xllamacpp: ModuleType) -> str:
    build: dict[str, object] = getattr(xllamacpp, "BUILD_INFO", {})
    number, commit = build.get("build_number", 0), build.get("commit", "unknown")
    compiler, target = build.get("compiler", "unknown"), build.get("build_target", sys.platform)
    return f"version: {xllamacpp.__version__} (build {number}, commit {commit})\nbuilt with {compiler} for {target}\n"


def _params(xllamacpp: ModuleType, given: Sequence[Given]) -> Any:
    params = xllamacpp.CommonParams()
    # llama-server's own defaults, where those of the library differ: slots by themselves, and its usual port.
    params.n_parallel = -1
    params.port = 8080
    move(given, xllamacpp, params)
    return params


def _serve(xllamacpp: ModuleType, params: Any) -> int:
    # Server() holds the interpreter until the model is loaded, so no Python could run for a signal that comes
    # meanwhile: with the default action it ends the process at once, which is also what llama-server does then.
    for number in _STOP:
        signal.signal(number, signal.SIG_DFL)
    try:
        server = xllamacpp.Server(params)
    except (RuntimeError, ValueError) as failed:
        # llama.cpp has logged the cause; this is its last word, as generic as llama-server's.
        sys.stderr.write(f"exiting due to {type(failed).__name__}: {failed}\n")
        return 1
    sys.stderr.write(f"serving at {server.listening_address}\n")
    _wait_for_stop()
    sys.stderr.write("cleaning up before exit...\n")
    sys.stderr.flush()
    # Not by way of the server's destructor: it joins threads that may be deep in a prompt, or held by a client that
    # does not read, and a second signal could not end that wait. The kernel takes back all that it would have freed.
    os._exit(0)


def _wait_for_stop() -> None:
    # Any of llama.cpp's threads may be the one that gets the signal. The wakeup descriptor is written in each of them,
    # so the wait ends even for a signal that came between the handler and the read.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _STOP:
        signal.signal(number, lambda _number, _frame: None)
    with suppress(InterruptedError):
        os.read(reading, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
