from __future__ import annotations

import re
from pathlib import Path

from llmgw.core.rejection import Reason

PAGE = Path(__file__).parents[3] / "docs" / "placement.md"


def test_every_reason_is_told_with_what_to_do_about_it() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [reason for reason, when, remedy in rows if when and remedy] == list(Reason)
