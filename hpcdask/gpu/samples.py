"""Samples of a worker's GPU by NVML, once a second, among the worker's metrics.

distributed sends them to the scheduler, where `hpcdask.gpu.monitor` has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes
from tornado.ioloop import PeriodicCallback

from hpcdask.errors import HpcdaskError
from hpcdask.spec.records import Record

from . import nvml
from .nvml import CLOCK_SM, TEMPERATURE_GPU

if TYPE_CHECKING:
    from distributed import Worker

#: Reasons that hold clocks back, by NVML's bit, without an idle GPU and clocks that were set.
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
#: Seconds between two readings. One of an H100 at work takes 7 ms.
INTERVAL_S = 1.0
#: The worker's metric, and the handler that reads the GPU now.
METRIC, READ = "hpcdask-gpu", "hpcdask-read-gpu"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class GpuState(Record):
    """GPU or MIG slice at one moment; None is what NVML does not tell of it.

    Attributes
    ----------
    uuid, model, host, index
        Which GPU; the index is that of nvidia-smi on its host.
    time
        Unix time in seconds.
    worker, pool
        Names of the workers that have the GPU, and bytes of its memory that are in RMM pools of
        theirs; None if there is no pool.
    utilisation, power_w, clock_mhz, temperature_c
        As nvidia-smi has them; utilisation in percent.
    memory_used, memory_total
        Bytes.
    held_back
        Why the clocks are lower than they could be.
    energy_j, nvlink_sent, nvlink_received, pcie_sent, pcie_received
        Counters of the device, in joules and bytes.
    nvlink, pcie
        Bytes per second, sent and received, since the state before.
    ecc_corrected, ecc_uncorrected
        Memory errors since the driver was loaded.
    """

    uuid: str
    time: float
    host: str
    index: int | None = None
    model: str | None = None
    worker: str = ""
    pool: int | None = None
    utilisation: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    clock_mhz: int | None = None
    held_back: list[str] | None = None
    temperature_c: int | None = None
    nvlink_sent: int | None = None
    nvlink_received: int | None = None
    nvlink: float | None = None
    pcie_sent: int | None = None
    pcie_received: int | None = None
    pcie: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None

    @property
    def label(self) -> str:
        """Name the GPU for people: ``node1 GPU 3``."""
        is_slice = self.index is None or self.uuid.startswith("MIG-")
        return f"{self.host} GPU {self.uuid if is_slice else self.index}"

    def rise(self, before: GpuState | None, counter: str) -> float | None:
        """Return the rise of a counter since an earlier state; None if the counter is unknown."""
        now, earlier = getattr(self, counter), getattr(before, counter, None)
        if now is None:
            return None
        return 0 if earlier is None else max(0, now - earlier)

    def rate(self, before: GpuState | None, link: str) -> float | None:
        """Return the bytes per second that a link has sent and received since an earlier state."""
        rises = [self.rise(before, f"{link}_{way}") for way in ("sent", "received")]
        if before is None or None in rises:
            return None
        return sum(filter(None, rises)) / (self.time - before.time)

    def cells(self) -> dict[str, str]:
        """Return the texts of a table's row by column."""
        memory = self.memory_used, self.memory_total
        errors = self.ecc_corrected, self.ecc_uncorrected
        return {
            "node": self.host,
            "GPU": self.label.rpartition(" ")[2],
            "model": self.model or UNKNOWN,
            "worker": self.worker,
            "utilisation": _known(self.utilisation, "{:.0f} %".format),
            "memory": " of ".join(_known(nbytes, format_bytes) for nbytes in memory),
            "pool": "" if self.pool is None else format_bytes(self.pool),
            "power": _known(self.power_w, "{:.0f} W".format),
            "clock": _known(self.clock_mhz, "{} MHz".format),
            "held back by": _known(self.held_back, ", ".join),
            "temperature": _known(self.temperature_c, "{} °C".format),
            "NVLink": _known(self.nvlink, _rate),
            "PCIe": _known(self.pcie, _rate),
            "ECC errors": UNKNOWN if None in errors else "{} corrected, {} not".format(*errors),
        }


def _known(value: Any, write: Callable[[Any], str]) -> str:
    return UNKNOWN if value is None else write(value)


def _rate(value: float) -> str:
    return f"{format_bytes(int(value))}/s"


def read_gpu(uuid: str) -> GpuState | None:
    """Return what NVML tells of a GPU now; None if NVML does not show it."""
    device = None
    with contextlib.suppress(HpcdaskError):  # no package or no driver: none is needed to compute
        device = nvml.device(uuid)
    if device is None:
        return None
    ask, memory, reasons = device.ask, device.memory(), device.clock_limits()
    rates = ask("nvmlDeviceGetUtilizationRates")
    power, energy = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetTotalEnergyConsumption")
    return GpuState(
        uuid=uuid,
        time=time.time(),
        host=socket.gethostname(),
        index=ask("nvmlDeviceGetIndex"),
        model=device.name() or None,
        utilisation=rates and rates.gpu,
        memory_used=memory and memory.used,
        memory_total=memory and memory.total,
        power_w=None if power is None else power / 1000,
        energy_j=None if energy is None else energy / 1000,
        clock_mhz=ask("nvmlDeviceGetClockInfo", CLOCK_SM),
        held_back=None if reasons is None else [REASONS[bit] for bit in REASONS if reasons & bit],
        temperature_c=ask("nvmlDeviceGetTemperature", TEMPERATURE_GPU),
        **device.counters(),
    )


def report_gpu(worker: Worker, uuid: str) -> None:
    """Add samples of a worker's GPU to its metrics: one a second, and at first an empty one."""
    latest = GpuState(uuid, 0.0, socket.gethostname())

    async def read() -> dict[str, Any]:
        nonlocal latest
        if (state := await asyncio.to_thread(read_gpu, uuid)) is not None:
            latest = state
        return latest.to_json()

    worker.handlers[READ] = read
    worker.metrics[METRIC] = lambda worker: latest.to_json()
    worker.periodic_callbacks[METRIC] = PeriodicCallback(read, INTERVAL_S * 1000)
