"""The bench measures what it says: its programs run, alone and as a cluster, and a wrong reply is noticed."""

from __future__ import annotations

import http.client
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from harness.arriving import measure_gap, measure_sharing, measure_start
from harness.cluster import run_cluster
from harness.control import measure_crowd, measure_restart
from harness.goals import Results, judge
from harness.origin import Origin, run_origin, write_random
from harness.programs import choose_cpus, compile_program, find_compiler
from harness.report import find_errors, render_rows, render_tables
from harness.scenarios import SCENARIOS, Figures, Scenario, measure
from harness.servers import Running, Site, run_mock
from harness.weights import measure_alone, measure_resume

STREAM = Scenario(name="s", title="a stream", mode="flood", connections=1, seconds=60, warm=0.0, chunks=3, rate=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_compiler() is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no C compiler: install gcc")
    return tmp_path_factory.mktemp("bench").resolve()


@pytest.fixture(scope="module")
def load(folder: Path) -> Path:
    return compile_program("load", folder)


@pytest.fixture(scope="module")
def site(folder: Path) -> Site:
    llmgw = Path(sys.executable).parent / "llmgw"
    return Site(folder=folder, cpus=choose_cpus(), mock=compile_program("mock", folder), llmgw=llmgw)


@pytest.fixture(scope="module")
def mock(site: Site) -> Iterator[Running]:
    with run_mock(site) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_scenario_runs_without_an_error(scenario: Scenario, mock: Running, load: Path) -> None:
    if scenario.mode in {"idle", "slow"}:
        figures = measure(scenario, mock, load=load, cpus=choose_cpus(), share=0.2)
        assert figures.get("open", scenario.connections) == scenario.connections
    else:
        patient = replace(scenario, seconds=60, warm=0.0)
        figures = measure(patient, mock, load=load, cpus=choose_cpus(), enough=500)
        assert int(figures["requests" if scenario.mode == "whole" else "chunks"]) >= 500
    assert figures["errors"] == 0, figures["first_error"]


@pytest.mark.slow
def test_a_cluster_answers_and_its_agent_is_counted_by_itself(site: Site, load: Path) -> None:
    replies = Scenario(name="r", title="replies", mode="whole", connections=4, seconds=60, warm=0.0)
    with run_cluster(site) as running:
        whole = measure(replies, running, load=load, cpus=site.cpus, enough=50)
        stream = measure(STREAM, running, load=load, cpus=site.cpus, enough=6)
    assert whole["errors"] == stream["errors"] == 0, (whole["first_error"], stream["first_error"])
    assert float(whole["cpu_us_per_request"]) > 0 < float(whole["beside_cpu_us_per_request"])
    assert float(stream["cpu_us_per_chunk"]) > 0 < float(stream["beside_cpu_us_per_chunk"])


@pytest.mark.slow
def test_many_agents_are_linked_and_counted(site: Site) -> None:
    figures = measure_crowd(site, 5, seconds=0.1, settle_seconds=0.0)
    assert figures["5 agents: server memory each, KiB"] > 0
    assert figures["5 agents come, 60 a second: server CPU each, ms"] > 0


@pytest.mark.slow
def test_agents_come_back_to_a_server_that_was_started_anew(site: Site) -> None:
    assert measure_restart(site, 5)["5 agents, from the start of a new server until all are linked, s"] > 0


SIZE = 3_000_000


@pytest.fixture
def origin(site: Site) -> Iterator[Origin]:
    with run_origin(site, write_random(site.folder / "weights.random", SIZE)) as origin:
        yield origin


def ask(origin: Origin, url: str, **headers: str) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", origin.port, timeout=60)) as connection:
        connection.request("GET", url.partition(str(origin.port))[2], headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.slow
def test_an_origin_gives_what_is_asked_for_and_counts_it(origin: Origin) -> None:
    whole, url, paced = origin.file.read_bytes(), origin.url("x", 1000), origin.url("x", 1000, rate=100_000)
    assert ask(origin, url) == (200, whole[:1000])
    assert ask(origin, url, range="bytes=10-19") == (206, whole[10:20])
    assert ask(origin, url, range="bytes=990-") == (206, whole[990:1000])
    assert ask(origin, url, range="bytes=1000-") == (416, b"")
    assert ask(origin, origin.url("x", SIZE + 1)) == (404, b"")
    assert ask(origin, paced) == (200, whole[:1000])
    assert (origin.ask_sent(url), origin.ask_sent(paced)) == (1020, 1000)


@pytest.mark.slow
def test_a_fetch_is_measured_beside_curl_and_by_its_parts(site: Site, origin: Origin) -> None:
    figures = measure_alone(site, origin, SIZE, 2) | measure_resume(site, origin, SIZE)
    assert figures["3 MB fetched over loopback, MB/s"] > 0
    assert figures["bare SHA-256: time per GB, s"] > 0
    assert figures["3 MB resumed that are here already, GB/s"] > 0


@pytest.mark.slow
def test_agents_that_share_weights_are_measured(site: Site, origin: Origin) -> None:
    figures = measure_sharing(site, origin, SIZE, 2, rate=8_000_000)
    assert figures["3 MB for 2 agents: bytes from the origin, x"] >= 1


@pytest.mark.slow
def test_what_a_fetch_delays_is_measured(site: Site, origin: Origin) -> None:
    figures = measure_gap(site, origin, SIZE, still_seconds=0.5)
    assert figures["3 MB fetched and hashed: the longest time between two reports of the node, s"] > 0
    assert figures["nothing fetched: a reply through the agent, slowest, ms"] > 0
    figures = measure_start(site, origin, SIZE, 1)
    assert figures["from `ctl model add` to ready with 3 MB in the cache, s"] > 0


def answer_all(listener: socket.socket, reply: bytes) -> None:
    """The same reply to each request of one connection, until the client leaves: it may do so in mid-reply."""
    connection, _ = listener.accept()
    with connection, suppress(ConnectionError):
        while connection.recv(65536):
            connection.sendall(reply)


def measure_reply(load: Path, reply: bytes) -> Figures:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=answer_all, args=(listener, reply))
        thread.start()
        server = Running(port=listener.getsockname()[1], pids=())
        # Six, so that a whole reply of three was judged before the end.
        figures = measure(STREAM, server, load=load, cpus=choose_cpus(), enough=6)
        thread.join()
    return figures


def event(sequence: int) -> str:
    return f'data: {{"content":"@{1:019d}.{sequence:08d} word"}}\n\n'


def framed(*parts: str, head: str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n") -> bytes:
    return (head + "".join(f"{len(part):x}\r\n{part}\r\n" for part in parts) + "0\r\n\r\n").encode()


DONE = "data: [DONE]\n\n"
USAGE = 'data: {"choices":[],"system_fingerprint":"@U"}\n\n'


@pytest.mark.slow
def test_events_may_be_cut_anywhere(load: Path) -> None:
    text = event(0) + event(1) + event(2) + DONE
    figures = measure_reply(load, framed(*(text[at : at + 7] for at in range(0, len(text), 7))))
    assert figures["errors"] == 0, figures["first_error"]
    assert int(figures["chunks"]) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (framed(event(0), event(2), DONE), "chunk 2 came where 1 was due"),
        (framed(event(0), event(1), DONE), "2 of 3 chunks came"),
        (framed(event(0), event(1), event(2)), "no [DONE]"),
        (framed(event(0), event(1), event(2), USAGE, DONE), "1 usage events where 0"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", "status 503: busy"),
        (framed(event(0), event(1), event(2), DONE) + b"more", "4 bytes after the end"),
    ],
    ids=["a lost chunk", "a chunk too few", "no end", "usage unasked", "a refusal", "bytes too many"],
)
def test_a_wrong_reply_is_an_error(reply: bytes, named: str, load: Path) -> None:
    figures = measure_reply(load, reply)
    assert int(figures["errors"]) >= 1
    assert named in str(figures["first_error"])


def entry(**figures: float) -> Figures:
    return {"errors": 0, "first_error": "", **figures}


def test_ratios_are_taken_within_a_round() -> None:
    results: Results = {
        "llmgw": {"c32": [entry(requests_per_s=200), entry(requests_per_s=20)]},
        "vllm-router": {"c32": [entry(requests_per_s=100), entry(requests_per_s=10)]},
    }
    first = judge(results, {})[0]
    assert (first.value, first.met) == (2.0, True)


def test_a_round_with_an_error_does_not_count_and_is_told() -> None:
    broken = entry(requests_per_s=900) | {"errors": 3, "first_error": "status 500"}
    results: Results = {
        "llmgw": {"c32": [broken, entry(requests_per_s=12)]},
        "vllm-router": {"c32": [entry(requests_per_s=10), entry(requests_per_s=10)]},
    }
    first = judge(results, {})[0]
    assert (first.value, first.met) == (1.2, False)
    assert find_errors(results) == ["llmgw, whole replies, 32 connections: 3 errors, the first: status 500"]
    assert "NOT MET" in render_rows([first])


def test_a_cluster_is_compared_with_the_direct_road() -> None:
    results: Results = {
        "llmgw": {"c32": [entry(cpu_us_per_request=20)], "ttfb": [entry(first_p50_ms=0.5)]},
        "llmgw-cluster": {"c32": [entry(cpu_us_per_request=30)], "ttfb": [entry(first_p50_ms=1.0)]},
    }
    rows = {row.figure: row for row in judge(results, {"1,000 agents: server memory each, KiB": 65.0})}
    request = rows["through an agent: server CPU per request at 32 connections, against the direct road"]
    assert (request.value, request.met) == (1.5, True)
    first = rows["through an agent: first byte at 1 connection, above the direct road"]
    assert (first.value, first.met) == (0.5, False)
    assert rows["1,000 agents: server memory each"].met is False


def test_a_figure_that_is_to_be_large_has_a_least() -> None:
    (row,) = judge({}, {"1 GB fetched over loopback: bytes/s, against curl, x": 0.79})
    assert (row.goal, row.met) == (">= 0.8", False)


def test_what_was_not_measured_is_said() -> None:
    rows = judge({"llmgw": {}}, {"idle memory, MiB": 41.0})
    assert "not measured" in render_rows(rows[:1])
    assert "| idle memory | 41 MiB |" in render_rows(rows[-1:])
    assert "| llmgw | - |" in render_tables({"llmgw": {}})
