"""What a server is told at its start, and what it finds there of what an earlier one has kept."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llmgw.core.events import NodeMarked
from llmgw.core.model import Model
from llmgw.core.node import NodeId
from simulator.faults import Cordon, EditModel, Label


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How patient a server is, in seconds; its defaults are those of server.yaml."""

    lease: float = 15.0
    replace_after: float = 60.0
    brake: float = 600.0
    on_demand_wait: float = 20.0


@dataclass(slots=True)
class Store:
    """What a server finds when it begins anew."""

    nodes: dict[NodeId, None] = field(default_factory=dict)
    marks: dict[NodeId, NodeMarked] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)

    def marked(self, act: Cordon | Label) -> NodeMarked:
        """What an operator has said of a node by now."""
        node = NodeId(act.node)
        mark = self.marks.get(node) or NodeMarked(node=node)
        if isinstance(act, Cordon):
            return replace(mark, cordoned=act.cordoned)
        return replace(mark, labels={**mark.labels, act.key: act.value})


def edit(model: Model, act: EditModel) -> Model:
    """The definition as an operator has changed it."""
    edited = replace(model, scaling=replace(model.scaling, min=act.min, max=act.max))
    if act.restart:
        changed = tuple(replace(profile, args=(*profile.args, "--again")) for profile in model.profiles)
        edited = replace(edited, profiles=changed)
    return edited
