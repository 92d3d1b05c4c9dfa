"""Labels of nodes: which names and values there may be, wherever somebody writes them."""

from __future__ import annotations

import re

from llmgw.config.document import Section

MAX_LABEL = 200

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


def read_labels(section: Section, key: str) -> dict[str, str]:
    """The mapping under a key. A value is the text that is written, a number or a truth too: labels are compared as
    text, and a command line has nothing else."""
    stanza = section.section(key)
    labels = {}
    for name in stanza.names():
        # (of NAME=value, which is no mapping, nothing is to be read)
        value = "" if wrong_label(name, "") else stanza.as_written(name, "")
        if why := wrong_label(name, value):
            stanza.wrong(name, why)
        labels[name] = value
    return labels


def wrong_label(name: str, value: str) -> str | None:
    """Why a node can't have this label; None when it can."""
    if "=" in name:
        return "is one word with a = in it: write NAME: value"
    if not _NAME.fullmatch(name):
        return "may hold letters, digits and . _ / - only, and starts with a letter or digit"
    if len(name) > MAX_LABEL or len(value) > MAX_LABEL:
        return f"is longer than {MAX_LABEL} characters"
    if not value.isprintable():
        return "has a value that is not one printable line"
    return None
