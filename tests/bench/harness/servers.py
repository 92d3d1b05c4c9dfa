"""What is measured: llmgw, its two peers, the mock itself; each a recipe that starts it and waits until it serves."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.programs import SOURCES, Cpus, free_port, settled_processes, started, wait_until

VLLM_ROUTER = "vllm-router==0.1.17"
START_SECONDS = 60.0
MODEL = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What every recipe needs: a temporary folder, the cpus, the compiled mock, and where the programs are."""

    folder: Path
    cpus: Cpus
    mock: Path
    llmgw: Path
    router: Path | None = None

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that answers: its port, and the processes whose cpu and memory are its own.

    ``beside``: those that do a part of the work on another machine, if this were more than one.
    """

    port: int
    pids: tuple[int, ...]
    beside: tuple[int, ...] = ()


Recipe = Callable[[Site], AbstractContextManager[Running]]


class StartError(Exception):
    """The server ended, or was not ready in time; says what it wrote last."""


def ask(port: int, path: str = "/v1/chat/completions", *, model: str = MODEL) -> int:
    """The status of one small completion; 0 when nothing listens or the connection breaks."""
    body = json.dumps({"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        return 0
    else:
        return answer.status
    finally:
        connection.close()


@contextmanager
def run_server(
    site: Site, name: str, argv: list[str], port: int, env: dict[str, str] | None = None, *, answer: int = 200
) -> Iterator[Running]:
    """The server on the gateway's cpu, once a completion is answered, with the status ``answer``."""
    log = site.log(name)
    with started(argv, log=log, cpus={site.cpus.gateway}, env=env) as process:

        def serves() -> bool:
            if process.poll() is not None:
                raise StartError(f"{name} ended with {process.returncode}:\n{tail(log)}")
            return ask(port) == answer

        try:
            wait_until(serves, seconds=START_SECONDS)
        except TimeoutError:
            raise StartError(f"{name} was not ready in {START_SECONDS:.0f} s:\n{tail(log)}") from None
        yield Running(port=port, pids=settled_processes(process.pid, site.mock))


def tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def run_mock(site: Site) -> Iterator[Running]:
    """The mock itself: what the load generator can reach on this machine with nothing between."""
    port = free_port()
    argv = [str(site.mock), "--port", str(port), "--cpu", str(site.cpus.load), "--model", MODEL]
    with started(argv, log=site.log("mock"), cpus={site.cpus.load}) as process:
        wait_until(lambda: process.poll() is not None or ask(port) == 200, seconds=START_SECONDS)
        if process.poll() is not None:
            raise StartError(f"the mock ended:\n{tail(site.log('mock'))}")
        yield Running(port=port, pids=(process.pid,))


@contextmanager
def run_nginx(site: Site) -> Iterator[Running]:
    """One worker, connections kept alive on both sides, no buffering: the least that nginx does for a stream."""
    port = free_port()
    folder = site.folder / "nginx"
    folder.mkdir(exist_ok=True)
    with run_mock(site) as mock:
        configuration = folder / "nginx.conf"
        text = (SOURCES / "nginx.conf").read_text()
        user = "user root;" if os.geteuid() == 0 else ""
        for word, value in {"@USER@": user, "@FOLDER@": folder, "@PORT@": port, "@MOCK@": mock.port}.items():
            text = text.replace(word, str(value))
        configuration.write_text(text)
        argv = [find_nginx() or "nginx", "-p", str(folder), "-e", "stderr", "-c", str(configuration)]
        with run_server(site, "nginx", argv, port) as running:
            yield running


def find_nginx() -> str | None:
    return shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


@contextmanager
def run_vllm_router(site: Site) -> Iterator[Running]:
    """Its cheapest policy, with one worker."""
    port = free_port()
    with run_mock(site) as mock:
        argv = [str(site.router), "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        argv += ["--worker-urls", f"http://127.0.0.1:{mock.port}", "--worker-startup-check-interval", "1"]
        argv += ["--log-level", "warning", "--prometheus-port", str(free_port())]
        with run_server(site, "vllm-router", argv, port) as running:
            yield running


@contextmanager
def run_llmgw(site: Site) -> Iterator[Running]:
    """The whole product, `llmgw serve`, which starts the mock as the engine of its one model."""
    port = free_port()
    folder = site.folder / "llmgw"
    folder.mkdir(exist_ok=True)
    node = write_yaml(
        folder / "node.yaml",
        {
            "state": str(folder / "state"),
            "cache": str(folder / "cache"),
            "engines": describe_engines(site),
            "models": [describe_model(site, folder)],
        },
    )
    argv = [str(site.llmgw), "serve", "--config", str(node), "--port", str(port)]
    with run_server(site, "llmgw", argv, port, make_environment(folder)) as running:
        yield running


def describe_engines(site: Site) -> dict[str, object]:
    return {"bench": {"bin": str(site.mock)}}


def describe_model(site: Site, folder: Path) -> dict[str, object]:
    weights = folder / "weights.bench"
    weights.write_text("no weights: the mock needs none\n")
    profile = {"name": "mock", "engine": "bench", "args": ["--cpu", str(site.cpus.load)]}
    return {"name": MODEL, "source": str(weights), "scaling": {"min": 1, "max": 1}, "profiles": [profile]}


def write_yaml(path: Path, content: Mapping[str, object]) -> Path:
    path.write_text(json.dumps(content, indent=2))  # JSON is YAML
    return path


def make_environment(folder: Path) -> dict[str, str]:
    """For an llmgw that knows the bench's engine, and nothing of whoever runs the bench."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("LLMGW_") or name.lower().endswith("_proxy"))
    }
    return env | {"PYTHONPATH": str(SOURCES / "plugin"), "HOME": str(folder)}


RECIPES: dict[str, Recipe] = {
    "mock": run_mock,
    "nginx": run_nginx,
    "vllm-router": run_vllm_router,
    "llmgw": run_llmgw,
}


def install_vllm_router() -> Path | None:
    """The program, in an environment of its own that is made once; None, and a line that says why, when it can't be."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmgw-bench"
    environment = home / f"{VLLM_ROUTER.replace('==', '-')}-py{sys.version_info.major}.{sys.version_info.minor}"
    program = environment / "bin" / "vllm-router"
    done = environment / "complete"
    if done.exists():
        return program
    print(f"bench: installing {VLLM_ROUTER} into {environment}", flush=True)
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(environment)],
        [str(environment / "bin" / "pip"), "install", "--quiet", "--only-binary", ":all:", VLLM_ROUTER],
        [str(program), "--help"],
    )
    try:
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as problem:
        output = str(getattr(problem, "stderr", None) or problem).strip().splitlines()
        print(f"bench: vllm-router is left out: {output[-1] if output else problem}", flush=True)
        return None
    done.touch()
    return program
