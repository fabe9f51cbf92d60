"""All-reduce over NCCL by CuPy, one GPU for each process.

CuPy loads the library of NVIDIA's wheel, the one that torch brings, so a second way through torch
would reach no further.
"""

from __future__ import annotations

import warnings
from typing import Any

#: All-reduces that are not timed: the first ones connect the GPUs.
WARM_UPS = 3


def missing() -> str:
    """Return why this process cannot use NCCL; empty if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's has ten lines, this module's one
            from cupy.cuda import nccl
    except ImportError as error:
        return f"CuPy, which calls it, cannot be imported ({error})"
    return "" if nccl.available else "libnccl.so.2 cannot be loaded"


def version() -> str:
    """Return the version of the library, such as ``2.28.9``."""
    from cupy.cuda import nccl

    number = nccl.get_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def unique_id() -> bytes:
    """Return the id by which ranks find each other at this process, which has to live on."""
    from cupy.cuda import nccl

    return bytes(nccl.get_unique_id())


def join(rank: int, size: int, unique_id: bytes) -> Any:
    """Wait for all ranks, and return the communicator of this process."""
    from cupy.cuda import nccl

    return nccl.NcclCommunicator(size, unique_id, rank)


def all_reduce(communicator: Any, nbytes: int, repeats: int) -> tuple[float, bool]:
    """Sum float32 arrays of `nbytes`; return the seconds of one all-reduce, and if it was right."""
    import cupy
    from cupy.cuda import nccl

    size, stream = communicator.size(), cupy.cuda.get_current_stream()
    source = cupy.full(nbytes // 4, communicator.rank_id() + 1, dtype=cupy.float32)
    result = cupy.zeros_like(source)

    def run(times: int) -> None:
        for _ in range(times):
            communicator.allReduce(
                source.data.ptr,
                result.data.ptr,
                source.size,
                nccl.NCCL_FLOAT32,
                nccl.NCCL_SUM,
                stream.ptr,
            )

    run(WARM_UPS)
    stream.synchronize()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    run(repeats)
    end.record(stream)
    end.synchronize()
    seconds = cupy.cuda.get_elapsed_time(start, end) / 1e3 / repeats
    return float(seconds), bool((result == size * (size + 1) // 2).all())


def bus_bandwidth(nbytes: int, seconds: float, size: int) -> float:
    """Return the bytes per second of each link, as nccl-tests define it for an all-reduce."""
    return nbytes / seconds * 2 * (size - 1) / size
