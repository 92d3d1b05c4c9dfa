"""What launches have shown, on a real fleet and a real store: seen, and forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from llmgw.admin.management import Refused
from llmgw.admin.views import FactsView, FactView
from llmgw.core.events import FactsKnown
from llmgw.core.learned import Fact, FactKey, Kind, make_key
from llmgw.core.model import Model
from llmgw.errors import LlmgwError
from llmgw.server.learning import Learning

Operate = Callable[..., Any]
Text = Callable[..., str]

TWO = "- name: spare\n  engine: e\n- name: gpu\n  engine: e\n  gpu_class: h100-80g\n"
SHOWN = FactView(profiles=("p", "spare"), engine="e", version="1.2", load_seconds=9.0, memory_gb=3.0)


def fact(model: Model, profile: int = 0, *, version: str = "1.2", gpu_class: str = "", **figures: float) -> Fact:
    return Fact(key=make_key(model, model.profiles[profile], version, gpu_class), **figures)


async def learn(server: Any, *facts: Fact) -> None:
    for each in facts:
        await server.store.facts.put(each, server.tell_time())
    await server.scheduler.settle(FactsKnown(facts=facts))


def figures(server: Any) -> list[Kind]:
    """Where the memory and the load time of the model come from."""
    fleet = server.scheduler.fleet
    return [each.kind for each in fleet.figures(fleet.catalog.named("m"))]


async def test_what_is_known_is_shown_by_profile_and_gone_when_it_is_forgotten(operate: Operate, text_of: Text) -> None:
    text = text_of(alias="c", scaling="{min: 0, max: 1}", more=TWO).replace("  min_memory_gb: 1\n", "")
    async with operate(text) as server:
        model = server.defining.find_model("m")
        learning = Learning(server.scheduler, server.store.facts, defining=server.defining)
        assert await learning.show("c") == FactsView(model="m", facts=())
        plain = fact(model, load_seconds=9.0, memory_gb=3.0)
        old = fact(model, version="1.1", memory_gb=2.0)
        card = fact(model, 2, gpu_class="h100-80g", gpu_gb=70.0)
        other = fact(replace(model, source="/other.gguf"), memory_gb=5.0)
        await learn(server, plain, old, card, other)
        told = await learning.show("c")
        assert (told.facts[0], told.forgotten) == (SHOWN, False)
        assert [(each.profiles, each.version, each.gpu_class) for each in told.facts[1:]] == [
            (("p", "spare"), "1.1", None),
            (("gpu",), "1.2", "h100-80g"),
        ]
        assert figures(server)[-1] is Kind.MEASURED
        assert await learning.forget("m") == FactsView(model="m", facts=told.facts, forgotten=True)
        assert await server.store.facts.list() == (other,)
        assert Kind.MEASURED not in figures(server)
        assert await learning.show("m") == FactsView(model="m", facts=())
        with pytest.raises(Refused, match="there is no model n"):
            await learning.forget("n")


class Facts:
    """A store whose answers get lost once it has done what it was asked."""

    def __init__(self, facts: Any) -> None:
        self._facts = facts
        self.lost = True

    async def list(self) -> tuple[Fact, ...]:
        found: tuple[Fact, ...] = await self._facts.list()
        return found

    async def remove(self, keys: Iterable[FactKey]) -> None:
        await self._facts.remove(keys)
        if self.lost:
            raise LlmgwError("the store did not answer")


async def test_what_was_forgotten_halfway_is_forgotten_at_the_next_try(operate: Operate, text_of: Text) -> None:
    async with operate(text_of(scaling="{min: 0, max: 1}")) as server:
        store = Facts(server.store.facts)
        learning = Learning(server.scheduler, store, defining=server.defining)
        await learn(server, fact(server.defining.find_model("m"), load_seconds=9.0))
        with pytest.raises(LlmgwError, match="did not answer"):
            await learning.forget("m")
        assert figures(server)[-1] is Kind.MEASURED
        store.lost = False
        assert (await learning.forget("m")).facts == ()
        assert figures(server)[-1] is Kind.ESTIMATED
