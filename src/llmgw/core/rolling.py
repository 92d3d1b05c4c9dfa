"""Which definition of a model is launched: the one that is written, or where that has failed the last that served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmgw.core.catalog import Catalog
from llmgw.core.model import Model, ModelName, launch_facts, with_launch
from llmgw.core.replica import ReplicaId, ShardSpec

# What has served for so long is good: engines that fall over do it within their first requests.
PROVING_SECONDS = 10.0
# Where somebody waits for its first answer, no sooner than that is there, or would have shown that it hangs.
UNANSWERED_SECONDS = 120.0

# One failure may be its node's, or somebody's who has killed the engine.
TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A definition that did not come to serve, why, and the one that goes on in its place."""

    model: Model
    by: Model
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Replicas that still run by an earlier definition, and what their replacement waits for, where it waits."""

    outdated: tuple[ReplicaId, ...]
    waits: str | None = None


class Rolls:
    """Of each model the definition that it has served by, and the one that has failed. ``launched`` are the models as
    they are launched."""

    __slots__ = ("_failed", "_proven", "_tries", "_written", "launched")

    def __init__(self) -> None:
        self._written = Catalog()
        self._proven: dict[ModelName, Model] = {}
        self._failed: dict[ModelName, Failed] = {}
        self._tries: dict[ModelName, int] = {}
        self.launched: dict[ModelName, Model] = {}

    def change(self, written: Catalog, proven: Mapping[ModelName, Model], failed: frozenset[ModelName]) -> None:
        """Go by this catalog. Of an earlier server ``proven`` are the definitions that served, and ``failed`` the
        models whose definition as it is written now did not."""
        earlier, self._written = self._written, written
        for name in [model.name for model in earlier if written.named(model.name) is None]:
            for known in (self._proven, self._failed, self._tries, self.launched):
                known.pop(name, None)
        for model in written:
            name = model.name
            before = earlier.named(name)
            if name in proven and name not in self._proven:
                self._proven[name] = proven[name]
            if before is None or not is_same_launch(before, model):
                self._tries.pop(name, None)
                self._failed.pop(name, None)
            by = self._proven.get(name)
            if by is not None and is_same_launch(by, model):
                # What no engine notices is in effect already: who returns to the launch keeps that.
                self._proven[name] = model
            told = name in failed and name not in self._failed
            if told and by is not None and not is_same_launch(by, model):
                self._failed[name] = Failed(model=model, by=by, why="it failed before this server began")
            self._enter(model)

    def try_again(self, name: ModelName) -> bool:
        """Launch the definition as it is written, though it has failed; whether there was one that had."""
        written = self._written.named(name)
        if self._failed.pop(name, None) is None or written is None:
            return False
        self._tries.pop(name, None)
        self._enter(written)
        return True

    def failed(self, name: ModelName) -> Failed | None:
        """The definition that is written and not launched."""
        return self._failed.get(name)

    def proven(self, name: ModelName) -> Model | None:
        """What it has served by last."""
        return self._proven.get(name)

    def note_proven(self, spec: ShardSpec) -> Model | None:
        """A replica has served for long enough by what its model is launched by; that model where this is news."""
        launched = self.launched.get(spec.model.name)
        if launched is None or not defines(launched, spec):
            return None
        self._tries.pop(launched.name, None)
        known = self._proven.get(launched.name)
        self._proven[launched.name] = launched
        return None if known is not None and is_same_launch(known, launched) else launched

    def note_serving(self, spec: ShardSpec) -> Model | None:
        """A replica has begun to serve by an earlier definition: where nothing else has, that is what to return to."""
        launched = self.launched.get(spec.model.name)
        if launched is None or spec.model.name in self._proven or defines(launched, spec):
            return None
        self._proven[spec.model.name] = spec.model
        return spec.model

    def note_failure(self, spec: ShardSpec, why: str) -> Failed | None:
        """A replica of a definition that nothing has served by yet has failed; what comes of it where that was the last
        try."""
        name = spec.model.name
        written, proven = self._written.named(name), self._proven.get(name)
        if written is None or proven is None or name in self._failed:
            return None
        if defines(proven, spec) or not defines(written, spec):
            return None
        self._tries[name] = self._tries.get(name, 0) + 1
        if self._tries[name] < TRIES:
            return None
        failed = self._failed[name] = Failed(model=written, by=proven, why=why)
        self._enter(written)
        return failed

    def _enter(self, written: Model) -> None:
        failed = self._failed.get(written.name)
        self.launched[written.name] = written if failed is None else with_launch(written, failed.by)


def is_same_launch(one: Model, other: Model) -> bool:
    """Engines that were started by the one definition serve the other as well, whichever profile they are of."""
    return [launch_facts(one, each) for each in one.profiles] == [launch_facts(other, each) for each in other.profiles]


def defines(model: Model, spec: ShardSpec) -> bool:
    """This definition, too, would launch the shard as it runs."""
    facts = launch_facts(spec.model, spec.profile)
    return any(launch_facts(model, profile) == facts for profile in model.profiles)
