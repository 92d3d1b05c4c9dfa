"""The polite no."""

from __future__ import annotations

import pytest

from llmgw.dialects.refusal import Refusal


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "invalid_request_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_each_status_has_the_type_that_clients_know(status: int, kind: str) -> None:
    assert Refusal(status=status, code="x", message="y").type == kind
