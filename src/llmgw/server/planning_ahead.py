"""Where a model would fit that nobody has written a definition of, by what it takes alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmgw.admin.views import PlanFit, PlanPlace, PlanView
from llmgw.core.filters import Need, describe, find_cards, find_reasons
from llmgw.core.hosts import Host
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import NodeId
from llmgw.core.picture import FleetStatistics
from llmgw.core.rejection import Reason, Rejection
from llmgw.core.sizing import Format, Needs
from llmgw.engines import EngineInfo, SourceKind
from llmgw.engines.registry import Engine
from llmgw.server.explaining import see_hosts

# No model has it: what is kept for others stays kept.
_NOBODY = ModelName("")
_SUFFIXES = {Format.GGUF: ".gguf"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """What one engine comes to on one node."""

    need: Need
    host: Host
    reasons: tuple[Reason, ...]


def find_engines(format: Format | None, engines: Mapping[str, Engine]) -> dict[str, EngineInfo]:
    """Those that read such weights; all where nobody knows what they are."""
    return {name: engine.info for name, engine in engines.items() if format is None or _reads(engine.info, format)}


def _reads(info: EngineInfo, format: Format) -> bool:
    suffix = _SUFFIXES.get(format)
    return suffix in info.file_suffixes if suffix is not None else SourceKind.REPOSITORY in info.sources


def plan_ahead(
    needs: Needs,
    engines: Mapping[str, EngineInfo],
    fleet: FleetStatistics,
    now: float,
    *,
    away: Collection[NodeId] = (),
    held_up: str | None = None,
) -> PlanView:
    """Each way to run it with the nodes where that would work, and what speaks against the others. A way that no node
    has the GPUs for is left out, unless its class was asked for."""
    hosts = sorted(see_hosts(fleet, _NOBODY, now), key=lambda host: host.id)
    return PlanView(
        engines=tuple(sorted(engines)),
        places=tuple(_find_places(needs, engines, hosts, now)) if engines else (),
        unseen=tuple(sorted(away)),
        held_up=held_up,
    )


def _find_places(
    needs: Needs, engines: Mapping[str, EngineInfo], hosts: Sequence[Host], now: float
) -> Iterator[PlanPlace]:
    classes = {name for host in hosts for name in host.totals} if needs.gpu_class is None else {needs.gpu_class}
    for gpu_class in sorted(classes):
        most = max((host.totals.get(gpu_class, 0) for host in hosts), default=0)
        for each in needs.gpus:
            able = [name for name, info in engines.items() if each.tp == 1 or info.tensor_parallel]
            if able and (each.tp <= most or (each.tp == 1 and needs.gpu_class is not None)):
                profiles = [
                    Profile(
                        name=name,
                        engine=name,
                        gpu_class=gpu_class,
                        tp=each.tp,
                        gpu_memory_gb=each.memory_gb,
                        min_disk_gb=needs.disk_gb,
                    )
                    for name in sorted(able)
                ]
                having = [host for host in hosts if gpu_class in host.totals] if needs.gpu_class is None else hosts
                yield _find_place(needs, profiles, having, now)
    able = [name for name, info in engines.items() if info.cpu]
    if able and needs.gpu_class is None and needs.memory_gb is not None:
        profiles = [
            Profile(name=name, engine=name, min_memory_gb=needs.memory_gb, min_disk_gb=needs.disk_gb)
            for name in sorted(able)
        ]
        yield _find_place(needs, profiles, hosts, now)


def _find_place(needs: Needs, profiles: Sequence[Profile], hosts: Sequence[Host], now: float) -> PlanPlace:
    model = Model(name=_NOBODY, source=needs.source, profiles=tuple(profiles))
    asked = [Need(model=model, profile=profile, backing_off={}, now=now) for profile in profiles]
    fits: list[PlanFit] = []
    others: list[Rejection] = []
    for host in hosts:
        # Of several engines the one that comes closest.
        best = min((_judge(need, host) for need in asked), key=lambda verdict: len(verdict.reasons))
        if best.reasons:
            others += _reject(best, profiles)
        else:
            fits.append(_fit(best))
    first = profiles[0]
    memory_gb = first.gpu_memory_gb if first.gpu_memory_gb is not None else first.min_memory_gb
    return PlanPlace(
        tp=first.tp,
        memory_gb=memory_gb or 0.0,
        gpu_class=first.gpu_class,
        fits=tuple(fits),
        others=tuple(others),
    )


def _judge(need: Need, host: Host) -> _Verdict:
    return _Verdict(need=need, host=host, reasons=find_reasons(need, host))


def _fit(verdict: _Verdict) -> PlanFit:
    cards = find_cards(verdict.need, verdict.host) if verdict.need.gpus else []
    return PlanFit(
        node=verdict.host.id,
        engine=verdict.need.profile.engine,
        gpus=sum(bits.bit_count() for _, bits in cards) if cards else None,
    )


def _reject(verdict: _Verdict, profiles: Sequence[Profile]) -> Iterator[Rejection]:
    for reason in verdict.reasons:
        detail = describe(reason, verdict.need, verdict.host)
        if reason is Reason.NO_ENGINE and len(profiles) > 1:
            detail = f"no binary of {' or '.join(profile.engine for profile in profiles)} was found there"
        profile = verdict.need.profile.name
        yield Rejection(node=verdict.host.id, profile=profile, reason=reason, detail=detail)
