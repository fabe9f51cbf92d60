"""What NVML tells of GPUs: read about once a second in one process of each node.

Energy, NVLink, PCIe and ECC are counters of the device, and utilisation is summed up here, so
whoever misses a sample misses nothing of the sums.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Collection, Iterable, Sequence
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
#: NVML's fields, by the names that they get here.
FIELDS = {
    "ecc_corrected": "NVML_FI_DEV_ECC_SBE_VOL_TOTAL",
    "ecc_uncorrected": "NVML_FI_DEV_ECC_DBE_VOL_TOTAL",
    "memory_temperature_c": "NVML_FI_DEV_MEMORY_TEMP",
    "pcie_sent": "NVML_FI_DEV_PCIE_COUNT_TX_BYTES",
    "pcie_received": "NVML_FI_DEV_PCIE_COUNT_RX_BYTES",
}
NVLINK = {  # in KiB
    "nvlink_sent": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX",
    "nvlink_received": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX",
}
#: NVML's scope for all NVLinks of a GPU together, and how many one may have.
ALL_LINKS, MOST_LINKS = 2**32 - 1, 18
KIB = 1024
INTERVAL_S = 1.0
#: Part of a core that sampling may take. A reading of an H100 at work takes 7 ms.
PART_OF_CORE = 0.01
#: By NVML's type of a field's value: where it is.
_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


@dataclass(frozen=True)
class GpuSample(Record):
    """One GPU or MIG slice at one moment; None is what NVML does not tell of it.

    Attributes
    ----------
    uuid, model, host, index
        Which GPU; the index is that of nvidia-smi on its host.
    time
        Unix time in seconds.
    utilisation, power_w, clock_mhz, memory_clock_mhz, temperature_c, memory_temperature_c
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
    memory_clock_mhz: int | None = None
    held_back: list[str] | None = None
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
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
    def memory_free(self) -> int | None:
        """Bytes that are not in use."""
        if self.memory_total is None or self.memory_used is None:
            return None
        return self.memory_total - self.memory_used

    @property
    def held_back_bits(self) -> int | None:
        """The reasons of `held_back` as NVML's bits."""
        if self.held_back is None:
            return None
        return sum(bit for bit, why in REASONS.items() if why in self.held_back)

    @property
    def label(self) -> str:
        """The GPU's name for people: ``node1 GPU 3``."""
        which = self.uuid if self.index is None or self.uuid.startswith("MIG") else self.index
        return f"{self.host} GPU {which}"


@dataclass(frozen=True)
class Reading(Record):
    """What a worker tells of the GPUs that it samples, and those that NVML does not show to it."""

    samples: list[GpuSample]
    unseen: list[str]


class _Device:
    """A GPU or slice that NVML shows here."""

    def __init__(self, pynvml: Any, uuid: str) -> None:
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._silent: set[Any] = set()
        self._last: GpuSample | None = None
        self._then = 0.0
        self._constant = {
            "uuid": uuid,
            "began": time.time(),
            "host": socket.gethostname(),
            "index": self._ask("nvmlDeviceGetIndex"),
            "model": decoded(self._ask("nvmlDeviceGetName") or "") or None,
        }
        # by name: the fields whose sum it is, and the unit
        self._fields = {name: (self._known(known, [0]), 1) for name, known in FIELDS.items()}
        for name, known in NVLINK.items():
            whole = self._known(known, [ALL_LINKS])
            self._fields[name] = (whole or self._known(known, range(MOST_LINKS)), KIB)

    def _ask(self, function: str, *arguments: Any) -> Any:
        """What NVML tells; None if it does not, and is not asked again if it never does."""
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

    def _known(self, name: str, scopes: Iterable[int]) -> list[tuple[int, int]]:
        """Those scopes of a field that NVML tells here."""
        number = getattr(self._nvml, name, None)
        asked = [] if number is None else [(number, scope) for scope in scopes]
        told = zip(asked, self._values(asked), strict=True)
        return [one for one, value in told if value is not None]

    def _values(self, fields: Sequence[tuple[int, int]]) -> list[int | None]:
        told = self._ask("nvmlDeviceGetFieldValues", tuple(fields)) if fields else ()
        if told is None:
            return [None] * len(fields)
        success = self._nvml.NVML_SUCCESS
        return [
            getattr(one.value, _VALUES[one.valueType]) if one.nvmlReturn == success else None
            for one in told
        ]

    def read(self) -> GpuSample:
        """Ask for all of it now."""
        nvml, ask = self._nvml, self._ask
        now = time.monotonic()
        memory = ask("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", None))
        memory = memory or ask("nvmlDeviceGetMemoryInfo")
        rates = ask("nvmlDeviceGetUtilizationRates")
        power = ask("nvmlDeviceGetPowerUsage")
        energy = ask("nvmlDeviceGetTotalEnergyConsumption")
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # the name that drivers before 535 know
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        held = None if reasons is None else [why for bit, why in REASONS.items() if reasons & bit]
        sample = GpuSample(
            **self._constant,
            time=time.time(),
            utilisation=rates and rates.gpu,
            memory_used=memory and int(memory.used),
            memory_total=memory and int(memory.total),
            power_w=None if power is None else power / 1000,
            energy_j=None if energy is None else energy / 1000,
            clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            memory_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            held_back=held,
            temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            **self._counters(),
        )
        self._last, self._then = self._summed(now - self._then, sample), now
        return self._last

    def _counters(self) -> dict[str, Any]:
        told = iter(self._values([one for group, _ in self._fields.values() for one in group]))
        found: dict[str, Any] = {}
        for name, (group, unit) in self._fields.items():
            values = [next(told) for _ in group]
            known = [one for one in values if one is not None]
            found[name] = sum(known) * unit if known and len(known) == len(values) else None
        return found

    def _summed(self, seconds: float, now: GpuSample) -> GpuSample:
        """The sample with the sums since this sampler began."""
        busy = None if now.utilisation is None else now.utilisation / 100
        if (last := self._last) is None:
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


class Sampler:
    """Reads GPUs by their UUIDs, about once a second in a thread, or when it is asked."""

    def __init__(self, uuids: Collection[str]) -> None:
        self.uuids = list(uuids)
        self._devices: list[_Device] | None = None
        self._unseen: list[str] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.latest = Reading([], [])

    def read(self) -> Reading:
        """Read all now; also kept as `latest`."""
        with self._lock:
            if self._devices is None:
                self._devices = self._find()
            samples = [device.read() for device in self._devices]
            self.latest = Reading(samples, self._unseen)
            return self.latest

    def _find(self) -> list[_Device]:
        found = []
        self._unseen = list(self.uuids)
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no package, or no driver: neither is needed to compute
            return []
        for uuid in self.uuids:
            try:
                found.append(_Device(pynvml, uuid))
            except pynvml.NVMLError:  # a cgroup keeps it from this process
                continue
            self._unseen.remove(uuid)
        return found

    def start(self) -> None:
        """Begin to read once a second, or less often if that took too much of a core."""
        threading.Thread(target=self._run, name="gpu-sampler", daemon=True).start()

    def stop(self) -> None:
        """Read no more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            began, used = time.monotonic(), time.thread_time()
            try:
                self.read()
            except Exception:
                logger.warning("GPUs are sampled no more, which computes on", exc_info=True)
                return
            interval = interval_s(time.thread_time() - used)
            self._stopped.wait(max(0.0, began + interval - time.monotonic()))


def sample_of(uuid: str) -> dict[str, Any]:
    """What a GPU does now, as `GpuSample.to_json` has it; empty where NVML does not show it."""
    samples = Sampler([uuid]).read().samples
    return samples[0].to_json() if samples else {}


def interval_s(used_s: float) -> float:
    """Seconds from one reading to the next, by the processor time of one."""
    return max(INTERVAL_S, used_s / PART_OF_CORE)
