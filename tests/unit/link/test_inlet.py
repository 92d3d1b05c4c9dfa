"""What goes up to a websocket: all that came, in order, in few frames at a time, whatever the pieces."""

from __future__ import annotations

import random

import pytest

from llmgw.link.inlet import MESSAGE_FRAMES, PART_BYTES, TURN_FRAMES, Inlet, TooManyFrames

ASKED = b"GET /llmgw/link HTTP/1.1\r\nhost: x\r\n\r\n"
ANSWERED = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\r\n"
REFUSED = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 6\r\n\r\n"


def frame(size: int, *, first: int = 0x82, masked: bool = True) -> bytes:
    mask = 0x80 if masked else 0
    if size < 126:
        length = bytes([mask | size])
    elif size < 65536:
        length = bytes([mask | 126]) + size.to_bytes(2, "big")
    else:
        length = bytes([mask | 127]) + size.to_bytes(8, "big")
    return bytes([first]) + length + bytes(4 if masked else 0) + b"x" * size


def open_inlet() -> Inlet:
    inlet = Inlet()
    assert inlet.feed(ASKED) == ASKED
    inlet.answered = True
    return inlet


def take_all(inlet: Inlet) -> list[bytes]:
    return list(iter(inlet.take, b""))


def test_a_few_frames_go_up_at_once() -> None:
    inlet = open_inlet()
    small = frame(0)
    assert inlet.feed(small * 100) == b""
    taken = take_all(inlet)
    assert taken == [small * TURN_FRAMES] * (100 // TURN_FRAMES) + [small * (100 % TURN_FRAMES)]


def test_a_frame_waits_until_it_is_whole() -> None:
    inlet = open_inlet()
    whole = frame(1000)
    for at in range(len(whole) - 1):
        inlet.feed(whole[at : at + 1])
        assert inlet.take() == b""
    inlet.feed(whole[-1:])
    assert take_all(inlet) == [whole]


def test_a_large_frame_goes_up_in_parts_that_are_not_small() -> None:
    inlet = open_inlet()
    large = frame(1_000_000)
    parts: list[bytes] = []
    for at in range(0, len(large), 100):
        inlet.feed(large[at : at + 100])
        parts += take_all(inlet)
    inlet.feed(frame(3))
    parts += take_all(inlet)
    assert b"".join(parts) == large + frame(3)
    assert all(len(part) >= PART_BYTES for part in parts[:-2])


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_all_that_came_goes_up_in_order(*, masked: bool, seed: int) -> None:
    rng = random.Random(seed)
    inlet = Inlet()
    inlet.answered = not masked
    head = ASKED if masked else ANSWERED
    sizes = [rng.choice([0, 1, 125, 126, 5000, 65535, 65536, 200_000]) for _ in range(60)]
    body = b"".join(frame(size, masked=masked) for size in sizes)
    sent, up, at = head + body, b"", 0
    while at < len(sent):
        # what comes along with a request comes too early
        end = min(
            at + rng.choice([1, 2, 7, 1000, 16384, 70_000]), len(sent) if at >= len(head) or not masked else len(head)
        )
        up += inlet.feed(sent[at:end]) + b"".join(take_all(inlet))
        at = end
        inlet.answered = inlet.answered or at >= len(head)
    assert up == sent


@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_message_has_a_bounded_number_of_frames(size: int) -> None:
    inlet = open_inlet()
    inlet.feed(frame(size, first=0x02) + frame(size, first=0x00) * (MESSAGE_FRAMES - 2) + frame(size, first=0x80))
    take_all(inlet)
    inlet.feed(frame(size, first=0x02) + frame(size, first=0x00) * (MESSAGE_FRAMES - 1))
    with pytest.raises(TooManyFrames, match="more than 256 frames"):
        take_all(inlet)


def test_what_comes_before_the_upgrade_is_answered_is_not_taken_for_frames() -> None:
    inlet = Inlet()
    assert inlet.feed(ASKED + b"\x02") == ASKED
    assert inlet.feed(b"early") == b""
    assert inlet.take() == b""
    inlet.answered = True
    inlet.feed(frame(3))
    assert take_all(inlet) == [frame(3)]


def test_frames_may_come_along_with_the_answer() -> None:
    inlet = Inlet()
    inlet.answered = True
    sent = ANSWERED + frame(5, masked=False)
    up = b"".join(inlet.feed(sent[at : at + 1]) + inlet.take() for at in range(len(sent)))
    assert up == sent


def test_an_answer_that_says_no_goes_up_as_it_is() -> None:
    inlet = Inlet()
    inlet.answered = True
    sent = REFUSED + b"sorry!"
    assert b"".join(inlet.feed(sent[at : at + 1]) for at in range(len(sent))) == sent
