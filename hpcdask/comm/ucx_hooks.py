"""UCX's hooks into memory functions, installed while no other thread can be in one of them.

To hear of freed memory, UCX writes a jump over the first bytes of `mmap` and its like when it is
loaded, and over those of CUDA's when it starts. A thread that is just there would run half of an
instruction, so UCX waits for 50 ms at each of 23 functions, with Python's lock held: 1.15 s. In a
process of one thread there is nobody to wait for. See ``UCX_MEM_BISTRO_GRACE_DURATION`` in
``ucx_info -cf``, and ``ucm/api/ucm.h``.
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
    """Load UCX, if it is there as a package, and install its hooks, also for later forks.

    With several threads, or variables `configured` for workers that UCX would have read before, do
    nothing: UCX then installs them itself when it starts.
    """
    late = {name for name, value in (configured or {}).items() if os.environ.get(name) != value}
    unread = PER_PROCESS & set(os.environ) or any(name.startswith("UCX_") for name in late)
    if unread or len(os.listdir("/proc/self/task")) > 1:
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
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    silent = kind(lambda event, details, argument: None)
    if ucm.ucm_set_event_handler(DEVICE_EVENTS, 0, silent, None) == 0:
        ucm.ucm_unset_event_handler(DEVICE_EVENTS, silent, None)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ucxx and UCX for a worker; the user's own stay.

    ucxx's mode is not the user's: another one drives UCX beside `ucx.Progress`.
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
