"""Warm up CUDA libraries during start-up, so that the first Dask task does not pay for them.

On an H100, the first use of twenty usual operations of CuPy takes 0.9 s with a filled kernel cache
and 4 s with an empty one.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: What is used once for each type of float, of a matrix x and a random state.
USES: tuple[Callable[[Any, Any, Any], Any], ...] = (
    lambda cupy, random, x: (x + 1)[::2, ::2].sum(axis=(0, 1), keepdims=True),
    lambda cupy, random, x: x + x.T,
    lambda cupy, random, x: cupy.concatenate([x, x]),
    lambda cupy, random, x: (x @ x).mean(),
    lambda cupy, random, x: random.normal(0, 1, (8, 8)).astype(x.dtype),
    lambda cupy, random, x: cupy.linalg.qr(x),
    lambda cupy, random, x: cupy.linalg.svd(x),
    lambda cupy, random, x: cupy.fft.fft(x, axis=0),
    lambda cupy, random, x: random.randint(0, 9, (8, 8), "u1").astype("f4"),
)


class FirstUse:
    """Thread that uses libraries and kernels of the device once, and ends with a Dask task.

    Handles of cuBLAS and cuSOLVER, with some 160 MB, belong to the thread and go with it.
    """

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
    """Use one thing after the other. Between two steps the thread may end."""
    import cupy

    # results are sent by it; numba comes with it, and takes half a second to load
    importlib.import_module("distributed.protocol.cupy")
    random = cupy.random.RandomState(1)
    for dtype in ("f8", "f4"):
        x = random.random_sample((64, 64), dtype)
        for use in USES:
            yield
            use(cupy, random, x)
