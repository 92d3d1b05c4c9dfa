"""What a source means in a repository, and what the hub's refusals mean for whoever reads them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from llmgw.core.weights import Source, parse_source
from llmgw.host.weights.errors import Broken, FetchFailed, Kind
from llmgw.host.weights.sources.asker import Asker
from llmgw.host.weights.sources.hub import (
    MOST_FILES,
    Entry,
    api_url,
    choose_names,
    explain,
    file_url,
    find_near,
    read_repository,
    refuse_name,
)

COMMIT = "a" * 40
SHA256 = "b" * 64
ENDPOINT = "https://hub.example"


def entries(*names: str, size: int | None = 10) -> dict[str, Entry]:
    return {name: Entry(name, size, None) for name in names}


def choose(text: str, *names: str) -> tuple[str, ...]:
    return choose_names(parse_source(text), entries(*names))


def failed(text: str, *names: str) -> FetchFailed:
    with pytest.raises(FetchFailed) as raised:
        choose(text, *names)
    return raised.value


def told(*siblings: dict[str, Any], sha: object = COMMIT) -> bytes:
    return json.dumps({"sha": sha, "siblings": siblings}).encode()


def test_a_file_is_that_file() -> None:
    assert choose("hf:org/repo/x.gguf", "x.gguf", "y.gguf") == ("x.gguf",)


def test_all_parts_of_a_sharded_file_are_meant_by_any_of_them() -> None:
    parts = tuple(f"q4/x-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    assert choose("hf:org/repo/q4/x-00002-of-00003.gguf", *parts, "y.gguf") == parts


def test_a_part_that_is_not_there_is_named() -> None:
    error = failed("hf:org/repo/x-00001-of-00003.gguf", "x-00001-of-00003.gguf", "x-00003-of-00003.gguf")
    assert error.kind is Kind.NO_FILE
    assert "x-00002-of-00003.gguf missing" in error.message


def test_a_pattern_brings_what_matches_in_one_order() -> None:
    assert choose("hf:org/repo/*q4*.gguf", "b-q4.gguf", "a-q4.gguf", "a-q8.gguf") == ("a-q4.gguf", "b-q4.gguf")


def test_a_pattern_that_matches_a_part_brings_all_parts() -> None:
    parts = ("x-00001-of-00002.gguf", "x-00002-of-00002.gguf")
    assert choose("hf:org/repo/*-00001-of-*.gguf", *parts) == parts


def test_a_pattern_of_safetensors_brings_what_an_engine_needs_with_them() -> None:
    found = choose(
        "hf:org/repo/*.safetensors",
        "model.safetensors",
        "config.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "README.md",
        "onnx/config.json",
        ".gitattributes",
    )
    assert found == ("chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.model")


def test_a_companion_that_is_large_stays_where_it_is() -> None:
    known = entries("model.safetensors") | {"dump.json": Entry("dump.json", 65 * 10**6, None)}
    assert choose_names(parse_source("hf:org/repo/*.safetensors"), known) == ("model.safetensors",)


def test_a_pattern_of_other_files_brings_no_companions() -> None:
    assert choose("hf:org/repo/*.gguf", "x.gguf", "config.json") == ("x.gguf",)


@pytest.mark.parametrize("text", ["hf:org/repo/x-00001-of-99999.gguf", "hf:org/repo/*.gguf"])
def test_a_name_of_endless_parts_is_told(text: str) -> None:
    error = failed(text, "x-00001-of-99999.gguf")
    assert (error.kind, "one of 99999 parts" in error.message) == (Kind.UNSUPPORTED, True)


def test_of_a_repository_without_end_not_all_is_fetched() -> None:
    names = [f"{number}.txt" for number in range(MOST_FILES + 1)]
    assert len(choose("hf:org/repo/*", *names[:-1])) == MOST_FILES
    error = failed("hf:org/repo/*", *names)
    assert (error.kind, "more than 10000 files" in error.message) == (Kind.UNSUPPORTED, True)
    # (and names that each tell of a thousand others cost no more)
    error = failed("hf:org/repo/*", *(f"{number}-00001-of-01000.gguf" for number in range(1000)))
    assert error.kind is Kind.UNSUPPORTED


def test_hidden_files_match_no_pattern() -> None:
    assert choose("hf:org/repo/*", "x.gguf", ".gitattributes", ".cache/y") == ("x.gguf",)


def test_a_pattern_that_matches_nothing_says_what_there_is() -> None:
    error = failed("hf:org/repo/*.bin", *(f"{letter}.gguf" for letter in "abcdefgh"))
    assert error.message == "nothing in org/repo matches *.bin"
    assert error.remedy == "it has a.gguf, b.gguf, c.gguf, d.gguf, e.gguf, f.gguf and 2 more"


def test_near_names_are_suggested() -> None:
    error = failed("hf:org/repo/Qwen-Q4_K_M.gguf", "qwen-q4_k_m.gguf", "qwen-q8_0.gguf", "README.md")
    assert error.kind is Kind.NO_FILE
    assert error.remedy is not None
    assert error.remedy.startswith("did you mean hf:org/repo/qwen-q4_k_m.gguf")


def test_a_file_in_another_folder_is_near() -> None:
    assert find_near("x.gguf", ["Q4/x.gguf", "other.gguf"]) == ("Q4/x.gguf",)


def test_without_near_names_the_likes_of_it_are_shown() -> None:
    assert failed("hf:org/repo/zzz.gguf", "model-q4.gguf", "README.md").remedy == "it has model-q4.gguf"
    assert failed("hf:org/repo/zzz.gguf").remedy == "it is empty"


def test_a_listing_has_the_sizes_and_hashes_of_large_files() -> None:
    body = told(
        {"rfilename": "x.gguf", "size": 130, "lfs": {"sha256": SHA256, "size": 5000, "pointerSize": 130}},
        {"rfilename": "y.gguf", "size": 7, "lfs": {"oid": f"sha256:{SHA256.upper()}"}},
        {"rfilename": "z.gguf", "size": 8, "lfs": None},
        {"rfilename": "unsized.gguf"},
        {"rfilename": "endless.gguf", "size": 10**25},
    )
    commit, found = read_repository(body, parse_source("hf:org/repo/*.gguf"), "hub")
    assert commit == COMMIT
    assert [(each.name, each.size_bytes, each.sha256) for each in found] == [
        ("endless.gguf", None, None),
        ("unsized.gguf", None, None),
        ("x.gguf", 5000, SHA256),
        ("y.gguf", 7, SHA256),
        ("z.gguf", 8, None),
    ]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", told(sha="main"), told(sha=None), b'{"sha": 3}'])
def test_what_is_no_hub_is_found_out(body: bytes) -> None:
    with pytest.raises(FetchFailed) as raised:
        read_repository(body, parse_source("hf:org/repo/x.gguf"), "hub.example")
    assert raised.value.kind is Kind.UNSUPPORTED
    assert raised.value.remedy == "check HF_ENDPOINT"


@pytest.mark.parametrize("name", ["../x.gguf", "/x.gguf", "a//x.gguf", "a\\x.gguf", "x\n.gguf", "./x.gguf", "x" * 256])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    assert refuse_name(name) is not None
    with pytest.raises(FetchFailed) as raised:
        read_repository(told({"rfilename": name, "size": 1}), parse_source("hf:org/repo/*"), "hub")
    assert raised.value.kind in (Kind.REFUSED, Kind.NO_FILE)


def test_a_hidden_file_is_not_fetched_by_name_either() -> None:
    with pytest.raises(FetchFailed) as raised:
        read_repository(told({"rfilename": ".pieces", "size": 1}), parse_source("hf:org/repo/.pieces"), "hub")
    assert raised.value.kind is Kind.REFUSED


def test_names_are_quoted_in_addresses() -> None:
    assert api_url(ENDPOINT, "org/repo", "refs/pr/1").endswith("/org/repo/revision/refs%2Fpr%2F1?blobs=true")
    assert file_url(ENDPOINT, "org/repo", COMMIT, "a/b c#?.gguf").endswith("/a/b%20c%23%3F.gguf")


def said(status: int, code: str | None = None, *, token: bool = False, **headers: str) -> FetchFailed | Broken:
    source: Source = parse_source("hf:org/repo/x.gguf@v1")
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    if code is not None:
        fields["X-Error-Code"] = code
    return explain(source, status, httpx.Headers(fields), endpoint=ENDPOINT, token_told=token)


@pytest.mark.parametrize(
    ("status", "code", "token", "kind", "words"),
    [
        (401, "GatedRepo", False, Kind.GATED, ("org/repo is gated", f"accept it at {ENDPOINT}/org/repo, then set HF_")),
        (403, "GatedRepo", True, Kind.GATED, ("org/repo is gated", "with the account that the token is of")),
        (401, "RepoNotFound", False, Kind.MISSING, ("or it is private", "for a private one set HF_TOKEN")),
        (404, "RepoNotFound", True, Kind.MISSING, ("this token may not read it", "the token's rights")),
        (404, None, False, Kind.MISSING, ("no repository org/repo at hub.example", "check the name")),
        (404, "RevisionNotFound", False, Kind.MISSING, ("no revision v1", "branches and tags are at")),
        (404, "EntryNotFound", False, Kind.NO_FILE, ("org/repo has no file x.gguf", f"{ENDPOINT}/org/repo/tree/main")),
        (401, None, False, Kind.UNAUTHORIZED, ("only to those with a token", "weights.hub_token in agent.yaml")),
        (401, None, True, Kind.UNAUTHORIZED, ("knows no such token", f"{ENDPOINT}/settings/tokens")),
        (403, None, True, Kind.UNAUTHORIZED, ("this token may not read org/repo", f"{ENDPOINT}/settings/tokens")),
        (418, None, False, Kind.UNSUPPORTED, ("answers 418", "check the address")),
    ],
)
def test_the_hubs_refusals_are_told_apart(
    status: int, code: str | None, token: bool, kind: Kind, words: tuple[str, str]
) -> None:
    error = said(status, code, token=token)
    assert isinstance(error, FetchFailed)
    assert error.kind is kind
    assert words[0] in error.message
    assert error.remedy is not None
    assert words[1] in error.remedy


@pytest.mark.parametrize("code", ["GatedRepo", "RepoNotFound", None])
def test_a_token_is_set_where_whoever_asks_reads_it(code: str | None) -> None:
    source, asker = parse_source("hf:org/repo/x.gguf"), Asker(environment="this command's environment", file=None)
    headers = httpx.Headers({} if code is None else {"X-Error-Code": code})
    error = explain(source, 401, headers, endpoint=ENDPOINT, token_told=False, asker=asker)
    assert (error.remedy or "").endswith("set HF_TOKEN in this command's environment")


@pytest.mark.parametrize(
    ("status", "headers", "wait"),
    [
        (429, {"retry_after": "7"}, 7.0),
        (429, {"retry_after": "3600"}, 60.0),
        (429, {"ratelimit": '"resolvers";r=0;t=21'}, 21.0),
        (429, {"retry_after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
        (503, {"retry_after": "3"}, 3.0),
        (500, {}, 1.0),
        (408, {}, 1.0),
        (425, {}, 1.0),
    ],
)
def test_what_passes_is_waited_for_as_long_as_we_are_asked_to(
    status: int, headers: dict[str, str], wait: float
) -> None:
    error = said(status, **headers)
    assert isinstance(error, Broken)
    assert error.wait_seconds == wait


def test_who_is_turned_away_without_a_token_is_told_that_one_helps() -> None:
    error = said(429)
    assert isinstance(error, Broken)
    assert "HF_TOKEN" in (error.give_up().remedy or "")
