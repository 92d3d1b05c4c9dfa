"""The polite no, before any family has given it a shape."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that is not served: status, machine-readable code, and what happened and what to do in one sentence.

    ``retry_after`` is in whole seconds; None when trying again would change nothing.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None

    @property
    def type(self) -> str:
        """The error type that OpenAI's clients know for the status."""
        return TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")


TYPES = {401: "authentication_error", 403: "permission_error", 404: "invalid_request_error", 429: "rate_limit_error"}
