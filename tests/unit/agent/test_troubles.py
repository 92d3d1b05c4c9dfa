"""Each change is told once."""

from __future__ import annotations

import logging

import pytest

from llmgw.agent.troubles import Troubles


@pytest.fixture(autouse=True)
def hear_all(caplog):
    caplog.set_level(logging.INFO)


def test_what_is_out_of_service_is_told_when_it_begins_changes_and_ends(caplog):
    troubles = Troubles()
    for trouble in (None, "its cable is out", "its cable is out", "no subnet manager", None, None):
        troubles.note("fabric ib-a", trouble)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "fabric ib-a is out of service on this node: its cable is out"),
        ("WARNING", "fabric ib-a is out of service on this node: no subnet manager"),
        ("INFO", "fabric ib-a is in service again"),
    ]


def test_each_has_its_own(caplog):
    troubles = Troubles()
    troubles.note("fabric ib-a", "down")
    troubles.note("fabric ib-b", "down")
    assert len(caplog.records) == 2


def test_a_warning_is_told_when_it_comes_and_when_it_comes_again(caplog):
    troubles = Troubles()
    for warnings in (("slow",), ("slow", "odd"), (), ("slow",)):
        troubles.warn(warnings)
    assert [record.message for record in caplog.records] == ["slow", "odd", "slow"]
