"""Faults as hypothesis draws them, and shrinks those that break something to the few that do."""

from __future__ import annotations

from hypothesis import strategies as st

from simulator import faults
from simulator.faults import Fault, Flaw, Mood, Scenario
from simulator.site import MODELS, node_name

NODES = 12
SECONDS = 1800


def _seconds(least: int, most: int) -> st.SearchStrategy[float]:
    return st.integers(least, most).map(float)


at = _seconds(0, SECONDS)
node = st.integers(0, NODES - 1).map(node_name)
nodes = st.lists(node, min_size=1, max_size=NODES, unique=True).map(sorted).map(tuple)
model = st.sampled_from([*MODELS])

fault: st.SearchStrategy[Fault] = st.one_of(
    st.builds(faults.LinkBroken, at=at, node=node),
    st.builds(faults.Partition, at=at, nodes=nodes, seconds=_seconds(1, 900)),
    st.builds(faults.SlowLink, at=at, node=node, seconds=_seconds(1, 300), delay=_seconds(1, 30)),
    st.builds(faults.NodeCrash, at=at, node=node, seconds=_seconds(1, 900)),
    st.builds(faults.AgentCrash, at=at, node=node, seconds=_seconds(1, 300)),
    st.builds(faults.EngineCrash, at=at, node=node, pick=st.integers(0, 3)),
    st.builds(faults.BadEngines, at=at, node=node, seconds=_seconds(1, SECONDS), mood=st.sampled_from(Mood)),
    st.builds(faults.DiskFull, at=at, node=node, seconds=_seconds(1, 900)),
    st.builds(
        faults.ForeignMemory, at=at, node=node, gpu=st.integers(0, 7), gb=_seconds(1, 80), seconds=_seconds(1, 900)
    ),
    st.builds(faults.FabricDown, at=at, node=node, seconds=_seconds(1, 900)),
    st.builds(faults.ClockSkew, at=at, node=node, skew=_seconds(-100_000, 100_000)),
    st.builds(faults.ServerRestart, at=at, seconds=_seconds(1, 120)),
    st.builds(faults.OriginDown, at=at, seconds=_seconds(1, 900)),
    st.builds(faults.SlowOrigin, at=at, seconds=_seconds(1, 900), times=_seconds(2, 50)),
    st.builds(faults.SpoiledWeights, at=at, node=node),
    st.builds(faults.AddModel, at=at, model=model),
    st.builds(faults.RemoveModel, at=at, model=model),
    st.builds(
        faults.EditModel,
        at=at,
        model=model,
        min=st.integers(0, 2),
        max=st.integers(2, 3),
        restart=st.booleans(),
        flaw=st.none() | st.sampled_from(Flaw),
    ),
    st.builds(faults.Rollback, at=at, model=model),
    st.builds(faults.Hold, at=at, model=model),
    st.builds(faults.LoadModel, at=at, model=model),
    st.builds(faults.Recall, at=at, model=model, pick=st.integers(0, 2)),
    st.builds(faults.DrainNode, at=at, node=node, deadline=st.none() | _seconds(1, 900)),
    st.builds(faults.Cordon, at=at, node=node, cordoned=st.booleans()),
    st.builds(faults.Label, at=at, node=node, key=st.just("zone"), value=st.sampled_from(("east", "west")) | st.none()),
    st.builds(faults.RemoveNode, at=at, node=node),
    st.builds(
        faults.Storm,
        at=at,
        model=model,
        requests=st.integers(1, 40),
        seconds=_seconds(1, 300),
        returns=st.integers(0, 5),
        patience=st.none() | _seconds(1, 30),
    ),
    st.builds(faults.Turns, at=at, models=st.just(("turn-a", "turn-b")), seconds=_seconds(60, SECONDS)),
)

scenario: st.SearchStrategy[Scenario] = st.builds(
    Scenario,
    seed=st.integers(0, 9),
    nodes=st.just(NODES),
    hours=st.just(SECONDS / 3600.0),
    beat_seconds=st.just(20.0),
    faults=st.lists(fault, max_size=12).map(lambda drawn: tuple(sorted(drawn, key=lambda each: each.at))),
)
