"""What a request to the operator port says: its body or its query, read as one of a few shapes."""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec
import trio
from quart import request

from llmgw.admin.management import Refused
from llmgw.core.sizing import WIDTHS, Format, GpuNeed, Needs

# Nothing stands before this port that would tire of a body which never comes.
BODY_SECONDS = 30.0
# The client hangs up after a while, and so does what may stand between.
MOST_WAIT_SECONDS = 60
MAX_NODES = 10_000

# What msgspec says of a text or a list that is too short or too long, and where.
_LENGTH = re.compile(
    r"Expected `(?P<kind>\w+)` of length (?P<sign>[<>])= (?P<length>\d+)(?: - at `\$\.?(?P<where>.*)`)?"
)

Text = Annotated[str, msgspec.Meta(min_length=1)]


class NewModels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /models."""

    file: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    text: str
    replace: bool = False


class ToolCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /tool-check."""

    model: str
    replica: str | None = None


class WhatIf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /placement."""

    file: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    text: str


class Cordon(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /nodes/NAME/cordon."""

    cordoned: bool


class DrainBy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /nodes/NAME/drain; without a deadline what runs there waits for room elsewhere."""

    deadline_seconds: float | None = None


class Labels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /nodes/NAME/labels; null takes a label away."""

    labels: dict[str, str | None]


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /stop: the name of a model, or the id of a replica."""

    name: Text


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /load."""

    model: Text


class Rollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /rollback; without a number it goes back to the last that is proven."""

    model: Text
    number: Annotated[int, msgspec.Meta(ge=1)] | None = None


Gigabytes = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class PlanOnGpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each of so many GPUs has to have free."""

    tp: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    memory_gb: Gigabytes


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /plan: what a model takes that is only thought of. What is not known is left out."""

    source: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    format: Format | None = None
    gpu_class: Text | None = None
    gpus: Annotated[tuple[PlanOnGpu, ...], msgspec.Meta(max_length=len(WIDTHS))] = ()
    memory_gb: Gigabytes | None = None
    disk_gb: Gigabytes | None = None

    def needs(self) -> Needs:
        return Needs(
            source=self.source,
            format=self.format,
            gpu_class=self.gpu_class,
            gpus=tuple(GpuNeed(tp=each.tp, memory_gb=each.memory_gb) for each in self.gpus),
            memory_gb=self.memory_gb,
            disk_gb=self.disk_gb,
        )


class PullWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /weights/pull; without nodes it is those that could run a model of the source, else all."""

    source: str
    nodes: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_NODES)] = ()


class CollectWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /weights/collect: {}."""


class Since(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of GET /events."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    wait: Annotated[int, msgspec.Meta(ge=0, le=MOST_WAIT_SECONDS)] = 0
    model: Text | None = None
    node: Text | None = None


Body = TypeVar(
    "Body",
    NewModels,
    ToolCheck,
    WhatIf,
    Cordon,
    DrainBy,
    Labels,
    Stop,
    Load,
    Rollback,
    Plan,
    PullWeights,
    CollectWeights,
)


async def read_body(kind: type[Body]) -> Body:
    """What was sent. Refused where that is of another shape, or does not come."""
    # Only this type makes a browser ask first, and then it is refused: a form or plain text it just sends.
    if request.mimetype != "application/json":
        raise Refused("send the body as Content-Type: application/json", status=415, code="not_json")
    with trio.move_on_after(BODY_SECONDS):
        body = await request.get_data(cache=False)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            message = f"the body is not what is asked for: {_tell_wrong(error)}"
            raise Refused(message, status=400, code="invalid_request") from None
    raise Refused(f"the body did not come within {BODY_SECONDS:g} s", status=408, code="request_timeout")


def read_since() -> Since:
    """The query of what is followed. Refused where it says something else."""
    try:
        return msgspec.convert(dict(request.args.items()), Since, strict=False)
    except msgspec.ValidationError as error:
        message = f"the query is not what is asked for: {_tell_wrong(error)}"
        raise Refused(message, status=400, code="invalid_request") from None


def _tell_wrong(error: Exception) -> str:
    """What is wrong, for whoever wrote it. A length is what people get wrong on a command line, where nobody knows of
    bodies and their shapes."""
    found = _LENGTH.fullmatch(str(error))
    if found is None:
        return str(error)
    where, length = found["where"] or "it", int(found["length"])
    if found["sign"] == ">":
        return f"{where} is empty" if length == 1 else f"{where} is shorter than {length}"
    of = "characters" if found["kind"] == "str" else "entries"
    return f"{where} has more than {length} {of}"
