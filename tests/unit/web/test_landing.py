from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from quart import typing as quart_typing

from llmgw.web.landing import create_app
from llmgw.web.snapshot import ModelShown, ModelState, NodeShown, Snapshot

TINY = ModelShown(
    name="tiny", state=ModelState.SERVING, aliases=("small", "default"), engine="llama.cpp", node="node-1"
)
NODE = NodeShown(id="node-1", cores=20, memory_gb=128.4, memory_available_gb=97.12, engines=("llama.cpp b1",))
RUNNING = Snapshot(version="1.2.3", base_url="http://127.0.0.1:17434/v1", models=(TINY,), nodes=(NODE,))
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class Words(HTMLParser):
    """What a reader sees of a page, and the elements that it is made of."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.elements: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)

    def handle_data(self, data: str) -> None:
        self.seen.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.seen).split())


def client_of(now: Snapshot) -> quart_typing.TestClientProtocol:
    return create_app(lambda: now).test_client()


async def page_of(now: Snapshot) -> str:
    answer = await client_of(now).get("/")
    assert answer.status_code == 200
    return await answer.get_data(as_text=True)


async def test_the_page_says_what_runs_and_where() -> None:
    text = Words(await page_of(RUNNING)).text
    for fact in ("tiny", "small", "default", "serving", "llama.cpp on node-1", "97.1 of 128.4 GB free", "20", "1.2.3"):
        assert fact in text
    assert RUNNING.base_url in text


async def test_the_line_to_paste_is_one_that_a_shell_reads() -> None:
    odd = replace(RUNNING, models=(replace(TINY, name='it\'s $(odd) "quoted"'),))
    text = "".join(Words(await page_of(odd)).seen)
    line = text[text.index("curl -N") :].split("\n\n")[0]
    words = shlex.split(line.replace("\\\n", " "))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:17434/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == 'it\'s $(odd) "quoted"'


async def test_the_line_asks_a_model_that_serves() -> None:
    loading = ModelShown(name="large", state=ModelState.LOADING, detail="loading tensors, 43 %")
    page = await page_of(replace(RUNNING, models=(loading, TINY)))
    assert '"model": "tiny"' in "".join(Words(page).seen)


async def test_a_model_that_loads_shows_its_progress_and_the_page_looks_again() -> None:
    loading = ModelShown(name="large", state=ModelState.LOADING, detail="loading tensors, 43 %")
    page = await page_of(replace(RUNNING, models=(loading,)))
    assert "loading tensors, 43 %" in Words(page).text
    assert 'http-equiv="refresh"' in page
    assert 'http-equiv="refresh"' not in await page_of(RUNNING)


async def test_a_model_that_failed_says_why() -> None:
    failed = ModelShown(
        name="large", state=ModelState.FAILED, detail="not enough memory", lines=("tensor <0>", "exiting")
    )
    text = Words(await page_of(replace(RUNNING, models=(failed,)))).text
    assert "not enough memory" in text
    assert "tensor <0> exiting" in text


async def test_without_a_model_the_page_says_how_to_start_one() -> None:
    text = Words(await page_of(replace(RUNNING, models=(), nodes=()))).text
    assert "llmgw serve" in text
    assert "curl" not in text


async def test_no_name_gets_into_the_page_as_markup() -> None:
    bad = "<script>alert(1)</script>"
    everywhere = ModelShown(
        name=bad, state=ModelState.FAILED, aliases=(bad,), engine=bad, node=bad, detail=bad, lines=(bad,)
    )
    node = NodeShown(id=bad, cores=1, memory_gb=1, memory_available_gb=1, engines=(bad,))
    page = await page_of(Snapshot(version=bad, base_url=bad, models=(everywhere,), nodes=(node,)))
    assert "script" not in Words(page).elements
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 9


async def test_the_browser_takes_nothing_but_our_own_style() -> None:
    answer = await client_of(RUNNING).get("/")
    page = await answer.get_data(as_text=True)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style.group(1).encode()).digest()).decode()
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-store"
    assert not re.search(r"\sstyle=|\son\w+=", page), "the policy would drop it"


async def test_both_colour_schemes_are_there() -> None:
    page = await page_of(RUNNING)
    assert "prefers-color-scheme: dark" in page
    assert 'content="light dark"' in page


async def test_head_is_the_page_without_its_body() -> None:
    answer = await client_of(RUNNING).head("/")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/html")


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/nothing", BROWSER),
        ("/v1", BROWSER),
        ("/api/nothing", BROWSER),
        ("/nothing", {"Accept": "application/json"}),
        ("/nothing", {"Accept": "*/*"}),
        ("/nothing", {}),
        ("//health", {}),
    ],
)
async def test_a_program_gets_an_error_in_json(path: str, headers: dict[str, str]) -> None:
    answer = await client_of(RUNNING).post(path, headers=headers)
    assert answer.status_code == 404
    assert answer.headers["Content-Type"] == "application/json"
    error: dict[str, Any] = (await answer.get_json())["error"]
    assert error.pop("message").startswith(f"Nothing is served at POST {path}")
    assert error == {"type": "invalid_request_error", "param": None, "code": "unknown_url"}


async def test_a_browser_gets_a_page_that_leads_home() -> None:
    answer = await client_of(RUNNING).get("/v1x/<script>", headers=BROWSER)
    page = await answer.get_data(as_text=True)
    assert answer.status_code == 404
    assert "Nothing is served at GET /v1x/<script>." in Words(page).text
    assert "script" not in Words(page).elements
    assert 'href="/"' in page


async def test_a_long_path_is_cut_in_the_answer() -> None:
    answer = await client_of(RUNNING).get("/v1/" + "x" * 10_000)
    assert len(await answer.get_data()) < 1_000


@pytest.mark.parametrize("path", ["//", "//evil.example/", "/a//b"])
async def test_no_path_is_redirected(path: str) -> None:
    answer = await client_of(RUNNING).get(path)
    assert answer.status_code in {200, 404}
    assert "Location" not in answer.headers


async def test_a_method_that_is_not_possible_names_the_ones_that_are() -> None:
    answer = await client_of(RUNNING).delete("/")
    assert answer.status_code == 405
    assert {"GET", "HEAD"} <= {method.strip() for method in answer.headers["Allow"].split(",")}
    error = (await answer.get_json())["error"]
    assert error["code"] == "method_not_allowed"
    assert "GET" in error["message"]


async def test_a_page_that_fails_says_so_and_not_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Snapshot:
        raise RuntimeError("a secret of the house")

    app = create_app(fails)
    # Where pages were served in this process before, their log is spared: it may have had its lines for this minute.
    monkeypatch.setattr(app.logger, "filters", [])
    client = app.test_client()
    answer = await client.get("/")
    assert answer.status_code == 500
    error = (await answer.get_json())["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    page = await (await client.get("/", headers=BROWSER)).get_data(as_text=True)
    assert "secret" not in page
    assert "a secret of the house" in caplog.text
