"""The tests that every engine plugin can run over itself; needs hypothesis, and a runner such as pytest.

In the plugin's own tests, where the file ``flags-1.2.txt`` has the flags of version 1.2, one a line:

    from llmgw.engines.testing import EngineContract, read_flags

    class TestMyEngine(EngineContract):
        plugin = my_plugin
        flag_tables = {"1.2": read_flags(Path("flags-1.2.txt").read_text())}
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from itertools import combinations, pairwise
from typing import Any, ClassVar

import pluggy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from llmgw.engines import (
    Cause,
    CauseKind,
    Command,
    Embedded,
    EngineInfo,
    Fabric,
    Flag,
    FlagChange,
    Health,
    HealthState,
    Launch,
    Load,
    LogFact,
    Lora,
    ModelName,
    ParserFlag,
    ProbeOutput,
    Problem,
    RequestRules,
    SourceKind,
    Task,
    Version,
    split_args,
)
from llmgw.engines.registry import hooks_of, open_engine
from llmgw.engines.samples import definition_of, sample_launches

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
_ODD = ("", "\x00", "\n", "{", "[]", "null", "{}", "9" * 5000, "-1", "1e999", "\udcff", "x" * 100_000)
_FLAG = re.compile(r"-{1,2}[A-Za-z][\w-]*")
_NUMBERS = re.compile(r"[0-9]+(,[0-9]+)*")

# A figure of a line or of JSON, and what may stand in its place on a bad day.
_FIGURE = re.compile(r"(?<=[ :])[0-9.][0-9.eE+-]*(?=[\s,}]|$)")
_ODD_FIGURES = ("NaN", "+Inf", "-1", "1e999", "9" * 400, "37.5", "x", "")

# By what the clients of a task ask for it. Whatever else an engine answers, nobody finds it there.
_PATHS = {
    Task.CHAT: frozenset({"/v1/chat/completions", "/v1/completions"}),
    Task.EMBED: frozenset({"/v1/embeddings"}),
    Task.RERANK: frozenset({"/v1/rerank"}),
}
# No defaults of anything, so that they are in a command only where they are passed on.
_CONTEXTS = (7321, 11743)

# What no scrub may take away: without these a program does not find its libraries, its home or its cards.
_KEPT = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")


def read_flags(table: str) -> frozenset[str]:
    """The flags of a recorded table: one a line, empty lines and ``#`` comments aside."""
    lines = (line.strip() for line in table.splitlines())
    return frozenset(line for line in lines if line and not line.startswith("#"))


def flags_in(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The flags of a command line, without the ``=value`` that some carry."""
    return tuple(match[0] for match in map(_FLAG.match, argv) if match)


class EngineContract:
    """What holds for every plugin. Subclass it; each method is one test.

    ``launch`` is an ordinary launch; for each thing that the plugin says it can do there is one more
    (``sample_launches``), and ``launches`` are those that the plugin's author adds. ``flag_tables`` are the flags of
    engine versions, by version: a launch that carries that version may have no others.
    ``owned`` names flags beside those found in the command that a profile's args may not repeat; ``repeatable`` those
    that a command may have several times. ``inherited`` are variables that the engine reads settings from, which no
    launch may inherit. ``log`` is lines that an engine really wrote, ``metrics`` texts of its ``load_path`` and
    ``contexts`` of its ``context_path``. ``takes_context`` is False for an engine that can't be told how long a request
    may be, ``forgets_adapters`` True for one that takes each request by itself.
    """

    plugin: ClassVar[object]
    flag_tables: ClassVar[Mapping[str, frozenset[str]]] = {}
    owned: ClassVar[tuple[str, ...]] = ()
    repeatable: ClassVar[tuple[str, ...]] = ()
    inherited: ClassVar[tuple[str, ...]] = ()
    log: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[tuple[str, ...]] = ()
    contexts: ClassVar[tuple[str, ...]] = ()
    takes_context: ClassVar[bool] = True
    forgets_adapters: ClassVar[bool] = False
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
        named = info.title and info.default_binary and info.sources
        _expect(named, "title, default_binary and sources are needed")
        by_file = SourceKind.FILE in info.sources
        _expect(info.file_suffixes or not by_file, "an engine that reads files says which: file_suffixes")
        _expect(all(suffix.startswith(".") for suffix in info.file_suffixes), "file_suffixes begin with a dot")
        paths = (*info.api_paths, info.health_path, *([info.load_path] if info.load_path else []))
        _expect(info.api_paths, "an engine without api_paths serves nothing")
        _expect(all(path.startswith("/") for path in paths), f"paths begin with a slash: {sorted(paths)}")
        _expect(info.tasks and all(isinstance(task, Task) for task in info.tasks), f"tasks are Task: {info.tasks!r}")
        for task in sorted(info.tasks):
            known = sorted(_PATHS[task])
            _expect(info.api_paths & _PATHS[task], f"task {task} is asked for at {known}, and api_paths has none of it")
        _expect(info.stop_signal in signal.Signals.__members__, f"{info.stop_signal!r} is no signal")
        _expect(info.stop_grace_seconds > 0, "stop_grace_seconds is above 0")
        _expect(info.probe_seconds > 0, "probe_seconds is above 0")
        wide = info.tensor_parallel or info.pipeline_parallel
        _expect(wide or not info.span_nodes, "span_nodes needs tensor_parallel or pipeline_parallel")

    def test_its_flag_changes_are_of_flags(self) -> None:
        """Each is a flag with dashes, and the release that lost it has a number."""
        for change in self._info.flag_changes:
            _expect(isinstance(change, FlagChange), f"flag_changes holds {change!r}")
            names = (change.flag, change.instead or change.flag)
            _expect(all(_FLAG.match(name) for name in names), f"a flag has its dashes: {change}")
            _expect(re.search(r"\d", change.gone_in), f"gone_in is a release: {change}")

    def test_its_embedded_program_exists(self) -> None:
        """The module is there, and an operator is told how to get what it needs."""
        embedded = self._hooks.engine_embedded()
        if embedded is not None:
            _expect(isinstance(embedded, Embedded), f"engine_embedded returned {embedded!r}")
            _expect(find_spec(embedded.module) is not None, f"there is no module {embedded.module}")
            _expect(embedded.requires and embedded.install, "requires and install are needed")

    def test_its_command_carries_every_fact(self) -> None:
        """Program first; the source, and host, port and served name wherever the shard answers HTTP."""
        for what, launch in self._launches():
            command = self._command(launch)
            argv = command.argv
            _expect(argv[: len(launch.program)] == launch.program, f"{what}: the program comes first: {argv}")
            served = (launch.host, str(launch.port), launch.served_name) if command.serves else ()
            # Host and port may be one word.
            together = (
                (launch.host, str(launch.port)) if any(_passes(argv, each) for each in _addresses(launch)) else ()
            )
            for fact in (launch.source, *served):
                _expect(fact in together or _passes(argv, fact), f"{what}: {fact!r} is not passed: {argv}")

    def test_its_command_gives_a_request_the_context_that_is_promised(self) -> None:
        """Neither less, which refuses what the model takes, nor another number: it is passed on as it is."""
        for what, launch in self._launches() if self.takes_context else ():
            for tokens in _CONTEXTS:
                # Without args: a profile may bring a size, or a number of slots, of its own.
                asked = replace(launch, context_length=tokens, max_output=None, args=())
                if self._command(asked).serves:
                    self._expect_said(f"{what}, context_length", asked, [str(tokens)], env=True)

    def test_the_args_of_a_profile_come_last(self) -> None:
        """Untouched and in their order, so that a profile wins over what the plugin adds."""
        args = ("--some-switch", "--some-flag", "some value")
        for what, launch in self._launches():
            argv = self._command(replace(launch, args=args)).argv
            _expect(argv[-len(args) :] == args, f"{what}: the profile's args come last: {argv}")

    def test_its_command_carries_what_the_definition_asks_for(self) -> None:
        """The projector, the adapters and the parsers, where the engine says that it takes them."""
        for what, launch in self._launches():
            asked = (
                launch.mmproj,
                launch.tool_parser,
                launch.reasoning_parser,
                *(lora.source for lora in launch.loras),
            )
            self._expect_said(what, launch, [fact for fact in asked if fact is not None])

    def test_its_command_carries_the_shape_of_a_replica(self) -> None:
        """How wide it is, over how many nodes, and where they meet."""
        for what, launch in self._launches():
            for name, width in (("tp", launch.tp), ("pp", launch.pp), ("count", launch.count)):
                # Some count the cards that they are given, and only want to be told what to do with them.
                if width > 1 and not self._says(launch, str(width)):
                    narrow = replace(launch, **{name: 1})  # type: ignore[arg-type]
                    same = self._command(narrow).argv == self._command(launch).argv
                    _expect(not same, f"{what}: {name} {width} makes no difference: {self._command(launch).argv}")
            host, _, port = (launch.rendezvous or "").rpartition(":")
            self._expect_said(what, launch, [host, port] if launch.rendezvous else [])
        shown = {what: self._command(launch) for what, launch in self._launches()}
        if "rank 0 of 2" in shown:
            _expect(shown["rank 0 of 2"].argv != shown["rank 1 of 2"].argv, "a rank is told which one it is")
            _expect(shown["rank 0 of 2"].serves, "the first rank of a group answers HTTP")

    def test_a_group_speaks_over_its_fabric(self) -> None:
        """Its interface, and its adapters where there are any, reach the engine's environment or flags."""
        for what, launch in self._launches():
            fabric = launch.fabric
            if fabric is not None:
                self._expect_said(what, launch, [fabric.interface, *fabric.hcas], env=True)

    def test_an_adapter_has_its_rules(self) -> None:
        """A client asks for an adapter by its name, so the body that the engine wants for it is known."""
        for what, launch in self._launches():
            model, profile = definition_of(launch)
            rules = self._hooks.engine_build_request(model=model, profile=profile)
            _expect(rules is None or isinstance(rules, RequestRules), f"engine_build_request returned {rules!r}")
            named = {lora.name for lora in launch.loras}
            known = set(rules.loras) if rules is not None else set()
            _expect(known == named, f"{what}: the adapters are {sorted(named)}, and the rules are for {sorted(known)}")
            if rules is not None:
                self._expect_told_apart(what, launch.served_name, rules)

    def test_cards_are_pinned(self) -> None:
        """The GPUs that llmgw chose reach the engine in the order of the PCI bus, and () is none of them."""
        unpinned, hidden, pinned = (self._command(replace(self.launch, gpus=gpus)) for gpus in (None, (), (2,)))
        if self._info.cpu and not self._info.tensor_parallel and unpinned == hidden == pinned:
            # It has no use for a GPU, and nothing to be told about them.
            return
        same = (hidden.argv, hidden.env) == (unpinned.argv, unpinned.env)
        _expect(not same, "gpus=() is no GPU at all, and the command is that of gpus=None, any of them")
        for what, launch in self._launches():
            if launch.gpus:
                command = self._command(launch)
                self._expect_said(what, launch, [",".join(map(str, launch.gpus))], env=True)
                by_bus = command.env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
                _expect(by_bus or "CUDA_VISIBLE_DEVICES" not in command.env, f"{what}: needs CUDA_DEVICE_ORDER")

    def test_its_environment_is_text(self) -> None:
        """Names and values are strings that a process can have, and nothing is set and a default at once."""
        for what, command in self._commands():
            for kind in (command.env, command.defaults):
                _expect(isinstance(kind, dict), f"{what}: an environment is a dict, not {kind!r}")
                _expect(all(map(_is_text, (*kind, *kind.values()))), f"{what}: not text to text: {kind!r}")
                _expect(all(name and "=" not in name for name in kind), f"{what}: no variables: {sorted(kind)}")
            both = sorted(command.env.keys() & command.defaults.keys())
            _expect(not both, f"{what}: both set and a default: {both}")

    def test_inherited_settings_are_scrubbed(self) -> None:
        """What a shell had exported is nobody's choice; what every program needs stays."""
        for what, command in self._commands():
            scrub = command.scrub
            _expect(isinstance(scrub, tuple), f"{what}: scrub is a tuple of prefixes: {scrub!r}")
            _expect(all(_is_text(each) and each for each in scrub), f"{what}: an empty prefix: {scrub!r}")
            taken = [name for name in _KEPT if name.startswith(scrub)]
            _expect(not taken, f"{what}: scrub takes away {taken}")
            left = [name for name in self.inherited if not name.startswith(scrub)]
            _expect(not left, f"{what}: inherits {left}")

    def test_its_command_has_only_flags_that_the_engine_knows(self) -> None:
        """Every flag that is built for a version is in its recorded table; without one, in some table."""
        every: frozenset[str] = frozenset().union(*self.flag_tables.values())
        for number, known in self.flag_tables.items():
            version = Version(number=number, flags=tuple(Flag(names=(name,)) for name in sorted(known)))
            for what, launch in self._launches():
                # What a release can't do at all is refused where its version is known, before it is launched.
                if not self._validate(launch, version):
                    self._expect_known(f"version {number}, {what}", replace(launch, version=version), known)
        for what, launch in self._launches() if self.flag_tables else ():
            self._expect_known(f"any version, {what}", launch, every)

    def test_no_flag_is_given_twice(self) -> None:
        """Engines differ in which of two they take, and some end. What a profile gives, the plugin leaves out."""
        for what, launch in self._launches():
            words = self._command(launch).argv[len(launch.program) :]
            given_flags = [(each.name, each.key) for each in split_args(words, self._info.flag_style)]
            twice = sorted({name for name, key in given_flags if given_flags.count((name, key)) > 1})
            _expect(set(twice) <= set(self.repeatable), f"{what}: twice: {twice} in {words}")

    def test_args_may_not_repeat_a_flag_of_the_house(self) -> None:
        """Host, port, source and served name belong to llmgw, whichever way they are spelled."""
        argv = self._command(self.launch).argv
        alone = (self.launch.host, str(self.launch.port), self.launch.source, self.launch.served_name)
        facts = (*alone, *_addresses(self.launch))
        passed = {flag for fact in facts if (flag := _flag_before(argv, fact)) is not None}
        for flag in sorted(passed | set(self.owned)):
            for args in ((flag, "other"), (f"{flag}=other",)):
                problems = self._validate(replace(self.launch, args=args))
                _expect(any(flag in problem.message for problem in problems), f"{args} passed: {problems}")

    def test_it_takes_what_it_says_it_can(self) -> None:
        """Nothing is wrong with a definition that asks for no more than the plugin's description offers."""
        for what, launch in self._launches():
            problems = self._validate(launch)
            _expect(problems == [], f"{what}: {problems}")

    def test_its_probes_run_the_program(self) -> None:
        """The probes are of the binary that they are asked about."""
        for probe in self._probes():
            _expect(probe.argv[: len(self.launch.program)] == self.launch.program, f"another program: {probe.argv}")
            _expect(len(probe.argv) > len(self.launch.program), f"it would start the engine: {probe.argv}")

    def test_a_connection_that_is_refused_is_never_ready(self) -> None:
        """Where nothing listens nobody is sent, whatever came before."""
        for body in _ODD:
            health = self._read_health(None, body)
            _expect(health is None or health.state is not HealthState.READY, f"a status of None gave {health!r}")

    def test_building_is_pure_and_total(self) -> None:
        """Odd facts still give a command, and the same facts give the same one."""

        @_HARD
        @given(_odd_launches(self.launch))
        def build(launch: Launch) -> None:
            _twice(lambda: self._command(launch))

        build()

    def test_validating_is_pure_and_total(self) -> None:
        """Odd definitions get problems, whichever version the binary has, and the same ones each time."""

        @_HARD
        @given(
            _odd_launches(self.launch), st.none() | st.builds(_odd_version, _GARBAGE, st.lists(_GARBAGE, max_size=3))
        )
        def validate(launch: Launch, version: Version | None) -> None:
            _twice(lambda: self._validate(launch, version))
            model, profile = definition_of(launch)
            rules = _twice(lambda: self._hooks.engine_build_request(model=model, profile=profile))
            _expect(rules is None or isinstance(rules, RequestRules), f"engine_build_request returned {rules!r}")

        validate()

    def test_naming_the_parser_is_pure_and_total(self) -> None:
        """A flag with its dashes, and what is given is what the profile gives."""

        @_HARD
        @given(_odd_launches(self.launch))
        def name(launch: Launch) -> None:
            self._name_parser(launch)

        name()
        for _, launch in self._launches():
            parser = self._name_parser(launch)
            if parser is not None and launch.tool_parser is not None:
                _expect(parser.given == launch.tool_parser, f"{launch.tool_parser} is given, not {parser.given}")

    def test_reading_a_probe_is_pure_and_total(self) -> None:
        """However many outputs there are, and whatever is in them."""

        @_HARD
        @given(
            st.lists(st.builds(ProbeOutput, code=st.integers(-64, 255), stdout=_GARBAGE, stderr=_GARBAGE), min_size=1)
        )
        def read(outputs: list[ProbeOutput]) -> None:
            self._read_probe(tuple(outputs))

        read()
        for text in (*_ODD, *self.log):
            for code in (0, 1, -9):
                one = ProbeOutput(code=code, stdout=text, stderr=text)
                self._read_probe((one,))
                self._read_probe((one, one))

    def test_reading_health_is_pure_and_total(self) -> None:
        """Whatever holds the port may answer anything."""

        @_HARD
        @given(st.none() | st.integers(0, 999), _GARBAGE)
        def read(status: int | None, body: str) -> None:
            self._read_health(status, body)

        read()
        for body in (*_ODD, *self.log):
            for status in (None, 200, 401, 404, 500, 503):
                self._read_health(status, body)

    def test_reading_a_log_is_pure_and_total(self) -> None:
        """A line gives words in one line, or nothing."""

        @_HARD
        @given(_GARBAGE)
        def read(line: str) -> None:
            self._read_log(line)

        read()
        for line in (*_ODD, *self.log):
            self._read_log(line)

    def test_reading_an_exit_is_pure_and_total(self) -> None:
        """Whatever the last lines and however it ended: a cause in one line, or nothing."""

        @_HARD
        @given(
            st.lists(_GARBAGE | st.sampled_from(self.log or ("",)), max_size=20),
            st.none() | st.integers(),
            st.none() | st.integers(),
        )
        def read(lines: list[str], code: int | None, number: int | None) -> None:
            self._read_exit(tuple(lines), code, number)

        read()
        for line in (*_ODD, *self.log):
            self._read_exit((line,), 1, None)
        self._read_exit(self.log, None, None)
        for number in signal.Signals:
            self._read_exit((), None, number)
            self._read_exit((), 128 + number, None)

    def test_reading_the_context_is_pure_and_total(self) -> None:
        """A request has a whole number of tokens, or nobody knows."""

        @_HARD
        @given(_GARBAGE)
        def read(text: str) -> None:
            self._read_context(text)

        read()
        for text in (*_ODD, *self.log, *self.metrics, *_spoil(self.contexts)):
            self._read_context(text)
        for text in self.contexts:
            _expect(self._read_context(text) is not None, f"nothing is read in {text[:300]!r}")

    def test_reading_the_load_is_pure_and_total(self) -> None:
        """No count is below 0, and a share is 0 to 1."""

        @_HARD
        @given(_GARBAGE)
        def read(text: str) -> None:
            self._read_load(text)

        read()
        for text in (*_ODD, *self.log, *self.contexts, *_spoil(self.metrics)):
            self._read_load(text)
        for text in self.metrics:
            _expect(self._read_load(text) not in (None, Load()), f"nothing is read in {text[:300]!r}")

    @cached_property
    def _hooks(self) -> pluggy.HookRelay:
        # The bare hooks, not an Engine: that one swallows the very exceptions that these tests are after.
        return hooks_of("engine", self.plugin, "plugin under test")

    @property
    def _info(self) -> EngineInfo:
        return self._hooks.engine_describe()  # type: ignore[no-any-return]

    def _launches(self) -> Iterator[tuple[str, Launch]]:
        yield from sample_launches(self._info, self.launch).items()
        yield from ((f"launch {number}", each) for number, each in enumerate(self.launches))

    def _commands(self) -> Iterator[tuple[str, Command]]:
        yield from ((what, self._command(launch)) for what, launch in self._launches())
        yield from (("a probe", probe) for probe in self._probes())

    def _command(self, launch: Launch) -> Command:
        command = self._hooks.engine_build_command(launch=launch)
        _expect(isinstance(command, Command), f"engine_build_command returned {command!r}")
        _expect(isinstance(command.argv, tuple), f"argv is a tuple: {command.argv!r}")
        _expect(all(isinstance(word, str) for word in command.argv), f"argv is strings: {command.argv}")
        return command  # type: ignore[no-any-return]

    def _probes(self) -> tuple[Command, ...]:
        found = self._hooks.engine_build_probe(program=self.launch.program)
        probes = found if isinstance(found, tuple) else () if found is None else (found,)
        _expect(all(isinstance(probe, Command) for probe in probes), f"engine_build_probe returned {found!r}")
        return probes

    def _validate(self, launch: Launch, version: Version | None = None) -> list[Problem]:
        model, profile = definition_of(launch)
        problems = self._hooks.engine_validate(model=model, profile=profile, version=version)
        if problems is None:
            return []
        _expect(isinstance(problems, list), f"engine_validate returned {problems!r}")
        _expect(all(isinstance(each, Problem) and each.message for each in problems), f"not all problems: {problems!r}")
        return problems  # type: ignore[no-any-return]

    def _expect_said(self, what: str, launch: Launch, facts: list[str], *, env: bool = False) -> None:
        for fact in facts:
            said = self._says(launch, fact, env=env)
            _expect(said, f"{what}: {fact!r} is not passed: {self._command(launch)}")

    def _says(self, launch: Launch, fact: str, *, env: bool = False) -> bool:
        """Whether it is in a word of the command or, where that does, in its environment; a number by itself."""
        command = self._command(launch)
        words = [*command.argv[len(launch.program) :], *(command.env.values() if env else ())]
        said = re.compile(rf"(?<![\w.]){fact}(?![\w.])" if _NUMBERS.fullmatch(fact) else re.escape(fact))
        return any(said.search(word) for word in words)

    def _expect_told_apart(self, what: str, model: str, rules: RequestRules) -> None:
        """No two of the adapters, nor one of them and the model, are asked for with the same fields."""
        asked = {name: {"model": model} | dict(fields) for name, fields in (*rules.loras.items(), (None, rules.base))}
        json.dumps(list(asked.values()))
        for (name, fields), (other, others) in combinations(asked.items(), 2):
            second = "the model itself (base)" if other is None else repr(other)
            _expect(fields != others, f"{what}: {name!r} and {second} are asked for alike: {fields}")
        for lora, chosen in rules.loras.items():
            # What is not asked for by its model may go on until somebody says that it ends.
            named = chosen.get("model", model) != model
            left = sorted(set(chosen) - {"model", *rules.base})
            ends = named or not left or self.forgets_adapters
            _expect(ends, f"{what}: {lora!r} is told by {left}, and base does not say what ends it")

    def _expect_known(self, what: str, launch: Launch, known: frozenset[str]) -> None:
        flags = set(flags_in(self._command(launch).argv[len(launch.program) :]))
        _expect(flags <= known, f"{what}: the engine does not know {sorted(flags - known)}")

    def _name_parser(self, launch: Launch) -> ParserFlag | None:
        model, profile = definition_of(launch)
        parser = _twice(lambda: self._hooks.engine_name_parser(model=model, profile=profile))
        _expect(parser is None or isinstance(parser, ParserFlag), f"engine_name_parser returned {parser!r}")
        _expect(parser is None or _FLAG.match(parser.flag), f"a flag has its dashes: {parser!r}")
        return parser  # type: ignore[no-any-return]

    def _read_probe(self, outputs: tuple[ProbeOutput, ...]) -> None:
        version = _twice(lambda: self._hooks.engine_read_probe(output=outputs[0], outputs=outputs))
        _expect(version is None or isinstance(version, Version), f"engine_read_probe returned {version!r}")
        if version is not None:
            _expect(_is_line(version.number), f"a number in one line: {version.number!r}")
            _expect(isinstance(version.flags, tuple), f"flags are a tuple: {version.flags!r}")
            _expect(all(isinstance(flag, Flag) and flag.names for flag in version.flags), f"no flags: {version!r}")

    def _read_health(self, status: int | None, body: str) -> Health | None:
        health = _twice(lambda: self._hooks.engine_read_health(status=status, body=body))
        _expect(health is None or isinstance(health, Health), f"engine_read_health returned {health!r}")
        broken = health is not None and health.state is HealthState.BROKEN
        _expect(not broken or health.reason, "BROKEN carries its reason")
        return health  # type: ignore[no-any-return]

    def _read_log(self, line: str) -> None:
        fact = _twice(lambda: self._hooks.engine_read_log(line=line))
        _expect(fact is None or isinstance(fact, LogFact), f"engine_read_log returned {fact!r}")
        _expect(fact is None or _is_line(fact.progress), f"one line, and not an empty one: {fact!r}")

    def _read_exit(self, lines: tuple[str, ...], code: int | None, number: int | None) -> None:
        cause = _twice(lambda: self._hooks.engine_read_exit(lines=lines, code=code, signal=number))
        _expect(cause is None or isinstance(cause, Cause), f"engine_read_exit returned {cause!r}")
        if cause is not None:
            _expect(isinstance(cause.kind, CauseKind), f"{cause.kind!r} is no CauseKind")
            _expect(_is_line(cause.line), f"one line, and not an empty one: {cause!r}")
            _expect(cause.remedy is None or _is_line(cause.remedy), f"one line, and not an empty one: {cause!r}")

    def _read_context(self, text: str) -> int | None:
        tokens = _twice(lambda: self._hooks.engine_read_context(text=text))
        whole = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0
        _expect(tokens is None or whole, f"tokens are a whole number above 0: {tokens!r}")
        return tokens  # type: ignore[no-any-return]

    def _read_load(self, text: str) -> Load | None:
        load = _twice(lambda: self._hooks.engine_read_load(text=text))
        _expect(load is None or isinstance(load, Load), f"engine_read_load returned {load!r}")
        if load is not None:
            counts = (load.running, load.waiting, load.prompt_tokens, load.cached_tokens, load.steps)
            whole = all(count is None or (isinstance(count, int) and count >= 0) for count in counts)
            _expect(whole, f"below 0, or no whole number: {load!r}")
            _expect(load.cache_used is None or 0 <= load.cache_used <= 1, f"a share is 0 to 1: {load!r}")
        return load  # type: ignore[no-any-return]


def _expect(condition: object, otherwise: str) -> None:
    # Not an assert statement: python -O would take the whole contract away.
    if not condition:
        raise AssertionError(otherwise)


def _twice(ask: Callable[[], object]) -> Any:
    first, second = ask(), ask()
    _expect(first == second, f"the same question got {first!r}, then {second!r}")
    return first


def _is_text(word: object) -> bool:
    return isinstance(word, str) and "\0" not in word


def _is_line(text: object) -> bool:
    return isinstance(text, str) and bool(text.strip()) and "\n" not in text


def _flag_before(argv: tuple[str, ...], fact: str) -> str | None:
    for flag, value in pairwise(argv):
        if value == fact and _FLAG.fullmatch(flag):
            return flag
    joined = next((word for word in argv if word.startswith("-") and word.endswith(f"={fact}")), None)
    return joined.removesuffix(f"={fact}") if joined else None


def _passes(argv: tuple[str, ...], fact: str) -> bool:
    return fact in argv or _flag_before(argv, fact) is not None


def _addresses(launch: Launch) -> tuple[str, ...]:
    return tuple(f"{scheme}{launch.host}:{launch.port}" for scheme in ("", "http://", "tcp://"))


def _spoil(texts: tuple[str, ...]) -> Iterator[str]:
    """The texts as they are, cut off, and with figures that are none or can't be."""
    for text in texts:
        yield text
        yield text[: len(text) // 2]
        yield from (_FIGURE.sub(odd, text) for odd in _ODD_FIGURES)


def _odd_launches(launch: Launch) -> st.SearchStrategy[Launch]:
    return st.builds(_odd_launch, st.just(launch), _GARBAGE, st.lists(_GARBAGE, max_size=5), st.integers(0))


def _odd_launch(launch: Launch, text: str, args: list[str], number: int) -> Launch:
    return replace(
        launch,
        source=text,
        served_name=text,
        host=text,
        port=number,
        version=_odd_version(text, args),
        gpus=tuple(range(number % 9)),
        tp=number,
        pp=number,
        rank=number,
        count=number,
        rendezvous=text if number % 2 else None,
        fabric=Fabric(address=text, interface=text, hcas=tuple(args)) if number % 3 else None,
        task=tuple(Task)[number % len(Task)],
        context_length=number,
        max_output=number,
        mmproj=text,
        loras=tuple(Lora(name=ModelName(arg), source=text) for arg in args),
        tool_parser=text,
        reasoning_parser=text,
        threads=number,
        cache=text,
        env={text: text},
        args=tuple(args),
    )


def _odd_version(number: str, names: list[str]) -> Version:
    return Version(number=number, flags=tuple(Flag(names=(name,), choices=frozenset(names)) for name in names))
