"""The last definitions of each model, declared and stored, and what became of each."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec

from llmgw.core.model import Model, ModelName
from llmgw.store.database import Database

log = logging.getLogger("llmgw.store")

# Of one model, and besides these the last one that is proven: there is always something to return to.
KEPT = 20

PROVEN = "proven"
FAILED = "failed"

_NEXT = "select coalesce(max(number), 0) + 1 from history where name = ?"
_ADD = """
insert into history (name, number, model, text, origin, place, note, added_at, outcome, outcome_at, why)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_JUDGE = "update history set outcome = ?, outcome_at = ?, why = ? where name = ? and number = ?"
_LIST = """
select name, number, model, text, origin, place, note, added_at, outcome, outcome_at, why from history
where name = ? order by number desc
"""
_NEWEST = """
select name, number, model, text, origin, place, note, added_at, outcome, outcome_at, why from history
where (name, number) in (select name, max(number) from history group by name)
"""
_PROVEN = """
select name, number, model, text, origin, place, note, added_at, outcome, outcome_at, why from history
where (name, number) in (select name, max(number) from history where outcome = 'proven' group by name)
"""
_SWEEP = """
delete from history where name = ?1 and number <= (select max(number) from history where name = ?1) - ?2
    and number <> coalesce((select max(number) from history where name = ?1 and outcome = 'proven'), 0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDefinition:
    """A definition that a model has had, of ``origin`` ``declared`` or ``stored``; the newest one is the current one.

    ``text`` is what was written, ``place`` its file and line where it was declared; ``note`` says what brought it,
    where nobody has written it anew. ``outcome`` is ``proven``, ``failed`` (and ``why``) or, as long as neither is
    known, empty. Times are in seconds since 1970.
    """

    number: int
    model: Model
    text: str
    origin: str
    added_at: float
    place: str | None = None
    note: str | None = None
    outcome: str = ""
    outcome_at: float | None = None
    why: str | None = None


class History:
    __slots__ = ("_database", "_most")

    def __init__(self, database: Database, *, most: int = KEPT) -> None:
        self._database = database
        self._most = most

    async def list(self, name: ModelName) -> tuple[StoredDefinition, ...]:
        """Those of one model, the newest first. One that this version can't read is left out, and said in the log."""
        return await self._read(_LIST, name)

    async def newest(self) -> tuple[StoredDefinition, ...]:
        """The last one of each model."""
        return await self._read(_NEWEST)

    async def proven(self) -> tuple[StoredDefinition, ...]:
        """The last one of each model that is proven."""
        return await self._read(_PROVEN)

    async def add(self, definitions: Iterable[StoredDefinition]) -> tuple[StoredDefinition, ...]:
        """Keep each as the newest of its model, and answer them with their numbers: whatever they say, these follow on
        the last ones."""
        given = [(each, msgspec.json.encode(each.model).decode()) for each in definitions]

        def add(connection: sqlite3.Connection) -> tuple[StoredDefinition, ...]:
            return tuple(_add(connection, each, model, self._most) for each, model in given)

        return await self._database.write(add)

    async def judge(self, name: ModelName, number: int, outcome: str, now: float, why: str | None = None) -> None:
        """Note what became of it, or that nothing is known of that any more (an empty ``outcome``)."""
        row = (outcome, now if outcome else None, why, name, number)
        await self._database.write(lambda connection: connection.execute(_JUDGE, row))

    async def _read(self, query: str, *values: str) -> tuple[StoredDefinition, ...]:
        def read(connection: sqlite3.Connection) -> list[_Row]:
            return connection.execute(query, values).fetchall()

        return tuple(_understand_all(await self._database.read(read)))


_Row = tuple[str, int, str, str, str, str | None, str | None, float, str, float | None, str | None]


def _add(connection: sqlite3.Connection, each: StoredDefinition, model: str, most: int) -> StoredDefinition:
    name = each.model.name
    (number,) = connection.execute(_NEXT, (name,)).fetchone()
    written = (each.text, each.origin, each.place, each.note, each.added_at)
    connection.execute(_ADD, (name, number, model, *written, each.outcome, each.outcome_at, each.why))
    connection.execute(_SWEEP, (name, most))
    return replace(each, number=number)


def _understand_all(rows: Iterable[_Row]) -> Iterator[StoredDefinition]:
    for name, number, model, text, origin, place, note, added_at, outcome, outcome_at, why in rows:
        try:
            read = msgspec.json.decode(model, type=Model)
        except msgspec.MsgspecError as error:
            log.error("definition %d of the model %s is left out of its history: %s", number, name, error)
            continue
        yield StoredDefinition(
            number=number,
            model=read,
            text=text,
            origin=origin,
            added_at=added_at,
            place=place,
            note=note,
            outcome=outcome,
            outcome_at=outcome_at,
            why=why,
        )
