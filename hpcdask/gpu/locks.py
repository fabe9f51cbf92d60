"""Locks of GPUs on a node that several jobs of a user share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import time
from collections.abc import Sequence

from hpcdask.errors import DeviceError
from hpcdask.logs import plural
from hpcdask.security import private

from .devices import Gpu

#: Seconds that an earlier job gets to end and free its GPU.
LOCK_DEADLINE_S = 10.0
#: Set by SLURM where jobs may share a GPU: by shards, or NVIDIA's MPS.
SHARED_ON_PURPOSE = ("SLURM_SHARDS_ON_NODE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")


def lock_gpus(gpus: Sequence[Gpu], count: int, owner: str, folder: str | None = None) -> list[Gpu]:
    """Take `count` GPUs that no other job of this user on this node holds, and return them.

    A GPU is held by a lock on a file of its UUID until this process ends, however it ends; the file
    has the owner's name. Raises DeviceError if too few are free for `LOCK_DEADLINE_S`.
    """
    deadline = time.monotonic() + LOCK_DEADLINE_S
    try:
        folder = folder or private.node_folder("gpus")
    except OSError as error:
        raise DeviceError(
            f"GPUs cannot be locked on {socket.gethostname()}: {error.filename} "
            f"{error.strerror}. See that you can write there"
        ) from None
    while True:
        held: dict[Gpu, int] = {}
        others: list[str] = []
        for gpu in gpus:
            try:
                held[gpu] = _lock(gpu, owner, folder)
            except OSError as error:
                others.append(f"{gpu.uuid} {error}")
            if len(held) == count:
                return list(held)
        for file in held.values():  # all or none, so that two jobs cannot wait for each other
            os.close(file)
        if time.monotonic() > deadline:
            raise DeviceError(
                f"{socket.gethostname()} shows this job {plural(len(gpus), 'GPU')} "
                f"and it needs {count}, but in use are {'; '.join(others)}. "
                f"Have the queue give each job GPUs of its own"
            )
        time.sleep(random.uniform(0.1, 0.3))


def _lock(gpu: Gpu, owner: str, folder: str) -> int:
    """Lock the file of a GPU and return its descriptor. Raises OSError, which names a holder."""
    path = os.path.join(folder, f"hpcdask-{os.getuid()}-{gpu.uuid.replace('/', '-')}.lock")
    file = private.open_lock(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(file, 200, 0).decode(errors="replace")
        os.close(file)
        raise BlockingIOError(f"by {holder or 'another process'}") from None
    with contextlib.suppress(OSError):  # a full disk; the lock holds without words
        os.ftruncate(file, 0)
        os.pwrite(file, owner.encode(), 0)
    return file


def shared_on_purpose() -> bool:
    """Return whether the queue gave this job a part of a GPU, which others may use too."""
    return any(name in os.environ for name in SHARED_ON_PURPOSE)
