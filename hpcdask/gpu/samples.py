"""Samples of a GPU by NVML, which its worker reads once a second.

Energy, NVLink, PCIe and ECC are counters of the device, and utilisation is summed up here, so
whoever misses a sample misses nothing of the sums.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from hpcdask.spec.records import Record

from .devices import decoded

logger = logging.getLogger("distributed.hpcdask.gpus")

#: Why NVML holds clocks back, by bit. An idle GPU and clocks that were set are no such reasons.
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
#: By the names that counters get here: NVML's field, its scope, and its unit in ours.
FIELDS = {
    "ecc_corrected": ("NVML_FI_DEV_ECC_SBE_VOL_TOTAL", 0, 1),
    "ecc_uncorrected": ("NVML_FI_DEV_ECC_DBE_VOL_TOTAL", 0, 1),
    "pcie_sent": ("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", 0, 1),
    "pcie_received": ("NVML_FI_DEV_PCIE_COUNT_RX_BYTES", 0, 1),
    "nvlink_sent": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", ALL_LINKS, 1024),
    "nvlink_received": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", ALL_LINKS, 1024),
}
#: Seconds between two readings. One of an H100 at work takes 7 ms.
INTERVAL_S = 1.0
#: By NVML's type of a field's value: where it is.
_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


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
    began
        Unix time in seconds when its sampler began.
    sampled_s, busy_s, peak_memory, held_back_s
        Since then: seconds, seconds of full utilisation, bytes, seconds by reason.
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
    began: float = 0.0
    sampled_s: float = 0.0
    busy_s: float | None = None
    peak_memory: int | None = None
    held_back_s: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The GPU's name for people: ``node1 GPU 3``."""
        which = self.uuid if self.index is None or self.uuid.startswith("MIG") else self.index
        return f"{self.host} GPU {which}"


class Sampler:
    """Reader of a GPU or MIG slice by its UUID, in a thread once a second or when it is asked."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._nvml: Any = None
        self._handle: Any = None
        self._constant: dict[str, Any] = {}
        self._silent: set[Any] = set()
        self._then = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.latest: GpuSample | None = None

    def start(self) -> None:
        """Begin to read once a second."""
        threading.Thread(target=self._run, name="gpu-sampler", daemon=True).start()

    def stop(self) -> None:
        """Read no more."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set() and self.read() is not None:
                self._stopped.wait(INTERVAL_S)
        except Exception:
            logger.warning("the GPU is sampled no more; its worker computes on", exc_info=True)

    def read(self) -> GpuSample | None:
        """Return and keep as `latest` what NVML tells now; None if it does not show the GPU."""
        with self._lock:
            if self._handle is None and not self._find():
                return None
            now = time.monotonic()
            self.latest = self._summed(now - self._then, self._ask_all())
            self._then = now
            return self.latest

    def _find(self) -> bool:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except Exception:  # no package, no driver or no such GPU: none is needed to compute
            return False
        self._constant = {
            "uuid": self._uuid,
            "began": time.time(),
            "host": socket.gethostname(),
            "index": self._ask("nvmlDeviceGetIndex"),
            "model": decoded(self._ask("nvmlDeviceGetName") or "") or None,
        }
        return True

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return what NVML tells; None if it does not. It is asked once what it never tells."""
        if (function, arguments) in self._silent:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except (
            AttributeError,  # an older package
            self._nvml.NVMLError_NotSupported,
            self._nvml.NVMLError_FunctionNotFound,
        ):
            self._silent.add((function, arguments))
        except self._nvml.NVMLError:
            pass
        return None

    def _ask_all(self) -> GpuSample:
        nvml, ask = self._nvml, self._ask
        memory = ask("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", None))
        memory = memory or ask("nvmlDeviceGetMemoryInfo")
        rates = ask("nvmlDeviceGetUtilizationRates")
        power = ask("nvmlDeviceGetPowerUsage")
        energy = ask("nvmlDeviceGetTotalEnergyConsumption")
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # the name that drivers before 535 know
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        held = None if reasons is None else [why for bit, why in REASONS.items() if reasons & bit]
        return GpuSample(
            **self._constant,
            time=time.time(),
            utilisation=rates and rates.gpu,
            memory_used=memory and int(memory.used),
            memory_total=memory and int(memory.total),
            power_w=None if power is None else power / 1000,
            energy_j=None if energy is None else energy / 1000,
            clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            held_back=held,
            temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            **self._counters(),
        )

    def _counters(self) -> dict[str, Any]:
        known = {name: field for name, field in FIELDS.items() if hasattr(self._nvml, field[0])}
        asked = tuple((getattr(self._nvml, number), scope) for number, scope, _ in known.values())
        told = self._ask("nvmlDeviceGetFieldValues", asked) or ()
        return {
            name: getattr(one.value, _VALUES[one.valueType]) * unit
            for (name, (_, _, unit)), one in zip(known.items(), told, strict=False)
            if one.nvmlReturn == self._nvml.NVML_SUCCESS
        }

    def _summed(self, seconds: float, now: GpuSample) -> GpuSample:
        """Return the sample with the sums since this sampler began."""
        busy = None if now.utilisation is None else now.utilisation / 100
        if (last := self.latest) is None:
            return replace(now, busy_s=busy and 0.0, peak_memory=now.memory_used)
        held = dict(last.held_back_s)
        for reason in now.held_back or ():
            held[reason] = held.get(reason, 0.0) + seconds
        peaks = [one for one in (now.memory_used, last.peak_memory) if one is not None]
        return replace(
            now,
            sampled_s=last.sampled_s + seconds,
            busy_s=last.busy_s if busy is None else (last.busy_s or 0.0) + seconds * busy,
            peak_memory=max(peaks, default=None),
            held_back_s=held,
        )


def sample_of(uuid: str) -> dict[str, Any]:
    """Return what a GPU does now, as JSON; empty where NVML does not show it."""
    sample = Sampler(uuid).read()
    return {} if sample is None else sample.to_json()
