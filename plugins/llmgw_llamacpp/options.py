"""The flags of llama-server that the embedded program takes, and which setting of xllamacpp each one moves.

xllamacpp has llama.cpp's server but not its argument parser. What is not in this table is refused by name, as
llama-server refuses a flag that it does not know: a flag that is taken and does nothing would be worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from llmgw_llamacpp import values
from llmgw_llamacpp.values import Convert, More, decimal, inverse, listed, number, one_of, switch, text

__all__ = ["OPTIONS", "MisuseError", "Option", "help_text", "move", "parse"]

# Where in CommonParams a value goes, and how it is read from its text.
Place = tuple[str, Convert]


class MisuseError(Exception):
    """A command line that can't be run; the message is what llama-server would print."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A flag: its spellings, those that switch it off, the placeholder of its value if it takes one, and what it moves.

    Each of ``settings`` is one setting as the places it has had in versions of xllamacpp, the newest first.
    """

    names: tuple[str, ...]
    off: tuple[str, ...] = ()
    hint: str = ""
    settings: tuple[tuple[Place, ...], ...]

    def __str__(self) -> str:
        return f"{', '.join((*self.names, *self.off))} {self.hint}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A flag as it was typed; the value of a switch is "on" or "off"."""

    flag: str
    option: Option
    value: str


def parse(argv: Sequence[str]) -> list[Given]:
    """The flags of a command line, in order. MisuseError for what is not one."""
    known = {name: (option, "on") for option in OPTIONS for name in option.names}
    known |= {name: (option, "off") for option in OPTIONS for name in option.off}
    words = iter(argv)
    return [_take(word, words, known) for word in words]


def move(given: Sequence[Given], xllamacpp: ModuleType, params: Any) -> None:
    """Moves the settings of ``params``. MisuseError where a value does not fit, or this xllamacpp lacks the setting."""
    for each in given:
        try:
            for places in each.option.settings:
                _assign(params, places, xllamacpp, each.value)
        except (ValueError, TypeError, KeyError, OverflowError, AssertionError):
            raise _misused(each.flag, each.option, f"invalid value {each.value!r}") from None
        except (AttributeError, OSError) as failed:
            raise _misused(each.flag, each.option, str(failed)) from failed


def help_text() -> str:
    """Every flag on a line of its own, spelled as llama-server's help spells it."""
    return "".join(f"{option}\n" for option in OPTIONS)


def _take(word: str, words: Iterator[str], known: dict[str, tuple[Option, str]]) -> Given:
    flag = word.replace("_", "-") if word.startswith("--") else word
    if flag not in known:
        raise MisuseError(f"error: invalid argument: {flag}")
    option, value = known[flag]
    if not option.hint:
        return Given(flag=flag, option=option, value=value)
    for following in words:
        return Given(flag=flag, option=option, value=following)
    raise _misused(flag, option, "expected value for argument")


def _assign(params: Any, places: tuple[Place, ...], xllamacpp: ModuleType, value: str) -> None:
    for path, convert in places:
        *steps, last = path.split(".")
        target = params
        for step in steps:
            target = getattr(target, step, None)
        if hasattr(target, last):
            item = convert(xllamacpp, value)
            setattr(target, last, [*getattr(target, last), *item] if isinstance(item, More) else item)
            return
    raise AttributeError(f"this version of xllamacpp has no setting {places[0][0]}")


def _misused(flag: str, option: Option, why: str) -> MisuseError:
    return MisuseError(f'error while handling argument "{flag}": {why}\n\nusage:\n{option}')


def _value(names: str, hint: str, paths: str, convert: Convert = number) -> Option:
    return Option(names=tuple(names.split()), hint=hint, settings=(_places(paths, convert),))


def _flag(names: str, paths: str, convert: Convert = switch, off: str = "") -> Option:
    return Option(names=tuple(names.split()), off=tuple(off.split()), settings=(_places(paths, convert),))


def _places(paths: str, convert: Convert) -> tuple[Place, ...]:
    return tuple((path, convert) for path in paths.split())


_CACHE_TYPES = "{f32,f16,bf16,q8_0,q4_0,q4_1,iq4_nl,q5_0,q5_1}"
_CACHE_TYPE = one_of("ggml_type", "GGML_TYPE_")
_FLASH = one_of(
    "llama_flash_attn_type",
    "LLAMA_FLASH_ATTN_TYPE_",
    **dict.fromkeys(("on", "true", "1"), "ENABLED"),
    **dict.fromkeys(("off", "false", "0"), "DISABLED"),
    **{"-1": "AUTO"},
)
_LOAD_MODE = one_of("llama_load_mode", "LLAMA_LOAD_MODE_", **{"mmap+mlock": "MMAP_MLOCK", "dio": "DIRECT_IO"})
_POOLING = one_of("llama_pooling_type", "LLAMA_POOLING_TYPE_")
_RANKING = one_of("llama_pooling_type", "LLAMA_POOLING_TYPE_", on="RANK")
_SPLIT = one_of("llama_split_mode", "LLAMA_SPLIT_MODE_")

OPTIONS: tuple[Option, ...] = (
    # what is served, and where
    _value("--model -m", "FNAME", "model.path", text),
    _value("--alias -a", "STRING", "model_alias", listed),
    _value("--tags", "STRING", "model_tags", listed),
    Option(names=("--host",), hint="HOST", settings=((("hostnames", listed), ("hostname", text)),)),
    _value("--port", "PORT", "port"),
    _value("--api-prefix", "PREFIX", "api_prefix", text),
    _value("--api-key", "KEY", "api_keys", listed),
    Option(
        names=("--timeout", "-to"),
        hint="N",
        settings=(_places("timeout_read", number), _places("timeout_write", number)),
    ),
    _value("--threads-http", "N", "n_threads_http"),
    _value("--sse-ping-interval", "N", "sse_ping_interval"),
    _value("--cors-origins", "ORIGINS", "cors_origins", text),
    # size
    _value("--ctx-size -c", "N", "n_ctx"),
    _value("--parallel -np", "N", "n_parallel"),
    _flag("--kv-unified -kvu", "kv_unified", off="--no-kv-unified -no-kvu"),
    _value("--kv-unified-per-slot", "N", "kv_unified_per_slot"),
    _value("--batch-size -b", "N", "n_batch"),
    _value("--ubatch-size -ub", "N", "n_ubatch"),
    _value("--predict --n-predict -n", "N", "n_predict"),
    _value("--keep", "N", "n_keep"),
    _value("--threads -t", "N", "cpuparams.n_threads"),
    _value("--threads-batch -tb", "N", "cpuparams_batch.n_threads"),
    _flag("--cont-batching -cb", "cont_batching", off="--no-cont-batching -nocb"),
    _value("--cache-type-k -ctk", _CACHE_TYPES, "cache_type_k", _CACHE_TYPE),
    _value("--cache-type-v -ctv", _CACHE_TYPES, "cache_type_v", _CACHE_TYPE),
    _value("--flash-attn -fa", "[on|off|auto]", "flash_attn_type", _FLASH),
    _flag("--swa-full", "swa_full"),
    _flag("--context-shift", "ctx_shift", off="--no-context-shift"),
    _flag("--cache-prompt", "cache_prompt", off="--no-cache-prompt"),
    _value("--cache-ram -cram", "N", "cache_ram_mib"),
    _value("--cache-reuse", "N", "n_cache_reuse"),
    _value("--ctx-checkpoints -ctxcp --swa-checkpoints", "N", "n_ctx_checkpoints"),
    _value("--slot-prompt-similarity -sps", "SIMILARITY", "slot_prompt_similarity", decimal),
    _value("--slot-save-path", "PATH", "slot_save_path", values.folder),
    _value("--sleep-idle-seconds", "SECONDS", "sleep_idle_seconds"),
    # devices and memory
    _value("--gpu-layers --n-gpu-layers -ngl", "N|auto|all", "n_gpu_layers", values.layers),
    Option(
        names=("--device", "-dev"),
        hint="{none}",
        settings=(
            _places("n_gpu_layers", values.no_device(0)),
            _places("no_kv_offload", values.no_device(True)),
            _places("no_op_offload", values.no_device(True)),
        ),
    ),
    _value("--split-mode -sm", "{none,layer,row,tensor}", "split_mode", _SPLIT),
    _value("--main-gpu -mg", "INDEX", "main_gpu"),
    _value("--load-mode -lm", "{auto,none,mmap,mlock,mmap+mlock,dio}", "load_mode", _LOAD_MODE),
    _value("--numa", "{distribute,isolate,numactl}", "numa", one_of("ggml_numa_strategy", "GGML_NUMA_STRATEGY_")),
    _value("--fit -fit", "[on|off]", "fit_params", switch),
    _value("--fit-ctx -fitc", "N", "fit_params_min_ctx"),
    _flag("--kv-offload -kvo", "no_kv_offload", inverse, off="--no-kv-offload -nkvo"),
    _flag("--op-offload", "no_op_offload", inverse, off="--no-op-offload"),
    _flag("--repack", "no_extra_bufts", inverse, off="--no-repack -nr"),
    _flag("--no-host", "no_host"),
    _flag("--check-tensors", "check_tensors"),
    _flag("--warmup", "warmup", off="--no-warmup"),
    # chat
    _flag("--jinja", "use_jinja", off="--no-jinja"),
    _value("--chat-template", "JINJA_TEMPLATE", "chat_template", text),
    _value("--chat-template-file", "JINJA_TEMPLATE_FILE", "chat_template", values.content),
    _value("--chat-template-kwargs", "STRING", "default_template_kwargs", values.template_values),
    _value(
        "--reasoning-format",
        "{none,auto,deepseek,deepseek-legacy}",
        "reasoning_format",
        one_of("common_reasoning_format", "COMMON_REASONING_FORMAT_"),
    ),
    _value("--reasoning-budget", "N", "sampling.reasoning_budget_tokens"),
    _flag("--prefill-assistant", "prefill_assistant", off="--no-prefill-assistant"),
    _flag("--skip-chat-parsing", "force_pure_content_parser", off="--no-skip-chat-parsing"),
    # other kinds of models
    _flag("--embeddings --embedding", "embedding"),
    Option(
        names=("--reranking", "--rerank"),
        settings=(_places("embedding", switch), _places("pooling_type", _RANKING)),
    ),
    _value("--pooling", "{none,mean,cls,last,rank}", "pooling_type", _POOLING),
    _value("--embd-normalize", "N", "embd_normalize"),
    _value("--mmproj -mm", "FILE", "mmproj.path", text),
    _flag("--mmproj-auto", "no_mmproj", inverse, off="--no-mmproj --no-mmproj-auto"),
    _flag("--mmproj-offload", "mmproj_use_gpu", off="--no-mmproj-offload"),
    _value("--lora", "FNAME", "lora_adapters", values.adapters),
    _value("--lora-scaled", "FNAME:SCALE,...", "lora_adapters", values.scaled_adapters),
    _flag("--lora-init-without-apply", "lora_init_without_apply"),
    _value("--rope-freq-base", "N", "rope_freq_base", decimal),
    _value("--rope-freq-scale", "N", "rope_freq_scale", decimal),
    _value("--yarn-orig-ctx", "N", "yarn_orig_ctx"),
    _value(
        "--rope-scaling",
        "{none,linear,yarn}",
        "rope_scaling_type",
        one_of("llama_rope_scaling_type", "LLAMA_ROPE_SCALING_TYPE_"),
    ),
    # what can be seen of it
    _flag("--metrics", "endpoint_metrics"),
    _flag("--props", "endpoint_props"),
    _flag("--slots", "endpoint_slots", off="--no-slots"),
    _flag("--webui --ui", "ui webui", off="--no-webui --no-ui"),
    _value("--verbosity --log-verbosity -lv", "N", "verbosity"),
    _flag("--verbose --log-verbose -v", "verbosity", values.fixed(2**31 - 1)),
    _flag("--offline", "offline"),
)
