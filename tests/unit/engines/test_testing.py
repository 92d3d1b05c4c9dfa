"""The conformance kit: that it fails where a plugin is wrong, method by method."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llmgw.engines import (
    BROKEN,
    LOADING,
    READY,
    Cause,
    CauseKind,
    Command,
    Embedded,
    EngineInfo,
    Flag,
    FlagChange,
    FlagStyle,
    Health,
    HealthState,
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
    diagnose,
    find_owned,
    hookimpl,
    read_argparse_help,
)
from llmgw.engines.testing import EngineContract, flags_in, read_flags

INFO = EngineInfo(
    title="Tiny",
    default_binary="tiny",
    sources=frozenset({SourceKind.FILE}),
    file_suffixes=(".tiny",),
    api_paths=frozenset({"/v1/completions", "/v1/embeddings"}),
    tasks=frozenset({Task.CHAT, Task.EMBED}),
    tensor_parallel=True,
    pipeline_parallel=True,
    span_nodes=True,
    loras=True,
    projector=True,
    tool_parser=True,
    reasoning_parser=True,
    flag_changes=(FlagChange(flag="--weights", gone_in="0.5", instead="--model"),),
)
OWNED = dict.fromkeys(("--host", "--port", "--model", "--name"), "the launch")
MORE = (
    "--context",
    "--projector",
    "--lora",
    "--parse-tools",
    "--parse-thoughts",
    "--tp",
    "--pp",
    "--nodes",
    "--rank",
    "--meet",
)
PASSED = frozenset({*OWNED, *MORE, "--headless", "--embed", "--eager"})
NEWER = PASSED | {"--quiet"}


def words_of(launch: Launch) -> list[str]:
    """The flags of a right command, by the facts of the launch."""
    words = ["--model", launch.source]
    if launch.rank == 0:
        words += ["--host", launch.host, "--port", str(launch.port), "--name", launch.served_name]
    else:
        words += ["--headless"]
    words += ["--context", str(launch.context_length)] if launch.context_length and launch.rank == 0 else []
    words += ["--embed"] if launch.task is Task.EMBED else []
    # A newer release has one more, and an old one is not given it.
    words += ["--quiet"] if launch.version is not None and launch.version.find("--quiet") else []
    words += ["--eager"] if "--eager" not in launch.args else []
    words += ["--projector", launch.mmproj] if launch.mmproj is not None else []
    words += ["--lora", ",".join(lora.source for lora in launch.loras)] if launch.loras else []
    words += ["--parse-tools", launch.tool_parser] if launch.tool_parser is not None else []
    words += ["--parse-thoughts", launch.reasoning_parser] if launch.reasoning_parser is not None else []
    words += ["--tp", str(launch.tp)] if launch.tp > 1 else []
    words += ["--pp", str(launch.pp)] if launch.pp > 1 else []
    if launch.count > 1:
        words += ["--nodes", str(launch.count), "--rank", str(launch.rank), "--meet", launch.rendezvous or ""]
    return words


def environment_of(launch: Launch) -> dict[str, str]:
    env = {}
    if launch.gpus is not None:
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, launch.gpus))}
    if launch.fabric is not None:
        env |= {"NCCL_SOCKET_IFNAME": launch.fabric.interface, "NCCL_IB_HCA": ",".join(launch.fabric.hcas)}
    return env


def good_command(launch: Launch) -> Command:
    return Command(
        argv=(*launch.program, *words_of(launch), *launch.args),
        env=environment_of(launch),
        defaults={"TINY_CACHE": launch.cache} if launch.cache is not None else {},
        scrub=("TINY_",),
        serves=launch.rank == 0,
    )


def good_validate(profile: Profile, version: Version | None) -> list[Problem]:
    found = find_owned(profile.args, OWNED, FlagStyle())
    # A release that has no headless ranks, say, is refused for what it can't do once its version is known.
    too_old = version is not None and version.number == "0.1" and profile.tp > 3
    return [*found, *([Problem(key="tp", message="0.1 has no groups")] if too_old else [])]


def good_request(model: Model) -> RequestRules:
    return RequestRules(loras={lora.name: {"model": lora.name} for lora in model.loras})


def good_parser(profile: Profile) -> ParserFlag:
    return ParserFlag(flag="--parse-tools", given=profile.tool_parser)


def good_probe(outputs: tuple[ProbeOutput, ...]) -> Version | None:
    found = re.match(r"tiny (\S+)", outputs[0].stdout)
    return Version(number=found[1], flags=read_argparse_help(outputs[-1].stdout)) if found else None


def good_health(status: int | None, body: str) -> Health:
    return READY if status == 200 else BROKEN("it said so") if body == "broken" else LOADING


def good_exit(lines: tuple[str, ...], code: int | None, signal: int | None) -> Cause | None:
    return diagnose(lines, code, signal)


def good_load(text: str) -> Load | None:
    found = dict(re.findall(r"^tiny_(\w+) (\d{1,9}(?:\.\d{1,9})?)$", text, re.MULTILINE))
    if "running" not in found:
        return None
    return Load(running=int(float(found["running"])), cache_used=min(1.0, float(found.get("used_percent", 0)) / 100))


def good_context(text: str) -> int | None:
    found = re.search(r'"tokens": ([1-9]\d{0,8})\b(?!\.)', text)
    return int(found[1]) if found else None


# What the server answers.
METRICS = "# TYPE tiny_running gauge\ntiny_running 3\ntiny_used_percent 37.5\n"
CONTEXTS = '{"model": "tiny", "tokens": 4096}'


GOOD: dict[str, Callable[..., object] | None] = {
    "engine_describe": lambda: INFO,
    "engine_validate": good_validate,
    "engine_build_command": good_command,
    "engine_build_probe": lambda program: (
        Command(argv=(*program, "--version"), scrub=("TINY_",)),
        Command(argv=(*program, "--help"), scrub=("TINY_",)),
    ),
    "engine_build_request": good_request,
    "engine_name_parser": good_parser,
    "engine_read_probe": good_probe,
    "engine_read_health": good_health,
    "engine_read_log": lambda line: LogFact(progress="loading") if "load" in line else None,
    "engine_read_exit": good_exit,
    "engine_read_load": good_load,
    "engine_read_context": good_context,
}


def contract(**hooks: Any) -> EngineContract:
    """The contract over a plugin that is right but for ``hooks``."""
    marked = {name: hookimpl(hook) for name, hook in (GOOD | hooks).items() if hook is not None}
    checked = EngineContract()
    checked.plugin = SimpleNamespace(**marked)  # type: ignore[misc]
    checked.flag_tables = {"1.0": PASSED, "2.0": NEWER}  # type: ignore[misc]
    checked.owned = ("--name",)  # type: ignore[misc]
    checked.inherited = ("TINY_PORT",)  # type: ignore[misc]
    checked.log = ("MemoryError", "loading")  # type: ignore[misc]
    checked.metrics = (METRICS,)  # type: ignore[misc]
    checked.contexts = (CONTEXTS,)  # type: ignore[misc]
    checked.launches = (replace(EngineContract.launch, args=("--eager",)),)  # type: ignore[misc]
    return checked


def building(**changes: Callable[[Launch, Command], object]) -> dict[str, Any]:
    """The right command, but for these of its facts."""

    def build(launch: Launch) -> Command:
        command = good_command(launch)
        return replace(command, **{name: change(launch, command) for name, change in changes.items()})

    return {"engine_build_command": build}


def without(*flags: str) -> dict[str, Any]:
    """The right command, but for flags that are left out with what follows them."""

    def build(launch: Launch, command: Command) -> tuple[str, ...]:
        kept: list[str] = []
        leaving = False
        own = len(command.argv) - len(launch.args)
        for word in command.argv[:own]:
            leaving = word in flags if word.startswith("--") else leaving
            kept += [] if leaving else [word]
        return (*kept, *launch.args)

    return building(argv=build)


def fails(checked: EngineContract, test: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        getattr(checked, test)()


TESTS = [name for name in dir(EngineContract) if name.startswith("test_")]


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
def test_a_plugin_that_is_right_passes(test: str) -> None:
    getattr(contract(), test)()


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
def test_a_plugin_of_three_hooks_passes(test: str) -> None:
    """The least that a plugin can be: what it does not answer is not held against it."""

    def build(launch: Launch) -> Command:
        argv = (
            *launch.program,
            "-m",
            launch.source,
            "-n",
            launch.served_name,
            "-h",
            launch.host,
            "-p",
            str(launch.port),
        )
        return Command(argv=(*argv, *launch.args), env=environment_of(launch))

    plain = replace(EngineContract.launch, args=())
    info = EngineInfo(
        title="T",
        default_binary="t",
        sources=frozenset({SourceKind.REPOSITORY}),
        api_paths=frozenset({"/v1/completions"}),
    )
    owned = {"-m": "a", "-n": "b", "-h": "c", "-p": "d"}
    checked = EngineContract()
    checked.launch = plain  # type: ignore[misc]
    checked.takes_context = False  # type: ignore[misc]
    hooks = {
        "engine_describe": lambda: info,
        "engine_build_command": build,
        "engine_read_health": lambda status: READY if status == 200 else LOADING,
        "engine_validate": lambda profile: find_owned(profile.args, owned, FlagStyle()),
    }
    checked.plugin = SimpleNamespace(**{name: hookimpl(hook) for name, hook in hooks.items()})  # type: ignore[misc]
    getattr(checked, test)()


def interrupted(launch: Launch, command: Command) -> tuple[str, ...]:
    return (*command.argv, "--late")


def addressed(*words: str) -> dict[str, Any]:
    """The right command, with these words in the place of host and port."""

    def build(launch: Launch) -> Command:
        command = good_command(launch)
        at = command.argv.index("--host") if launch.rank == 0 else 0
        return replace(command, argv=(*command.argv[:at], *words, *command.argv[at + 4 :])) if at else command

    return {"engine_build_command": build}


def with_context(read: Callable[[Launch], int | None]) -> dict[str, Any]:
    """The right command, with another number of tokens."""
    return {"engine_build_command": lambda launch: good_command(replace(launch, context_length=read(launch)))}


def rules_of(
    model: Model, fields: Callable[[str], dict[str, object]], base: dict[str, object] | None = None
) -> RequestRules:
    return RequestRules(loras={lora.name: fields(lora.name) for lora in model.loras}, base=base or {})


def read_used(text: str, pattern: str, convert: Callable[[float], float] = float) -> Load | None:
    found = re.search(pattern, text)
    return Load(running=1, cache_used=convert(float(found[1]))) if found else Load(running=1)


ODD_LINE = Cause(kind=CauseKind.OTHER, line="two\nlines")

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("test_the_registry_takes_it", {"engine_read_health": None}, "engine_read_health missing"),
    *(
        ("test_it_describes_itself_in_full", {"engine_describe": lambda change=change: replace(INFO, **change)}, words)
        for change, words in (
            ({"title": ""}, "title"),
            ({"file_suffixes": ()}, "file_suffixes"),
            ({"file_suffixes": ("tiny",)}, "begin with a dot"),
            ({"api_paths": frozenset()}, "api_paths"),
            ({"api_paths": frozenset({"/generate", "/v1/embeddings"})}, "task chat is asked for at"),
            ({"api_paths": frozenset({"/v1/completions"})}, "task embed is asked for at"),
            ({"api_paths": INFO.api_paths, "tasks": frozenset(Task)}, "task rerank is asked for at"),
            ({"health_path": "health"}, "begin with a slash"),
            ({"load_path": "metrics"}, "begin with a slash"),
            ({"stop_signal": "SIGNOTHING"}, "no signal"),
            ({"stop_grace_seconds": 0.0}, "stop_grace_seconds"),
            ({"probe_seconds": 0.0}, "probe_seconds"),
            ({"tasks": frozenset()}, "tasks are Task"),
            ({"tasks": frozenset({"sing"})}, "tasks are Task"),
            ({"tensor_parallel": False, "pipeline_parallel": False}, "span_nodes needs"),
        )
    ),
    *(
        (
            "test_its_flag_changes_are_of_flags",
            {"engine_describe": lambda change=change: replace(INFO, flag_changes=(change,))},
            words,
        )
        for change, words in (
            ("--old", "flag_changes holds"),
            (FlagChange(flag="old", gone_in="1"), "has its dashes"),
            (FlagChange(flag="--old", gone_in="1", instead="new"), "has its dashes"),
            (FlagChange(flag="--old", gone_in="lately"), "gone_in is a release"),
        )
    ),
    (
        "test_its_embedded_program_exists",
        {"engine_embedded": lambda: Embedded(module="no_such_module_of_tiny", requires="tiny", install="pip")},
        "there is no module",
    ),
    (
        "test_its_embedded_program_exists",
        {"engine_embedded": lambda: Embedded(module="json", requires="json", install="")},
        "requires and install",
    ),
    *(
        ("test_its_command_carries_every_fact", without(flag), "is not passed")
        for flag in ("--host", "--port", "--model", "--name")
    ),
    (
        "test_its_command_carries_every_fact",
        building(argv=lambda launch, command: ("sudo", *command.argv)),
        "the program comes first",
    ),
    (
        "test_its_command_carries_every_fact",
        building(serves=lambda launch, command: True),
        "rank 1 of 2: '127.0.0.1' is not passed",
    ),
    *(
        ("test_its_command_carries_every_fact", addressed(*words), "is not passed")
        for words in (("--bind", "127.0.0.1"), ("--bind", "127.0.0.1:1"), ("--bind=127.0.0.1:187650",))
    ),
    *(
        ("test_its_command_gives_a_request_the_context_that_is_promised", hooks, words)
        for hooks, words in (
            (without("--context"), "the launch, context_length: '7321' is not passed"),
            (with_context(lambda launch: (launch.context_length or 0) * 2), "'7321' is not passed"),
            (with_context(lambda launch: 7321), "'11743' is not passed"),
            (with_context(lambda launch: 0 if launch.mmproj else launch.context_length), "a projector, context_length"),
        )
    ),
    ("test_the_args_of_a_profile_come_last", building(argv=interrupted), "args come last"),
    *(
        ("test_its_command_carries_what_the_definition_asks_for", without(flag), "is not passed")
        for flag in ("--projector", "--lora", "--parse-tools", "--parse-thoughts")
    ),
    *(
        ("test_its_command_carries_the_shape_of_a_replica", without(flag), words)
        for flag, words in (
            ("--tp", "tp 3 makes no difference"),
            ("--pp", "pp 3 makes no difference"),
            ("--meet", "'192.0.2.1' is not passed"),
        )
    ),
    (
        "test_its_command_carries_the_shape_of_a_replica",
        building(
            argv=lambda launch, command: good_command(replace(launch, rank=0)).argv, serves=lambda launch, command: True
        ),
        "which one it is",
    ),
    (
        "test_its_command_carries_the_shape_of_a_replica",
        building(serves=lambda launch, command: launch.count == 1),
        "the first rank of a group answers HTTP",
    ),
    (
        "test_its_command_carries_the_shape_of_a_replica",
        building(argv=lambda launch, command: good_command(replace(launch, count=1)).argv),
        "count 2 makes no difference",
    ),
    *(
        (
            "test_a_group_speaks_over_its_fabric",
            building(
                env=lambda launch, command, gone=gone: {
                    name: value for name, value in command.env.items() if name != gone
                }
            ),
            "is not passed",
        )
        for gone in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
    ),
    ("test_an_adapter_has_its_rules", {"engine_build_request": None}, "the rules are for"),
    ("test_an_adapter_has_its_rules", {"engine_build_request": lambda: RequestRules(loras={"x": {}})}, "rules are for"),
    ("test_an_adapter_has_its_rules", {"engine_build_request": lambda: "rules"}, "engine_build_request returned"),
    (
        "test_an_adapter_has_its_rules",
        {"engine_build_request": lambda model: RequestRules(loras={lora.name: {"a": {1}} for lora in model.loras})},
        "not JSON serializable",
    ),
    *(
        ("test_an_adapter_has_its_rules", {"engine_build_request": lambda model, rules=rules: rules(model)}, words)
        for rules, words in (
            (lambda model: rules_of(model, lambda name: {"model": "x"}), "'sql' and 'prose' are asked for alike"),
            (lambda model: rules_of(model, lambda name: {}), "asked for alike"),
            (lambda model: rules_of(model, lambda name: {"model": model.name}), "asked for alike"),
            (
                lambda model: rules_of(model, lambda name: {"adapter": name}),
                "'sql' is told by .'adapter'., and base does not say what ends it",
            ),
            (
                lambda model: rules_of(model, lambda name: {"adapter": name, "model": model.name}, {"other": 1}),
                "base does not say what ends it",
            ),
            (
                lambda model: rules_of(model, lambda name: {"adapter": name}, {"adapter": "prose"}),
                "'prose' and the model itself .base. are asked for alike",
            ),
            (
                lambda model: rules_of(model, lambda name: {"model": name}, {"model": "sql"}),
                "'sql' and the model itself .base. are asked for alike",
            ),
        )
    ),
    ("test_cards_are_pinned", building(env=lambda launch, command: {}), "gpus=\\(\\) is no GPU at all"),
    (
        "test_cards_are_pinned",
        building(env=lambda launch, command: command.env if launch.gpus == () else {}),
        "'2' is not passed",
    ),
    (
        "test_cards_are_pinned",
        building(env=lambda launch, command: command.env | {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}),
        "needs CUDA_DEVICE_ORDER",
    ),
    *(
        ("test_its_environment_is_text", building(**{kind: lambda launch, command, env=env: env}), words)
        for kind in ("env", "defaults")
        for env, words in (
            ({"A": 1}, "not text to text"),
            ({1: "a"}, "not text to text"),
            ({"A": "\0"}, "not text to text"),
            ({"A=B": "c"}, "no variables"),
            ({"": "c"}, "no variables"),
            ((("A", "b"),), "an environment is a dict"),
        )
    ),
    (
        "test_its_environment_is_text",
        building(env=lambda launch, command: {"A": "1"}, defaults=lambda launch, command: {"A": "2"}),
        "both set and a default",
    ),
    (
        "test_its_environment_is_text",
        {"engine_build_probe": lambda program: Command(argv=(*program, "-v"), env={"A": 1})},  # type: ignore[dict-item]
        "a probe: not text to text",
    ),
    *(
        ("test_inherited_settings_are_scrubbed", building(scrub=lambda launch, command, scrub=scrub: scrub), words)
        for scrub, words in (
            ((), "inherits"),
            (("OTHER_",), "inherits"),
            (("TINY_", ""), "an empty prefix"),
            (("TINY_", "PA"), "takes away"),
            (["TINY_"], "a tuple of prefixes"),
        )
    ),
    (
        "test_inherited_settings_are_scrubbed",
        {"engine_build_probe": lambda program: Command(argv=(*program, "--version"))},
        "a probe: inherits",
    ),
    (
        "test_its_command_has_only_flags_that_the_engine_knows",
        building(argv=lambda launch, command: (*launch.program, "--newest", *words_of(launch), *launch.args)),
        "version 1.0, the launch: the engine does not know .'--newest'",
    ),
    (
        "test_its_command_has_only_flags_that_the_engine_knows",
        building(argv=lambda launch, command: (*launch.program, "--quiet", *words_of(launch), *launch.args)),
        "version 1.0, the launch: the engine does not know .'--quiet'",
    ),
    (
        "test_its_command_has_only_flags_that_the_engine_knows",
        building(
            argv=lambda launch, command: (
                *(launch.program if launch.version else (*launch.program, "--blind")),
                *words_of(launch),
                *launch.args,
            )
        ),
        "any version, the launch: the engine does not know .'--blind'",
    ),
    (
        "test_no_flag_is_given_twice",
        building(argv=lambda launch, command: (*launch.program, *words_of(launch), "--port", "1", *launch.args)),
        "twice: .'--port'",
    ),
    (
        "test_no_flag_is_given_twice",
        building(argv=lambda launch, command: (*launch.program, *words_of(replace(launch, args=())), *launch.args)),
        "launch 0: twice: .'--eager'",
    ),
    ("test_args_may_not_repeat_a_flag_of_the_house", {"engine_validate": None}, "passed"),
    ("test_args_may_not_repeat_a_flag_of_the_house", {"engine_validate": lambda: "bad"}, "engine_validate returned"),
    ("test_args_may_not_repeat_a_flag_of_the_house", {"engine_validate": lambda: ["bad"]}, "not all problems"),
    (
        "test_args_may_not_repeat_a_flag_of_the_house",
        {
            "engine_validate": lambda profile: good_validate(
                replace(profile, args=profile.args[1:2] and profile.args), None
            )
        },
        "passed",
    ),
    (
        "test_it_takes_what_it_says_it_can",
        {"engine_validate": lambda model: [Problem(key="loras", message="none")] if model.loras else []},
        "adapters: ",
    ),
    (
        "test_its_probes_run_the_program",
        {"engine_build_probe": lambda: Command(argv=("/usr/bin/other", "--version"))},
        "another program",
    ),
    (
        "test_its_probes_run_the_program",
        {"engine_build_probe": lambda program: (Command(argv=(*program, "-v")), Command(argv=program))},
        "would start the engine",
    ),
    ("test_its_probes_run_the_program", {"engine_build_probe": lambda: ("tiny -v",)}, "engine_build_probe returned"),
    (
        "test_a_connection_that_is_refused_is_never_ready",
        {"engine_read_health": lambda: READY},
        "a status of None gave",
    ),
    (
        "test_building_is_pure_and_total",
        building(argv=lambda launch, command: (*command.argv[: 1 // launch.port], *command.argv)),
        "division",
    ),
    ("test_building_is_pure_and_total", building(argv=lambda launch, command: list(command.argv)), "argv is a tuple"),
    ("test_building_is_pure_and_total", {"engine_build_command": lambda: "tiny"}, "engine_build_command returned"),
    (
        "test_validating_is_pure_and_total",
        {"engine_validate": lambda version: [] if version is None else [int(version.number)]},
        "invalid literal",
    ),
    ("test_validating_is_pure_and_total", {"engine_build_request": lambda profile: profile.args[0]}, "out of range"),
    ("test_validating_is_pure_and_total", {"engine_build_request": lambda: "rules"}, "engine_build_request returned"),
    ("test_naming_the_parser_is_pure_and_total", {"engine_name_parser": lambda: "--p"}, "engine_name_parser returned"),
    (
        "test_naming_the_parser_is_pure_and_total",
        {"engine_name_parser": lambda: ParserFlag(flag="parser")},
        "a flag has its dashes",
    ),
    (
        "test_naming_the_parser_is_pure_and_total",
        {"engine_name_parser": lambda: ParserFlag(flag="--parser")},
        "some_tool_parser is given, not None",
    ),
    *(
        ("test_reading_a_probe_is_pure_and_total", {"engine_read_probe": hook}, words)
        for hook, words in (
            (lambda output: output.stdout[0], "out of range"),
            (lambda outputs: Version(number=outputs[1].stdout), "out of range"),
            (lambda: "1.0", "engine_read_probe returned"),
            (lambda: Version(number=""), "a number in one line"),
            (lambda: Version(number="1", flags=[]), "flags are a tuple"),  # type: ignore[arg-type]
            (lambda: Version(number="1", flags=(Flag(names=()),)), "no flags"),
        )
    ),
    *(
        ("test_reading_health_is_pure_and_total", {"engine_read_health": hook}, words)
        for hook, words in (
            (lambda: Health(state=HealthState.BROKEN), "BROKEN carries its reason"),
            (lambda: "ready", "engine_read_health returned"),
            (lambda status: READY if status >= 200 else LOADING, "not supported between"),
        )
    ),
    *(
        ("test_reading_a_log_is_pure_and_total", {"engine_read_log": hook}, words)
        for hook, words in (
            (lambda line: None if line else line[0], "out of range"),
            (lambda line: LogFact(progress=line), "one line"),
            (lambda: "progress", "engine_read_log returned"),
        )
    ),
    *(
        ("test_reading_an_exit_is_pure_and_total", {"engine_read_exit": hook}, words)
        for hook, words in (
            (lambda lines: lines[0], "out of range"),
            (lambda lines: lines and None, "engine_read_exit returned"),
            (lambda: "oom", "engine_read_exit returned"),
            (lambda: ODD_LINE, "one line"),
            (lambda: Cause(kind=CauseKind.OTHER, line=""), "one line"),
            (lambda: Cause(kind=CauseKind.OTHER, line="x", remedy=""), "one line"),
            (lambda: Cause(kind="oom", line="x"), "is no CauseKind"),  # type: ignore[arg-type]
            (lambda code: {None: None, 1: None}[code], r"code=0"),
            (lambda signal: {None: None}[signal], r"number=0"),
        )
    ),
    *(
        ("test_reading_the_context_is_pure_and_total", {"engine_read_context": hook}, words)
        for hook, words in (
            (lambda: 0, "above 0"),
            (lambda: True, "above 0"),
            (lambda: "512", "above 0"),
            (lambda text: int(f"{text}x") if text else None, "invalid literal"),
            (lambda: None, "nothing is read in"),
            (lambda text: int(text[30:32]) if "tokens" in text else None, "invalid literal"),
        )
    ),
    *(
        ("test_reading_the_load_is_pure_and_total", {"engine_read_load": hook}, words)
        for hook, words in (
            (lambda: Load(running=-1), "below 0"),
            (lambda: Load(waiting=-1), "below 0"),
            (lambda: Load(prompt_tokens=-1), "below 0"),
            (lambda: Load(cached_tokens=-1), "below 0"),
            (lambda: Load(steps=-1), "below 0"),
            (lambda: Load(steps=1.5), "no whole number"),  # type: ignore[arg-type]
            (lambda: Load(cache_used=1.5), "a share is 0 to 1"),
            (lambda: Load(cache_used=float("nan")), "a share is 0 to 1|the same question"),
            (lambda: "busy", "engine_read_load returned"),
            (lambda text: Load(running=int(text)), "invalid literal"),
            (lambda text: None, "nothing is read in"),
            (lambda text: Load() if "tiny" in text else None, "nothing is read in"),
            # Right over all that is made up, and a percentage where a share belongs.
            (lambda text: read_used(text, r"tiny_used_percent (37\.5)"), "a share is 0 to 1"),
            (lambda text: read_used(text, r"tiny_running (1e999)", int), "infinity"),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("test", "hooks", "words"), WRONG, ids=[f"{test}-{words}" for test, _, words in WRONG])
def test_a_plugin_that_is_wrong_fails(test: str, hooks: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words) as failed:
        getattr(contract(**hooks), test)()
    assert not isinstance(failed.value, TypeError) or "supported between" in words or "JSON" in words


def test_every_test_of_the_kit_can_fail() -> None:
    assert {test for test, _, _ in WRONG} == set(TESTS)


@pytest.mark.parametrize(
    ("test", "hook"),
    [
        ("test_building_is_pure_and_total", "engine_build_command"),
        ("test_validating_is_pure_and_total", "engine_validate"),
        ("test_validating_is_pure_and_total", "engine_build_request"),
        ("test_naming_the_parser_is_pure_and_total", "engine_name_parser"),
        ("test_reading_a_probe_is_pure_and_total", "engine_read_probe"),
        ("test_reading_health_is_pure_and_total", "engine_read_health"),
        ("test_reading_a_log_is_pure_and_total", "engine_read_log"),
        ("test_reading_an_exit_is_pure_and_total", "engine_read_exit"),
        ("test_reading_the_context_is_pure_and_total", "engine_read_context"),
        ("test_reading_the_load_is_pure_and_total", "engine_read_load"),
    ],
)
def test_a_hook_with_a_memory_fails(test: str, hook: str) -> None:
    counter = itertools.count()
    answers: dict[str, Callable[[int], object]] = {
        "engine_build_command": lambda number: Command(argv=(str(number),)),
        "engine_validate": lambda number: [Problem(key="args", message=str(number))],
        "engine_build_request": lambda number: RequestRules(loras={str(number): {}}),
        "engine_name_parser": lambda number: ParserFlag(flag=f"--p{number}"),
        "engine_read_probe": lambda number: Version(number=str(number)),
        "engine_read_health": lambda number: BROKEN(str(number)),
        "engine_read_log": lambda number: LogFact(progress=str(number)),
        "engine_read_exit": lambda number: Cause(kind=CauseKind.OTHER, line=str(number)),
        "engine_read_context": lambda number: number + 1,
        "engine_read_load": lambda number: Load(running=number),
    }
    fails(contract(**{hook: lambda: answers[hook](next(counter))}), test, "the same question got")


def test_what_an_old_release_cannot_do_is_no_unknown_flag() -> None:
    """A plugin that refuses it by version is not asked for its command."""
    tables = {"0.1": PASSED - {"--nodes", "--rank", "--meet", "--headless"}, "1.0": PASSED}
    checked = contract()
    checked.flag_tables = tables  # type: ignore[misc]
    checked.test_its_command_has_only_flags_that_the_engine_knows()
    careless = contract(engine_validate=None)
    careless.flag_tables = tables  # type: ignore[misc]
    words = "version 0.1, rank 0 of 2: the engine does not know .'--meet'"
    fails(careless, "test_its_command_has_only_flags_that_the_engine_knows", words)


def test_a_flag_that_may_be_repeated_may_be_repeated() -> None:
    hooks = building(argv=lambda launch, command: (*launch.program, "--port", "1", *words_of(launch), *launch.args))
    checked = contract(**hooks)
    checked.repeatable = ("--port",)  # type: ignore[misc]
    checked.test_no_flag_is_given_twice()


@pytest.mark.parametrize(
    "words",
    [
        ("--bind=127.0.0.1:18765",),
        ("--bind", "127.0.0.1:18765"),
        ("--bind", "tcp://127.0.0.1:18765"),
        ("--bind=http://127.0.0.1:18765",),
        ("127.0.0.1:18765",),
    ],
)
def test_host_and_port_may_be_one_word(words: tuple[str, ...]) -> None:
    checked = contract(**addressed(*words))
    checked.test_its_command_carries_every_fact()
    if words[0].startswith("--bind"):
        fails(checked, "test_args_may_not_repeat_a_flag_of_the_house", r"'--bind', 'other'.* passed")


def test_an_engine_that_knows_no_gpus_has_none_to_pin() -> None:
    """One for CPUs only is not told of cards at all; one that has flags for them, or is spread over them, is."""
    blind = building(env=lambda launch, command: {})
    of_cpus = replace(INFO, cpu=True, tensor_parallel=False, pipeline_parallel=False, span_nodes=False, projector=False)
    contract(engine_describe=lambda: of_cpus, **blind).test_cards_are_pinned()
    for info in (replace(INFO, cpu=True), replace(of_cpus, cpu=False)):
        fails(contract(engine_describe=lambda info=info: info, **blind), "test_cards_are_pinned", "is no GPU at all")
    some = building(env=lambda launch, command: command.env if launch.gpus else {})
    fails(contract(engine_describe=lambda: of_cpus, **some), "test_cards_are_pinned", "is no GPU at all")


def test_an_adapter_without_a_model_of_its_own_is_ended_by_base() -> None:
    def build(model: Model) -> RequestRules:
        return rules_of(model, lambda name: {"adapter": name}, {"adapter": None} if model.loras else {})

    contract(engine_build_request=build).test_an_adapter_has_its_rules()


def test_a_flag_table_is_one_flag_a_line() -> None:
    assert read_flags("# version 1\n--host\n\n -p \n") == {"--host", "-p"}


def test_flags_are_told_from_values() -> None:
    assert flags_in(("bin", "--host", "127.0.0.1", "-np", "-1", "--x=1", "-")) == ("--host", "-np", "--x")
