"""How explanations of placement are drawn: what became of each node, the winner, and what would make a place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmgw.cli.ctl.drawing import UNKNOWN, Block, Grid, shown
from llmgw.cli.ctl.figures import ago

# More nodes than this are told by their verdict, unless all are asked for.
MANY = 30
# Of those with one verdict.
FEW = 3
# What is measured, by its name.
FIGURES = {"gpu_memory": "memory of each GPU", "memory": "memory", "load": "time to load"}
# What a score is made of, by its key without "_seconds".
PARTS = {
    "fetch": "to fetch the weights",
    "failures": "for tries that failed there",
    "crowding": "for replicas of the same model there",
    "whole_nodes": "for a whole node broken into",
    "straddling": "for GPUs that NVLink does not join",
    "gpu_nodes": "for a node with GPUs that it does not need",
}


def draw_explanation(answer: Any, *, whole: bool) -> list[Block]:
    """One model: where it is, what one more replica would come to, each verdict, and what was decided before."""
    explanation = answer["explanation"]
    is_full = _is_full(answer)
    blocks: list[Block] = [*_now(answer), "", *([_tell_full(answer)] if is_full else _outcome(explanation))]
    if answer.get("unfilled") and not is_full:
        blocks.append("by the measured figures there is no place: they are left out, for nothing of it serves")
    if (evicts := answer.get("evicts")) and not is_full:
        blocks.append(shown(evicts))
    if numbers := answer.get("numbers"):
        blocks += ["", _numbers(numbers)]
    nodes = {node for candidate in explanation["candidates"] for node in candidate["nodes"]}
    if nodes:
        grid = _count_verdicts if len(nodes) > MANY and not whole else _list_verdicts
        blocks += ["", grid(explanation)]
    if answer["decisions"]:
        blocks += ["", "decided before:", _decisions(answer["decisions"], with_model=False)]
    return blocks


def draw_decisions(answer: Any) -> list[Block]:
    """The last about all models."""
    return [_decisions(answer["decisions"], with_model=True)]


def _now(answer: Any) -> Iterator[Block]:
    name, wanted, most = shown(answer["explanation"]["model"]), answer["wanted"], answer["most"]
    written = " as it is written" if answer["what_if"] else ""
    yield f"{name}{written}: {wanted} {'replica' if wanted == 1 else 'replicas'} wanted, {most} at most"
    if (missing := answer.get("missing", 0)) > 1:
        yield f"  {answer['places']} of the {missing} that it lacks find a place, one after the other"
    for replica in answer["replicas"]:
        nodes = [shard["node"] for shard in replica["shards"]] or [replica["node"]]
        state = "failed" if replica["state"] == "ended" else replica["state"]
        where = f"{_named(nodes)} by profile {shown(replica['profile'])}"
        fate = ", and would stop first" if replica["replica"] in answer["stops"] else ""
        yield f"  {shown(replica['replica'])} is {shown(state)} on {where}{fate}"
    if held_up := answer.get("held_up"):
        yield f"  {shown(held_up)}"


def _is_full(answer: Any) -> bool:
    """It has as many replicas as there may be, so that one more is nothing that can happen."""
    if answer["what_if"]:
        return False
    return len(_name_staying(answer)) >= int(answer["most"])


def _name_staying(answer: Any) -> set[str]:
    return {
        replica["replica"]
        for replica in answer["replicas"]
        if replica["state"] not in ("ended", "stopping") and not replica.get("draining")
    }


def _tell_full(answer: Any) -> str:
    if not answer["most"]:
        return "it is not to run: its scaling.max is 0"
    return f"it has as many replicas as there may be: its scaling.max is {answer['most']}"


def _outcome(explanation: Any) -> Iterator[Block]:
    placement = explanation.get("placement")
    if placement is None:
        yield "one more finds no place"
        if unlock := explanation.get("unlock"):
            yield f"the smallest change that would make one: {shown(unlock['text'])}"
        elif not explanation["candidates"]:
            yield "it has no profile to run it by"
        return
    shards = placement["shards"]
    nodes, gpus = [shard["node"] for shard in shards], [shard.get("gpus") for shard in shards]
    profile = placement["profile"]["name"]
    yield f"one more would go to {_place(nodes, gpus, placement.get('fabric'), profile)}: {_score(placement['score'])}"
    if second := explanation.get("runner_up"):
        place = _place(second["nodes"], second["gpus"], second.get("fabric"), second["profile"])
        yield f"the second best is {place}: {_score(second['score'])}"


def _place(nodes: Sequence[str], gpus: Sequence[Any], fabric: str | None, profile: str) -> str:
    count = sum(len(each) for each in gpus if each)
    cards = f", {count} {'GPU' if count == 1 else 'GPUs'}" if count else ""
    over = f" over {shown(fabric)}" if fabric is not None else ""
    return f"{_named(nodes)}{over} by profile {shown(profile)}{cards}"


def _score(score: Any) -> str:
    parts = [f"{score[f'{key}_seconds']:.0f} s {words}" for key, words in PARTS.items() if score.get(f"{key}_seconds")]
    return f"{score['seconds']:.0f} s" + (f" ({', '.join(parts)})" if parts else "")


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(shown(node) for node in nodes)


def _numbers(numbers: Sequence[Any]) -> Grid:
    """What it went by, and where each of these comes from: the definition, an earlier launch, or what is usual."""
    rows = tuple(
        (
            shown(FIGURES.get(each["name"], each["name"])),
            shown(each["profile"] or None),
            f"{each['value']:.4g} {shown(each['unit'])}",
            shown(each["kind"]),
        )
        for each in numbers
    )
    return Grid(columns=("NUMBER", "PROFILE", "VALUE", "IS"), rows=rows)


# Verdicts


def _list_verdicts(explanation: Any) -> Grid:
    """A line for each reason against each node, and for each place that would do."""
    columns: tuple[str, ...] = ("PROFILE", "NODE", "FABRIC", "VERDICT", "DETAIL")
    rows: list[tuple[str, ...]] = [
        (shown(candidate["profile"]), _named(nodes), shown(candidate.get("fabric")), verdict, detail)
        for candidate in explanation["candidates"]
        for nodes, verdict, detail in _verdicts(candidate, explanation)
    ]
    if not any(candidate.get("fabric") for candidate in explanation["candidates"]):
        columns, rows = (*columns[:2], *columns[3:]), [(*row[:2], *row[3:]) for row in rows]
    return Grid(columns=columns, rows=tuple(rows))


def _count_verdicts(explanation: Any) -> Grid:
    """A line for each verdict, by the first reason against a node, with the first few of those nodes."""
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for candidate in explanation["candidates"]:
        seen: set[str] = set()
        for nodes, verdict, detail in _verdicts(candidate, explanation):
            group = groups.setdefault((candidate["profile"], verdict), {})
            group |= {node: detail for node in nodes if node not in seen and node not in group}
            seen |= set(nodes)
    rows = []
    for (profile, verdict), found in groups.items():
        if found:
            more = f" and {len(found) - FEW} more" if len(found) > FEW else ""
            which, detail = _named(list(found)[:FEW]) + more, next(iter(found.values()))
            rows.append((shown(profile), verdict, str(len(found)), which, detail))
    return Grid(columns=("PROFILE", "VERDICT", "NODES", "WHICH", "DETAIL OF THE FIRST"), rows=tuple(rows))


def _verdicts(candidate: Any, explanation: Any) -> Iterator[tuple[Sequence[str], str, str]]:
    """Nodes, verdict and detail: of nodes that would do together one, else all that speaks against each."""
    if not candidate["rejections"]:
        score = candidate.get("score")
        yield candidate["nodes"], _standing(candidate, explanation), UNKNOWN if score is None else _score(score)
        return
    for rejection in candidate["rejections"]:
        yield [rejection["node"]], shown(rejection["reason"]), shown(rejection["detail"])


def _standing(candidate: Any, explanation: Any) -> str:
    """What became of a place that would do."""
    placement, second = explanation.get("placement"), explanation.get("runner_up")
    if placement is not None and (candidate["profile"], candidate["nodes"]) == (
        placement["profile"]["name"],
        [shard["node"] for shard in placement["shards"]],
    ):
        return "chosen"
    if second is not None and (candidate["profile"], candidate["nodes"]) == (second["profile"], second["nodes"]):
        return "second"
    return "fits"


# Decisions


def _decisions(decisions: Sequence[Any], *, with_model: bool) -> Grid:
    columns = ("WHEN", "MODEL", "REPLICA", "WHERE", "WHY")
    rows = tuple(
        (
            ago(each["seconds_ago"]),
            shown(each["model"]),
            shown(each.get("replica")),
            _where(each),
            shown(each["why"]),
        )
        for each in decisions
    )
    if with_model:
        return Grid(columns=columns, rows=rows)
    return Grid(columns=(columns[0], *columns[2:]), rows=tuple((row[0], *row[2:]) for row in rows))


def _where(decision: Any) -> str:
    if decision.get("replica") is None:
        return "no place"
    by = f" by {shown(decision['profile'])}" if decision.get("profile") else ""
    return f"{_named(decision['nodes'])}{by}"
