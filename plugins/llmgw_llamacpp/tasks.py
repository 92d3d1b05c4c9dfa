"""What a model's task and its extra files ask of llama-server: embeddings, ranking, a projector, adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from llmgw.engines import Launch, Lora, Model, Problem, Profile, Takes, Task, Version, is_given, value_of
from llmgw_llamacpp.flags import STYLE

REASONING_FORMATS = ("auto", "deepseek", "deepseek-legacy", "none")

_SPLIT_MODE = ("--split-mode", "-sm")
_EMBED = ("--embeddings", "--embedding")
_RERANK = ("--reranking", "--rerank")
_BATCH = ("--batch-size", "-b")
_UBATCH = ("--ubatch-size", "-ub")
_POOLING = "--pooling"
_MMPROJ = ("--mmproj", "-mm", "--mmproj-url", "-mmu", "--no-mmproj", "--no-mmproj-auto")
_ADAPTERS = ("--lora", "--lora-scaled", "--lora-init-without-apply")
_FORMAT = "--reasoning-format"
_CACHE_RAM = ("--cache-ram", "-cram")
_CACHE_RAM_ENV = "LLAMA_ARG_CACHE_RAM"
_GGUF = re.compile(r"\.gguf(?:[?#].*)?", re.IGNORECASE)


def name_mode(launch: Launch) -> tuple[str, ...]:
    """The flags of a task other than chat, with room for an input of the whole context.

    An input goes through in one batch there, and is refused where it is longer than one: 512 tokens by default. The
    pooling is the model's own, since a wrong one gives vectors that look right.
    """
    if launch.task is Task.CHAT:
        return ()
    names = _EMBED if launch.task is Task.EMBED else _RERANK
    mode = () if is_given(launch.args, STYLE, *names) else names[:1]
    if not launch.context_length:
        return mode
    room = str(launch.context_length)
    batch = () if is_given(launch.args, STYLE, *_BATCH) else ("--batch-size", room)
    ubatch = () if is_given(launch.args, STYLE, *_UBATCH) else ("--ubatch-size", room)
    return (*mode, *batch, *ubatch)


def name_adapters(loras: Sequence[Lora], args: Sequence[str], version: Version | None) -> tuple[str, ...]:
    """The adapters in their order, none of them applied: each request says which it wants.

    ``--lora`` alone applies all of them to every request that names none, ``--lora-init-without-apply`` or not.
    """
    if not loras or is_given(args, STYLE, "--lora-scaled"):
        return ()
    # Until the end of 2025 the file and its scale were two words, and each adapter a flag of its own.
    known = version.find("--lora-scaled") if version is not None else None
    if known is not None and known.takes is Takes.MANY:
        return tuple(word for lora in loras for word in ("--lora-scaled", lora.source, "0"))
    return ("--lora-scaled", ",".join(f"{lora.source}:0" for lora in loras))


def name_no_cache(launch: Launch) -> tuple[str, ...]:
    """The flag that takes away the cache of whole prompts, where there are adapters.

    That cache finds a prompt by its tokens alone, whichever adapter read them, and the answer would go on from the
    state of another. What a slot keeps by itself is safe: it is cleared when the adapter is not that of its last
    request. Releases without the flag, until the end of 2025, have no such cache.
    """
    if not launch.loras or is_given(launch.args, STYLE, *_CACHE_RAM):
        return ()
    version = launch.version
    lacks = version is not None and version.flags and version.find("--cache-ram") is None
    return () if lacks else ("--cache-ram", "0")


def check(model: Model, profile: Profile) -> list[Problem]:
    """What of a task and its files does not go together, or is not what llama.cpp reads."""
    problems = [*_check_files(model), *_check_task(model, profile.args)]
    if model.mmproj is not None and is_given(profile.args, STYLE, *_MMPROJ):
        problems.append(Problem(key="args", message="the model has an mmproj: take --mmproj and its like out of args"))
    if model.loras and is_given(profile.args, STYLE, *_ADAPTERS):
        problems.append(Problem(key="args", message="the model has loras: take --lora and its like out of args"))
    if model.loras:
        problems += _check_cache(profile)
    if profile.tp > 1 and value_of(profile.args, STYLE, *_SPLIT_MODE) == "none":
        text = f"--split-mode none uses one card, and tp is {profile.tp}: take one of the two out"
        problems.append(Problem(key="args", message=text))
    return [*problems, *_check_reasoning(profile)]


def _path_of(source: str) -> str:
    """What of a source is in the path that llama.cpp is given: of what is fetched its name."""
    if source.startswith("hf:"):
        return source.removeprefix("hf:")
    return source.partition("?")[0].rpartition("/")[2] if "://" in source else source


def _check_files(model: Model) -> Iterator[Problem]:
    if model.mmproj is not None and not _GGUF.search(model.mmproj):
        text = f"{model.mmproj} does not end in .gguf: llama.cpp reads a projector from such a file"
        yield Problem(key="mmproj", message=text)
    for lora in model.loras:
        if not _GGUF.search(lora.source):
            text = f"{lora.source} does not end in .gguf: convert the adapter with llama.cpp's convert_lora_to_gguf.py"
            yield Problem(key="loras", message=text)
        elif {",", ":"} & set(_path_of(lora.source)):
            text = f"llama.cpp takes a list of adapters divided by , and : so a path can't have them: {lora.source}"
            yield Problem(key="loras", message=text)
    if model.loras and model.task is not Task.CHAT:
        text = f"llama.cpp chooses adapters for chats and completions only, and the task is {model.task}: take them out"
        yield Problem(key="loras", message=text)


def _check_task(model: Model, args: Sequence[str]) -> Iterator[Problem]:
    pooling = value_of(args, STYLE, _POOLING)
    if model.task is Task.EMBED and pooling in ("none", "rank"):
        text = f"--pooling {pooling} gives no embedding of a text: write mean, cls or last, or leave it to the model"
        yield Problem(key="args", message=text)
    if model.task is Task.RERANK and pooling not in (None, "rank"):
        yield Problem(key="args", message=f"--pooling {pooling} can't rank: take it out, --reranking brings its own")


def _check_cache(profile: Profile) -> Iterator[Problem]:
    why = "its cache of prompts does not tell adapters apart, and an answer would be of another one: take it out"
    given = value_of(profile.args, STYLE, *_CACHE_RAM)
    if given is not None and given != "0":
        yield Problem(key="args", message=f"--cache-ram {given} does not go with loras: {why}, or write 0")
    if profile.env.get(_CACHE_RAM_ENV, "0") != "0":
        yield Problem(key="env", message=f"{_CACHE_RAM_ENV} does not go with loras: {why}")


def _check_reasoning(profile: Profile) -> Iterator[Problem]:
    wanted = profile.reasoning_parser
    if wanted is None:
        return
    if wanted not in REASONING_FORMATS:
        text = f"llama.cpp knows no reasoning format {wanted!r}: give it one of {', '.join(REASONING_FORMATS)}"
        yield Problem(key="reasoning_parser", message=text)
    if is_given(profile.args, STYLE, _FORMAT):
        yield Problem(key="args", message=f"reasoning_parser is set as well as {_FORMAT}: take one of the two out")
