"""A file's sum, in whatever order its pieces come."""

from __future__ import annotations

import hashlib
import random
import threading

import pytest

from llmgw.core.weights import LEAST_PIECE_BYTES
from llmgw.host.weights.disk.sums import Sum

PIECES = [bytes([number]) * LEAST_PIECE_BYTES for number in range(4)] + [b"end"]
SIZE = sum(map(len, PIECES))


def test_an_empty_file_has_the_sum_of_nothing():
    total = Sum(0)
    assert total.whole
    assert total.digest() == hashlib.sha256().hexdigest()


@pytest.mark.parametrize("seed", range(5))
def test_pieces_that_came_before_their_turn_are_taken_in_later(seed):
    order = list(range(5))
    random.Random(seed).shuffle(order)
    total, here = Sum(SIZE), set()
    for number in order:
        here.add(number)
        if number == total.next:
            total.add(PIECES[number])
        total.follow(here.__contains__, PIECES.__getitem__, most=1)
    total.follow(here.__contains__, PIECES.__getitem__, most=9)
    assert total.whole
    assert total.done_bytes == SIZE
    assert total.digest() == hashlib.sha256(b"".join(PIECES)).hexdigest()


def test_no_more_is_taken_in_at_once_than_asked_for():
    total = Sum(SIZE)
    total.follow(lambda number: True, PIECES.__getitem__, most=2)
    assert (total.next, total.whole) == (2, False)
    total.reset()
    assert (total.next, total.done_bytes) == (0, 0)


def test_one_thread_at_a_time():
    total, seen = Sum(SIZE), []

    def look():
        with total.try_hold() as mine:
            seen.append(mine)

    with total.hold():
        other = threading.Thread(target=look)
        other.start()
        other.join()
    look()
    assert seen == [False, True]
