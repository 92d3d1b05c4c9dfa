"""How much disk and memory a model takes: each figure with where it comes from, and None where nobody can say.

Weights are as large as their files say. What an engine takes besides is an estimate, and is called one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from llmgw.core.attention import Layer, Layout

GB = 10**9
# 16 bits for each value of the cache, as engines do unless they are told otherwise.
VALUE_BYTES = 2
WIDTHS = (1, 2, 4, 8)
_ENCODER = "an encoder, which keeps nothing between tokens"
_RECURRENT = "its layers keep a state of one size for each request"


class Format(StrEnum):
    """What the weights are written in."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    PYTORCH = "pytorch"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Habits:
    """What engines that read a format usually do: tokens and requests that are worked on at once, and what one GPU
    takes for itself, and for talking to others."""

    batch: int
    requests: int
    fixed_bytes: int
    link_bytes: int


_HABITS = {
    Format.GGUF: _Habits(batch=512, requests=512, fixed_bytes=GB // 2, link_bytes=0),
    Format.SAFETENSORS: _Habits(batch=8192, requests=256, fixed_bytes=3 * GB // 2, link_bytes=GB // 2),
    Format.PYTORCH: _Habits(batch=8192, requests=256, fixed_bytes=3 * GB // 2, link_bytes=GB // 2),
}
# Of each token that is worked on, for each of the model's widths.
_ACTIVATION_BYTES = 30
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A figure and where it comes from, as words behind "from" or with "estimated: " before them."""

    value: int
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found out about a source. ``disk`` and ``weights`` are bytes; ``told_by`` says where ``layout`` stands,
    and ``mostly`` is the kind of number that most of the weights are. ``notes`` are for whoever reads it."""

    source: str
    format: Format | None = None
    files: int = 0
    mostly: str | None = None
    disk: Number | None = None
    weights: Number | None = None
    layout: Layout | None = None
    told_by: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGpu:
    """Bytes of each GPU where ``tp`` share the model. ``whole``: nothing of the sum is left out as unknown. ``why``:
    it can't be shared like that."""

    tp: int
    weights: int | None = None
    kv: int | None = None
    overhead: int | None = None
    total: int | None = None
    whole: bool = False
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All that a plan says of a model. Bytes; ``context`` counts tokens, those of one long request, for which ``kv`` is
    the cache, and ``context_most`` those that the model was made for. ``kv_token`` is what one more token takes while
    every layer keeps it. ``memory`` is what it takes of a machine without GPUs."""

    source: str
    format: Format | None
    architecture: str | None
    mostly: str | None
    files: int
    disk: Number | None
    weights: Number | None
    context_most: Number | None
    context: Number | None
    kv_token: Number | None
    kv: Number | None
    overhead: Number | None
    total: Number | None
    gpus: tuple[OnGpu, ...]
    notes: tuple[str, ...] = ()


def size_up(found: Found, *, context: int | None = None) -> Sizes:
    """What it comes to for a context of so many tokens, or for the longest that the model was made for."""
    layout = found.layout or Layout()
    most = Number(value=layout.context, origin=found.told_by) if layout.context is not None else None
    tokens = Number(value=context, origin="what was asked for") if context is not None else most
    per_token, kv = _find_kv(found, layout, tokens)
    overhead = _find_overhead(found, layout, 1)
    parts = (found.weights, kv, overhead)
    total = sum(part.value for part in parts if part is not None)
    whole = all(part is not None for part in parts)
    return Sizes(
        source=found.source,
        format=found.format,
        architecture=layout.architecture,
        mostly=found.mostly,
        files=found.files,
        disk=found.disk,
        weights=found.weights,
        context_most=most,
        context=tokens,
        kv_token=per_token,
        kv=kv,
        overhead=overhead,
        total=Number(value=total, origin="estimated: the sum of these") if whole else None,
        gpus=tuple(_share(found, layout, tokens, tp) for tp in WIDTHS),
        notes=(*found.notes, *_note(found, layout, tokens)),
    )


def _find_kv(found: Found, layout: Layout, tokens: Number | None) -> tuple[Number | None, Number | None]:
    if layout.layers is None:
        return None, None
    if not layout.layers:
        nothing = Number(value=0, origin=f"{found.told_by}: {_ENCODER if not layout.states else _RECURRENT}")
        return nothing, None if layout.states else nothing
    told = f"{found.told_by}, with 16 bits for each value"
    per_token = Number(value=VALUE_BYTES * sum(layer.values for layer in layout.layers), origin=told)
    if tokens is None:
        return per_token, None
    windows = [layer for layer in layout.layers if layer.window is not None]
    origin = f"estimated: {told}, and a batch beyond each window" if windows else told
    if layout.bounded:
        origin = f"estimated: {told}, at most: its windows are left out"
    return per_token, Number(value=_keep(found, layout.layers, tokens.value, 1), origin=origin)


def _keep(found: Found, layers: tuple[Layer, ...], tokens: int, tp: int) -> int:
    """Bytes of the cache on each of ``tp`` GPUs, for so many tokens."""
    batch = _habits(found).batch
    total = 0
    for layer in layers:
        kept = tokens if layer.window is None else min(tokens, layer.window + batch)
        # Heads are not cut: more GPUs than heads have copies.
        total += layer.values * -(-layer.heads // tp) // layer.heads * kept * VALUE_BYTES
    return total


def _find_overhead(found: Found, layout: Layout, tp: int) -> Number | None:
    if layout.hidden is None or layout.vocabulary is None:
        return None
    habits = _habits(found)
    work = habits.batch * layout.hidden * _ACTIVATION_BYTES + habits.requests * layout.vocabulary * _LOGIT_BYTES
    fixed = habits.fixed_bytes + (habits.link_bytes if tp > 1 else 0)
    return Number(
        value=work + fixed, origin=f"estimated: {habits.batch} tokens at once, and what an engine itself takes"
    )


def _share(found: Found, layout: Layout, tokens: Number | None, tp: int) -> OnGpu:
    if found.format is not Format.GGUF and layout.heads is not None and layout.heads % tp:
        return OnGpu(tp=tp, why=f"its {layout.heads} attention heads can't be shared by {tp}")
    weights = -(-found.weights.value // tp) if found.weights is not None else None
    kv = _keep(found, layout.layers, tokens.value, tp) if layout.layers and tokens is not None else None
    if layout.layers == () and not layout.states:
        kv = 0
    overhead = _find_overhead(found, layout, tp)
    parts = (weights, kv, overhead.value if overhead is not None else None)
    return OnGpu(
        tp=tp,
        weights=weights,
        kv=kv,
        overhead=parts[2],
        total=sum(part for part in parts if part is not None) if weights is not None else None,
        whole=None not in parts,
    )


def _note(found: Found, layout: Layout, tokens: Number | None) -> Iterator[str]:
    if layout.states:
        yield f"{layout.states} of its layers keep a state of one size for each request, which is not counted"
    if layout.bounded:
        yield "some of its layers keep the last tokens only, and it is not known which: the cache is smaller than that"
    if layout.context is not None and tokens is not None and tokens.value > layout.context:
        yield f"it was made for {layout.context} tokens: a context of {tokens.value} needs more than memory"
    if layout.layers is None and found.layout is not None:
        yield f"what its layers keep of each token does not follow from {found.told_by}: the KV cache is unknown"


def _habits(found: Found) -> _Habits:
    return _HABITS[found.format or Format.SAFETENSORS]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """What each of ``tp`` GPUs has to have free, in GB of 10^9 bytes."""

    tp: int
    memory_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a place is looked for with. ``format`` tells which engines can run it; ``memory_gb`` is of a machine that
    runs it without GPUs."""

    source: str
    format: Format | None = None
    gpu_class: str | None = None
    gpus: tuple[GpuNeed, ...] = ()
    memory_gb: float | None = None
    disk_gb: float | None = None


def find_needs(sizes: Sizes, *, gpu_class: str | None = None) -> Needs:
    """What a place for it has to have, as far as that is known."""
    known = {each.tp: each.total for each in sizes.gpus if each.total is not None}
    return Needs(
        source=sizes.source,
        format=sizes.format,
        gpu_class=gpu_class,
        gpus=tuple(GpuNeed(tp=tp, memory_gb=_round_up(total)) for tp, total in known.items()),
        memory_gb=_round_up(known[1]) if 1 in known else None,
        # What lies at a path is there already, or nowhere.
        disk_gb=_round_up(sizes.disk.value) if sizes.disk is not None and not sizes.source.startswith("/") else None,
    )


def _round_up(size_bytes: int) -> float:
    """To the megabyte, in GB: nobody reads more of it."""
    return -(-size_bytes // 10**6) / 1000
