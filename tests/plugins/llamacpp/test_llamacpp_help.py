"""The flags in the help of a real llama-server, and in that of the embedded program."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from llmgw.engines import Flag, Takes
from llmgw.engines.testing import read_flags
from llmgw_llamacpp.help import read_help
from llmgw_llamacpp.options import OPTIONS, MisuseError, help_text, move, parse

HERE = Path(__file__).parent
FLAGS = read_help((HERE / "help" / "b10434.txt").read_text(encoding="utf-8"))
SWITCH = frozenset({"on", "off", "auto", "enabled", "disabled", "true", "false", "1", "0", "-1"})
CACHE_TYPES = frozenset({"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"})


def find(name: str) -> Flag:
    (found,) = (flag for flag in FLAGS if name in flag.names)
    return found


def test_every_flag_that_works_is_found() -> None:
    table = read_flags((HERE / "flags" / "llama-server-b10434.txt").read_text())
    assert {name for flag in FLAGS if flag.removed is None for name in flag.names} == table


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("--metrics", Takes.NONE),
        ("-nkvo", Takes.NONE),
        ("-c", Takes.ONE),
        ("--hf-repo", Takes.ONE),
        ("--override-tensor", Takes.ONE),
        ("--override-tensor-draft", Takes.ONE),
        ("--spec-type", Takes.ONE),
        ("--lora-scaled", Takes.ONE),
        ("--flash-attn", Takes.ONE),
        ("--control-vector-layer-range", Takes.MANY),
    ],
)
def test_how_many_values_follow_is_read_from_the_placeholder(name: str, takes: Takes) -> None:
    assert find(name).takes is takes


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("--pooling", frozenset({"none", "mean", "cls", "last", "rank"})),
        ("--flash-attn", SWITCH),
        ("--fit", SWITCH - {"auto", "-1"}),
        ("--cpu-strict", frozenset({"0", "1"})),
        ("--cache-type-k", CACHE_TYPES),
        ("--load-mode", frozenset({"auto", "none", "mmap", "mlock", "mmap+mlock", "dio"})),
        ("--reasoning-format", frozenset({"auto", "none", "deepseek", "deepseek-legacy"})),
        # (several may be given, and numbers beyond those that are listed)
        ("--spec-type", frozenset()),
        ("--verbosity", frozenset()),
        ("--poll", frozenset()),
    ],
)
def test_the_choices_are_those_that_it_takes(name: str, choices: frozenset[str]) -> None:
    assert find(name).choices == choices


def test_what_is_on_its_way_out_is_told_from_what_is_gone() -> None:
    assert str(find("--mlock").deprecated).startswith("DEPRECATED in favor of `--load-mode`")
    assert find("-dt").deprecated
    gone = find("--draft-max")
    assert gone.removed == "the argument has been removed. use --spec-draft-n-max or --spec-ngram-mod-n-max"
    assert gone.deprecated is None
    assert [flag.names[0] for flag in FLAGS if flag.removed] == [
        *("--draft", "--draft-min", "--spec-ngram-size-n", "--spec-ngram-size-m", "--spec-ngram-min-hits"),
    ]


def test_older_helps_are_read_as_well() -> None:
    (switch, scaled) = read_help(
        "-fa,   --flash-attn                     enable Flash Attention (default: disabled)\n"
        "--lora-scaled FNAME SCALE               path to LoRA adapter with user defined scaling\n"
    )
    assert switch == Flag(names=("-fa", "--flash-attn"), takes=Takes.NONE)
    assert scaled.takes is Takes.MANY


def test_the_embedded_program_has_a_help_of_the_same_kind() -> None:
    found = read_help(help_text())
    assert [flag.names for flag in found] == [(*option.names, *option.off) for option in OPTIONS]
    assert all((flag.takes is Takes.ONE) == bool(option.hint) for flag, option in zip(found, OPTIONS, strict=True))
    known = {name: flag for flag in FLAGS for name in flag.names}
    differing = [
        flag.names for flag in found for name in flag.names if name in known and flag.takes != known[name].takes
    ]
    assert differing == []


@pytest.mark.parametrize("text", ["", "\n\n", "usage: llama-server", "-", "--\n   x", "----- common params -----"])
def test_what_is_no_help_has_no_flags(text: str) -> None:
    assert read_help(text) == ()


def test_a_value_that_is_a_number_is_told() -> None:
    """Each of these was tried with the binary: it refuses "abc" for those that are, and takes a word for the others."""
    for name in ("--threads", "-c", "-ub", "--parallel", "--temp", "--seed", "--port", "--sleep-idle-seconds", "-td"):
        assert find(name).number, name
    for name in (
        "-ngl",
        "-ngld",
        "--defrag-thold",
        "--tensor-split",
        "--host",
        "--cpu-mask",
        "--flash-attn",
        "--mlock",
    ):
        assert not find(name).number, name


def test_the_embedded_programs_numbers_are_told_as_well() -> None:
    flags = {name: flag for flag in read_help(help_text()) for name in flag.names}
    assert flags["--threads"].number
    assert not flags["--gpu-layers"].number
    for option in OPTIONS:
        if flags[option.names[0]].number:
            with pytest.raises(MisuseError):
                move(parse((option.names[0], "abc")), ModuleType("xllamacpp"), Everything())


class Everything:
    """Settings that take whatever is moved there."""

    def __getattr__(self, name: str) -> object:
        return self
