"""What the figures say, in print: medians of the rounds in tables, and one line for each figure with a goal."""

from __future__ import annotations

from dataclasses import asdict

from harness.goals import Results, Row, middle
from harness.scenarios import SCENARIOS

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
