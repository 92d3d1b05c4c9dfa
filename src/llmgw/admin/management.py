"""What the operator port asks of the server, and how it is told no."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from llmgw.admin.views import (
    AddedModel,
    DecisionView,
    EnginesView,
    ExplanationView,
    ModelDetail,
    ModelView,
    NodeMarks,
    NodeView,
    Reloaded,
    Removed,
    RemovedNode,
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
    """Everything that an operator can see and do. What looks shows one moment; an act has been done when it returns.

    What looks at every node waits for a thread, and never for the outside. An act raises Refused, or
    ConfigError where the fault is in what was written.
    """

    async def status(self) -> StatusView: ...

    async def nodes(self) -> tuple[NodeView, ...]: ...

    async def engines(self) -> EnginesView: ...

    def models(self) -> tuple[ModelView, ...]: ...

    def replicas(self, model: str | None) -> tuple[ReplicaView, ...]:
        """All, or those of one model; also of one that was removed, while they last."""
        ...

    def model(self, name: str) -> ModelDetail:
        """By name or alias; Refused when there is none."""
        ...

    async def explain(self, name: str) -> ExplanationView:
        """Where one more replica of this model would go now, and why; Refused when there is no such model."""
        ...

    async def explain_what_if(self, file: str, text: str) -> tuple[ExplanationView, ...]:
        """The same of models that are only written, each after those before it have their replicas; nothing changes."""
        ...

    def decisions(self) -> tuple[DecisionView, ...]:
        """The last hundred, the newest first."""
        ...

    async def cordon(self, node: str, *, cordoned: bool) -> NodeMarks:
        """Keep new replicas off a node, which need not be there, or no longer; Refused for the end of what nobody has
        said of a node that nobody has seen."""
        ...

    async def label(self, node: str, changes: Mapping[str, str | None]) -> NodeMarks:
        """Lay labels over the node's own; None takes one away. Refused for a node that nobody has seen or marked."""
        ...

    async def remove_node(self, node: str) -> RemovedNode:
        """Forget a node that is lost, or cordoned with nothing running; Refused for any other. Answers what that does
        to the brake."""
        ...

    async def add(self, file: str, text: str, *, replace: bool) -> tuple[AddedModel, ...]:
        """Store the models of a definition, none unless all can be; ``file`` is what their writer calls it."""
        ...

    async def remove(self, name: str) -> Removed: ...

    async def reload(self) -> Reloaded: ...

    async def tool_check(self, name: str, replica: str | None) -> ToolsChecked:
        """Ask that replica of the model (of that name, alias or adapter), or any, whether tool calls work."""
        ...
