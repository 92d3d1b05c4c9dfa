from __future__ import annotations

import time
from typing import Any

import pytest

DETAIL: dict[str, Any] = {
    "model": {"name": "m", "status": "waiting", "serving": False, "ready": 0, "wanted": 1, "detail": "n1: no GPU"},
    "definition": {
        "name": "m",
        "source": "/m.gguf",
        "task": "chat",
        "mmproj": "/mmproj.gguf",
        "loras": [{"name": "sql", "source": "/sql"}, {"name": "law", "source": "/law"}],
        "aliases": ["a", "b"],
        "context_length": 8192,
        "prices": {"prompt": 0.15, "completion": 2.0},
        "scaling": {"min": 1, "max": 2, "idle_timeout_seconds": 900.0, "target": 8},
        "profiles": [
            {
                "name": "tp2",
                "engine": "e",
                "priority": 100,
                "gpu_class": "h100",
                "tp": 2,
                "pp": 3,
                "nodes": 2,
                "labels": {"zone": "a", "rack": "7"},
                "gpu_memory_gb": 70.5,
                "min_memory_gb": 8.0,
                "min_disk_gb": 100.0,
                "tool_parser": "hermes",
                "reasoning_parser": "qwen3",
                "args": ["-x", "1"],
            },
            {"name": "cpu", "engine": "e", "priority": 0, "tp": 1, "pp": 1, "args": []},
        ],
    },
    "replicas": [],
    "rejections": [{"node": "n1", "profile": "tp2", "reason": "no_gpu", "detail": "no GPU"}],
    "more_rejections": 0,
    "text": "name: m\n# why\n",
    "added_at": 1_700_000_000.0,
}


def test_a_model_is_shown_whole(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/models/m", DETAIL)
    added = time.strftime("%Y-%m-%d %H:%M", time.localtime(1_700_000_000))
    assert ctl("model", "show", "m").out == (
        "m: waiting, 0/1 replicas ready\n"
        "status    n1: no GPU\n"
        "aliases   a, b\n"
        f"kept      stored, added {added}\n"
        "task      chat\n"
        "source    /m.gguf\n"
        "mmproj    /mmproj.gguf\n"
        "loras     sql, law\n"
        "context   8192\n"
        "prices    prompt 0.15, completion 2 per million tokens\n"
        "scaling   min 1, max 2, target 8, idle 15m\n"
        "\n"
        "PROFILE  ENGINE  PRIORITY  CLASS  TP  PP  NODES  NEEDS                          LABELS         PARSERS"
        "       ARGS\n"
        "tp2      e       100       h100   2   3   2      gpu:70.5GB,mem:8GB,disk:100GB  zone=a,rack=7  hermes,qwen3"
        "  -x 1\n"
        "cpu      e       0         -      1   1   -      -                              -              -\n"
        "\n"
        "NODE  PROFILE  REASON  DETAIL\n"
        "n1    tp2      no_gpu  no GPU\n"
        "\n"
        "as it was added:\n"
        "  name: m\n"
        "  # why\n"
    )


def test_a_declared_one_says_where(port: Any, ctl: Any) -> None:
    declared = {name: value for name, value in DETAIL.items() if name not in {"text", "added_at"}}
    declared["model"] = {**DETAIL["model"], "where": "server.yaml:4:3"}
    port.will_answer("GET", "/models/m", declared)
    said = ctl("model", "show", "m").out
    assert "kept      declared at server.yaml:4:3\n" in said
    assert "as it was added" not in said


SECRET = "sigSECRET'987"
ADDRESS = f"https://h.example/a/m.gguf?Signature={SECRET}"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (f"source: {ADDRESS}", "source: https://h.example/a/m.gguf?…"),
        (f'source: "{ADDRESS}"  # ours', 'source: "https://h.example/a/m.gguf?…"  # ours'),
        (f"{{source: '{ADDRESS}', name: m}}", "{source: 'https://h.example/a/m.gguf?…', name: m}"),
        (f"# was {ADDRESS}\nsource: /m.gguf", "# was https://h.example/a/m.gguf?…\nsource: /m.gguf"),
        (f'source: "https:\\/\\/h/m.gguf\\x3fs={SECRET}"', 'source: "https:\\/\\/h/m.gguf\\x3f…"'),
        (f'source: "https://h/\\\n  m.gguf?a\\\n  {SECRET}"', 'source: "https://h/\\\n  m.gguf?…"'),
        (f"source: HTTPS://h/m.gguf#{SECRET}", "source: HTTPS://h/m.gguf#…"),
    ],
)
def test_what_opens_an_address_is_not_shown(port: Any, ctl: Any, written: str, shown: str) -> None:
    definition = {**DETAIL["definition"], "source": ADDRESS, "mmproj": ADDRESS}
    port.will_answer("GET", "/models/m", {**DETAIL, "definition": definition, "text": f"{written}\n"})
    said = ctl("model", "show", "m").out
    assert "\nsource    https://h.example/a/m.gguf\nmmproj    https://h.example/a/m.gguf\n" in said
    assert SECRET not in said
    lines = "".join(f"  {line}\n" for line in shown.splitlines())
    assert said.endswith(f"as it was added, but for what opens its addresses:\n{lines}")


def test_a_pattern_of_the_hub_is_shown_whole(port: Any, ctl: Any) -> None:
    definition = {**DETAIL["definition"], "source": "hf:org/repo/x-?.gguf"}
    port.will_answer("GET", "/models/m", {**DETAIL, "definition": definition, "text": "source: hf:org/repo/x-?.gguf\n"})
    said = ctl("model", "show", "m").out
    assert "\nsource    hf:org/repo/x-?.gguf\n" in said
    assert said.endswith("as it was added:\n  source: hf:org/repo/x-?.gguf\n")


def test_a_rollout_is_told_beside_what_else_holds_it_up(port: Any, ctl: Any) -> None:
    rolling = "rolling: rep-m-1 runs by the earlier definition"
    model = {**DETAIL["model"], "rolling": rolling}
    port.will_answer("GET", "/models/m", {**DETAIL, "model": model})
    port.will_answer("GET", "/models/n", {**DETAIL, "model": {**model, "detail": rolling}})
    assert ctl("model", "show", "m").out.splitlines()[1:3] == ["status    n1: no GPU", f"rollout   {rolling}"]
    assert ctl("model", "show", "n").out.splitlines()[1:3] == [f"status    {rolling}", "aliases   a, b"]


def test_its_replicas_are_among_it(port: Any, ctl: Any) -> None:
    replica = {
        "replica": "rep-m-1",
        "model": "m",
        "profile": "tp2",
        "node": "n1",
        "state": "ended",
        "seconds_in_state": 2.0,
        "cause": "it broke",
        "remedy": "mend it",
        "lines": ["the last word"],
    }
    port.will_answer("GET", "/models/m", {**DETAIL, "replicas": [replica], "rejections": []})
    said = ctl("model", "show", "m").out
    assert "failed  2s ago" in said
    assert "cause   it broke\nremedy  mend it\nthe last lines of its engine:\n  the last word\n" in said
    assert "REASON" not in said


@pytest.mark.parametrize(("name", "path"), [("org/m", "/models/org%2Fm"), ("a b?", "/models/a%20b%3F")])
def test_a_name_is_one_word_of_the_path(port: Any, ctl: Any, name: str, path: str) -> None:
    assert ctl("model", "show", name).status == 1
    assert port.heard[0].path == path
