"""What of a definition SGLang can't do, and which parser fits a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import llmgw_sglang
from llmgw.engines import Flag, Model, ModelName, ParserFlag, Profile, Task, Version, is_given
from llmgw.engines.testing import read_flags
from llmgw_sglang import flags, parsers
from llmgw_sglang.flags import read_count

CHOICES = frozenset({"qwen", "qwen3_coder", "llama3", "hermes"})
VERSION = Version(number="0.5.23", flags=(Flag(names=("--tool-call-parser",), choices=CHOICES),))


def validate(
    *args: str,
    version: Version | None = None,
    name: str = "tiny",
    source: str = "/srv/tiny",
    context_length: int | None = 32768,
    tool_parser: str | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, list[str]]:
    profile = Profile(name="p", engine="sglang", args=args, tool_parser=tool_parser, env=env or {})
    model = Model(name=ModelName(name), source=source, context_length=context_length, profiles=(profile,))
    found: dict[str, list[str]] = {}
    for problem in llmgw_sglang.engine_validate(model, profile, version):
        found.setdefault(problem.key, []).append(problem.message)
    return found


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--model", "source"),
        ("--model-path=/x", "source"),
        ("--served-model-name", "name"),
        ("--tp", "tp and pp"),
        ("--tensor-parallel-size", "tp and pp"),
        ("--pp-s", "tp and pp"),
        ("--api-key", "no key"),
        ("--ssl-keyfile", "no key"),
        ("--ssl-key", "no key"),
        ("--config", "profile"),
        ("--dist-init-addr", "placement"),
        ("--nccl-init-addr", "placement"),
        ("--base-gpu-id", "placement"),
        ("--base", "placement"),
        ("--host", "address"),
        ("--lora-paths", "loras"),
        ("--is-emb", "task"),
    ],
)
def test_a_flag_of_llmgws_is_refused_in_each_spelling(word: str, meant: str) -> None:
    (message,) = validate(word, "2")["args"]
    assert message.startswith(word.partition("=")[0])
    assert meant in message


def test_a_flag_of_the_profiles_own_is_not_refused() -> None:
    assert validate("--mem-fraction-static", "0.8", "--disable-cuda-graph", "--log-level", "warning", "--ep", "2") == {}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--dp", "x"), "--dp-size needs a whole number above 0, not 'x'"),
        (("--dp",), "--dp-size needs a whole number above 0, not ''"),
        (("--context-l=12",), "--context-length 12 is 12 tokens"),
        (("--context-len=abc",), "--context-length needs a number of tokens, not 'abc'"),
        (("--help",), "--help is not for args: with it the engine prints something and ends"),
        (("-h",), "-h is not for args"),
        (("--version",), "--version is not for args"),
        (("positional",), "'positional' is no flag, and the value of none"),
    ],
)
def test_what_is_refused_is_refused_in_any_spelling(args: tuple[str, ...], said: str) -> None:
    (message,) = validate(*args)["args"]
    assert message.startswith(said)


def test_no_flag_is_short_for_another() -> None:
    asked = [
        *flags.OWNED,
        *flags.ENDING,
        *parsers.FLAGS.values(),
        "--context-length",
        "--dp-size",
        "--data-parallel-size",
    ]
    asked += ["--chat-template", "--enable-metrics", "--enable-cache-report", "--log-level-http", "--tokenizer-path"]
    asked += ["--enable-dp-attention", "--attn-dp-size", "--attention-data-parallel-size"]
    tables = (Path(__file__).parent / "flags").glob("*.txt")
    lines = {line for table in tables for line in read_flags(table.read_text())}
    known = {name for line in lines for name in line.partition("\t")[0].split()}
    assert len(known) > 300
    assert [flag for flag in sorted(known - set(asked)) if is_given((flag, "1"), flags.STYLE, *asked)] == []


def test_a_port_of_the_environment_is_refused() -> None:
    for name in ("SGLANG_PORT", "SGL_PORT"):
        (message,) = validate(env={name: "30000"})["env"]
        assert message == f"{name} is not for env: llmgw sets it from the ports that it picks on the node"


def test_a_variable_of_llmgws_is_refused() -> None:
    (message,) = validate(env={"CUDA_VISIBLE_DEVICES": "0", "SGLANG_LOG_GC": "1"})["env"]
    assert message == "CUDA_VISIBLE_DEVICES is not for env: llmgw sets it from the placement"


@pytest.mark.parametrize(
    ("args", "refused"),
    [
        (("--dp-size", "2"), True),
        (("--data-parallel-size=2",), True),
        (("--dp", "2"), True),
        (("--dp-size", "1"), False),
        (("--dp-size", "2", "--enable-dp-attention"), False),
        (("--attn-dp-size", "2"), False),
        (("--data-par", "2"), True),
        (("--dp", "1"), False),
        (("--dp", "0"), True),
        (("--dp", "x", "--enable-dp-attention"), True),
    ],
)
def test_data_parallelism_is_refused_unless_it_stays_within_tp(args: tuple[str, ...], refused: bool) -> None:
    assert bool(validate(*args)) is refused


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        *(("32768", 32768), ("32k", 32000), ("1.5k", 1500), ("32Ki", 32768), ("1M", 10**6), ("1Gi", 2**30)),
        *(("32K", None), ("1.5Ki", None), ("1.5", None), ("-1", None), ("0", None), ("", None), ("many", None)),
        *(("9" * 40, None), ("1ki", None)),
    ],
)
def test_a_number_of_tokens_as_sglang_reads_it(given: str, tokens: int | None) -> None:
    assert read_count(given) == tokens


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("8k", "--context-length 8k is 8000 tokens, and the model promises context_length 32768"),
        ("32K", "--context-length needs a number of tokens, not '32K'"),
        ("32Ki", None),
        ("65536", None),
    ],
)
def test_a_context_of_the_args_holds_what_the_model_promises(given: str, said: str | None) -> None:
    found = validate("--context-length", given)
    assert found == {} if said is None else said in found["args"][0]
    assert flags.check_context(("--context-length", "8k"), None) == []


def test_a_parser_that_the_binary_does_not_have_is_refused_with_a_near_one() -> None:
    assert validate(tool_parser="qwen3-coder", version=VERSION) == {
        "tool_parser": ["this release has no parser 'qwen3-coder' for --tool-call-parser: did you mean qwen3_coder?"]
    }
    found = validate("--tool-call-parser", "zzz", version=VERSION)
    assert found["args"][0].endswith("it has hermes, llama3, qwen, qwen3_coder")
    assert validate(tool_parser="qwen", version=VERSION) == {}
    assert validate(tool_parser="qwen3-coder") == {}
    assert validate(tool_parser="qwen3-coder", version=Version(number="0.5.23")) == {}


def test_a_parser_is_given_once() -> None:
    found = validate("--tool-call-parser", "qwen", tool_parser="qwen")
    assert found == {"args": ["--tool-call-parser is not for args: the profile has tool_parser qwen"]}
    assert validate("--tool-call-p=qwen", tool_parser="qwen") == found


def test_a_name_with_a_colon_is_refused() -> None:
    (message,) = validate(name="qwen:8b")["name"]
    assert "alias" in message


@pytest.mark.parametrize("source", ["/srv/tiny.gguf", "/srv/TINY.GGUF", "org/repo/tiny.gguf"])
def test_a_gguf_file_is_refused(source: str) -> None:
    (message,) = validate(source=source)["source"]
    assert "llama.cpp" in message


@pytest.mark.parametrize("source", ["hf:org/repo/*", "hf:org/repo/*.safetensors@main", "org/repo"])
def test_what_is_fetched_is_a_folder(source: str) -> None:
    assert validate(source=source) == {}


@pytest.mark.parametrize(
    ("source", "suggested"),
    [
        ("Qwen/Qwen3-8B", "qwen"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "hermes"),
        ("/srv/models/Meta_Llama_3.1_8B_Instruct", "llama3"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "pythonic"),
        ("mistralai/Mistral-Small-3.2-24B", "mistral"),
        ("openai/gpt-oss-20b", "gpt-oss"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseekv31"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", None),
        ("zai-org/GLM-4.5-Air", "glm45"),
        ("moonshotai/Kimi-K2-Instruct", "kimi_k2"),
        ("acme/own-model", None),
    ],
)
def test_a_parser_is_suggested_by_the_models_name(source: str, suggested: str | None) -> None:
    profile = Profile(name="p", engine="sglang")
    model = Model(name=ModelName("m"), source=source, profiles=(profile,))
    assert llmgw_sglang.engine_name_parser(model, profile) == ParserFlag(
        flag="--tool-call-parser", given=None, suggested=suggested
    )


def test_the_parser_that_is_given_is_told() -> None:
    model = Model(name=ModelName("qwen3-8b"), source="/srv/x", profiles=())
    own = Profile(name="p", engine="sglang", tool_parser="llama3")
    args = Profile(name="p", engine="sglang", args=("--tool-call-parser", "hermes"))
    assert [parsers.name(model, each) for each in (own, args)] == [
        ParserFlag(flag="--tool-call-parser", given="llama3", suggested="qwen"),
        ParserFlag(flag="--tool-call-parser", given="hermes", suggested="qwen"),
    ]
    embed = Model(name=ModelName("e"), source="/srv/x", task=Task.EMBED, profiles=())
    assert parsers.name(embed, own) is None
