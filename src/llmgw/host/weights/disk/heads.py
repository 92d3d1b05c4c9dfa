"""Whether weights that lie somewhere can be what they should be, by the beginnings of their files: a look of some
milliseconds, which finds what an engine would end by."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

from llmgw.core.headers import HEAD_BYTES, Header, Judged, check_parts, judge_header, list_parts_of
from llmgw.core.weights import Manifest
from llmgw.host.weights.disk.beneath import Folder

# What is read of a file at first: most headers are shorter, but for a vocabulary.
FIRST_BYTES = 256 * 1024


def judge_open(file: int, name: str) -> Judged:
    """What the beginning of an open file says, of which no more is read than that takes. Raises OSError."""
    size = os.fstat(file).st_size
    head = os.pread(file, min(size, FIRST_BYTES), 0)
    judged = judge_header(name, head, size)
    while judged.wrong is None and len(head) < min(judged.needs, HEAD_BYTES, size):
        wanted = min(max(judged.needs, 4 * len(head)), HEAD_BYTES, size) - len(head)
        if not (more := os.pread(file, wanted, len(head))):
            return Judged(wrong="became shorter while it was read")
        head += more
        judged = judge_header(name, head, size)
    return judged


def compare_parts(headers: Mapping[str, Header | None]) -> str | None:
    """What is wrong with those of these files that are parts of one model, as words that begin with a file's name."""
    for group in {list_parts_of(name, header) for name, header in headers.items()}:
        known = {name: header for name in group if (header := headers.get(name)) is not None}
        if len(known) == len(group) > 1 and (wrong := check_parts(known)) is not None:
            return wrong
    return None


def find_bad_head(folder: Folder, manifest: Manifest) -> str | None:
    """The first file of a commit that can't be what its name says, with why; None where nothing speaks against any.
    Raises OSError."""
    headers: dict[str, Header | None] = {}
    for each in manifest.files:
        file = folder.open(each.name, os.O_RDONLY)
        try:
            judged = judge_open(file, each.name)
        except OSError as error:
            if error.errno == errno.EIO:
                return f"{each.name} can't be read: {error.strerror}"
            error.filename = str(folder.path / each.name)
            raise
        finally:
            os.close(file)
        if judged.wrong is not None:
            return f"{each.name} {judged.wrong}"
        headers[each.name] = judged.header
    return compare_parts(headers)
