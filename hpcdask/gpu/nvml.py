"""NVML, the driver's library: no other module imports its Python package.

NVML makes no CUDA context, so a process that has asked it can still fork. It runs from the first
question until the process ends; starting it once more takes no time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcdask.errors import DeviceError, MissingExtra

from .driver import cuda_extra, has_nvidia_driver

#: Numbers of NVML's interface, which are the same in every version of its package.
CLOCK_SM, TEMPERATURE_GPU, P2P_NVLINK, MIG_ENABLED = 1, 0, 2, 1
#: Most links of a GPU; the members of NVML's union of values, by its type of a value.
MOST_LINKS = 36
VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
#: NVML's scope for all NVLinks of a GPU together.
ALL_LINKS = 2**32 - 1
#: Counters of memory errors and bytes: the number of NVML's field, its scope, and its unit.
COUNTERS = {
    "ecc_corrected": (3, 0, 1),
    "ecc_uncorrected": (4, 0, 1),
    "pcie_sent": (197, 0, 1),
    "pcie_received": (198, 0, 1),
    "nvlink_sent": (138, ALL_LINKS, 1024),
    "nvlink_received": (139, ALL_LINKS, 1024),
}


@dataclass(frozen=True)
class Device:
    """GPU, or MIG slice of one; `card` is the handle of the whole GPU."""

    uuid: str
    handle: Any
    card: Any

    @property
    def is_slice(self) -> bool:
        """Return whether this is a MIG slice."""
        return self.uuid.startswith("MIG-")

    def ask(self, call: str, *arguments: Any) -> Any:
        """Return NVML's answer on this device, or None where NVML or the device has none."""
        return _ask(call, self.handle, *arguments)

    def ask_card(self, call: str, *arguments: Any) -> Any:
        """Return NVML's answer on the whole GPU, or None."""
        return _ask(call, self.card, *arguments)

    def name(self) -> str:
        """Return the model, or an empty text."""
        return str(self.ask("nvmlDeviceGetName") or "")

    def memory(self) -> Any:
        """Return total, used and free bytes; None if the memory is the host's, or not told."""
        import pynvml

        return self.ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)

    def processes(self) -> dict[int, int | None]:
        """Return the bytes of each process that computes on the device, by process id."""
        found = self.ask("nvmlDeviceGetComputeRunningProcesses") or ()
        return {int(process.pid): process.usedGpuMemory for process in found}

    def cores(self, count: int) -> tuple[int, ...]:
        """Return the host's CPU cores that are near the GPU, of `count` cores."""
        masks = self.ask_card("nvmlDeviceGetCpuAffinity", (count + 63) // 64) or ()
        numbers = range(64 * len(masks))
        return tuple(core for core in numbers if int(masks[core // 64]) >> core % 64 & 1)

    def is_joined(self, other: Device) -> bool:
        """Return whether NVLink joins two GPUs; an old driver or package does not tell."""
        return bool(self.ask("nvmlDeviceGetP2PStatus", other.handle, P2P_NVLINK) == 0)

    def links_up(self) -> int:
        """Return how many of the GPU's NVLinks are up."""
        links = range(MOST_LINKS)
        return sum(bool(self.ask_card("nvmlDeviceGetNvLinkState", link)) for link in links)

    def clock_limits(self) -> Any:
        """Return the bits of the reasons that hold the clocks back."""
        # the other is the name that drivers before 535 know
        bits = self.ask_card("nvmlDeviceGetCurrentClocksEventReasons")
        return bits or self.ask_card("nvmlDeviceGetCurrentClocksThrottleReasons")

    def counters(self) -> dict[str, Any]:
        """Return the `COUNTERS` by name, None for those that NVML does not tell."""
        numbers = tuple((number, scope) for number, scope, _ in COUNTERS.values())
        answers = self.ask("nvmlDeviceGetFieldValues", numbers) or [None] * len(numbers)
        return {
            name: None
            if answer is None or answer.nvmlReturn
            else unit * getattr(answer.value, VALUES[answer.valueType])
            for (name, (*_, unit)), answer in zip(COUNTERS.items(), answers, strict=True)
        }


def cards() -> tuple[list[list[Device]], list[DeviceError]]:
    """Return the parts of each GPU in the order of PCI, and the errors of broken GPUs.

    A part is a MIG slice, or the GPU itself; a broken GPU has none. GPUs that a cgroup keeps from
    this process are left out. Raises as `_start`.
    """
    package = _start()
    found: list[tuple[str, list[Device]]] = []
    broken: list[DeviceError] = []
    bus = ""
    for index in range(package.nvmlDeviceGetCount() if package else 0):
        parts: list[Device] = []
        try:
            handle = package.nvmlDeviceGetHandleByIndex(index)
            bus = package.nvmlDeviceGetPciInfo(handle).busId
            parts = list(_parts(Device(package.nvmlDeviceGetUUID(handle), handle, handle)))
        except package.NVMLError_NoPermission:
            continue
        except package.NVMLError as error:
            text = f"GPU {index} of this node cannot be used: {error}. See nvidia-smi, or leave it"
            broken.append(DeviceError(f"{text} out with CUDA_VISIBLE_DEVICES"))
        found.append((bus, parts))
    found.sort(key=lambda one: one[0])  # a broken GPU stays behind the one before it
    return [parts for _, parts in found], broken


def whole_gpus() -> list[Device]:
    """Return the GPUs that are not sliced. Raises as `_start`."""
    return [part for parts in cards()[0] for part in parts if not part.is_slice]


def device(uuid: str) -> Device | None:
    """Return a GPU or MIG slice; None if NVML does not show it. Raises as `_start`."""
    if _start() is None or not (handle := _ask("nvmlDeviceGetHandleByUUID", uuid)):
        return None
    is_slice = uuid.startswith("MIG-")
    card = is_slice and _ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    return Device(uuid, handle, card or handle)


def versions() -> tuple[str, tuple[int, int]] | None:
    """Return the driver's version and the newest CUDA that it runs, such as (13, 0), or None."""
    if (package := _start()) is None:
        return None
    cuda = package.nvmlSystemGetCudaDriverVersion_v2()
    return package.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10)


def _start() -> Any:
    """Start NVML and return its package; None on a machine without NVIDIA's driver.

    Where there are NVIDIA's device files, a missing package is a MissingExtra, and a failing start
    a DeviceError.
    """
    try:
        import pynvml
    except ImportError:
        if not has_nvidia_driver():
            return None
        purpose = "this machine has NVIDIA GPUs, and using them (--device cpu does without)"
        raise MissingExtra("nvidia-ml-py", cuda_extra(), purpose) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if not has_nvidia_driver():
            return None
        raise DeviceError(
            f"this machine has NVIDIA device files, but NVML does not start: {error}. "
            f"Check that nvidia-smi works here, or use --device cpu"
        ) from None
    return pynvml


def _parts(card: Device) -> Iterator[Device]:
    import pynvml

    mode = card.ask("nvmlDeviceGetMigMode")
    if mode is None or mode[0] != MIG_ENABLED:
        yield card
        return
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card.handle)):
        if part := card.ask("nvmlDeviceGetMigDeviceHandleByIndex", index):
            yield Device(pynvml.nvmlDeviceGetUUID(part), part, card.handle)


def _ask(call: str, *arguments: Any) -> Any:
    import pynvml

    with contextlib.suppress(AttributeError, pynvml.NVMLError):  # an older package, or driver
        return getattr(pynvml, call)(*arguments)
    return None
