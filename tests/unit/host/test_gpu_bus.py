"""What the kernel knows of cards, with folders as it has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.host.gpu_bus import count_cards, list_driven, short_pci


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("000F0000:01:00.1", "f0000:01:00.1"),
        ("3B:00.0", "0000:3b:00.0"),
        ("[N/A]", None),
        ("", None),
        ("00000000:3B:00.9", None),
    ],
)
def test_an_address_is_written_as_the_kernel_does(address, expected):
    assert short_pci(address) == expected


def put_device(sys: Path, address: str, vendor: str, kind: str, driver: str | None = None) -> None:
    folder = sys / "bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")
    if driver is not None:
        (sys / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(f"../../drivers/{driver}")


def test_cards_are_counted_that_this_machine_could_use(tmp_path):
    put_device(tmp_path, "0000:01:00.0", "0x10de", "0x030000", "nvidia")
    put_device(tmp_path, "0000:01:00.1", "0x10de", "0x040300", "snd_hda_intel")
    put_device(tmp_path, "0000:02:00.0", "0x10de", "0x030200")
    put_device(tmp_path, "0000:03:00.0", "0x10de", "0x030200", "vfio-pci")
    put_device(tmp_path, "0000:04:00.0", "0x1002", "0x030000", "amdgpu")
    put_device(tmp_path, "0000:05:00.0", "0x10de", "0x068000")
    assert count_cards(tmp_path) == 2


def test_a_machine_whose_devices_can_not_be_seen_is_unknown(tmp_path):
    assert count_cards(tmp_path) is None


def put_driven(proc: Path, address: str, uuid: str, excluded: str = "No") -> None:
    folder = proc / "driver/nvidia/gpus" / address
    folder.mkdir(parents=True)
    (folder / "information").write_text(
        f"Model: \t\t NVIDIA GeForce RTX 3090\nIRQ:   \t\t 120\nGPU UUID: \t {uuid}\nGPU Excluded:\t {excluded}\n"
    )


def test_the_cards_that_a_driver_was_given_are_told(tmp_path):
    put_driven(tmp_path, "0000:0a:00.0", "GPU-a")
    put_driven(tmp_path, "0000:0b:00.0", "GPU-????????-????-????-????-????????????")
    put_driven(tmp_path, "0000:0c:00.0", "GPU-c", excluded="Yes")
    found = list_driven(tmp_path)
    assert [(pci, card.uuid, card.name) for pci, card in found.items()] == [
        ("0000:0a:00.0", "GPU-a", "NVIDIA GeForce RTX 3090"),
        ("0000:0b:00.0", None, "NVIDIA GeForce RTX 3090"),
    ]


def test_without_a_driver_there_are_none(tmp_path):
    assert list_driven(tmp_path) == {}
