"""GPUs of a node that several jobs share: taking free ones, and what a cgroup hides."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import time
from collections.abc import Mapping, Sequence

from hpcdask.errors import DeviceError
from hpcdask.logs import plural
from hpcdask.security import private

from .devices import Gpu

#: Seconds that an earlier job gets to let go of its GPU.
LOCK_DEADLINE_S = 10.0
#: Set by SLURM where jobs may share a GPU: by shards, or NVIDIA's MPS.
SHARED_ON_PURPOSE = ("SLURM_SHARDS_ON_NODE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")


class _Taken(Exception):
    """Another process holds the GPU; the text says which."""


def lock_gpus(gpus: Sequence[Gpu], count: int, owner: str, folder: str | None = None) -> list[Gpu]:
    """Take `count` GPUs that no other job of this user on this node holds, for an owner to name.

    A GPU is held by a lock on a file of its UUID, until this process ends, however it does. If too
    few are free for `LOCK_DEADLINE_S`, that is a DeviceError.
    """
    deadline = time.monotonic() + LOCK_DEADLINE_S
    if folder is None:
        try:
            folder = private.node_folder("gpus")
        except OSError as error:
            raise DeviceError(
                f"GPUs cannot be locked on {socket.gethostname()}: {error.filename} "
                f"{error.strerror}. See that you can write there"
            ) from None
    while True:
        held: dict[str, int] = {}
        others: list[str] = []
        for gpu in gpus:
            if len(held) < count:
                try:
                    held[gpu.uuid] = _lock(gpu, owner, folder)
                except _Taken as error:
                    others.append(str(error))
        if len(held) == count:
            return [gpu for gpu in gpus if gpu.uuid in held]
        for file in held.values():  # all or none, so that two jobs cannot wait for each other
            os.close(file)
        if time.monotonic() > deadline:
            raise DeviceError(
                f"{socket.gethostname()} shows this job {plural(len(gpus), 'GPU')} "
                f"and it needs {count}, but {len(others)} of them "
                f"{'is' if len(others) == 1 else 'are'} in use: {'; '.join(others)}. "
                f"Have the queue give each job GPUs of its own"
            )
        time.sleep(random.uniform(0.1, 0.3))


def _lock(gpu: Gpu, owner: str, folder: str) -> int:
    """Lock the file of a GPU, and return its descriptor. The file itself stays for the next."""
    path = os.path.join(folder, f"hpcdask-{os.getuid()}-{gpu.uuid.replace('/', '-')}.lock")
    file = -1
    try:
        file = private.open_lock(path)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = f"{gpu.uuid} cannot be locked, {path}: {error.strerror}"
        if file >= 0:
            if isinstance(error, BlockingIOError):
                other = os.pread(file, 200, 0).decode(errors="replace") or "another process"
                why = f"{gpu.uuid} by {other}"
            os.close(file)
        raise _Taken(why) from None
    with contextlib.suppress(OSError):  # a full disk; the lock holds without words
        os.ftruncate(file, 0)
        os.pwrite(file, owner.encode(), 0)
    return file


def shared_on_purpose(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the queue gave this job a part of a GPU, which others may use too."""
    environ = os.environ if environ is None else environ
    return any(name in environ for name in SHARED_ON_PURPOSE)
