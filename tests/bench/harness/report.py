"""What the figures say: medians of the rounds in tables, ratios within a round, goals met or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

from harness.scenarios import SCENARIOS, Figures

# server -> scenario -> one entry a round; all servers have the same number of rounds.
Results = dict[str, dict[str, list[Figures]]]
Column = tuple[str, str, str, str]

TABLES: tuple[tuple[str, tuple[Column, ...]], ...] = (
    (
        "Whole replies",
        tuple(
            column
            for name, head in (("c1", "c=1"), ("c32", "c=32"), ("c256", "c=256"))
            for column in (
                (name, "requests_per_s", f"{head} req/s", ",.0f"),
                (name, "reply_p50_ms", "p50 ms", ".2f"),
                (name, "reply_p99_ms", "p99 ms", ".2f"),
                (name, "cpu_us_per_request", "CPU us/req", ".1f"),
            )
        ),
    ),
    (
        "Streams",
        tuple(
            column
            for name in ("s64", "s512", "sat")
            for column in (
                (name, "chunks_per_s", f"{name} chunks/s", ",.0f"),
                (name, "cpu_us_per_chunk", "CPU us/chunk", ".1f"),
                (name, "chunk_p50_ms", "chunk p50 ms", ".2f"),
                (name, "chunk_p99_ms", "p99 ms", ".2f"),
            )
        ),
    ),
    (
        "First byte and memory",
        (
            ("ttfb", "first_p50_ms", "c=1 first byte p50 ms", ".3f"),
            ("ttfb", "first_p99_ms", "p99 ms", ".3f"),
            ("s64", "first_p50_ms", "s64 first byte p50 ms", ".2f"),
            ("s512", "first_p50_ms", "s512 first byte p50 ms", ".2f"),
            ("idle", "rss_before_kib", "RSS before KiB", ",.0f"),
            ("idle", "kib_per_stream", "KiB per idle stream", ".1f"),
            ("slow", "growth_mib", "slow readers: growth MiB", ".1f"),
        ),
    ),
)


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


def render_tables(results: Results) -> str:
    parts = []
    for title, columns in TABLES:
        lines = [f"### {title}", "| server | " + " | ".join(head for _, _, head, _ in columns) + " |"]
        lines.append("|---|" + "---:|" * len(columns))
        for server in results:
            cells = []
            for scenario, figure, _, form in columns:
                value = middle(results, server, scenario, figure)
                cells.append("-" if value is None else format(value, form))
            lines.append(f"| {server} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def judge(results: Results, extras: dict[str, float]) -> list[Row]:
    """llmgw's figures against their goals, then those that have none."""

    def row(
        figure: str, value: float | None, unit: str, *, most: float | None = None, least: float | None = None
    ) -> Row:
        goal = f"<= {most:,g}" if most is not None else f">= {least:,g}" if least is not None else ""
        met = None
        if value is not None and goal:
            met = value <= most if most is not None else value >= (least or 0)
        return Row(figure=figure, value=value, unit=unit, goal=goal, met=met)

    def against(peer: str, scenario: str, figure: str, join: Callable[[float, float], float] = ratio) -> float | None:
        return paired(results, ("llmgw", peer), scenario, figure, join)

    rows = [
        row(
            "requests/s at 32 connections, against vllm-router",
            against("vllm-router", "c32", "requests_per_s"),
            "x",
            least=1.5,
        ),
        row(
            "CPU per chunk at 512 x 20/s, against vllm-router",
            against("vllm-router", "s512", "cpu_us_per_chunk"),
            "x",
            most=1.2,
        ),
        row(
            "first byte at 1 connection, above nginx",
            against("nginx", "ttfb", "first_p50_ms", difference),
            "ms",
            most=0.2,
        ),
        row("memory per idle open stream", middle(results, "llmgw", "idle", "kib_per_stream"), "KiB", most=10),
        row("chunks/s passed of 160,000 offered", middle(results, "llmgw", "sat", "chunks_per_s"), "/s", least=140_000),
        row(
            "CPU per request at 32 connections, against nginx",
            against("nginx", "c32", "cpu_us_per_request"),
            "x",
            most=3.0,
        ),
        row("CPU per chunk at 512 x 20/s, against nginx", against("nginx", "s512", "cpu_us_per_chunk"), "x", most=1.8),
        row("growth with 32 slow readers", middle(results, "llmgw", "slow", "growth_mib"), "MiB", most=16),
        row(
            "CPU per request at 32 connections, against vllm-router",
            against("vllm-router", "c32", "cpu_us_per_request"),
            "x",
        ),
        row("requests/s at 32 connections, against nginx", against("nginx", "c32", "requests_per_s"), "x"),
        row(
            "requests/s at 256 connections, against vllm-router", against("vllm-router", "c256", "requests_per_s"), "x"
        ),
        row(
            "chunks/s passed, nothing between (the mock's own most)",
            middle(results, "mock", "sat", "chunks_per_s"),
            "/s",
        ),
    ]
    for named, value in extras.items():
        figure, _, unit = named.rpartition(", ")
        rows.append(row(figure, value, unit))
    return rows


def render_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def render_rows(rows: list[Row]) -> str:
    lines = ["| figure | value | goal | |", "|---|---:|---:|---|"]
    for row in rows:
        value = "not measured" if row.value is None else f"{render_number(row.value)} {row.unit}"
        verdict = {None: "", True: "met", False: "NOT MET"}[row.met]
        lines.append(f"| {row.figure} | {value} | {row.goal} | {verdict} |")
    return "\n".join(lines)


def find_errors(results: Results) -> list[str]:
    titles = {scenario.name: scenario.title for scenario in SCENARIOS}
    return [
        f"{server}, {titles[scenario]}: {entry['errors']} errors, the first: {entry['first_error']}"
        for server, scenarios in results.items()
        for scenario, rounds in scenarios.items()
        for entry in rounds
        if entry["errors"]
    ]


def as_json(results: Results, rows: list[Row], machine: dict[str, object]) -> dict[str, object]:
    return {"machine": machine, "figures": [asdict(row) for row in rows], "results": results}
