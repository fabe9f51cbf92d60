"""Facts that NVML tells of the GPUs that this process may use."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from typing import Any

from hpcdask.gpu import devices, driver

from .findings import Facts

#: By the field of a GPU, NVML's function and its further arguments.
FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "compute_mode": ("nvmlDeviceGetComputeMode", ()),
    "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth", ()),
    "pcie_max_width": ("nvmlDeviceGetMaxPcieLinkWidth", ()),
    "pcie_max_gen": ("nvmlDeviceGetMaxPcieLinkGeneration", ()),
    "clock_limits": ("nvmlDeviceGetCurrentClocksEventReasons", ()),
    "ecc_uncorrected": ("nvmlDeviceGetTotalEccErrors", (1, 0)),  # uncorrected, since the reset
    "retirement_pending": ("nvmlDeviceGetRetiredPagesPendingStatus", ()),
    "remapped": ("nvmlDeviceGetRemappedRows", ()),
    "persistence": ("nvmlDeviceGetPersistenceMode", ()),
    "capability": ("nvmlDeviceGetCudaComputeCapability", ()),
}
#: A process of the doctor's own on a GPU has this on its command line.
OWN = b"hpcdask.doctor"


def read() -> Facts:
    """The driver, and the GPUs and MIG slices in the order of `nvidia-smi`.

    Raises DeviceError if there are NVIDIA device files and NVML does not start.
    """
    known: Facts = {"device_files": driver.has_nvidia_driver(), "gpus": []}
    visible = devices.visible_gpus()
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, or no driver: fine, unless there are GPUs
        if known["device_files"]:
            raise
        return known
    known |= {"device_files": True, "driver": devices.decoded(pynvml.nvmlSystemGetDriverVersion())}
    version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    known["cuda"] = [version // 1000, version % 1000 // 10]
    known["gpus"] = [_describe(pynvml, gpu) for gpu in visible]
    return known


def _describe(nvml: Any, gpu: devices.Gpu) -> Facts:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    card = handle
    if gpu.uuid.startswith("MIG-"):
        card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    bus = devices.decoded(nvml.nvmlDeviceGetPciInfo(card).busId).lower()
    known: Facts = {name: _ask(nvml, call, card, *more) for name, (call, more) in FIELDS.items()}
    remapped = known.pop("remapped") or (0, 0, 0, 0)
    if known["persistence"] is not None:
        known["persistence"] = bool(known["persistence"])
    return known | {
        "retirement_pending": bool(known["retirement_pending"] or remapped[2]),
        "remap_failed": bool(remapped[3]),
        "uuid": gpu.uuid,
        "parent": devices.decoded(nvml.nvmlDeviceGetUUID(card)) if card is not handle else None,
        "index": int(nvml.nvmlDeviceGetIndex(card)),
        "name": gpu.name,
        "memory": gpu.memory,
        "free": _free(nvml, handle),
        "cores": list(gpu.cores),
        "nvlinks": _nvlinks(nvml, card),
        "numa": _numa_node(bus),
        "processes": list(_processes(nvml, handle)),
    }


def _nvlinks(nvml: Any, card: Any) -> int:
    """Return how many of its links are up."""
    links = range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0))
    return sum(bool(_ask(nvml, "nvmlDeviceGetNvLinkState", card, link)) for link in links)


def _free(nvml: Any, handle: Any) -> int:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None:  # it shares the host's
        import psutil

        return int(psutil.virtual_memory().available)
    return int(memory.free)


def _ask(nvml: Any, call: str, *arguments: Any) -> Any:
    """NVML's answer, or None where this GPU or this NVML has none."""
    with contextlib.suppress(AttributeError, nvml.NVMLError):
        return getattr(nvml, call)(*arguments)
    return None


def _numa_node(bus: str, root: str = "/") -> int | None:
    """The NUMA node of a PCI device; NVML writes the domain with eight digits, the kernel four."""
    number = driver.read(f"{root}sys/bus/pci/devices/{bus[-12:]}/numa_node")
    return int(number) if number.isdigit() else None


def _processes(nvml: Any, handle: Any) -> Iterator[Facts]:
    """Processes with a context on a GPU. In a container, those outside have no name."""
    for process in _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or []:
        folder, user = f"/proc/{process.pid}", None
        with contextlib.suppress(OSError, KeyError):
            with open(f"{folder}/cmdline", "rb") as file:
                if OWN in file.read():
                    continue
            user = pwd.getpwuid(os.stat(folder).st_uid).pw_name
        name = driver.read(f"{folder}/comm") or None
        yield {"pid": int(process.pid), "name": name, "user": user, "memory": process.usedGpuMemory}
