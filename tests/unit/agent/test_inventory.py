"""What a node reports of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from llmgw.agent.inventory import serve_inventory, survey


@pytest.mark.slow
async def test_a_node_tells_what_it_has(tools, tmp_path):
    tools = replace(tools, settings=replace(tools.settings, folders=(tmp_path / "models",)))
    node = await survey(tools)
    assert node.id == "n1"
    assert node.cores >= 1
    assert 0 < node.memory_available_gb <= node.memory_gb
    assert [disk.path for disk in node.disks] == [str(tools.settings.state)]
    found = {engine.engine: engine for engine in node.engines}
    assert found["fake"].version == "1.0"
    assert found["fake"].program[1:] == ("-m", "fake_engine")


@pytest.mark.slow
async def test_an_engine_without_a_program_is_not_reported(tools):
    tools = replace(tools, settings=replace(tools.settings, binaries={"fake": "/nowhere/x"}))
    assert "fake" not in {engine.engine for engine in (await survey(tools)).engines}


@pytest.mark.slow
async def test_a_node_reports_again_and_again_and_past_a_failure(tools, nursery, caplog):
    class FailsOnce:
        failed = False

        def items(self):
            if not self.failed:
                self.failed = True
                raise OSError("the test made it fail")
            return ()

    send, receive = trio.open_memory_channel(10)
    nursery.start_soon(serve_inventory, replace(tools, engines=FailsOnce()), send.send_nowait)
    with trio.fail_after(60):
        for _ in range(2):
            assert (await receive.receive()).id == "n1"
    assert "the test made it fail" in caplog.text
