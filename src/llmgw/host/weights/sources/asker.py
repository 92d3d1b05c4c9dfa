"""Who asks the outside: what to do about a failure says where that is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """``environment``: whose variables are read, in words. ``file``: where settings of weights are written, None where
    none is read."""

    environment: str = "the agent's environment"
    file: str | None = "agent.yaml"

    @property
    def token_remedy(self) -> str:
        setting = f", or weights.hub_token in {self.file}" if self.file is not None else ""
        return f"set HF_TOKEN in {self.environment}{setting}"

    @property
    def allowed_key(self) -> str:
        """Where the hosts are listed that a source may name."""
        return "weights.allow_hosts" + (f" in {self.file}" if self.file is not None else "")


AGENT = Asker()
