"""What the operator port asks of the server, and how it is told no."""

from __future__ import annotations

from typing import Protocol

from llmgw.admin.views import (
    AddedModel,
    EnginesView,
    ModelDetail,
    ModelView,
    NodeView,
    Reloaded,
    Removed,
    ReplicaView,
    StatusView,
    ToolsChecked,
)
from llmgw.errors import LlmgwError, Problem


class Refused(LlmgwError):  # noqa: N818 - named by what happens next, like all of them
    """The operator is told no: an HTTP status, a code for programs, and each thing that is wrong with its place."""

    def __init__(self, message: str, *, status: int, code: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.problems = problems


class Management(Protocol):
    """Everything that an operator can see and do. What looks is immediate; an act has been done when it returns.

    An act raises Refused, or ConfigError where the fault is in what was written.
    """

    def status(self) -> StatusView: ...

    def nodes(self) -> tuple[NodeView, ...]: ...

    def engines(self) -> EnginesView: ...

    def models(self) -> tuple[ModelView, ...]: ...

    def replicas(self, model: str | None) -> tuple[ReplicaView, ...]:
        """All, or those of one model; also of one that was removed, while they last."""
        ...

    def model(self, name: str) -> ModelDetail:
        """By name or alias; Refused when there is none."""
        ...

    async def add(self, file: str, text: str, *, replace: bool) -> tuple[AddedModel, ...]:
        """Store the models of a definition, none unless all can be; ``file`` is what their writer calls it."""
        ...

    async def remove(self, name: str) -> Removed: ...

    async def reload(self) -> Reloaded: ...

    async def tool_check(self, name: str, replica: str | None) -> ToolsChecked:
        """Ask that replica of the model (of that name, alias or adapter), or any, whether tool calls work."""
        ...
