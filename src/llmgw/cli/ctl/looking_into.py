"""Reads what a source says of its own size: the head of a file, an index, a config.json, here or over the network."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

import trio

from llmgw.core import gguf, safetensors
from llmgw.core.attention import read_config, read_metadata
from llmgw.core.headers import HEAD_BYTES, check_header
from llmgw.core.sizing import Format, Found, Number
from llmgw.core.weights import (
    FileListed,
    Form,
    Listing,
    Source,
    list_parts,
    parse_source,
    tell_too_many_parts,
)
from llmgw.errors import LlmgwError, UsageError
from llmgw.host.weights.errors import Broken, FetchFailed, Kind, NoRanges, show_url
from llmgw.host.weights.sources import origin as web
from llmgw.host.weights.sources.asker import Asker
from llmgw.units import printable

FIRST_BYTES = 1024 * 1024
# Of the later parts of a file, without a vocabulary; and as many as are asked one after the other in a minute.
PART_BYTES = 64 * 1024
MOST_PARTS = 100
# An index of many files is a few megabytes.
MOST_JSON_BYTES = 32 * 1024 * 1024
TIMEOUT_SECONDS = 120.0
TRIES = 3
MOST_WAIT_SECONDS = 5.0
SHOWN = 6
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
_PYTORCH = (".bin", ".pt", ".pth")
# What an engine fetches with the weights of a repository, by its suffix.
_BESIDE = (".json", ".txt", ".model", ".tiktoken", ".jinja")

_ASKER = Asker(environment="this command's environment", file=None)

T = TypeVar("T")


class Shelf(Protocol):
    """Files that lie together, and any part of one."""

    @property
    def files(self) -> tuple[FileListed, ...]: ...

    async def read(self, name: str, start: int, stop: int) -> bytes: ...


class Disk:
    """Files of this machine: those of a folder, or one with its other parts and its configuration."""

    def __init__(self, path: Path) -> None:
        path.stat()
        self._folder = path if path.is_dir() else path.parent
        names = self._list_inside(path) if path.is_dir() else self._list_beside(path)
        self.files = tuple(
            FileListed(name=name, size_bytes=(self._folder / name).stat().st_size) for name in sorted(set(names))
        )

    def _list_inside(self, folder: Path) -> list[str]:
        return [each.name for each in folder.iterdir() if each.is_file() and _is_text(each.name)]

    def _list_beside(self, path: Path) -> list[str]:
        if why := tell_too_many_parts(path.name):
            raise LlmgwError(f"{path} {why}")
        names = list(list_parts(path.name))
        for each in (path, *(self._folder / name for name in names)):
            # A device or a pipe has no end, and opening one may wait for ever.
            if each.exists() and not each.is_file():
                raise LlmgwError(f"{each} is no ordinary file: weights are read from one, or from a folder of them")
        if absent := [name for name in names if not (self._folder / name).exists()]:
            raise LlmgwError(f"{path} has not all of its parts: {', '.join(absent[:SHOWN])} missing")
        return [*names, CONFIG] if (self._folder / CONFIG).is_file() else names

    async def read(self, name: str, start: int, stop: int) -> bytes:
        return await trio.to_thread.run_sync(self._read, name, start, stop)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        with (self._folder / name).open("rb") as opened:
            opened.seek(start)
            return opened.read(stop - start)


class Remote(Protocol):
    """The part of ``host.weights.sources.origin.Origin`` that is used here."""

    async def resolve(self, source: Source, commit: str | None) -> Listing: ...

    def read(
        self, source: Source, listing: Listing, file: int, start: int, stop: int
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]: ...


class Fetched:
    """Files as their origin lists them."""

    def __init__(self, origin: Remote, source: Source, listing: Listing) -> None:
        self._origin, self._source, self._listing = origin, source, listing
        self.files = listing.files

    async def read(self, name: str, start: int, stop: int) -> bytes:
        file = next(at for at, each in enumerate(self.files) if each.name == name)
        stop = min(stop, self.files[file].size_bytes)

        async def read_once() -> bytes:
            try:
                return await self._read(file, start, stop)
            except NoRanges:
                return (await self._read(file, 0, stop))[start:]

        return await _try(read_once) if start < stop else b""

    async def _read(self, file: int, start: int, stop: int) -> bytes:
        data = bytearray()
        async with self._origin.read(self._source, self._listing, file, start, stop) as pieces:
            async for piece in pieces:
                data += piece
        return bytes(data)


async def look_into(text: str, environ: Mapping[str, str] = os.environ) -> Found:
    """What a source says of itself. LlmgwError where it can't be read, with what to do."""
    if not text.strip():
        raise UsageError("SOURCE is empty: write hf:org/repo/file, a URL, a repository org/repo, or a path")
    if not _is_text(text):
        raise UsageError(f"{printable(text)} is no UTF-8, so that no definition can name it: rename it")
    with trio.move_on_after(TIMEOUT_SECONDS):
        if (path := _find_path(text)) is not None:
            return await _look_here(path)
        source = parse_source(text)
        if source.form is Form.UNKNOWN:
            raise UsageError(f"{show_url(source.text)}: {source.why}")
        settings = web.read_origin_settings(environ, token=None, allow_hosts=(), asker=_ASKER)
        async with web.open_origin(settings) as origin:
            return await look_there(source, origin)
    raise LlmgwError(f"{show_url(text)} could not be looked into within {TIMEOUT_SECONDS:g} s: try again")


def _is_text(name: str) -> bool:
    """What it is not, no answer and no definition can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _find_path(text: str) -> Path | None:
    """What is meant on this machine: a path that says that it is one, or that is there and can mean nothing else."""
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if text in {".", ".."} or text.startswith(("/", "./", "../", "~")):
        return path
    return path if parse_source(text).form is Form.UNKNOWN and path.exists() else None


async def _look_here(path: Path) -> Found:
    try:
        return await find_out(str(path), await trio.to_thread.run_sync(Disk, path))
    except OSError as error:
        raise LlmgwError(f"{path} can't be read here: {error.strerror}: is it a path on another machine?") from None


async def look_there(source: Source, origin: Remote) -> Found:
    """What a source says that is not on this machine."""
    whole = source.form is Form.REPOSITORY
    # (an engine that fetches by itself takes what it needs: all is listed, and chosen from)
    meant = parse_source(f"hf:{source.repo}/*") if whole else source
    shelf = await _resolve(origin, meant)
    found = await find_out(show_url(source.text), shelf, repo=source.repo if whole else "")
    if found.format is Format.SAFETENSORS and found.layout is None and source.form is Form.HUB:
        return await _add_config(found, source, origin)
    return found


async def _resolve(origin: Remote, source: Source) -> Fetched:
    return Fetched(origin, source, await _try(lambda: origin.resolve(source, None)))


async def _add_config(found: Found, source: Source, origin: Remote) -> Found:
    """With the configuration that lies in the repository, beside the one file that was named."""
    folder = PurePosixPath(source.file).parent
    at = f"@{source.revision}" if source.revision else ""
    try:
        shelf = await _resolve(origin, parse_source(f"hf:{source.repo}/{folder / CONFIG}{at}"))
    except FetchFailed as failed:
        if failed.kind is not Kind.NO_FILE:
            raise
        return found
    return await _describe(replace(found, notes=()), shelf, shelf.files)


async def _try(act: Callable[[], Awaitable[T]]) -> T:
    left = TRIES
    while True:
        left -= 1
        try:
            return await act()
        except Broken as broken:
            if left == 0:
                raise broken.give_up() from None
            await trio.sleep(min(broken.wait_seconds, MOST_WAIT_SECONDS))


async def find_out(text: str, shelf: Shelf, *, repo: str = "") -> Found:
    """What these files are, and say of themselves. ``repo``: they are all of a repository, for an engine to choose
    from."""
    ggufs = _only(shelf.files, (".gguf",))
    tensors = _only(shelf.files, (".safetensors",))
    torch = _only(shelf.files, _PYTORCH)
    if tensors:
        found = await _read_safetensors(text, shelf, tensors)
        chosen, beside = tensors, _only(shelf.files, _BESIDE)
    elif ggufs:
        return await _read_gguf(text, shelf, _choose_gguf(text, ggufs, repo))
    elif torch:
        size = Number(value=_sum(torch), origin=_name_sizes(torch))
        found = Found(source=text, format=Format.PYTORCH, files=len(torch), weights=size)
        chosen, beside = torch, _only(shelf.files, _BESIDE)
    elif parse_source(text).name in {PurePosixPath(file.name).name for file in shelf.files}:
        raise LlmgwError(f"{text} is no file of weights (.gguf, .safetensors, .bin)")
    else:
        names = ", ".join(file.name for file in shelf.files[:SHOWN]) or "nothing"
        raise LlmgwError(f"{text} holds no weights (.gguf, .safetensors, .bin): it has {names}")
    # (an adapter beside them, or the same weights again in another form, is not what is launched)
    listed = chosen + beside
    disk = Number(value=_sum(listed), origin=_name_sizes(listed))
    return await _describe(replace(found, disk=disk), shelf, shelf.files)


def _only(files: Iterable[FileListed], suffixes: tuple[str, ...]) -> tuple[FileListed, ...]:
    """Those of these suffixes, without what is there twice or is no model of its own."""
    found = [file for file in files if file.name.lower().endswith(suffixes)]
    plain = [file for file in found if not _is_extra(file.name)]
    return tuple(plain or found)


def _is_extra(name: str) -> bool:
    last = PurePosixPath(name).name.lower()
    starts = ("consolidated", "adapter_model", "mmproj", "training_args", "optimizer", "scheduler")
    return last.startswith(starts) or "/" in name


def _choose_gguf(text: str, files: tuple[FileListed, ...], repo: str) -> tuple[FileListed, ...]:
    """All parts of the one model that is meant."""
    models: set[tuple[str, ...]] = set()
    known: set[str] = set()
    for file in files:
        if file.name not in known:
            models.add(list_parts(file.name))
            known.update(list_parts(file.name))
    if len(models) > 1:
        names = [parts[0] for parts in sorted(models)]
        shown = [f"hf:{repo}/{name}" if repo else name for name in names[:SHOWN]]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise UsageError(f"{text} has {len(names)} models: name one of {', '.join(shown)}{more}")
    (parts,) = models
    return tuple(file for file in files if file.name in parts)


async def _read_gguf(text: str, shelf: Shelf, files: tuple[FileListed, ...]) -> Found:
    head, header = await _read_head(shelf, files[0], gguf.read)
    _check(files[0], head)
    sizes = Number(value=_sum(files), origin=_name_sizes(files))
    found = Found(source=text, format=Format.GGUF, files=len(files), disk=sizes, weights=sizes)
    if not isinstance(header, gguf.Header):
        return replace(found, notes=(f"its header is longer than {HEAD_BYTES // 1024**2} MiB, and was not read",))
    if len(files) == 1 and header.data_bytes is not None:
        found = replace(found, weights=Number(value=header.data_bytes, origin="the GGUF header"))
    found = replace(found, layout=read_metadata(header.metadata), told_by="the GGUF header")
    headers = [header, *await _read_parts(shelf, files[1:])]
    if len(headers) == len(files):
        return replace(found, mostly=gguf.name_mostly(headers))
    return replace(found, notes=("not the heads of all its parts were read: what most of it is of is unknown",))


async def _read_parts(shelf: Shelf, files: Sequence[FileListed]) -> list[gguf.Header]:
    """What the later parts of a file have at their beginning, which is short; nothing of more than anybody waits for.
    LlmgwError where one is no such part."""
    found = []
    for file in files if len(files) < MOST_PARTS else ():
        head, header = await _read_head(shelf, file, gguf.read, first_bytes=PART_BYTES)
        _check(file, head)
        if isinstance(header, gguf.Header):
            found.append(header)
    return found


async def _read_safetensors(text: str, shelf: Shelf, files: tuple[FileListed, ...]) -> Found:
    found = Found(source=text, format=Format.SAFETENSORS, files=len(files))
    folder = files[0].name.rpartition("/")[0]
    listed = next((file for file in shelf.files if PurePosixPath(file.name) == PurePosixPath(folder, INDEX)), None)
    if listed is not None:
        index = safetensors.read_index(await shelf.read(listed.name, 0, MOST_JSON_BYTES))
        if isinstance(index, safetensors.Wrong):
            raise LlmgwError(f"{listed.name} of {text} {index.why}")
        known = {file.name: file for file in files}
        names = [str(PurePosixPath(folder, name)) for name in index.files]
        if absent := [name for name in names if name not in known]:
            raise LlmgwError(f"{text} has not all files that its index names: {', '.join(absent[:SHOWN])} missing")
        named = tuple(known[name] for name in names)
        weights = Number(value=_sum(named), origin=_name_sizes(named))
        if index.total_bytes is not None:
            weights = Number(value=index.total_bytes, origin=INDEX)
        return replace(found, files=len(named), weights=weights)
    if len(files) > 1:
        return replace(found, weights=Number(value=_sum(files), origin=_name_sizes(files)))
    head, header = await _read_head(shelf, files[0], safetensors.read)
    _check(files[0], head)
    if not isinstance(header, safetensors.Header):
        return replace(found, weights=Number(value=_sum(files), origin=_name_sizes(files)))
    weights = Number(value=header.data_bytes, origin="the safetensors header")
    return replace(found, mostly=header.mostly, weights=weights)


async def _describe(found: Found, shelf: Shelf, files: tuple[FileListed, ...]) -> Found:
    """With what config.json says of the model, where there is one."""
    listed = next(
        (file for file in files if PurePosixPath(file.name).name == CONFIG and not _nested(file, files)), None
    )
    if listed is None:
        note = "there is no config.json beside it: the KV cache is unknown"
        return replace(found, notes=(*found.notes, note))
    try:
        config = json.loads(await shelf.read(listed.name, 0, MOST_JSON_BYTES))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise LlmgwError(f"{listed.name} of {found.source} is no JSON object: it is broken")
    return replace(found, layout=read_config(config), told_by=CONFIG, mostly=found.mostly or _name_kind(config))


def _nested(file: FileListed, files: tuple[FileListed, ...]) -> bool:
    """One further down is of another part, where there is one at the top."""
    return "/" in file.name and any(each.name == CONFIG for each in files)


def _name_kind(config: Mapping[str, Any]) -> str | None:
    """The kind of number that the weights are, by the words of the configuration."""
    quantized = config.get("quantization_config")
    kinds = [quantized.get("quant_method")] if isinstance(quantized, dict) else []
    text = config.get("text_config")
    for facts in (config, text if isinstance(text, dict) else {}):
        kinds += [facts.get("dtype"), facts.get("torch_dtype")]
    return next((kind for kind in kinds if isinstance(kind, str)), None)


async def _read_head(
    shelf: Shelf, file: FileListed, read: Callable[[bytes], Any], *, first_bytes: int = FIRST_BYTES
) -> tuple[bytes, Any]:
    """The beginning of a file and what it says, read as far as that asks for."""
    head, wanted = b"", first_bytes
    while True:
        head += await shelf.read(file.name, len(head), min(wanted, HEAD_BYTES, file.size_bytes))
        told = await trio.to_thread.run_sync(read, head)
        if not hasattr(told, "at_least") or len(head) >= min(HEAD_BYTES, file.size_bytes):
            return head, told
        if len(head) < min(wanted, HEAD_BYTES, file.size_bytes):
            raise LlmgwError(f"{file.name} ended early while it was read: try again")
        wanted = max(told.at_least, len(head) * 2)


def _check(file: FileListed, head: bytes) -> None:
    if (why := check_header(file.name, head, file.size_bytes)) is not None:
        raise LlmgwError(f"{file.name} {why}")


def _sum(files: Iterable[FileListed]) -> int:
    return sum(file.size_bytes for file in files)


def _name_sizes(files: tuple[FileListed, ...]) -> str:
    return f"the size of {files[0].name}" if len(files) == 1 else f"the sizes of {len(files)} files"
