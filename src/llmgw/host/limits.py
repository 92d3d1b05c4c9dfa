"""What the machine lets this process have."""

from __future__ import annotations

import resource


def raise_file_limit() -> None:
    """Each client and each engine connection is a descriptor: take as many as the hard limit gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
