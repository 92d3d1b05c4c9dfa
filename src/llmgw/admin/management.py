"""What the operator port asks of the server, and how it is told no."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from llmgw.admin.views import (
    AddedModel,
    CollectedView,
    DecisionView,
    EnginesView,
    EventsView,
    ExplanationView,
    FactsView,
    HistoryView,
    LoadBegun,
    ModelDetail,
    ModelView,
    NodeMarks,
    NodeView,
    PlanView,
    PullView,
    Reloaded,
    Removed,
    RemovedNode,
    ReplicaView,
    RolledBack,
    StatusView,
    Stopped,
    ToolsChecked,
    WeightsView,
)
from llmgw.core.sizing import Needs
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

    async def plan(self, needs: Needs) -> PlanView:
        """Where a model that needs this much would fit now; nothing changes."""
        ...

    def decisions(self) -> tuple[DecisionView, ...]:
        """The last hundred, the newest first."""
        ...

    async def events(
        self, *, after: int, wait_seconds: float = 0.0, model: str | None = None, node: str | None = None
    ) -> EventsView:
        """What has happened after the event of that number (0: all that is kept), of this model (by any of its names)
        and this node. When there is nothing, it waits so long for something. A number that this server has not come to
        is of an earlier one, and answered with all. Also of names that there are no more."""
        ...

    async def history(self, name: str) -> HistoryView:
        """The last definitions of a model (of that name or alias); Refused when there is none."""
        ...

    async def facts(self, name: str) -> FactsView:
        """What launches of a model (of that name or alias) have shown; Refused when there is none."""
        ...

    async def weights(self) -> WeightsView:
        """What each node has fetched and fetches, and what could be freed."""
        ...

    async def pull(self, number: int) -> PullView:
        """How far a pull of weights is; Refused when there is none of this number."""
        ...

    async def cordon(self, node: str, *, cordoned: bool) -> NodeMarks:
        """Keep new replicas off a node, which need not be there, or no longer; Refused for the end of what nobody has
        said of a node that nobody has seen. The end of a cordon ends a drain."""
        ...

    async def drain(self, node: str, *, deadline_seconds: float | None) -> NodeMarks:
        """Cordon a node and have all that runs there run elsewhere: as soon as there is room, or after the deadline in
        any case. Refused for a node that nobody has seen or marked."""
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

    async def rollback(self, name: str, number: int | None) -> RolledBack:
        """Make an earlier definition of a stored model the current one: that of the number, or the last that is proven
        and another than the current one. Refused for a declared model, and where there is none such."""
        ...

    async def stop(self, name: str) -> Stopped:
        """Hold a model (of that name or alias) at zero until it is loaded again, or replace the replica of that id;
        Refused where there is neither."""
        ...

    async def load(self, name: str) -> LoadBegun:
        """End the hold of a model (of that name or alias), try a definition again that has failed, and load one that
        loads on demand. Refused for a model that has no replicas by its definition."""
        ...

    async def forget_facts(self, name: str) -> FactsView:
        """Have these facts forgotten; what runs is measured anew. Answers what they were."""
        ...

    async def pull_weights(self, source: str, nodes: Sequence[str]) -> PullView:
        """Have these nodes fetch the newest commit of a source, or without any those that could run a model of it, or
        all where there is none. Refused for what is not fetched, and nodes that can't be told. It goes on by itself."""
        ...

    async def collect_weights(self) -> CollectedView:
        """Have the nodes remove what they have fetched and nobody wants any more; waits until they have."""
        ...

    async def reload(self) -> Reloaded: ...

    async def tool_check(self, name: str, replica: str | None) -> ToolsChecked:
        """Ask that replica of the model (of that name, alias or adapter), or any, whether tool calls work."""
        ...
