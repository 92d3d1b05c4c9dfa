"""How a server's context is shared out among its slots, so that each request gets what the model promises.

llama.cpp divides ``--ctx-size`` by ``--parallel``: of 65536 tokens over two slots a request may use 32768.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmgw.engines import Problem, is_given, value_of
from llmgw_llamacpp.flags import STYLE

_CTX_SIZE = ("--ctx-size", "-c")
_PARALLEL = ("--parallel", "-np")
_BATCH = ("--batch-size", "-b")
# One pool for all slots: each may use the whole of it, and nothing is divided.
_UNIFIED = ("--kv-unified", "-kvu", "--kv-unified-per-slot")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What a profile's args say; None is not given."""

    ctx_size: int | None
    parallel: int | None


def share(args: Sequence[str], context_length: int | None) -> tuple[str, ...]:
    """The flags to add, so that a slot holds ``context_length``; none where the args decide by themselves."""
    if is_given(args, STYLE, *_CTX_SIZE) and is_given(args, STYLE, *_PARALLEL):
        return ()
    given = _read(args)
    if is_given(args, STYLE, *_CTX_SIZE):
        ctx_size = given.ctx_size or 0
        parallel = max(1, ctx_size // context_length) if context_length else 1
        return ("--parallel", str(parallel))
    parallel = given.parallel if given.parallel is not None else 1
    one_slot = () if is_given(args, STYLE, *_PARALLEL) else ("--parallel", "1")
    if not context_length or is_given(args, STYLE, "--kv-unified-per-slot"):
        return one_slot
    return ("--ctx-size", str(context_length * max(1, parallel)), *one_slot)


def check(args: Sequence[str], context_length: int | None) -> list[Problem]:
    """What keeps a slot from holding ``context_length``, with the number that would do."""
    problems = [
        Problem(key="args", message=f"{names[0]} needs a whole number, not {value!r}")
        for names in (_CTX_SIZE, _PARALLEL)
        if (value := value_of(args, STYLE, *names)) is not None and _whole(value) is None
    ]
    given = _read(args)
    if given.parallel == 0:
        problems.append(Problem(key="args", message="--parallel 0 is no slot at all: give it 1 or more"))
    # With these it comes as far as its first batch, and aborts; a negative --ubatch-size does no harm.
    if given.ctx_size is not None and given.ctx_size < 0:
        text = f"--ctx-size {given.ctx_size} is no size: give it the tokens, or 0 for the model's own"
        problems.append(Problem(key="args", message=text))
    batch = _whole(value_of(args, STYLE, *_BATCH))
    if batch is not None and batch < 1:
        problems.append(Problem(key="args", message=f"--batch-size {batch} is no batch: give it 1 or more"))
    # A size of 0 is the model's own, and a negative number of slots leaves both to llama.cpp.
    if problems or not context_length or not given.ctx_size:
        return problems
    divided = not is_given(args, STYLE, *_UNIFIED) and (given.parallel is None or given.parallel > 0)
    # Alone, a size gets as many slots as it holds whole contexts, and one at least.
    parallel = (given.parallel or 1) if divided else 1
    if given.ctx_size // parallel >= context_length:
        return problems
    less = f"--ctx-size {given.ctx_size} leaves {given.ctx_size // parallel} tokens for a request"
    less += f" in each of {parallel} slots" if parallel > 1 else ""
    enough = f"give it --ctx-size {context_length * parallel}"
    fewer = given.ctx_size // context_length
    enough += f" or --parallel {fewer}" if fewer else ""
    return [Problem(key="args", message=f"{less}, and the model promises context_length {context_length}: {enough}")]


def _read(args: Sequence[str]) -> _Given:
    ctx_size, parallel = value_of(args, STYLE, *_CTX_SIZE), value_of(args, STYLE, *_PARALLEL)
    return _Given(ctx_size=_whole(ctx_size), parallel=_whole(parallel))


def _whole(text: str | None) -> int | None:
    # No more digits than a token count can have: int() refuses very long ones with an exception.
    digits = (text or "").removeprefix("-")
    return int(text or "") if digits.isascii() and digits.isdigit() and len(digits) <= 12 else None
