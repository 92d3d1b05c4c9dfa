from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from llmgw.core.model import Lora, Model, ModelName, Prices, Profile, Scaling, Task
from llmgw.store import StoredDefinition, open_store
from llmgw.store.models import StoredModel

FULL = Model(
    name=ModelName("qwen/qwen2.5-coder:3b"),
    source="/var/lib/llmgw-models/größe.gguf",
    task=Task.EMBED,
    aliases=("coder", "c"),
    mmproj="/var/lib/llmgw-models/augen.gguf",
    loras=(Lora(name=ModelName("sql"), source="/sql.gguf"),),
    routing_profile="chat",
    context_length=32768,
    max_output=4096,
    over_limit="refuse",
    prices=Prices(prompt=0.15, completion=0.6),
    scaling=Scaling(min=1, max=2, idle_timeout_seconds=0.5),
    profiles=(
        Profile(
            name="cpu",
            engine="llamacpp",
            weight=3,
            priority=-1,
            gpu_class="h100-80g",
            tp=2,
            pp=3,
            tool_parser="hermes",
            reasoning_parser="r1",
            startup_timeout_seconds=12.5,
            min_memory_gb=8,
            min_disk_gb=1.5,
            nodes=3,
            labels={"zone": "ü", "rack": ""},
            gpu_memory_gb=70.5,
            env={"A": "ü", "B": ""},
            args=("--ctx-size", "65536", ""),
        ),
    ),
)


def model(name: str) -> Model:
    return Model(name=ModelName(name), source="/x.gguf")


async def test_a_model_comes_back_as_it_was_put(path: Path) -> None:
    text = "name: qwen  # größer\n\ttabs, 'quotes', \"and\" more\n"
    async with open_store(str(path)) as store:
        await store.models.put(FULL, text, 12.5)
    async with open_store(str(path)) as store:
        assert await store.models.list() == (StoredModel(model=FULL, text=text, added_at=12.5),)


async def test_models_are_listed_the_oldest_first(path: Path) -> None:
    async with open_store(str(path)) as store:
        for name, now in (("c", 2.0), ("b", 1.0), ("a", 2.0)):
            await store.models.put(model(name), name, now)
        assert [stored.model.name for stored in await store.models.list()] == ["b", "a", "c"]


async def test_a_model_of_the_same_name_is_replaced(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.models.put(model("a"), "one", 1.0)
        await store.models.put(FULL, "other", 2.0)
        changed = Model(name=ModelName("a"), source="/y.gguf")
        await store.models.put(changed, "two", 3.0)
        assert await store.models.list() == (
            StoredModel(model=FULL, text="other", added_at=2.0),
            StoredModel(model=changed, text="two", added_at=3.0),
        )


async def test_a_removed_model_is_gone_and_says_whether_it_was_there(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.models.put(model("a"), "one", 1.0)
        assert await store.models.remove(ModelName("b")) is False
        assert await store.models.remove(ModelName("a")) is True
        assert await store.models.remove(ModelName("a")) is False
        assert await store.models.list() == ()


def entry(name: str) -> StoredDefinition:
    return StoredDefinition(number=0, model=model(name), text="", origin="stored", added_at=1.0)


async def test_a_forgotten_model_leaves_no_history_and_no_hold(path: Path) -> None:
    async with open_store(str(path)) as store:
        for name in ("a", "b"):
            await store.models.put(model(name), "one", 1.0)
            await store.history.add([entry(name), entry(name)])
            await store.holds.add(ModelName(name), 1.0)
        assert await store.models.forget(ModelName("a")) is True
        assert [stored.model.name for stored in await store.models.list()] == ["b"]
        assert await store.history.list(ModelName("a")) == ()
        assert [each.number for each in await store.history.list(ModelName("b"))] == [2, 1]
        assert list(await store.holds.list()) == ["b"]
        assert [each.number for each in await store.history.add([entry("a")])] == [1]
        # what is of a declared one of that name is no stored one's to take along
        assert await store.models.forget(ModelName("a")) is False
        assert [each.number for each in await store.history.list(ModelName("a"))] == [1]
        assert await store.models.remove(ModelName("b")) is True
        assert list(await store.holds.list()) == ["b"]


async def test_a_model_is_forgotten_whole_or_not_at_all(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.models.put(model("a"), "one", 1.0)
        await store.history.add([entry("a")])
        await store.holds.add(ModelName("a"), 1.0)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create trigger guard before delete on holds begin select raise(abort, 'unlucky'); end")
    async with open_store(str(path)) as store:
        with pytest.raises(sqlite3.Error, match="unlucky"):
            await store.models.forget(ModelName("a"))
        assert [stored.model.name for stored in await store.models.list()] == ["a"]
        assert [each.number for each in await store.history.list(ModelName("a"))] == [1]


@pytest.mark.parametrize("damage", ["", "{", '{"name": 7}', '{"name": "bad", "source": "x", "aliases": "not a list"}'])
async def test_a_model_that_can_not_be_read_hides_no_other_and_can_be_removed(
    damage: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(str(path)) as store:
        await store.models.put(model("bad"), "one", 1.0)
        await store.models.put(model("good"), "two", 2.0)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("update models set model = ? where name = 'bad'", (damage,))
        connection.commit()
    async with open_store(str(path)) as store:
        assert [stored.model.name for stored in await store.models.list()] == ["good"]
        assert "the stored model bad is left out" in caplog.text
        assert await store.models.remove(ModelName("bad")) is True


async def test_what_an_older_or_a_newer_version_wrote_is_read(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.models.put(model("a"), "one", 1.0)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("update models set model = ?", ('{"name": "a", "source": "/x.gguf", "colour": "blue"}',))
        connection.commit()
    async with open_store(str(path)) as store:
        assert [stored.model for stored in await store.models.list()] == [model("a")]


# A row as the release before GPUs were booked wrote it.
ROW = (
    '{"name":"qwen3-8b","source":"Qwen/Qwen3-8B","task":"chat","aliases":["q"],"mmproj":null,"loras":[],'
    '"routing_profile":null,"context_length":32768,"max_output":null,"over_limit":"clamp",'
    '"scaling":{"min":1,"max":1,"idle_timeout_seconds":900.0},"profiles":[{"name":"gpu","engine":"vllm","weight":1,'
    '"priority":100,"gpu_class":"h100-80g","tp":2,"pp":1,"tool_parser":"hermes","reasoning_parser":null,'
    '"startup_timeout_seconds":600.0,"min_memory_gb":8.0,"min_disk_gb":null,"env":{"A":"1"},"args":["-x"]}]}'
)


async def test_a_model_stored_before_gpus_were_booked_is_read_and_asks_for_its_own(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.models.put(model("qwen3-8b"), "one", 1.0)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("update models set model = ?", (ROW,))
        connection.commit()
    async with open_store(str(path)) as store:
        ((found,),) = [[stored.model for stored in await store.models.list()]]
    (profile,) = found.profiles
    assert (found.prices, found.aliases) == (None, ("q",))
    assert (profile.nodes, profile.labels, profile.gpu_memory_gb) == (1, {}, None)
    assert (profile.gpus, profile.gpus_per_node, profile.env) == (2, 2, {"A": "1"})
