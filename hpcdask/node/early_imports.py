"""What the scheduler and the workers load while the program imports it: Dask's collections.

They need it for the first graph, which waited for their imports: 1.2 s for an array on CPU
workers. A scheduler or worker that is a copy of the program would have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from hpcdask.gpu.first_use import IMPORT
from hpcdask.upstream import distributed
from hpcdask.upstream.cupy import import_cupy

MODULES = frozenset({"dask.array", "dask.dataframe"})
#: Where the program tells its rank, in the rank's folder, and by what kind of socket.
SOCKET, KIND = "imports", (socket.AF_UNIX, socket.SOCK_DGRAM)
#: Seconds that graphs and Dask tasks wait. What hangs then holds up the event loop, as without
#: this, and distributed notices that.
DEADLINE_S = 120.0


class _Watch(MetaPathFinder):
    """Finds no module, and tells the rank when it is asked for one of these."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._told: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """See `MetaPathFinder`."""
        if name in MODULES and name not in self._told:
            self._told.add(name)
            # whatever happens here, the program's import goes on
            with contextlib.suppress(Exception), socket.socket(*KIND) as sock:
                sock.setblocking(False)
                sock.sendto(name.encode(), os.path.join(self._folder, SOCKET))


def watch(folder: str) -> None:
    """In the program: tell the rank, whose folder this is, what is imported.

    No socket is open meanwhile: the program sees what it sees under plain Python.
    """
    sys.meta_path.insert(0, _Watch(folder))


def listen(folder: str, call: Callable[[str], None]) -> None:
    """In the program's rank: call this with each of `MODULES` that the program begins to import.

    It is never called if the path is too long for a socket.
    """
    sock = socket.socket(*KIND)
    sock.setblocking(False)

    def heard() -> None:
        with contextlib.suppress(OSError):
            call(sock.recv(64).decode(errors="replace"))

    try:
        sock.bind(os.path.join(folder, SOCKET))
    except OSError:
        sock.close()
    else:
        asyncio.get_running_loop().add_reader(sock, heard)


class EarlyImports:
    """The scheduler's side: it imports, and has its workers on the CPU do so.

    Threads that import a package and one of its modules at the same time can both fail: they take
    what they wait for as imported. So neither graphs nor Dask tasks are unpickled meanwhile.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._importing = asyncio.Lock()
        distributed.before_graphs(scheduler, self._wait)

    async def _wait(self) -> None:
        async with self._importing:
            pass

    async def load(self, module: str) -> None:
        """Load one of `MODULES` here and in the workers."""
        if module not in MODULES:
            return
        for address, worker in self._scheduler.workers.items():
            if IMPORT in worker.extra:
                self._scheduler.worker_send(address, {"op": IMPORT, "modules": [module]})
        async with self._importing:
            await load(module)


async def load(*modules: str) -> None:
    """Load them in a thread; what fails here will say so when it is needed."""

    def run() -> None:
        with contextlib.suppress(Exception):
            import_cupy()  # first, as everywhere
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.to_thread(run)
