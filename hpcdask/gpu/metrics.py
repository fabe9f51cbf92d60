"""GPUs at the scheduler's ``/metrics``, by the names and units of DCGM's exporter.

Names are those of its default-counters.csv: https://github.com/NVIDIA/dcgm-exporter. The scheduler
serves what is registered with prometheus_client, if that is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from .monitor import GpuMonitor, GpuState

MIB, KB = 2**20, 1000
#: Name, what it is, the fields of a sample whose sum it is, and its unit in theirs.
METRICS = (
    ("GPU_UTIL", "GPU utilization (in %).", ("utilisation",), 1),
    ("SM_CLOCK", "SM clock frequency (in MHz).", ("clock_mhz",), 1),
    ("MEM_CLOCK", "Memory clock frequency (in MHz).", ("memory_clock_mhz",), 1),
    ("CLOCK_THROTTLE_REASONS", "Why clocks are held back (NVML's bits).", ("held_back_bits",), 1),
    ("GPU_TEMP", "GPU temperature (in C).", ("temperature_c",), 1),
    ("MEMORY_TEMP", "Memory temperature (in C).", ("memory_temperature_c",), 1),
    ("POWER_USAGE", "Power draw (in W).", ("power_w",), 1),
    (
        "TOTAL_ENERGY_CONSUMPTION",
        "Energy since boot (in mJ).",
        ("energy_j",),
        1e-3,
    ),
    ("FB_USED", "Memory used (in MiB).", ("memory_used",), MIB),
    ("FB_FREE", "Memory free (in MiB).", ("memory_free",), MIB),
    ("PCIE_TX_THROUGHPUT", "Sent over PCIe (in KB).", ("pcie_sent",), KB),
    ("PCIE_RX_THROUGHPUT", "Received over PCIe (in KB).", ("pcie_received",), KB),
    (
        "NVLINK_BANDWIDTH_TOTAL",
        "Sent and received over NVLink (in KB).",
        ("nvlink_sent", "nvlink_received"),
        KB,
    ),
    ("ECC_SBE_VOL_TOTAL", "Corrected memory errors.", ("ecc_corrected",), 1),
    ("ECC_DBE_VOL_TOTAL", "Uncorrected memory errors.", ("ecc_uncorrected",), 1),
)
LABELS = ("gpu", "UUID", "device", "modelName", "Hostname", "worker")


class GpuCollector:
    """The GPUs of all schedulers of this process, which share a registry."""

    def __init__(self) -> None:
        self._monitors: WeakSet[GpuMonitor] = WeakSet()

    def add(self, monitor: GpuMonitor) -> None:
        """Collect from this one, too."""
        if not self._monitors:
            from prometheus_client import REGISTRY

            REGISTRY.register(self)
        self._monitors.add(monitor)

    def describe(self) -> list[Any]:
        """Nothing in advance: another registration has the same names."""
        return []

    def collect(self) -> Iterator[Any]:
        """See prometheus_client's collectors; what is not known of a GPU is left out."""
        # also for counters, whose names it would change
        from prometheus_client.core import GaugeMetricFamily

        states = [state for monitor in self._monitors for state in monitor.states()]
        for name, text, fields, unit in METRICS:
            family = GaugeMetricFamily(f"DCGM_FI_DEV_{name}", text, labels=LABELS)
            for state in states:
                values = [getattr(state.sample, one) for one in fields]
                if None not in values:
                    family.add_metric(_labels(state), sum(values) / unit)
            if family.samples:
                yield family


def _labels(state: GpuState) -> list[str]:
    sample = state.sample
    index = "" if sample.index is None else str(sample.index)
    device = f"nvidia{index}" if index else ""
    return [index, sample.uuid, device, sample.model or "", sample.host, state.worker]


COLLECTOR = GpuCollector()
