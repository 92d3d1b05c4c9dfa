"""What a shard needs before its launch: looked up, taken, and for one of several waited for by all of them."""

from __future__ import annotations

import logging
from dataclasses import replace

from llmgw.agent.booked import check_rendezvous, find_fabric, find_gpus
from llmgw.agent.held import Held, Tools
from llmgw.core.model import Model
from llmgw.core.replica import ShardSpec, ShardState
from llmgw.engines.check import check_launch, launch_of
from llmgw.engines.registry import Engine
from llmgw.engines.types import Launch, Version
from llmgw.errors import EngineFailed
from llmgw.host.executable import advise_write
from llmgw.host.ports import HOST

log = logging.getLogger(__name__)


async def prepare(held: Held) -> Launch:
    """All that the launch needs, and for one of several the word that the others have it too.

    Raises EngineFailed with what is missing or does not fit.
    """
    held.telling.state(ShardState.PREPARING)
    launch = await _look_up(held, await _check(held))
    _check_flags(held, launch)
    if held.spec.count > 1 and not held.spec.go:
        held.telling.state(ShardState.PREPARED)
        held.telling.progress(f"waits until the other shards of {held.spec.replica} are prepared")
        await held.go.wait()
        held.spec = replace(held.spec, go=True)
        # That may have taken an hour, and what was seen before it is to hold now.
        launch = await _look_up(held, launch)
    return launch


async def _check(held: Held) -> Launch:
    """What of the launch holds for as long as its program and its definition are the same."""
    spec, engine, tools, hands = held.spec, held.engine(), held.tools, held.tools.hands
    await hands.run(hands.check_sources, spec.model, engine)
    # Before the weights: nobody is to wait an hour for them and hear then that the program can't run.
    program, version = await _try_program(held, engine)
    model = await _obtain_weights(held, engine)
    if model != spec.model:
        # It may have been replaced in that hour.
        program, version = await _try_program(held, engine)
    return replace(
        launch_of(model, spec.profile, program, version),
        host=HOST,
        port=0,
        rank=spec.rank,
        count=spec.count,
        rendezvous=spec.rendezvous,
        threads=await hands.run(hands.choose_threads),
        cache=await hands.run(_make_cache, tools),
    )


async def _try_program(held: Held, engine: Engine) -> tuple[tuple[str, ...], Version | None]:
    """What is run, and its version, once it was seen that it can run, and this profile fits it."""
    spec, tools, hands = held.spec, held.tools, held.tools.hands
    program = await hands.run(hands.find_program, engine, tools.settings.binaries)
    if await tools.programs.find(engine, program) is None:
        held.telling.progress(f"{program[0]} is being checked")
    tried = await tools.programs.check(engine, program)
    held.telling.progress(None)
    # The profile's own environment may say where the libraries are: then it is tried, and its exit tells.
    if tried.broken is not None and not (spec.profile.env and tried.missing_libraries):
        raise EngineFailed(f"{program[0]} can't run {engine.info.title}: {tried.broken}", remedy=tried.remedy)
    _validate(spec, engine, tried.version)
    return program, tried.version


async def _obtain_weights(held: Held, engine: Engine) -> Model:
    """The model with paths for sources, wherever they are fetched; one after the other."""

    async def obtain(source: str) -> str:
        return await held.tools.weights.obtain(source, engine, held.telling.fetch, by=held.spec.id)

    model = held.spec.model
    return replace(
        model,
        source=await obtain(model.source),
        mmproj=None if model.mmproj is None else await obtain(model.mmproj),
        loras=tuple([replace(lora, source=await obtain(lora.source)) for lora in model.loras]),
    )


async def _look_up(held: Held, launch: Launch) -> Launch:
    """The launch on the GPUs, the fabric and the ports that are the shard's, as they are at this moment."""
    spec, tools = held.spec, held.tools
    # After the check of the program, which may take minutes: what is seen here is to hold at the launch.
    await tools.taken.take(spec, held.telling.progress)
    fabric = await find_fabric(spec, tools)
    held.gpus = await find_gpus(spec, tools)
    check_rendezvous(spec, tools)
    held.take_port()
    return replace(launch, fabric=fabric, gpus=None if held.gpus is None else tuple(gpu.index for gpu in held.gpus))


def _check_flags(held: Held, launch: Launch) -> None:
    for finding in check_launch(held.engine(), launch):
        if finding.breaks:
            # Not refused: an engine may take flags that its help does not list.
            detail = finding.detail or finding.state.replace("_", " ")
            giver = f"profile {held.spec.profile.name}" if finding.given_by == "profile" else finding.given_by
            log.warning("shard %s: %s passes %s: %s", held.spec.id, giver, finding.flag, held.telling.hide(detail))


def _validate(spec: ShardSpec, engine: Engine, version: Version | None) -> None:
    """The server has looked at the profile already, without knowing which release runs here."""
    problems = engine.validate(spec.model, spec.profile, version)
    if problems:
        number = f" {version.number}" if version is not None else ""
        said = "; ".join(map(str, problems))
        raise EngineFailed(f"profile {spec.profile.name} does not fit {engine.info.title}{number} on this node: {said}")


def _make_cache(tools: Tools) -> str:
    try:
        return str(tools.state.make_cache())
    except OSError as error:
        text = f"the cache folder {tools.state.cache} can't be made: {error.strerror or error}"
        raise EngineFailed(text, remedy=advise_write(error, str(tools.state.cache))) from error
