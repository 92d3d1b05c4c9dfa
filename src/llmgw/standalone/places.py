"""Which state folder is this program's own, and what an earlier one left behind in another."""

from __future__ import annotations

import logging
from pathlib import Path

from llmgw.errors import UsageError
from llmgw.host.process import find_marked
from llmgw.host.state import StateFolder, hold_state

log = logging.getLogger(__name__)

MAX_ANY = 100


def own_folder(state: Path, port: int) -> Path:
    """A folder per port, so that two programs on one machine do not take over each other's engines.

    Whoever takes any port takes the first folder that nobody works with: the engines of one that was killed are there.
    """
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"the state folder {state} can't be made: {error.strerror}; give another (state)") from error
    if port:
        return state / f"serve-{port}"
    for number in range(1, MAX_ANY):
        folder = state / f"serve-any-{number}"
        if is_free(folder):
            return folder
    raise UsageError(f"{MAX_ANY - 1} llmgw run on any free port already: give this one a port, or another state folder")


def is_free(folder: Path) -> bool:
    """Nobody works with this folder now. A folder that can't be used is left to whoever takes it, to say why."""
    if not (folder / "lock").exists():
        return True
    try:
        with hold_state(folder):
            return True
    except UsageError:
        return False


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
