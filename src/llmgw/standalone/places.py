"""Which state folder is this program's own, and what an earlier one left behind in another."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from llmgw.errors import UsageError
from llmgw.host.process import find_marked
from llmgw.host.state import StateFolder, StateTaken, hold_state

log = logging.getLogger(__name__)

MAX_ANY = 100


@contextmanager
def hold_own_folder(state: Path, port: int) -> Iterator[Path]:
    """A folder per port, so that two programs on one machine do not take over each other's engines; held from the
    choice on, or two that start at once would choose the same.

    Whoever takes any port takes the first folder that nobody works with: the engines of one that was killed are there.
    """
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"the state folder {state} can't be made: {error.strerror}; give another (state)") from error
    with ExitStack() as held:
        if port:
            folder = state / f"serve-{port}"
            held.enter_context(hold_state(folder))
        else:
            folder = _hold_first_free(state, held)
        yield folder


def _hold_first_free(state: Path, held: ExitStack) -> Path:
    for number in range(1, MAX_ANY):
        folder = state / f"serve-any-{number}"
        with suppress(StateTaken):
            held.enter_context(hold_state(folder))
            return folder
    raise UsageError(f"{MAX_ANY - 1} llmgw run on any free port already: give this one a port, or another state folder")


def is_free(folder: Path) -> bool:
    """Nobody works with this folder now. Nor can anybody with one that can't be used."""
    try:
        with hold_state(folder):
            return True
    except StateTaken:
        return False
    except UsageError:
        return True


def warn_of_leftovers(own: Path) -> None:
    """Name the engines of programs that were killed and not started again: each holds its memory for ever."""
    try:
        folders = [folder for folder in own.parent.glob("serve-*") if folder != own and folder.is_dir()]
    except OSError:
        folders = []
    for folder in sorted(folders):
        left = find_marked(StateFolder(folder).marker_prefix())
        if left and is_free(folder):
            pids = " ".join(str(pid) for pid in sorted(stat.pid for stat in left))
            port = folder.name.removeprefix("serve-").partition("-")[0]
            again = f"with --port {0 if port == 'any' else port}"
            log.warning("engines of an llmgw that is gone run on: start it again %s, or end them: kill %s", again, pids)
