"""Ports, with real sockets."""

from __future__ import annotations

import os
import socket

import pytest

from llmgw.errors import EngineFailed
from llmgw.host.ports import Ports, is_foreign, is_free, is_taken


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def find_range(count):
    """A stretch of ports that nobody listens on."""
    for first in range(21000 + os.getpid() % 199 * 20, 25000, count):
        if all(is_free(port) for port in range(first, first + count)):
            return first, first + count - 1
    raise AssertionError("no free ports on this machine")


def test_a_place_is_taken_while_another_listens_there(listener):
    port = listener.getsockname()[1]
    assert is_taken(f"127.0.0.1:{port}")
    listener.close()
    assert not is_taken(f"127.0.0.1:{port}")


def test_a_place_of_ip_6_is_taken_while_another_listens_there():
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listener.listen()
        assert is_taken(f"[::1]:{listener.getsockname()[1]}")


# Of documentation's own network, a name, and what is no place at all.
@pytest.mark.parametrize("place", ["192.0.2.1:29500", "[2001:db8::1]:29500", "node-7.example:29500", "x", "a:b", "."])
def test_a_place_that_can_not_be_tried_is_not_called_taken(place):
    assert not is_taken(place)


def test_a_port_is_never_given_twice():
    ports = Ports(*find_range(5))
    assert len({ports.take() for _ in range(5)}) == 5
    with pytest.raises(EngineFailed, match="engine_ports"):
        ports.take()


def test_a_port_given_back_is_not_the_next_one_given():
    first, last = find_range(3)
    ports = Ports(first, last)
    assert ports.take() == first
    ports.give_back(first)
    assert [ports.take(), ports.take(), ports.take()] == [first + 1, last, first]


def test_a_port_that_an_engine_was_found_on_is_not_given():
    first, last = find_range(2)
    ports = Ports(first, last)
    ports.hold(first)
    assert ports.take() == last


def test_a_port_that_another_program_listens_on_is_not_given(listener):
    port = listener.getsockname()[1]
    assert not is_free(port)
    with pytest.raises(EngineFailed):
        Ports(port, port).take()


def test_a_port_that_is_listened_on_everywhere_is_not_free():
    with socket.create_server(("0.0.0.0", 0)) as listener:
        assert not is_free(listener.getsockname()[1])


def test_a_listener_of_ours_is_told_from_a_strangers(listener):
    port = listener.getsockname()[1]
    assert not is_foreign(port, {os.getpid()})
    assert is_foreign(port, {os.getppid()}) or not os.access(f"/proc/{os.getppid()}/fd", os.R_OK)
    assert is_foreign(port, set())


def test_a_port_without_a_listener_is_nobodys(listener):
    port = listener.getsockname()[1]
    listener.close()
    assert not is_foreign(port, {os.getpid()})


def test_what_can_not_be_looked_into_is_not_called_foreign(listener):
    assert not is_foreign(listener.getsockname()[1], {2**22 - 7})


def test_whether_a_port_is_free_may_be_for_others_to_say():
    ports = Ports(1, 3, is_free=lambda port: port == 2)
    assert ports.take() == 2
    with pytest.raises(EngineFailed):
        ports.take()
