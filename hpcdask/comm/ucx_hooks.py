"""UCX's hooks into memory functions, installed while nobody can be in one of them.

UCX writes a jump over the first bytes of `mmap` and its like when it is loaded, and over those of
CUDA's when it starts, so as to hear of memory that is freed. A thread that is just there would run
half of an instruction. So UCX waits for 50 ms at each of 23 functions, with Python's lock held: a
worker does nothing else for 1.15 s, and a thread that is held up for longer crashes all the same.
In a process of one thread there is nobody to wait for.

See ``UCX_MEM_BISTRO_GRACE_DURATION`` in ``ucx_info -cf``, and ``ucm/api/ucm.h``.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Mapping

#: How long UCX waits at each function.
GRACE = "UCX_MEM_BISTRO_GRACE_DURATION"
#: What UCX reads once, and each process is to have a file of its own by.
PER_PROCESS = {"UCX_LOG_FILE", "UCX_PROFILE_MODE", "UCX_STATS_DEST"}
#: Events of device memory that is allocated and freed, in ``ucm.h``.
DEVICE_EVENTS = 1 << 20 | 1 << 21
#: What NVIDIA's driver shows where NVLink also joins nodes.
NVLINK_BETWEEN_NODES = "/dev/nvidia-caps-imex-channels/*"


def install(configured: Mapping[str, object] | None = None) -> None:
    """Load UCX, if it is there as a package, and install its hooks.

    Call it where there is one thread; processes that are forked later have the hooks too. Where it
    cannot be done UCX does it itself, when it starts. The variables configured are those that the
    worker gets later, when UCX would not read them any more.
    """
    late = {name for name, value in (configured or {}).items() if os.environ.get(name) != value}
    own = PER_PROCESS & set(os.environ)
    one_thread = len(os.listdir("/proc/self/task")) == 1
    if own or any(name.startswith("UCX_") for name in late) or not one_thread:
        return
    chosen = GRACE in os.environ
    try:
        import libucx

        os.environ |= environment(os.environ)
        os.environ.setdefault(GRACE, "0")
        libucx.load_library()
        _install_for_device(ctypes.CDLL("libucm.so.0"))
    except (ImportError, OSError, AttributeError):
        pass
    finally:
        if not chosen:
            os.environ.pop(GRACE, None)


def _install_for_device(ucm: ctypes.CDLL) -> None:
    """Make UCX install its hooks into the CUDA driver, if there is one."""
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_ignore)
    if ucm.ucm_set_event_handler(DEVICE_EVENTS, 0, silent, None) == 0:
        ucm.ucm_unset_event_handler(DEVICE_EVENTS, silent, None)


def _ignore(event: int, details: int, argument: int) -> None:
    """Nobody is interested yet."""


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ucxx and UCX for a worker, where the user did not set them.

    Only ucxx's own mode is not for the user to choose: in the others a thread or an endless loop
    drives UCX beside `ucx.Progress`, and holds up Python.
    """
    wanted = {
        "UCX_LOG_FILE": "stderr",  # instead of stdout, which is the program's
        "UCXX_LOG_LEVEL": "fatal",  # a peer that closes is reported as an error
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    if not glob.glob(NVLINK_BETWEEN_NODES):
        wanted["UCX_CUDA_IPC_ENABLE_MNNVL"] = "n"  # 0.4 s of the first exchange
    given = {name: environ.get(name, value) for name, value in wanted.items()}
    return {**given, "UCXPY_PROGRESS_MODE": "blocking"}
