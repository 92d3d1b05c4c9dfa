"""What another node is answered that asks for weights, over whatever connection it comes.

GET /llmgw/weights/KEY/COMMIT?after=N&wait=S&log=WORD    what is here of a commit, from that position of its log on
GET /llmgw/weights/KEY/COMMIT/FILE/PIECE                 the bytes of a piece
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import parse_qs

import msgspec
import trio

from llmgw.core.node import NodeId
from llmgw.core.weights import RELAY_NODE
from llmgw.host.weights.disk.file_names import is_commit, is_key
from llmgw.host.weights.shelf import Shelf, Spoiled
from llmgw.reactor.talk import Asked, Talk

log = logging.getLogger(__name__)

PATH = re.compile(r"/llmgw/weights/([^/]+)/([^/]+)(?:/(\d{1,6})/(\d{1,6}))?", re.ASCII)
# Pieces that are read and sent at a time. Each of them is in memory.
MAX_TRANSFERS = 16
MAX_NEWS = 8192
MAX_WAIT_SECONDS = 30.0
NEWS_SECONDS = 0.2
TELL_SECONDS = 60.0

Find = Callable[[str, str], Shelf | None]
Allowed = Callable[[NodeId, str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long is waited, in seconds: for a handshake, for a head from its first byte, for a next request, for a reader
    that takes nothing, and until an address that can't be had is tried again. ``age``: after so long a connection ends
    with its next answer, so that a certificate is looked at again."""

    handshake: float = 10.0
    head: float = 10.0
    idle: float = 75.0
    stall: float = 60.0
    bind: float = 10.0
    age: float = 3600.0


class Giver:
    """Answers on all connections. ``find`` says what is here of a commit of the source with this key, None for nothing;
    it is called in the loop for each request and must not block. ``allowed``: whether this node may have anything of
    that source now."""

    def __init__(self, find: Find, allowed: Allowed, pace: Pace | None = None) -> None:
        self._find = find
        self._allowed = allowed
        self.pace = pace or Pace()
        self.complaints = Complaints()
        self._transfers = 0
        # Of its own, so that a disk that hangs keeps no other room's threads.
        self._threads = trio.CapacityLimiter(MAX_TRANSFERS)

    async def talk(
        self, stream: trio.abc.Stream, node: NodeId | None, busy: Callable[[bool], None] = lambda is_busy: None
    ) -> None:
        """Answer on a connection that stands, until it ends. Raises Over, and trio's errors of a stream that broke.

        ``node`` is who asks. None: each request names it, for its other end is one that is believed in that.
        ``busy`` is told when a request has come, and when it is answered.
        """
        pace = self.pace
        talk = Talk(stream, head_seconds=pace.head, idle_seconds=pace.idle, stall_seconds=pace.stall)
        until = trio.current_time() + pace.age
        while (asked := await talk.hear()) is not None:
            busy(True)
            request = _read_request(asked)
            with self._hold_transfer(request) as is_full:
                answer = _refuse(503, "too much is taken from here") if is_full else await self._answer(node, request)
                await _say(talk, answer, last=trio.current_time() > until)
            if not talk.goes_on():
                break
            busy(False)
        await talk.close()

    @contextmanager
    def _hold_transfer(self, request: _Request) -> Iterator[bool]:
        """A place among those who take pieces, for one who does; whether there is none left."""
        if request.piece is None:
            yield False
        elif self._transfers >= MAX_TRANSFERS:
            yield True
        else:
            self._transfers += 1
            try:
                yield False
            finally:
                self._transfers -= 1

    async def _answer(self, node: NodeId | None, request: _Request) -> _Answer:
        if request.refusal is not None:
            return request.refusal
        asks = NodeId(request.node) if node is None else node
        # Before anything else: what is here is nobody else's business either.
        if not self._allowed(asks, request.key):
            return _refuse(403, f"node {asks} is not among those that fetch this")
        shelf = self._find(request.key, request.commit)
        if shelf is not None and request.piece is not None:
            return await self._read(shelf, *request.piece)
        if shelf is not None:
            shelf = await self._wait_news(shelf, request)
            if not self._allowed(asks, request.key):
                return _refuse(403, f"node {asks} is no more among those that fetch this")
        if shelf is None:
            return _refuse(404, "nothing of this is here")
        return _tell_news(shelf, _start(shelf, request))

    async def _read(self, shelf: Shelf, file: int, piece: int) -> _Answer:
        try:
            data = await trio.to_thread.run_sync(shelf.read, file, piece, limiter=self._threads, abandon_on_cancel=True)
        except Spoiled as error:
            self.complaints.tell("%s", error, of=error.folder)
            return _refuse(404, "this piece is not here")
        except LookupError:
            return _refuse(404, "this piece is not here")
        return _Answer(status=200, body=data, kind="application/octet-stream")

    async def _wait_news(self, shelf: Shelf, request: _Request) -> Shelf | None:
        """What is here as soon as there is more of it than was told before, or after the time that was asked for."""
        found: Shelf | None = shelf
        with trio.move_on_after(request.wait_seconds):
            # Whoever does not know this log, or that it is whole by now, is told at once.
            while found is not None and found.order == request.log and len(found.log) <= request.after:
                await trio.sleep(NEWS_SECONDS)
                found = self._find(request.key, request.commit)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """``last``: the connection ends with it."""

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    last: bool = False


def _refuse(status: int, why: str, *, last: bool = False) -> _Answer:
    return _Answer(status=status, body=f"{why}\n".encode(), last=last)


def _start(shelf: Shelf, request: _Request) -> int:
    """Where in the log the news begin for one that heard another log, or one that was longer: at its beginning."""
    return request.after if request.log == shelf.order and request.after <= len(shelf.log) else 0


def _tell_news(shelf: Shelf, start: int) -> _Answer:
    news = shelf.log[start : start + MAX_NEWS]
    told = {
        "files": [{"name": file.name, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in shelf.files],
        "news": news,
        "next": start + len(news),
        "log": shelf.order,
        "whole": shelf.whole,
    }
    return _Answer(status=200, body=msgspec.json.encode(told), kind="application/json")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What is asked for. ``piece``: a file and a piece, None for the news. ``refusal``: the answer to what is no
    request of ours. ``node``: for whom, in the words of who asks."""

    key: str = ""
    commit: str = ""
    piece: tuple[int, int] | None = None
    after: int = 0
    wait_seconds: float = 0.0
    log: str = ""
    refusal: _Answer | None = None
    node: str = ""


def _read_request(asked: Asked) -> _Request:
    if asked.problem is not None:
        return _Request(refusal=_refuse(*asked.problem, last=True))
    if asked.method != "GET":
        # h11 knows that no body may follow to HEAD, and we don't want one of any other.
        return _Request(refusal=_Answer(status=405, body=b"", last=True))
    path, _, query = asked.target.partition("?")
    found = PATH.fullmatch(path)
    # Nothing is decoded or tidied: what is not written as we write it is not here.
    if found is None or not is_key(found[1]) or not is_commit(found[2]):
        return _Request(refusal=_refuse(404, "there is nothing of this name"))
    piece = None if found[3] is None else (int(found[3]), int(found[4]))
    words = parse_qs(query, max_num_fields=16) if query.count("&") < 16 else {}
    return _Request(
        key=found[1],
        commit=found[2],
        piece=piece,
        after=_read_count(words, "after"),
        wait_seconds=min(float(_read_count(words, "wait")), MAX_WAIT_SECONDS),
        log=words.get("log", [""])[0],
        node=asked.find(RELAY_NODE) or "",
    )


def _read_count(words: Mapping[str, list[str]], key: str) -> int:
    text = words.get(key, ["0"])[0]
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


async def _say(talk: Talk, answer: _Answer, *, last: bool) -> None:
    """Raises Over when the other end takes nothing for too long."""
    headers = [("content-type", answer.kind), ("content-length", str(len(answer.body)))]
    if answer.status == 503:
        headers.append(("retry-after", "1"))
    if answer.last or last:
        headers.append(("connection", "close"))
    await talk.say(answer.status, headers, answer.body)


class Complaints:
    """Tells of what goes wrong once in a while: whoever can make it go wrong could else fill the disk. Of each kind, by
    its ``text`` and what it is ``of``, by itself: what is told of one must not hide another."""

    def __init__(self) -> None:
        # by kind, when it is told again, and how often it has not been
        self._kinds: dict[Hashable, tuple[float, int]] = {}

    def tell(self, text: str, *words: object, fault: Exception | None = None, of: Hashable = None) -> None:
        now = trio.current_time()
        again, untold = self._kinds.get((text, of), (now, 0))
        if now < again:
            self._kinds[text, of] = again, untold + 1
            log.debug(text, *words, exc_info=fault)
            return
        more = f" (and {untold} more like it before)" if untold else ""
        log.warning("%s%s", text % words, more, exc_info=fault)
        self._kinds[text, of] = now + TELL_SECONDS, 0
