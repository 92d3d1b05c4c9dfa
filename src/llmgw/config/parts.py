"""What more than one of the configuration files holds: timeouts, limits, origins, and engines."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields

from llmgw.config.document import Section
from llmgw.config.files import read_path
from llmgw.config.node import EngineConfig, Limits, Timeouts
from llmgw.config.profiles import unknown_engine

# Off is a sensible wish for these alone: without the others a silent peer would hold its place for ever.
_MAY_BE_ZERO = {"generation", "stream_open_after", "drain"}
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_LEAST_BYTES = 1024


def read_origins(top: Section) -> tuple[str, ...]:
    """``cors_origins`` of this section."""
    origins = top.texts("cors_origins")
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            top.wrong("cors_origins", f"{origin!r} is not an origin; write it as https://app.example.com")
    return origins


def read_timeouts(section: Section) -> Timeouts:
    """All of a ``timeouts`` section."""
    default = Timeouts()
    values = {
        field.name: section.duration(field.name, getattr(default, field.name), zero=field.name in _MAY_BE_ZERO)
        for field in fields(Timeouts)
    }
    section.close()
    return Timeouts(**values)


def read_limits(section: Section) -> Limits:
    """All of a ``limits`` section."""
    default = Limits()
    limits = Limits(
        max_head=section.size("max_head", default.max_head, low=_LEAST_BYTES),
        max_body=section.size("max_body", default.max_body, low=_LEAST_BYTES),
        bodies_total=section.size("bodies_total", default.bodies_total, low=_LEAST_BYTES),
        max_connections=section.count("max_connections", default.max_connections, low=1, high=1_000_000),
        max_pipelined=section.count("max_pipelined", default.max_pipelined, low=1, high=10_000),
    )
    if limits.max_body > limits.bodies_total:
        section.wrong("max_body", "is more than bodies_total: no body of that size could ever be taken")
    section.close()
    return limits


def read_engines(section: Section, engines: Collection[str]) -> dict[str, EngineConfig]:
    """All of an ``engines`` section; ``engines`` are those that are installed."""
    found: dict[str, EngineConfig] = {}
    for name in section.names():
        stanza = section.section(name)
        if name in engines:
            path = read_path(stanza, "bin", None)
            found[name] = EngineConfig(bin=None if path is None else str(path))
            stanza.close()
        else:
            section.wrong(name, unknown_engine(name, engines))
    section.close()
    return found
