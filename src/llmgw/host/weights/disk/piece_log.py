"""The list of pieces that have been written, beside their files: a line for each, added as it comes.

A line is no proof: what it says is compared with the bytes on the disk before it counts. So it is never synced, and a
torn or nonsensical one costs one piece.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from llmgw.host.weights.disk.beneath import Folder
from llmgw.host.weights.disk.file_names import PIECES_NAME

_LINE = re.compile(rb"(\d{1,9}) (\d{1,9}) ([0-9a-f]{64}|-)")
_FORGOTTEN = "-"
_MOST_BYTES = 256 * 1024 * 1024


class PieceLog:
    """The list of one folder. Everything here blocks and raises OSError; one thread at a time."""

    __slots__ = ("_file", "_torn")

    def __init__(self, folder: Folder) -> None:
        self._file = folder.open(PIECES_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._torn = False

    def read(self) -> dict[tuple[int, int], str]:
        """The BLAKE3 of each piece, by file and piece, in the order in which they came."""
        text = _read_all(self._file)
        self._torn = bool(text) and not text.endswith(b"\n")
        found: dict[tuple[int, int], str] = {}
        for line in text.split(b"\n"):
            if (match := _LINE.fullmatch(line)) is None:
                continue
            piece = int(match[1]), int(match[2])
            found.pop(piece, None)
            if (digest := match[3].decode()) != _FORGOTTEN:
                found[piece] = digest
        return found

    def add(self, file: int, piece: int, digest: str) -> None:
        """This piece is written."""
        self._append(f"{file} {piece} {digest}\n")

    def forget(self, pieces: Iterable[tuple[int, int]]) -> None:
        """These count no more."""
        if text := "".join(f"{file} {piece} {_FORGOTTEN}\n" for file, piece in pieces):
            self._append(text)

    def close(self) -> None:
        """A second time does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, text: str) -> None:
        # On a full disk half a line may have come here, and would spoil the next one.
        left = memoryview((b"\n" if self._torn else b"") + text.encode())
        self._torn = True
        while left:
            left = left[os.write(self._file, left) :]
        self._torn = False


def write_all(folder: Folder, pieces: Iterable[tuple[int, int, str]]) -> None:
    """Have the list of a folder name just these: file, piece and BLAKE3. Raises OSError."""
    folder.write(PIECES_NAME, "".join(f"{file} {piece} {digest}\n" for file, piece, digest in pieces).encode())


def _read_all(file: int) -> bytes:
    found = bytearray()
    while len(found) < _MOST_BYTES and (part := os.pread(file, 1024 * 1024, len(found))):
        found += part
    return bytes(found)
