"""What the GPUs did during a workload, as the scheduler's monitor has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import distributed

from hpcdask.gpu.monitor import monitor_of

#: Points of a GPU's line: a picture does not show more.
MAX_POINTS = 300


@contextlib.contextmanager
def watched(client: distributed.Client, *, series: bool) -> Iterator[dict[str, Any]]:
    """Sum up what the GPUs do while the block runs; with `series` over time, too.

    The yielded dict is filled when the block ends: with ``usage``, the fields of
    `hpcdask.gpu.usage.RunUsage`, and ``line``, the same in words. ``series`` has for each GPU what
    `hpcdask.gpu.monitor.Moment` has, with seconds from the start. It stays empty without GPUs.
    """
    found: dict[str, Any] = {}
    began = client.run_on_scheduler(_start)
    yield found
    found.update(client.run_on_scheduler(_stop, began=began, series=series))


async def _start(dask_scheduler: Any) -> float:
    monitor = monitor_of(dask_scheduler)
    if monitor is not None:
        await monitor.start_lap()
    return float(distributed.metrics.time())


async def _stop(dask_scheduler: Any, began: float, series: bool) -> dict[str, Any]:
    monitor = monitor_of(dask_scheduler)
    usage = None if monitor is None else await monitor.lap()
    if monitor is None or usage is None:
        return {}
    found: dict[str, Any] = {"usage": usage.to_json(), "line": usage.line()}
    if series:
        found["series"] = {
            label: [{**one._asdict(), "time": round(one.time - began, 3)} for one in _some(moments)]
            for label, moments in monitor.past(began).items()
        }
    return found


def _some(moments: Sequence[Any]) -> Sequence[Any]:
    return moments[:: -(-len(moments) // MAX_POINTS) or 1]
