"""The stranger's plugin keeps the contract of every plugin."""

from __future__ import annotations

import sys
from pathlib import Path

FAKES = str(Path(__file__).parent)
sys.path.insert(0, FAKES)
try:
    import llmgw_fake
finally:
    sys.path.remove(FAKES)

import pytest  # noqa: E402

from llmgw.engines.testing import EngineContract  # noqa: E402


class TestFakeEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _on_the_path(self, monkeypatch):
        monkeypatch.syspath_prepend(FAKES)

    plugin = llmgw_fake
    repeatable = ("--lora",)
    inherited = ("FAKE_PROBE",)
    takes_context = False
    forgets_adapters = True
    log = ("loading: layer 1", "fatal: port 1 is already in use", "giving up: HTTP server error")
