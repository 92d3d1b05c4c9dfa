"""The tests that every engine plugin can run over itself; needs hypothesis, and a runner such as pytest.

In the plugin's own tests, where the file ``flags-1.2.txt`` has the flags of version 1.2, one a line:

    from llmgw.engines.testing import EngineContract, read_flags

    class TestMyEngine(EngineContract):
        plugin = my_plugin
        flag_tables = {"1.2": read_flags(Path("flags-1.2.txt").read_text())}
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, ClassVar

import pluggy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from llmgw.engines import (
    Command,
    Embedded,
    EngineInfo,
    Health,
    HealthState,
    Launch,
    Load,
    LogFact,
    Model,
    ModelName,
    ProbeOutput,
    Problem,
    Profile,
    RequestRules,
    SourceKind,
    Version,
)
from llmgw.engines.registry import hooks_of, open_engine

__all__ = ["EngineContract", "flags_in", "read_flags"]

# Neither draws on a stored example nor asserts speed, so that a run is the same on every machine.
_HARD = settings(
    max_examples=60,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)

# Surrogates too: a log is read with errors="surrogateescape", and a regex must live with what comes of it.
_GARBAGE = st.text(alphabet=st.characters(exclude_categories=()), max_size=300)
_FLAG = re.compile(r"-{1,2}[A-Za-z][\w-]*")


def read_flags(table: str) -> frozenset[str]:
    """The flags of a recorded table: one a line, empty lines and ``#`` comments aside."""
    lines = (line.strip() for line in table.splitlines())
    return frozenset(line for line in lines if line and not line.startswith("#"))


def flags_in(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The flags of a command line, without the ``=value`` that some carry."""
    return tuple(match[0] for match in map(_FLAG.match, argv) if match)


class EngineContract:
    """What holds for every plugin. Subclass it; each method is one test.

    ``launch`` is an ordinary launch, ``launches`` more of them that the plugin has to know flags for. ``flag_tables``
    are the flags of engine versions, by version; ``owned`` names flags beside those found in the command that a
    profile's args may not repeat. ``log`` is lines that an engine really wrote.
    """

    plugin: ClassVar[object]
    flag_tables: ClassVar[Mapping[str, frozenset[str]]] = {}
    owned: ClassVar[tuple[str, ...]] = ()
    log: ClassVar[tuple[str, ...]] = ()
    launch: ClassVar[Launch] = Launch(
        program=("/opt/engine/bin/engine",),
        source="/var/lib/models/some model.bin",
        served_name="org/some-model",
        host="127.0.0.1",
        port=18765,
        context_length=4096,
        max_output=1024,
        threads=6,
    )
    launches: ClassVar[tuple[Launch, ...]] = ()

    def test_the_registry_takes_it(self) -> None:
        """Hook names and arguments fit the specs, and what every engine needs is there."""
        open_engine("engine", self.plugin)

    def test_it_describes_itself_in_full(self) -> None:
        """Nothing that llmgw shows or acts on is left empty or malformed."""
        info = self._hooks.engine_describe()
        _expect(isinstance(info, EngineInfo), f"engine_describe returned {info!r}")
        _expect(
            bool(info.title and info.default_binary and info.sources), "title, default_binary and sources are needed"
        )
        by_file = SourceKind.FILE in info.sources
        _expect(info.file_suffixes or not by_file, "an engine that reads files says which: file_suffixes")
        _expect(all(suffix.startswith(".") for suffix in info.file_suffixes), "file_suffixes begin with a dot")
        paths = (*info.api_paths, info.health_path, *([info.load_path] if info.load_path else []))
        _expect(info.api_paths, "an engine without api_paths serves nothing")
        _expect(all(path.startswith("/") for path in paths), f"paths begin with a slash: {sorted(paths)}")
        _expect(info.stop_signal in signal.Signals.__members__, f"{info.stop_signal!r} is no signal")
        _expect(info.stop_grace_seconds > 0, "stop_grace_seconds is above 0")

    def test_its_embedded_program_exists(self) -> None:
        """The module is there, and an operator is told how to get what it needs."""
        embedded = self._hooks.engine_embedded()
        if embedded is not None:
            _expect(isinstance(embedded, Embedded), f"engine_embedded returned {embedded!r}")
            _expect(find_spec(embedded.module) is not None, f"there is no module {embedded.module}")
            _expect(embedded.requires and embedded.install, "requires and install are needed")

    def test_its_command_carries_every_fact(self) -> None:
        """Program first; host, port, source and served name somewhere; the profile's args last and untouched."""
        args = ("--some-switch", "--some-flag", "some value")
        for launch in (replace(each, args=args) for each in self._launches()):
            argv = self._command(launch).argv
            _expect(argv[: len(launch.program)] == launch.program, f"the program comes first: {argv}")
            _expect(argv[-len(args) :] == args, f"the profile's args come last: {argv}")
            for fact in (launch.host, str(launch.port), launch.source, launch.served_name):
                _expect(_flag_before(argv, fact) is not None or fact in argv, f"{fact!r} is not passed: {argv}")

    def test_its_command_has_only_flags_that_the_engine_knows(self) -> None:
        """Every flag that is built is in every recorded version."""
        for launch in self._launches():
            flags = set(flags_in(self._command(launch).argv[len(launch.program) :]))
            for version, known in self.flag_tables.items():
                _expect(flags <= known, f"version {version} does not know {sorted(flags - known)}")

    def test_args_may_not_repeat_a_flag_of_the_house(self) -> None:
        """Host, port, source and served name belong to llmgw, whichever way they are spelled."""
        argv = self._command(self.launch).argv
        facts = (self.launch.host, str(self.launch.port), self.launch.source, self.launch.served_name)
        passed = {flag for fact in facts if (flag := _flag_before(argv, fact)) is not None}
        for flag in sorted(passed | set(self.owned)):
            for args in ((flag, "other"), (f"{flag}=other",)):
                problems = self._validate(args)
                _expect(any(flag in problem.message for problem in problems), f"{args} passed: {problems}")
        _expect(self._validate(()) == [], "a profile without args has no problem")

    def test_its_probe_runs_the_program(self) -> None:
        """The probe is of the binary that it is asked about."""
        probe = self._hooks.engine_build_probe(program=self.launch.program)
        if probe is not None:
            _expect(isinstance(probe, Command), f"engine_build_probe returned {probe!r}")
            _expect(probe.argv[: len(self.launch.program)] == self.launch.program, f"another program: {probe.argv}")

    def test_building_is_pure_and_total(self) -> None:
        """Odd facts still give a command, and the same facts give the same one."""

        @_HARD
        @given(st.builds(_odd_launch, st.just(self.launch), _GARBAGE, st.lists(_GARBAGE, max_size=5), st.integers(0)))
        def build(launch: Launch) -> None:
            _twice(lambda: self._command(launch))
            _twice(lambda: self._validate(launch.args))
            profile = Profile(name="odd", engine="engine", args=launch.args)
            rules = _twice(lambda: self._hooks.engine_build_request(profile=profile))
            _expect(rules is None or isinstance(rules, RequestRules), f"engine_build_request returned {rules!r}")

        build()

    def test_reading_is_pure_and_total(self) -> None:
        """No text is too odd: an answer of the right kind or None, and the same text gives the same answer."""

        @_HARD
        @given(_GARBAGE, st.integers(0, 999))
        def read(text: str, number: int) -> None:
            self._read(text, number)

        read()
        for line in ("", "\x00", "\n", "{", "[]", "null", "9" * 5000, "\udcff", *self.log):
            self._read(line, 200)
            self._read(line, 503)

    def _read(self, text: str, number: int) -> None:
        hooks = self._hooks
        output = ProbeOutput(code=number, stdout=text, stderr=text)
        version = _twice(lambda: hooks.engine_read_probe(output=output))
        _expect(version is None or isinstance(version, Version), f"engine_read_probe returned {version!r}")
        health = _twice(lambda: hooks.engine_read_health(status=number, body=text))
        _expect(health is None or isinstance(health, Health), f"engine_read_health returned {health!r}")
        broken = health is not None and health.state is HealthState.BROKEN
        _expect(not broken or health.reason, "BROKEN carries its reason")
        fact = _twice(lambda: hooks.engine_read_log(line=text))
        _expect(fact is None or isinstance(fact, LogFact), f"engine_read_log returned {fact!r}")
        said = [] if fact is None else [words for words in (fact.progress, fact.fatal) if words is not None]
        _expect(all(words and "\n" not in words for words in said), f"one line, and not an empty one: {fact!r}")
        load = _twice(lambda: hooks.engine_read_load(text=text))
        _expect(load is None or isinstance(load, Load), f"engine_read_load returned {load!r}")
        if load is not None:
            _expect(all(count is None or count >= 0 for count in (load.running, load.waiting)), f"below 0: {load!r}")
            _expect(load.cache_used is None or 0 <= load.cache_used <= 1, f"a share is 0 to 1: {load!r}")

    @cached_property
    def _hooks(self) -> pluggy.HookRelay:
        # The bare hooks, not an Engine: that one swallows the very exceptions that these tests are after.
        return hooks_of("engine", self.plugin, "plugin under test")

    def _launches(self) -> tuple[Launch, ...]:
        bare = replace(self.launch, context_length=None, max_output=None, threads=None)
        return (self.launch, bare, *self.launches)

    def _command(self, launch: Launch) -> Command:
        command = self._hooks.engine_build_command(launch=launch)
        _expect(isinstance(command, Command), f"engine_build_command returned {command!r}")
        _expect(all(isinstance(word, str) for word in command.argv), f"argv is strings: {command.argv}")
        return command  # type: ignore[no-any-return]

    def _validate(self, args: tuple[str, ...]) -> list[Problem]:
        profile = Profile(name="only", engine="engine", args=args)
        model = Model(name=ModelName(self.launch.served_name), source=self.launch.source, profiles=(profile,))
        problems = self._hooks.engine_validate(model=model, profile=profile)
        if problems is None:
            return []
        _expect(isinstance(problems, list), f"engine_validate returned {problems!r}")
        _expect(all(isinstance(each, Problem) and each.message for each in problems), f"not all problems: {problems!r}")
        return problems  # type: ignore[no-any-return]


def _expect(condition: object, otherwise: str) -> None:
    # Not an assert statement: python -O would take the whole contract away.
    if not condition:
        raise AssertionError(otherwise)


def _twice(ask: Callable[[], object]) -> Any:
    first, second = ask(), ask()
    _expect(first == second, f"the same question got {first!r}, then {second!r}")
    return first


def _flag_before(argv: tuple[str, ...], fact: str) -> str | None:
    for flag, value in pairwise(argv):
        if value == fact and _FLAG.fullmatch(flag):
            return flag
    joined = next((word for word in argv if word.startswith("-") and word.endswith(f"={fact}")), None)
    return joined.removesuffix(f"={fact}") if joined else None


def _odd_launch(launch: Launch, text: str, args: list[str], number: int) -> Launch:
    return replace(
        launch,
        source=text,
        served_name=text,
        host=text,
        port=number,
        gpus=tuple(range(number % 9)),
        context_length=number,
        max_output=number,
        threads=number,
        args=tuple(args),
    )
