"""Devices that this process may compute on, and their assignment.

Devices are asked of NVML, which needs no CUDA context, so the process can still fork.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcdask.errors import DeviceError, MissingExtra
from hpcdask.spec.records import Record

from .driver import cuda_extra, has_nvidia_driver

NONE_VISIBLE = ("", "-1", "NoDevFiles", "void")
#: One GPU for each rank, of which none hides the others.
EACH_A_GPU = "--gpus-per-task=1 --gpu-bind=none"


@dataclass(frozen=True)
class Gpu(Record):
    """CUDA GPU or MIG slice, as this process sees it, with its memory in bytes.

    The UUID is ``GPU-...`` or ``MIG-...``, as ``CUDA_VISIBLE_DEVICES`` takes it; ``cores`` are the
    CPU cores near it, by NVML.
    """

    uuid: str
    name: str
    memory: int
    cores: tuple[int, ...] = ()


def start_nvml() -> None:
    """Start NVML in a thread, for distributed, which else waits 0.04 s for it in each process."""
    if has_nvidia_driver():
        from distributed.diagnostics import nvml

        threading.Thread(target=nvml.device_get_count, name="nvml", daemon=True).start()


def visible_gpus(environ: Mapping[str, str] | None = None) -> list[Gpu]:
    """The GPUs and MIG slices that this process may use, in the order of `nvidia-smi`.

    Honours ``CUDA_VISIBLE_DEVICES`` with indices, UUIDs (or their beginnings) and MIG names. Makes
    no CUDA call. Device files without NVML's Python package are a MissingExtra.
    """
    environ = os.environ if environ is None else environ
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and wanted.strip() in NONE_VISIBLE:
        return []
    try:
        import pynvml
    except ImportError:
        if has_nvidia_driver():
            raise MissingExtra(
                "nvidia-ml-py",
                cuda_extra(),
                "this machine has NVIDIA GPUs, and using them (--device cpu does without)",
            ) from None
        return []
    with _nvml(pynvml) as there:
        if not there:
            return []
        full, broken = _cards(pynvml)
        shown = [part for parts in full for part in parts]
        visible = shown if wanted is None else _select(wanted, full)
        # One that is left out by the user, or a queue, is no reason to stop
        if broken and (wanted is None or len(visible) < len(wanted.split(","))):
            raise broken[0]
        return [_describe(pynvml, part) for part in visible]


def _select(wanted: str, full: Sequence[Sequence[_Part]]) -> list[_Part]:
    """CUDA's rule: take entries until the first that does not exist."""
    chosen: list[_Part] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if re.fullmatch(r"\d+", entry):
            found = full[int(entry)] if int(entry) < len(full) else ()
        elif match := re.fullmatch(r"(\d+)[:.](\d+)", entry):
            found = full[int(match[1])][int(match[2]) :][:1] if int(match[1]) < len(full) else ()
        else:
            named = entry.startswith(("GPU-", "MIG-"))
            found = [gpu for gpus in full for gpu in gpus if named and gpu.uuid.startswith(entry)]
            if len(found) > 1:  # CUDA wants a beginning that only one has
                break
        if not found:
            break
        chosen += [gpu for gpu in found if gpu not in chosen]
    return chosen


class _Part(NamedTuple):
    """A GPU that is not sliced, or a MIG slice: its UUID, its handle, and that of the whole GPU."""

    uuid: str
    handle: Any
    card: Any


def _cards(pynvml: Any) -> tuple[list[list[_Part]], list[DeviceError]]:
    """The parts of each GPU by their PCI addresses, none of one that is broken, and what is broken.

    NVML counts those too that a cgroup keeps from this process.
    """
    found: list[tuple[str, list[_Part]]] = []
    broken: list[DeviceError] = []
    bus = ""
    for index in range(pynvml.nvmlDeviceGetCount()):
        parts: list[_Part] = []
        try:
            card = pynvml.nvmlDeviceGetHandleByIndex(index)
            bus = decoded(pynvml.nvmlDeviceGetPciInfo(card).busId)
            parts = list(_parts(pynvml, card))
        except pynvml.NVMLError_NoPermission:
            continue
        except pynvml.NVMLError as error:
            broken.append(
                DeviceError(
                    f"GPU {index} of this node cannot be used: {error}. See nvidia-smi, or leave "
                    f"it out with CUDA_VISIBLE_DEVICES"
                )
            )
        found.append((bus, parts))
    found.sort(key=lambda one: one[0])  # a broken one stays behind the one before it
    return [parts for _, parts in found], broken


def whole_gpus(pynvml: Any) -> dict[str, Any]:
    """Those of the GPUs that NVML shows which are not sliced: their handles by UUID."""
    every, _ = _cards(pynvml)
    return {part.uuid: part.card for parts in every for part in parts if part.handle is part.card}


def _parts(pynvml: Any, card: Any) -> Iterator[_Part]:
    """The MIG slices of a GPU, or the GPU itself where it is not sliced."""
    try:
        sliced = pynvml.nvmlDeviceGetMigMode(card)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:
        sliced = False
    if not sliced:
        yield _Part(decoded(pynvml.nvmlDeviceGetUUID(card)), card, card)
        return
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index)
        except pynvml.NVMLError:
            continue
        yield _Part(decoded(pynvml.nvmlDeviceGetUUID(part)), part, card)


def _describe(pynvml: Any, part: _Part) -> Gpu:
    try:
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(part.handle).total)
    except pynvml.NVMLError_NotSupported:  # it shares the host's
        import psutil

        memory = int(psutil.virtual_memory().total)
    name = decoded(pynvml.nvmlDeviceGetName(part.handle))
    return Gpu(part.uuid, name, memory, _near_cores(pynvml, part.card))


def _near_cores(pynvml: Any, handle: Any) -> tuple[int, ...]:
    words = ((os.cpu_count() or 1) + 63) // 64
    try:
        masks = pynvml.nvmlDeviceGetCpuAffinity(handle, words)
    except pynvml.NVMLError:
        return ()
    return tuple(
        64 * word + bit
        for word, mask in enumerate(masks)
        for bit in range(64)
        if int(mask) >> bit & 1
    )


@contextlib.contextmanager
def _nvml(pynvml: Any) -> Iterator[bool]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if has_nvidia_driver():
            raise DeviceError(
                f"this machine has NVIDIA device files, but NVML does not start: {error}. "
                f"Check that nvidia-smi works here, or use --device cpu"
            ) from None
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def decoded(value: str | bytes) -> str:
    """A text of NVML, which is bytes in some versions of its package."""
    return value.decode() if isinstance(value, bytes) else value
