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
    Cause,
    Command,
    Embedded,
    EngineInfo,
    Health,
    Launch,
    Load,
    LogFact,
    Model,
    ParserFlag,
    ProbeOutput,
    Problem,
    Profile,
    RequestRules,
    SourceKind,
    Task,
    Version,
    hookimpl,
    is_given,
    pin_cards,
    value_of,
)
from llmgw_llamacpp import exits, flags, logs, slots, tasks
from llmgw_llamacpp.help import read_help

# A llama-server reads most settings from LLAMA_ARG_* too, a key from LLAMA_API_KEY, and its part as the child of a
# router from LLAMA_SERVER_*; AIP_* moves its port and paths. What the agent's shell had exported is nobody's choice.
INHERITED = ("LLAMA_", "AIP_")

_OFFLOAD = ("--mmproj-offload", "--no-mmproj-offload")
_UI = ("--ui", "--webui", "--no-ui", "--no-webui")

# "version: 0.1.0-dev (build 10434, commit 7e4c0a9)"; until the middle of 2026 "version: 8672 (3ce7da2)".
_VERSION = re.compile(r"^version: (\S{1,64})(?: \(build (\d{1,9}),)?", re.MULTILINE)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_METRIC = re.compile(r"^llamacpp:(\w+)(?:\{[^}\n]*\})? ([0-9.eE+-]{1,32})\s*$", re.MULTILINE)


@hookimpl
def engine_describe() -> EngineInfo:
    return EngineInfo(
        title="llama.cpp",
        default_binary="llama-server",
        sources=frozenset({SourceKind.FILE}),
        file_suffixes=(".gguf",),
        api_paths=frozenset(
            {
                *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank"),
                *("/v1/responses", "/v1/messages"),
            }
        ),
        tasks=frozenset({Task.CHAT, Task.EMBED, Task.RERANK}),
        cpu=True,
        # As many cards as tp says, the layers shared out among them; --split-mode in args divides each layer instead.
        tensor_parallel=True,
        loras=True,
        projector=True,
        reasoning_parser=True,
        health_path="/health",
        load_path="/metrics",
        context_path="/props",
        stop_signal="SIGTERM",
        stop_grace_seconds=10.0,
        owned_by="llamacpp",
        flag_style=flags.STYLE,
        flag_changes=flags.CHANGES,
    )


@hookimpl
def engine_embedded() -> Embedded:
    return Embedded(module="llmgw_llamacpp.embedded", requires="xllamacpp", install="pip install 'llmgw[demo]'")


@hookimpl
def engine_validate(model: Model, profile: Profile) -> list[Problem]:
    problems = [
        *flags.check(profile.args),
        *flags.check_env(profile.env),
        *slots.check(profile.args, model.context_length),
        *tasks.check(model, profile),
    ]
    if _REPOSITORY.fullmatch(model.source) and not model.source.lower().endswith(".gguf"):
        repo = model.source.partition(":")[0]
        text = f"{model.source} is a repository, and llama.cpp reads one .gguf file: write hf:{repo}/FILE.gguf for one "
        text += "that is fetched, or a path"
        problems.append(Problem(key="source", message=text))
    return problems


@hookimpl
def engine_build_command(launch: Launch) -> Command:
    args = launch.args
    argv = [*launch.program, "--model", launch.source, "--alias", launch.served_name]
    argv += ["--host", launch.host, "--port", str(launch.port), *slots.share(args, launch.context_length)]
    argv += tasks.name_mode(launch)
    if launch.max_output and not is_given(args, flags.STYLE, "--predict", "--n-predict", "-n"):
        argv += ["--predict", str(launch.max_output)]
    if launch.mmproj is not None and not is_given(args, flags.STYLE, "--mmproj", "-mm"):
        argv += ["--mmproj", launch.mmproj]
    argv += [*tasks.name_adapters(launch.loras, args, launch.version), *tasks.name_no_cache(launch)]
    if launch.reasoning_parser is not None and not is_given(args, flags.STYLE, "--reasoning-format"):
        argv += ["--reasoning-format", launch.reasoning_parser]
    argv += _name_cards(launch)
    if launch.threads and not is_given(args, flags.STYLE, "--threads", "-t"):
        argv += ["--threads", str(launch.threads)]
    # What a profile gives by itself is left out: of two, a llama-server warns.
    switches = [("--metrics",), (_name_no_ui(launch.version), *_UI)]
    argv += [names[0] for names in switches if not is_given(args, flags.STYLE, *names)]
    return Command(argv=(*argv, *args), env=_set_cards(launch.gpus), scrub=INHERITED)


@hookimpl
def engine_build_probe(program: tuple[str, ...]) -> tuple[Command, ...]:
    return tuple(Command(argv=(*program, asked), scrub=INHERITED) for asked in ("--version", "--help"))


@hookimpl
def engine_build_request(model: Model) -> RequestRules:
    adapters: dict[str, dict[str, object]] = {
        lora.name: {"lora": [{"id": number, "scale": 1.0}]} for number, lora in enumerate(model.loras)
    }
    # Said aloud for the model itself too: a body without the field keeps what a slot's cache has of another adapter.
    # With the field a slot is cleared when the adapter changes.
    base: dict[str, object] = {"lora": [{"id": 0, "scale": 0.0}]} if adapters else {}
    return RequestRules(usage_in_streams=True, loras=adapters, base=base)


@hookimpl
def engine_name_parser(profile: Profile) -> ParserFlag:
    # It reads the calls by the chat template: one that knows tools is what makes it parse them.
    if is_given(profile.args, flags.STYLE, "--no-jinja"):
        return ParserFlag(flag="--jinja", given="--no-jinja")
    given = value_of(profile.args, flags.STYLE, "--chat-template-file", "--chat-template")
    return ParserFlag(flag="--chat-template-file", given=given)


@hookimpl
def engine_read_probe(output: ProbeOutput, outputs: tuple[ProbeOutput, ...]) -> Version | None:
    # Printed on stderr. The build number is 1 or 0 in what packagers build: the first word is the version then.
    found = _VERSION.search(output.stderr) or _VERSION.search(output.stdout)
    if found is None or output.code != 0:
        return None
    number = found[2] if found[2] and int(found[2]) > 1 else found[1]
    helped = [each for each in outputs[1:2] if each.code == 0]
    return Version(number=number, flags=read_help(helped[0].stdout) if helped else ())


@hookimpl
def engine_read_health(status: int | None, body: str) -> Health | None:
    if status is None or status == 503:
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
def engine_read_exit(lines: tuple[str, ...], code: int | None, signal: int | None) -> Cause | None:
    return exits.read(lines, code, signal)


@hookimpl
def engine_read_context(text: str) -> int | None:
    # Of one slot, after all that divides and caps it.
    try:
        tokens = json.loads(text)["default_generation_settings"]["n_ctx"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return tokens if type(tokens) is int and tokens > 0 else None


@hookimpl
def engine_read_load(text: str) -> Load | None:
    found = {name: float(value) for name, value in _METRIC.findall(text) if _is_number(value)}
    running, waiting = found.get("requests_processing"), found.get("requests_deferred")
    if running is None and waiting is None:
        return None
    computed, cached = found.get("prompt_tokens_total"), found.get("prompt_tokens_cached_total")
    return Load(
        running=_count(running),
        waiting=_count(waiting),
        # Only builds until the middle of 2025 tell how full the cache is.
        cache_used=_share(found.get("kv_cache_usage_ratio")),
        # The one counts what had to be computed, so what came in is known only beside the other.
        prompt_tokens=int(computed + cached) if computed is not None and cached is not None else None,
        cached_tokens=_count(cached),
        steps=_count(found.get("n_decode_total")),
    )


def _name_no_ui(version: Version | None) -> str:
    # --no-webui is the name in every release until now, and --no-ui the one that is to stay.
    return "--no-ui" if version is not None and version.find("--no-ui") is not None else "--no-webui"


def _name_cards(launch: Launch) -> tuple[str, ...]:
    if launch.gpus == ():
        # Whatever kind of cards this build is for.
        device = () if is_given(launch.args, flags.STYLE, "--device", "-dev") else ("--device", "none")
        projector = launch.mmproj is not None and not is_given(launch.args, flags.STYLE, *_OFFLOAD)
        return (*device, "--no-mmproj-offload") if projector else device
    if launch.tp > 1 and not is_given(launch.args, flags.STYLE, "--split-mode", "-sm"):
        return ("--split-mode", "layer")
    return ()


def _set_cards(gpus: tuple[int, ...] | None) -> dict[str, str]:
    # Else a failed assertion starts gdb on the process, and its frames bury the line that names the cause.
    env = {"GGML_NO_BACKTRACE": "1", **pin_cards(gpus)}
    return env | {"GGML_VK_VISIBLE_DEVICES": ""} if gpus == () else env


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
