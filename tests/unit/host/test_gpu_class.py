"""The class of a card, by names and sizes as drivers give them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.host.gpu_class import name_class, round_memory

MIB = 2**20


@pytest.mark.parametrize(
    ("product", "mib", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40g"),
        ("NVIDIA A100-PCIE-40GB", 40536, "a100-40g"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-80g"),
        ("NVIDIA A100-SXM-64GB", 65536, "a100-64g"),
        ("NVIDIA A100-PG509-200", 40536, "a100-40g"),
        ("NVIDIA PG509-210", 81251, "a100-80g"),
        ("NVIDIA A800-SXM4-80GB", 81920, "a800-80g"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80g"),
        ("NVIDIA H100 PCIe", 81559, "h100-80g"),
        ("NVIDIA H100 NVL", 95830, "h100-94g"),
        ("NVIDIA H20", 97871, "h20-96g"),
        ("NVIDIA H200", 143771, "h200-141g"),
        # (it is the processor that has 480 GB)
        ("NVIDIA GH200 480GB", 97871, "gh200-96g"),
        ("NVIDIA B200", 183359, "b200-180g"),
        ("NVIDIA B300 SXM6 AC", 275040, "b300-288g"),
        ("NVIDIA GB200", 189471, "gb200-186g"),
        ("NVIDIA L40S", 46068, "l40s-48g"),
        ("NVIDIA L4", 23034, "l4-24g"),
        ("NVIDIA A10", 23028, "a10-24g"),
        ("NVIDIA A10G", 23028, "a10g-24g"),
        ("NVIDIA A30", 24576, "a30-24g"),
        ("NVIDIA A2", 15356, "a2-16g"),
        ("Tesla T4", 15360, "t4-16g"),
        ("Tesla T4", 15109, "t4-16g"),
        ("Tesla V100-SXM2-32GB", 32510, "v100-32g"),
        ("Tesla V100-PCIE-16GB", 16160, "v100-16g"),
        ("Tesla V100-DGXS-32GB", 32510, "v100-32g"),
        ("Tesla P40", 22919, "p40-24g"),
        ("Tesla P100-PCIE-16GB", 16276, "p100-16g"),
        ("Tesla K80", 11441, "k80-12g"),
        ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090-32g"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090-24g"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "rtx-4090-laptop-16g"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "rtx-4070-ti-super-16g"),
        ("GeForce GTX 1080 Ti", 11178, "gtx-1080-ti-11g"),
        ("GeForce RTX 2080 Ti", 11264, "rtx-2080-ti-11g"),
        # (with twice the memory that it is sold with)
        ("NVIDIA GeForce RTX 2080 Ti", 22528, "rtx-2080-ti-22g"),
        ("NVIDIA RTX 6000 Ada Generation", 46068, "rtx-6000-ada-48g"),
        ("NVIDIA RTX6000-Ada", 49140, "rtx-6000-ada-48g"),
        ("NVIDIA RTX A6000", 49140, "rtx-a6000-48g"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx-pro-6000-blackwell-96g"),
        ("Quadro RTX 8000", 48601, "rtx-8000-48g"),
        ("Quadro P4000", 8192, "p4000-8g"),
        ("NVIDIA TITAN RTX", 24576, "titan-rtx-24g"),
        ("Orin (nvgpu)", 62841, "orin-64g"),
        ("NVIDIA GB10", 122570, "gb10-128g"),
        ("NVIDIA Graphics Device", 16000, "gpu-16g"),
    ],
)
def test_a_card_has_the_class_that_people_call_it_by(product, mib, expected):
    assert name_class(product, mib * MIB) == expected


def test_a_card_whose_memory_is_unknown_has_its_kind_for_a_class():
    assert name_class("NVIDIA H100 80GB HBM3", 0) == "h100"


@pytest.mark.parametrize(("mib", "gib"), [(100, 1), (7000, 7), (57344, 56), (300 * 1024, 288 + 12), (400 * 1024, 400)])
def test_a_size_that_nobody_sells_is_rounded(mib, gib):
    assert round_memory(mib * MIB) == gib


@given(st.text(max_size=100), st.integers(min_value=0, max_value=2**50))
def test_every_name_becomes_one_word_that_a_profile_can_ask_for(product, memory_bytes):
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,80}", name_class(product, memory_bytes))
