"""Environments of a rank's processes: its workers', its program's, and its own."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import stat
import sys
import time
from collections.abc import Mapping

from hpcdask.process import MARKER, STARTED

_BEGAN = time.time()
#: Variables that distributed sets before it spawns a worker (``nanny.pre-spawn-environ``), and its
#: hash seed. Python and libc read them at their start, so the fork server has them. The pad is of
#: hpcdask: the threshold alone makes libc return memory for each message.
PRE_SPAWN = {
    "PYTHONHASHSEED": "6640",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "1048576",
    "SPT_NOENV": "1",  # setproctitle would write over the environment in /proc
}
#: Variables that make a process a rank of its launcher. Program and workers are none: MPI, which
#: libraries may start in them, would wait for all ranks.
OF_A_RANK = re.compile(
    r"PMIX?_|PRTE_|OMPI_(COMM_WORLD|UNIVERSE|APP|FILE|FIRST|NUM|ARGV|COMMAND|MCA_(ess|pmix))"
    r"|MPI_LOCAL|HYDI_|PALS_|MV2_COMM|FLUX_TASK|JSM_NAMESPACE|HPCDASK_RANK"
)
#: Set for the fork server only, whose preload removes it again.
SAFE_PATH = "PYTHONSAFEPATH"


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that do not make a process one of the launcher's ranks."""
    return {name: value for name, value in environ.items() if not OF_A_RANK.match(name)}


def for_workers(environ: Mapping[str, str], marker: str) -> dict[str, str]:
    """Return the environment of the fork server; variables that the user set stay."""
    return {**PRE_SPAWN, **without_rank(environ), MARKER: marker, STARTED: repr(_BEGAN)}


def own_process() -> int:
    """Return the id of the process that the launcher started, of which this one is a descendant."""
    return int(os.environ[MARKER].rpartition(".")[2])


def interpreter() -> list[str]:
    """Return this Python as a command that imports nothing from the current folder (/tmp)."""
    found = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    only_there = found not in sys.path[1:] and os.path.samefile(found, ".")  # not installed
    return [sys.executable] if only_there else [sys.executable, "-P"]


def wants_folders() -> bool:
    """Return whether the user lets Python import modules from beside programs."""
    return not (os.environ.get(SAFE_PATH) or sys.flags.isolated)


def add_working_folder() -> str:
    """Append the current folder to the module path; return `open_folder_warning`."""
    warning = ""
    with contextlib.suppress(OSError):  # the folder is gone
        warning = open_folder_warning()
        if wants_folders() and not warning and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    return warning


def open_folder_warning() -> str:
    """Return a warning if workers import nothing from the current folder, since all may write."""
    folder = os.getcwd()
    mode = os.stat(folder).st_mode
    named = folder in os.environ.get("PYTHONPATH", "").split(":")
    if named or not wants_folders() or not mode & stat.S_IWOTH:
        return ""
    return (
        f"warning: workers import no modules from {folder}, where every user may put some (mode "
        f"{stat.S_IMODE(mode):o}): chmod o-w {shlex.quote(folder)}, or name it in PYTHONPATH"
    )


def start_process() -> None:
    """Prepare the process that a launcher or a queue started, before heavy imports.

    It imports nothing from the current folder: another user may have put modules there (/tmp).
    """
    if not sys.flags.safe_path and len(interpreter()) > 1 and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a daemon may ignore its children
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback until there are handlers
