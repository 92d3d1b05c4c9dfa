"""The figures that count and their goals: ratios are taken within a round, and their median is the figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from harness.scenarios import Figures

# server -> scenario -> one entry a round; all servers have the same number of rounds.
Results = dict[str, dict[str, list[Figures]]]

CLUSTER = "llmgw-cluster"

# What is measured beside the scenarios, by its name there: the most that it may be, or the least.
MOST = {
    "1,000 agents with heartbeats: server CPU, % of a core": 10.0,
    "1,000 agents: server memory each, KiB": 64.0,
    "1,000 nodes x 8 GPUs, 200 models: one decision that finds a place, ms": 8.0,
    "1,000 nodes x 8 GPUs, 200 models: one decision that finds none, ms": 8.0,
    "1,000 nodes x 8 GPUs, 200 models: all planned anew, s": 2.0,
    "1,000 nodes x 8 GPUs, 200 models: the longest turn, ms": 10.0,
    "1,000 nodes x 8 GPUs, 200 models: from a freed GPU to the word to launch, ms": 1000.0,
    "64 MB for 1 agent: bytes from the origin, x": 1.1,
    "64 MB for 4 agents: bytes from the origin, x": 1.1,
    "64 MB for 8 agents: bytes from the origin, x": 1.1,
    # Two intervals of its reports.
    "2 GB fetched and hashed: the longest time between two reports of the node, s": 10.0,
}
LEAST = {"1 GB fetched over loopback: bytes/s, against curl, x": 0.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure with its goal. ``met`` is None where there is no goal, or no peer to compare with."""

    figure: str
    value: float | None
    unit: str
    goal: str
    met: bool | None


def values(results: Results, server: str, scenario: str, figure: str) -> list[float]:
    """Of the rounds that went without an error."""
    rounds = results.get(server, {}).get(scenario, [])
    return [float(entry[figure]) for entry in rounds if figure in entry and not entry["errors"]]


def middle(results: Results, server: str, scenario: str, figure: str) -> float | None:
    found = values(results, server, scenario, figure)
    return median(found) if found else None


def paired(
    results: Results, servers: tuple[str, str], scenario: str, figure: str, join: Callable[[float, float], float]
) -> float | None:
    """The median of what two servers' figures give, round by round: what slows a whole round cancels out."""
    ours, theirs = (results.get(server, {}).get(scenario, []) for server in servers)
    joined = [
        join(float(a[figure]), float(b[figure]))
        for a, b in zip(ours, theirs, strict=False)
        if figure in a and figure in b and not a["errors"] and not b["errors"] and b[figure]
    ]
    return median(joined) if joined else None


def ratio(a: float, b: float) -> float:
    return a / b


def difference(a: float, b: float) -> float:
    return a - b


def make_row(
    figure: str, value: float | None, unit: str, *, most: float | None = None, least: float | None = None
) -> Row:
    """Judged, where there is a value and a goal."""
    goal = f"<= {most:,g}" if most is not None else f">= {least:,g}" if least is not None else ""
    met = None
    if value is not None and goal:
        met = value <= most if most is not None else value >= (least or 0)
    return Row(figure=figure, value=value, unit=unit, goal=goal, met=met)


def judge(results: Results, extras: dict[str, float]) -> list[Row]:
    """llmgw's figures against their goals: the door's, the cluster's, and what else was measured."""
    rows = judge_door(results) if "llmgw" in results else []
    if CLUSTER in results:
        rows += judge_cluster(results)
    for named, value in extras.items():
        figure, _, unit = named.rpartition(", ")
        rows.append(make_row(figure, value, unit, most=MOST.get(named), least=LEAST.get(named)))
    return rows


def judge_door(results: Results) -> list[Row]:
    """The direct road, beside its peers; last what has no goal."""

    def against(peer: str, scenario: str, figure: str, join: Callable[[float, float], float] = ratio) -> float | None:
        return paired(results, ("llmgw", peer), scenario, figure, join)

    return [
        make_row(
            "requests/s at 32 connections, against vllm-router",
            against("vllm-router", "c32", "requests_per_s"),
            "x",
            least=1.5,
        ),
        make_row(
            "CPU per chunk at 512 x 20/s, against vllm-router",
            against("vllm-router", "s512", "cpu_us_per_chunk"),
            "x",
            most=1.2,
        ),
        make_row(
            "first byte at 1 connection, above nginx",
            against("nginx", "ttfb", "first_p50_ms", difference),
            "ms",
            most=0.2,
        ),
        make_row("memory per idle open stream", middle(results, "llmgw", "idle", "kib_per_stream"), "KiB", most=10),
        make_row(
            "chunks/s passed of 160,000 offered", middle(results, "llmgw", "sat", "chunks_per_s"), "/s", least=140_000
        ),
        make_row(
            "CPU per request at 32 connections, against nginx",
            against("nginx", "c32", "cpu_us_per_request"),
            "x",
            most=3.0,
        ),
        make_row(
            "CPU per chunk at 512 x 20/s, against nginx", against("nginx", "s512", "cpu_us_per_chunk"), "x", most=1.8
        ),
        make_row("growth with 32 slow readers", middle(results, "llmgw", "slow", "growth_mib"), "MiB", most=16),
        make_row(
            "CPU per request at 32 connections, against vllm-router",
            against("vllm-router", "c32", "cpu_us_per_request"),
            "x",
        ),
        make_row("requests/s at 32 connections, against nginx", against("nginx", "c32", "requests_per_s"), "x"),
        make_row(
            "requests/s at 256 connections, against vllm-router", against("vllm-router", "c256", "requests_per_s"), "x"
        ),
        make_row(
            "chunks/s passed, nothing between (the mock's own most)",
            middle(results, "mock", "sat", "chunks_per_s"),
            "/s",
        ),
    ]


def judge_cluster(results: Results) -> list[Row]:
    """The road through an agent, beside the direct one: what the server spends on it, and then its agent's."""

    def added(scenario: str, figure: str, join: Callable[[float, float], float] = ratio) -> float | None:
        return paired(results, (CLUSTER, "llmgw"), scenario, figure, join)

    def own(scenario: str, figure: str) -> float | None:
        return middle(results, CLUSTER, scenario, figure)

    return [
        make_row(
            "through an agent: server CPU per request at 32 connections, against the direct road",
            added("c32", "cpu_us_per_request"),
            "x",
            most=1.6,
        ),
        make_row(
            "through an agent: server CPU per chunk at 512 x 20/s, against the direct road",
            added("s512", "cpu_us_per_chunk"),
            "x",
            most=1.6,
        ),
        make_row(
            "through an agent: first byte at 1 connection, above the direct road",
            added("ttfb", "first_p50_ms", difference),
            "ms",
            most=0.3,
        ),
        make_row("through an agent: server memory per idle stream", own("idle", "kib_per_stream"), "KiB", most=10),
        make_row(
            "through an agent: agent memory per idle stream", own("idle", "beside_kib_per_stream"), "KiB", most=10
        ),
        make_row("through an agent: chunks/s passed of 160,000 offered", own("sat", "chunks_per_s"), "/s"),
        make_row("through an agent: growth with 32 slow readers", own("slow", "growth_mib"), "MiB"),
        make_row(
            "through an agent: agent CPU per request at 32 connections", own("c32", "beside_cpu_us_per_request"), "us"
        ),
        make_row("through an agent: agent CPU per chunk at 512 x 20/s", own("s512", "beside_cpu_us_per_chunk"), "us"),
    ]
