"""Devices that this process may compute on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcdask.spec.records import Record

from . import nvml
from .nvml import Device

NONE_VISIBLE = ("", "-1", "NoDevFiles", "void")
#: Options of srun: a GPU for each rank, and none hidden from the others.
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


def visible_gpus(environ: Mapping[str, str] | None = None) -> list[Gpu]:
    """Return the GPUs and MIG slices that this process may use, in the order of `nvidia-smi`.

    Honours ``CUDA_VISIBLE_DEVICES`` with indices, UUIDs (or their beginnings) and MIG names. Makes
    no CUDA call. Device files without NVML's Python package are a MissingExtra.
    """
    environ = os.environ if environ is None else environ
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and wanted.strip() in NONE_VISIBLE:
        return []
    cards, broken = nvml.cards()
    every = [gpu for gpus in cards for gpu in gpus]
    visible = every if wanted is None else _select(wanted, cards)
    # a broken GPU that the user, or a queue, leaves out is no reason to stop
    if broken and (wanted is None or len(visible) < len(wanted.split(","))):
        raise broken[0]
    return list(map(_describe, visible))


def _select(wanted: str, cards: Sequence[list[Device]]) -> list[Device]:
    """Apply CUDA's rule: take entries until the first that does not exist."""
    named = {str(number): parts for number, parts in enumerate(cards)}
    named |= {
        f"{number}:{place}": [part] for number in named for place, part in enumerate(named[number])
    }
    chosen: list[Device] = []
    for entry in map(str.strip, wanted.split(",")):
        if entry.startswith(("GPU-", "MIG-")):
            same = [part for parts in cards for part in parts if part.uuid.startswith(entry)]
            found = same if len(same) == 1 else []  # CUDA wants a beginning that only one has
        else:
            found = named.get(entry.replace(".", ":"), [])
        if not found:
            break
        chosen += [gpu for gpu in found if gpu not in chosen]
    return chosen


def _describe(device: Device) -> Gpu:
    import psutil

    memory = device.memory() or psutil.virtual_memory()  # the device shares the host's
    return Gpu(device.uuid, device.name(), int(memory.total), device.cores(os.cpu_count() or 1))
