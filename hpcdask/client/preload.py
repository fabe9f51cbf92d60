"""Preload of clients: data go straight to workers, which find the program's modules.

distributed sends results and scattered data through the scheduler by default, and its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
from typing import Any

from dask.base import tokenize
from distributed import Client, WorkerPlugin

from hpcdask.errors import root_cause
from hpcdask.logs import say
from hpcdask.process import owner_text
from hpcdask.security.nearby import NearbyComm, NearbySecurity
from hpcdask.security.process_memory import take_arrays
from hpcdask.upstream.distributed import prepare_graphs, send_at_once

#: Seconds in which a worker has to answer, and between two looks for the first one.
ANSWER_S, LOOK_S = 3.0, 1.0


async def dask_setup(client: Client) -> None:
    """Suit a new client to a cluster of hpcdask; distributed calls this for any cluster's."""
    send_at_once(client.scheduler_comm)
    if isinstance(client.security, NearbySecurity):
        await share_path(client)
        share_changes(client)
        take_arrays()
        await go_direct(client)


async def share_path(client: Any) -> None:
    """Make scheduler and workers import from the folders in this program's ``sys.path``."""
    plugin = ModulePath()
    if plugin.folders:
        unknown, owner = await client.run_on_scheduler(plugin.extend)
        if unknown or owner == owner_text():  # in a run, workers know what the scheduler does
            await client.register_plugin(plugin)


def share_changes(client: Any) -> None:
    """Share the path again before a graph that follows a change of ``sys.path``."""
    shared = [*sys.path]

    async def share() -> None:
        shared[:] = sys.path
        with contextlib.suppress(OSError):  # a worker that hangs keeps no graph
            async with asyncio.timeout(ANSWER_S):
                await share_path(client)

    prepare_graphs(client, lambda: sys.path != shared, share)


class ModulePath(WorkerPlugin):
    """Folders of a program's modules, of which the first ones come before Python's own."""

    idempotent = True

    def __init__(self) -> None:
        own = (sys.prefix, sys.base_prefix)
        found = [os.path.abspath(folder) for folder in sys.path if folder]
        python = next((at for at, one in enumerate(found) if one.startswith(own)), len(found))
        self.folders = {
            folder: place < python
            for place, folder in enumerate(found)
            if not folder.startswith(own) and "site-packages" not in folder
        }
        self.name = f"hpcdask-path-{tokenize(self.folders)}"

    def setup(self, worker: Any) -> None:
        self.extend()

    def extend(self) -> tuple[list[str], str]:
        """Add those that this node has, unless all may write there; return them and the process."""
        new = [one for one in self.folders if one not in sys.path and os.path.exists(one)]
        new = [one for one in new if not os.stat(one).st_mode & stat.S_IWOTH]
        sys.path[:0] = [one for one in new if self.folders[one]]
        sys.path += [one for one in new if not self.folders[one]]
        return new, owner_text()


async def go_direct(client: Any) -> None:
    """Connect a client of a cluster of hpcdask to workers, unless the user configured it.

    On the scheduler's host it reaches those that the scheduler reaches. Elsewhere, such as behind
    an ssh tunnel, one worker is tried, once there is one.
    """
    if client.direct_to_workers is not None:
        return
    if isinstance(client.scheduler_comm.comm, NearbyComm):
        client.direct_to_workers = True
    elif await client.scheduler.ncores():
        await _try_worker(client)
    else:
        client.loop.add_callback(_try_worker, client)


async def _try_worker(client: Any) -> None:
    """Connect to the first worker, and use workers directly from now on if that succeeds."""
    while not (workers := await client.scheduler.ncores()):
        await asyncio.sleep(LOOK_S)
        if client.status not in ("connecting", "running"):
            return
    worker = next(iter(workers))
    try:
        client.rpc.reuse(worker, await client.rpc.connect(worker, timeout=ANSWER_S))
        client.direct_to_workers = True
    except OSError as error:
        say(
            f"results and scattered data go through the scheduler, which is slower: the worker at "
            f"{worker} cannot be reached from here ({root_cause(error)})"
        )
