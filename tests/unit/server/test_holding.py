"""Models that are stopped and loaded, and replicas that are replaced, on a real fleet and a real store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.admin.management import Refused
from llmgw.admin.views import LoadBegun, Removed, Stopped
from llmgw.core.events import Demand, NodesExpected
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import ShardState
from llmgw.core.rolling import PROVING_SECONDS
from llmgw.errors import LlmgwError

Operate = Callable[..., Any]
Text = Callable[..., str]

LAZY = "{min: 0, max: 1}"


async def refusal(act: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        await act
    return caught.value


async def test_a_stopped_model_is_held_over_a_restart_until_it_is_loaded(operate: Operate, text_of: Text) -> None:
    async with operate(text_of(alias="coder")) as server:
        assert server.running("m") == [("rep-m-1", "/good.gguf")]
        assert await server.holding.stop("coder") == Stopped(model="m", running=("rep-m-1",))
        await server.settled()
        assert server.running("m") == []
        assert server.scheduler.fleet.held("m")
        assert await server.holding.stop("m") == Stopped(model="m", already=True)
    async with operate(text_of(alias="coder")) as server:
        assert server.running("m") == [], "not for a moment"
        assert server.scheduler.fleet.idle()
        begun = await server.holding.load("coder")
        assert (begun.model, begun.held, begun.retried, begun.wanted) == ("m", True, False, 1)
        await server.settled()
        assert [source for _, source in server.running("m")] == ["/good.gguf"]
    async with operate(text_of(alias="coder")) as server:
        assert len(server.running("m")) == 1


async def test_a_model_that_loads_on_demand_is_loaded_now(operate: Operate, text_of: Text) -> None:
    async with operate(text_of(scaling=LAZY)) as server:
        assert server.running("m") == []
        assert (await server.holding.load("m")).held is False
        await server.settled()
        assert server.running("m") == [("rep-m-1", "/good.gguf")]
        assert await server.holding.load("m") == LoadBegun(
            model="m", running=("rep-m-1",), serving=("rep-m-1",), wanted=1
        )


async def test_a_model_without_room_is_said_to_wait_for_it_and_why(operate: Operate, text_of: Text) -> None:
    """It was said to load."""
    large = text_of(scaling=LAZY).replace("min_memory_gb: 1\n", "min_memory_gb: 500\n")
    async with operate(large) as server:
        begun = await server.holding.load("m")
        assert begun.waits is not None
        assert "needs 500 GB of memory" in begun.waits
        assert (begun.running, begun.serving, begun.makes_way) == ((), (), ())
        assert server.scheduler.fleet.retry_after_seconds(ModelName("m"), trio.current_time()) > 30


async def test_while_a_new_server_waits_for_its_nodes_a_load_waits_for_that(operate: Operate, text_of: Text) -> None:
    async with operate(text_of(scaling=LAZY)) as server:
        until = trio.current_time() + 30.0
        await server.scheduler.settle(NodesExpected(nodes=frozenset({NodeId("n9")}), until=until))
        begun = await server.holding.load("m")
        assert begun.waits is not None
        assert begun.waits.startswith("nothing is placed yet: the server waits for what n9 run")


async def test_a_model_that_is_not_to_run_is_not_loaded_and_says_where_that_is_written(
    operate: Operate, text_of: Text
) -> None:
    async with operate(text_of(name="written", scaling="{min: 0, max: 0}")) as server:
        await server.defining.add("m.yaml", text_of(scaling="{}"), replace=False)
        await server.settled()
        error = await refusal(server.holding.load("written"))
        assert (error.status, error.code) == (409, "not_scaled")
        assert error.message == (
            "written is not to run: its scaling.max is 0, as where nothing is written. To have it loaded write "
            "scaling: {min: 0, max: 1} (or more) at server.yaml:1:1, then `llmgw ctl reload`"
        )
        assert "with `llmgw ctl model edit m`" in (await refusal(server.holding.load("m"))).message
        assert server.scheduler.fleet.idle()
        assert (await refusal(server.holding.load("n"))).code == "unknown_model"


async def test_a_recalled_replica_is_replaced(operate: Operate, text_of: Text, autojump_clock: MockClock) -> None:
    async with operate(text_of()) as server:
        assert await server.holding.stop("rep-m-1") == Stopped(model="m", replica="rep-m-1", running=("rep-m-1",))
        await trio.sleep(3 * PROVING_SECONDS)
        await server.settled()
        (replica,) = server.scheduler.fleet.ready("m")
        assert (replica.id, replica.epoch) != ("rep-m-1", 1)
        assert not server.scheduler.fleet.held("m")


async def test_a_recalled_replica_of_a_model_that_nobody_asks_for_is_said_to_be_stopped(
    operate: Operate, text_of: Text
) -> None:
    async with operate(text_of(scaling=LAZY)) as server:
        await server.holding.load("m")
        await server.settled()
        server.scheduler.put(Demand(model=ModelName("m")))
        await server.settled()
        done = await server.holding.stop("rep-m-1")
        assert done == Stopped(model="m", replica="rep-m-1", running=("rep-m-1",), idle=True)
        await server.settled()
        assert server.running("m") == []


async def test_a_model_that_is_not_to_run_is_said_to_be_so_when_it_is_stopped(operate: Operate, text_of: Text) -> None:
    async with operate(text_of(scaling="{min: 0, max: 0}")) as server:
        assert await server.holding.stop("m") == Stopped(model="m", unscaled=True)


async def test_a_replica_that_goes_already_or_has_ended_is_not_recalled(operate: Operate, text_of: Text) -> None:
    async with operate(text_of()) as server:
        # somebody is answered for ever
        server.scheduler.attend(lambda replica, epoch, number: None)
        await server.holding.stop("m")
        await server.settled()
        assert (await server.holding.stop("rep-m-1")).already
        await server.defining.add("n.yaml", text_of("/bad.gguf", name="n"), replace=False)
        await server.settled()
        (failed,) = next(each.replicas for each in server.scheduler.fleet.statistics().models if each.model.name == "n")
        assert failed.state is ShardState.ENDED
        error = await refusal(server.holding.stop("rep-n-1"))
        assert (error.status, error.code) == (409, "replica_ended")


async def test_a_model_that_is_called_like_a_replica_is_what_is_meant(operate: Operate, text_of: Text) -> None:
    async with operate() as server:
        for text in (text_of(), text_of(name="rep-m-1", scaling=LAZY)):
            await server.defining.add("m.yaml", text, replace=False)
        await server.settled()
        assert server.running("m") == [("rep-m-1", "/good.gguf")]
        assert await server.holding.stop("rep-m-1") == Stopped(model="rep-m-1")


async def test_near_names_are_suggested_and_an_adapter_is_only_a_part(operate: Operate, text_of: Text) -> None:
    loras = "loras: [{name: sql, source: /sql.gguf}]\n"
    async with operate(text_of(alias="coder", more=loras)) as server:
        for name, said in (
            ("codr", "there is no model or replica codr; did you mean coder?"),
            ("rep-m-11", "there is no model or replica rep-m-11; did you mean rep-m-1?"),
            ("zzz", "there is no model or replica zzz"),
            ("sql", "sql is an adapter of m: give that name"),
        ):
            error = await refusal(server.holding.stop(name))
            assert (error.status, error.code, error.message) == (404, "unknown_name", said)
        assert (await refusal(server.holding.load("sql"))).message == "sql is an adapter of m: give that name"
        assert len(server.running("m")) == 1


async def test_a_hold_outlasts_a_declaration_and_goes_when_it_is_forgotten(operate: Operate, text_of: Text) -> None:
    async with operate(text_of()) as server:
        await server.holding.stop("m")
        server.written = ""
        await server.defining.reload()
        server.written = text_of()
        await server.defining.reload()
        await server.settled()
        assert server.running("m") == []
        await server.holding.load("m")
        await server.settled()
        assert len(server.running("m")) == 1
        assert await server.store.holds.list() == {}


class Holds:
    """Those of a store that can be written and not read, or whose answers get lost."""

    def __init__(self, holds: Any) -> None:
        self._holds = holds
        self.unread = False
        self.lost: LlmgwError | None = None

    async def list(self) -> Any:
        if self.unread:
            raise LlmgwError("its disk can't be read")
        return await self._holds.list()

    async def add(self, name: ModelName, now: float) -> Any:
        return self._answer(await self._holds.add(name, now))

    async def remove(self, name: ModelName) -> Any:
        return self._answer(await self._holds.remove(name))

    def _answer(self, done: bool) -> bool:
        if self.lost is not None:
            raise self.lost
        return done


async def test_what_the_store_has_done_is_the_fleets_at_once_and_needs_no_look_at_it(
    operate: Operate, text_of: Text
) -> None:
    async with operate(text_of(), holds=Holds) as server:
        server.holds.unread = True
        await server.holding.stop("m")
        assert server.scheduler.fleet.held("m"), "when the act returns, without a wait"
        assert (await server.holding.load("m")).held
        assert not server.scheduler.fleet.held("m")
        await server.settled()
        assert len(server.running("m")) == 1


async def test_an_act_whose_answer_got_lost_is_done_at_the_next_try(operate: Operate, text_of: Text) -> None:
    async with operate(text_of(), holds=Holds) as server:
        holds = server.holds
        for act, held in ((server.holding.stop, True), (server.holding.load, False)):
            holds.lost = LlmgwError("the store did not answer")
            with pytest.raises(LlmgwError, match="did not answer"):
                await act("m")
            assert server.scheduler.fleet.held("m") is not held
            holds.lost = None
            told = await act("m")
            assert server.scheduler.fleet.held("m") is held
            # whoever asks is told of it as if it had been done now
            assert told.already is False if held else told.held is True


async def test_a_model_is_removed_with_its_hold_and_is_not_started_for_that(operate: Operate, text_of: Text) -> None:
    async with operate() as server:
        await server.defining.add("m.yaml", text_of(), replace=False)
        await server.settled()
        await server.holding.stop("m")
        await server.settled()
        before = len(server.texts())
        assert await server.holding.remove("m") == Removed(name="m")
        await server.settled()
        assert not any("goes to n1" in text for text in server.texts()[before:])
        assert (await server.store.holds.list(), server.scheduler.fleet.held("m")) == ({}, False)
        await server.defining.add("m.yaml", text_of(), replace=False)
        await server.settled()
        assert len(server.running("m")) == 1
        assert [each[0] for each in await server.outcomes("m")] == [1]


async def test_a_model_that_goes_while_it_is_to_be_stopped_leaves_no_hold(operate: Operate, text_of: Text) -> None:
    async with operate() as server:
        await server.defining.add("m.yaml", text_of(), replace=False)
        await server.settled()
        refused: list[Refused] = []

        async def stop() -> None:
            refused.append(await refusal(server.holding.stop("m")))

        async with trio.open_nursery() as nursery, server.holding._acting:
            nursery.start_soon(stop)
            await server.settled()
            await server.defining.remove("m")
            await server.settled()
        assert [each.code for each in refused] == ["unknown_model"]
        assert await server.store.holds.list() == {}


async def test_what_is_only_on_its_way_does_not_serve(operate: Operate, text_of: Text) -> None:
    async with operate(text_of("/slow.gguf", scaling=LAZY)) as server:
        await server.holding.load("m")
        await server.settled()
        assert await server.holding.load("m") == LoadBegun(model="m", running=("rep-m-1",), wanted=1)
