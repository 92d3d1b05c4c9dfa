"""Where weights come from, what of them is wanted, and what is told of those that are on their way.

A source is known by the text that stands in a definition: what is fetched lies under a hash of that text, and below it
under the commit that it was, so that what is still wanted follows from the catalog and nothing else.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from llmgw.core.model import Model
from llmgw.core.node import NodeId
from llmgw.units import printable

HUB_PREFIX = "hf:"
# Pieces are what is resumed, checked and taken from other nodes, each by itself: few enough to be listed, and small
# enough that a broken one costs little.
LEAST_PIECE_BYTES = 1024 * 1024
MOST_PIECE_BYTES = 16 * 1024 * 1024
MOST_PIECES = 2048
KEY_CHARS = 32
# In place of a member's address: it is taken from through the server, which is told by a header whom to ask, and tells
# that one by another for whom it asks.
RELAY = "relay"
RELAY_FROM = "x-llmgw-from"
RELAY_NODE = "x-llmgw-node"

# What says that it is cut into more files than that is no model: a name must not cost more than it is long.
MOST_PARTS = 1000

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_LABEL = re.compile(r"[\w-]{1,63}")
_FOUR_NUMBERS = re.compile(r"\d+(\.\d+){3}", re.ASCII)
_HOST_CHARS = 253
_MOST_PORT = 65535
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.[A-Za-z0-9]+)")


class Form(StrEnum):
    """What a source is."""

    PATH = "path"
    HUB = "hub"
    URL = "url"
    REPOSITORY = "repository"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source as it is written, taken apart. PATH: ``text`` is one, and is never copied. HUB: ``file`` of ``repo`` at
    ``revision`` (None: as it is now), or all that match it where it is a pattern. URL: ``text`` is the address.
    REPOSITORY: the engine itself fetches ``repo``. UNKNOWN: ``why`` it is none of these, and what to write."""

    text: str
    form: Form
    repo: str = ""
    file: str = ""
    revision: str | None = None
    why: str = ""

    @property
    def is_fetched(self) -> bool:
        return self.form in (Form.HUB, Form.URL)

    @property
    def is_pattern(self) -> bool:
        return self.form is Form.HUB and any(sign in self.file for sign in "*?[")

    @property
    def is_pinned(self) -> bool:
        """It can never be another commit."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def name(self) -> str:
        """The last part of it, for a person who knows which one is meant."""
        # (in a pattern of the hub's a ? stands for any sign)
        place = _split_url(self.text)[1] if self.form is Form.URL else self.text
        last = place.rstrip("/").rpartition("/")[2]
        return last.rpartition("@")[0] or last if self.form is Form.HUB else last


def parse_source(text: str) -> Source:
    """What a source means. Total: what means nothing is UNKNOWN, and says why."""
    if text.startswith("/"):
        return Source(text=text, form=Form.PATH)
    if text.startswith(HUB_PREFIX):
        return _parse_hub(text)
    if text.startswith(("https://", "http://")):
        return _parse_url(text)
    if unseen := _tell_unseen(text):
        return _unknown(text, unseen)
    if scheme := _SCHEME.match(text):
        return _unknown(text, f"{scheme[0]} is no scheme that is fetched: write hf:org/repo/file, https://… or a path")
    if _REPOSITORY.fullmatch(text):
        return Source(text=text, form=Form.REPOSITORY, repo=text)
    return _unknown(text, "a source is a whole path (/…), hf:org/repo/file, https://…, or a repository org/repo")


def _parse_hub(text: str) -> Source:
    if unseen := _tell_unseen(text):
        return _unknown(text, unseen)
    rest, at, revision = text[len(HUB_PREFIX) :].partition("@")
    parts = rest.split("/")
    repo, file = "/".join(parts[:2]), "/".join(parts[2:])
    if not _REPOSITORY.fullmatch(repo):
        return _unknown(text, "write hf:org/repo/file, or hf:org/repo/*.gguf for several files")
    if not file:
        return _unknown(text, f"names no file of {repo}: write hf:{repo}/FILE, or {repo} alone for the engine to fetch")
    if "\\" in file:
        return _unknown(text, f"{file} is no file of a repository: its parts are divided by /")
    if any(part in ("", ".", "..") for part in parts):
        return _unknown(text, f"{file} is no file of a repository: no part of it may be empty, . or ..")
    if at and not _REVISION.fullmatch(revision):
        return _unknown(text, f"{revision!r} is no revision: write a branch, a tag or a commit behind the @")
    return Source(text=text, form=Form.HUB, repo=repo, file=file, revision=revision or None)


def _parse_url(text: str) -> Source:
    scheme, place = _split_url(text)
    host, _, path = place.partition("/")
    # (what follows may open the address: it is told to nobody)
    told = f"{scheme}://{place}"
    if "@" in host:
        # It would stand in every list, log and report.
        return _unknown(f"{scheme}://…", "holds a name or password: give the file away without one")
    if unseen := _tell_unseen(text):
        return _unknown(told, unseen)
    if not host or not path.rpartition("/")[2] or " " in text:
        return _unknown(told, "is no address of a file: write https://host/path/file")
    if why := _tell_wrong_host(host):
        return _unknown(told, why)
    return Source(text=text, form=Form.URL)


def _split_url(text: str) -> tuple[str, str]:
    """The scheme of an address, and its host and path."""
    scheme, _, rest = text.partition("://")
    return scheme, rest.partition("#")[0].partition("?")[0]


def _tell_wrong_host(address: str) -> str | None:
    """Why nothing can be reached at this host and port; None when nothing speaks against it."""
    # (the colons of an IPv6 address stand in brackets)
    inner, bracket, rest = address.rpartition("]")
    name, colon, port = rest.partition(":")
    if not _is_host(inner + bracket + name):
        return f"{address} is no host: write https://host/path/file"
    digits = port.isascii() and port.isdigit() and len(port) <= len(str(_MOST_PORT))
    if colon and not (digits and 1 <= int(port) <= _MOST_PORT):
        return f"{port or 'nothing'} is no port: write a number from 1 to {_MOST_PORT} behind the colon, or no colon"
    return None


def _is_host(host: str) -> bool:
    if host.startswith("["):
        return _is_ip(host[1:-1], ipaddress.IPv6Address)
    if _FOUR_NUMBERS.fullmatch(host):
        return _is_ip(host, ipaddress.IPv4Address)
    return len(host) <= _HOST_CHARS and all(map(_LABEL.fullmatch, host.removesuffix(".").split(".")))


def _is_ip(text: str, kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _tell_unseen(text: str) -> str | None:
    """That a source holds what nobody sees: a line's end, a control character, a space of another kind."""
    unseen = next((mark for mark in text if not mark.isprintable()), None)
    return None if unseen is None else f"holds {printable(unseen)}, which nobody can see: write it without"


def _unknown(text: str, why: str) -> Source:
    # What can't be seen would stand in a line of a log or on a terminal, and act there.
    return Source(text=printable(text), form=Form.UNKNOWN, why=why)


def list_sources(model: Model) -> tuple[str, ...]:
    """All that a model is made of, as written: its weights, what turns images into tokens, and its adapters."""
    found = [
        model.source,
        *([model.mmproj] if model.mmproj is not None else []),
        *(lora.source for lora in model.loras),
    ]
    return tuple(dict.fromkeys(found))


def list_fetched(models: Iterable[Model]) -> tuple[str, ...]:
    """The sources of these models that are fetched."""
    found = dict.fromkeys(source for model in models for source in list_sources(model))
    return tuple(source for source in found if parse_source(source).is_fetched)


def key_of(source: str) -> str:
    """The name of the folder that a source is kept under."""
    return hashlib.sha256(source.encode()).hexdigest()[:KEY_CHARS]


def list_parts(file: str) -> tuple[str, ...]:
    """All parts of a file that is one of several (``x-00001-of-00003.gguf``), the first one first; else, and of
    more than MOST_PARTS, only itself."""
    found = _PART.fullmatch(file)
    if found is None or not 1 <= int(found["count"]) <= MOST_PARTS:
        return (file,)
    count = int(found["count"])
    return tuple(f"{found['stem']}-{number:05}-of-{count:05}{found['suffix']}" for number in range(1, count + 1))


def tell_too_many_parts(file: str) -> str | None:
    """Why the parts of a file are not looked for, as words that follow its name; None where they are."""
    found = _PART.fullmatch(file)
    count = int(found["count"]) if found is not None else 0
    return f"says that it is one of {count} parts: more than {MOST_PARTS} are no model" if count > MOST_PARTS else None


def piece_bytes_of(size_bytes: int) -> int:
    """How long the pieces are of a file of this size; the last one is what is left. The same on every node."""
    piece = LEAST_PIECE_BYTES
    while piece < MOST_PIECE_BYTES and size_bytes > piece * MOST_PIECES:
        piece *= 2
    return piece


def count_pieces(size_bytes: int) -> int:
    """An empty file has none."""
    return -(-size_bytes // piece_bytes_of(size_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileListed:
    """A file as its origin lists it: ``name`` is its path in the repository, ``sha256`` what the origin says of it in
    hex, None where it says nothing."""

    name: str
    size_bytes: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a source is at one moment. ``commit`` names exactly these bytes, and is safe as a folder's name."""

    source: str
    commit: str
    files: tuple[FileListed, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKept:
    """A file that was fetched and found whole. ``pieces`` are the BLAKE3 hashes of its pieces, in hex."""

    name: str
    size_bytes: int
    sha256: str
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One commit of a source as it lies on a disk. ``fetched_at`` is in seconds since 1970."""

    source: str
    commit: str
    files: tuple[FileKept, ...]
    fetched_at: float

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Phase(StrEnum):
    """How far a fetch is. QUEUED: another program on the same folder fetches it. READY and FAILED are its ends."""

    QUEUED = "queued"
    RESOLVING = "resolving"
    FETCHING = "fetching"
    VERIFYING = "verifying"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """How one fetch goes on one node. ``done_bytes`` counts pieces that lie on the disk and were checked, and never
    falls; it is all of ``total_bytes`` only when READY. ``rate`` in bytes per second, ``left_seconds`` by that; None
    where nobody can say. ``stalled_seconds``: for so long nothing has come, None while something does.

    ``origin_bytes`` and ``peer_bytes`` are what this fetch has taken from where, also what was thrown away.
    ``cause`` and ``remedy`` are those of a failure. While it is RESOLVING or FETCHING they say why nothing comes at
    this moment, and what is done about it, and are None again when something does; of what lay here and was damaged
    ``cause`` says that to the end. ``pull``: the number of the
    operator's order that it carries out.
    """

    source: str
    phase: Phase
    commit: str | None = None
    done_bytes: int = 0
    total_bytes: int | None = None
    rate: float | None = None
    left_seconds: float | None = None
    stalled_seconds: float | None = None
    origin_bytes: int = 0
    peer_bytes: int = 0
    cause: str | None = None
    remedy: str | None = None
    pull: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """One verified commit of a source on a node. ``in_use``: a shard there runs by it, or is about to. ``whole`` False:
    it is what is left of a fetch that has not ended, and is resumed by the next one; ``fetched_at`` is when something
    came last. Where ``wrong`` says why, it was whole, and is no copy any more."""

    source: str
    commit: str
    size_bytes: int
    fetched_at: float
    in_use: bool = False
    whole: bool = True
    wrong: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A commit that was found damaged on its disk, and is fetched anew as far as it is; ``fetched_at``: when it had
    been whole last."""

    source: str
    commit: str
    fetched_at: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What became of the operator's order of this number to remove: ``kept`` says of each that was not why."""

    number: int
    freed_bytes: int = 0
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWeights:
    """All that a node says of weights: what it has fetched and fetches, and (``seen``) which models lie in its
    ``model_dirs``, as sources that name them: paths, and ``org/repo`` of a hub's own cache. ``seed``: where others may
    take pieces from it, as ``host:port``. ``shared``: the folder of what is fetched is on a filesystem that other
    machines write to as well. ``set_aside``: the last that were, since its agent began. ``asks``: it is about to carry
    out an order to remove, and asks by this mark whether that still stands."""

    seed: str | None = None
    cached: tuple[Cached, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    seen: tuple[str, ...] = ()
    shared: bool = False
    collected: Collected | None = None
    set_aside: tuple[SetAside, ...] = ()
    asks: str | None = None

    @property
    def whole(self) -> tuple[Cached, ...]:
        """What of it can be run by, and given to others."""
        return tuple(each for each in self.cached if each.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node that has a commit, or is fetching it. ``seed``: where pieces can be taken from it, RELAY: through the
    server, None: nowhere. ``whole``: it has all of it."""

    node: NodeId
    seed: str | None = None
    fabrics: tuple[str, ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """Who has a source or fetches it, while somebody does. ``commit``: which one, None while nobody knows it yet. Who
    is in it may take pieces from who else is."""

    source: str
    commit: str | None = None
    members: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Have the newest commit of a source, whether or not a shard asks for it."""

    number: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect:
    """Remove these from the disk: pairs of a source and a commit.

    It may have lain on the way for long, or in front of a node that stood still. So a node asks before it removes
    anything, and for ``seconds`` from when it ``asked`` by this mark it may.
    """

    number: int
    items: tuple[tuple[str, str], ...]
    asked: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOrder:
    """All that a node is told of weights; a later one replaces it. Numbers grow with each order of an operator, and
    count anew with each server."""

    swarms: tuple[Swarm, ...] = ()
    pulls: tuple[Pull, ...] = ()
    collect: Collect | None = None


def find_wanted(catalog: Iterable[str], cached: Iterable[Cached]) -> frozenset[tuple[str, str]]:
    """What of these has to stay, by source and commit: the newest of each source that the catalog names that is whole,
    what of such a source can be resumed, or mended and is newer than that, and what a shard uses."""
    named, cached = frozenset(catalog), tuple(cached)
    newest: dict[str, tuple[float, str]] = {}
    for each in cached:
        if each.whole:
            newest[each.source] = max(_rank(each), newest.get(each.source, _rank(each)))
    kept = set()
    for each in cached:
        is_unfinished = not each.whole and each.wrong is None
        # (what is damaged is what the next launch mends, until there is a newer one that is whole)
        is_newest = _rank(each) >= newest.get(each.source, _rank(each))
        if each.in_use or (each.source in named and (is_unfinished or is_newest)):
            kept.add((each.source, each.commit))
    return frozenset(kept)


def _rank(each: Cached) -> tuple[float, str]:
    """The newest last."""
    return each.fetched_at, each.commit
