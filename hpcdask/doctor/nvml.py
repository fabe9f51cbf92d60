"""Facts that NVML tells of the GPUs that this process may use."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator

import psutil

from hpcdask.gpu import driver, nvml
from hpcdask.gpu.devices import Gpu, visible_gpus
from hpcdask.gpu.nvml import Device

from .findings import Facts

#: By the field of a GPU, NVML's function and its further arguments.
FIELDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "compute_mode": ("nvmlDeviceGetComputeMode", ()),
    "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth", ()),
    "pcie_max_width": ("nvmlDeviceGetMaxPcieLinkWidth", ()),
    "pcie_max_gen": ("nvmlDeviceGetMaxPcieLinkGeneration", ()),
    "ecc_uncorrected": ("nvmlDeviceGetTotalEccErrors", (1, 0)),  # uncorrected, since the reset
    "retirement_pending": ("nvmlDeviceGetRetiredPagesPendingStatus", ()),
    "persistence": ("nvmlDeviceGetPersistenceMode", ()),
    "capability": ("nvmlDeviceGetCudaComputeCapability", ()),
}
#: A process of the doctor's own on a GPU has this on its command line.
OWN = b"hpcdask.doctor"


def read() -> Facts:
    """The driver, and the GPUs and MIG slices in the order of `nvidia-smi`.

    Raises DeviceError if there are NVIDIA device files and NVML does not start.
    """
    visible = visible_gpus()
    with nvml.session() as started:
        if started is None:
            return {"device_files": driver.has_nvidia_driver(), "gpus": []}
        devices = ((gpu, started.device(gpu.uuid)) for gpu in visible)
        return {
            "device_files": True,
            "driver": started.driver(),
            "cuda": list(started.cuda()),
            "gpus": [_describe(gpu, device) for gpu, device in devices if device],
        }


def _describe(gpu: Gpu, device: Device) -> Facts:
    known = {name: device.ask_card(call, *more) for name, (call, more) in FIELDS.items()}
    remapped = device.ask_card("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    memory = device.memory()
    if known["persistence"] is not None:
        known["persistence"] = bool(known["persistence"])
    return known | {
        "clock_limits": device.clock_limits(),
        "retirement_pending": bool(known["retirement_pending"] or remapped[2]),
        "remap_failed": bool(remapped[3]),
        "uuid": gpu.uuid,
        "sliced": device.is_slice,
        "index": int(device.ask_card("nvmlDeviceGetIndex") or 0),
        "name": gpu.name,
        "memory": gpu.memory,
        "free": psutil.virtual_memory().available if memory is None else memory.free,
        "cores": list(gpu.cores),
        "nvlinks": device.links_up(),
        "numa": _numa_node(device.bus().lower()),
        "processes": list(_processes(device)),
    }


def _numa_node(bus: str, root: str = "/") -> int | None:
    """The NUMA node of a PCI device; NVML writes the domain with eight digits, the kernel four."""
    number = driver.read(f"{root}sys/bus/pci/devices/{bus[-12:]}/numa_node")
    return int(number) if number.isdigit() else None


def _processes(device: Device) -> Iterator[Facts]:
    """Processes with a context on a GPU. In a container, those outside have no name."""
    for pid, nbytes in (device.processes() or {}).items():
        folder, user = f"/proc/{pid}", None
        with contextlib.suppress(OSError, KeyError):
            with open(f"{folder}/cmdline", "rb") as file:
                if OWN in file.read():
                    continue
            user = pwd.getpwuid(os.stat(folder).st_uid).pw_name
        name = driver.read(f"{folder}/comm") or None
        yield {"pid": pid, "name": name, "user": user, "memory": nbytes}
