"""Dask's defaults where arrays are on GPUs.

On an H100, ``(x + 1)[::2, ::2].sum()`` of 29 GB of random normals with ``chunks="auto"`` takes
1.70 s with Dask's chunks of 128 MiB, 0.54 s with 512 MiB and 0.36 s with 1 GiB. Larger chunks are
fewer for each worker, and a Dask task needs more device memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import dask.config

NAME, ON_DEVICE = "array.chunk-size", "512MiB"

_users = 0


def suit_devices() -> None:
    """Have ``chunks="auto"`` suit GPUs, unless the user's configuration says how large they are."""
    theirs = dask.config.get(NAME, None, config=dask.config.collect())
    if theirs is None and dask.config.get(NAME) == _of_dask():
        dask.config.set({NAME: ON_DEVICE})


def suit_hosts() -> None:
    """Undo `suit_devices`, unless the user has set another size since."""
    if dask.config.get(NAME) == ON_DEVICE:
        dask.config.set({NAME: _of_dask()})


@contextlib.contextmanager
def suiting_devices() -> Iterator[None]:
    """Suit GPUs until the last of those who asked for it is done."""
    global _users
    _users += 1
    suit_devices()
    try:
        yield
    finally:
        _users -= 1
        if not _users:
            suit_hosts()


def _of_dask() -> Any:
    return dask.config.get(NAME, config=dask.config.merge(*dask.config.defaults))
