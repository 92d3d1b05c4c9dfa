"""What launches have shown of the memory and the time that a profile takes: measured figures, in place of guesses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b

from llmgw.core.model import ANY_CLASS, Model, Profile, launch_facts
from llmgw.core.replica import Measured

# What an engine takes of a card that its profile says nothing of.
USUAL_SHARE = 0.9
# Of a model that was never seen to load.
USUAL_LOAD_SECONDS = 5.0
# The last launch counts for as much as all before it: weights may come to lie nearer, or the disk grow slower.
NEWEST_SHARE = 0.5
# There is no end of definitions that were tried once.
KEPT = 2000


class Kind(StrEnum):
    """Where a number comes from: from a definition, from an earlier launch, or from what is usual."""

    DECLARED = "declared"
    MEASURED = "measured"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True, kw_only=True)
class FactKey:
    """What a figure holds for: a launch of the same weights with the same flags (``flags`` is a digest of all that its
    engine was told), by the same version of the engine, on GPUs of the same class ("" on none)."""

    source: str
    engine: str
    version: str
    flags: str
    gpu_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What was seen of such launches: the usual seconds from start to ready, and the most memory that one has held, in
    GB of 10^9 bytes: of one GPU, and of the machine on each node."""

    key: FactKey
    load_seconds: float | None = None
    gpu_gb: float | None = None
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that placement goes by, and where it comes from."""

    name: str
    value: float
    unit: str
    kind: Kind
    profile: str


class Learned:
    """The facts, the newest last."""

    __slots__ = ("_by_launch", "_facts", "_noted", "_order")

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._facts: dict[FactKey, Fact] = {}
        # the same again, for who asks about one launch: each plan does
        self._by_launch: dict[tuple[str, str, str], dict[FactKey, Fact]] = {}
        self._order: dict[FactKey, int] = {}
        self._noted = 0
        for fact in facts:
            self._keep(fact)

    def __iter__(self) -> Iterator[Fact]:
        return iter(self._facts.values())

    def note(self, model: Model, profile: Profile, gpu_class: str, measured: Measured, *, loaded: bool) -> Fact | None:
        """Take in what a launch has shown; the fact as it is now, None where that is no news. ``loaded``: its
        ``load_seconds`` are of a load that has not been told of before."""
        key = make_key(model, profile, measured.version or "", gpu_class)
        known = self._facts.get(key, Fact(key=key))
        seconds = known.load_seconds
        if loaded and measured.load_seconds is not None:
            seconds = _mix(known.load_seconds, measured.load_seconds)
        fact = replace(
            known,
            load_seconds=seconds,
            gpu_gb=_most(known.gpu_gb, measured.gpu_gb),
            memory_gb=_most(known.memory_gb, measured.memory_gb),
        )
        if fact == known:
            return None
        self._keep(fact)
        return fact

    def load_seconds(self, model: Model) -> float | None:
        """How long this model usually takes from start to ready, by whichever of its profiles was launched last."""
        known = [
            (self._order[fact.key], fact.load_seconds)
            for profile in model.profiles
            for fact in self._by_launch.get(_key_of(model, profile), {}).values()
            if fact.load_seconds is not None
        ]
        return max(known)[1] if known else None

    def fill(self, model: Model, versions: Callable[[str], Collection[str]]) -> Model:
        """The model with measured figures where nobody has written any; those of engines that are still there, as
        ``versions`` of an engine says."""
        if not self._facts:
            return model
        profiles = tuple(self._fill(model, profile, versions) for profile in model.profiles)
        return model if profiles == model.profiles else replace(model, profiles=profiles)

    def figures(self, model: Model, versions: Callable[[str], Collection[str]]) -> tuple[Figure, ...]:
        """What placement goes by for each profile, with what it has for an estimate."""
        found: list[Figure] = []
        for written, filled in zip(model.profiles, self.fill(model, versions).profiles, strict=True):
            found += _tell(written, filled)
        seconds = self.load_seconds(model)
        kind = Kind.ESTIMATED if seconds is None else Kind.MEASURED
        shown = USUAL_LOAD_SECONDS if seconds is None else seconds
        return (*found, Figure(name="load", value=shown, unit="s", kind=kind, profile=""))

    def _fill(self, model: Model, profile: Profile, versions: Callable[[str], Collection[str]]) -> Profile:
        asks_gpu = profile.gpus > 0 and profile.gpu_memory_gb is None and profile.gpu_class not in (None, ANY_CLASS)
        if not asks_gpu and profile.min_memory_gb is not None:
            return profile
        # (None: of any class)
        named = profile.gpu_class or ("" if not profile.gpus else None)
        named = None if named == ANY_CLASS else named
        gpu_gb: float | None = None
        memory_gb: float | None = None
        current = None
        for fact in self._by_launch.get(_key_of(model, profile), {}).values():
            if named is not None and fact.key.gpu_class != named:
                continue
            current = versions(profile.engine) if current is None else current
            if fact.key.version in current:
                gpu_gb, memory_gb = _most(gpu_gb, fact.gpu_gb), _most(memory_gb, fact.memory_gb)
        if asks_gpu and gpu_gb is not None:
            profile = replace(profile, gpu_memory_gb=gpu_gb)
        if profile.min_memory_gb is None and memory_gb is not None:
            profile = replace(profile, min_memory_gb=memory_gb)
        return profile

    def _keep(self, fact: Fact) -> None:
        self._drop(fact.key)
        self._noted += 1
        self._facts[fact.key], self._order[fact.key] = fact, self._noted
        self._by_launch.setdefault(_short(fact.key), {})[fact.key] = fact
        if len(self._facts) > KEPT:
            self._drop(next(iter(self._facts)))

    def _drop(self, key: FactKey) -> None:
        if self._facts.pop(key, None) is not None:
            short = _short(key)
            del self._order[key]
            del self._by_launch[short][key]
            if not self._by_launch[short]:
                del self._by_launch[short]


def make_key(model: Model, profile: Profile, version: str, gpu_class: str) -> FactKey:
    """Under what a launch's figures are kept."""
    source, engine, flags = _key_of(model, profile)
    return FactKey(source=source, engine=engine, version=version, flags=flags, gpu_class=gpu_class)


def _short(key: FactKey) -> tuple[str, str, str]:
    return key.source, key.engine, key.flags


@lru_cache(maxsize=4096)
def _key_of(model: Model, profile: Profile) -> tuple[str, str, str]:
    # (what is in env may be secret, and so is what it hashes to in a short digest of known words)
    facts = launch_facts(model, replace(profile, env={}, name="", gpu_memory_gb=None, gpu_class=None))[1:]
    shape = (profile.gpus, sorted(profile.env))
    digest = blake2b(repr((facts, shape)).encode(errors="surrogatepass"), digest_size=12).hexdigest()
    return model.source, profile.engine, digest


def _mix(known: float | None, seen: float) -> float:
    return seen if known is None else known + NEWEST_SHARE * (seen - known)


def _most(known: float | None, seen: float | None) -> float | None:
    if known is None or seen is None:
        return seen if known is None else known
    return max(known, seen)


def _tell(written: Profile, filled: Profile) -> Iterator[Figure]:
    if written.gpus:
        if written.gpu_memory_gb is not None:
            kind, value, unit = Kind.DECLARED, written.gpu_memory_gb, "GB"
        elif filled.gpu_memory_gb is not None:
            kind, value, unit = Kind.MEASURED, filled.gpu_memory_gb, "GB"
        else:
            kind, value, unit = Kind.ESTIMATED, 100 * USUAL_SHARE, "%"
        yield Figure(name="gpu_memory", value=value, unit=unit, kind=kind, profile=written.name)
    if filled.min_memory_gb is not None:
        kind = Kind.MEASURED if written.min_memory_gb is None else Kind.DECLARED
        yield Figure(name="memory", value=filled.min_memory_gb, unit="GB", kind=kind, profile=written.name)
