"""What sources say of their size: on a disk, and at the tests' own web server."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_origin import FakeOrigin
from weight_files import CONFIG, LLAMA, write_gguf, write_safetensors

from llmgw.cli.ctl.looking_into import MOST_PARTS, TRIES, look_into, look_there
from llmgw.core.sizing import Format, Found, Number
from llmgw.core.weights import FileListed, Listing, Source, parse_source
from llmgw.errors import LlmgwError, UsageError
from llmgw.host.weights.errors import Broken, FetchFailed, NoRanges

INDEX = "model.safetensors.index.json"
GGUF = write_gguf(LLAMA, (("w", (32, 400), 2), ("v", (32, 9), 0)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "org" / "m"
    made.mkdir(parents=True)
    return made


def put(folder: Path, **files: bytes | dict[str, Any]) -> None:
    """``a_b`` is a.b."""
    for name, held in files.items():
        raw = held if isinstance(held, bytes) else json.dumps(held).encode()
        (folder / name.replace("_", ".")).write_bytes(raw)


def put_parts(folder: Path, *, total: int | None = 512, names: tuple[str, ...] = ("m-1", "m-2")) -> None:
    """Two files of safetensors with an index over ``names``."""
    for name in ("m-1", "m-2"):
        (folder / f"{name}.safetensors").write_bytes(write_safetensors())
    facts: dict[str, Any] = {"weight_map": {name: f"{name}.safetensors" for name in names}}
    if total is not None:
        facts["metadata"] = {"total_size": total}
    (folder / INDEX).write_text(json.dumps(facts))


# On this machine


async def test_a_gguf_file_here_is_read_from_its_header(folder: Path) -> None:
    put(folder, m_gguf=GGUF)
    found = await look_into(str(folder / "m.gguf"))
    assert (found.source, found.format, found.files, found.mostly) == (
        str(folder / "m.gguf"),
        Format.GGUF,
        1,
        "Q4_0",
    )
    assert found.disk == Number(value=len(GGUF), origin="the size of m.gguf")
    assert found.weights == Number(value=400 * 18 + 32 * 9 * 4, origin="the GGUF header")
    assert found.layout is not None
    assert (found.layout.context, len(found.layout.layers or ())) == (256, 2)


async def test_all_parts_of_a_gguf_are_counted(folder: Path) -> None:
    for number in (1, 2):
        (folder / f"m-0000{number}-of-00002.gguf").write_bytes(GGUF)
    for path in (folder, folder / "m-00002-of-00002.gguf"):
        found = await look_into(str(path))
        assert (found.files, found.weights) == (2, Number(value=2 * len(GGUF), origin="the sizes of 2 files"))
        assert found.layout is not None
    (folder / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(LlmgwError, match=r"not all of its parts: m-00001-of-00002.gguf"):
        await look_into(str(folder / "m-00002-of-00002.gguf"))


def put_split(folder: Path, *kinds: int) -> list[Path]:
    """Parts of these types, all but the last of which are small."""
    paths = []
    for number, kind in enumerate(kinds, start=1):
        count = 320_000 if number == len(kinds) else 320
        path = folder / f"m-{number:05}-of-{len(kinds):05}.gguf"
        path.write_bytes(write_gguf(LLAMA if number == 1 else {}, ((f"w{number}", (32, count // 32), kind),)))
        paths.append(path)
    return paths


async def test_what_most_of_a_model_is_of_is_told_by_all_of_its_parts(folder: Path) -> None:
    first, _, last = put_split(folder, 0, 0, 2)
    found = await look_into(str(first))
    assert (found.mostly, found.files, found.notes) == ("Q4_0", 3, ())
    last.write_bytes(b"<html>" + last.read_bytes()[6:])
    with pytest.raises(LlmgwError, match=r"m-00003-of-00003.gguf is an HTML page"):
        await look_into(str(first))


async def test_of_very_many_parts_it_is_not_known_what_most_of_them_are_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = put_split(folder, *[2] * (MOST_PARTS + 1))
    found = await look_into(str(first))
    assert (found.mostly, found.layout is not None) == (None, True)
    assert found.notes == ("not the heads of all its parts were read: what most of it is of is unknown",)


async def test_a_folder_of_safetensors_is_read_by_its_configuration(folder: Path) -> None:
    put(folder, model_safetensors=write_safetensors({"w": (8, 4)}), config_json=CONFIG, a_png=b"x" * 10_000)
    found = await look_into(str(folder))
    assert (found.format, found.files, found.mostly, found.told_by) == (
        Format.SAFETENSORS,
        1,
        "BF16",
        "config.json",
    )
    assert found.weights == Number(value=64, origin="the safetensors header")
    assert found.disk is not None
    assert found.disk.value < 10_000
    assert found.layout is not None
    # one file of it has the same configuration beside it
    assert (await look_into(str(folder / "model.safetensors"))).layout == found.layout


async def test_an_index_tells_the_weights(folder: Path) -> None:
    put_parts(folder)
    put(folder, config_json={**CONFIG, "quantization_config": {"quant_method": "fp8"}})
    found = await look_into(str(folder))
    assert (found.files, found.weights, found.mostly) == (2, Number(value=512, origin=INDEX), "fp8")
    put_parts(folder, total=None)
    size = len(write_safetensors())
    assert (await look_into(str(folder))).weights == Number(value=2 * size, origin="the sizes of 2 files")
    (folder / INDEX).unlink()
    assert (await look_into(str(folder))).weights == Number(value=2 * size, origin="the sizes of 2 files")


async def test_what_an_index_names_must_be_there(folder: Path) -> None:
    put_parts(folder, names=("m-1", "m-3"))
    with pytest.raises(LlmgwError, match=r"not all files that its index names: m-3.safetensors"):
        await look_into(str(folder))
    (folder / INDEX).write_text("{}")
    with pytest.raises(LlmgwError, match="weight_map"):
        await look_into(str(folder))


async def test_without_a_configuration_the_cache_is_unknown(folder: Path) -> None:
    put(folder, model_safetensors=write_safetensors())
    found = await look_into(str(folder))
    assert (found.layout, found.notes) == (
        None,
        ("there is no config.json beside it: the KV cache is unknown",),
    )
    put(folder, config_json=b"[1]")
    with pytest.raises(LlmgwError, match=r"config.json of .* is no JSON object"):
        await look_into(str(folder))


async def test_what_is_no_model_of_its_own_is_left_out(folder: Path) -> None:
    put(folder, m_gguf=GGUF, mmproj_gguf=GGUF)
    assert (await look_into(str(folder))).files == 1
    (folder / "m.gguf").unlink()
    (folder / "mmproj.gguf").unlink()
    put(folder, m_safetensors=write_safetensors())
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 99)
    assert (await look_into(str(folder))).weights == Number(value=64, origin="the safetensors header")


async def test_other_weights_are_as_large_as_their_files(folder: Path) -> None:
    put(folder, pytorch_bin=b"x" * 77, config_json=CONFIG)
    found = await look_into(str(folder))
    assert found.layout is not None
    assert (found.format, found.weights) == (Format.PYTORCH, Number(value=77, origin="the size of pytorch.bin"))


async def test_which_of_several_models_is_meant_must_be_said(folder: Path) -> None:
    put(folder, a_gguf=GGUF, b_gguf=GGUF)
    with pytest.raises(UsageError, match=r"has 2 models: name one of a.gguf, b.gguf"):
        await look_into(str(folder))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a git-lfs pointer"),
        (b"<!doctype html>", "is an HTML page"),
        (GGUF[:-64], "ends early"),
        (GGUF[:100], "ends early"),
        (b"GGUF" + bytes(40), "version 0"),
    ],
)
async def test_a_file_that_cannot_be_used_is_told(folder: Path, held: bytes, words: str) -> None:
    put(folder, m_gguf=held)
    with pytest.raises(LlmgwError, match=words):
        await look_into(str(folder / "m.gguf"))


async def test_what_is_not_there_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LlmgwError, match="is it a path on another machine"):
        await look_into("/nowhere/at/all")
    with pytest.raises(LlmgwError, match=r"holds no weights .*: it has nothing"):
        await look_into(str(folder))
    put(folder, a_txt=b"x")
    with pytest.raises(LlmgwError, match=r"holds no weights .*: it has a\.txt"):
        await look_into(str(folder))
    with pytest.raises(LlmgwError, match=r"/a\.txt is no file of weights"):
        await look_into(str(folder / "a.txt"))
    for empty in ("", " "):
        with pytest.raises(UsageError, match="SOURCE is empty"):
            await look_into(empty)
    with pytest.raises(UsageError, match="s3: is no scheme"):
        await look_into("s3://a/b")
    put(folder, m_gguf=GGUF)
    monkeypatch.chdir(folder)
    assert (await look_into("m.gguf")).source == (await look_into("./m.gguf")).source == str(folder / "m.gguf")


async def test_what_is_no_ordinary_file_is_told_and_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "m.gguf")
    os.mkfifo(folder / "p-00002-of-00002.gguf")
    put(folder, x=GGUF)
    (folder / "x").rename(folder / "p-00001-of-00002.gguf")
    for path in ("/dev/zero", "/dev/null", str(folder / "m.gguf"), str(folder / "p-00001-of-00002.gguf")):
        with pytest.raises(LlmgwError, match="is no ordinary file"):
            await look_into(path)


async def test_a_name_that_is_no_text_is_told_and_in_a_folder_left_out(folder: Path) -> None:
    put(folder, m_gguf=GGUF)
    odd = folder / os.fsdecode(b"\xfe.gguf")
    odd.write_bytes(GGUF)
    with pytest.raises(UsageError, match=r"is no UTF-8.*: rename it") as raised:
        await look_into(str(odd))
    raised.value.message.encode()
    assert (await look_into(str(folder))).files == 1


async def test_a_file_of_endless_parts_is_told(folder: Path) -> None:
    (folder / "m-00001-of-99999.gguf").write_bytes(GGUF)
    with pytest.raises(LlmgwError, match=r"m-00001-of-99999\.gguf says that it is one of 99999 parts"):
        await look_into(str(folder / "m-00001-of-99999.gguf"))


# Over the network


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[FakeOrigin]:
    with FakeOrigin(tmp_path) as made:
        yield made


async def look(origin: FakeOrigin, text: str) -> Found:
    return await look_into(text, {"HF_ENDPOINT": origin.url})


@pytest.mark.slow
async def test_a_file_of_the_hub_is_read_by_its_beginning(origin: FakeOrigin, folder: Path) -> None:
    large = write_gguf({**LLAMA, "n": ["word"] * 100_000}, (("w", (32, 400_000), 2),))
    put(folder, m_gguf=large)
    for text in ("hf:org/m/m.gguf", f"{origin.url}/org/m/m.gguf?token=secret"):
        before = origin.sent.get("org/m/m.gguf", 0)
        found = await look(origin, text)
        assert (found.disk, found.source) == (
            Number(value=len(large), origin="the size of m.gguf"),
            text.partition("?")[0],
        )
        assert found.weights == Number(value=400_000 * 18, origin="the GGUF header")
        # (a header of 1.2 MB in 8.4)
        assert 0 < origin.sent["org/m/m.gguf"] - before < 4_000_000


@pytest.mark.slow
async def test_a_repository_is_read_as_an_engine_would(origin: FakeOrigin, folder: Path) -> None:
    put_parts(folder)
    put(folder, config_json=CONFIG, consolidated_safetensors=b"x" * 9999)
    found = await look(origin, "org/m")
    assert (found.source, found.files, found.weights) == ("org/m", 2, Number(value=512, origin=INDEX))
    assert found.disk is not None
    assert found.disk.value < 9999
    assert found.layout is not None


@pytest.mark.slow
async def test_one_file_of_a_repository_has_its_configuration_there(origin: FakeOrigin, folder: Path) -> None:
    put(folder, model_safetensors=write_safetensors())
    bare = await look(origin, "hf:org/m/model.safetensors")
    assert (bare.layout, len(bare.notes)) == (None, 1)
    put(folder, config_json=CONFIG)
    found = await look(origin, "hf:org/m/model.safetensors@main")
    assert found.layout is not None
    assert found.notes == ()


@pytest.mark.slow
async def test_a_repository_of_several_models_says_how_to_name_one(origin: FakeOrigin, folder: Path) -> None:
    put(folder, a_gguf=GGUF, b_gguf=GGUF)
    with pytest.raises(UsageError, match=r"name one of hf:org/m/a\.gguf, hf:org/m/b\.gguf"):
        await look(origin, "org/m")
    with pytest.raises(FetchFailed, match=r"has no file c\.gguf"):
        await look(origin, "hf:org/m/c.gguf")


class Flaky:
    """An origin that fails so often, and then serves one file; without ranges where it is told so."""

    def __init__(self, held: bytes, *, breaks: int = 0, ranges: bool = True, cut: int = 0) -> None:
        self.held, self.breaks, self.ranges, self.cut = held, breaks, ranges, cut
        self.asked: list[tuple[int, int]] = []

    async def resolve(self, source: Source, commit: str | None) -> Listing:
        self._fail()
        file = FileListed(name="m.gguf", size_bytes=len(self.held))
        return Listing(source=source.text, commit="c" * 40, files=(file,))

    def _fail(self) -> None:
        if self.breaks:
            self.breaks -= 1
            raise Broken("nobody answers", 60.0)

    @asynccontextmanager
    async def read(
        self, source: Source, listing: Listing, file: int, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        self._fail()
        if start and not self.ranges:
            raise NoRanges
        self.asked.append((start, stop))

        async def pieces() -> AsyncIterator[bytes]:
            yield self.held[start : stop - self.cut]

        yield pieces()


async def test_what_breaks_is_tried_again_for_a_while(autojump_clock: Any) -> None:
    found = await look_there(parse_source("hf:o/m/m.gguf"), Flaky(GGUF, breaks=TRIES - 1))
    assert found.format is Format.GGUF
    with pytest.raises(FetchFailed, match="nobody answers"):
        await look_there(parse_source("hf:o/m/m.gguf"), Flaky(GGUF, breaks=TRIES))


async def test_a_long_header_is_asked_for_in_growing_parts() -> None:
    long = write_gguf({**LLAMA, "n": ["word"] * 200_000}, (("w", (32, 400_000), 2),))
    ranged, whole = Flaky(long), Flaky(long, ranges=False)
    found = await look_there(parse_source("hf:o/m/m.gguf"), ranged)
    assert [start for start, _ in ranged.asked] == [0, *(stop for _, stop in ranged.asked[:-1])]
    assert len(ranged.asked) == 3
    assert await look_there(parse_source("hf:o/m/m.gguf"), whole) == found
    assert [start for start, _ in whole.asked] == [0, 0, 0]


async def test_a_short_answer_is_not_asked_for_without_end() -> None:
    with pytest.raises(LlmgwError, match="ended early"):
        await look_there(parse_source("hf:o/m/m.gguf"), Flaky(GGUF, cut=len(GGUF) - 100))
