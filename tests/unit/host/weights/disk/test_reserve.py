"""What is promised to one fetch is not there for another."""

from __future__ import annotations

import os

import pytest

from llmgw.host.weights.disk.faults import NoRoom
from llmgw.host.weights.disk.reserve import Reservations


@pytest.fixture
def file(tmp_path):
    file = os.open(tmp_path, os.O_RDONLY)
    yield file
    os.close(file)


@pytest.fixture
def claim(file, tmp_path):
    reservations = Reservations()

    def claim(share, *, left=None):
        sizes = os.statvfs(tmp_path)
        needed = int(sizes.f_bavail * sizes.f_frsize * share)
        return reservations.claim(file, tmp_path, needed, lambda: needed if left is None else left)

    return claim


def test_two_fetches_share_what_is_free(claim):
    first = claim(0.6)
    with pytest.raises(NoRoom, match="of which other fetches still need") as raised:
        claim(0.6)
    assert "are needed in" in raised.value.message
    assert "free on /" in raised.value.message
    assert "free " in raised.value.remedy
    claim(0.3).close()
    first.close()
    first.close()
    claim(0.6)


def test_what_is_written_is_needed_no_more(claim):
    first = claim(0.6)
    first.use(first.left_bytes // 2)
    claim(0.6).close()
    first.use(10**18)
    assert first.left_bytes == 0


def test_what_the_disk_took_beforehand_is_not_counted_twice(claim):
    claim(0.6, left=0)
    claim(0.6)


def test_more_than_is_free_is_refused_before_anything_is_taken(file, tmp_path):
    taken = []
    with pytest.raises(NoRoom, match=r"^1000PB are needed in /.* are free on /[^,]*$"):
        Reservations().claim(file, tmp_path, 10**18, lambda: taken.append(1) or 0)
    assert taken == []


def test_a_disk_that_fails_leaves_no_claim(file, tmp_path, claim):
    reservations = Reservations()

    def fail():
        raise OSError(28, "full")

    sizes = os.statvfs(tmp_path)
    half = int(sizes.f_bavail * sizes.f_frsize * 0.6)
    with pytest.raises(OSError, match="full"):
        reservations.claim(file, tmp_path, half, fail)
    reservations.claim(file, tmp_path, half, lambda: half)
