"""Warm up CUDA libraries during start-up, so that the first Dask task does not pay for them.

On an H100, the first use of twenty usual operations of CuPy takes 0.9 s with a filled kernel cache
and 4 s with an empty one.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator


class FirstUse:
    """A thread that uses libraries and kernels of the device once, and ends with a Dask task."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="first-use", daemon=True)

    @property
    def is_over(self) -> bool:
        """Return whether the thread has ended, and CUDA's libraries have their memory back."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def start(self) -> None:
        """Begin, unless it was stopped already."""
        if not self._stopped.is_set():
            self._thread.start()

    def stop(self) -> None:
        """Do nothing more after the step under way."""
        self._stopped.set()

    def _run(self) -> None:
        # A Dask task that needs what is missing or fails here says so
        with contextlib.suppress(Exception):
            for _ in _steps():
                if self._stopped.is_set():
                    return


def _steps() -> Iterator[None]:
    """Use one thing after the other, the most likely first. Between two steps the thread may end.

    Handles of cuBLAS and cuSOLVER, with some 160 MB, belong to the thread and go with it.
    """
    import cupy

    # results are sent by it; numba comes with it, and takes half a second to load
    importlib.import_module("distributed.protocol.cupy")
    yield
    random = cupy.random.RandomState(1)
    for dtype in ("f8", "f4"):
        x = random.random_sample((64, 64), dtype)
        yield
        y = (x + 1)[::2, ::2]
        yield
        y.sum(axis=(0, 1), keepdims=True)
        yield
        x + x.T
        yield
        cupy.concatenate([x, x])
        yield
        (x @ x).mean()
        yield
        random.normal(0, 1, (8, 8)).astype(dtype)
        yield
        cupy.linalg.qr(x)
        yield
        cupy.linalg.svd(x)
        yield
        cupy.fft.fft(x, axis=0)
        yield
    random.randint(0, 9, (8, 8), "u1").astype("f4")
