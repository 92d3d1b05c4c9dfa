from __future__ import annotations

from collections.abc import Callable

import pytest

from llmgw.config.document import Section, parse_document
from llmgw.config.node import EngineConfig, Limits, Timeouts
from llmgw.config.parts import read_engines, read_limits, read_origins, read_timeouts


def told(text: str, read: Callable[[Section], object]) -> tuple[object, list[str]]:
    section, findings = parse_document(text, "f")
    return read(section), [f"{problem.key}: {problem.message}" for problem in findings.problems()]


def test_what_is_left_out_is_default() -> None:
    assert told("timeouts: {}", lambda top: read_timeouts(top.section("timeouts"))) == (Timeouts(), [])
    assert told("limits: {}", lambda top: read_limits(top.section("limits"))) == (Limits(), [])
    assert told("engines: {}", lambda top: read_engines(top.section("engines"), {"toy"})) == ({}, [])
    assert told("a: {}", read_origins) == ((), [])


@pytest.mark.parametrize("key", ["generation", "stream_open_after", "drain"])
def test_some_timeouts_can_be_switched_off(key: str) -> None:
    found, said = told(f"{key}: 0", read_timeouts)
    assert (getattr(found, key), said) == (0.0, [])


@pytest.mark.parametrize(
    "key", ["response_header", "idle", "keep_alive_comment", "head", "body", "keep_alive", "connect"]
)
def test_without_the_others_a_silent_peer_would_stay_for_ever(key: str) -> None:
    assert told(f"{key}: 0", read_timeouts)[1] == [f"{key}: must be more than 0"]


def test_no_body_may_be_larger_than_all_together() -> None:
    assert told("max_body: 2MiB\nbodies_total: 1MiB", read_limits)[1] == [
        "max_body: is more than bodies_total: no body of that size could ever be taken"
    ]


@pytest.mark.parametrize("origin", ["https://a.example", "http://localhost:3000", "tauri://localhost"])
def test_origins_are_taken(origin: str) -> None:
    assert told(f"cors_origins: ['{origin}']", read_origins) == ((origin,), [])


@pytest.mark.parametrize("origin", ["*", "a.example", "https://a.example/", "https://me@a.example"])
def test_what_no_browser_would_send_is_no_origin(origin: str) -> None:
    assert told(f"cors_origins: ['{origin}']", read_origins)[1] == [
        f"cors_origins: '{origin}' is not an origin; write it as https://app.example.com"
    ]


def test_an_engine_has_its_program() -> None:
    text = "toy: {bin: /opt/toy}\nother:\n"
    assert told(text, lambda top: read_engines(top, {"toy", "other"})) == (
        {"toy": EngineConfig(bin="/opt/toy"), "other": EngineConfig()},
        [],
    )
    assert told("tyo: {}", lambda top: read_engines(top, {"toy"}))[1] == ["tyo: no engine 'tyo' is installed (toy?)"]
