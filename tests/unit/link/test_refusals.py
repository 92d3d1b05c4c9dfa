"""What the log says of refused connections, and how much of it."""

from __future__ import annotations

import logging
import ssl

import pytest

from llmgw.core.node import NodeId
from llmgw.link.refusals import ADDRESSES, LINES, OTHERS, Refusals, explain_tls
from llmgw.link.sparing import WINDOW_SECONDS


@pytest.fixture(autouse=True)
def _hear(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def test_the_line_names_address_port_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    Refusals().note(("10.0.0.7", 5123), "it showed no certificate", 0.0)
    assert caplog.messages == ["refused a connection from 10.0.0.7 port 5123: it showed no certificate"]


def test_one_address_gets_a_few_lines_and_then_a_count(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(50):
        refusals.note(("10.0.0.7", 5000 + number), f"reason {number}", number / 10)
    refusals.note(("10.0.0.8", 1), "another", 5.0)
    assert len(caplog.messages) == LINES + 1
    caplog.clear()
    refusals.sweep(WINDOW_SECONDS - 0.1)
    assert caplog.messages == []
    refusals.sweep(WINDOW_SECONDS)
    assert caplog.messages == [f"refused {50 - LINES} more connections from 10.0.0.7 within 60 s; the last: reason 49"]


def test_a_node_counts_whatever_addresses_it_comes_from(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(50):
        refusals.note((f"10.0.0.{number}", 1), "no", 0.0, node=NodeId("gpu-01"))
    refusals.note(("10.0.0.1", 1), "no", 0.0, node=NodeId("gpu-02"))
    assert len(caplog.messages) == LINES + 1
    caplog.clear()
    refusals.sweep(WINDOW_SECONDS)
    assert caplog.messages == [f"refused {50 - LINES} more connections from node gpu-01 within 60 s; the last: no"]


def test_after_a_window_lines_come_again(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for _ in range(LINES + 1):
        refusals.note(("10.0.0.7", 1), "early", 0.0)
    caplog.clear()
    refusals.note(("10.0.0.7", 1), "late", WINDOW_SECONDS)
    assert len(caplog.messages) == 2
    assert "1 more" in caplog.messages[0]
    assert caplog.messages[1].endswith("late")


def test_many_addresses_share_one_window_past_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(ADDRESSES + 100):
        refusals.note((f"10.0.{number // 250}.{number % 250}", 1), "no", 0.0)
    assert len(caplog.messages) == ADDRESSES + LINES
    caplog.clear()
    refusals.sweep(WINDOW_SECONDS)
    assert caplog.messages == [f"refused {100 - LINES} more connections from {OTHERS} within 60 s; the last: no"]


def test_what_is_no_error_of_tls_is_told_as_it_is() -> None:
    assert explain_tls(ConnectionResetError(104, "Connection reset by peer")) == (
        "the connection broke during the TLS handshake ([Errno 104] Connection reset by peer)"
    )
    assert "SomethingElse" in explain_tls(type("SomethingElse", (Exception,), {})())


def test_an_unknown_reason_of_openssl_is_passed_on() -> None:
    error = ssl.SSLError(1, "[SSL: ODD_THING] odd thing")
    error.reason = "ODD_THING"
    assert explain_tls(error) == "the TLS handshake failed (odd thing)"
