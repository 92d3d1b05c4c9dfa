"""Log files, written to while they are read."""

from __future__ import annotations

import os

import pytest
import trio

from llmgw.host.logfile import LINE_CHARACTERS, READ_BYTES, LogFile, begin_log, clean, older, prune_logs


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shd.log"


def add(path, octets):
    with path.open("ab") as file:
        file.write(octets)


def test_only_complete_lines_are_new(path):
    log = LogFile(path)
    assert log.read_new() == []
    add(path, b"one\ntw")
    assert log.read_new() == ["one"]
    add(path, b"o\n\nthree\r\n")
    assert log.read_new() == ["two", "three"]
    assert log.read_new() == []


def test_a_file_cut_by_another_is_read_from_its_beginning(path):
    log = LogFile(path)
    add(path, b"a long first line\npartial")
    log.read_new()
    path.write_bytes(b"new\n")
    assert log.read_new() == ["new"]


def test_a_progress_bar_is_many_lines(path):
    log = LogFile(path)
    add(path, b"10%\r20%\r30%")
    assert log.read_new() == ["10%", "20%"]


def test_an_endless_line_is_cut_and_does_not_grow_memory(path):
    log = LogFile(path)
    for _ in range(3):
        add(path, b"x" * READ_BYTES)
        assert log.read_new() == []
    add(path, b"\nnext\n")
    first, second = log.read_new()
    assert len(first) == LINE_CHARACTERS
    assert first.endswith("…")
    assert second == "next"


def test_of_a_flood_only_the_newest_is_read(path):
    log = LogFile(path)
    add(path, b"early\n" + b"noise\n" * READ_BYTES + b"late\n")
    lines = log.read_new()
    assert "early" not in lines
    assert set(lines[:-1]) == {"noise"}
    assert lines[-1] == "late"


@pytest.mark.parametrize(
    ("octets", "text"),
    [
        (b"gr\xc3\xbcn", "grün"),
        (b"bad \xff\xc3 end", "bad \ufffd\ufffd end"),
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07end", "red end"),
        (b"bell\x07 nul\x00 tab\there", "bell nul tab\there"),
        (b"trailing  \r", "trailing"),
    ],
)
def test_a_line_is_safe_to_show(octets, text):
    assert clean(octets) == text


def test_the_last_lines_include_the_unfinished_one(path):
    add(path, b"".join(b"line %d\n" % at for at in range(10)) + b"half")
    assert LogFile(path).read_last(3) == ("line 8", "line 9", "half")


def test_the_last_lines_of_a_missing_or_empty_file_are_none(path):
    assert LogFile(path).read_last(3) == ()
    path.touch()
    assert LogFile(path).read_last(3) == ()


def test_the_last_lines_of_a_huge_file_begin_with_a_whole_one(path):
    add(path, b"a\n" + b"b" * READ_BYTES + b"\nc\n")
    assert LogFile(path).read_last(5) == ("c",)


def test_a_file_within_its_cap_is_left_alone(path):
    add(path, b"0123456789\n")
    LogFile(path).cap(11)
    assert not older(path).exists()


def test_a_file_over_its_cap_becomes_the_older_part(path):
    log = LogFile(path)
    add(path, b"one\ntwo\nthree\n")
    log.read_new()
    log.cap(10)
    assert path.read_bytes() == b""
    assert older(path).read_bytes() == b"two\nthree\n"
    add(path, b"four\n")
    assert log.read_new() == ["four"]
    assert log.read_last(3) == ("two", "three", "four")


def test_the_log_of_a_run_before_is_kept_and_not_taken_for_this_ones(path):
    begin_log(path)
    add(path, b"fatal: first\n")
    begin_log(path)
    add(path, b"second\n")
    assert older(path).read_bytes() == b"fatal: first\n"
    assert LogFile(path).read_last(10) == ("second",)


@pytest.mark.slow
async def test_an_engine_goes_on_writing_while_its_log_is_capped(start, path, tmp_path, wait_for_line):
    start("import itertools\nfor at in itertools.count(): print(f'line {at:09d}', flush=True)")
    path = tmp_path / "log"
    log = LogFile(path)
    await wait_for_line("line")
    cap_bytes = 20_000
    with trio.fail_after(100):
        for _ in range(3):
            while not older(path).exists():
                await trio.to_thread.run_sync(log.cap, cap_bytes)
            older(path).rename(tmp_path / "before")
        # It may have been cut a moment ago, and hold nothing yet that could be moved.
        while not older(path).exists():
            await trio.to_thread.run_sync(log.cap, 1)
    assert b"\0" not in path.read_bytes()
    numbers = [int(line.split()[1]) for line in log.read_last(10_000)[1:-1]]
    assert numbers == sorted(numbers)
    assert older(path).stat().st_size <= 2 * cap_bytes


def test_the_oldest_logs_that_nobody_uses_go(tmp_path):
    for at in range(5):
        path = tmp_path / f"shd-{at}.log"
        path.touch()
        os.utime(path, (at, at))
    (tmp_path / "shd-0.log.1").touch()
    prune_logs(tmp_path, {tmp_path / "shd-0.log"}, kept=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shd-0.log", "shd-0.log.1", "shd-3.log", "shd-4.log"]


def test_what_is_hidden_is_hidden_before_a_line_is_cut(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("x" * (LINE_CHARACTERS - 4) + "sekret\n" + "sek\x1b[1mret\n")
    log = LogFile(path, lambda text: text.replace("sekret", "***"))
    assert log.read_new() == ["x" * (LINE_CHARACTERS - 4) + "***", "***"]
    assert log.read_last(1) == ("***",)
