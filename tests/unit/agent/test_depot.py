"""A real machine's weights: from an origin into the cache, to an engine, and on to another node."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from llmgw.agent.depot import Depot
from llmgw.agent.settings import WeightsSettings
from llmgw.config.server import Listen
from llmgw.core.node import NodeId
from llmgw.core.weights import RELAY, Member, Phase, Swarm, key_of, parse_source
from llmgw.errors import ConfigError, LlmgwError, UsageError
from llmgw.host.weights.errors import FetchFailed, Kind
from llmgw.pki.authority import certificate_pem, issue_node, key_pem, make_authority

sys.path.insert(0, str(Path(__file__).parents[2] / "fakes" / "origin"))
from fake_origin import FakeOrigin

SOURCE = "hf:org/repo/m.bin"
CONTENT = bytes(range(256)) * 4096 * 3


@pytest.fixture
def origin(tmp_path):
    folder = tmp_path / "origin"
    (folder / "org" / "repo").mkdir(parents=True)
    (folder / "org" / "repo" / "m.bin").write_bytes(CONTENT)
    with FakeOrigin(folder) as origin:
        yield origin


@pytest.fixture
def make(tmp_path, origin):
    """A depot of this name, that fetches from that origin."""

    def make(name="n1", **changes):
        settings = replace(WeightsSettings(cache=tmp_path / name / ".cache"), **changes)
        return Depot(NodeId(name), settings, environ={"HF_ENDPOINT": origin.url})

    return make


@asynccontextmanager
async def serving(*depots, allowed=lambda node, key: True):
    async with trio.open_nursery() as nursery:
        for depot in depots:
            await nursery.start(depot.serve, allowed)
        yield
        nursery.cancel_scope.cancel()


async def fetch(depot, source=SOURCE, *, swarm=None, newest=False):
    told = []
    with trio.fail_after(60):
        manifest = await depot.fetch(
            parse_source(source), swarm=lambda: swarm, tell=told.append, newest=newest, users=lambda commit: ()
        )
    return manifest, told


@pytest.mark.slow
async def test_what_is_fetched_is_here_by_its_path_until_it_is_removed(make, origin):
    depot = make()
    assert depot.find(SOURCE) is None
    async with serving(depot):
        manifest, told = await fetch(depot)
        assert told[-1].phase is Phase.READY
        assert depot.find(SOURCE) == manifest
        assert await depot.list() == (manifest,)
        path = depot.path_of(manifest, as_file=True)
        assert path.read_bytes() == CONTENT
        assert depot.path_of(manifest, as_file=False) == path.parent
        use = depot.use(manifest)
        with pytest.raises(LlmgwError):
            depot.remove(SOURCE, manifest.commit)
        use.close()
        assert depot.remove(SOURCE, manifest.commit) >= len(CONTENT)
        assert await depot.list() == ()
        assert depot.use(manifest) is None


@pytest.mark.slow
async def test_what_is_left_of_a_fetch_is_listed_and_removed(make, origin):
    depot = make()
    origin.fault("org/repo/m.bin", reset_after=len(CONTENT) // 2)
    async with serving(depot):
        with trio.move_on_after(60), trio.CancelScope() as scope:
            await depot.fetch(
                parse_source(SOURCE),
                swarm=lambda: None,
                tell=lambda fetch: scope.cancel() if fetch.origin_bytes else None,
                newest=False,
                users=lambda commit: (),
            )
        (left,) = depot.list_unfinished()
        assert (left.source, left.whole) == (SOURCE, False)
        assert depot.remove(SOURCE, left.commit) == left.size_bytes
        assert depot.list_unfinished() == ()
        assert depot.remove(SOURCE, left.commit) == 0


async def test_what_an_agent_that_was_killed_has_left_is_tidied_away(make, tmp_path):
    left = tmp_path / "n1" / ".cache" / key_of(SOURCE)
    left.mkdir(parents=True)
    (left / ".lock").touch()
    async with serving(make()):
        with trio.fail_after(60):
            # (it is told by the folder alone)
            while left.exists():  # noqa: ASYNC110
                await trio.sleep(0.01)


@pytest.mark.slow
async def test_what_is_not_there_is_told_with_its_kind(make):
    depot = make()
    async with serving(depot):
        with pytest.raises(FetchFailed) as failed:
            await fetch(depot, "hf:org/repo/n.bin")
    assert failed.value.kind is Kind.NO_FILE


@pytest.fixture
def tls(tmp_path):
    """Certificates of two nodes of one authority."""
    authority, now = make_authority(now=time.time()), time.time()
    found = {}
    for name in ("n1", "n2"):
        folder = tmp_path / "tls" / name
        folder.mkdir(parents=True)
        issued = issue_node(authority, name, now=now)
        paths = [folder / file for file in ("ca.pem", "node.pem", "node-key.pem")]
        parts = (certificate_pem(authority.certificate), certificate_pem(issued.certificate), key_pem(issued.key))
        for path, part in zip(paths, parts, strict=True):
            path.write_bytes(part)
            path.chmod(0o600)
        found[name] = SimpleNamespace(ca=paths[0], cert=paths[1], key=paths[2])
    return found


async def wait_seed(depot):
    with trio.fail_after(60):
        # (nobody else waits for it)
        while depot.seed is None:  # noqa: ASYNC110
            await trio.sleep(0.01)


def find_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.slow
async def test_another_node_takes_what_is_here_and_not_what_it_may_not(make, tls, origin):
    listen = Listen(host="127.0.0.1", port=find_port())
    first, second = make("n1", tls=tls["n1"], seed_listen=listen), make("n2", tls=tls["n2"])
    asked = []

    def is_allowed(node, key):
        asked.append((node, key))
        return True

    async with serving(first, second, allowed=is_allowed):
        await wait_seed(first)
        assert (first.seed, second.seed) == (f"127.0.0.1:{listen.port}", None)
        manifest, _ = await fetch(first)
        sent = origin.sent["org/repo/m.bin"]
        member = Member(node=NodeId("n1"), seed=first.seed, whole=True)
        swarm = Swarm(source=SOURCE, commit=manifest.commit, members=(member, Member(node=NodeId("n2"))))
        taken, told = await fetch(second, swarm=swarm)
        assert taken.commit == manifest.commit
        assert second.path_of(taken, as_file=True).read_bytes() == CONTENT
        assert origin.sent["org/repo/m.bin"] == sent
        assert (told[-1].peer_bytes, told[-1].origin_bytes) == (len(CONTENT), 0)
        assert set(asked) == {("n2", key_of(SOURCE))}


@pytest.mark.slow
async def test_what_an_earlier_agent_has_fetched_is_given_to_others_too(make, tls, origin):
    first, second = make("n1"), make("n2", tls=tls["n2"])
    async with serving(first):
        manifest, _ = await fetch(first)
    listen = Listen(host="127.0.0.1", port=find_port())
    next_one = make("n1", tls=tls["n1"], seed_listen=listen)
    async with serving(next_one, second):
        await next_one.list()
        await wait_seed(next_one)
        member = Member(node=NodeId("n1"), seed=next_one.seed, whole=True)
        swarm = Swarm(source=SOURCE, commit=manifest.commit, members=(member, Member(node=NodeId("n2"))))
        _, told = await fetch(second, swarm=swarm)
    assert told[-1].peer_bytes == len(CONTENT)


def test_what_can_not_be_used_is_told_at_once(tmp_path):
    settings = WeightsSettings(cache=tmp_path)
    with pytest.raises(ConfigError, match="HF_ENDPOINT"):
        Depot(NodeId("n1"), settings, environ={"HF_ENDPOINT": "nowhere"})
    files = SimpleNamespace(ca=tmp_path / "a", cert=tmp_path / "b", key=tmp_path / "c")
    with pytest.raises(UsageError, match="can't be read"):
        Depot(NodeId("n1"), replace(settings, tls=files), environ={})


async def test_the_models_in_all_folders_are_found_but_what_was_fetched(make, tmp_path):
    for name in ("m/a.gguf", "m/.cache/k/c/b.gguf", "o/c.gguf", "m/fetched/k/d.gguf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    depot = make(cache=tmp_path / "m" / "fetched", model_dirs=(tmp_path / "m", tmp_path / "o", tmp_path / "nowhere"))
    assert await depot.look_around() == (f"{tmp_path}/m/a.gguf", f"{tmp_path}/o/c.gguf")
    assert not depot.is_shared()


async def test_a_folder_that_does_not_answer_holds_up_nothing_and_is_told(make, tmp_path, monkeypatch, caplog):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "b.gguf").touch()
    depot = make(model_dirs=(tmp_path / "a", tmp_path / "b"))
    monkeypatch.setattr("llmgw.agent.watch.PATIENCE_SECONDS", 0.01)
    silent = depot._watches[tmp_path / "a"]
    silent._began = time.monotonic() - 1000
    assert await depot.look_around() == (f"{tmp_path}/b/b.gguf",)
    assert f"{tmp_path}/a of model_dirs is out of service on this node: its filesystem does not answer" in caplog.text


class FakeGiving:
    """Connections to the server, of which a test opens one."""

    def __init__(self, answer):
        self.answer = answer
        self.wanted = []
        self.served = trio.Event()

    def want(self, is_wanted):
        self.wanted.append(is_wanted)

    async def serve(self):
        self.served.set()
        await trio.sleep_forever()


async def test_it_gives_by_the_server_while_a_swarm_takes_from_it_so(tmp_path):
    made = []

    def make_giving(answer):
        made.append(FakeGiving(answer))
        return made[0]

    settings = WeightsSettings(cache=tmp_path)
    depot = Depot(NodeId("n1"), settings, make_giving=make_giving, environ={})
    (giving,) = made
    other = Member(node=NodeId("n2"), seed=RELAY)
    for own in (Member(node=NodeId("n1"), seed=RELAY), Member(node=NodeId("n1"), seed="10.0.0.1:1")):
        depot.note_swarms([Swarm(source=SOURCE, members=(own, other))])
    depot.note_swarms([])
    assert giving.wanted == [True, False, False]
    async with serving(depot, allowed=lambda node, key: node == "n2"):
        with trio.fail_after(60):
            await giving.served.wait()
            ours, theirs = trio.testing.memory_stream_pair()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(giving.answer, ours, lambda busy: None)
                for node, status in (("n2", b"404"), ("n3", b"403")):
                    path = f"/llmgw/weights/{key_of(SOURCE)}/{'c' * 40}"
                    await theirs.send_all(f"GET {path} HTTP/1.1\r\nhost: x\r\nx-llmgw-node: {node}\r\n\r\n".encode())
                    said = b""
                    while not said.endswith((b"is here\n", b"fetch this\n")):
                        said += await theirs.receive_some()
                    assert said.split()[1] == status
                await theirs.aclose()


def test_without_a_server_there_is_nothing_to_give_by(make):
    make().note_swarms([Swarm(source=SOURCE, members=(Member(node=NodeId("n1"), seed=RELAY),))])
