"""``llmgw ctl engine-check``: whether a binary would take the flags that llmgw and a profile pass, before a launch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from llmgw.cli.ctl.address import find_address
from llmgw.cli.ctl.asking import drawn, server_options
from llmgw.cli.ctl.client import Operator, as_name
from llmgw.cli.ctl.drawing import Block, Grid, shown, write
from llmgw.cli.ctl.engines import troubles_of
from llmgw.errors import LlmgwError

WORKS, BREAKS = 0, 1
COLUMNS = ("FLAG", "GIVEN BY", "STATE", "DETAIL")
# As they stand in an answer.
BREAKING = {"renamed", "removed", "unknown", "wrong_value"}

Answer = dict[str, Any]


@click.command("engine-check")
@click.argument("engine")
@click.option("--bin", "binary", metavar="PATH", help="The binary, on this machine; no server is asked.")
@click.option("--profile", "file", metavar="FILE", help="A definition (.yaml), whose profiles of ENGINE are checked.")
@click.option("--node", metavar="NAME", help="What the agent of this node found when it tried its own binary.")
@click.option("--json", "as_json", is_flag=True, help="Write what was found as JSON.")
@server_options
def command(
    *,
    engine: str,
    binary: str | None,
    file: str | None,
    node: str | None,
    as_json: bool,
    server: str | None,
    config: Path | None,
) -> int:
    """Check the flags that ENGINE would get against those that its binary knows.

    With --bin the version and the help of the binary are read, in the environment of a launch; no model is loaded.
    STATE is ok, deprecated, renamed, removed, unknown, wrong value, or unchecked (the help does not tell). Exit status:
    0 a launch would work, 1 it would not or that is not known, 2 the command or the definition is wrong.

    \b
    llmgw ctl engine-check vllm --bin /opt/vllm/bin/vllm --profile qwen.yaml
    llmgw ctl engine-check vllm --node gpu01
    """
    if (binary is None) == (node is None):
        raise click.UsageError("give one of --bin PATH (a binary here) and --node NAME (what the agent there found)")
    if node is not None and file is not None:
        raise click.UsageError("--profile goes with --bin: what a node found, it found without one")
    if node is None and (server is not None or config is not None):
        raise click.UsageError("--server and --config go with --node: with --bin no server is asked")
    if node is not None:
        operator, node = Operator(find_address(server, config, environ=os.environ)), as_name(node)
        answer = drawn(operator, operator.ask("GET", "/engines"), lambda told: find_on_node(told, engine, node))
    else:
        from llmgw.cli.ctl.binaries import check_binary

        answer = check_binary(engine, binary or "", file)
    if as_json:
        print(json.dumps(answer, ensure_ascii=False), flush=True)
    else:
        write(draw(answer))
    return WORKS if answer["works"] else BREAKS


def find_on_node(told: Answer, engine: str, node: str) -> Answer:
    """What the server knows of a node's binary. LlmgwError where it knows nothing."""
    there = next((each for each in told["nodes"] if each["node"] == node), None)
    if there is None:
        names = ", ".join(shown(each["node"]) for each in told["nodes"]) or "none"
        raise LlmgwError(f"there is no node {node}; there is {names}")
    found = next((each for each in there.get("engines") or () if each["engine"] == engine), None)
    if found is None:
        raise LlmgwError(_why_absent(told, there, engine))
    if not found["checked"]:
        raise LlmgwError(f"{node} has not tried {' '.join(found['program'])} yet: ask again in a few seconds")
    broken, problems, starts = found.get("broken"), found["problems"], found["starts"]
    remedy = None
    if starts and broken is not None:
        # What does not fit is told once, and apart from what to do about it, as it is of a binary here.
        first = next((problem for problem in problems if broken.startswith(f"{problem}; ")), None)
        if first is not None:
            remedy = broken.removeprefix(f"{first}; ")
        else:
            problems = [broken, *(problem for problem in problems if problem not in broken)]
    answer = {
        "engine": engine,
        "node": node,
        "node_state": there["state"],
        "program": found["program"],
        "version": found.get("version"),
        "works": broken is None and found.get("version") is not None,
        "fails": broken is not None,
        "starts": starts,
        "broken": None if starts else broken,
        "remedy": remedy,
        "missing_libraries": found["missing_libraries"],
        "problems": problems,
        "flags": found.get("flags", []),
        "flags_ok": found.get("flags_ok", 0),
    }
    return {key: value for key, value in answer.items() if value is not None}


def _why_absent(told: Answer, there: Answer, engine: str) -> str:
    node, plugins = shown(there["node"]), [shown(plugin["name"]) for plugin in told["plugins"]]
    if there.get("engines") is None:
        return f"{node} is {shown(there['state'])} and has not said yet what it has: ask again when it is ready"
    if engine not in plugins:
        reasons = [shown(each["reason"]) for each in told["left_out"] if each["plugin"] == f"engine {engine}"]
        words = f"no engine {engine!r} is installed at the server; there is {', '.join(plugins) or 'none'}"
        return "\n".join((words, *reasons))
    return (
        f"{node} has no binary for {engine}: install it there where PATH finds it, or set engines.{engine}.bin in its "
        "agent.yaml"
    )


def draw(answer: Answer) -> list[Block]:
    blocks: list[Block] = [_head(answer)]
    state = answer.get("node_state", "ready")
    if state != "ready":
        blocks.append(f"{shown(answer['node'])} is {shown(state)}: this is what it said last")
    for check in answer.get("checks", (answer,)):
        blocks += _draw_check(check)
    skipped = [
        f"skipped: profile {shown(each['profile'])} of {shown(each['model'])} is for {shown(each['engine'])}"
        for each in answer.get("skipped", ())
    ]
    if skipped:
        blocks += ["", *skipped]
    return [*blocks, "", _verdict(answer)]


def _head(answer: Answer) -> str:
    version = f" {shown(answer['version'])}" if "version" in answer else ""
    node = f" on {shown(answer['node'])}" if "node" in answer else ""
    return f"{shown(answer['engine'])}{version} at {shown(' '.join(answer['program']))}{node}"


def _draw_check(check: Answer) -> Iterator[Block]:
    flags = check.get("flags", ())
    rows = [(flag["flag"], flag["given_by"], flag["state"].replace("_", " "), flag.get("detail", "")) for flag in flags]
    # Those that break it have their line in the table.
    broken_by = [f"{flag['flag']}: " for flag in flags if flag["state"] in BREAKING]
    others = [problem for problem in check["problems"] if not any(flag in problem for flag in broken_by)]
    troubles = list(troubles_of({**check, "problems": others}, "it can't start"))
    if remedy := check.get("remedy"):
        troubles.append(f"what to do: {shown(remedy)}")
    if "profile" in check:
        yield from ("", f"profile {shown(check['profile'])} of {shown(check['model'])} ({shown(check['where'])}):")
    if rows:
        yield from ("", Grid(columns=COLUMNS, rows=tuple(tuple(map(shown, row)) for row in rows)))
    if fine := check.get("flags_ok"):
        yield from ("", _count_fine(fine, "other flag" if rows else "flag"))
    if troubles:
        yield from ("", *troubles)


def _verdict(answer: Answer) -> str:
    there = f" on {shown(answer['node'])}" if "node" in answer else ""
    if not answer["starts"]:
        return f"a launch{there} would fail: the binary can't start, whatever its flags"
    flags = [flag for check in answer.get("checks", (answer,)) for flag in check["flags"]]
    if answer["fails"]:
        over = _names(flags, BREAKING)
        return f"a launch{there} would fail over {over}" if over else f"a launch{there} would fail: see above"
    if not answer["works"]:
        return f"it is not known whether a launch{there} would work: the binary has not said which release it is"
    if flags and not answer.get("flags_ok") and all(flag["state"] == "unchecked" for flag in flags):
        return "nothing is known against a launch, but no flag could be checked"
    old = _names(flags, {"deprecated"})
    return f"a launch{there} would work" + (f"; a later release may not take {old}" if old else "")


def _count_fine(number: int, thing: str) -> str:
    return f"{number} {thing} is ok" if number == 1 else f"{number} {thing}s are ok"


def _names(flags: list[Answer], states: set[str]) -> str:
    return ", ".join(dict.fromkeys(shown(flag["flag"]) for flag in flags if flag["state"] in states))
