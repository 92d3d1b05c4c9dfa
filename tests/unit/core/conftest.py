"""Makes the fleets, machines and files that are made up for the tests of the core importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "fakes" / "origin"))
