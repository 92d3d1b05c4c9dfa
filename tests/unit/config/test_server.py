from __future__ import annotations

from pathlib import Path

from llmgw.config.server import AgentTls


def test_what_is_revoked_stands_beside_the_authority_unless_told_otherwise() -> None:
    tls = AgentTls(ca=Path("/pki/ca.pem"), cert=Path("/c"), key=Path("/k"))
    assert tls.revoked_file == Path("/pki/revoked.txt")
    told = AgentTls(ca=Path("/pki/ca.pem"), cert=Path("/c"), key=Path("/k"), revoked=Path("/r"))
    assert told.revoked_file == Path("/r")
