from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.errors import LlmgwError, UsageError
from llmgw.standalone.pinned import PinnedFile, Unavailable, disk_errors, keep, write_checked


def test_the_right_bytes_are_written_and_get_their_name(tiny: PinnedFile, body: bytes, cache: Path) -> None:
    part = cache / "part"
    moves: list[int] = []
    write_checked(tiny, [body[:10], body[10:]], part, moves.append)
    assert moves == [10, len(body)]
    assert keep(tiny, part, cache).read_bytes() == body
    assert not part.exists()


@pytest.mark.parametrize("extra", [b"", b"more"])
def test_wrong_bytes_leave_nothing(tiny: PinnedFile, body: bytes, cache: Path, extra: bytes) -> None:
    with pytest.raises(Unavailable, match="is not that file"):
        write_checked(tiny, [body[:-1] + b"?" + extra], cache / "part", lambda done: None)
    assert list(cache.iterdir()) == []


def test_an_endless_stream_is_cut_at_the_files_size(tiny: PinnedFile, cache: Path) -> None:
    def endless():  # type: ignore[no-untyped-def]
        while True:
            yield b"x" * 65536

    with pytest.raises(Unavailable):
        write_checked(tiny, endless(), cache / "part", lambda done: None)


def test_a_full_disk_takes_the_leftovers_along(cache: Path) -> None:
    part = cache / "part"
    part.touch()
    with pytest.raises(LlmgwError, match="is full"), disk_errors(cache, part):
        raise OSError(28, "No space left on device")
    assert not part.exists()


def test_a_folder_that_can_not_be_written_is_named(cache: Path) -> None:
    with pytest.raises(UsageError, match="can't use /x: Permission denied"), disk_errors(cache):
        raise PermissionError(13, "Permission denied", "/x")


def test_other_errors_of_the_system_stay_what_they_are(cache: Path) -> None:
    with pytest.raises(TimeoutError), disk_errors(cache):
        raise TimeoutError(110, "timed out")
