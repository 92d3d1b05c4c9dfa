"""What more than one of the configuration files holds: timeouts, limits, origins, and engines."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from llmgw.config.addresses import wrong_host
from llmgw.config.document import Section
from llmgw.config.files import read_path, read_value
from llmgw.config.node import EngineConfig, Limits, NodeLimits, Timeouts, WeightsConfig
from llmgw.config.profiles import unknown_engine

# Off is a sensible wish for these alone: without the others a silent peer would hold its place for ever.
_MAY_BE_ZERO = {"generation", "stream_open_after", "drain"}
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_LEAST_BYTES = 1024
# Below it no piece of a large file would ever be there.
_LEAST_RATE = 64 * 1024
_MOST_HOSTS = 100
_TOKEN = re.compile(r"[!-~]{1,1000}")


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
    limits = Limits(**_door_limits(section))
    section.close()
    return limits


def read_node_limits(section: Section) -> NodeLimits:
    """The same where weights are fetched too."""
    limits = NodeLimits(**_door_limits(section), download_rate=read_download_rate(section))
    section.close()
    return limits


def _door_limits(section: Section) -> dict[str, Any]:
    default = Limits()
    limits = {
        **{
            key: section.size(key, getattr(default, key), low=_LEAST_BYTES)
            for key in ("max_head", "max_body", "bodies_total")
        },
        "max_connections": section.count("max_connections", default.max_connections, low=1, high=1_000_000),
        "max_pipelined": section.count("max_pipelined", default.max_pipelined, low=1, high=10_000),
    }
    if limits["max_body"] > limits["bodies_total"]:
        section.wrong("max_body", "is more than bodies_total: no body of that size could ever be taken")
    return limits


def read_download_rate(section: Section) -> int | None:
    """Bytes per second; None where nothing is written."""
    return section.size("download_rate", None, low=_LEAST_RATE)


def read_weights(section: Section, *, secrets: bool = True) -> WeightsConfig:
    """What all of the ``weights`` sections hold; whoever asks closes it. ``secrets`` False leaves them unread."""
    is_empty = section.is_empty("allow_hosts")
    hosts = section.texts("allow_hosts")
    for host in hosts:
        if why := _wrong_allowed(host):
            section.wrong("allow_hosts", why)
    if is_empty:
        section.wrong("allow_hosts", "has no host in it, and nothing could be fetched; leave it out to allow all")
    if len(hosts) > _MOST_HOSTS:
        section.wrong("allow_hosts", f"are {len(hosts)}; {_MOST_HOSTS} at most")
    return WeightsConfig(
        allow_hosts=tuple(dict.fromkeys(host.lower() for host in hosts)),
        hub_token=_hub_token(section, secrets=secrets),
    )


def _wrong_allowed(host: str) -> str | None:
    if "://" in host or "/" in host:
        return f"{host!r} is an address; write its host alone: huggingface.co"
    if why := wrong_host(host):
        return f"{why}; write it as huggingface.co"
    return None


def _hub_token(section: Section, *, secrets: bool) -> str | None:
    token = section.text("hub_token", None)
    if not secrets:
        return None
    token = read_value(section, "hub_token", None)
    # Told without its value, of which a header would be made.
    if token is not None and not _TOKEN.fullmatch(token):
        section.wrong("hub_token", "holds what no token does: letters, digits and signs, no spaces")
        return None
    return token


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
