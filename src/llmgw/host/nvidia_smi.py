"""The driver asked through nvidia-smi, where its library can't be used from here."""

from __future__ import annotations

import csv
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from llmgw.core.node import MigInstance
from llmgw.host.cards import Card, Holder, LostCard, Survey
from llmgw.host.executable import explain_start, find_unusable
from llmgw.host.gpu_bus import count_cards, short_pci
from llmgw.host.nvml import FELL_OFF, MIB, NOT_RUNNING, UPDATED
from llmgw.host.process import OWN_PREFIX
from llmgw.units import printable

PROGRAM = "nvidia-smi"
# Without its persistence mode a driver starts each card anew for every question.
LIMIT_SECONDS = 30.0
_KILLED_SECONDS = 2.0
_MOST_BYTES = 1024 * 1024
_LONGEST = 200

_NEEDED = ("index", "uuid", "pci.bus_id", "name", "memory.total", "memory.used")
_WANTED = (
    "driver_version",
    "temperature.gpu",
    "utilization.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "memory.reserved",
    "mig.mode.current",
)
_FORMAT = "--format=csv,noheader,nounits"

_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
_UNOPENED = re.compile(
    r"Unable to determine the device handle for GPU ?(\d+(?!\d*:\d))?:? ?([0-9a-f:.]*\.[0-7])?:? ?(.*)", re.I
)
_NONE = re.compile(r"No devices were found", re.IGNORECASE)
_NOT_RUNNING = re.compile(r"couldn't communicate with the NVIDIA driver|Driver Not Loaded", re.IGNORECASE)
_UPDATED = re.compile(r"version mismatch", re.IGNORECASE)
# What stands in a field's place when the whole card is out of reach.
_GONE = re.compile(r"GPU is lost|requires? re(?:set|start)", re.IGNORECASE)
_UNTOLD = re.compile(r"N/A|Not Supported", re.IGNORECASE)
_LISTED_CARD = re.compile(r"GPU \d+: .*\(UUID: (\S+)\)")
_LISTED_PART = re.compile(r"\s+MIG (\S+)\s.*\(UUID: (\S+)\)")
_PART_GB = re.compile(r"\.(\d+)gb")


@dataclass(frozen=True, slots=True)
class _Said:
    """What it printed, or why it printed nothing."""

    text: str = ""
    problem: str | None = None


class NvidiaSmi:
    """A driver that is asked by starting a program. One that hangs in the driver is killed; until it is gone, which a
    process in the kernel may not be for long, no second one is started. For one thread at a time."""

    def __init__(
        self,
        program: str | None = None,
        *,
        limit_seconds: float = LIMIT_SECONDS,
        count_present: Callable[[], int | None] = count_cards,
    ) -> None:
        self._program = program
        self._limit_seconds = limit_seconds
        self._count_present = count_present
        # Fields that this release does not know are not asked for again.
        self._wanted = list(_WANTED)
        self._stuck: subprocess.Popen[bytes] | None = None

    def survey(self) -> Survey | None:
        program = self._program or shutil.which(PROGRAM)
        if program is None:
            return None
        if self._program is not None and (unusable := find_unusable(program)) is not None:
            return Survey(problem=f"{program} can't be used: {unusable.reason}")
        said = self._query(program)
        if said.problem is not None:
            return Survey(problem=said.problem)
        fields = (*_NEEDED, *self._wanted)
        rows = [row for row in _read_rows(said.text) if len(row) == len(fields)]
        facts = [dict(zip(fields, row, strict=True)) for row in rows]
        facts = [one for one in facts if one["uuid"].startswith("GPU-")]
        lost = _read_unopened(said.text)
        if not facts and not lost:
            return Survey(problem=self._explain(program, said.text))
        holders = self._read_holders(program)
        parts = self._read_parts(program) if any(one.get("mig.mode.current") == "Enabled" for one in facts) else {}
        cards = tuple(
            _read_card(one, None if holders is None else holders.get(one["uuid"], ()), parts) for one in facts
        )
        driver = next((one["driver_version"] for one in facts if _is_told(one.get("driver_version", ""))), None)
        return Survey(cards=cards, lost=lost, driver=driver)

    def _query(self, program: str) -> _Said:
        """What it says of its cards, asked for no more than it knows of."""
        while True:
            said = self._run(program, f"--query-gpu={','.join((*_NEEDED, *self._wanted))}", _FORMAT)
            unknown = _UNKNOWN_FIELD.search(said.text)
            if unknown is None or unknown[1] not in self._wanted:
                return said
            self._wanted.remove(unknown[1])

    def _explain(self, program: str, text: str) -> str | None:
        """Why it told of no card; None where that is no fault."""
        if _NONE.search(text):
            return None
        if _NOT_RUNNING.search(text):
            return None if self._count_present() == 0 else NOT_RUNNING
        if _UPDATED.search(text):
            return UPDATED
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"{program} says: {printable(lines[0])[:_LONGEST]}" if lines else f"{program} says nothing"

    def _read_holders(self, program: str) -> dict[str, tuple[Holder, ...]] | None:
        """Those that compute, by card; it does not tell of those that draw. None where it tells of none at all."""
        said = self._run(program, "--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory", _FORMAT)
        if said.problem is not None:
            return None
        found: dict[str, tuple[Holder, ...]] = {}
        for row in _read_rows(said.text):
            # (a name may hold commas)
            if len(row) >= 4 and row[1].isdigit():
                size = _read_number(row[-1])
                name = ", ".join(row[2:-1])
                holder = Holder(
                    pid=int(row[1]),
                    memory_bytes=None if size is None else round(size * MIB),
                    name=None if name.startswith("[") or not name else name,
                )
                found[row[0]] = (*found.get(row[0], ()), holder)
        return found

    def _read_parts(self, program: str) -> dict[str, tuple[MigInstance, ...]]:
        """The instances of cards that are cut, by card."""
        found: dict[str, tuple[MigInstance, ...]] = {}
        card = ""
        for line in self._run(program, "-L").text.splitlines():
            if listed := _LISTED_CARD.match(line):
                card = listed[1]
            elif part := _LISTED_PART.match(line):
                size = _PART_GB.search(part[1])
                instance = MigInstance(uuid=part[2], shape=part[1], memory_gb=float(size[1]) if size else 0.0)
                found[card] = (*found.get(card, ()), instance)
        return found

    def _run(self, program: str, *arguments: str) -> _Said:
        if self._stuck is not None and self._stuck.poll() is None:
            return _Said(problem=f"{program} (pid {self._stuck.pid}) hangs in the driver: `dmesg` may say why")
        self._stuck = None
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN_PREFIX)}
        deadline = time.monotonic() + self._limit_seconds
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                (program, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                # Cards that can't be opened are told there.
                stderr=writing,
                env={**environment, "LC_ALL": "C"},
                start_new_session=True,
            )
            os.close(writing)
            writing = -1
            text, whole = _read_until(reading, deadline)
        except OSError as error:
            return _Said(problem=f"{program} can't be started: {explain_start(program, error).reason}")
        finally:
            os.close(reading)
            if writing != -1:
                os.close(writing)
        if whole:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        # One that prints on when nobody reads any more may die of that, and has not come to its end for it.
        if not whole or process.poll() is None:
            self._kill(process)
            why = "prints without an end" if len(text) > _MOST_BYTES else f"did not end in {self._limit_seconds:g} s"
            return _Said(problem=f"{program} {why}: the driver may hang (`dmesg`)")
        return _Said(text=text.decode(errors="replace"))

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(_KILLED_SECONDS)
        except subprocess.TimeoutExpired:
            self._stuck = process


def _read_until(pipe: int, deadline: float) -> tuple[bytes, bool]:
    """All that comes before the deadline, and whether it came to its end; it is not read beyond a limit."""
    text = b""
    while len(text) <= _MOST_BYTES:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return text, False
        more = os.read(pipe, 65536)
        if not more:
            return text, True
        text += more
    return text, False


def _read_rows(text: str) -> list[list[str]]:
    lines = (line for line in text.splitlines() if "," in line)
    return [[cell.strip() for cell in row] for row in csv.reader(lines, quoting=csv.QUOTE_NONE)]


def _read_unopened(text: str) -> tuple[LostCard, ...]:
    found = []
    for line in text.splitlines():
        told = _UNOPENED.search(line)
        if told is not None:
            index, address, why = told.groups()
            said = printable(why.strip())[:_LONGEST]
            reason = FELL_OFF if _GONE.search(said) else f"the driver can't open it: {said or 'it does not say why'}"
            found.append(
                LostCard(
                    reason=reason,
                    index=int(index) if index else None,
                    pci=short_pci(address) if address else None,
                )
            )
    return tuple(found)


def _read_card(
    facts: dict[str, str], holders: tuple[Holder, ...] | None, parts: dict[str, tuple[MigInstance, ...]]
) -> Card:
    total, used = _read_number(facts["memory.total"]), _read_number(facts["memory.used"])
    reserved = _read_number(facts.get("memory.reserved", ""))
    gone = next((value for value in facts.values() if _GONE.search(value)), None)
    if gone is None and total is None and not _UNTOLD.search(facts["memory.total"]):
        gone = f"the driver says of its memory: {printable(facts['memory.total'])[:_LONGEST]}"
    errors = _read_number(facts.get("ecc.errors.uncorrected.volatile.total", ""))
    index = _read_number(facts["index"])
    return Card(
        uuid=facts["uuid"],
        index=0 if index is None else int(index),
        name=facts["name"] if _is_told(facts["name"]) else "NVIDIA GPU",
        pci=short_pci(facts["pci.bus_id"]),
        memory_bytes=None if total is None else round(total * MIB),
        used_bytes=None if used is None else round(used * MIB),
        # Releases that tell what the driver keeps for itself don't count it as used.
        reserve_apart=reserved is not None,
        temperature_c=_read_number(facts.get("temperature.gpu", "")),
        utilization_percent=_read_number(facts.get("utilization.gpu", "")),
        ecc_errors=None if errors is None else int(errors),
        mig=parts.get(facts["uuid"], ()) if facts.get("mig.mode.current") == "Enabled" else None,
        holders=holders,
        broken=FELL_OFF if gone is not None and "lost" in gone.lower() else gone and gone.strip("[]"),
    )


def _is_told(value: str) -> bool:
    return bool(value) and not value.startswith("[") and not _UNTOLD.search(value)


def _read_number(value: str) -> float | None:
    """None for ``[N/A]``, ``ERR!`` and all else that is none."""
    return float(value) if re.fullmatch(r"\d+(\.\d+)?", value) else None
