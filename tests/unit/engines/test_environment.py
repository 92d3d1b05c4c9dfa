"""Variables for cards, fabric, caches and the hub."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.engines import Fabric, Launch, pin_cards, pin_fabric, place_caches, stay_offline

LAUNCH = Launch(program=("e",), source="org/m", served_name="m", host="127.0.0.1", port=18000)
GROUP = replace(LAUNCH, count=2, rank=1, fabric=Fabric(address="192.0.2.2", interface="ib0", hcas=("mlx5_0", "mlx5_3")))


def test_cards_are_counted_by_bus_order_and_none_is_none() -> None:
    assert pin_cards(None) == {}
    assert pin_cards(()) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ""}
    assert pin_cards((2, 0))["CUDA_VISIBLE_DEVICES"] == "2,0"


def test_shards_meet_on_the_fabric() -> None:
    assert pin_fabric(GROUP, "E_HOST") == {
        "E_HOST": "192.0.2.2",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_3",
    }
    bare = replace(GROUP, fabric=Fabric(address="192.0.2.2", interface="eth1"))
    assert "NCCL_IB_HCA" not in pin_fabric(bare, "E_HOST")


@pytest.mark.parametrize("launch", [LAUNCH, replace(GROUP, count=1), replace(GROUP, fabric=None)])
def test_one_shard_meets_nobody(launch: Launch) -> None:
    assert pin_fabric(launch, "E_HOST") == {}


def test_caches_lie_below_the_folder_of_the_launch() -> None:
    found = place_caches(replace(LAUNCH, cache="/var/cache/e/"), {"E_CACHE": "own"})
    assert found["E_CACHE"] == "/var/cache/e/own"
    assert found["HF_HOME"] == "/var/cache/e/huggingface"
    assert len(set(found.values())) == len(found)
    assert place_caches(LAUNCH, {"E_CACHE": "own"}) == {}


def test_the_hub_is_left_alone_where_all_is_a_path() -> None:
    assert stay_offline(["/srv/m", "./m", "../m", "~/m"]) == {"HF_HUB_OFFLINE": "1"}
    assert stay_offline(["/srv/m", "org/m"]) == {}
