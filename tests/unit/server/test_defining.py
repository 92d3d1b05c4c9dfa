"""Acts upon models on a real fleet, with a store that is a list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llmgw.admin.management import Refused
from llmgw.admin.views import AddedModel, Removed
from llmgw.config.definition import Definition, parse_definitions
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, ModelName, Profile
from llmgw.engines import READY, Command, EngineInfo, Health, Launch, SourceKind, hookimpl
from llmgw.engines.registry import Engine, open_engine
from llmgw.errors import ConfigError, LlmgwError, Problem
from llmgw.server.acts import ACT_SECONDS
from llmgw.server.defining import Defining, Reread
from llmgw.server.history import Histories, HistoryStore
from llmgw.server.scheduler import Scheduler

WHEN = 1_700_000_000.0


class Toy:
    """An engine that reads .gguf files and refuses the argument --bad."""

    @hookimpl
    def engine_describe(self) -> EngineInfo:
        return EngineInfo(
            title="E",
            default_binary="e",
            sources=frozenset({SourceKind.FILE}),
            file_suffixes=(".gguf",),
            cpu=True,
            loras=True,
            projector=True,
        )

    @hookimpl
    def engine_validate(self, model: Model, profile: Profile) -> list[Problem]:
        return [Problem(key="args", message="--bad is not a flag")] if "--bad" in profile.args else []

    @hookimpl
    def engine_build_command(self, launch: Launch) -> Command:
        return Command(argv=launch.program)

    @hookimpl
    def engine_read_health(self, status: int, body: str) -> Health:
        return READY


ENGINES: dict[str, Engine] = {"e": open_engine("e", Toy())}


@dataclass(frozen=True)
class Kept:
    model: Model
    text: str
    added_at: float = WHEN


class Store:
    """What is kept, and a way to have it fail or hang."""

    def __init__(self, *models: Model) -> None:
        self.kept = {model.name: Kept(model, "as it was written") for model in models}
        self.when: list[float] = []
        self.fails: LlmgwError | None = None
        self.unread: LlmgwError | None = None
        self.hangs = False
        self.entered = trio.Event()
        self.go_on = trio.Event()
        self.go_on.set()

    async def list(self) -> tuple[Kept, ...]:
        if self.unread is not None:
            raise self.unread
        return tuple(self.kept.values())

    async def put(self, model: Model, text: str, now: float) -> None:
        self.entered.set()
        await self.go_on.wait()
        if self.hangs:
            await trio.sleep_forever()
        if self.fails is not None:
            raise self.fails
        self.kept[model.name] = Kept(model, text)
        self.when.append(now)

    async def remove(self, name: ModelName) -> bool:
        return self.kept.pop(name, None) is not None

    async def forget(self, name: ModelName) -> bool:
        return await self.remove(name)


def text_of(name: str, *, alias: str | None = None, least: int = 0, source: str = "/m.gguf", more: str = "") -> str:
    aliases = f"aliases: [{alias}]\n" if alias else ""
    return (
        f"name: {name}\n{aliases}source: {source}\nscaling: {{min: {least}, max: 1}}\n"
        f"profiles:\n- name: p\n  engine: e\n{more}"
    )


def declared(name: str, alias: str | None = None) -> tuple[Definition, ...]:
    return parse_definitions(text_of(name, alias=alias), "server.yaml", ENGINES)


class Bench:
    """The models' definitions, with what they stand on."""

    def __init__(self, store: Store, written: tuple[Definition, ...], history: HistoryStore) -> None:
        self.store = store
        self.scheduler = Scheduler(Fleet())
        self.reread: Reread | ConfigError | None = None
        self.applied = 0
        self.defining = Defining(
            self.scheduler,
            engines=ENGINES,
            store=store,
            histories=Histories(history, wall=lambda: WHEN),
            declared=written,
            reread=self._reread,
            wall=lambda: WHEN,
        )

    async def _reread(self) -> Reread:
        assert self.reread is not None
        if isinstance(self.reread, ConfigError):
            raise self.reread
        return self.reread

    async def apply(self) -> None:
        self.applied += 1

    def will_read(self, written: tuple[Definition, ...]) -> None:
        self.reread = Reread(
            file="server.yaml", declared=written, changed=("models",), needs_restart=("listen",), apply=self.apply
        )

    async def settled(self) -> list[str]:
        """The names in the catalog, once the fleet has heard of them."""
        await wait_all_tasks_blocked()
        return [str(model.name) for model in self.scheduler.fleet.catalog]


Make = Callable[..., Any]


@pytest.fixture
def make(nursery: trio.Nursery, a_store: Any) -> Make:
    async def made(store: Store | None = None, written: tuple[Definition, ...] = ()) -> Bench:
        bench = Bench(store or Store(), written, a_store.history)
        await nursery.start(bench.scheduler.serve)
        await bench.defining.load()
        await bench.settled()
        return bench

    return made


async def refused(bench: Bench, text: str, *, replace: bool = False) -> Refused:
    with pytest.raises(Refused) as caught:
        await bench.defining.add("m.yaml", text, replace=replace)
    return caught.value


async def wrong(bench: Bench, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        await bench.defining.add("dir/m.yaml", text, replace=False)
    assert bench.store.kept == {}
    return [str(problem) for problem in caught.value.problems]


async def test_what_was_declared_and_stored_is_there_from_the_start(make: Make, a_model: Any) -> None:
    bench = await make(Store(a_model("stored")), declared("written"))
    assert await bench.settled() == ["written", "stored"]


async def test_a_model_that_is_added_is_stored_and_known(make: Make) -> None:
    bench = await make()
    text = text_of("new", more="  weight: 2\n")
    (added,) = await bench.defining.add("m.yaml", text, replace=False)
    assert added == AddedModel(
        name="new", replaced=False, runs=True, on_demand=True, number=1, not_in_effect=("profiles.weight",)
    )
    assert bench.store.kept["new"].text == text
    assert bench.store.when == [WHEN]
    assert await bench.settled() == ["new"]


async def test_each_of_several_models_keeps_its_own_part_of_the_file(make: Make) -> None:
    bench = await make()
    entry = "- name: %s\n  source: /m.gguf  # mine\n  profiles: [{name: p, engine: e}]\n"
    text = "# all\nmodels:\n" + "".join(entry % f"m{n}" for n in range(100))
    await bench.defining.add("m.yaml", text, replace=False)
    await bench.settled()
    part = "name: m7\nsource: /m.gguf  # mine\nprofiles: [{name: p, engine: e}]\n"
    assert bench.defining.find_stored("m7").text == part
    assert sum(len(kept.text) for kept in bench.store.kept.values()) < len(text)
    alone = "# with a word before it\n" + text_of("alone")
    await bench.defining.add("m.yaml", alone, replace=False)
    await bench.settled()
    assert bench.defining.find_stored("alone").text == alone


async def test_a_file_with_several_models_is_added_whole(make: Make) -> None:
    bench = await make()
    entry = "- {name: %s, source: /%s.gguf, profiles: [{name: p, engine: e}]}\n"
    added = await bench.defining.add("m.yaml", "models:\n" + entry % ("a", "a") + entry % ("b", "b"), replace=False)
    assert [(each.name, each.runs) for each in added] == [("a", False), ("b", False)]
    assert await bench.settled() == ["a", "b"]


async def test_all_that_is_wrong_is_told_with_its_place_in_the_operators_file(make: Make) -> None:
    bench = await make()
    source, *others = await wrong(bench, "name: m\nsource: ./m.gguf\nprofiles:\n- name: p\n  engine: f\n  argz: []\n")
    assert source.startswith("dir/m.yaml:2:1 source: './m.gguf' is a path o")
    assert others == [
        "dir/m.yaml:5:3 profiles[0].engine: no engine 'f' is installed; there is e",
        "dir/m.yaml:6:3 profiles[0].argz: unknown key (args?)",
    ]


@pytest.mark.parametrize("source", ["../m.gguf", "~/m.gguf"])
async def test_a_path_of_the_operators_machine_is_refused(make: Make, source: str) -> None:
    (problem,) = await wrong(await make(), text_of("m", source=source))
    assert problem.startswith(f"dir/m.yaml:2:1 source: {source!r} is a path o")


async def test_what_is_no_source_at_all_is_refused(make: Make) -> None:
    (problem,) = await wrong(await make(), text_of("m", source="m.gguf"))
    assert problem.startswith("dir/m.yaml:2:1 source: 'm.gguf': a source is a whole path (/…), ")


@pytest.mark.parametrize("source", ["models/m.gguf"])
async def test_a_file_that_is_no_whole_path_is_refused(make: Make, source: str) -> None:
    (problem,) = await wrong(await make(), text_of("m", source=source))
    assert problem == (
        f"dir/m.yaml:2:1 source: {source!r} is no whole path; write the one that the file has on the nodes"
    )


@pytest.mark.parametrize("source", ["hf:org/repo/m.gguf", "https://models.internal/m.gguf", "org/repo"])
async def test_other_sources_are_taken_as_they_are_written(make: Make, source: str) -> None:
    bench = await make()
    await bench.defining.add("m.yaml", text_of("m", source=source), replace=False)
    assert bench.store.kept["m"].model.source == source


async def test_what_the_engine_refuses_is_placed_too(make: Make) -> None:
    (problem,) = await wrong(await make(), text_of("m", more='  args: ["--bad"]\n'))
    assert problem == "dir/m.yaml:7:3 m: profiles[0].args: --bad is not a flag"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (text_of("written"), "m.yaml:1:1 name: 'written' is taken already: it is a model, declared at server.yaml:1:1"),
        (
            text_of("w"),
            "m.yaml:1:1 name: 'w' is taken already: it is an alias of written, declared at server.yaml:2:1",
        ),
        (
            text_of("new", alias="stored"),
            "m.yaml:2:1 aliases: 'stored' is taken already: it is a model, stored "
            "(`llmgw ctl model rm stored` removes it)",
        ),
        (
            text_of("gpt"),
            "m.yaml:1:1 name: 'gpt' is taken already: it is an alias of stored, stored "
            "(`llmgw ctl model rm stored` removes it)",
        ),
        (
            text_of("stored"),
            "m.yaml:1:1 name: 'stored' is stored already; --replace puts this definition in its place",
        ),
    ],
    ids=["declared name", "declared alias", "stored name", "stored alias", "same name"],
)
async def test_a_name_that_is_taken_is_refused_and_says_by_whom(make: Make, a_model: Any, text: str, said: str) -> None:
    bench = await make(Store(a_model("stored")), declared("written", "w"))
    error = await refused(bench, text)
    assert (error.status, error.code) == (409, "name_taken")
    assert [str(problem) for problem in error.problems] == [said]
    assert list(bench.store.kept) == ["stored"]


ADAPTED = text_of("adapted") + "loras:\n- {name: sql, source: /sql.gguf}\nmmproj: /eyes.gguf\n"


@pytest.mark.parametrize(
    ("where", "by"),
    [
        ("stored", "stored (`llmgw ctl model rm adapted` removes it)"),
        ("declared", "declared at server.yaml:8:4"),
    ],
)
async def test_an_adapter_s_name_is_nobody_else_s(make: Make, where: str, by: str) -> None:
    (adapted,) = parse_definitions(ADAPTED, "server.yaml", ENGINES)
    bench = await (make(Store(adapted.model)) if where == "stored" else make(written=(adapted,)))
    texts = {
        "m.yaml:1:1 name": text_of("sql"),
        "m.yaml:2:1 aliases": text_of("new", alias="sql"),
        "m.yaml:8:4 loras[0].name": ADAPTED.replace("adapted", "new"),
    }
    for place, text in texts.items():
        error = await refused(bench, text)
        assert [str(problem) for problem in error.problems] == [
            f"{place}: 'sql' is taken already: it is an adapter of adapted, {by}"
        ]


async def test_whoever_names_an_adapter_is_told_its_model(make: Make) -> None:
    bench = await make(Store(*(each.model for each in parse_definitions(ADAPTED, "m.yaml", ENGINES))))
    assert bench.defining.find("sql").name == "adapted"
    with pytest.raises(Refused, match=r"^sql is an adapter of adapted: give that name$"):
        await bench.defining.remove("sql")


async def test_adapters_and_what_else_is_read_need_whole_paths_too(make: Make) -> None:
    text = ADAPTED.replace("/sql.gguf", "models/sql.gguf").replace("/eyes.gguf", "models/eyes.gguf")
    projector, lora = await wrong(await make(), text)
    assert projector.startswith("dir/m.yaml:9:1 mmproj: 'models/eyes.gguf' is no whole path")
    assert lora.startswith("dir/m.yaml:8:15 loras[0].source: 'models/sql.gguf' is no whole path")


async def test_what_engines_are_told_is_kept_and_shown(make: Make) -> None:
    bench = await make()
    await bench.defining.add("m.yaml", text_of("m", more="  pp: 1\n  env: {A: 1}\n"), replace=False)
    await bench.settled()
    assert bench.defining.find("m").profiles[0].env == {"A": "1"}
    assert bench.store.kept["m"].model.profiles[0].env == {"A": "1"}


async def test_one_clash_refuses_the_whole_file(make: Make, a_model: Any) -> None:
    bench = await make(Store(a_model("a")))
    entry = "- {name: %s, source: /m.gguf, profiles: [{name: p, engine: e}]}\n"
    await refused(bench, "models:\n" + entry % "b" + entry % "a")
    assert await bench.settled() == ["a"]


async def test_an_added_model_is_replaced_when_that_is_asked_for(make: Make, a_model: Any) -> None:
    bench = await make(Store(a_model("stored")))
    (added,) = await bench.defining.add("m.yaml", text_of("stored", alias="gpt", source="/n.gguf"), replace=True)
    assert added.replaced
    await bench.settled()
    assert bench.scheduler.fleet.catalog.resolve("gpt").source == "/n.gguf"


async def test_replace_does_not_reach_what_is_declared(make: Make) -> None:
    bench = await make(written=declared("written"))
    error = await refused(bench, text_of("written"), replace=True)
    assert "declared at server.yaml:1:1" in str(error.problems[0])


async def test_two_that_want_one_name_at_once_do_not_both_get_it(make: Make, nursery: trio.Nursery) -> None:
    bench = await make()
    bench.store.go_on = trio.Event()
    ends: list[str] = []

    async def add(source: str) -> None:
        try:
            await bench.defining.add("m.yaml", text_of("one", source=source), replace=False)
            ends.append("added")
        except Refused as error:
            ends.append(error.code)

    nursery.start_soon(add, "/a.gguf")
    nursery.start_soon(add, "/b.gguf")
    await bench.store.entered.wait()
    bench.store.go_on.set()
    with trio.fail_after(10):
        while len(ends) < 2:
            await wait_all_tasks_blocked(0.001)
    assert sorted(ends) == ["added", "name_taken"]


async def test_an_act_is_carried_through_when_its_client_leaves(make: Make) -> None:
    bench = await make()
    bench.store.go_on = trio.Event()
    async with trio.open_nursery() as client:
        client.start_soon(lambda: bench.defining.add("m.yaml", text_of("new"), replace=False))
        await bench.store.entered.wait()
        client.cancel_scope.cancel()
        bench.store.go_on.set()
    assert await bench.settled() == ["new"]


async def test_a_store_that_fails_is_told_and_the_fleet_knows_what_is_in_it(make: Make) -> None:
    bench = await make()
    bench.store.fails = LlmgwError("the disk is full")
    with pytest.raises(LlmgwError, match="the disk is full"):
        await bench.defining.add("m.yaml", text_of("new"), replace=False)
    assert await bench.settled() == []


async def test_a_store_that_hangs_is_not_waited_for_for_ever(make: Make, mock_clock: MockClock) -> None:
    bench = await make()
    bench.store.hangs = True
    async with trio.open_nursery() as nursery:

        async def late() -> None:
            await bench.store.entered.wait()
            await wait_all_tasks_blocked()
            mock_clock.jump(ACT_SECONDS + 1)

        nursery.start_soon(late)
        error = await refused(bench, text_of("new"))
    assert (error.status, error.code) == (503, "store_unavailable")
    assert "within 15 s" in error.message


async def test_a_file_that_cannot_be_read_in_time_holds_nobody_up(make: Make, mock_clock: MockClock) -> None:
    bench = await make()
    bench.defining._reread = trio.sleep_forever
    async with trio.open_nursery() as nursery:

        async def late() -> None:
            await wait_all_tasks_blocked()
            mock_clock.jump(ACT_SECONDS + 1)

        nursery.start_soon(late)
        with pytest.raises(Refused) as caught:
            await bench.defining.reload()
    assert (caught.value.status, caught.value.code) == (503, "config_unavailable")
    await bench.defining.add("m.yaml", text_of("new"), replace=False)


async def test_an_added_model_is_removed(make: Make, a_model: Any) -> None:
    bench = await make(Store(a_model("stored")))
    assert await bench.defining.remove("stored") == Removed(name="stored")
    assert await bench.settled() == []


async def test_a_model_that_the_store_has_forgotten_already_is_removed_at_the_next_try(
    make: Make, a_model: Any
) -> None:
    bench = await make(Store(a_model("stored")))
    bench.store.unread = LlmgwError("its disk can't be read")
    with pytest.raises(LlmgwError, match="its disk can't be read"):
        await bench.defining.remove("stored")
    bench.store.unread = None
    assert await bench.settled() == ["stored"]
    assert await bench.defining.remove("stored") == Removed(name="stored")
    assert await bench.settled() == []


async def test_it_is_told_of_a_name_that_nobody_has(make: Make, a_model: Any) -> None:
    bench = await make(Store(a_model("stored")))
    assert bench.defining.tell_unknown("stord") == "there is no model stord; did you mean stored?"
    assert bench.defining.tell_unknown("gpt") is None


async def test_a_declared_model_is_removed_where_it_is_written(make: Make) -> None:
    bench = await make(written=declared("written"))
    with pytest.raises(Refused) as caught:
        await bench.defining.remove("written")
    assert (caught.value.status, caught.value.code) == (409, "declared_model")
    assert "declared at server.yaml:1:1: take it out there, then `llmgw ctl reload`" in caught.value.message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stord", "there is no model stord; did you mean stored?"),
        ("xyz", "there is no model xyz"),
        ("gpt", "gpt is an alias of stored: give that name"),
    ],
)
async def test_what_is_not_there_can_not_be_removed(make: Make, a_model: Any, name: str, said: str) -> None:
    bench = await make(Store(a_model("stored")))
    with pytest.raises(Refused) as caught:
        await bench.defining.remove(name)
    assert (caught.value.status, caught.value.code, caught.value.message) == (404, "unknown_model", said)
    assert "stored" in bench.store.kept


async def test_a_stored_model_makes_way_for_a_declared_one_and_can_be_forgotten(
    make: Make, a_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make(Store(a_model("both")), declared("both"))
    assert bench.defining.places() == {"both": "server.yaml:1:1"}
    assert bench.scheduler.fleet.catalog.resolve("both").source == "/m.gguf"
    (concern,) = bench.defining.shadowed()
    assert "`llmgw ctl model rm both` forgets the stored one" in concern.message
    assert concern.message in caplog.text
    assert await bench.defining.remove("both") == Removed(name="both", declared="server.yaml:1:1")
    assert await bench.settled() == ["both"]
    assert bench.defining.shadowed() == []


async def test_a_reload_changes_the_declared_models(make: Make, a_model: Any) -> None:
    bench = await make(Store(a_model("stored")), declared("old"))
    bench.will_read(declared("new"))
    told = await bench.defining.reload()
    assert (told.file, told.changed, told.needs_restart) == ("server.yaml", ("models",), ("listen",))
    assert bench.applied == 1
    assert await bench.settled() == ["new", "stored"]


async def test_a_reload_that_takes_a_stored_models_alias_changes_nothing(make: Make, a_model: Any) -> None:
    bench = await make(Store(a_model("stored")), declared("old"))
    bench.will_read(declared("new", alias="gpt"))
    with pytest.raises(Refused) as caught:
        await bench.defining.reload()
    assert [str(problem) for problem in caught.value.problems] == [
        "server.yaml:2:1 aliases: 'gpt' is taken already: it is an alias of stored, stored "
        "(`llmgw ctl model rm stored` removes it)"
    ]
    assert bench.applied == 0
    assert await bench.settled() == ["old", "stored"]


async def test_a_model_may_move_from_the_store_into_the_file(
    make: Make, a_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make(Store(a_model("stored")))
    bench.will_read(declared("stored", alias="gpt"))
    await bench.defining.reload()
    assert "declared at server.yaml:1:1, which is in effect" in caplog.text
    assert await bench.settled() == ["stored"]


async def test_a_file_that_is_wrong_is_not_reloaded(make: Make) -> None:
    bench = await make(written=declared("old"))
    bench.reread = ConfigError([Problem(key="listen", message="no port", where="server.yaml:1:1")])
    with pytest.raises(ConfigError):
        await bench.defining.reload()
    assert await bench.settled() == ["old"]


async def test_what_is_only_read_is_checked_as_if_it_were_added_and_changes_nothing(make: Make, a_model: Any) -> None:
    bench = await make(Store(a_model("stored")), declared("written"))
    for name in ("new", "written"):
        (definition,) = await bench.defining.read("m.yaml", text_of(name))
        assert definition.model.name == name
    (definition,) = await bench.defining.read("m.yaml", text_of("stored", alias="gpt"))
    assert await bench.settled() == ["written", "stored"]
    assert bench.store.when == []
    with pytest.raises(Refused, match="'gpt' is taken already: it is an alias of stored"):
        await bench.defining.read("m.yaml", text_of("new", alias="gpt"))
    with pytest.raises(ConfigError):
        await bench.defining.read("m.yaml", "name: m\n")


async def test_a_model_is_found_by_any_of_its_names(make: Make, a_model: Any) -> None:
    bench = await make(Store(a_model("stored")))
    assert bench.defining.find("gpt").name == "stored"
    with pytest.raises(Refused) as caught:
        bench.defining.find("stord")
    assert (caught.value.status, caught.value.message) == (404, "there is no model stord; did you mean stored?")
