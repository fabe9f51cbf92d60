"""Samples of a worker's GPU by NVML, once a second, among the worker's metrics.

distributed sends them to the scheduler, where `hpcdask.gpu.monitor` has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcdask.errors import HpcdaskError
from hpcdask.spec.records import Record

from . import nvml
from .nvml import CLOCK_SM, TEMPERATURE_GPU, Device

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
#: NVML's scope for all NVLinks of a GPU together.
ALL_LINKS = 2**32 - 1
#: Counters by their names here: the number of NVML's field, its scope, and its unit in ours.
COUNTERS = {
    "ecc_corrected": (3, 0, 1),
    "ecc_uncorrected": (4, 0, 1),
    "pcie_sent": (197, 0, 1),
    "pcie_received": (198, 0, 1),
    "nvlink_sent": (138, ALL_LINKS, 1024),
    "nvlink_received": (139, ALL_LINKS, 1024),
}
#: Seconds between two readings. One of an H100 at work takes 7 ms.
INTERVAL_S = 1.0
#: The worker's metric, and the handler that reads the GPU now.
METRIC, READ = "hpcdask-gpu", "hpcdask-read-gpu"


@dataclass(frozen=True)
class GpuSample(Record):
    """GPU or MIG slice at one moment; None is what NVML does not tell of it.

    Attributes
    ----------
    uuid, model, host, index
        Which GPU; the index is that of nvidia-smi on its host.
    time
        Unix time in seconds.
    utilisation, power_w, clock_mhz, temperature_c
        As nvidia-smi has them; utilisation in percent.
    memory_used, memory_total
        Bytes.
    held_back
        Why the clocks are lower than they could be.
    energy_j, nvlink_sent, nvlink_received, pcie_sent, pcie_received
        Counters of the device, in joules and bytes.
    ecc_corrected, ecc_uncorrected
        Memory errors since the driver was loaded.
    """

    uuid: str
    time: float
    host: str
    index: int | None = None
    model: str | None = None
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
    pcie_sent: int | None = None
    pcie_received: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None

    @property
    def label(self) -> str:
        """Name the GPU for people: ``node1 GPU 3``."""
        which = self.uuid if self.index is None or self.uuid.startswith("MIG") else self.index
        return f"{self.host} GPU {which}"


def read_sample(uuid: str) -> GpuSample | None:
    """Return what NVML tells of a GPU now; None if NVML does not show it."""
    device = _find(uuid)
    return _sample(device) if device else None


def _find(uuid: str) -> Device | None:
    with contextlib.suppress(HpcdaskError):  # no package or no driver: none is needed to compute
        return nvml.device(uuid)
    return None


def _sample(device: Device) -> GpuSample:
    ask, memory = device.ask, device.memory()
    rates, power = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPowerUsage")
    energy = ask("nvmlDeviceGetTotalEnergyConsumption")
    reasons = device.clock_limits()
    told = device.fields([(number, scope) for number, scope, _ in COUNTERS.values()])
    counters = zip(COUNTERS.items(), told, strict=True)
    return GpuSample(
        uuid=device.uuid,
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
        **{name: value and value * unit for (name, (*_, unit)), value in counters},
    )


def sample_of(uuid: str) -> dict[str, Any]:
    """Return what a GPU does now, as JSON; empty where NVML does not show it."""
    sample = read_sample(uuid)
    return {} if sample is None else sample.to_json()


class GpuReporter:
    """Reporter of a worker's GPU: of its UUID at once, of a sample a second from `start` on."""

    def __init__(self, worker: Worker, uuid: str) -> None:
        self._uuid = uuid
        self._device: Device | None = None
        self._sample: GpuSample | None = None
        self._stopped = threading.Event()
        worker.handlers[READ] = self.read
        worker.metrics[METRIC] = self.latest

    def start(self) -> None:
        """Start to read the GPU once a second, in a thread."""
        threading.Thread(target=self._run, name="gpu-sampler", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _run(self) -> None:
        while self._read() is not None and not self._stopped.wait(INTERVAL_S):
            pass

    def _read(self) -> GpuSample | None:
        self._device = self._device or _find(self._uuid)
        if self._device is not None:
            self._sample = _sample(self._device)
        return self._sample

    def latest(self, worker: Worker | None = None) -> dict[str, Any]:
        """Return the GPU's UUID, and its last sample or None."""
        return {"uuid": self._uuid, "sample": self._sample and self._sample.to_json()}

    async def read(self) -> dict[str, Any]:
        """Read the GPU now, and return what `latest` does."""
        await asyncio.to_thread(self._read)
        return self.latest()
