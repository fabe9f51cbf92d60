"""A worker's GPU among its metrics, which distributed sends to the scheduler.

`hpcdask.gpu.monitor` has the scheduler's side.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .samples import Sampler

if TYPE_CHECKING:
    from distributed import Worker

#: The worker's metric, and the handler that reads the GPU now.
METRIC, READ = "hpcdask-gpu", "hpcdask-read-gpu"


class GpuReporter:
    """Reporter of a worker's GPU: of its UUID at once, of samples from `start` on."""

    def __init__(self, worker: Worker, uuid: str) -> None:
        self._uuid, self._sampler = uuid, Sampler(uuid)
        self.start, self.stop = self._sampler.start, self._sampler.stop
        worker.handlers[READ] = self.read
        worker.metrics[METRIC] = self.latest

    def latest(self, worker: Worker | None = None) -> dict[str, Any]:
        """Return the GPU's UUID, and its last sample or None."""
        sample = self._sampler.latest
        return {"uuid": self._uuid, "sample": None if sample is None else sample.to_json()}

    async def read(self) -> dict[str, Any]:
        """Read the GPU now, and return the same."""
        await asyncio.to_thread(self._sampler.read)
        return self.latest()
