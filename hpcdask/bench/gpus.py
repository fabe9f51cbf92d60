"""Usage of the GPUs during a workload, from the scheduler's monitor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import distributed

from hpcdask.gpu.monitor import monitor_of


@contextlib.contextmanager
def watched(client: distributed.Client) -> Iterator[dict[str, Any]]:
    """Sum up what the GPUs do while the block runs.

    The yielded dict is filled when the block ends, with the fields of
    `hpcdask.gpu.usage.RunUsage`. It stays empty without GPUs.
    """
    found: dict[str, Any] = {}
    client.run_on_scheduler(_start)
    yield found
    found.update(client.run_on_scheduler(_stop))


async def _start(dask_scheduler: Any) -> None:
    if (monitor := monitor_of(dask_scheduler)) is not None:
        await monitor.start_lap()


async def _stop(dask_scheduler: Any) -> dict[str, Any]:
    monitor = monitor_of(dask_scheduler)
    usage = None if monitor is None else await monitor.lap()
    return {} if usage is None else usage.to_json()
