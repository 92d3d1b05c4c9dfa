"""Definitions that serve and definitions that fail, on a real fleet and a real store, over restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.admin.management import Refused
from llmgw.admin.views import DefinitionView, Origin, Outcome, RolledBack
from llmgw.core.learned import Fact, FactKey
from llmgw.core.model import ModelName
from llmgw.core.rolling import PROVING_SECONDS

Operate = Callable[..., Any]
Text = Callable[..., str]

WHILE = PROVING_SECONDS + 1.0
# A definition fails for good with its second try, and the first is tried again seconds later.
TRIES = 60.0


async def refusal(act: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        await act
    return caught.value


async def add(server: Any, text: str, wait: float = WHILE) -> None:
    await server.defining.add("m.yaml", text, replace=True)
    await trio.sleep(wait)
    await server.settled()


async def test_a_definition_that_serves_is_proven_and_stays_so_over_a_restart(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate() as server:
        await add(server, text_of(), wait=1.0)
        assert await server.outcomes("m") == [(1, "/good.gguf", "", None)]
        await trio.sleep(WHILE)
        await server.settled()
        assert await server.outcomes("m") == [(1, "/good.gguf", "proven", None)]
    async with operate() as server:
        assert await server.outcomes("m") == [(1, "/good.gguf", "proven", None)]


async def test_a_stored_model_whose_new_definition_fails_has_the_one_before_again(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate() as server:
        await add(server, text_of())
        await add(server, text_of("/bad.gguf", alias="new"), wait=TRIES)
        assert server.running("m") == [("rep-m-1", "/good.gguf")]
        assert server.defining.find_stored("m").text == text_of()
        history = await server.outcomes("m")
        assert history == [
            (1, "/good.gguf", "proven", None),
            (2, "/bad.gguf", "failed", None),
            (3, "/good.gguf", "proven", "returned to 1: 2 failed"),
        ]
        assert server.scheduler.fleet.catalog.resolve("new") is None
        (each,) = server.scheduler.fleet.statistics().models
        assert (each.failed, each.rollout) == (None, None), "it is as it is written"
        assert server.defining.failed() == []
    async with operate() as server:
        assert [(each.source, each.aliases) for each in server.scheduler.fleet.catalog] == [("/good.gguf", ())]
        assert await server.outcomes("m") == history


async def test_the_same_bad_definition_is_tried_when_it_is_added_again(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate() as server:
        await add(server, text_of())
        for _ in range(2):
            await add(server, text_of("/bad.gguf"), wait=TRIES)
        assert [outcome for _, _, outcome, _ in await server.outcomes("m")] == [
            "proven",
            "failed",
            "proven",
            "failed",
            "proven",
        ]
        assert server.running("m") == [("rep-m-1", "/good.gguf")]


async def test_a_declared_model_goes_on_by_the_one_before_until_its_text_is_another(
    autojump_clock: MockClock, operate: Operate, text_of: Text, caplog: pytest.LogCaptureFixture
) -> None:
    async with operate(text_of()) as server:
        await trio.sleep(WHILE)
        server.written = text_of("/bad.gguf", alias="a")
        assert (await server.defining.reload()).failed == ()
        await trio.sleep(TRIES)
        await server.settled()
        assert server.running("m") == [("rep-m-1", "/good.gguf")]
        assert server.scheduler.fleet.catalog.resolve("a") is not None, "what no engine depends on is in effect"
        assert [entry[:3] for entry in await server.outcomes("m")] == [
            (1, "/good.gguf", "proven"),
            (2, "/bad.gguf", "failed"),
        ]
        # the same text again
        (concern,) = (await server.defining.reload()).failed
        assert concern.name == "m"
        assert concern.message.startswith("the definition in server.yaml:1:1 failed: ")
        assert concern.message.endswith(
            "; the one before goes on (change it there, or `llmgw ctl load m` to try it again)"
        )
        await trio.sleep(TRIES)
        assert server.running("m") == [("rep-m-1", "/good.gguf")]
        server.written = text_of("/better.gguf")
        assert (await server.defining.reload()).failed == ()
        await trio.sleep(2 * WHILE)
        await server.settled()
        assert [source for _, source in server.running("m")] == ["/better.gguf"]
        assert (await server.outcomes("m"))[-1] == (3, "/better.gguf", "proven", None)


async def test_a_restart_with_a_bad_file_stays_on_the_proven_definition_and_says_so(
    autojump_clock: MockClock, operate: Operate, text_of: Text, caplog: pytest.LogCaptureFixture
) -> None:
    async with operate(text_of()) as server:
        await trio.sleep(WHILE)
        server.written = text_of("/bad.gguf")
        await server.defining.reload()
        await trio.sleep(TRIES)
        await server.settled()
    with caplog.at_level(logging.WARNING):
        async with operate(text_of("/bad.gguf")) as server:
            await trio.sleep(WHILE)
            assert [source for _, source in server.running("m")] == ["/good.gguf"]
            assert "no such file" in server.defining.failures()["m"]
            assert len(await server.outcomes("m")) == 2
    assert "m: the definition in server.yaml:1:1 failed" in caplog.text
    # and what is mended on the node is tried when somebody says so
    async with operate(text_of("/bad.gguf")) as server:
        assert (await server.holding.load("m")).retried
        await trio.sleep(TRIES)
        await server.settled()
        assert any("bad.gguf" in text or "no such file" in text for text in server.texts())
        assert (await server.outcomes("m"))[-1][2] == "failed"


async def test_a_bad_file_that_is_new_at_a_restart_is_returned_from(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate(text_of()) as server:
        await trio.sleep(WHILE)
        await server.settled()
    async with operate(text_of("/bad.gguf")) as server:
        await trio.sleep(TRIES)
        await server.settled()
        assert [source for _, source in server.running("m")] == ["/good.gguf"]
        assert [entry[2] for entry in await server.outcomes("m")] == ["proven", "failed"]


async def test_the_first_definition_of_a_model_has_nothing_to_return_to(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate() as server:
        await add(server, text_of("/bad.gguf"), wait=TRIES)
        assert await server.outcomes("m") == [(1, "/bad.gguf", "", None)]
        assert server.defining.find_stored("m").model.source == "/bad.gguf"


async def test_a_definition_that_was_changed_once_more_meanwhile_is_not_put_back(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate() as server:
        await add(server, text_of())
        good = server.defining.find_stored("m").model
        await add(server, text_of("/slow.gguf"), wait=0.5)
        slow = server.defining.find_stored("m").model
        await add(server, text_of("/better.gguf"), wait=0.5)
        await server.returning.reverted(slow, good, "no such file")
        assert server.defining.find_stored("m").model.source == "/better.gguf"
        assert [entry[2] for entry in await server.outcomes("m")] == ["proven", "failed", ""]


async def test_what_is_told_twice_is_done_once(autojump_clock: MockClock, operate: Operate, text_of: Text) -> None:
    """As when the store had it, and did not answer in time."""
    async with operate() as server:
        await add(server, text_of())
        good = server.defining.find_stored("m").model
        await add(server, text_of("/slow.gguf"), wait=0.5)
        slow = server.defining.find_stored("m").model
        for _ in range(2):
            await server.returning.reverted(slow, good, "no such file")
            await server.returning.proven(good)
        assert [entry[1:3] for entry in await server.outcomes("m")] == [
            ("/good.gguf", "proven"),
            ("/slow.gguf", "failed"),
            ("/good.gguf", "proven"),
        ]


async def test_a_definition_is_not_put_back_where_another_model_has_its_alias_by_now(
    autojump_clock: MockClock, operate: Operate, text_of: Text, caplog: pytest.LogCaptureFixture
) -> None:
    async with operate() as server:
        await add(server, text_of(alias="coder"))
        good = server.defining.find_stored("m").model
        await add(server, text_of("/slow.gguf"), wait=0.5)
        await add(server, text_of(name="other", alias="coder"), wait=0.5)
        slow = server.defining.find_stored("m").model
        await server.returning.reverted(slow, good, "no such file")
        assert server.defining.find_stored("m").model == slow
        assert server.defining.failures() == {"m": "no such file"}
        assert "m goes on by definition 1, and stays as it is written: definition 1 aliases: 'coder'" in caplog.text


async def test_what_is_said_of_a_model_that_is_gone_is_forgotten(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate() as server:
        await add(server, text_of())
        model = server.defining.find_stored("m").model
        await server.defining.remove("m")
        await server.returning.proven(model)
        await server.returning.reverted(model, model, "no such file")
        assert await server.outcomes("m") == []
        assert await server.store.models.list() == ()
        await add(server, text_of())
        assert await server.outcomes("m") == [(1, "/good.gguf", "proven", None)]


async def test_what_a_launch_has_shown_is_kept(autojump_clock: MockClock, operate: Operate) -> None:
    key = FactKey(source="/a", engine="e", version="1", flags="f", gpu_class="")
    fact = Fact(key=key, load_seconds=3.0, memory_gb=1.5)
    async with operate() as server:
        await server.returning.learn(fact)
    async with operate() as server:
        assert await server.store.facts.list() == (fact,)


# What an operator asks for


async def test_the_history_says_what_is_written_what_serves_and_what_became_of_each(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate() as server:
        await add(server, text_of(alias="coder"))
        await add(server, text_of("/bad.gguf"), wait=TRIES)
        view = await server.returning.history("coder")
        assert view.model == "m"
        assert [(each.number, each.current, each.serving, each.outcome) for each in view.definitions] == [
            (3, True, True, Outcome.PROVEN),
            (2, False, False, Outcome.FAILED),
            (1, False, False, Outcome.PROVEN),
        ]
        last, bad, first = view.definitions
        assert (last.note, last.text, first.text) == ("returned to 1: 2 failed", first.text, text_of(alias="coder"))
        assert "no such file" in str(bad.why)
        assert bad.outcome_at is not None
        assert bad.outcome_at > bad.at > first.at > 0
        assert (await refusal(server.returning.history("codex"))).code == "unknown_model"


async def test_the_history_of_a_declared_model_names_its_place(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate(text_of()) as server:
        (entry,) = (await server.returning.history("m")).definitions
        assert isinstance(entry, DefinitionView)
        assert (entry.origin, entry.where, entry.outcome) == (Origin.DECLARED, "server.yaml:1:1", None)


async def test_an_earlier_definition_is_rolled_back_to(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate() as server:
        await add(server, text_of("/one.gguf"))
        await add(server, text_of("/two.gguf"), wait=3 * WHILE)
        assert [source for _, source in server.running("m")] == ["/two.gguf"]
        done = await server.returning.rollback("m", None)
        assert done == RolledBack(model="m", number=3, to=1, rolls=True)
        await trio.sleep(3 * WHILE)
        await server.settled()
        assert [source for _, source in server.running("m")] == ["/one.gguf"]
        assert (await server.outcomes("m"))[-1] == (3, "/one.gguf", "proven", "rolled back to 1")
        assert server.defining.find_stored("m").text == text_of("/one.gguf")
        assert (await server.returning.rollback("m", 2)).number == 4


async def test_a_rollback_that_has_nowhere_to_go_is_refused_with_the_way(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate(text_of(name="written")) as server:
        await add(server, text_of())
        error = await refusal(server.returning.rollback("written", None))
        assert (error.status, error.code) == (409, "declared_model")
        assert error.message.startswith("written is declared at server.yaml:1:1: write the earlier definition there")
        error = await refusal(server.returning.rollback("m", None))
        assert (error.status, error.code) == (409, "nothing_proven")
        error = await refusal(server.returning.rollback("m", 7))
        assert (error.status, error.message) == (404, "there is no definition 7 of m: 1 to 1 are kept")
        error = await refusal(server.returning.rollback("m", 1))
        assert (error.code, error.message) == ("current_definition", "definition 1 is what m has already")
        assert (await refusal(server.returning.rollback("n", None))).code == "unknown_model"


async def test_a_rollback_takes_no_name_from_another_model(
    autojump_clock: MockClock, operate: Operate, text_of: Text
) -> None:
    async with operate() as server:
        await add(server, text_of(alias="coder"))
        await add(server, text_of("/two.gguf"))
        await add(server, text_of(name="other", alias="coder"))
        error = await refusal(server.returning.rollback("m", 1))
        assert (error.status, error.code) == (409, "name_taken")
        assert "'coder' is taken already: it is an alias of other, stored" in error.message
        assert server.defining.find_stored("m").model.source == "/two.gguf"
        assert len(await server.store.history.list(ModelName("m"))) == 2
