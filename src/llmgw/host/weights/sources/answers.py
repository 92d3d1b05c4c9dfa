"""What an answer of a web server says of the file that was asked for, and whether it is that file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx

from llmgw.host.weights.errors import Broken, FetchFailed, Kind, NoRanges
from llmgw.host.weights.sources.hub import read_sha256

# What a server that knows no ranges may send for nothing.
MOST_SKIPPED_BYTES = 256 * 1024
# What a hub says of a file before it leads to the storage where it lies.
SAID = ("x-linked-etag", "x-linked-size", "x-repo-commit")

BETWEEN = "see whether a proxy or a cache in between changes what comes"
# As many digits as the length of a file has at most: 18 are less than 2**63.
_COUNT = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_UNSATISFIED = re.compile(r"bytes \*/([0-9]{1,18})")


class Marks(NamedTuple):
    """What changes when a file does, the one that says most first. None: an answer does not say it."""

    linked: str | None = None
    etag: str | None = None
    date: str | None = None

    @property
    def first(self) -> str | None:
        return next((mark for mark in self if mark is not None), None)

    def agree(self, other: Marks) -> bool | None:
        """By the first that both say: an ETag tells nothing of a date, and servers that share an address may say one
        each. None: they say none in common."""
        return next((one == two for one, two in zip(self, other, strict=True) if None not in (one, two)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A file as it is asked for. ``marks`` is what told it from others when it was resolved, none where nothing did or
    its address does; ``status`` is the kind of answer that said them."""

    url: httpx.URL
    name: str
    size_bytes: int
    sha256: str | None = None
    commit: str | None = None
    marks: Marks = field(default_factory=Marks)
    status: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came, from where, and what was said of it on the way there."""

    response: httpx.Response
    url: httpx.URL
    said: Mapping[str, str]

    @property
    def marks(self) -> Marks:
        headers = self.response.headers
        told = (self.said.get("x-linked-etag"), headers.get("etag"), headers.get("last-modified"))
        return Marks(*(mark or None for mark in told))

    @property
    def length(self) -> int | None:
        return read_count(self.response.headers.get("content-length"))


def read_count(told: str | None) -> int | None:
    """A number of bytes as a header tells it; None: it tells none that can be."""
    return int(told) if told is not None and _COUNT.fullmatch(told) else None


def size_of(answer: Answer) -> int | None:
    """How long the file is that an answer brings some of; None: it does not say."""
    headers = answer.response.headers
    if (linked := read_count(answer.said.get("x-linked-size"))) is not None:
        return linked
    if answer.response.status_code == 200:
        return answer.length if headers.get("content-encoding", "identity") == "identity" else None
    found = _RANGE.fullmatch(headers.get("content-range", ""))
    return int(found[3]) if found is not None and found[3] != "*" else None


def check_answer(answer: Answer, target: Target, start: int, stop: int) -> int:
    """How many bytes of it come before the first that was asked for; whatever else it is than that file is raised."""
    response, host = answer.response, answer.url.host
    _check_same(answer, target)
    if response.headers.get("content-encoding", "identity") != "identity":
        raise FetchFailed(
            f"{host} sends {target.name} compressed though we ask for it as it is",
            Kind.UNSUPPORTED,
            remedy="switch compression off for it there",
        )
    told = response.headers.get("content-range", "")
    if response.status_code == 206:
        found = _RANGE.fullmatch(told)
        if found is None or int(found[1]) != start or int(found[2]) >= stop:
            raise Broken(f"{host} answers with other bytes of {target.name} than we asked for", remedy=BETWEEN)
        _check_size(read_count(found[3]), target)
        return 0
    if response.status_code == 416:
        unsatisfied = _UNSATISFIED.fullmatch(told)
        _check_size(int(unsatisfied[1]) if unsatisfied is not None else None, target)
        if start == 0 and stop == target.size_bytes:
            raise Broken(f"{host} refuses a range that nobody asked for", remedy=BETWEEN)
        raise NoRanges
    _check_size(answer.length, target)
    if start > MOST_SKIPPED_BYTES:
        raise NoRanges
    return start


def _check_size(told: int | None, target: Target) -> None:
    if told not in (None, target.size_bytes):
        raise name_change(target.name, f"it has {told} bytes, not {target.size_bytes}")


def _check_same(answer: Answer, target: Target) -> None:
    """By all that the way and the answer say of it; what they do not say is no reason, but where an answer of the
    same kind has told the file from others, and this one tells nothing that compares."""
    said, status = answer.said, answer.response.status_code
    alike = answer.marks.agree(target.marks)
    if alike is False:
        raise name_change(target.name, "the server has another file by now")
    if alike is None and status == target.status and target.marks.first is not None:
        # Such an answer has said it before: this one may be of any file.
        raise Broken(f"{answer.url.host} does not say any more which {target.name} it sends", remedy=BETWEEN)
    if target.commit is not None and said.get("x-repo-commit", target.commit) != target.commit:
        raise name_change(target.name, f"the hub answers from {said['x-repo-commit'][:12]}, not {target.commit[:12]}")
    _check_size(read_count(said.get("x-linked-size")), target)
    sha256 = read_sha256(said.get("x-linked-etag"))
    if None not in (sha256, target.sha256) and sha256 != target.sha256:
        raise name_change(target.name, "the hub has another SHA-256 for it by now")


def name_change(what: str, why: str) -> FetchFailed:
    return FetchFailed(
        f"{what} is not what was begun: {why}", Kind.CHANGED, remedy="fetch it anew: llmgw ctl weights pull SOURCE"
    )
