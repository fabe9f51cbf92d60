"""Facts that NVML tells of the GPUs that this process may use. No CUDA call is made."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass

from hpcdask.gpu import driver, nvml
from hpcdask.gpu.devices import Gpu, visible_gpus
from hpcdask.gpu.nvml import Device
from hpcdask.spec.records import Record

#: A process of the doctor's own on a GPU has this on its command line.
OWN = b"hpcdask.doctor"


@dataclass(frozen=True)
class GpuProcess(Record):
    """Process with a context on a GPU. In a container, those outside have no name."""

    pid: int
    name: str | None = None
    user: str | None = None
    memory: int | None = None


@dataclass(frozen=True)
class GpuFacts(Gpu):
    """GPU or MIG slice, with what NVML tells of its state; None is what it does not tell."""

    index: int = 0
    free: int = 0
    sliced: bool = False
    numa: int | None = None
    compute_mode: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_max_gen: int | None = None
    clock_limits: int | None = None
    nvlinks: int = 0
    ecc_uncorrected: int | None = None
    retirement_pending: bool = False
    remap_failed: bool = False
    persistence: int | None = None
    capability: tuple[int, int] | None = None
    processes: tuple[GpuProcess, ...] = ()

    @classmethod
    def of(cls, gpu: Gpu, device: Device) -> GpuFacts:
        """Ask NVML about a GPU that is visible."""
        ask, memory = device.ask_card, device.memory()
        remapped = ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
        return cls(
            **gpu.__dict__,
            index=ask("nvmlDeviceGetIndex") or 0,
            free=_free_on_host() if memory is None else memory.free,
            sliced=device.is_slice,
            numa=_numa_node(device.bus().lower()),
            compute_mode=ask("nvmlDeviceGetComputeMode"),
            pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_max_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
            pcie_max_gen=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            clock_limits=device.clock_limits(),
            nvlinks=device.links_up(),
            ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", 1, 0),  # since the driver's start
            retirement_pending=bool(ask("nvmlDeviceGetRetiredPagesPendingStatus") or remapped[2]),
            remap_failed=bool(remapped[3]),
            persistence=ask("nvmlDeviceGetPersistenceMode"),
            capability=ask("nvmlDeviceGetCudaComputeCapability"),
            processes=tuple(_processes(device)),
        )


@dataclass(frozen=True)
class GpusFacts(Record):
    """GPUs that a rank may use; `device_files` says that there is a driver, also without any."""

    device_files: bool
    gpus: tuple[GpuFacts, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)

    @classmethod
    def read(cls) -> GpusFacts:
        """Ask NVML. Raises DeviceError if there are device files and NVML does not start."""
        visible = visible_gpus()
        with nvml.session() as started:
            if started is None:
                return cls(driver.has_nvidia_driver())
            devices = ((gpu, started.device(gpu.uuid)) for gpu in visible)
            gpus = tuple(GpuFacts.of(gpu, device) for gpu, device in devices if device)
            return cls(True, gpus, started.driver(), started.cuda())


def _free_on_host() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _numa_node(bus: str) -> int | None:
    """Return the NUMA node of a PCI device, whose domain has eight digits, the kernel's four."""
    number = driver.read(f"/sys/bus/pci/devices/{bus[-12:]}/numa_node")
    return int(number) if number.isdigit() else None


def _processes(device: Device) -> Iterator[GpuProcess]:
    for pid, nbytes in (device.processes() or {}).items():
        folder, user = f"/proc/{pid}", None
        with contextlib.suppress(OSError, KeyError):
            with open(f"{folder}/cmdline", "rb") as file:
                if OWN in file.read():
                    continue
            user = pwd.getpwuid(os.stat(folder).st_uid).pw_name
        yield GpuProcess(pid, driver.read(f"{folder}/comm") or None, user, nbytes)
