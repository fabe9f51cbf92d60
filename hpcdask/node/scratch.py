"""Folders on a node's own disk, for what is spilled: made for a process, and removed after it."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import tempfile
from collections.abc import Callable

import dask.config

from hpcdask.errors import UsageError
from hpcdask.process import owner_lives, owner_text
from hpcdask.security import private
from hpcdask.upstream.configuration import source_of

#: The key of Dask's configuration with the usual folder.
KEY = "temporary-directory"


def base_folder(local_directory: str | None = None) -> str:
    """Return the folder of this node's scratch folders; raise UsageError for unset variables."""
    base = local_directory or dask.config.get(KEY) or tempfile.gettempdir()
    # variables of this node, not of who submits; the program may go to another folder
    base = os.path.abspath(os.path.expanduser(os.path.expandvars(base)))
    if unset := re.search(r"\$\w+|\$\{\w+\}", base):
        raise UsageError(
            f"{_source(local_directory)}: {unset[0]} is not set on {socket.gethostname()}, in "
            f"{base}. Name a folder on the node's own disk, or a variable that jobs have"
        )
    return base


def configured_source() -> str:
    """Return where the usual folder is configured; empty where it is not."""
    return f"{KEY} of {source_of(KEY)}" if dask.config.get(KEY) else ""


def _source(local_directory: str | None) -> str:
    return "--local-directory" if local_directory else configured_source() or "TMPDIR"


def scratch_folder(
    local_directory: str | None, announce: Callable[[str], None], owner: str | None = None
) -> str:
    """Make a private folder that goes with its ``owner``; ``announce`` its path before."""
    base = base_folder(local_directory)
    try:
        private.make_folders(base)
        private.refuse_open(base)
        remove_stale(base)
        return private.make_owned_folder(base, owner or owner_text(), announce)
    except OSError as error:
        raise UsageError(
            f"{_source(local_directory)}: cannot write in {base}: {error.strerror}. Name a folder "
            f"on the node's own disk that you can write"
        ) from None


def remove_stale(base: str) -> None:
    """Remove what ranks of this host left that died with their janitor (`scancel JOB.STEP`)."""
    for folder in glob.glob(os.path.join(glob.escape(base), f"hpcdask-{os.getuid()}-*")):
        with contextlib.suppress(OSError, ValueError):
            owner = private.read(os.path.join(folder, private.OWNER))
            if owner_lives(owner) is False:
                private.remove(folder, owner)
