"""What a shard has before its launch, over a machine whose parts are made up."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
import trio
import trio.testing

from llmgw.agent.booked import GpuInUse, RendezvousTaken
from llmgw.agent.held import Held
from llmgw.agent.preflight import Preflight
from llmgw.agent.preparing import prepare
from llmgw.agent.telling import Telling, first_report
from llmgw.core.model import Lora, ModelName
from llmgw.core.node import ForeignUse, Gpu
from llmgw.core.replica import ShardState
from llmgw.core.weights import Fetch, Phase
from llmgw.engines.types import Version
from llmgw.errors import EngineFailed
from llmgw.host.gpus import GpusFound

CARD = Gpu(uuid="GPU-a", index=0, gpu_class="h100-80g", name="H100", memory_gb=80.0, memory_used_gb=0.0)


class Around:
    """What a shard finds on its machine: the GPUs, and whether the place where shards meet is taken."""

    def __init__(self):
        self.gpus = (CARD,)
        self.taken = set()

    async def run(self, work, *args):
        await trio.lowlevel.checkpoint()
        return work(*args)

    async def look_at_gpus(self, tools):
        await trio.lowlevel.checkpoint()
        return GpusFound(gpus=self.gpus)

    async def examine(self, engine, program, *, marker):
        await trio.lowlevel.checkpoint()
        return Preflight(
            engine=engine.name,
            program=program,
            version=Version(number="1.0"),
            broken=None,
            remedy=None,
            problems=(),
            missing_libraries=(),
            findings=(),
        )


@pytest.fixture
def around():
    return Around()


@pytest.fixture
def tools(with_hands, around):
    def is_taken(address):
        return address in around.taken

    tools = with_hands(run=around.run, look_at_gpus=around.look_at_gpus, examine=around.examine, is_taken=is_taken)
    return replace(tools, programs=type(tools.programs)(tools.hands))


class Preparation:
    """A shard that is being prepared, and what it said."""

    def __init__(self, spec, tools):
        self.said = []
        self.go = trio.Event()
        self.held = Held(spec, tools, Telling(first_report(spec), self.said.append), self.go)
        self.launch = None

    async def run(self):
        self.launch = await prepare(self.held)

    def states(self):
        return list(dict.fromkeys(report.state for report in self.said))


@pytest.fixture
def begin(tools, make_spec, nursery):
    """Prepare a shard as far as that goes by itself."""

    async def begin(run=None, **changes):
        preparation = Preparation(replace(make_spec(), gpus=("GPU-a",), **changes), tools)
        nursery.start_soon(preparation.run)
        await trio.testing.wait_all_tasks_blocked()
        return preparation

    return begin


GROUP = {"count": 2, "rendezvous": "10.0.0.1:29500", "go": False}


async def test_one_by_itself_waits_for_nobody(begin, tools):
    alone = await begin()
    assert alone.states() == [ShardState.PREPARING]
    assert alone.launch.gpus == (0,)
    # nobody else is given what it is about to listen on
    assert alone.held.port not in {tools.ports.take() for _ in range(7)}


@pytest.mark.parametrize("changes", [{"go": False}, {**GROUP, "go": True}])
async def test_one_that_may_go_waits_for_nobody(begin, changes):
    prepared = await begin(**changes)
    assert prepared.states() == [ShardState.PREPARING]
    assert prepared.launch is not None


async def test_one_of_several_waits_for_the_word(begin):
    first = await begin(**GROUP)
    assert first.states() == [ShardState.PREPARING, ShardState.PREPARED]
    assert first.said[-1].progress == "waits until the other shards of rep-m-1 are prepared"
    assert first.launch is None
    first.go.set()
    await trio.testing.wait_all_tasks_blocked()
    assert first.launch.rendezvous == "10.0.0.1:29500"
    # what is written down at the launch is what it was told last
    assert first.held.spec.go


class Stock:
    """Weights that come when a test says so."""

    def __init__(self):
        self.wanted, self.come = [], trio.Event()

    async def obtain(self, source, engine, tell, *, by):
        self.wanted.append((by, source))
        tell(Fetch(source=source, phase=Phase.VERIFYING))
        await self.come.wait()
        tell(None)
        return f"/weights/{source.rpartition('/')[2]}"


@pytest.fixture
def stock():
    return Stock()


@pytest.fixture
def with_stock(alter, stock, make_spec, nursery):
    """Prepare a shard all of whose weights are fetched."""

    async def begin(**changes):
        spec = make_spec(
            source="hf:org/repo/m.fake",
            mmproj="hf:org/repo/eyes.fake",
            loras=(Lora(name=ModelName("sql"), source="hf:org/repo/sql.fake"),),
        )
        tools = replace(alter(validate=lambda *given: []), weights=stock)
        preparation = Preparation(replace(spec, gpus=("GPU-a",), **changes), tools)
        nursery.start_soon(preparation.run)
        await trio.testing.wait_all_tasks_blocked()
        return preparation

    return begin


async def test_all_weights_are_here_before_anything_is_taken(with_stock, stock, tools):
    prepared = await with_stock()
    assert stock.wanted == [("shd-m-1-0", "hf:org/repo/m.fake")]
    last = prepared.said[-1]
    assert (last.state, last.progress) == (ShardState.PREPARING, "verifying m.fake")
    assert last.fetch.source == "hf:org/repo/m.fake"
    assert prepared.held.port is None
    assert tools.taken._by == {}
    stock.come.set()
    await trio.testing.wait_all_tasks_blocked()
    launch = prepared.launch
    assert (launch.source, launch.mmproj) == ("/weights/m.fake", "/weights/eyes.fake")
    assert [lora.source for lora in launch.loras] == ["/weights/sql.fake"]
    assert [source.rpartition("/")[2] for _, source in stock.wanted] == ["m.fake", "eyes.fake", "sql.fake"]
    assert prepared.held.spec.model.source == "hf:org/repo/m.fake"
    assert (prepared.said[-1].fetch, launch.gpus) == (None, (0,))


async def test_one_of_several_says_that_it_is_prepared_once_its_weights_are_here(with_stock, stock):
    prepared = await with_stock(**GROUP)
    assert prepared.states() == [ShardState.PREPARING]
    stock.come.set()
    await trio.testing.wait_all_tasks_blocked()
    assert prepared.states() == [ShardState.PREPARING, ShardState.PREPARED]


async def test_what_can_not_run_is_told_before_the_weights_come(stock, around, make_spec, tools):
    async def fail(engine, program, *, marker):
        await trio.lowlevel.checkpoint()
        return replace(await around.examine(engine, program, marker=marker), broken="it lacks libx.so")

    tools.hands.examine = fail
    broken = replace(tools, weights=stock)
    with pytest.raises(EngineFailed, match=r"lacks libx\.so"):
        await Preparation(make_spec(source="hf:org/repo/m.fake"), broken).run()
    assert stock.wanted == []


async def test_a_program_that_is_another_once_the_weights_are_here_is_tried_again(
    with_stock, stock, around, monkeypatch, tools
):
    prepared = await with_stock()
    tries = []
    check = tools.programs.check

    async def note(engine, program, **given):
        tries.append(program)
        return await check(engine, program, **given)

    monkeypatch.setattr(type(tools.programs), "check", lambda self, *args, **given: note(*args, **given))
    stock.come.set()
    await trio.testing.wait_all_tasks_blocked()
    assert len(tries) == 1
    assert prepared.launch is not None


async def test_what_has_changed_while_it_waited_is_seen(begin, around, tools):
    first = await begin(**GROUP)
    had = first.held.port
    around.gpus = (replace(CARD, uuid="GPU-z"), replace(CARD, index=1))
    with socket.create_server(("127.0.0.1", had)):
        first.go.set()
        await trio.testing.wait_all_tasks_blocked()
        assert first.launch.gpus == (1,)
        assert first.held.port != had
    assert {tools.ports.take() for _ in range(7)} >= {had}


async def test_what_is_free_again_is_held_no_longer(tools, make_spec):
    held = Preparation(make_spec(), tools).held
    port = held.take_port()
    assert held.take_port() == port
    await held.clear()
    assert held.port is None
    assert {tools.ports.take() for _ in range(8)} >= {port}


@pytest.mark.parametrize(
    ("gpus", "error"),
    [
        ((), pytest.RaisesExc(EngineFailed, match="GPU-a is not among those that this node has: none")),
        ((replace(CARD, foreign=(ForeignUse(memory_gb=70.0, pid=4711),)),), pytest.RaisesExc(GpuInUse, match="4711")),
    ],
)
async def test_a_gpu_that_is_lost_while_it_waited_ends_it(around, tools, make_spec, gpus, error):
    preparation = Preparation(replace(make_spec(), gpus=("GPU-a",), **GROUP), tools)

    async def lose():
        while preparation.held.telling.last.state is not ShardState.PREPARED:
            await trio.lowlevel.checkpoint()
        around.gpus = gpus
        preparation.go.set()

    with pytest.RaisesGroup(error):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            nursery.start_soon(preparation.run)


async def test_the_place_where_they_meet_has_to_be_free_where_it_is(begin, around, tools, make_spec):
    around.taken = {GROUP["rendezvous"]}
    second = await begin(rank=1, **GROUP)
    assert second.states() == [ShardState.PREPARING, ShardState.PREPARED]
    first = Preparation(replace(make_spec(number=2), **GROUP), tools)
    with pytest.raises(RendezvousTaken, match=r"rep-m-2 are to meet at 10\.0\.0\.1:29500, and another program"):
        await first.run()
    assert first.states() == [ShardState.PREPARING]


async def test_a_place_that_is_taken_while_it_waited_ends_it(around, tools, make_spec):
    preparation = Preparation(replace(make_spec(), **GROUP), tools)
    preparation.go.set()

    def take(report):
        if report.state is ShardState.PREPARED:
            around.taken = {GROUP["rendezvous"]}

    preparation.held.telling = Telling(first_report(preparation.held.spec), take)
    with pytest.raises(RendezvousTaken):
        await preparation.run()
