"""The fake inventory: what a file can say a machine has, and what happens when it changes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from llmgw.core.node import Disk, FabricFound, ForeignUse, Gpu, MigInstance
from llmgw.errors import ConfigError
from llmgw.host.inventory_file import FakeInventory, InventoryFile, parse_inventory

EXAMPLE = Path(__file__).parents[3] / "examples" / "fake-inventory.yaml"


def read(text):
    return parse_inventory(text, "fake.yaml", "n1")


def problems(text):
    with pytest.raises(ConfigError) as caught:
        read(text)
    return [str(problem) for problem in caught.value.problems]


def links(text):
    return [gpu.nvlink_peers and tuple(peer[-1] for peer in gpu.nvlink_peers) for gpu in read(text).gpus]


def test_gpus_of_a_kind_are_written_once():
    inventory = read("gpus: [{class: h100-80g, count: 2, nvlink: all}]")
    assert inventory == FakeInventory(
        gpus=(
            Gpu(
                uuid="GPU-n1-0",
                index=0,
                gpu_class="h100-80g",
                name="fake h100-80g",
                memory_gb=80.0,
                memory_used_gb=0.0,
                nvlink_peers=("GPU-n1-1",),
            ),
            Gpu(
                uuid="GPU-n1-1",
                index=1,
                gpu_class="h100-80g",
                name="fake h100-80g",
                memory_gb=80.0,
                memory_used_gb=0.0,
                nvlink_peers=("GPU-n1-0",),
            ),
        )
    )


def test_all_of_a_gpu_can_be_said():
    (gpu,) = read(
        "gpus:\n- {class: odd, name: Card, uuid: GPU-x, index: 7, pci: '0000:c1:00.0', memory_gb: 40,"
        " memory_used_gb: 12.5, temperature_c: 41.5, utilization_percent: 3, ecc_errors: 2, nvlink_peers: [],"
        " broken: it is gone, foreign: [{memory_gb: 10, pid: 47, name: python3}, {memory_gb: 1}],"
        " mig: [{uuid: MIG-1, shape: 1g.10gb, memory_gb: 9.5}]}"
    ).gpus
    assert gpu == Gpu(
        uuid="GPU-x",
        index=7,
        gpu_class="odd",
        name="Card",
        memory_gb=40.0,
        memory_used_gb=12.5,
        pci="0000:c1:00.0",
        temperature_c=41.5,
        utilization_percent=3.0,
        ecc_errors=2,
        nvlink_peers=(),
        mig=(MigInstance(uuid="MIG-1", shape="1g.10gb", memory_gb=9.5),),
        foreign=(ForeignUse(memory_gb=10.0, pid=47, name="python3"), ForeignUse(memory_gb=1.0)),
        broken="it is gone",
    )


def test_what_others_hold_is_in_use():
    (gpu,) = read("gpus: [{class: a-10g, foreign: [{memory_gb: 3}, {memory_gb: 4}]}]").gpus
    assert gpu.memory_used_gb == 7


@pytest.mark.parametrize(
    ("text", "linked"),
    [
        ("gpus: [{class: a-1g, count: 3, nvlink: all}]", [("1", "2"), ("0", "2"), ("0", "1")]),
        ("gpus: [{class: a-1g, count: 3, nvlink: pairs}]", [("1",), ("0",), ()]),
        ("gpus: [{class: a-1g, count: 2, nvlink: none}]", [(), ()]),
        ("gpus: [{class: a-1g, count: 2}]", [None, None]),
        # Of several entries, those that say the same.
        ("gpus: [{class: a-1g, nvlink: pairs}, {class: b-1g, nvlink: none}, {class: c-1g, nvlink: pairs}]",
         [("2",), (), ("0",)]),
        ("gpus: [{class: a-1g, nvlink_peers: [1]}, {class: a-1g, nvlink_peers: [0]}]", [("1",), ("0",)]),
    ],
)  # fmt: skip
def test_how_gpus_are_linked_is_said_in_a_word_or_each_by_its_index(text, linked):
    assert links(text) == linked


def test_indices_go_on_where_the_entry_before_ended():
    gpus = read("gpus: [{class: a-1g, index: 4}, {class: a-1g, count: 2}]").gpus
    assert [gpu.index for gpu in gpus] == [4, 5, 6]


def test_the_rest_of_a_machine_can_be_said():
    inventory = read(
        "driver: '580.1'\nproblem: one card is lost\ncores: 128\ncpu_flags: [avx2]\nmemory_gb: 2000\n"
        "memory_foreign_gb: 50.5\ndisks: [{path: /srv, free_gb: 3, total_gb: 4}]\n"
        "fabrics: {ib-a: {interface: lo, address: '::1', hcas: [mlx5_0]}, ib-b: {down: the cable is out}}\n"
    )
    assert inventory == FakeInventory(
        driver="580.1",
        problem="one card is lost",
        cores=128,
        cpu_flags=frozenset({"avx2"}),
        memory_gb=2000.0,
        memory_foreign_gb=50.5,
        disks=(Disk(path="/srv", free_gb=3.0, total_gb=4.0),),
        fabrics={
            "ib-a": FabricFound(name="ib-a", interface="lo", address="::1", hcas=("mlx5_0",)),
            "ib-b": FabricFound(name="ib-b", down="the cable is out"),
        },
    )


def test_what_is_not_said_is_the_machines_own():
    inventory = read("gpus: []")
    assert (inventory.cores, inventory.cpu_flags, inventory.memory_gb, inventory.disks) == (None, None, None, None)
    assert read("disks: []").disks == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu: []", "1:1 gpu: unknown key (gpus?)"),
        ("gpus: [{class: a-1g, counts: 2}]", "1:22 gpus[0].counts: unknown key (count?)"),
        ("gpus: [{count: 2}]", "1:8 gpus[0].class: is missing"),
        ("gpus: [{class: a b}]", "1:9 gpus[0].class: 'a b' may hold letters, digits and . _ - only (h100-80g)"),
        ("gpus: [{class: h100}]", "1:8 gpus[0].memory_gb: is missing, and the class 'h100' does not end with it"),
        ("gpus: [{class: a-1g, count: 0}]", "1:22 gpus[0].count: must be from 1 to 64, not 0"),
        ("gpus: [{class: a-1g, count: 2, uuid: x}]", "1:32 gpus[0].uuid: is of one GPU alone; give that an entry"),
        ("gpus: [{class: a-1g, nvlink: some}]", "1:22 gpus[0].nvlink: 'some' is not one of all, none, pairs"),
        ("gpus: [{class: a-1g, nvlink: all, nvlink_peers: []}]", "1:35 gpus[0].nvlink_peers: stands beside nvlink"),
        ("gpus: [{class: a-1g, nvlink_peers: [0]}]", "1:22 gpus[0].nvlink_peers: 0 is not the index of another GPU"),
        ("gpus: [{class: a-1g, memory_used_gb: 2}]", "1:22 gpus[0].memory_used_gb: is more than memory_gb (1)"),
        ("gpus: [{class: a-1g, foreign: [{memory_gb: 2}]}]", "1:22 gpus[0].foreign: is more than memory_gb (1)"),
        ("gpus: [{class: a-9g, memory_used_gb: 1, foreign: [{memory_gb: 2}]}]",
         "1:22 gpus[0].memory_used_gb: is less than what foreign holds (2)"),
        ("gpus: [{class: a-1g, foreign: [{pid: 2}]}]", "1:32 gpus[0].foreign[0].memory_gb: is missing"),
        ("gpus: [{class: a-1g, mig: [{memory_gb: 1, shape: x}]}]", "1:28 gpus[0].mig[0].uuid: is missing"),
        ("gpus: [{class: a-1g, uuid: x}, {class: a-1g, uuid: x}]", "1:46 gpus[1].uuid: x is that of another GPU too"),
        ("gpus: [{class: a-1g, index: 1}, {class: a-1g, index: 1}]",
         "1:47 gpus[1].index: 1 is that of another GPU too"),
        ("gpus: [{class: a-1g, count: 60}, {class: a-1g, count: 5}]", "1:1 gpus: are more than 64"),
        ('gpus: [{class: a-1g, broken: "a\\nb"}]', "1:22 gpus[0].broken: must be one printable line of 200 characters"),
        ("memory_gb: 1\nmemory_foreign_gb: 2", "2:1 memory_foreign_gb: is more than memory_gb (1)"),
        ("disks: [{path: /, free_gb: 2, total_gb: 1}]", "1:19 disks[0].free_gb: is more than total_gb (1)"),
        ("disks: [{path: /}]", "1:9 disks[0].free_gb: is missing"),
        ("fabrics: {ib-a: {address: here}}", "1:18 fabrics.ib-a.address: 'here' is no IP address"),
        (f"fabrics: {{{', '.join(f'f{number}: {{}}' for number in range(17))}}}", "1:1 fabrics: are 17; a node has 16"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_placed_and_explained(text, said):
    found = problems(text)
    assert [problem for problem in found if problem.startswith(f"fake.yaml:{said}")], found


def test_no_more_is_taken_than_can_be_told_to_the_server():
    many = ", ".join(["{memory_gb: 0.001}"] * 65)
    (said,) = problems(f"gpus: [{{class: a-9g, foreign: [{many}]}}]")
    assert said.endswith("gpus[0].foreign: are 65; 64 can be told")


def test_the_example_is_one():
    inventory = InventoryFile(EXAMPLE, "n1").load()
    assert len(inventory.gpus) == 11
    assert set(inventory.fabrics) == {"ib-a", "ib-b"}


def test_the_example_names_every_key():
    told = set(re.findall(r"^[# ]*(?:- )?([a-z_]+):", EXAMPLE.read_text(), re.MULTILINE))
    facts = (FakeInventory, Gpu, ForeignUse, MigInstance, Disk, FabricFound)
    keys = {field.name for fact in facts for field in fields(fact)} - {"gpu_class"}
    assert told >= keys | {"class", "count", "nvlink"}


def test_the_file_is_read_anew_when_it_has_changed(tmp_path):
    path = tmp_path / "fake.yaml"
    path.write_text("cores: 1")
    file = InventoryFile(path, "n1")
    assert file.load().cores == 1
    path.write_text("cores: 2")
    assert file.read().cores == 2


def test_a_file_that_is_wrong_changes_nothing_and_says_why(tmp_path):
    path = tmp_path / "fake.yaml"
    path.write_text("cores: 1")
    file = InventoryFile(path, "n1")
    assert (file.read().cores, file.trouble) == (1, None)
    path.write_text("cores: 0\ncore: 1")
    assert file.read().cores == 1
    assert file.trouble == (f"{path}:1:1 cores: must be from 1 to 100000, not 0; {path}:2:1 core: unknown key (cores?)")
    path.write_text("cores: 1")
    assert (file.read().cores, file.trouble) == (1, None)
    path.unlink()
    assert file.read().cores == 1
    assert file.trouble == f"{path} can't be read: No such file or directory"


@pytest.mark.parametrize(
    ("raw", "said"), [(b"\xff", "is not UTF-8"), (b"#" * 300_000, "is larger than 256 KiB: no inventory")]
)
def test_what_is_no_inventory_is_refused(tmp_path, raw, said):
    path = tmp_path / "fake.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=said):
        InventoryFile(path, "n1").load()
