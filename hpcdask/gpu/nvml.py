"""NVML, the driver's library: no other module imports its Python package.

It makes no CUDA context, so a process that has asked it can still fork.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcdask.errors import DeviceError, MissingExtra

from .driver import cuda_extra, has_nvidia_driver

#: Numbers of NVML's interface, which are the same in every version of its package.
CLOCK_SM, TEMPERATURE_GPU, P2P_NVLINK, MIG_ENABLED = 1, 0, 2, 1
#: Links of a GPU, at most; and where a value lies, by NVML's type of it.
MOST_LINKS = 36
VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class Memory(NamedTuple):
    """Bytes of a device's memory."""

    total: int
    used: int
    free: int


@dataclass(frozen=True)
class Device:
    """GPU, or MIG slice of one; `card` is the handle of the whole GPU."""

    package: Any
    uuid: str
    handle: Any
    card: Any

    @property
    def is_slice(self) -> bool:
        """Return whether it is a MIG slice."""
        return self.uuid.startswith("MIG-")

    def ask(self, call: str, *arguments: Any) -> Any:
        """Return NVML's answer on this device, or None where NVML or the device has none."""
        return _ask(self.package, call, self.handle, *arguments)

    def ask_card(self, call: str, *arguments: Any) -> Any:
        """Return the same on the whole GPU."""
        return _ask(self.package, call, self.card, *arguments)

    def name(self) -> str:
        """Return the model, or an empty text."""
        return _text(self.ask("nvmlDeviceGetName") or "")

    def bus(self) -> str:
        """Return the PCI address."""
        return _text(self.package.nvmlDeviceGetPciInfo(self.card).busId)

    def memory(self) -> Memory | None:
        """Return the device's memory, or None if it shares the host's or tells nothing."""
        found = self.ask("nvmlDeviceGetMemoryInfo", getattr(self.package, "nvmlMemory_v2", None))
        found = found or self.ask("nvmlDeviceGetMemoryInfo")
        return found and Memory(int(found.total), int(found.used), int(found.free))

    def processes(self) -> dict[int, int | None] | None:
        """Return the bytes of each process that computes on the device, by its id."""
        found = self.ask("nvmlDeviceGetComputeRunningProcesses")
        return None if found is None else {int(one.pid): one.usedGpuMemory for one in found}

    def cores(self, count: int) -> tuple[int, ...]:
        """Return those of the host's CPU cores that are near the GPU."""
        masks = self.ask_card("nvmlDeviceGetCpuAffinity", (count + 63) // 64) or ()
        return tuple(
            64 * word + bit
            for word, mask in enumerate(masks)
            for bit in range(64)
            if int(mask) >> bit & 1
        )

    def is_joined(self, other: Device) -> bool:
        """Return whether NVLink joins two GPUs; an old driver or package does not tell."""
        return bool(self.ask("nvmlDeviceGetP2PStatus", other.handle, P2P_NVLINK) == 0)

    def links_up(self) -> int:
        """Return how many of the GPU's NVLinks are up."""
        links = range(MOST_LINKS)
        return sum(bool(self.ask_card("nvmlDeviceGetNvLinkState", link)) for link in links)

    def clock_limits(self) -> int | None:
        """Return the bits of what holds the clocks back."""
        limits: int | None = self.ask_card("nvmlDeviceGetCurrentClocksEventReasons")
        if limits is None:  # the name that drivers before 535 know
            limits = self.ask_card("nvmlDeviceGetCurrentClocksThrottleReasons")
        return limits

    def fields(self, numbers: Collection[tuple[int, int]]) -> list[Any]:
        """Return the values of fields, each by NVML's number and scope; None is not told."""
        found = self.ask("nvmlDeviceGetFieldValues", tuple(numbers)) or ()
        values = [
            None if one.nvmlReturn else getattr(one.value, VALUES[one.valueType]) for one in found
        ]
        return values or [None] * len(numbers)


@dataclass(frozen=True)
class Nvml:
    """NVML after its start."""

    package: Any

    def cards(self) -> tuple[list[list[Device]], list[DeviceError]]:
        """Return the parts of each GPU in the order of PCI, and the errors of broken ones.

        A part is a MIG slice, or the GPU itself; a broken GPU has none. GPUs that a cgroup keeps
        from this process are left out.
        """
        found: list[tuple[str, list[Device]]] = []
        broken: list[DeviceError] = []
        bus = ""
        for index in range(self.package.nvmlDeviceGetCount()):
            parts: list[Device] = []
            try:
                card = self._device(self.package.nvmlDeviceGetHandleByIndex(index))
                bus = card.bus()
                parts = list(self._parts(card))
            except self.package.NVMLError_NoPermission:
                continue
            except self.package.NVMLError as error:
                broken.append(
                    DeviceError(
                        f"GPU {index} of this node cannot be used: {error}. See nvidia-smi, or "
                        f"leave it out with CUDA_VISIBLE_DEVICES"
                    )
                )
            found.append((bus, parts))
        found.sort(key=lambda one: one[0])  # a broken one stays behind the one before it
        return [parts for _, parts in found], broken

    def whole_gpus(self) -> list[Device]:
        """Return the GPUs that are not sliced."""
        return [part for parts in self.cards()[0] for part in parts if not part.is_slice]

    def device(self, uuid: str) -> Device | None:
        """Return the GPU or MIG slice of a UUID, or None if it is not shown to this process."""
        with contextlib.suppress(self.package.NVMLError):
            handle = self.package.nvmlDeviceGetHandleByUUID(uuid)
            device = Device(self.package, uuid, handle, handle)
            if device.is_slice:
                card = device.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
                device = Device(self.package, uuid, handle, card or handle)
            return device
        return None

    def driver(self) -> str:
        """Return the driver's version."""
        return _text(self.package.nvmlSystemGetDriverVersion())

    def cuda(self) -> tuple[int, int]:
        """Return the newest CUDA that the driver runs, such as (13, 0)."""
        version = int(self.package.nvmlSystemGetCudaDriverVersion_v2())
        return version // 1000, version % 1000 // 10

    def _device(self, handle: Any, card: Any = None) -> Device:
        uuid = _text(self.package.nvmlDeviceGetUUID(handle))
        return Device(self.package, uuid, handle, handle if card is None else card)

    def _parts(self, card: Device) -> Iterator[Device]:
        mode = card.ask("nvmlDeviceGetMigMode")
        if mode is None or mode[0] != MIG_ENABLED:
            yield card
            return
        for index in range(self.package.nvmlDeviceGetMaxMigDeviceCount(card.handle)):
            if part := card.ask("nvmlDeviceGetMigDeviceHandleByIndex", index):
                yield self._device(part, card.handle)


def start() -> Nvml | None:
    """Start NVML for as long as this process lives; None on a machine without NVIDIA's driver.

    Raises MissingExtra if its package is missing, DeviceError if it cannot start, where there are
    NVIDIA's device files.
    """
    try:
        import pynvml
    except ImportError:
        if has_nvidia_driver():
            raise MissingExtra(
                "nvidia-ml-py",
                cuda_extra(),
                "this machine has NVIDIA GPUs, and using them (--device cpu does without)",
            ) from None
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if has_nvidia_driver():
            raise DeviceError(
                f"this machine has NVIDIA device files, but NVML does not start: {error}. "
                f"Check that nvidia-smi works here, or use --device cpu"
            ) from None
        return None
    return Nvml(pynvml)


@contextlib.contextmanager
def session() -> Iterator[Nvml | None]:
    """Start NVML as `start` does, and end it with the block."""
    nvml = start()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.package.nvmlShutdown()


def _ask(package: Any, call: str, *arguments: Any) -> Any:
    with contextlib.suppress(AttributeError, package.NVMLError):  # an older package, or driver
        return getattr(package, call)(*arguments)
    return None


def _text(value: str | bytes) -> str:
    """Decode a text of NVML, which is bytes in some versions of its package."""
    return value.decode() if isinstance(value, bytes) else value
