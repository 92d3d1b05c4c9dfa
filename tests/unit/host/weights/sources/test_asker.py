"""What to do about a failure names the place where that is done."""

from __future__ import annotations

from llmgw.host.weights.sources.asker import AGENT, Asker


def test_an_agent_is_told_of_its_environment_and_its_file() -> None:
    assert AGENT.token_remedy == "set HF_TOKEN in the agent's environment, or weights.hub_token in agent.yaml"
    assert AGENT.allowed_key == "weights.allow_hosts in agent.yaml"


def test_who_reads_no_file_is_told_of_none() -> None:
    asker = Asker(environment="this command's environment", file=None)
    assert asker.token_remedy == "set HF_TOKEN in this command's environment"
    assert asker.allowed_key == "weights.allow_hosts"
