from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_origin import FakeOrigin
from weight_files import CONFIG, LLAMA, write_gguf, write_safetensors

from llmgw.cli.ctl.model_plan import draw_places, draw_sizes
from llmgw.core.attention import Layout, read_config
from llmgw.core.sizing import GB, Format, Found, Number, size_up

FIT = {"node": "n1", "engine": "e", "gpus": 2}
AGAINST = {"node": "n2", "profile": "e", "reason": "cordoned", "detail": "uncordon it"}
PLACE = {"tp": 1, "memory_gb": 20.5, "gpu_class": "h100-80g", "fits": [FIT], "others": [AGAINST]}
ANSWER: dict[str, Any] = {"engines": ["e"], "places": [PLACE], "unseen": []}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "m.gguf"
    made.write_bytes(write_gguf(LLAMA, (("w", (32, 4_000_000), 2),)))
    return made


def found(layout: Layout | None, **facts: Any) -> Found:
    usual: dict[str, Any] = {
        "source": "org/m",
        "format": Format.SAFETENSORS,
        "files": 3,
        "weights": Number(value=141 * GB, origin="the sizes of 3 files"),
        "told_by": "config.json",
    }
    return Found(layout=layout, **{**usual, **facts})


def text_of(blocks: Any) -> str:
    from llmgw.cli.ctl.drawing import plain

    return plain(blocks)


def test_sizes_and_places_are_shown(port: Any, ctl: Any, file: Path) -> None:
    port.will_answer("POST", "/plan", ANSWER)
    ended = ctl("model", "plan", str(file), "--context", "100", "--gpu-class", "h100-80g")
    assert ended.status == 0
    assert ended.out == (
        f"{file}: llama, mostly Q4_0, 1 file\n"
        "\n"
        "WHAT                  GB      FROM\n"
        "disk                  0.072   the size of m.gguf\n"
        "weights               0.072   the GGUF header\n"
        "KV cache, 100 tokens  <0.001  the GGUF header, with 16 bits for each value\n"
        "the engine's own      0.501   estimated: 512 tokens at once, and what an engine itself takes\n"
        "memory in all         0.573   estimated: the sum of these\n"
        "\n"
        "longest context: 256 tokens; KV cache for each token: 256 bytes, from the GGUF header, with 16 bits for each "
        "value\n"
        "\n"
        "on each of TP GPUs that share it, in GB (estimated):\n"
        "TP  WEIGHTS  KV      OWN    IN ALL\n"
        "1   0.072    <0.001  0.501  0.573\n"
        "2   0.036    <0.001  0.501  0.537\n"
        "4   0.018    <0.001  0.501  0.519\n"
        "8   0.009    <0.001  0.501  0.510\n"
        "\n"
        "where it would fit now, by e:\n"
        "CLASS     TP  NEEDS GB  NODES  WHICH\n"
        "h100-80g  1   20.500    1      n1 (2 GPUs)\n"
        "\n"
        "NODE  CLASS     TP  VERDICT   DETAIL\n"
        "n2    h100-80g  1   cordoned  uncordon it\n"
    )
    body = port.heard[0].body
    assert (body["source"], body["format"], body["gpu_class"]) == (str(file), "gguf", "h100-80g")
    assert body["gpus"][0] == {"tp": 1, "memory_gb": 0.574}
    assert body["memory_gb"] == 0.574
    assert "disk_gb" not in body


def test_without_a_server_the_sizes_are_shown_all_the_same(ctl: Any, file: Path) -> None:
    ended = ctl("model", "plan", str(file), "--server", "http://127.0.0.1:1")
    assert ended.status == 0
    assert "memory in all" in ended.out
    assert "no server could be asked where it would fit: nothing answers at http://127.0.0.1:1 (--server)" in ended.out


def test_a_server_that_does_not_know_the_question_is_no_failure(ctl: Any, file: Path) -> None:
    ended = ctl("model", "plan", str(file))
    words = "the server does not say where it would fit: nothing is served here"
    assert (ended.status, words in ended.out) == (0, True)


def test_json_has_what_is_known(port: Any, ctl: Any, file: Path) -> None:
    port.will_answer("POST", "/plan", ANSWER)
    told = json.loads(ctl("model", "plan", str(file), "--json").out)
    assert told["places"] == ANSWER
    assert told["sizes"]["kv_token"] == {"value": 256, "origin": "the GGUF header, with 16 bits for each value"}
    assert told["sizes"]["gpus"][1]["weights"] == 36_000_000
    silent = json.loads(ctl("model", "plan", str(file), "--json", "--server", "http://127.0.0.1:1").out)
    assert "places" not in silent
    assert "nothing answers" in silent["not_asked"]


def test_what_is_unknown_is_called_so(port: Any, ctl: Any, tmp_path: Path) -> None:
    port.will_answer("POST", "/plan", ANSWER)
    (tmp_path / "m.safetensors").write_bytes(write_safetensors({"w": (1024, 1024)}))
    out = ctl("model", "plan", str(tmp_path)).out
    assert "KV cache          unknown  -\n" in out
    assert "memory in all     unknown  -\n" in out
    assert "longest context: unknown; KV cache for each token: unknown\n" in out
    assert "there is no config.json beside it: the KV cache is unknown\n" in out
    assert "1   0.002    unknown  unknown  0.002 and unknowns\n" in out
    assert "h100-80g  1   20.500 and unknowns  1      n1 (2 GPUs)\n" in out
    assert port.heard[0].body["gpus"][0]["memory_gb"] == 0.003


def test_a_file_that_cannot_be_used_is_status_1(ctl: Any, tmp_path: Path, port: Any) -> None:
    (tmp_path / "m.gguf").write_bytes(b"<html>")
    ended = ctl("model", "plan", str(tmp_path / "m.gguf"))
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith("llmgw: m.gguf is an HTML page")
    assert port.heard == []


def test_a_source_that_is_none_is_status_2(ctl: Any) -> None:
    ended = ctl("model", "plan", "s3://bucket/m")
    assert (ended.status, "is no scheme that is fetched" in ended.err) == (2, True)
    assert ctl("model", "plan", "/m.gguf", "--context", "0").status == 2


@pytest.mark.parametrize("name", ["", " ", "h100 80g", "x" * 101])
def test_what_can_be_no_class_is_status_2_before_anything_is_asked(ctl: Any, port: Any, file: Path, name: str) -> None:
    ended = ctl("model", "plan", str(file), "--gpu-class", name)
    assert (ended.status, ended.out, port.heard) == (2, "", [])
    assert "--gpu-class: " in ended.err
    assert "is no class of GPUs: write one as `llmgw ctl nodes` shows it (h100-80g)" in ended.err


@pytest.mark.slow
def test_a_failure_is_told_with_what_to_do(ctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "m").mkdir(parents=True)
    (tmp_path / "org" / "m" / "a.gguf").write_bytes(write_gguf())
    with FakeOrigin(tmp_path) as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin.url)
        ended = ctl("model", "plan", "hf:org/m/A.gguf")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == "llmgw: org/m has no file A.gguf; did you mean hf:org/m/a.gguf?\n"


def test_an_empty_source_is_told_and_not_taken_for_a_folder(ctl: Any, port: Any) -> None:
    ended = ctl("model", "plan", "")
    assert (ended.status, ended.out, "SOURCE is empty" in ended.err) == (2, "", True)
    assert port.heard == []


@pytest.mark.slow
def test_a_token_is_set_for_the_command_and_not_for_an_agent(
    ctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with FakeOrigin(tmp_path) as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin.url)
        ended = ctl("model", "plan", "hf:org/m/a.gguf")
    assert ended.status == 1
    assert ended.err.endswith("for a private one set HF_TOKEN in this command's environment\n")


def test_what_cannot_be_shared_says_why() -> None:
    text = text_of(draw_sizes(size_up(found(read_config(CONFIG)))))
    assert "weights               141.0    the sizes of 3 files" in text
    assert "8   -        -       -      -\n" in text
    assert text.endswith("not with TP 8: its 4 attention heads can't be shared by 8")
    assert "disk                  unknown  -" in text


def test_of_many_nodes_the_first_are_named() -> None:
    fits = [{"node": f"n{number}", "engine": "e"} for number in range(6)]
    against = [{**AGAINST, "node": f"m{number}"} for number in range(25)]
    cpu = {"tp": 1, "memory_gb": 1.0, "fits": fits, "others": against}
    text = text_of(draw_places({"engines": ["e"], "places": [cpu], "unseen": ["a", "b"], "held_up": "it waits"}))
    assert "(no GPU)  -   1.000     6      n0, n1, n2, n3 and 2 more\n" in text
    assert "and 5 more reasons: --json has all\n" in text
    assert text.endswith("not known: a, b (not here since the server started)")
    assert "it waits\n" in text


def test_a_reason_is_told_once_for_a_class() -> None:
    places = [{**PLACE, "tp": tp, "fits": []} for tp in (1, 2)]
    text = text_of(draw_places({**ANSWER, "places": places}))
    assert text.count("uncordon it") == 1


def test_where_there_is_no_place_at_all_it_says_so() -> None:
    assert "no engine of the server reads such weights" in text_of(draw_places({**ANSWER, "engines": []}))
    assert "nowhere: " in text_of(draw_places({**ANSWER, "places": []}))
