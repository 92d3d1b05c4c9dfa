"""What a release of vLLM knows: by its own help where that was read, else by its number.

The releases that are spoken of as supported are 0.10.1 to 0.32.
"""

from __future__ import annotations

from llmgw.engines import Version
from llmgw.engines import knows as takes

# Optional to llmgw, and newer than the oldest release that it supports; what is not here is in all of them.
_SINCE = {
    "--enable-log-requests": "0.10.1",
    "--runner": "0.10.1",
}
_UNTIL = {"--task": "0.13", "--disable-log-requests": "0.17"}


def knows(version: Version | None, flag: str) -> bool:
    """Whether this release takes the flag; None is taken for a current one."""
    return takes(version, flag, since=_SINCE.get(flag), until=_UNTIL.get(flag))


def is_for_cpu(version: Version | None) -> bool:
    """Whether it is a build for CPUs, which names itself ``0.32.0+cpu``."""
    return version is not None and "+cpu" in version.number
