"""A worker's process, made ready while its rank still imports, and before the ranks have met.

The driver makes the contexts of a node one after another, 0.2 to 0.3 s each, and the worker's
imports take as long as the rank's. So both begin at once, on the GPU that the worker will probably
get. Once it is decided, the process becomes the worker, or it is ended and another is forked from
the template.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
from collections.abc import Callable

from hpcdask.bootstrap import ranks
from hpcdask.comm import ucx_hooks
from hpcdask.gpu.context import CONTEXT_MADE, make_context, start_cuda
from hpcdask.process import detach_standard_streams, mark

from . import forkserver
from .gpu_probe import EarlyOptions, has_peers

#: What a worker imports besides, where it is installed.
PACKAGES = (*forkserver.PRELOAD, "dask_cuda.device_host_file", "rmm.allocators.cupy")


def prestart(
    look: Callable[[], str | None],
    line: socket.socket,
    early: EarlyOptions,
    foreseen: str | None = None,
) -> None:
    """Make this process ready to be a worker. Returns if it cannot be one.

    ``look`` finds the UUID of the GPU, or None if it is not clear which: probably the ``foreseen``
    one or none. The rank gives the order on ``line``, see `hpcdask.node.forkserver.adopt`.
    """
    detach_standard_streams(output=False)
    if not early.tcp and (not early.in_run or has_peers(ranks.detect())):  # a job's are in others
        ucx_hooks.install()  # before there is another thread; UCX takes a signal for itself
    forkserver.leave_signals_to_the_rank()
    found: list[str] = []
    if foreseen is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = foreseen
    device = threading.Thread(target=_prepare_device, args=(look, foreseen, found), name="device")
    device.start()
    ready = False
    with contextlib.suppress(Exception):  # the rank imports the same, and says what is wrong
        _prepare_imports()
        ready = True
    device.join()
    if ready and found:
        forkserver.wait_for_worker(line)


def _prepare_imports() -> None:
    importlib.import_module("hpcdask.node.nanny")  # all that a worker needs
    from hpcdask.comm.peers import load
    from hpcdask.logs import set_log_level

    mark("distributed imported")
    load(PACKAGES)
    forkserver.prepare_forks()
    set_log_level()


def _prepare_device(look: Callable[[], str | None], foreseen: str | None, found: list[str]) -> None:
    """In a thread: find the device, and make its context, at the same time where that can be."""
    if foreseen is not None:
        looking = threading.Thread(target=_note, args=(look, found), name="look")
        looking.start()
        start_cuda()
        mark("CUDA started")
        _make_context()
        looking.join()
    elif _note(look, found):
        os.environ["CUDA_VISIBLE_DEVICES"] = found[0]
        _make_context()


def _note(look: Callable[[], str | None], found: list[str]) -> bool:
    if uuid := look():
        found.append(uuid)
    return bool(found)


def _make_context() -> None:
    with contextlib.suppress(Exception):  # the worker tries again, and says what is wrong
        make_context()
        mark(CONTEXT_MADE)
