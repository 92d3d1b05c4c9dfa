"""``llmgw server`` before and beside its tree: ports, what a reload changes, and what is said of what is wrong."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
import yaml

from llmgw.admin.views import Reloaded
from llmgw.config.load_server import LoadedServer, load_server
from llmgw.config.server import Listen
from llmgw.core.events import NodeRegistered, RulesChanged
from llmgw.core.fleet import Fleet
from llmgw.core.learned import Fact, make_key
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import Node, NodeId
from llmgw.counters import Counters
from llmgw.errors import ConfigError, LlmgwError, UsageError
from llmgw.pki.authority import certificate_pem, issue_server, key_pem, make_authority
from llmgw.server.holding import Holding
from llmgw.server.marking import Marking
from llmgw.server.program import (
    Known,
    Rereading,
    Sockets,
    _describe,
    _describe_store,
    _load,
    _watch_reload,
    _watch_signals,
    run,
)
from llmgw.server.scheduler import INBOX_EVENTS, Scheduler
from llmgw.server.weights import Weights
from llmgw.store import open_store
from llmgw.store.lanes import Inline


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A server.yaml that can be used, but for what its certificates hold."""
    for name in ("ca.pem", "server.pem", "server-key.pem"):
        (tmp_path / name).write_text("none")
        (tmp_path / name).chmod(0o600)
    tls = {"ca": "ca.pem", "cert": "server.pem", "key": "server-key.pem"}
    path = tmp_path / "server.yaml"
    write(path, agent_tls={key: str(tmp_path / name) for key, name in tls.items()})
    return path


def write(path: Path, **config: Any) -> None:
    known = yaml.safe_load(path.read_text()) if path.exists() else {}
    known.setdefault("auth", {"enabled": False, "store": str(path.parent / "llmgw.db")})
    path.write_text(yaml.safe_dump({**known, **config}))


@pytest.fixture
def loaded(path: Path) -> LoadedServer:
    found = load_server(path, engines={})
    free = Listen(host="127.0.0.1", port=0)
    return replace(found, config=replace(found.config, listen=free, admin_listen=free, agent_listen=free))


@pytest.fixture
def taken() -> Iterator[Listen]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield Listen(host="127.0.0.1", port=sock.getsockname()[1])


@pytest.mark.parametrize("key", ["listen", "admin_listen", "agent_listen"])
def test_a_port_that_is_taken_is_told_with_its_key(loaded: LoadedServer, path: Path, taken: Listen, key: str) -> None:
    config = replace(loaded.config, **{key: taken})
    with pytest.raises(UsageError, match=rf"{taken.port}.*\({key}\)"):
        run(replace(loaded, config=config), path)


def test_certificates_that_are_none_are_told_before_the_store_is_made(loaded: LoadedServer, path: Path) -> None:
    with pytest.raises(LlmgwError, match=r"server\.pem|server-key\.pem|ca\.pem"):
        run(loaded, path)
    assert not (path.parent / "llmgw.db").exists()


def test_a_list_that_was_named_and_is_not_there_is_told(
    loaded: LoadedServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = replace(loaded.config.agent_tls, revoked=path.parent / "revokd.txt")
    authority = make_authority(now=time.time())
    issued = issue_server(authority, "server", ("127.0.0.1",), now=time.time())
    tls.ca.write_bytes(certificate_pem(authority.certificate))
    tls.cert.write_bytes(certificate_pem(issued.certificate))
    tls.key.write_bytes(key_pem(issued.key))
    # what ends the start comes after it
    store = replace(loaded.config.auth, store=str(path.parent / "nowhere" / "llmgw.db"))
    with pytest.raises(LlmgwError, match="nowhere"):
        run(replace(loaded, config=replace(loaded.config, agent_tls=tls, auth=store)), path)
    assert "revokd.txt is not there" in caplog.text


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


async def test_a_file_that_has_become_a_pipe_is_told(path: Path) -> None:
    half: Any = Half()
    reading = Rereading(half=half, cluster=half, path=path, engines={}, config=load_server(path, engines={}).config)
    make_pipe(path)
    with trio.fail_after(60), pytest.raises(ConfigError, match=r"server\.yaml can't be read: it is no ordinary file"):
        await reading.read()


def test_the_ports_are_told_as_they_are() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as clients,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as operators,
        socket.create_server(("0.0.0.0", 0)) as agents,
    ):
        said = _describe(Sockets(clients=clients, operators=operators, agents=agents), 2)
        ours, theirs = agents.getsockname()[1], operators.getsockname()[1]
    assert said == f"agents dial 0.0.0.0:{ours}, 2 known; llmgw ctl asks [::1]:{theirs}"


class Half:
    """What a reload reaches."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.hurried = 0

    @property
    def scheduler(self) -> Any:
        return self

    async def post(self, event: Any) -> None:
        self.told.append(event)

    def reconfigure(self, config: Any) -> None:
        self.told.append(config)

    def set_lease(self, seconds: float) -> None:
        self.told.append(seconds)

    def set_replace_after(self, seconds: float) -> None:
        self.replace_after = seconds

    def hurry(self) -> None:
        self.hurried += 1


async def test_what_has_changed_is_applied_and_what_can_not_is_named(loaded: LoadedServer, path: Path) -> None:
    half: Any = Half()
    config = load_server(path, engines={}).config
    reading = Rereading(half=half, cluster=half, path=path, engines={}, config=config)
    fleet = {"lease": "20s", "replace_after": "90s", "brake": 0}
    write(path, fleet=fleet, listen="127.0.0.1:9999", timeouts={"drain": "1s"})
    found = await reading.read()
    changed = ("fleet.lease", "fleet.replace_after", "fleet.brake", "timeouts.drain")
    assert (found.changed, found.needs_restart) == (changed, ("listen",))
    assert half.told == []
    await found.apply()
    applied, lease_seconds, rules = half.told
    assert (applied.timeouts.drain, applied.listen, lease_seconds) == (1.0, config.listen, 20.0)
    assert rules == RulesChanged(replace_after=90.0, brake=0.0)
    # what waits for a restart is named again each time
    assert (await reading.read()).needs_restart == ("listen",)


async def test_a_file_that_has_become_wrong_changes_nothing(path: Path) -> None:
    half: Any = Half()
    reading = Rereading(half=half, cluster=half, path=path, engines={}, config=load_server(path, engines={}).config)
    write(path, nonsense=1)
    with pytest.raises(ConfigError, match="nonsense"):
        await reading.read()
    assert half.told == []


async def test_the_first_signal_asks_to_stop_and_the_second_to_hurry() -> None:
    half: Any = Half()
    stopping = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_signals, stopping, half)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(10):
            signal.raise_signal(signal.SIGTERM)
            await stopping.wait()
            assert half.hurried == 0
            signal.raise_signal(signal.SIGTERM)
            while not half.hurried:  # noqa: ASYNC110 - the signal comes by its own way
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()


async def test_a_reload_by_signal_outlives_every_failure_of_it(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Exception | Reloaded] = [
        ConfigError([]),
        ZeroDivisionError("a fault of ours"),
        Reloaded(file="server.yaml", changed=("models",), needs_restart=("listen",)),
    ]
    number = 0

    async def reload() -> Reloaded:
        nonlocal number
        answer = answers[number]
        number += 1
        await trio.lowlevel.checkpoint()
        if isinstance(answer, Exception):
            raise answer
        return answer

    manage: Any = SimpleNamespace(reload=reload)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_reload, manage)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(10):
            for expected in ("is not taken", "could not be read again", "changed: models"):
                signal.raise_signal(signal.SIGHUP)
                while expected not in caplog.text:  # noqa: ASYNC110 - the signal comes by its own way
                    await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert "only after a restart: listen" in caplog.text


async def test_more_marked_nodes_than_an_inbox_holds_are_loaded_before_anybody_is_let_in(
    loaded: LoadedServer, tmp_path: Path
) -> None:
    scheduler, models = Scheduler(Fleet()), Loading()
    async with open_store(str(tmp_path / "llmgw.db"), lanes=Inline()) as store:
        names = [NodeId(f"n{number}") for number in range(2 * INBOX_EVENTS)]
        for name in names:
            await store.nodes.mark(name, cordoned=True, labels={})
        await store.nodes.see(names[0], 1.0)
        marking = Marking(scheduler, store.nodes, links=tuple, forgotten=lambda node: None, let_go=lambda node: None)
        with trio.fail_after(60):
            known = Known(
                marking=marking,
                holding=Holding(scheduler, store.holds, defining=models, histories=models),  # type: ignore[arg-type]
                defining=models,  # type: ignore[arg-type]
                facts=store.facts,
                weights=Weights(scheduler, counters=Counters()),
            )
            await _load(scheduler, loaded.config, known)
        assert models.loads == 1
        # and it can be served afterwards, as if nothing had been
        async with trio.open_nursery() as nursery:
            await nursery.start(scheduler.serve)
            await trio.testing.wait_all_tasks_blocked()
            assert "waits for what n0 run" in str(scheduler.fleet.held_up(trio.current_time()))
            node = Node(id=names[-1], cores=1, cpu_flags=frozenset(), memory_gb=1.0, memory_available_gb=1.0)
            await scheduler.post(NodeRegistered(node=node))
            await trio.testing.wait_all_tasks_blocked()
            (each,) = scheduler.fleet.statistics().nodes
            assert each.host.cordoned
            nursery.cancel_scope.cancel()


async def test_what_an_earlier_server_has_learned_and_was_told_is_known_before_the_models_are(
    loaded: LoadedServer, tmp_path: Path
) -> None:
    profile = Profile(name="p", engine="e")
    model = Model(name=ModelName("m"), source="/m.gguf", profiles=(profile,))
    scheduler, models = Scheduler(Fleet()), Loading()
    async with open_store(str(tmp_path / "llmgw.db"), lanes=Inline()) as store:
        await store.holds.add(model.name, 1.0)
        await store.facts.put(Fact(key=make_key(model, profile, "", ""), load_seconds=42.0), 1.0)
        known = Known(
            marking=Marking(scheduler, store.nodes, links=tuple, forgotten=lambda node: None, let_go=lambda node: None),
            holding=Holding(scheduler, store.holds, defining=models, histories=models),  # type: ignore[arg-type]
            defining=models,  # type: ignore[arg-type]
            facts=store.facts,
            weights=Weights(scheduler, counters=Counters()),
        )
        models.before = lambda: (scheduler.fleet.held(model.name), scheduler.fleet.figures(model)[-1].value)
        await _load(scheduler, loaded.config, known)
    assert models.seen == (True, 42.0)


class Loading:
    """The models, which are loaded last."""

    def __init__(self) -> None:
        self.loads = 0
        self.before: Callable[[], Any] = lambda: None
        self.seen: Any = None

    async def load(self) -> None:
        self.loads += 1
        await trio.testing.wait_all_tasks_blocked()
        self.seen = self.before()


async def test_the_store_is_told_as_it_is(tmp_path: Path) -> None:
    path = str(tmp_path / "llmgw.db")
    async with open_store(path, lanes=Inline()) as store:
        view = _describe_store(store)
        assert (view.kind, view.where, view.failing) == ("sqlite", path, None)
        assert view.size_bytes
