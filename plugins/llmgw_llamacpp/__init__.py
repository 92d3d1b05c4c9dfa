"""The engine llama.cpp: how ``llama-server`` is started, and what its answers and log lines mean.

The same flags start the embedded program (``embedded.py``), which serves without a binary.
"""

from __future__ import annotations

import json
import re

from llmgw.engines import (
    BROKEN,
    LOADING,
    READY,
    Command,
    Embedded,
    EngineInfo,
    Health,
    Launch,
    Load,
    LogFact,
    Model,
    ProbeOutput,
    Problem,
    Profile,
    RequestRules,
    SourceKind,
    Version,
    hookimpl,
)
from llmgw_llamacpp import flags, logs, slots

# A llama-server reads most settings from LLAMA_ARG_* too, a key from LLAMA_API_KEY, and its part as the child of a
# router from LLAMA_SERVER_*; AIP_* moves its port and paths. What the agent's shell had exported is nobody's choice.
INHERITED = ("LLAMA_", "AIP_")

_VERSION = re.compile(r"^version: (\S+)", re.MULTILINE)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_METRIC = re.compile(r"^llamacpp:(\w+)(?:\{[^}\n]*\})? ([0-9.eE+-]{1,32})\s*$", re.MULTILINE)


@hookimpl
def engine_describe() -> EngineInfo:
    return EngineInfo(
        title="llama.cpp",
        default_binary="llama-server",
        sources=frozenset({SourceKind.FILE}),
        file_suffixes=(".gguf",),
        api_paths=frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"}),
        cpu=True,
        health_path="/health",
        load_path="/metrics",
        stop_signal="SIGTERM",
        stop_grace_seconds=10.0,
    )


@hookimpl
def engine_embedded() -> Embedded:
    return Embedded(module="llmgw_llamacpp.embedded", requires="xllamacpp", install="pip install 'llmgw[demo]'")


@hookimpl
def engine_validate(model: Model, profile: Profile) -> list[Problem]:
    problems = [*flags.check(profile.args), *slots.check(profile.args, model.context_length)]
    if _REPOSITORY.fullmatch(model.source) and not model.source.lower().endswith(".gguf"):
        text = f"{model.source} is a repository, and llama.cpp reads one .gguf file: download it, and write its path"
        problems.append(Problem(key="source", message=text))
    return problems


@hookimpl
def engine_build_command(launch: Launch) -> Command:
    argv = [*launch.program, "--model", launch.source, "--alias", launch.served_name]
    argv += ["--host", launch.host, "--port", str(launch.port), *slots.share(launch.args, launch.context_length)]
    if launch.threads and not flags.is_given(launch.args, "--threads", "-t"):
        argv += ["--threads", str(launch.threads)]
    # --no-webui is the name of this switch in every version; the newer --no-ui is not.
    argv += ["--metrics", "--no-webui", *launch.args]
    # Else a failed assertion starts gdb on the process, and its frames bury the line that names the cause.
    env = {"GGML_NO_BACKTRACE": "1"}
    if launch.gpus:
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, launch.gpus))}
    return Command(argv=tuple(argv), env=env, scrub=INHERITED)


@hookimpl
def engine_build_probe(program: tuple[str, ...]) -> Command:
    return Command(argv=(*program, "--version"), scrub=INHERITED)


@hookimpl
def engine_build_request() -> RequestRules:
    return RequestRules(usage_in_streams=True)


@hookimpl
def engine_read_probe(output: ProbeOutput) -> Version | None:
    # Printed on stderr. The build number beside it is 1 in what packagers build: the first word alone is the version.
    found = _VERSION.search(output.stderr) or _VERSION.search(output.stdout)
    return Version(number=found[1]) if found and output.code == 0 else None


@hookimpl
def engine_read_health(status: int, body: str) -> Health | None:
    if status == 503:
        return LOADING
    if status == 200:
        return (
            READY if _says_ok(body) else BROKEN("its /health is not llama-server's: does something else hold the port?")
        )
    if status in (401, 403, 404):
        return BROKEN(f"/health answers {status}: is this llama-server, with its paths and without a key?")
    return None


@hookimpl
def engine_read_log(line: str) -> LogFact | None:
    return logs.read(line)


@hookimpl
def engine_read_load(text: str) -> Load | None:
    found = {name: float(value) for name, value in _METRIC.findall(text) if _is_number(value)}
    running, waiting = found.get("requests_processing"), found.get("requests_deferred")
    if running is None and waiting is None:
        return None
    # Only builds until the middle of 2025 tell how full the cache is.
    return Load(running=_count(running), waiting=_count(waiting), cache_used=_share(found.get("kv_cache_usage_ratio")))


def _says_ok(body: str) -> bool:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and answer.get("status") == "ok"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\+?\d{1,15}(\.\d*)?([eE][+-]?\d{1,2})?", text) is not None


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _share(value: float | None) -> float | None:
    return None if value is None else min(value, 1.0)
