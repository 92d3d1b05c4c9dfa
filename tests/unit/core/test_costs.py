from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from machines import A100, H100, NONE, PAIRS, SOURCE, a_box, a_fabric, a_gpu, a_host, a_need

from llmgw.core.costs import Score, bid, score
from llmgw.core.hosts import Host
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import ReplicaId

HOLDS = frozenset([SOURCE])
M = ModelName("m")
R = ReplicaId("r")


def the_score(host: Host, **facts: Any) -> Score:
    need = a_need(**facts)
    (only,) = bid(need, [host])
    found = score(need, only.offers)
    assert found.seconds == only.seconds
    return found


def test_a_node_that_holds_the_weights_and_runs_nothing_costs_nothing() -> None:
    assert the_score(a_host(holds=HOLDS)) == Score()


@pytest.mark.parametrize(("min_disk_gb", "seconds"), [(None, 600.0), (140.0, 1400.0), (0.5, 300.0)])
def test_weights_have_to_be_fetched_for_as_long_as_that_takes(min_disk_gb: float | None, seconds: float) -> None:
    assert the_score(a_host(), min_disk_gb=min_disk_gb) == Score(seconds=seconds, fetch_seconds=seconds)


def test_a_path_is_not_fetched_and_a_second_replica_goes_to_another_node() -> None:
    need = a_need()
    read = a_host("n1", holds=frozenset({"/m.gguf"}), replicas={M: 1})
    need = replace(need, model=replace(need.model, source="/m.gguf"))
    assert min(bid(need, [read, a_host("n2")])).ids == ("n2",)
    assert score(need, min(bid(need, [a_host("n2")])).offers) == Score(seconds=30.0, fetch_seconds=30.0)
    assert min(bid(need, [replace(read, replicas={}), a_host("n0")])).ids == ("n1",)


def test_where_it_failed_of_late_it_is_tried_after_where_it_did_not() -> None:
    need = replace(a_need(), failed={NodeId("n1"): 2, NodeId("n2"): 1})
    hosts = [a_host(f"n{number}", holds=HOLDS) for number in (1, 2, 3)]
    assert min(bid(need, hosts)).ids == ("n3",)
    assert min(bid(need, hosts[:2])).ids == ("n2",)
    assert score(need, min(bid(need, hosts[:1])).offers) == Score(seconds=240.0, failures_seconds=240.0)


def test_replicas_of_the_same_model_crowd() -> None:
    host = a_host(holds=HOLDS, replicas={M: 2, ModelName("other"): 5})
    assert the_score(host) == Score(seconds=120.0, crowding_seconds=120.0)


def test_a_whole_node_is_broken_up_only_for_a_price() -> None:
    whole = a_host(holds=HOLDS, gpus=a_box(4))
    assert the_score(whole, tp=2) == Score(seconds=30.0, whole_nodes_seconds=30.0)
    # one that is taken whole is what it was kept for
    assert the_score(whole, tp=4) == Score()
    begun = a_host(holds=HOLDS, gpus=a_box(4), booked={"GPU-3": R})
    assert the_score(begun, tp=2) == Score()


def test_each_group_that_straddles_costs_where_links_are_known() -> None:
    def box(joined: Any) -> Host:
        return a_host(holds=HOLDS, gpus=a_box(4, joined=joined), booked={"GPU-0": R})

    assert the_score(box(PAIRS), tp=3) == Score(seconds=45.0, straddling_seconds=45.0)
    assert the_score(box(None), tp=3) == Score()
    full = a_host(holds=HOLDS, gpus=a_box(4, joined=NONE))
    assert the_score(full, tp=2, pp=2) == Score(seconds=90.0, straddling_seconds=90.0)


def test_a_node_with_gpus_is_kept_from_those_that_need_none() -> None:
    assert the_score(a_host(holds=HOLDS, gpus=a_box(1))) == Score(seconds=20.0, gpu_nodes_seconds=20.0)


def test_what_nodes_of_a_group_cost_adds_up() -> None:
    one = a_host("n1", holds=HOLDS, gpus=a_box(2, name="1-"), fabrics=(a_fabric(),))
    two = a_host("n2", gpus=a_box(2, name="2-"), fabrics=(a_fabric(),), replicas={M: 1})
    need = a_need(tp=2, nodes=2)
    (only,) = bid(need, [one, two])
    assert score(need, only.offers) == Score(
        seconds=720.0, fetch_seconds=600.0, crowding_seconds=60.0, whole_nodes_seconds=60.0
    )
    assert (only.seconds, only.ids, only.fabric) == (720.0, ("n1", "n2"), "ib-a")


def test_of_a_fabric_the_best_two_groups_are_offered() -> None:
    def host(name: str, replicas: int) -> Host:
        return a_host(name, gpus=a_box(1, name=name), fabrics=(a_fabric(),), replicas={M: replicas})

    found = sorted(bid(a_need(tp=2, nodes=2), [host("n1", 3), host("n2", 1), host("n3", 0), host("n4", 2)]))
    assert [(each.seconds, each.ids) for each in found] == [(1260.0, ("n2", "n3")), (1320.0, ("n3", "n4"))]


def test_groups_are_of_one_class() -> None:
    def host(name: str, *classes: str) -> Host:
        gpus = tuple(a_gpu(f"{name}-{at}", at, each) for at, each in enumerate(classes))
        return a_host(name, gpus=gpus, fabrics=(a_fabric(),))

    mixed = [host("n1", A100), host("n2", H100), host("n3", H100, A100)]
    found = sorted(bid(a_need(gpu_class="any", tp=2, nodes=2), mixed))
    assert [(each.ids, each.gpu_class) for each in found] == [(("n1", "n3"), A100), (("n2", "n3"), H100)]
    assert list(bid(a_need(gpu_class="any", tp=2, nodes=2), mixed[:2])) == []


def test_of_two_classes_that_would_do_the_smaller_card_is_taken() -> None:
    host = a_host(gpus=(a_gpu("GPU-0", 0, H100), a_gpu("GPU-1", 1, A100)))
    assert [each.gpu_class for each in sorted(bid(a_need(gpu_class="any"), [host]))] == [A100, H100]


def test_gpus_go_where_the_fewest_are_left_and_what_needs_none_where_the_most_memory_is() -> None:
    one = a_host("n1", memory_gb=16.0, gpus=a_box(4), booked={"GPU-0": R})
    two = a_host("n2", memory_gb=64.0, gpus=a_box(4), booked={"GPU-0": R, "GPU-1": R})
    assert min(bid(a_need(tp=2), [one, two])).ids == ("n2",)
    assert min(bid(a_need(), [one, two])).ids == ("n2",)
    assert min(bid(a_need(gpu_class=H100), [a_host("n2", gpus=a_box(1)), a_host("n1", gpus=a_box(1))])).ids == ("n1",)
