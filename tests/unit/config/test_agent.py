from __future__ import annotations

from llmgw.config.agent import ServerAddress


def test_a_server_is_shown_as_it_is_written() -> None:
    assert ServerAddress(host="ctl", port=7443).url == "https://ctl:7443"
    assert ServerAddress(host="::1", port=7443).url == "https://[::1]:7443"
