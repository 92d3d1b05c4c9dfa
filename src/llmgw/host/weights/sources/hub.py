"""The Hugging Face hub, or a mirror of it: its addresses, what a source means there, and its refusals."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from llmgw.core.weights import FileListed, Source, list_parts, tell_too_many_parts
from llmgw.host.weights.errors import Broken, FetchFailed, Kind
from llmgw.host.weights.sources.asker import AGENT, Asker

HUB = "https://huggingface.co"
MAIN = "main"
# What an engine needs beside safetensors: its configuration, its tokenizer, its chat template.
COMPANIONS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
MOST_COMPANION_BYTES = 64 * 10**6
SHOWN_NAMES = 6
# A search for near names looks at each name by itself.
MOST_SEARCHED = 2000
NAME_BYTES = 255
MOST_WAIT_SECONDS = 60.0
LEAST_WAIT_SECONDS = 1.0
FEWER = "write a pattern that matches the weights alone"
# Of one source: each of them is asked for, listed and told of by itself.
MOST_FILES = 10_000
# No disk is as large, and what counts further does not fit into a file's length.
MOST_FILE_BYTES = 10**18

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# RateLimit: "resolvers";r=0;t=55
_RESET = re.compile(r"\bt=(\d+)")
_AGAIN = frozenset({408, 425, 429})


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    lfs: Any = None


class _Repository(msgspec.Struct):
    sha: str | None = None
    siblings: list[_Sibling] | None = None


class Entry(msgspec.Struct, frozen=True):
    """A file of a repository; None is what the hub does not say."""

    name: str
    size_bytes: int | None
    sha256: str | None

    def list(self) -> FileListed | None:
        if self.size_bytes is None:
            return None
        return FileListed(name=self.name, size_bytes=self.size_bytes, sha256=self.sha256)


def api_url(endpoint: str, repo: str, revision: str) -> str:
    return f"{endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"


def file_url(endpoint: str, repo: str, commit: str, name: str) -> str:
    return f"{endpoint}/{repo}/resolve/{commit}/{quote(name)}"


def read_repository(body: bytes, source: Source, host: str) -> tuple[str, tuple[Entry, ...]]:
    """The commit that the hub's API tells, and what the source means of it, in one order on every node. Takes a moment
    where a repository is large."""
    try:
        told = msgspec.json.decode(body, type=_Repository)
    except msgspec.DecodeError:
        told = _Repository()
    if told.sha is None or not _COMMIT.fullmatch(told.sha):
        raise FetchFailed(
            f"{host} does not answer as a hub does: it tells no commit of {source.repo}",
            Kind.UNSUPPORTED,
            remedy="check HF_ENDPOINT",
        )
    entries = {each.rfilename: _read_entry(each) for each in told.siblings or ()}
    names = choose_names(source, entries)
    for name in names:
        if why := refuse_name(name):
            raise FetchFailed(
                f"{source.repo} has a file {name!r}, which is not fetched: {why}", Kind.REFUSED, remedy=FEWER
            )
    return told.sha, tuple(entries[name] for name in names)


def _read_entry(told: _Sibling) -> Entry:
    lfs = told.lfs if isinstance(told.lfs, dict) else {}
    size = lfs.get("size", told.size)
    return Entry(
        name=told.rfilename,
        size_bytes=size if isinstance(size, int) and 0 <= size < MOST_FILE_BYTES else None,
        sha256=read_sha256(lfs.get("sha256") or lfs.get("oid")),
    )


def read_sha256(told: object) -> str | None:
    """From what may be one: an ``oid``, or an ETag with its quotes."""
    if not isinstance(told, str):
        return None
    text = told.removeprefix("W/").strip('"').removeprefix("sha256:").lower()
    return text if _SHA256.fullmatch(text) else None


def refuse_name(name: str) -> str | None:
    """Why a file of this name is not written to our disk; None: it is."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or not name.isprintable():
        return "its name leads elsewhere"
    if any(part.startswith(".") for part in parts):
        return "no engine loads a hidden file"
    if any(len(part.encode(errors="replace")) > NAME_BYTES for part in parts):
        return "its name is too long"
    return None


def choose_names(source: Source, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    """The files that a source means: all parts of what is in several, and beside safetensors of a pattern what an
    engine needs with them."""
    if source.file in entries or not source.is_pattern:
        wanted = [source.file]
        if source.file not in entries:
            raise _no_file(source, entries)
    else:
        shown = [name for name in entries if not any(part.startswith(".") for part in name.split("/"))]
        wanted = [name for name in shown if fnmatch.fnmatchcase(name, source.file)]
        if not wanted:
            raise FetchFailed(
                f"nothing in {source.repo} matches {source.file}", Kind.NO_FILE, remedy=f"it has {_show(shown)}"
            )
        wanted += _companions(wanted, shown, entries)
    names = _list_all_parts(source, wanted)
    absent = [name for name in names if name not in entries]
    if absent:
        raise FetchFailed(
            f"{source.repo} has not all parts of {source.file}: {_show(absent)} missing",
            Kind.NO_FILE,
            remedy="take another file of it, or a revision that has all parts (@REVISION)",
        )
    return tuple(sorted(names))


def _list_all_parts(source: Source, wanted: Iterable[str]) -> dict[str, None]:
    names: dict[str, None] = {}
    for name in wanted:
        if why := tell_too_many_parts(name):
            raise FetchFailed(f"{name} of {source.repo} {why}", Kind.UNSUPPORTED, remedy="take another file of it")
        if name not in names:
            names.update(dict.fromkeys(list_parts(name)))
        if len(names) > MOST_FILES:
            raise FetchFailed(
                f"{source.file} of {source.repo} is more than {MOST_FILES} files",
                Kind.UNSUPPORTED,
                remedy=FEWER,
            )
    return names


def _companions(wanted: list[str], shown: list[str], entries: Mapping[str, Entry]) -> list[str]:
    folders = {_folder(name) for name in wanted if name.endswith(".safetensors")}
    if not folders:
        return []
    folders.add("")
    return [
        name
        for name in shown
        if _folder(name) in folders
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in COMPANIONS)
        and (entries[name].size_bytes or 0) <= MOST_COMPANION_BYTES
    ]


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _no_file(source: Source, entries: Mapping[str, Entry]) -> FetchFailed:
    near = find_near(source.file, entries)
    if near:
        remedy = f"did you mean {' or '.join(f'hf:{source.repo}/{name}' for name in near)}?"
    elif entries:
        suffix = source.file.rpartition(".")[2]
        alike = [name for name in entries if name.endswith(f".{suffix}")]
        remedy = f"it has {_show(alike or list(entries))}"
    else:
        remedy = "it is empty"
    at = f" at {source.revision}" if source.revision else ""
    return FetchFailed(f"{source.repo} has no file {source.file}{at}", Kind.NO_FILE, remedy=remedy)


def find_near(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """What may have been meant: the same name in another folder or in other letters, then the likest."""
    known = list(names)
    last = name.rpartition("/")[2].lower()
    same = [each for each in known if each.rpartition("/")[2].lower() == last]
    stem, dot, suffix = name.lower().rpartition(".")
    # What all have in common says nothing of how near they are.
    stems = {
        each[: len(each) - len(dot + suffix)].lower(): each for each in known if each.lower().endswith(dot + suffix)
    }
    like = difflib.get_close_matches(stem if dot else suffix, list(stems)[:MOST_SEARCHED], n=3, cutoff=0.6)
    return tuple(dict.fromkeys([*same, *(stems[each] for each in like)]))[:3]


def _show(names: list[str]) -> str:
    if not names:
        return "no files"
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def explain(
    source: Source,
    status: int,
    headers: Mapping[str, str],
    *,
    endpoint: str,
    token_told: bool,
    asker: Asker = AGENT,
) -> FetchFailed | Broken:
    """What an answer of the hub means that is no file. ``headers`` by names in lower case, or of any case-blind kind;
    ``token_told``: it was asked with a token."""
    code = headers.get("x-error-code", "")
    repo, page, host = source.repo, f"{endpoint}/{source.repo}", endpoint.partition("://")[2]
    set_token = asker.token_remedy
    if code == "GatedRepo":
        remedy = (
            f"accept it at {page} with the account that the token is of; a fine-grained token also needs the right to "
            "read gated repositories"
            if token_told
            else f"accept it at {page}, then {set_token}"
        )
        return FetchFailed(f"{repo} is gated: its licence has to be accepted first", Kind.GATED, remedy=remedy)
    if code == "RepoNotFound" or (status == 404 and not code):
        may = "this token may not read it" if token_told else "it is private"
        remedy = "check the name" + (" and the token's rights" if token_told else f"; for a private one {set_token}")
        return FetchFailed(f"there is no repository {repo} at {host}, or {may}", Kind.MISSING, remedy=remedy)
    if code == "RevisionNotFound":
        asked = source.revision or MAIN
        return FetchFailed(
            f"{repo} has no revision {asked}", Kind.MISSING, remedy=f"its branches and tags are at {page}/tree/{MAIN}"
        )
    if code == "EntryNotFound":
        return FetchFailed(f"{repo} has no file {source.file}", Kind.NO_FILE, remedy=f"look at {page}/tree/{MAIN}")
    if status in (401, 403):
        if not token_told:
            return FetchFailed(f"{host} gives {repo} only to those with a token", Kind.UNAUTHORIZED, remedy=set_token)
        why = "knows no such token" if status == 401 else f"says that this token may not read {repo}"
        return FetchFailed(
            f"{host} {why}",
            Kind.UNAUTHORIZED,
            remedy=f"make a new one at {endpoint}/settings/tokens, and {set_token}",
        )
    if status == 429 and not token_told:
        return read_again(status, headers, host, remedy=f"{set_token}: the hub lets those with one ask more often")
    return explain_status(status, headers, host, repo)


def explain_storage(status: int, headers: Mapping[str, str], host: str, what: str, *, hub: str) -> FetchFailed | Broken:
    """The same for where a hub keeps its files, to which it leads by addresses that are good for a while."""
    if status in (401, 403):
        return FetchFailed(
            f"{host}, where {hub} keeps {what}, refuses it (it answers {status})",
            Kind.REFUSED,
            remedy=f"see whether a proxy before {host} forbids it, and whether this machine's clock is right",
        )
    if status in (404, 410):
        return FetchFailed(
            f"{host}, where {hub} says that it keeps {what}, has no such file (it answers {status})",
            Kind.NO_FILE,
            remedy=f"nothing can be done from here: only those who run {hub} can put it back",
        )
    return explain_status(status, headers, host, what)


def explain_status(status: int, headers: Mapping[str, str], host: str, what: str) -> FetchFailed | Broken:
    """The same for any web server."""
    if status in _AGAIN or status >= 500:
        return read_again(status, headers, host)
    if status in (401, 403, 407):
        return FetchFailed(
            f"{host} does not give {what} away (it answers {status})",
            Kind.UNAUTHORIZED,
            remedy="open it in a browser that is not logged in: only what shows there can be fetched",
        )
    if status in (404, 410, 451):
        return FetchFailed(f"{host} has no {what} (it answers {status})", Kind.MISSING, remedy="check the address")
    return FetchFailed(f"{host} answers {status} for {what}", Kind.UNSUPPORTED, remedy="check the address")


def read_again(status: int, headers: Mapping[str, str], host: str, *, remedy: str | None = None) -> Broken:
    """Wait as long as we are asked to, within reason."""
    told = headers.get("retry-after", "")
    if not told.isdecimal():
        found = _RESET.search(headers.get("ratelimit", "")) if status == 429 else None
        told = found[1] if found else ""
    wait = float(told) if told else LEAST_WAIT_SECONDS
    why = "asks us to come back later" if status == 429 else "is in trouble"
    remedy = remedy or "try again later; what is wrong there only those know who run it"
    return Broken(f"{host} {why} (it answers {status})", min(wait, MOST_WAIT_SECONDS), remedy=remedy)
