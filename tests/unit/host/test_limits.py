from __future__ import annotations

import resource

from llmgw.host.limits import raise_file_limit


def test_as_many_descriptors_are_taken_as_there_may_be() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        raise_file_limit()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
