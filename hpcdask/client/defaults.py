"""Dask's defaults where arrays are on GPUs.

On an H100, ``(x + 1)[::2, ::2].sum()`` of 29 GB of random normals with ``chunks="auto"`` takes
1.70 s with Dask's chunks of 128 MiB, 0.54 s with 512 MiB and 0.36 s with 1 GiB. Larger chunks are
fewer for each worker, and a Dask task needs more device memory.

Dask chooses P2P for large rechunks, which fails with CuPy arrays (distributed 2026.7.1).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import dask.config

#: Dask's key of the preloads of clients, and ours.
PRELOADS, PRELOAD = "distributed.client.preload", "hpcdask.client.preload"
ON_DEVICE = {"array.chunk-size": "512MiB", "array.rechunk.method": "tasks"}

_users = 0
_suited: set[str] = set()


def suit_devices() -> None:
    """Set defaults that suit GPUs, unless the user has configured others."""
    for name, value in _unless_configured().items():
        if dask.config.get(name, None) == _default(name):
            dask.config.set({name: value})
            _suited.add(name)


def for_devices() -> dict[str, str]:
    """Return `suit_devices` as variables for another process."""
    return {
        f"DASK_{name.replace('.', '__').replace('-', '_').upper()}": value
        for name, value in _unless_configured().items()
    }


def suit_hosts() -> None:
    """Undo `suit_devices`, except for what the user has set since."""
    while _suited:
        name = _suited.pop()
        if dask.config.get(name, None) == ON_DEVICE[name]:
            dask.config.set({name: _default(name)})


@contextlib.contextmanager
def suiting_devices() -> Iterator[None]:
    """Set defaults that suit GPUs until the last block of this kind ends."""
    global _users
    _users += 1
    suit_devices()
    try:
        yield
    finally:
        _users -= 1
        if not _users:
            suit_hosts()


def _unless_configured() -> dict[str, str]:
    theirs = dask.config.collect()
    return {k: v for k, v in ON_DEVICE.items() if dask.config.get(k, None, config=theirs) is None}


def _default(name: str) -> Any:
    """Return the value of a key that Dask and its packages have by default."""
    return dask.config.get(name, None, config=dask.config.merge(*dask.config.defaults))


def prompt_clients() -> dict[str, list[str]]:
    """Return the configuration that adds `PRELOAD` to the user's preloads, if it can."""
    preloads = dask.config.get(PRELOADS, None) or []
    names = [preloads] if isinstance(preloads, str) else preloads
    if PRELOAD in names or dask.config.get(f"{PRELOADS}-argv", None):
        return {}
    logging.getLogger("distributed.preloading").addFilter(_is_news)
    return {PRELOADS: [*names, PRELOAD]}


def _is_news(record: logging.LogRecord) -> bool:
    """Drop distributed's INFO lines about this preload; keep its errors."""
    return record.levelno > logging.INFO or PRELOAD not in record.getMessage()
