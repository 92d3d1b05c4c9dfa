"""What revoked.txt says and which lines a revocation adds to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from llmgw.errors import UsageError
from llmgw.pki.facts import CertificateFacts, Kind
from llmgw.pki.names import MAX_NAME, is_name, read_serial, write_serial


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoked:
    """A node's name in the file stands for every certificate of that node, also for those yet to come.

    ``odd``: lines that are neither a name nor a serial number, and so refuse nobody.
    """

    serials: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    odd: tuple[str, ...] = ()

    def covers(self, facts: CertificateFacts) -> bool:
        return int(facts.serial, 16) in self.serials or (facts.kind is Kind.NODE and facts.name in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line to add; ``node`` empty where no record says whose certificate it was."""

    serial: str
    node: str


def read_revoked(text: str) -> Revoked:
    """One entry in a line, with ``#`` before comments."""
    lines = [line.partition("#")[0].strip().lower() for line in text.splitlines()]
    entries = {line: read_serial(line) for line in lines if line}
    others = [line for line, serial in entries.items() if serial is None]
    return Revoked(
        serials=frozenset(serial for serial in entries.values() if serial is not None),
        nodes=frozenset(line for line in others if is_name(line)),
        odd=tuple(line for line in others if not is_name(line)),
    )


def find_revocable(given: str, issued: Iterable[CertificateFacts]) -> tuple[Entry, ...]:
    """What NODE or SERIAL stands for: all certificates of that node, or the one, which no record need know.

    Raises UsageError where it stands for nothing, and for a server's certificate: agents read no such list.
    """
    known = tuple(issued)
    found = tuple(
        Entry(serial=facts.serial, node=facts.name)
        for facts in known
        if facts.name == given and facts.kind is Kind.NODE
    )
    if found:
        return found
    serial = read_serial(given)
    named = [facts for facts in known if facts.name == given]
    if serial is not None:
        named = [facts for facts in known if int(facts.serial, 16) == serial]
    if any(facts.kind is Kind.SERVER for facts in named):
        raise UsageError(
            f"{given} is a server's certificate, and agents know no revoked ones: issue a new one with --force; "
            "if its key was stolen, make a new authority in another folder and issue everything anew"
        )
    if serial is not None:
        return (Entry(serial=write_serial(serial), node=named[0].name if named else ""),)
    raise UsageError(
        f"no certificate of {given[:MAX_NAME]!r} is on record here: llmgw ctl cert list shows those that are; one that "
        "is not can be revoked by its serial number (llmgw ctl cert show FILE), or by the node's name as a line of "
        "revoked.txt"
    )


def write_entry(entry: Entry, now: float) -> str:
    """The line, without its end."""
    day = datetime.fromtimestamp(now, UTC).date().isoformat()
    return f"{entry.serial} # {entry.node or 'not on record'} {day}"
