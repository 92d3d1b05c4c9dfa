"""How the text after a flag becomes the value that xllamacpp wants; ValueError or KeyError where it can't.

Each takes xllamacpp as well, for the few values that are names or classes of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Convert = Callable[[ModuleType, str], Any]

_SWITCH = dict.fromkeys(("on", "enabled", "true", "1"), True) | dict.fromkeys(("off", "disabled", "false", "0"), False)


def text(_module: ModuleType, value: str) -> str:
    return value


def number(_module: ModuleType, value: str) -> int:
    return int(value)


def decimal(_module: ModuleType, value: str) -> float:
    return float(value)


def switch(_module: ModuleType, value: str) -> bool:
    return _SWITCH[value]


def inverse(module: ModuleType, value: str) -> bool:
    return not switch(module, value)


def listed(_module: ModuleType, value: str) -> list[str]:
    items = [item.strip() for item in value.split(",") if item.strip()]
    if not items:
        raise ValueError(value)
    return items


def layers(_module: ModuleType, value: str) -> int:
    return {"auto": -1, "all": -2}.get(value) or int(value)


def content(_module: ModuleType, value: str) -> str:
    return Path(value).read_text(encoding="utf-8")


def folder(_module: ModuleType, value: str) -> str:
    if not Path(value).is_dir():
        raise OSError(f"not a directory: {value}")
    return value.rstrip("/") + "/"


def template_values(_module: ModuleType, value: str) -> dict[str, str]:
    return {key: json.dumps(item) for key, item in json.loads(value).items()}


class More(list[Any]):
    """Items that go beside those which are there already."""


def adapters(module: ModuleType, value: str) -> More:
    return More(module.CommonAdapterLoraInfo(path, 1.0) for path in listed(module, value))


def scaled_adapters(module: ModuleType, value: str) -> More:
    pairs = [item.split(":") for item in listed(module, value)]
    return More(module.CommonAdapterLoraInfo(path, float(scale)) for path, scale in pairs)


def no_device(item: Any) -> Convert:
    """``item`` for "none", which is all that can be asked for: xllamacpp has no choice of devices."""

    def pick(_module: ModuleType, value: str) -> Any:
        if value != "none":
            raise ValueError(value)
        return item

    return pick


def one_of(enum: str, prefix: str, **words: str) -> Convert:
    """A name of one of llama.cpp's enums; ``words`` are the values whose names differ from what is typed."""

    def pick(module: ModuleType, value: str) -> Any:
        return getattr(module, enum)[prefix + words.get(value, value.upper().replace("-", "_"))]

    return pick


def fixed(value: Any) -> Convert:
    return lambda _module, _value: value
