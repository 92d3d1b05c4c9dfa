"""Command lines are read as their engine reads them, and so is the help of argparse."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from typing import NoReturn

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmgw.engines import (
    Flag,
    FlagStyle,
    Given,
    Takes,
    find_less_context,
    find_owned,
    find_owned_env,
    find_stray,
    is_given,
    read_argparse_help,
    split_args,
    value_of,
)
from llmgw.engines.flags import spell

PLAIN = FlagStyle(equals=False)
ARGPARSE = FlagStyle(underscores=True, abbreviations=True, dotted=True)
OWNED = {"--port": "the port", "--model-path": "the model's source", "-n": "the placement", "-dpa": "the placement"}
WORDS = st.lists(st.text(alphabet=st.sampled_from("-_=.ab1 {}\x00\udcffé"), max_size=12) | st.text(max_size=20))
STYLES = st.builds(FlagStyle, equals=st.booleans(), underscores=st.booleans(), dotted=st.booleans())


@pytest.mark.parametrize(
    ("word", "style", "spelled"),
    [
        ("--port", ARGPARSE, ("--port", None, None)),
        ("--a_b", ARGPARSE, ("--a-b", None, None)),
        ("--a_b", FlagStyle(), ("--a_b", None, None)),
        ("-a_b", ARGPARSE, ("-a_b", None, None)),
        ("--a=b_c=d", ARGPARSE, ("--a", None, "b_c=d")),
        ("--a=", ARGPARSE, ("--a", None, "")),
        ("--a=b", PLAIN, ("--a=b", None, None)),
        ("--a_b.c_d=e", ARGPARSE, ("--a-b", "c_d", "e")),
        ("-cc.mode", ARGPARSE, ("-cc", "mode", None)),
        ("--a.b", FlagStyle(), ("--a.b", None, None)),
        ("-1", ARGPARSE, None),
        ("-.5", ARGPARSE, None),
        ("-", ARGPARSE, None),
        ("--", ARGPARSE, None),
        ("--ctx 4096", ARGPARSE, None),
        ("--text=a b", ARGPARSE, ("--text", None, "a b")),
        ("value", ARGPARSE, None),
        ("", ARGPARSE, None),
    ],
)
def test_a_word_is_a_flag_in_the_spelling_of_its_engine(
    word: str, style: FlagStyle, spelled: tuple[str, str | None, str | None] | None
) -> None:
    assert spell(word, style) == spelled


def test_a_command_line_is_flags_with_what_follows_them() -> None:
    args = ("first", "-1", "--a", "x", "-2", "--b_c=y", "--d.e", "z", "-f")
    assert split_args(args, ARGPARSE) == (
        Given(name="--a", values=("x", "-2"), words=("--a", "x", "-2")),
        Given(name="--b-c", values=("y",), words=("--b_c=y",)),
        Given(name="--d", key="e", values=("z",), words=("--d.e", "z")),
        Given(name="-f", words=("-f",)),
    )


def test_the_last_of_some_flags_counts() -> None:
    args = ("--a", "1", "-a", "2", "3", "--a.b", "4", "--c")
    assert value_of(args, ARGPARSE, "--a", "-a") == "2"
    assert value_of(args, ARGPARSE, "--a") == "1"
    assert value_of(args, ARGPARSE, "--c") == ""
    assert value_of(args, ARGPARSE, "--d") is None
    # A part of a value is not the value.
    assert value_of(("--a.b", "4"), ARGPARSE, "--a") is None


def messages(*args: str, style: FlagStyle = ARGPARSE, ending: tuple[str, ...] = ()) -> list[str]:
    problems = find_owned(args, OWNED, style, ending=ending)
    assert {problem.key for problem in problems} <= {"args"}
    return [problem.message for problem in problems]


def test_a_flag_of_llmgw_is_refused_by_name() -> None:
    assert messages("--port", "1") == ["--port is not for args: llmgw sets it from the port"]
    assert messages("--model_path=x") == ["--model-path is not for args: llmgw sets it from the model's source"]
    assert messages("--model-path.x", "1") == ["--model-path is not for args: llmgw sets it from the model's source"]
    assert messages("--ports", "1") == []
    assert messages("port", "8080") == []


def test_what_an_engine_takes_for_a_flag_of_llmgw_is_refused_too() -> None:
    assert messages("--por", "1") == ["--por (short for --port) is not for args: llmgw sets it from the port"]
    assert messages("-n2") == ["-n2 (short for -n) is not for args: llmgw sets it from the placement"]
    assert messages("-dp", "2") == ["-dp (short for -dpa) is not for args: llmgw sets it from the placement"]
    assert messages("--por", "-n2", "-dp", style=FlagStyle()) == []


def test_a_flag_of_its_own_is_short_for_no_other() -> None:
    style = replace(ARGPARSE, whole=frozenset({"-dp", "--model", "--port"}))
    assert messages("-dp", "2", "--model", "x", style=style) == []
    # One that is llmgw's stays so, whatever is known beside it.
    assert len(messages("--port", "1", style=style)) == 1


def test_a_flag_that_ends_the_engine_is_refused_in_each_spelling() -> None:
    why = "is not for args: with it the engine prints something and ends"
    assert messages("--help", "-h", "--version=x", ending=("--help", "-h", "--version")) == [
        f"--help {why}",
        f"-h {why}",
        f"--version {why}",
    ]
    assert messages("--vers", ending=("--version",)) == [f"--vers (short for --version) {why}"]
    assert messages("--vers", style=FlagStyle(), ending=("--version",)) == []


def test_words_before_any_flag_are_refused() -> None:
    assert [problem.message for problem in find_stray(("one", "-1", "--a", "x", "y"), ARGPARSE)] == [
        "'one' is no flag, and the value of none: take it out",
        "'-1' is no flag, and the value of none: take it out",
    ]
    assert find_stray(("--a", "x"), ARGPARSE) == find_stray((), ARGPARSE) == []
    # That is told by find_owned, with what to write.
    assert find_stray(("--a x",), ARGPARSE) == []


def test_a_flag_and_its_value_in_one_item_are_named() -> None:
    assert messages("--ctx-size 4096") == ["'--ctx-size 4096' is one item: write the flag and its value as two"]


@pytest.mark.slow
@given(WORDS, STYLES)
def test_reading_a_command_line_is_total_and_loses_nothing(words: list[str], style: FlagStyle) -> None:
    found = split_args(words, style)
    kept = [word for each in found for word in each.words]
    assert kept == words[len(words) - len(kept) :]
    assert all(spell(word, style) is None for word in words[: len(words) - len(kept)])
    find_owned(words, OWNED, style)
    value_of(words, style, "--a", "-a")


VLLM = """\
usage: vllm serve [model_tag] [options]

positional arguments:
  model_tag             The model tag to serve (optional if specified in
                        config) (default: None)

options:
  --aggregate-engine-logging
                        Log aggregate rather than per-engine statistics when
                        using data parallelism. (default: False)
  --api-server-count API_SERVER_COUNT, -asc API_SERVER_COUNT
                        How many API server processes to run. Defaults to
                        data_parallel_size if not specified. (default: None)
  --config CONFIG       Read CLI options from a config file. (default: None)
  --disable-log-stats   Disable logging statistics. (default: False)
  --enable-log-requests, --no-enable-log-requests
                        Enable logging request information, dependent on log
                        level:
                        - INFO: Request ID, parameters and LoRA request.

                        - DEBUG: Prompt inputs (e.g: text, token IDs).
                        (default: False)
  --tool-call-parser {hermes,llama3_json,mistral} or name registered in --tool-parser-plugin
                        Select the tool call parser. (default: None)
  -h, --help            show this help message and exit

Frontend:
  Arguments for the server. The next line of this begins with a flag:
  --enable-lora and what it means is told
  --elsewhere.

  --api-key API_KEY [API_KEY ...]
                        If provided, the server will require one of these keys
                        to be presented in the header. Do not rely on `--api-
                        key` alone to secure vLLM. (default: None)
  --allow-deprecated-quantization, --no-allow-deprecated-quantization
                        Whether to allow deprecated quantization methods.
                        (default: False)
  --disable-cascade-attn, --no-disable-cascade-attn
                        --disable-cascade-attn is deprecated and has no effect
                        since cascade attention has been removed. It will be
                        removed in v0.33.0. (default: None)
  --dcp-kv-cache-interleave-size DCP_KV_CACHE_INTERLEAVE_SIZE
                        dcp_kv_cache_interleave_size has been replaced by
                        cp_kv_cache_interleave_size, and will be deprecated
                        when PCP is fully supported. (default: 1)
  --log-config-file PYLOGGING_CONFIG_FILE
                        --log-config-file is deprecated and will be removed in
                        v0.33.0. Use --logging-
                        config.pylogging_config_file instead.
  --show-hidden-metrics-for-version SHOW_HIDDEN_METRICS_FOR_VERSION
                        Enable deprecated Prometheus metrics that have been
                        hidden since the specified version.
  --tokenizer-mode ['auto', 'hf', 'mistral']
                        Tokenizer mode. (default: auto)

VllmConfig:
  Dataclass which contains all vllm-related configuration. This
      simplifies passing around the distinct configurations in the codebase.
      ``--compilation-config`` is one of them.

  --compilation-config COMPILATION_CONFIG, -cc COMPILATION_CONFIG
                        Compilation. (default: {})

When passing JSON CLI arguments, the following sets of arguments are equivalent:
   --json-arg '{"key1": "value1", "key2": {"key3": "value2"}}'
"""


def flags_of(text: str) -> dict[str, Flag]:
    return {flag.names[0]: flag for flag in read_argparse_help(text)}


def test_the_help_of_vllm_is_read() -> None:
    flags = flags_of(VLLM)
    assert list(flags) == [
        "--aggregate-engine-logging",
        "--api-server-count",
        "--config",
        "--disable-log-stats",
        "--enable-log-requests",
        "--tool-call-parser",
        "-h",
        "--api-key",
        "--allow-deprecated-quantization",
        "--disable-cascade-attn",
        "--dcp-kv-cache-interleave-size",
        "--log-config-file",
        "--show-hidden-metrics-for-version",
        "--tokenizer-mode",
        "--compilation-config",
    ]
    assert flags["--aggregate-engine-logging"] == Flag(names=("--aggregate-engine-logging",), takes=Takes.NONE)
    assert flags["--api-server-count"] == Flag(names=("--api-server-count", "-asc"), takes=Takes.ONE)
    assert flags["--config"].takes is Takes.ONE
    assert flags["--disable-log-stats"].takes is Takes.NONE
    assert flags["--enable-log-requests"].names == ("--enable-log-requests", "--no-enable-log-requests")
    assert flags["-h"].names == ("-h", "--help")
    assert flags["--api-key"].takes is Takes.MANY


def test_choices_that_another_flag_widens_are_told_from_those_that_are_all() -> None:
    parser = flags_of(VLLM)["--tool-call-parser"]
    assert (parser.takes, parser.widened_by) == (Takes.ONE, "--tool-parser-plugin")
    assert parser.choices == {"hermes", "llama3_json", "mistral"}
    # Shown, and not enforced: a list of Python's is no list of choices.
    mode = flags_of(VLLM)["--tokenizer-mode"]
    assert (mode.takes, mode.choices) == (Takes.ONE, frozenset())
    anything = flags_of("  --mode {auto,fast} or a path\n")["--mode"]
    assert (anything.choices, anything.widened_by) == (frozenset(), None)


def test_only_a_flag_that_goes_itself_is_deprecated() -> None:
    said = {name: flag.deprecated for name, flag in flags_of(VLLM).items() if flag.deprecated}
    assert said == {
        "--disable-cascade-attn": "--disable-cascade-attn is deprecated and has no effect since cascade attention has "
        "been removed. It will be removed in v0.33.0.",
        "--log-config-file": "--log-config-file is deprecated and will be removed in v0.33.0. Use "
        "--logging-config.pylogging_config_file instead.",
    }


SGLANG = """\
usage: sglang serve [-h] --model-path MODEL_PATH
                    [--load-format {auto,pt,
                    safetensors}] [--enable-tf32-matmul | --no-enable-tf32-matmul]

options:
  -h, --help            show this help message and exit
  --model-path MODEL_PATH, --model MODEL_PATH
                        The path of the model weights.
  --log-requests-level {0,1,2,3}
                        0: Log metadata. 1: more (deprecated).
  --lora-target-modules [{q_proj,k_proj,all} ...]
                        The modules.
  --tp-size TP_SIZE, --tensor-parallel-size TP_SIZE
                        The tensor parallelism size.
  --uvicorn-access-log-exclude-prefixes [PREFIXES ...]
                        Exclude.
  --ep-size EP_SIZE, --expert-parallel-size EP_SIZE, --ep EP_SIZE
                        The expert parallelism size.
  --smg-grpc-mode       Use the legacy SMG gRPC server (smg-grpc-servicer)
                        instead of the HTTP server. Replaces the deprecated
                        --grpc-mode.
  --grpc-mode           (Deprecated, use --smg-grpc-mode) Legacy SMG gRPC
                        server selector.
  --linker-config JSON  The fallback to that flag for external
                        linkers is deprecated; ordinary use is unaffected.
  --disable-cuda-graph  Deprecated. Use --cuda-graph-
                        backend-{decode,prefill}=disabled instead.
  --monokernel-backend {amd}
                        Deprecated. Use --enable-amd-monokernel instead.
"""


def test_the_help_of_sglang_is_read() -> None:
    flags = flags_of(SGLANG)
    assert {name: flag.names[1:] for name, flag in flags.items() if len(flag.names) > 1} == {
        "-h": ("--help",),
        "--model-path": ("--model",),
        "--tp-size": ("--tensor-parallel-size",),
        "--ep-size": ("--expert-parallel-size", "--ep"),
    }
    assert flags["--log-requests-level"].choices == {"0", "1", "2", "3"}
    assert flags["--lora-target-modules"].choices == {"q_proj", "k_proj", "all"}
    assert flags["--lora-target-modules"].takes is Takes.UNSAID
    assert flags["--uvicorn-access-log-exclude-prefixes"].takes is Takes.UNSAID
    assert {name: flag.deprecated for name, flag in flags.items() if flag.deprecated} == {
        "--grpc-mode": "(Deprecated, use --smg-grpc-mode) Legacy SMG gRPC server selector.",
        "--disable-cuda-graph": "Deprecated. Use --cuda-graph-backend-{decode,prefill}=disabled instead.",
        "--monokernel-backend": "Deprecated. Use --enable-amd-monokernel instead.",
    }


@pytest.mark.parametrize(
    "said",
    [
        "Deprecated",
        "DEPRECATED in favour of --new",
        "[DEPRECATED] Old way to do it.",
        "Deprecated alias of --new.",
        "A deprecated alias of --new",
        "Does it. Deprecated: use --new.",
        "This option is deprecated.",
        "Old. The flag has been removed and is ignored.",
        "--old is now deprecated, use --new.",
        "`old` has been deprecated since 1.2.",
        "The --old flag is obsolete.",
    ],
)
def test_words_that_say_that_the_flag_goes(said: str) -> None:
    assert flags_of(f"  --old X  {said}\n")["--old"].deprecated is not None


@pytest.mark.parametrize(
    "said",
    [
        "Replaces the deprecated --older.",
        "Deprecated metrics are shown too.",
        "One of: auto, fast (deprecated).",
        "'slow' is a deprecated alias of 'careful'.",
        "--older is deprecated.",
        "Whether to warn of what is deprecated.",
        "Files that were removed are forgotten.",
        "It is not deprecated.",
    ],
)
def test_words_that_say_it_of_something_else(said: str) -> None:
    assert flags_of(f"  --old X  {said}\n")["--old"].deprecated is None


def test_a_list_of_choices_may_be_broken_over_lines() -> None:
    text = "  --kind {a,\n         b,c}, -k {a,b,c}\n          What kind.\n  --next\n"
    assert flags_of(text)["--kind"] == Flag(names=("--kind", "-k"), takes=Takes.ONE, choices=frozenset({"a", "b", "c"}))
    assert "--next" in flags_of(text)
    # One that never ends takes no more than its line.
    assert flags_of("  --kind {a,b\n       What. Deprecated.\n")["--kind"].deprecated == "Deprecated."


def test_what_is_no_flag_in_a_list_of_names_is_left_out() -> None:
    assert flags_of("  --one ONE, -1 ONE  The one.\n")["--one"].names == ("--one",)


def test_the_colours_of_a_terminal_are_seen_through() -> None:
    assert flags_of("\x1b[1;34moptions:\x1b[0m\n  \x1b[36m--port\x1b[0m \x1b[33mPORT\x1b[0m  The port.\n") == {
        "--port": Flag(names=("--port",), takes=Takes.ONE)
    }


def test_whatever_argparse_prints_here_is_read() -> None:
    """This Python's own argparse: each release words its help anew."""
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("group", "Words that are long enough to be broken, with --one in them. " * 5)
    group.add_argument("file", help="a file")
    group.add_argument("--one", "-o", help="Deprecated. " + "words " * 40)
    group.add_argument("--no-value", action="store_true")
    group.add_argument("--maybe", nargs="?")
    group.add_argument("--many", nargs="+")
    group.add_argument("--any", nargs="*")
    group.add_argument("--two", nargs=2)
    group.add_argument("--bool", action=argparse.BooleanOptionalAction)
    group.add_argument("--choice", choices=[f"choice-{number}" for number in range(40)])
    group.add_argument("--hidden", help=argparse.SUPPRESS)
    flags = flags_of(parser.format_help())
    assert {name: flag.takes for name, flag in flags.items()} == {
        "-h": Takes.NONE,
        "--one": Takes.ONE,
        "--no-value": Takes.NONE,
        "--maybe": Takes.MAYBE,
        "--many": Takes.MANY,
        "--any": Takes.UNSAID,
        "--two": Takes.MANY,
        "--bool": Takes.NONE,
        "--choice": Takes.ONE,
    }
    assert len(flags["--choice"].choices) == 40
    assert flags["--bool"].names == ("--bool", "--no-bool")
    assert [name for name, flag in flags.items() if flag.deprecated] == ["--one"]


LINES = st.lists(
    st.sampled_from(
        ["  --a {b,c", "  -h, --help", "    ", "options:", "--x", "  --a, -b [C ...]", "deprecated", "{[}]", "\t"]
    )
    | st.text(max_size=40)
)


@pytest.mark.slow
@given(LINES)
def test_reading_help_is_total(lines: list[str]) -> None:
    for flag in read_argparse_help("\n".join(lines)):
        assert flag.names
        assert "" not in flag.choices


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece", ["  --a {b,", "{", "[", " ", "  --a", "\n  --a", "-", ",", " -", "deprecated ", "\x1b["]
)
def test_a_help_of_any_length_is_read_in_one_go(piece: str) -> None:
    """A reader that tries again from each character of it would not come back from these."""
    text = piece * (100_000 // len(piece))
    read_argparse_help(text)
    read_argparse_help(f"  --flag {text}")
    split_args((text, f"--{text}"), ARGPARSE)
    find_owned((text, f"--{text}"), OWNED, ARGPARSE)


def test_the_order_of_a_help_is_kept() -> None:
    names = [f"--flag-{number}" for number in range(200)]
    random.Random(1).shuffle(names)
    text = "options:\n" + "".join(f"  {name} X\n      Does {name}.\n" for name in names)
    assert list(flags_of(text)) == names


def test_a_flag_is_given_in_any_spelling() -> None:
    args = ("--long_flag=1", "-s", "--json.key", "2", "value")
    style = FlagStyle(underscores=True, abbreviations=True, dotted=True)
    for name in ("--long-flag", "-s", "--json"):
        assert is_given(args, style, "--other", name)
    assert is_given(("--long", "1"), style, "--long-flag")
    assert not is_given(args, style, "--long", "value", "--key")
    assert not is_given(("--long", "1"), replace(style, abbreviations=False), "--long-flag")
    assert not is_given(args, FlagStyle(), "--long-flag", "--json")


def test_a_variable_of_llmgws_is_refused_by_name() -> None:
    problems = find_owned_env(
        {"E_PORT": "1", "E_HOST": "x", "E_OTHER": "y"}, {"E_HOST": "the node", "E_PORT": "the node"}
    )
    assert [(problem.key, problem.message) for problem in problems] == [
        ("env", "E_HOST is not for env: llmgw sets it from the node"),
        ("env", "E_PORT is not for env: llmgw sets it from the node"),
    ]


def test_a_context_may_be_longer_than_promised_and_not_shorter() -> None:
    assert find_less_context("--ctx 8k", 8000, None) == []
    assert find_less_context("--ctx 8k", 8000, 8000) == []
    (problem,) = find_less_context("--ctx 8k", 8000, 8192)
    assert problem.key == "args"
    assert problem.message == (
        "--ctx 8k is 8000 tokens, and the model promises context_length 8192: "
        "take it out of args, or set context_length to 8000"
    )


def test_a_shortened_flag_has_its_value() -> None:
    style = FlagStyle(underscores=True, abbreviations=True, dotted=True, whole=frozenset({"--parser"}))
    assert value_of(("--max-l=12",), style, "--max-len") == "12"
    assert value_of(("--max_l", "12"), style, "--max-len") == "12"
    assert value_of(("-m", "12"), style, "-ml") == "12"
    for words in (("-n5",), ("-n=5",), ("-n", "5")):
        assert value_of(words, style, "-n") == "5"
    assert value_of(("-n1.5",), style, "-n") == "1.5"
    assert value_of(("-nkey=value", "x"), style, "-n") == "key=value"
    assert value_of(("--json-c.key", "1"), style, "--json-config") is None
    assert is_given(("--json-c.key", "1"), style, "--json-config")
    assert value_of(("--parser", "x"), style, "--parser-plugin") is None
    strict = FlagStyle()
    assert [value_of(words, strict, "--max-len", "-n") for words in (("--max-l=1",), ("-n5",))] == [None, None]


class RefusedError(Exception):
    """What argparse ends the program for."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedError(message)


NAMES = st.frozensets(
    st.sampled_from(
        ["--max-len", "--max", "--max-seqs", "--tool", "--tool-call", "-n", "-r", "-sc", "-cc", "--no-tool"]
    ),
    min_size=1,
)
GIVEN = st.sampled_from(
    [
        "--m",
        "--max",
        "--max-",
        "--max-l",
        "--max-s",
        "--tool",
        "--too",
        "--tool-c",
        "-n",
        "-n5",
        "-s",
        "-sc",
        "-c",
        "-r2",
    ]
)


@pytest.mark.slow
@given(NAMES, GIVEN, st.booleans())
def test_what_argparse_takes_for_a_flag_is_taken_for_it(names: frozenset[str], word: str, joined: bool) -> None:
    # Only since Python 3.12 is "-s=v" short for "-sc=v": which of them an engine has nobody knows.
    assume(not (joined and word in ("-s", "-c")))
    parser = Parser(add_help=False)
    for name in names:
        parser.add_argument(name, dest=name)
    words = (f"{word}=v",) if joined else (word, "v")
    style = FlagStyle(abbreviations=True, whole=names)
    try:
        parsed = vars(parser.parse_known_args(list(words))[0])
    except RefusedError:
        # It fits several: no launch comes of it, whatever it is taken for.
        return
    assert {name: value_of(words, style, name) for name in names} == parsed
