"""Undocumented parts of dask-cuda's store of device, host and disk, as in 26.10, and of zict's."""

from __future__ import annotations

from typing import Any

from .parts import require

SEEN = "dask-cuda 26.10"


def on_device(store: Any) -> Any:
    """Results that are on the device, a buffer of zict's; None where the store is another."""
    fast = getattr(getattr(store, "device_buffer", None), "fast", None)
    if fast is not None:
        require(SEEN, fast, "total_weight", "evict_until_below_target")
    return fast
