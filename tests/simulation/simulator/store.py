"""What a server is told at its start, and what it finds there of what an earlier one has kept."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llmgw.core.effects import Learn, Proven, Reverted
from llmgw.core.events import CatalogChanged, NodeMarked
from llmgw.core.learned import Fact, FactKey
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.rolling import is_same_launch
from simulator.faults import Cordon, DrainNode, EditModel, Flaw, Label
from simulator.site import DECLARED, FLAW


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How patient a server is, in seconds; its defaults are those of server.yaml."""

    lease: float = 15.0
    replace_after: float = 60.0
    brake: float = 600.0
    on_demand_wait: float = 20.0


@dataclass(slots=True)
class Store:
    """What a server finds when it begins anew.

    ``models`` are the definitions in effect, and ``served`` those that each has served by, the newest last, of which
    ``proven`` is the last; ``failed`` are the models whose present one has not come to serve. Times of drains are those
    of the wall clock, which is that of the simulation.
    """

    nodes: dict[NodeId, None] = field(default_factory=dict)
    marks: dict[NodeId, NodeMarked] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    proven: dict[ModelName, Model] = field(default_factory=dict)
    served: dict[str, list[Model]] = field(default_factory=dict)
    failed: dict[ModelName, None] = field(default_factory=dict)
    held: dict[ModelName, None] = field(default_factory=dict)
    facts: dict[FactKey, Fact] = field(default_factory=dict)

    def marked(self, act: Cordon | DrainNode | Label) -> NodeMarked:
        """What an operator has said of a node by now."""
        node = NodeId(act.node)
        mark = self.marks.get(node) or NodeMarked(node=node)
        match act:
            case Cordon(cordoned=True):
                return replace(mark, cordoned=True)
            case Cordon():
                return replace(mark, cordoned=False, draining=False, drain_until=None)
            case DrainNode(at=at, deadline=deadline):
                return replace(mark, draining=True, drain_until=None if deadline is None else at + deadline)
            case Label(key=key, value=value):
                return replace(mark, labels={**mark.labels, key: value})

    # -- models

    def put(self, model: Model) -> None:
        """This is the definition of its name from now on."""
        before = self.models.get(model.name)
        self.models[model.name] = model
        if before is None or not is_same_launch(before, model):
            self.failed.pop(model.name, None)

    def remove(self, name: str) -> bool:
        """The model is gone, and so is all that was kept of it; whether there was one."""
        if self.models.pop(name, None) is None:
            return False
        for kept in (self.proven, self.failed, self.held):
            kept.pop(ModelName(name), None)
        self.served.pop(name, None)
        return True

    def roll_back(self, name: str) -> bool:
        """The last that has served, and is another one than that of now, is the definition again; whether there is
        one."""
        current = self.models.get(name)
        if current is None or name in DECLARED:
            return False
        earlier = next((each for each in reversed(self.served.get(name, ())) if each != current), None)
        if earlier is not None:
            self.put(earlier)
        return earlier is not None

    def keep(self, effect: Proven | Reverted | Learn) -> bool:
        """Of what the fleet says, what a later server is to know; whether another definition is in effect for it."""
        match effect:
            case Proven(model=model):
                current = self.models.get(model.name)
                if current is not None:
                    self.proven[model.name] = model
                    self.served.setdefault(model.name, []).append(model)
                    if is_same_launch(model, current):
                        self.failed.pop(model.name, None)
            case Reverted(model=model, by=by):
                current = self.models.get(model.name)
                if current is None or not is_same_launch(model, current):
                    return False
                if model.name not in DECLARED:
                    self.put(next((each for each in reversed(self.served.get(model.name, ())) if each == by), by))
                    return True
                self.failed[model.name] = None
            case Learn(fact=fact):
                self.facts[fact.key] = fact
        return False

    def catalog(self) -> CatalogChanged:
        """The models there are, with what is known of their definitions."""
        proven = {
            name: model
            for name, model in self.proven.items()
            if name in self.models and not is_same_launch(model, self.models[name])
        }
        failed = frozenset(name for name in self.failed if name in proven)
        return CatalogChanged(models=tuple(self.models.values()), proven=proven, failed=failed)


def edit(model: Model, act: EditModel, origin: Model) -> Model:
    """The definition as an operator has changed it; ``origin`` is what it was at first."""
    edited = replace(model, scaling=replace(model.scaling, min=act.min, max=act.max))
    if not act.restart and act.flaw is None:
        return edited
    changed = []
    for profile, first in zip(model.profiles, origin.profiles, strict=True):
        args = (*(arg for arg in profile.args if not arg.startswith(FLAW)), "--again")
        if act.flaw is not None:
            args += (f"{FLAW}{act.flaw.value}",)
        nowhere = act.flaw is Flaw.FITS_NOWHERE
        changed.append(replace(first, args=args, gpu_class="none-such" if nowhere else first.gpu_class))
    return replace(edited, profiles=tuple(changed))


def find_flaw(model: Model) -> Flaw | None:
    """What is wrong with a definition."""
    for profile in model.profiles:
        for arg in profile.args:
            if arg.startswith(FLAW):
                return Flaw(arg.removeprefix(FLAW))
    return None
