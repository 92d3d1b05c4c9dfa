"""Makes the bench's own package importable for its test, as it is for run.py, which lies beside it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
