"""What the kernel knows of NVIDIA's cards without asking their driver's library."""

from __future__ import annotations

import re
from pathlib import Path

from llmgw.host.cards import LostCard

PROC = Path("/proc")
SYS = Path("/sys")

_NVIDIA = "0x10de"
# Display controllers (VGA, 3D); the same card's sound and USB have classes of their own.
_DISPLAY = ("0x0300", "0x0302")
_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)


def short_pci(address: str) -> str | None:
    """A PCI address as the kernel writes it (``0000:3b:00.0``); the driver writes the domain with eight digits. None
    for what is none."""
    found = _ADDRESS.fullmatch(address.strip())
    if found is None:
        return None
    domain, bus, device, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def count_cards(sys: Path = SYS) -> int | None:
    """How many of NVIDIA's cards are in this machine and not handed to a virtual machine; None where that can't be
    seen. Without one it does not matter that a driver does not run."""
    try:
        devices = list((sys / "bus/pci/devices").iterdir())
    except OSError:
        return None
    return sum(_is_card(device) for device in devices)


def _is_card(device: Path) -> bool:
    if _read(device / "vendor") != _NVIDIA or not _read(device / "class").startswith(_DISPLAY):
        return False
    return (device / "driver").resolve().name != "vfio-pci"


def list_driven(proc: Path = PROC) -> dict[str, LostCard]:
    """The cards that the driver has been given, by address, as they would be told if its library can't open them."""
    found = {}
    try:
        folders = sorted((proc / "driver/nvidia/gpus").iterdir())
    except OSError:
        return {}
    for folder in folders:
        pci = short_pci(folder.name)
        lines = (line.partition(":") for line in _read(folder / "information").splitlines())
        facts = {name.strip(): value.strip() for name, _, value in lines}
        if pci is None or facts.get("GPU Excluded") == "Yes":
            continue
        uuid = facts.get("GPU UUID")
        found[pci] = LostCard(
            reason="the driver can't start it: the kernel's log says why (`dmesg | grep -i nvrm`)",
            pci=pci,
            # One that never started has question marks for digits.
            uuid=uuid if uuid and "?" not in uuid else None,
            name=facts.get("Model"),
        )
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
