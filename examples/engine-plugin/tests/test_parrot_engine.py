"""The tests that hold for every engine, over the plugin and over what its server prints today."""

from __future__ import annotations

import contextlib
import io

import parrot_engine
import parrot_server
from llmgw.engines import read_argparse_help
from llmgw.engines.testing import EngineContract


def flags_of_today() -> frozenset[str]:
    """Each flag that the server lists."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        parrot_server.parser().print_help()
    return frozenset(name for flag in read_argparse_help(printed.getvalue()) for name in flag.names)


class TestParrot(EngineContract):
    """The kit's own tests."""

    plugin = parrot_engine
    flag_tables = {parrot_server.VERSION: flags_of_today()}
    owned = ("-w",)
    log = (
        "loading the greeting",
        "FATAL: weights /srv/polly.parrot: No such file or directory",
        "FATAL: could not start",
    )
