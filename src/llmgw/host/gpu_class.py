"""What kind of GPU a card is, in one word that a profile can ask for (``h100-80g``)."""

from __future__ import annotations

import re

GIB = 1024**3

# Who sells it, how it is plugged in and cooled, and what its memory is made of: none makes another kind of it.
_SAID_BESIDES = re.compile(
    r"nvidia|tesla|geforce|quadro|grid|graphics|device|gpu|generation|server|workstation|edition|design|with|"
    r"sxm\d*|pcie?|nvl\d*|dgxs|fhhl|oam|[al]c|hbm\d?e?|gddr\d\w?|\d+ ?gi?b"
)
_BRACKETS = re.compile(r"\(.*?\)")
# Makers write them in ways of their own, or name the board and not the card.
_ODD = {
    "nvidia graphics device": "gpu",
    "rtx6000-ada": "rtx-6000-ada",
    "a100-pg509-200": "a100",
    "pg509-210": "a100",
}
# The GiB that cards are sold with, in desktops and in servers. What a driver shows is less: ECC takes a sixteenth of
# some, firmware a little of all.
_SMALL = (1, 2, 3, 4, 5, 6, 8, 10, 11, 12, 16, 20, 24, 32)
_LARGE = (40, 48, 64, 72, 80, 84, 94, 96, 128, 141, 144, 180, 186, 192, 288)
_LONGEST = 60
_TAKEN = 0.08
_SLACK_GIB = 0.1


def name_class(product: str, memory_bytes: int) -> str:
    """The class of a card by its product name and the memory that its driver shows; without that (0), the kind alone.

    Total: a name that nobody knows is made into a word by the same rule.
    """
    kind = _name_kind(product.strip().lower())
    return f"{kind}-{round_memory(memory_bytes)}g" if memory_bytes > 0 else kind


def _name_kind(product: str) -> str:
    if product in _ODD:
        return _ODD[product]
    words = re.split(r"[^a-z0-9]+", re.sub(r"(\d) (gi?b)\b", r"\1\2", _BRACKETS.sub(" ", product)))
    kept = "-".join(word for word in words if word and not _SAID_BESIDES.fullmatch(word))
    return _ODD.get(kept, kept)[:_LONGEST].strip("-") or "gpu"


def round_memory(memory_bytes: int) -> int:
    """The GiB that a card of so many visible bytes is sold with; where none is near, its own, rounded."""
    shown = memory_bytes / GIB
    for sold in (*_SMALL, *_LARGE):
        if shown <= sold + _SLACK_GIB and (sold - shown) / sold <= _TAKEN:
            return sold
    return max(1, round(shown))
