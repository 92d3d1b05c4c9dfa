"""Draws what goes wrong in a long run: one seed, one schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from llmgw.core.model import ModelName
from simulator.faults import (
    Act,
    AddModel,
    AgentCrash,
    BadEngines,
    ClockSkew,
    Cordon,
    DiskFull,
    DrainNode,
    EditModel,
    EngineCrash,
    FabricDown,
    Fault,
    Flaw,
    ForeignMemory,
    Hold,
    Label,
    LinkBroken,
    LoadModel,
    Mood,
    NodeCrash,
    OriginDown,
    Partition,
    Recall,
    RemoveModel,
    RemoveNode,
    Rollback,
    Scenario,
    ServerRestart,
    SlowLink,
    SlowOrigin,
    SpoiledWeights,
    Storm,
    Turns,
)
from simulator.site import MODELS, node_name

# How many of all that goes wrong happen to a node within an hour, in bursts: what is mended half is the harder case.
PER_NODE_HOUR = 3.0
BURST_SHARE = 0.5
BURST_SECONDS = 20.0
# What an operator has just set going is often where a process is killed: in the middle of a step, or of the next.
AIMED_SHARE = 0.3
AIMED_SECONDS = (0.3, 3.0, 30.0)
# Agents report less often than they do: in a long run nothing else happens most of the time.
BEAT_SECONDS = 20.0
# What clients ask for, the one that is never there now and then.
_ASKED = [*(name for name, model in MODELS.items() for _ in range(8 if model.scaling.max else 1))]


def draw_scenario(seed: int, *, nodes: int, hours: float, per_node_hour: float = PER_NODE_HOUR) -> Scenario:
    """What a seed stands for."""
    rng = Random(f"{seed}:faults")
    names = tuple(node_name(number) for number in range(nodes))
    faults: list[Fault] = []
    at = 0.0
    apart_seconds = 3600.0 / (per_node_hour * nodes * (1.0 - BURST_SHARE))
    while True:
        in_burst = rng.random() < BURST_SHARE
        aimed = bool(faults) and isinstance(faults[-1], Act) and rng.random() < AIMED_SHARE
        mean_seconds = rng.choice(AIMED_SECONDS) if aimed else BURST_SECONDS if in_burst else apart_seconds
        at += rng.expovariate(1.0 / mean_seconds)
        if at >= hours * 3600.0:
            return Scenario(seed=seed, nodes=nodes, hours=hours, beat_seconds=BEAT_SECONDS, faults=tuple(faults))
        if aimed:
            faults.append(rng.choice(_KILLS)(rng, round(at, 3), names))
            continue
        draw = rng.choices([draw for draw, _ in _KINDS], weights=[weight for _, weight in _KINDS])[0]
        # What went wrong last goes wrong once more, in another way.
        last = getattr(faults[-1], "node", None) if in_burst and faults and rng.random() < 0.6 else None
        faults.append(draw(rng, round(at, 1), names if last is None else (last,)))


def _seconds(rng: Random, least: float, most: float) -> float:
    """As likely short as long."""
    return float(round(least * (most / least) ** rng.random(), 1))


def _partition(rng: Random, at: float, names: Sequence[str]) -> Fault:
    return Partition(at=at, nodes=(rng.choice(names),), seconds=_seconds(rng, 2.0, 900.0))


def _mass_partition(rng: Random, at: float, names: Sequence[str]) -> Fault:
    share = rng.randint(2, len(names)) if len(names) > 1 else 1
    return Partition(at=at, nodes=tuple(sorted(rng.sample(names, share))), seconds=_seconds(rng, 10.0, 1500.0))


def _foreign(rng: Random, at: float, names: Sequence[str]) -> Fault:
    gb = float(rng.choice((1, 6, 15, 70)))
    return ForeignMemory(at=at, node=rng.choice(names), gpu=rng.randrange(8), gb=gb, seconds=_seconds(rng, 60, 7200))


def _edit(rng: Random, at: float, names: Sequence[str]) -> Fault:
    # Now and then more than there is room for.
    least = rng.choice((0, 0, 1, 1, 2, 4))
    most = max(least, rng.choice((0, 1, 2, 4)))
    flaw = rng.choice([*Flaw]) if rng.random() < 0.2 else None
    return EditModel(
        at=at,
        model=rng.choice([*MODELS]),
        min=least,
        max=most,
        restart=flaw is not None or rng.random() < 0.5,
        flaw=flaw,
    )


def _restart(rng: Random, at: float, names: Sequence[str]) -> Fault:
    """As many as before, started otherwise."""
    model = MODELS[ModelName(rng.choice([*MODELS]))]
    scaling = model.scaling
    flaw = rng.choice([*Flaw]) if rng.random() < 0.3 else None
    return EditModel(at=at, model=model.name, min=scaling.min, max=scaling.max, restart=True, flaw=flaw)


def _drain(rng: Random, at: float, names: Sequence[str]) -> Fault:
    deadline = None if rng.random() < 0.5 else _seconds(rng, 1.0, 1800.0)
    return DrainNode(at=at, node=rng.choice(names), deadline=deadline)


def _turns(rng: Random, at: float, names: Sequence[str]) -> Fault:
    models = ("turn-a", "turn-b") if rng.random() < 0.7 else tuple(rng.sample([*MODELS], 2))
    return Turns(at=at, models=models, seconds=_seconds(rng, 60.0, 3600.0), apart=_seconds(rng, 0.1, 60.0))


def _model(
    kind: type[AddModel | RemoveModel | Rollback | Hold | LoadModel],
) -> Callable[[Random, float, Sequence[str]], Fault]:
    return lambda rng, at, names: kind(at=at, model=rng.choice([*MODELS]))


def _lasting(
    kind: type[NodeCrash | AgentCrash | DiskFull | FabricDown], least: float, most: float
) -> Callable[[Random, float, Sequence[str]], Fault]:
    return lambda rng, at, names: kind(at=at, node=rng.choice(names), seconds=_seconds(rng, least, most))


def _label(rng: Random, at: float, names: Sequence[str]) -> Fault:
    return Label(at=at, node=rng.choice(names), key="zone", value=rng.choice(("east", "west", None)))


def _storm(rng: Random, at: float, names: Sequence[str]) -> Fault:
    patience = _seconds(rng, 0.5, 60.0) if rng.random() < 0.4 else None
    return Storm(
        at=at,
        model=rng.choice(_ASKED),
        requests=round(_seconds(rng, 1, 400)),
        seconds=_seconds(rng, 1.0, 600.0),
        returns=rng.choice((0, 1, 5)),
        patience=patience,
    )


def _bad_engines(rng: Random, at: float, names: Sequence[str]) -> Fault:
    return BadEngines(at=at, node=rng.choice(names), seconds=_seconds(rng, 60, 3600), mood=rng.choice([*Mood]))


# kill -9 of the server, of agents, of engines, and of all that is on a node.
_KILLS: tuple[Callable[[Random, float, Sequence[str]], Fault], ...] = (
    lambda rng, at, names: ServerRestart(at=at, seconds=_seconds(rng, 0.1, 20.0)),
    _lasting(AgentCrash, 0.1, 60.0),
    lambda rng, at, names: EngineCrash(at=at, node=rng.choice(names), pick=rng.randrange(8)),
    _lasting(NodeCrash, 1.0, 300.0),
)

_KINDS: tuple[tuple[Callable[[Random, float, Sequence[str]], Fault], float], ...] = (
    (lambda rng, at, names: LinkBroken(at=at, node=rng.choice(names)), 8),
    (_partition, 8),
    (_mass_partition, 0.5),
    (
        lambda rng, at, names: SlowLink(
            at=at, node=rng.choice(names), seconds=_seconds(rng, 10, 900), delay=_seconds(rng, 0.1, 30)
        ),
        4,
    ),
    (_lasting(NodeCrash, 5.0, 3600.0), 5),
    (_lasting(AgentCrash, 1.0, 600.0), 6),
    (lambda rng, at, names: EngineCrash(at=at, node=rng.choice(names), pick=rng.randrange(8)), 8),
    (_bad_engines, 5),
    (_lasting(DiskFull, 30.0, 3600.0), 2),
    (_lasting(FabricDown, 30.0, 3600.0), 2),
    (_foreign, 4),
    (lambda rng, at, names: ClockSkew(at=at, node=rng.choice(names), skew=round(rng.uniform(-9e4, 9e4), 1)), 1),
    (lambda rng, at, names: ServerRestart(at=at, seconds=_seconds(rng, 0.2, 300.0)), 1),
    (lambda rng, at, names: OriginDown(at=at, seconds=_seconds(rng, 5.0, 1200.0)), 1),
    (lambda rng, at, names: SlowOrigin(at=at, seconds=_seconds(rng, 30, 1800), times=_seconds(rng, 2.0, 30.0)), 1),
    (lambda rng, at, names: SpoiledWeights(at=at, node=rng.choice(names)), 2),
    (_model(AddModel), 6),
    (_model(RemoveModel), 1),
    (_edit, 2),
    (_restart, 4),
    (_model(Rollback), 1),
    (_model(Hold), 1),
    (_model(LoadModel), 6),
    (lambda rng, at, names: Recall(at=at, model=rng.choice([*MODELS]), pick=rng.randrange(4)), 2),
    (lambda rng, at, names: Cordon(at=at, node=rng.choice(names), cordoned=rng.random() < 0.2), 8),
    (_drain, 2),
    (_label, 2),
    (lambda rng, at, names: RemoveNode(at=at, node=rng.choice(names)), 1),
    (_storm, 12),
    (_turns, 6),
)
