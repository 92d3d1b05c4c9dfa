"""Each state that a flag can be in, over small versions made by hand."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.model import Lora, Model, ModelName, Profile, Task
from llmgw.engines import (
    READY,
    Command,
    EngineInfo,
    Flag,
    FlagChange,
    FlagStyle,
    Launch,
    SourceKind,
    Takes,
    Version,
    hookimpl,
)
from llmgw.engines.check import FlagFinding, FlagState, check_launch, launch_of, sample_model
from llmgw.engines.registry import Engine, open_engine
from llmgw.errors import EngineFailed

CHANGES = (
    FlagChange(flag="--old-cache", gone_in="0.10", instead="--cache"),
    FlagChange(flag="--cache", gone_in="0.20", instead="--kv-cache"),
    FlagChange(flag="--swap", gone_in="0.18"),
    FlagChange(flag="--guided", gone_in="0.12.0", instead="--structured.backend"),
)
INFO = EngineInfo(
    title="Tiny",
    default_binary="tiny",
    sources=frozenset({SourceKind.FILE}),
    file_suffixes=(".tiny",),
    api_paths=frozenset({"/v1/completions"}),
    flag_style=FlagStyle(underscores=True, abbreviations=True, dotted=True),
    flag_changes=CHANGES,
)
FLAGS = (
    Flag(names=("--port",), takes=Takes.ONE),
    Flag(names=("--model", "-m"), takes=Takes.ONE),
    Flag(names=("--kv-cache",), takes=Takes.ONE, choices=frozenset({"auto", "fp8", "fp16"})),
    Flag(names=("--eager", "--no-eager"), takes=Takes.NONE),
    Flag(names=("--level",), takes=Takes.MAYBE),
    Flag(names=("--keys",), takes=Takes.MANY),
    Flag(names=("--any",)),
    Flag(names=("--parser",), takes=Takes.ONE, choices=frozenset({"a", "b"}), widened_by="--parser-plugin"),
    Flag(names=("--parser-plugin",), takes=Takes.ONE),
    Flag(names=("--odd_spelling",), takes=Takes.ONE),
    Flag(names=("--fading",), takes=Takes.ONE, deprecated="Deprecated. Use --any."),
    Flag(names=("--stub",), takes=Takes.ONE, removed="the argument has been removed. use --any"),
    Flag(names=("--old-stub",), takes=Takes.NONE, removed="gone"),
    Flag(names=("--structured",), takes=Takes.ONE),
    Flag(names=("-n",), takes=Takes.ONE),
    Flag(names=("--tp-size",), takes=Takes.ONE),
    Flag(names=("--pp-size",), takes=Takes.ONE),
    Flag(names=("--pp-depth",), takes=Takes.ONE),
    Flag(names=("--numbers",), takes=Takes.ONE, choices=frozenset(map(str, range(20)))),
)
VERSION = Version(number="0.30.1", flags=FLAGS)


def an_engine(info: EngineInfo = INFO, *flags: str) -> Engine:
    def build(launch: Launch) -> Command:
        own = ("serve", launch.source, "--port", str(launch.port), *flags)
        return Command(argv=(*launch.program, *own, *launch.args))

    hooks: dict[str, Any] = {
        "engine_describe": lambda: info,
        "engine_build_command": build,
        "engine_read_health": lambda: READY,
    }
    return open_engine("tiny", SimpleNamespace(**{name: hookimpl(hook) for name, hook in hooks.items()}))


def check(*args: str, version: Version | None = VERSION, engine: Engine | None = None) -> list[FlagFinding]:
    engine = engine or an_engine()
    model, profile = sample_model(engine)
    launch = launch_of(model, dataclasses.replace(profile, args=args), ("/bin/tiny", "-m", "x"), version)
    first, *others = check_launch(engine, launch)
    assert (first.flag, first.given_by) == ("--port", "llmgw")
    assert {each.given_by for each in others} <= {"profile"}
    return others


def judge(*args: str, version: Version | None = VERSION, engine: Engine | None = None) -> tuple[FlagState, str | None]:
    (finding,) = check(*args, version=version, engine=engine)
    assert finding.breaks == (finding.state.value in ("renamed", "removed", "unknown", "wrong_value"))
    return finding.state, finding.detail


@pytest.mark.parametrize(
    "args",
    [
        ("--eager",),
        ("--no-eager",),
        ("--kv-cache", "fp8"),
        ("--kv_cache=fp8",),
        ("--level",),
        ("--level", "3"),
        ("--keys", "a", "b", "c"),
        ("--any",),
        ("--any", "a", "b"),
        ("--port", "-1"),
        ("--odd_spelling", "x"),
        ("--odd-spelling", "x"),
        ("--structured.backend", "x"),
        ("-n2",),
        ("--parser", "a"),
    ],
)
def test_a_flag_that_the_binary_takes_is_ok(args: tuple[str, ...]) -> None:
    assert judge(*args) == (FlagState.OK, None)


@pytest.mark.parametrize(
    ("args", "detail"),
    [
        (("--eager", "yes"), "it takes no value, and 'yes' is given"),
        (("--eager=yes",), "it takes no value, and 'yes' is given"),
        (("--eager.x", "1"), "it takes no value, so --eager.x can't be set"),
        (("--kv-cache",), "it needs a value: auto, fp16, fp8"),
        (("--keys",), "it needs a value"),
        (("--kv-cache", "fp8", "fp16"), "it takes one value, and 'fp16' is given besides"),
        (("--level", "1", "2"), "it takes one value, and '2' is given besides"),
        (("--kv-cache", "fp9"), "'fp9' is none of auto, fp16, fp8; did you mean fp8?"),
        (("--kv-cache", "zzz"), "'zzz' is none of auto, fp16, fp8"),
        (("--parser", "c"), "'c' is none of a, b"),
        (("--numbers", "x"), "'x' is none of 0, 1, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 and 8 more"),
    ],
)
def test_a_value_that_the_binary_refuses_is_named(args: tuple[str, ...], detail: str) -> None:
    assert judge(*args) == (FlagState.WRONG_VALUE, detail)


def test_a_plugin_of_parsers_brings_names_that_the_help_does_not_have() -> None:
    assert [each.state for each in check("--parser", "mine", "--parser-plugin", "/p.py")] == [FlagState.OK] * 2


def test_a_flag_that_goes_is_deprecated_and_works() -> None:
    assert judge("--fading", "1") == (FlagState.DEPRECATED, "Deprecated. Use --any.")


def test_a_stub_that_is_refused_is_removed() -> None:
    assert judge("--stub", "1") == (FlagState.REMOVED, "the argument has been removed. use --any")


def test_a_stub_whose_successor_is_known_is_renamed() -> None:
    info = dataclasses.replace(INFO, flag_changes=(FlagChange(flag="--old-stub", gone_in="1", instead="--any"),))
    assert judge("--old-stub", engine=an_engine(info)) == (FlagState.RENAMED, "this release calls it --any")


def test_another_name_that_the_binary_knows_is_told() -> None:
    assert judge("--cache", "fp8") == (FlagState.RENAMED, "this release calls it --kv-cache")
    # Renamed twice since.
    assert judge("--old-cache", "fp8") == (FlagState.RENAMED, "this release calls it --kv-cache")
    assert judge("--guided", "x") == (FlagState.RENAMED, "this release calls it --structured.backend")
    old = Version(number="0.9", flags=(FLAGS[0], Flag(names=("--old-cache",))))
    assert judge("--kv-cache", "fp8", version=old) == (FlagState.RENAMED, "this release calls it --old-cache")


def test_changes_that_lead_in_a_circle_end() -> None:
    changes = (
        FlagChange(flag="--first", gone_in="0.1", instead="--second"),
        FlagChange(flag="--second", gone_in="0.2", instead="--first"),
    )
    engine = an_engine(dataclasses.replace(INFO, flag_changes=changes))
    assert judge("--first", engine=engine) == (FlagState.RENAMED, "gone since 0.1: it is --second now")


def test_a_flag_that_a_release_dropped_is_removed() -> None:
    assert judge("--swap", "4") == (FlagState.REMOVED, "gone since 0.18: take it out")


def test_a_flag_that_came_and_went_after_the_binary_is_unknown_to_it() -> None:
    old = Version(number="0.17.3", flags=FLAGS)
    assert judge("--swap", "4", version=old) == (FlagState.UNKNOWN, None)
    for number in ("0.18", "0.18.0+cpu", "nightly", "17"):
        assert judge("--swap", "4", version=dataclasses.replace(old, number=number))[0] is FlagState.REMOVED


def test_several_that_became_one_are_never_taken_for_each_other() -> None:
    changes = tuple(
        FlagChange(flag=flag, gone_in="0.40", instead="--backend") for flag in ("--fast-a", "--fast-b", "-f")
    )
    engine = an_engine(dataclasses.replace(INFO, flag_changes=changes, flag_style=FlagStyle()))

    def judged(flag: str, *known: tuple[str, ...]) -> tuple[FlagState, str | None]:
        flags = (FLAGS[0], *(Flag(names=names) for names in known))
        return judge(flag, version=Version(number="0.30", flags=flags), engine=engine)

    several = "this release has several in its place: --fast-a, --fast-b"
    assert judged("--backend", ("--fast-b",), ("--fast-a",)) == (FlagState.RENAMED, several)
    one = (FlagState.RENAMED, "this release calls it --fast-b")
    assert judged("--backend", ("--fast-b",)) == one
    # Two spellings of one flag are one.
    assert judged("--backend", ("--fast-b", "-f")) == one
    assert judged("--backend", ("--other",)) == (FlagState.UNKNOWN, None)
    assert judged("--fast-a", ("--fast-b",))[0] is FlagState.UNKNOWN
    assert judged("--fast-a", ("--backend",)) == (FlagState.RENAMED, "this release calls it --backend")


def test_a_flag_that_nobody_knows_is_unknown() -> None:
    assert judge("--nonsense") == (FlagState.UNKNOWN, None)
    assert judge("--kv-cahce", "fp8") == (FlagState.UNKNOWN, "did you mean --kv-cache?")
    assert judge("-x2") == (FlagState.UNKNOWN, None)


def test_an_abbreviation_works_and_is_named() -> None:
    whole = "short for --tp-size, which another release may not take for it: write the whole"
    assert judge("--tp", "2") == (FlagState.DEPRECATED, whole)
    assert judge("--pp", "2") == (FlagState.UNKNOWN, "could be any of --pp-depth, --pp-size")
    assert judge("-k", "2", version=Version(number="1", flags=(FLAGS[0], Flag(names=("-kv",)))))[0] is (
        FlagState.DEPRECATED
    )
    strict = an_engine(dataclasses.replace(INFO, flag_style=FlagStyle()))
    assert judge("--tp", "2", engine=strict)[0] is FlagState.UNKNOWN
    assert judge("-n2", engine=strict)[0] is FlagState.UNKNOWN


def test_the_value_of_an_abbreviation_is_checked_too() -> None:
    state, detail = judge("--kv", "fp9")
    assert state is FlagState.WRONG_VALUE
    assert (detail or "").startswith("short for --kv-cache: 'fp9' is none of")
    assert judge("--old-s")[0] is FlagState.REMOVED


def test_a_plugin_of_parsers_may_be_shortened() -> None:
    findings = check("--parser", "c", "--parser-p", "x.py")
    assert [each.state for each in findings] == [FlagState.OK, FlagState.DEPRECATED]


@pytest.mark.parametrize(
    ("value", "state"),
    [
        *((value, FlagState.OK) for value in ("4", "-1", "+2", " 3", "1.5", ".5", "8k", "1e-3")),
        *((value, FlagState.WRONG_VALUE) for value in ("abc", "", "x5", "-", "\u0663")),
    ],
)
def test_a_number_has_to_begin_as_one(value: str, state: FlagState) -> None:
    version = Version(number="1", flags=(FLAGS[0], Flag(names=("--threads",), takes=Takes.ONE, number=True)))
    found = judge("--threads", value, version=version)
    assert found == (state, None if state is FlagState.OK else f"it needs a number, and {value!r} is none")


def test_a_flag_that_takes_nothing_is_joined_to_nothing() -> None:
    version = Version(number="1", flags=(FLAGS[0], Flag(names=("-e",), takes=Takes.NONE)))
    assert judge("-e2", version=version)[0] is FlagState.UNKNOWN


@pytest.mark.parametrize(
    ("number", "flag", "state"),
    [
        ("0.18.0", "--swap", FlagState.REMOVED),
        ("0.18", "--swap", FlagState.REMOVED),
        ("0.32.0+cpu", "--swap", FlagState.REMOVED),
        ("0.17.9", "--swap", FlagState.UNCHECKED),
        ("0.12", "--guided", FlagState.RENAMED),
        ("0.9.2", "--old-cache", FlagState.UNCHECKED),
        ("no number", "--swap", FlagState.UNCHECKED),
        ("0.30", "--nonsense", FlagState.UNCHECKED),
    ],
)
def test_without_a_help_only_the_history_tells(number: str, flag: str, state: FlagState) -> None:
    assert judge(flag, version=Version(number=number))[0] is state


def test_without_a_version_nothing_is_checked() -> None:
    assert judge("--swap", version=None) == (FlagState.UNCHECKED, None)


def test_a_flag_is_told_once_and_whose_it_is() -> None:
    engine = an_engine(INFO, "--eager", "--cache", "auto")
    model, profile = sample_model(engine)
    launch = launch_of(
        model, dataclasses.replace(profile, args=("--keys", "a", "--keys", "b", "--eager")), ("t",), VERSION
    )
    found = [(each.flag, each.given_by, each.state) for each in check_launch(engine, launch)]
    assert found == [
        ("--port", "llmgw", FlagState.OK),
        ("--eager", "llmgw", FlagState.OK),
        ("--cache", "llmgw", FlagState.RENAMED),
        ("--keys", "profile", FlagState.OK),
        ("--eager", "profile", FlagState.OK),
    ]


def test_a_word_that_belongs_to_no_flag_is_named_and_not_given_to_llmgws_last() -> None:
    engine = an_engine(INFO, "--eager")
    model, profile = sample_model(engine)
    launch = launch_of(model, dataclasses.replace(profile, args=("stray", "--keys", "a")), ("t",), VERSION)
    found = [(each.flag, each.given_by, each.state) for each in check_launch(engine, launch)]
    assert found == [
        ("--port", "llmgw", FlagState.OK),
        ("--eager", "llmgw", FlagState.OK),
        ("--keys", "profile", FlagState.OK),
        ("stray", "profile", FlagState.UNKNOWN),
    ]
    unread = check_launch(engine, dataclasses.replace(launch, version=None))
    assert [each.state for each in unread if each.flag == "stray"] == [FlagState.UNCHECKED]


@pytest.mark.parametrize("program", ["/usr/bin/python3.11", "python"])
def test_the_module_that_an_interpreter_runs_is_no_flag(program: str) -> None:
    engine = an_engine(INFO, "--eager")
    build = engine.build_command
    engine.build_command = (
        lambda launch: Command(  # type: ignore[method-assign]
            argv=(*launch.program, "-m", "tiny.serve", *build(launch).argv[len(launch.program) :])
        )
    )
    model, profile = sample_model(engine)
    launch = launch_of(model, dataclasses.replace(profile, args=("--keys", "a")), (program,), VERSION)
    found = [(each.flag, each.given_by, each.state) for each in check_launch(engine, launch)]
    assert found == [
        ("--port", "llmgw", FlagState.OK),
        ("--eager", "llmgw", FlagState.OK),
        ("--keys", "profile", FlagState.OK),
    ]
    # To another program it is one.
    assert check_launch(engine, dataclasses.replace(launch, program=("tiny",)))[0].flag == "-m"


def test_findings_are_what_json_can_say() -> None:
    (finding,) = check("--kv-cache", "fp9")
    assert json.loads(json.dumps(dataclasses.asdict(finding))) == {
        "flag": "--kv-cache",
        "given_by": "profile",
        "state": "wrong_value",
        "detail": "'fp9' is none of auto, fp16, fp8; did you mean fp8?",
    }


def test_a_command_that_cannot_be_built_is_a_failed_engine() -> None:
    engine = an_engine()
    model, profile = sample_model(engine)
    launch = dataclasses.replace(launch_of(model, profile, ("t",), VERSION), args=None)  # type: ignore[arg-type]
    with pytest.raises(EngineFailed, match="built no command for sample"):
        check_launch(engine, launch)


def test_the_sample_is_of_the_engines_own_kind() -> None:
    model, profile = sample_model(an_engine())
    assert (model.source, model.task, profile.engine) == ("/srv/models/sample.tiny", Task.CHAT, "tiny")
    info = dataclasses.replace(
        INFO, sources=frozenset({SourceKind.REPOSITORY}), file_suffixes=(), tasks=frozenset({Task.RERANK, Task.EMBED})
    )
    model, _ = sample_model(an_engine(info))
    assert (model.source, model.task) == ("org/sample", Task.EMBED)


def test_a_launch_has_all_that_the_definition_says() -> None:
    profile = Profile(
        name="p", engine="tiny", tp=2, pp=3, tool_parser="t", reasoning_parser="r", env={"A": "1"}, args=("--x",)
    )
    lora = Lora(name=ModelName("sql"), source="/l")
    model = Model(
        name=ModelName("m"),
        source="/m",
        task=Task.EMBED,
        mmproj="/p",
        loras=(lora,),
        context_length=10,
        max_output=5,
        profiles=(profile,),
    )
    launch = launch_of(model, profile, ("tiny",), VERSION, gpus=(0, 1))
    assert launch == Launch(
        program=("tiny",),
        source="/m",
        served_name="m",
        host=launch.host,
        port=launch.port,
        version=VERSION,
        gpus=(0, 1),
        tp=2,
        pp=3,
        task=Task.EMBED,
        context_length=10,
        max_output=5,
        mmproj="/p",
        loras=(lora,),
        tool_parser="t",
        reasoning_parser="r",
        threads=launch.threads,
        env={"A": "1"},
        args=("--x",),
    )


WORDS = st.text(alphabet=st.sampled_from("-_=.anp1 \udcff"), max_size=10) | st.sampled_from(
    [name for flag in FLAGS for name in flag.names]
)


@pytest.mark.slow
@given(st.lists(WORDS, max_size=12), st.none() | st.builds(Version, number=st.text(max_size=20), flags=st.just(FLAGS)))
def test_any_words_can_be_checked(words: list[str], version: Version | None) -> None:
    engine = an_engine()
    model, profile = sample_model(engine)
    launch = launch_of(model, dataclasses.replace(profile, args=tuple(words)), ("t",), version)
    found = check_launch(engine, launch)
    assert len(set(found)) == len(found)
    json.dumps([dataclasses.asdict(each) for each in found])


def test_what_a_key_of_the_profile_asks_for_is_the_profiles() -> None:
    def build(launch: Launch) -> Command:
        parser = ("--numbers", launch.tool_parser) if launch.tool_parser else ()
        return Command(argv=(*launch.program, "--port", str(launch.port), *parser, *launch.args))

    hooks: dict[str, Any] = {
        "engine_describe": lambda: INFO,
        "engine_build_command": build,
        "engine_read_health": lambda: READY,
    }
    engine = open_engine("tiny", SimpleNamespace(**{name: hookimpl(hook) for name, hook in hooks.items()}))
    model, profile = sample_model(engine)
    launch = launch_of(model, dataclasses.replace(profile, tool_parser="99"), ("/bin/tiny",), VERSION)
    own, theirs = check_launch(engine, launch)
    assert (own.given_by, own.state) == ("llmgw", FlagState.OK)
    assert (theirs.flag, theirs.given_by, theirs.state) == ("--numbers", "profile", FlagState.WRONG_VALUE)
