"""The real program as a process of its own, over an engine that is a process too."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from lab.wire import CHAT, MODEL, Reply, Wire, chat, get, post
from llmgw.host.ports import is_free
from llmgw.host.process import find_marked
from llmgw.host.state import StateFolder

FAKES = Path(__file__).parents[2] / "fakes"
START_SECONDS = 110.0
T = TypeVar("T")


def wait_for(look: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    """Look again and again until it is there; the limit is one that only a hang misses."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
    return found


# Each process of tests has a stretch of ports of its own, below those that the kernel gives to whoever asks for any:
# what runs beside it, and all that connects anywhere, takes none of them between the look at a port and its use.
STRETCH = 400
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
FIRST_PORT = 25000 + (os.getpid() if WORKER is None else os.getppid() + int(WORKER[2:])) % 19 * STRETCH
_single = itertools.cycle(range(FIRST_PORT, FIRST_PORT + 100))
_tens = itertools.cycle(range(FIRST_PORT + 100, FIRST_PORT + STRETCH, 10))


def free_port() -> int:
    """Another one each time, until all have had their turn."""
    return next(filter(is_free, itertools.islice(_single, 100)))


def engine_ports() -> str:
    """A range for the engines of one llmgw, which no other one looks for a port in at the same time."""
    first = next(_tens)
    return f"{first}-{first + 9}"


@dataclass(frozen=True)
class EngineProcess:
    """A running engine, found by the marker that its environment bears."""

    pid: int
    port: int

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return json.load(answer)

    def requests(self) -> list[dict[str, Any]]:
        """Every request that the fake engine has seen, and how it ended."""
        found = self.ask("/fake/requests")
        assert isinstance(found, list)
        return found

    def find(self, tag: str) -> dict[str, Any] | None:
        """The request whose body has this ``user``."""
        for seen in self.requests():
            if isinstance(seen["body"], dict) and seen["body"].get("user") == tag:
                return seen
        return None

    def wait_ended(self, tag: str) -> dict[str, Any]:
        """That request, once it is over."""

        def look() -> dict[str, Any] | None:
            seen = self.find(tag)
            return seen if seen is not None and seen["state"] != "open" else None

        return wait_for(look, f"the end of request {tag}")


# Whoever runs the tests in the background, or by nohup, has these ignored, and that would be inherited.
HEAR_SIGNALS = ("env", "--default-signal=INT,HUP,QUIT")


class Program:
    """One process of ``llmgw`` with its folder and its log."""

    def __init__(self, folder: Path, *words: str, before: tuple[str, ...] = ()) -> None:
        """``words``: the command line; ``before``: what runs it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.words = [*before, *HEAR_SIGNALS, sys.executable, "-m", "llmgw", *words]
        self.process: subprocess.Popen[bytes] | None = None
        self.log_file = folder / "log"
        self.out_file = folder / "out"

    def start(self) -> Self:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("LLMGW_")}
        environ["PYTHONPATH"] = str(FAKES)
        with self.log_file.open("ab") as log, self.out_file.open("wb") as out:
            self.process = subprocess.Popen(
                self.words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env=environ,
                start_new_session=True,
            )
        return self

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "it was not started"
        return self.process

    def wait_said(self, text: str, *, where: Callable[[], str] | None = None) -> Self:
        """It has said so, in its log if nothing else is named; its log is told if it doesn't."""
        read = where or (lambda: self.log)

        def look() -> bool:
            assert self.running.poll() is None, f"it ended with {self.running.returncode}"
            return text in read()

        try:
            wait_for(look, f"{text!r} of llmgw", START_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None
        return self

    @property
    def out(self) -> str:
        return self.out_file.read_text()

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def interrupt(self) -> None:
        self.running.send_signal(signal.SIGINT)

    def wait_ended(self) -> int:
        return self.running.wait(90)

    def stop(self) -> int:
        """Ctrl-C, and its exit status."""
        self.interrupt()
        return self.wait_ended()

    def kill(self) -> None:
        """As kill -9 does."""
        self.running.kill()
        self.running.wait()

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.running.pid}/fd"))

    def clean(self) -> None:
        """End whatever is left, by force."""
        if self.process is not None:
            # with all that was started to start it; engines have groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Llmgw(Program):
    """``llmgw serve`` and the like, with what it left behind."""

    def __init__(self, folder: Path, *words: str, port: int = 0, **node: Any) -> None:
        """``words``: the command line; ``node``: keys of node.yaml."""
        self.state = folder / "state"
        self.port = port
        config = folder / "node.yaml"
        super().__init__(folder, *words, "--config", str(config))
        config.write_text(
            yaml.safe_dump({"port": port, "state": str(self.state), "engine_ports": engine_ports(), **node})
        )

    def wait_ready(self) -> Llmgw:
        """The model is served."""
        self.wait_said("ready", where=lambda: self.out)
        self.port = int(self.out.split("127.0.0.1:")[1].split("/")[0])
        return self

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def engines(self) -> list[EngineProcess]:
        """The engines of its folder that run, whoever started them."""
        found = []
        for folder in self.state.glob("*"):
            for stat in find_marked(StateFolder(folder).marker_prefix()):
                with contextlib.suppress(OSError, ValueError):
                    words = Path(f"/proc/{stat.pid}/cmdline").read_bytes().decode().split("\0")
                    found.append(EngineProcess(stat.pid, int(words[words.index("--port") + 1])))
        return found

    @property
    def engine(self) -> EngineProcess:
        (engine,) = self.engines()
        return engine

    # -- as a client

    @contextlib.contextmanager
    def connect(self, **options: Any) -> Iterator[Wire]:
        with Wire(self.address, **options) as wire:
            yield wire

    def ask(self, request: bytes) -> Reply:
        """One request on a connection of its own."""
        with self.connect() as wire:
            return wire.ask(request)

    def chat(self, fake: dict[str, Any] | None = None, /, **fields: Any) -> Reply:
        return self.ask(post(CHAT, chat(fake, **fields)))

    def stream(self, fake: dict[str, Any] | None = None, /, **fields: Any) -> Reply:
        return self.chat(fake, stream=True, **fields)

    # -- its process

    def cpu_share(self, seconds: float = 1.0) -> float:
        """What part of one CPU it takes for a while; a loop that spins takes all that it gets."""

        def used() -> float:
            fields = Path(f"/proc/{self.running.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        before = used()
        time.sleep(seconds)
        return (used() - before) / seconds

    def check_health(self) -> None:
        """It still answers, whole and streamed, and no callback of it failed."""
        assert self.running.poll() is None, f"it ended with {self.running.returncode}:\n{self.log[-5000:]}"
        assert self.ask(get("/health")).status == 200
        assert self.chat().json["choices"][0]["message"]["content"]
        assert self.stream().events[-1] == b"[DONE]"
        for word in ("Traceback", "callback of", "failed too", " crashed "):
            assert word not in self.log, self.log[self.log.index(word) - 500 :][:5000]

    def clean(self) -> None:
        """End whatever is left, by force."""
        super().clean()
        for engine in self.engines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGKILL)


def write_model(
    folder: Path, *args: str, engine: str = "fake", source: str | Path | None = None, **fields: Any
) -> Path:
    """A definition of a model, by default one that the fake engine serves."""
    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        source = folder / "weights.fake"
        source.write_text("weights")
    profile = {"name": "p", "engine": engine, "args": list(args)}
    definition = {"name": MODEL, "aliases": ["other/name"], "source": str(source), "context_length": 2048, **fields}
    path = folder / "model.yaml"
    path.write_text(yaml.safe_dump({**definition, "profiles": [profile]}))
    return path
