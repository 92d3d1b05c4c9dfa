"""How the embedded program reads a command line, and what it moves in xllamacpp."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llmgw_llamacpp.options import OPTIONS, MisuseError, Option, help_text, move, parse

NO_MODULE = ModuleType("nothing")
SAMPLES = {
    "--cache-type-k": "q8_0",
    "--cache-type-v": "iq4_nl",
    "--chat-template-file": __file__,
    "--chat-template-kwargs": '{"enable_thinking": false}',
    "--device": "none",
    "--fit": "off",
    "--flash-attn": "auto",
    "--gpu-layers": "all",
    "--load-mode": "mmap+mlock",
    "--lora-scaled": "a.gguf:0,b.gguf:0.5",
    "--numa": "isolate",
    "--pooling": "mean",
    "--reasoning-format": "deepseek-legacy",
    "--rope-scaling": "yarn",
    "--slot-save-path": "/",
    "--split-mode": "layer",
}


def moved(*argv: str, **settings: object) -> Any:
    params = SimpleNamespace(**settings)
    move(parse(argv), NO_MODULE, params)
    return params


def test_flags_move_their_settings_in_order() -> None:
    params = moved("--ctx-size", "4096", "-c", "8192", "--alias", "a, b", n_ctx=0, model_alias=[])
    assert params.n_ctx == 8192
    assert params.model_alias == ["a", "b"]


def test_underscores_are_dashes_in_long_flags_only() -> None:
    assert moved("--ctx_size", "1", n_ctx=0).n_ctx == 1
    with pytest.raises(MisuseError, match=r"^error: invalid argument: -n_p$"):
        parse(["-n_p", "1"])


def test_a_switch_goes_both_ways() -> None:
    assert moved("--no-warmup", warmup=True).warmup is False
    assert moved("--warmup", warmup=False).warmup is True
    assert moved("-nkvo", no_kv_offload=False).no_kv_offload is True


def test_a_setting_is_found_under_its_older_name() -> None:
    assert moved("--no-webui", webui=True).webui is False
    assert moved("--no-webui", ui=True, webui=True).webui is True
    assert moved("--host", "127.0.0.1", hostname="").hostname == "127.0.0.1"
    assert moved("--host", "127.0.0.1,::1", hostnames=[]).hostnames == ["127.0.0.1", "::1"]


def test_one_flag_may_move_two_settings() -> None:
    params = moved("--timeout", "9", timeout_read=0, timeout_write=0)
    assert (params.timeout_read, params.timeout_write) == (9, 9)


@pytest.mark.parametrize("argv", [["--bogus"], ["--ctx-size=4096"], ["stray"], ["--ctx-size", "1", "2"]])
def test_an_unknown_flag_is_refused_as_llama_server_does(argv: list[str]) -> None:
    with pytest.raises(MisuseError, match=r"^error: invalid argument: "):
        parse(argv)


def test_a_flag_without_its_value_is_named() -> None:
    with pytest.raises(MisuseError, match=r'^error while handling argument "--port": expected value for argument\n'):
        parse(["--port"])


def test_a_value_that_does_not_fit_is_named_with_the_usage() -> None:
    with pytest.raises(MisuseError) as misused:
        moved("--port", "x", port=0)
    assert str(misused.value) == "error while handling argument \"--port\": invalid value 'x'\n\nusage:\n--port PORT"


def test_adapters_go_beside_those_that_were_named_before() -> None:
    class Adapters(ModuleType):
        def CommonAdapterLoraInfo(self, path: str, scale: float) -> tuple[str, float]:  # noqa: N802 - as xllamacpp has it
            return path, scale

    params = SimpleNamespace(lora_adapters=[])
    move(parse(["--lora", "a.gguf", "--lora-scaled", "b.gguf:0,c.gguf:0.5"]), Adapters("adapters"), params)
    assert params.lora_adapters == [("a.gguf", 1.0), ("b.gguf", 0.0), ("c.gguf", 0.5)]
    with pytest.raises(MisuseError, match=r"invalid value 'b\.gguf'"):
        move(parse(["--lora-scaled", "b.gguf"]), Adapters("adapters"), params)


def test_no_device_keeps_everything_off_the_cards() -> None:
    params = moved("--device", "none", n_gpu_layers=-1, no_kv_offload=False, no_op_offload=False)
    assert (params.n_gpu_layers, params.no_kv_offload, params.no_op_offload) == (0, True, True)
    with pytest.raises(MisuseError, match="invalid value 'CUDA0'"):
        moved("--device", "CUDA0", n_gpu_layers=-1)


def test_a_setting_that_this_xllamacpp_lacks_is_refused() -> None:
    """Ignored, the flag would look as if it had done something."""
    with pytest.raises(MisuseError, match=r"this version of xllamacpp has no setting n_ctx\n"):
        moved("--ctx-size", "1")
    with pytest.raises(MisuseError, match=r"no setting cpuparams\.n_threads"):
        moved("--threads", "1")


def test_no_flag_is_in_the_table_twice() -> None:
    names = [name for option in OPTIONS for name in (*option.names, *option.off)]
    assert len(names) == len(set(names))


def test_the_help_has_a_line_for_every_flag() -> None:
    lines = help_text().splitlines()
    assert len(lines) == len(OPTIONS)
    assert "--port PORT" in lines
    assert "--warmup, --no-warmup" in lines


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.names[0])
def test_the_installed_xllamacpp_knows_every_setting(option: Option) -> None:
    pytest.importorskip("xllamacpp", reason="pip install 'llmgw[demo]'")
    xllamacpp = importlib.import_module("xllamacpp")
    flag = option.names[0]
    argv = [flag, SAMPLES.get(flag, "7")] if option.hint else [flag]
    move(parse(argv), xllamacpp, xllamacpp.CommonParams())
    if option.off:
        move(parse([option.off[0]]), xllamacpp, xllamacpp.CommonParams())


def test_a_name_that_is_not_one_of_the_enums_is_refused() -> None:
    xllamacpp = pytest.importorskip("xllamacpp", reason="pip install 'llmgw[demo]'")
    for argv in (["--pooling", "most"], ["--flash-attn", "maybe"], ["--cache-type-k", "q99"], ["--fit", "perhaps"]):
        with pytest.raises(MisuseError, match="invalid value"):
            move(parse(argv), xllamacpp, xllamacpp.CommonParams())
