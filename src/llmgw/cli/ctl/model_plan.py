"""``llmgw ctl model plan``: how much disk and memory a model takes, and where it would fit now."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgw.cli.ctl.address import find_address
from llmgw.cli.ctl.asking import drawn, server_options
from llmgw.cli.ctl.client import Operator, ToldNo
from llmgw.cli.ctl.drawing import Block, Grid, shown, write
from llmgw.errors import LlmgwError, UsageError

if TYPE_CHECKING:
    from llmgw.core.sizing import Number, OnGpu, Sizes

GB = 10**9
UNKNOWN = "unknown"
_AND_MORE = f" and {UNKNOWN}s"
# Of the nodes in a line, and of the reasons against others.
FEW, MANY = 4, 20
MOST_CONTEXT = 10**9


@click.command("plan")
@click.argument("source")
@click.option("--gpu-class", metavar="CLASS", help="Look among the GPUs of this class only, as h100-80g.")
@click.option("--context", type=click.IntRange(1, MOST_CONTEXT), metavar="N", help="Tokens to keep in the KV cache.")
@click.option("--json", "as_json", is_flag=True, help="Write what was found as JSON.")
@server_options
def command(
    *, source: str, gpu_class: str | None, context: int | None, as_json: bool, server: str | None, config: Path | None
) -> None:
    """Say how much disk and memory SOURCE takes, and where it would fit now.

    SOURCE is hf:org/repo/file, a URL, a repository org/repo, or a path of this machine that begins with / or . or ~.
    Only the beginning of a file is read. HF_TOKEN and HF_ENDPOINT of the environment are used. Sizes are in GB of 10^9
    bytes; an estimate says that it is one. The KV cache is that of one request of N tokens, or of the longest that the
    model was made for. Without a server the sizes are shown all the same.

    \b
    llmgw ctl model plan hf:bartowski/Qwen2.5-7B-Instruct-GGUF/Qwen2.5-7B-Instruct-Q4_K_M.gguf
    llmgw ctl model plan Qwen/Qwen2.5-72B-Instruct --gpu-class h100-80g --context 32768
    """
    import trio

    from llmgw.cli.ctl.looking_into import look_into
    from llmgw.core.sizing import find_needs, size_up

    _check_class(gpu_class)
    operator = Operator(find_address(server, config, environ=os.environ))
    sizes = size_up(_tell_remedy(lambda: trio.run(look_into, source)), context=context)
    answer, silence = None, None
    needs = find_needs(sizes, gpu_class=gpu_class)
    if "://" in source:
        # (with all of its address, which is not shown)
        needs = replace(needs, source=source)
    if needs.gpus or needs.memory_gb is not None:
        try:
            answer = operator.ask("POST", "/plan", _body(needs))
        except UsageError:
            raise
        except ToldNo as refused:
            silence = f"the server does not say where it would fit: {refused.message}"
        except LlmgwError as error:
            silence = f"no server could be asked where it would fit: {error.message}"
    blocks = draw_sizes(sizes)
    places = None
    if answer is not None:
        unsure = {each.tp for each in sizes.gpus if _has_unknowns(each)}
        blocks += drawn(operator, answer, partial(draw_places, unsure=unsure))
        places = json.loads(answer)
    elif silence is not None:
        blocks += ["", silence]
    if as_json:
        _write_json(sizes, places, silence)
    else:
        write(blocks)


def _check_class(name: str | None) -> None:
    """UsageError where no GPU can be of it: the server would be blamed for that."""
    from llmgw.config.profiles import wrong_class  # brings YAML along, which --help can do without

    if name is not None and (why := wrong_class(name)) is not None:
        raise UsageError(f"--gpu-class: {why}")


def _tell_remedy(look: Any) -> Any:
    """With what to do about it behind what went wrong."""
    from llmgw.errors import EngineFailed

    try:
        return look()
    except EngineFailed as failed:
        raise LlmgwError(f"{failed.message}; {failed.remedy}" if failed.remedy else failed.message) from None


def _body(needs: Any) -> dict[str, object]:
    facts = {
        "source": needs.source,
        "format": needs.format,
        "gpu_class": needs.gpu_class,
        "gpus": [{"tp": each.tp, "memory_gb": each.memory_gb} for each in needs.gpus],
        "memory_gb": needs.memory_gb,
        "disk_gb": needs.disk_gb,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _write_json(sizes: Sizes, places: Any, silence: str | None) -> None:
    from llmgw.admin.views import encode

    facts = {"sizes": sizes, "places": places, "not_asked": silence}
    print(encode(facts).decode(), flush=True)


# Sizes


def draw_sizes(sizes: Sizes) -> list[Block]:
    """What it takes, and of each of several GPUs."""
    kind = f", mostly {sizes.mostly}" if sizes.mostly else ""
    files = "1 file" if sizes.files == 1 else f"{sizes.files} files"
    blocks: list[Block] = [f"{shown(sizes.source)}: {sizes.architecture or 'a model'}{shown(kind)}, {files}", ""]
    parts = (("disk", sizes.disk), ("weights", sizes.weights), (_name_cache(sizes), sizes.kv))
    rest = (("the engine's own", sizes.overhead), ("memory in all", sizes.total))
    rows = tuple((name, _number(part), part.origin if part is not None else "-") for name, part in (*parts, *rest))
    blocks += [Grid(columns=("WHAT", "GB", "FROM"), rows=rows), ""]
    blocks += [_tell_context(sizes), *sizes.notes, "", "on each of TP GPUs that share it, in GB (estimated):"]
    columns = ("TP", "WEIGHTS", "KV", "OWN", "IN ALL")
    blocks.append(Grid(columns=columns, rows=tuple(map(_share, sizes.gpus))))
    return [*blocks, *(f"not with TP {each.tp}: {each.why}" for each in sizes.gpus if each.why is not None)]


def _name_cache(sizes: Sizes) -> str:
    return f"KV cache, {sizes.context.value} tokens" if sizes.context is not None else "KV cache"


def _tell_context(sizes: Sizes) -> str:
    most = f"{sizes.context_most.value} tokens" if sizes.context_most is not None else UNKNOWN
    each = f"{sizes.kv_token.value} bytes, from {sizes.kv_token.origin}" if sizes.kv_token is not None else UNKNOWN
    return f"longest context: {most}; KV cache for each token: {each}"


def _share(each: OnGpu) -> tuple[str, ...]:
    if each.why is not None:
        return (str(each.tp), "-", "-", "-", "-")
    total = _gb(each.total) + (_AND_MORE if _has_unknowns(each) else "")
    return (str(each.tp), _gb(each.weights), _gb(each.kv), _gb(each.overhead), total)


def _has_unknowns(each: OnGpu) -> bool:
    return each.total is not None and not each.whole


def _number(number: Number | None) -> str:
    return _gb(number.value if number is not None else None)


def _gb(size_bytes: int | None) -> str:
    if size_bytes is None:
        return UNKNOWN
    size = size_bytes / GB
    if 0 < size < 0.001:
        return "<0.001"
    return f"{size:.3f}" if size < 10 else f"{size:.1f}"


# Places


def draw_places(answer: Any, *, unsure: Collection[int] = ()) -> list[Block]:
    """Where it would fit now, by class, and what speaks against other nodes. ``unsure``: with so many GPUs each takes
    more than is known."""
    if not answer["engines"]:
        return ["", "no engine of the server reads such weights: llmgw ctl engines"]
    blocks: list[Block] = ["", f"where it would fit now, by {', '.join(map(shown, answer['engines']))}:"]
    if held_up := answer.get("held_up"):
        blocks.append(shown(held_up))
    rows = tuple(
        (
            shown(place.get("gpu_class") or "(no GPU)"),
            str(place["tp"]) if place.get("gpu_class") else "-",
            f"{place['memory_gb']:.3f}{_AND_MORE if place['tp'] in unsure else ''}",
            str(len(place["fits"])),
            _name_nodes(place["fits"]),
        )
        for place in answer["places"]
    )
    if rows:
        blocks.append(Grid(columns=("CLASS", "TP", "NEEDS GB", "NODES", "WHICH"), rows=rows))
    else:
        blocks.append("nowhere: there is no node with a GPU, and no engine that runs it without one")
    against = list(_list_against(answer["places"]))
    if against:
        more = [f"and {len(against) - MANY} more reasons: --json has all"] if len(against) > MANY else []
        columns = ("NODE", "CLASS", "TP", "VERDICT", "DETAIL")
        blocks += ["", Grid(columns=columns, rows=tuple(against[:MANY])), *more]
    if unseen := answer.get("unseen"):
        more_unseen = f" and {len(unseen) - FEW} more" if len(unseen) > FEW else ""
        names = ", ".join(map(shown, unseen[:FEW]))
        blocks += ["", f"not known: {names}{more_unseen} (not here since the server started)"]
    return blocks


def _name_nodes(fits: list[Any]) -> str:
    named = [f"{fit['node']} ({fit['gpus']} GPUs)" if fit.get("gpus") else fit["node"] for fit in fits[:FEW]]
    more = f" and {len(fits) - FEW} more" if len(fits) > FEW else ""
    return ", ".join(map(shown, named)) + more if named else "-"


def _list_against(places: list[Any]) -> Iterator[tuple[str, ...]]:
    """What speaks against a node, once: more GPUs that share it find no fewer reasons."""
    told: set[tuple[str, str | None, str]] = set()
    for place in places:
        for each in place["others"]:
            seen = (each["node"], place.get("gpu_class"), each["reason"])
            if seen not in told:
                told.add(seen)
                tp = str(place["tp"]) if place.get("gpu_class") else "-"
                yield (shown(each["node"]), shown(seen[1]), tp, shown(each["reason"]), shown(each["detail"]))
