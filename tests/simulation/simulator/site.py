"""The nodes that there are, and the models that they are for: a small site with one of everything, or larger ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmgw.core.model import Model, ModelName, Profile, Scaling
from llmgw.core.node import NodeId

ENGINE = "pretend"

# How an argument begins that tells an engine what is wrong with it.
FLAW = "--flaw="
# The models whose definitions are in a file: what fails of them stays written there.
DECLARED = frozenset({"pair", "either", "sole", "turn-b"})

# What one card of a class has, in GB.
CARD_GB = {"h100-80g": 80.0, "a100-40g": 40.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a node is built from. ``gpus`` None: nobody looks for any there."""

    id: NodeId
    gpus: int | None
    gpu_class: str = ""
    memory_gb: float = 512.0
    fabric: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


def node_name(number: int) -> NodeId:
    """The name of the ``number``-th node, from 0 up."""
    return NodeId(f"n{number:02d}" if number < 100 else f"n{number}")


# Twelve nodes: two fabrics of large ones, small ones by themselves, and two without a GPU. Some models have but one
# seat among them.
_PATTERN = (
    (8, "h100-80g", "ib-a", "east"),
    (8, "h100-80g", "ib-a", "east"),
    (8, "h100-80g", "ib-a", "west"),
    (8, "h100-80g", "ib-b", "west"),
    (8, "h100-80g", "ib-b", "west"),
    (4, "a100-40g", None, "east"),
    (4, "a100-40g", None, "west"),
    (4, "a100-40g", None, "west", "sole"),
    (4, "a100-40g", "ib-c", "east"),
    (4, "a100-40g", "ib-c", "east"),
    (0, "", None, "east"),
    (None, "", None, "west", "turns"),
)


def site(nodes: int) -> tuple[Shape, ...]:
    """That many nodes; each dozen has fabrics of its own."""
    return tuple(_shape(number) for number in range(nodes))


def _shape(number: int) -> Shape:
    dozen, place = divmod(number, len(_PATTERN))
    gpus, gpu_class, fabric, zone, *seats = _PATTERN[place]
    return Shape(
        id=node_name(number),
        gpus=gpus,
        gpu_class=gpu_class,
        memory_gb=512.0 if gpus else 128.0,
        fabric=f"{fabric}{dozen or ''}" if fabric else None,
        labels={"zone": zone, "seat": seats[0]} if seats else {"zone": zone},
    )


# Those whose weights each node has to fetch.
FETCHED = frozenset({"single", "row", "east", "brief"})


def _model(name: str, least: int, most: int, *profiles: Profile, idle_seconds: float = 900.0) -> Model:
    scaling = Scaling(min=least, max=most, idle_timeout_seconds=idle_seconds)
    source = f"hf:org/{name}/{name}.fake" if name in FETCHED else f"/models/{name}.fake"
    return Model(name=ModelName(name), source=source, scaling=scaling, profiles=profiles)


# All of the one node that they may be on.
_SOLE = Profile(name="sole", engine=ENGINE, gpu_class="a100-40g", tp=4, labels={"seat": "sole"})
_IN_TURNS = Profile(name="turns", engine=ENGINE, min_memory_gb=100.0, labels={"seat": "turns"})

_ON_H100 = Profile(name="h100", engine=ENGINE, gpu_class="h100-80g", startup_timeout_seconds=300.0)

MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        _model("plain", 1, 3, Profile(name="cpu", engine=ENGINE, min_memory_gb=40.0)),
        _model("single", 2, 4, Profile(name="any", engine=ENGINE, gpu_class="any", gpu_memory_gb=30.0)),
        _model("pair", 2, 3, Profile(name="h100", engine=ENGINE, gpu_class="h100-80g", tp=2, min_memory_gb=64.0)),
        _model(
            "wide",
            1,
            1,
            Profile(name="two", engine=ENGINE, gpu_class="h100-80g", tp=8, pp=2, nodes=2, startup_timeout_seconds=900),
        ),
        _model("row", 0, 1, Profile(name="row", engine=ENGINE, gpu_class="a100-40g", tp=8, nodes=2)),
        _model(
            "either",
            1,
            2,
            Profile(name="big", engine=ENGINE, gpu_class="h100-80g", tp=4, priority=10),
            Profile(name="small", engine=ENGINE, gpu_class="a100-40g", tp=4, gpu_memory_gb=20.0),
        ),
        _model("east", 1, 2, Profile(name="east", engine=ENGINE, gpu_class="any", labels={"zone": "east"})),
        _model(
            "couple", 1, 2, Profile(name="a100", engine=ENGINE, gpu_class="a100-40g", tp=2, startup_timeout_seconds=180)
        ),
        _model("lazy", 0, 2, _ON_H100),
        _model("brief", 0, 1, _ON_H100, idle_seconds=60.0),
        _model("sole", 1, 1, _SOLE),
        _model("turn-a", 0, 1, _IN_TURNS),
        _model("turn-b", 0, 1, _IN_TURNS),
        _model("off", 0, 0, _ON_H100),
    )
}


def many_models(count: int) -> dict[str, Model]:
    """That many models with a GPU each, for figures of large fleets."""
    models = (_model(f"m{number:03d}", 1, 4, _ON_H100) for number in range(count))
    return {model.name: model for model in models}
