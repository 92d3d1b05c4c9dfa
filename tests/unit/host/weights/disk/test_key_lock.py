"""One fetches a source, the others wait and see who it is; whoever dies lets go."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import partial

import pytest
import trio

from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.key_lock import Holder, show_life, take_lock, try_lock

HOLD = """
import pathlib, sys
from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.key_lock import try_lock
file = try_lock(open_folder(pathlib.Path(sys.argv[1])))
print(getattr(file, "words", file), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_holder(tmp_path):
    """Another program that holds the lock, or tries to."""
    started = []

    def start():
        argv = [sys.executable, "-c", HOLD, tmp_path]
        started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1], started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_who_holds_it_is_told_in_words(tmp_path):
    with open_folder(tmp_path) as folder:
        file = try_lock(folder)
        assert isinstance(file, int)
        holder = try_lock(folder)
        assert isinstance(holder, Holder)
        assert holder.words == f"pid {os.getpid()} on host {socket.gethostname()}"
        os.close(file)
        file = try_lock(folder)
        assert isinstance(file, int)
        os.close(file)


@pytest.mark.slow
def test_it_is_free_once_its_holder_was_killed(tmp_path, start_holder):
    process, _ = start_holder()
    assert start_holder()[1] == f"pid {process.pid} on host {socket.gethostname()}"
    with open_folder(tmp_path) as folder:
        assert "pid" in try_lock(folder).words
        process.kill()
        process.wait()
        file = try_lock(folder)
        assert isinstance(file, int)
        os.close(file)


@pytest.mark.slow
async def test_a_waiter_gets_it_when_the_first_dies(tmp_path, start_holder):
    process, _ = start_holder()
    told = []

    def waiting(who):
        told.append(who)
        process.kill()

    with trio.fail_after(60):
        os.close(await take_lock(partial(open_folder, tmp_path), waiting))
    assert told == [f"pid {process.pid} on host {socket.gethostname()}"]


async def test_waiting_ends_when_it_is_cancelled_and_nothing_stays_open(tmp_path, autojump_clock):
    with open_folder(tmp_path) as folder:
        file = try_lock(folder)
        before = len(os.listdir("/proc/self/fd"))
        with trio.move_on_after(30) as scope:
            await take_lock(partial(open_folder, tmp_path), lambda who: None)
        assert scope.cancelled_caught
        assert len(os.listdir("/proc/self/fd")) == before
        os.close(file)


def test_a_lock_that_was_removed_under_its_waiter_keeps_nobody_out(tmp_path):
    class Removed:
        """As if the file went away between its opening and the lock."""

        def __init__(self, folder):
            self._folder = folder

        def open(self, name, flags):
            file = self._folder.open(name, flags)
            self._folder.unlink(name)
            return file

        def status(self, name):
            return self._folder.status(name)

    with open_folder(tmp_path) as folder:
        assert try_lock(Removed(folder)) is None
        file = try_lock(folder)
        assert isinstance(file, int)
        os.close(file)


async def test_a_folder_that_goes_away_is_tried_again_and_not_for_ever(tmp_path):
    tries = []

    def open_it():
        tries.append(1)
        if len(tries) < 3:
            raise FileNotFoundError
        return open_folder(tmp_path)

    os.close(await take_lock(open_it, lambda who: None))
    assert len(tries) == 3


def test_words_that_are_none_are_not_told(tmp_path):
    with open_folder(tmp_path) as folder:
        file = try_lock(folder)
        (tmp_path / ".lock").write_bytes(b"\x1b[2J\xff")
        assert try_lock(folder).words == "another program"
        os.close(file)


async def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".lock").symlink_to("precious")
    with pytest.raises(OSError, match="it is a link"):
        await take_lock(partial(open_folder, tmp_path), lambda who: None)
    assert (tmp_path / "precious").read_text() == "mine"


async def test_whoever_waits_hears_each_time_that_the_holder_goes_on(tmp_path):
    send, heard = trio.open_memory_channel(9)
    with open_folder(tmp_path) as folder:
        file = try_lock(folder)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_lock, partial(open_folder, tmp_path), send.send_nowait)
            with trio.fail_after(60):
                for count in (1, 2):
                    assert await heard.receive() == f"pid {os.getpid()} on host {socket.gethostname()}"
                    # (the clock of a filesystem has steps)
                    os.utime(tmp_path / ".lock", (count, count))
                await heard.receive()
                show_life(folder)
                await heard.receive()
            nursery.cancel_scope.cancel()
        os.close(file)
