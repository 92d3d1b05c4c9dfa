"""``llmgw agent`` before its tree stands: what is wrong is said, and nothing is begun."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.agent.program import run
from llmgw.config.agent import AgentConfig, Discovery, NodeTls, ServerAddress
from llmgw.errors import ConfigError, UsageError
from llmgw.host.state import hold_state
from llmgw.pki.authority import certificate_pem, issue_node, key_pem, make_authority


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    for name in ("ca.pem", "node.pem", "node-key.pem"):
        (tmp_path / name).write_text("none")
    return AgentConfig(
        node="n1",
        server=ServerAddress(host="127.0.0.1", port=1),
        tls=NodeTls(ca=tmp_path / "ca.pem", cert=tmp_path / "node.pem", key=tmp_path / "node-key.pem"),
        state=tmp_path / "state",
    )


def test_certificates_that_are_none_are_told_at_once(config: AgentConfig) -> None:
    with pytest.raises(UsageError, match=r"\.pem"):
        run(config)
    assert not config.state.exists()


def test_a_fake_inventory_that_is_wrong_is_told_at_once(config: AgentConfig, tmp_path: Path) -> None:
    fake = tmp_path / "fake.yaml"
    fake.write_text("gpus: [{class: h100-80g, cuont: 8}]\ncore: 1\n")
    with pytest.raises(ConfigError) as caught:
        run(replace(config, discovery=Discovery(fake=fake)))
    assert [str(problem) for problem in caught.value.problems] == [
        f"{fake}:1:26 gpus[0].cuont: unknown key (count?)",
        f"{fake}:2:1 core: unknown key (cores?)",
    ]
    assert not config.state.exists()


def test_two_agents_do_not_share_a_state_folder(config: AgentConfig) -> None:
    authority = make_authority(now=time.time())
    issued = issue_node(authority, "n1", now=time.time())
    config.tls.ca.write_bytes(certificate_pem(authority.certificate))
    config.tls.cert.write_bytes(certificate_pem(issued.certificate))
    config.tls.key.write_bytes(key_pem(issued.key))
    config.tls.key.chmod(0o600)
    with hold_state(config.state), pytest.raises(UsageError, match="state"):
        run(config)
