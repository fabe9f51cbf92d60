"""What this process may compute on, and which device is whose.

Devices are asked of NVML, which needs no CUDA context, so the process can still fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from hpcdask.errors import DeviceError, MissingExtra
from hpcdask.queues.environment import how_to_request

from .driver import DriverFile, cuda_extra, has_nvidia_driver

NONE_VISIBLE = ("", "-1", "NoDevFiles", "void")
#: One GPU for each rank, of which none hides the others.
EACH_A_GPU = "--gpus-per-task=1 --gpu-bind=none"


@dataclass(frozen=True)
class Gpu:
    """One CUDA GPU or MIG slice, as this process sees it.

    Attributes
    ----------
    uuid
        ``GPU-...`` or ``MIG-...``, as ``CUDA_VISIBLE_DEVICES`` takes it.
    name
        Product name.
    memory
        Bytes of device memory, of the slice where it is one.
    cores
        CPU cores near it, by NVML.
    """

    uuid: str
    name: str
    memory: int
    cores: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Gpu:
        """Read what ``dataclasses.asdict`` and JSON made of a GPU."""
        return cls(**{**data, "cores": tuple(data["cores"])})


@dataclass(frozen=True)
class View:
    """What one rank reports of itself, for the choice of devices and cores.

    Attributes
    ----------
    rank, host, local_index
        The rank, its node, its number among the node's ranks.
    gpus
        The GPUs it sees, in CUDA's order.
    cores
        CPU cores it may run on.
    memory
        Bytes of host memory that the job may use on this node.
    shown
        The node's GPUs about which NVML was asked; None where it was not, see `complete`.
    quota
        Of how many cores a cgroup allows the time; None for all.
    """

    rank: int
    host: str
    local_index: int
    gpus: tuple[Gpu, ...]
    cores: tuple[int, ...]
    memory: int
    shown: tuple[Gpu, ...] | None = ()
    quota: int | None = None

    @property
    def cpus(self) -> int:
        """How many threads can run at a time."""
        return min(len(self.cores), self.quota or len(self.cores))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> View:
        """Read what ``dataclasses.asdict`` and JSON made of a view."""
        gpus = tuple(map(Gpu.from_json, data["gpus"]))
        shown = None if data["shown"] is None else tuple(map(Gpu.from_json, data["shown"]))
        return cls(**{**data, "gpus": gpus, "cores": tuple(data["cores"]), "shown": shown})


def start_nvml() -> None:
    """Start NVML in a thread, for distributed, which else waits 0.04 s for it in each process."""
    if has_nvidia_driver():
        from distributed.diagnostics import nvml

        threading.Thread(target=nvml.device_get_count, name="nvml", daemon=True).start()


def visible_gpus(environ: Mapping[str, str] | None = None) -> list[Gpu]:
    """The GPUs and MIG slices that this process may use, in the order of `nvidia-smi`.

    Honours ``CUDA_VISIBLE_DEVICES`` with indices, UUIDs (or their beginnings) and MIG names.
    Makes no CUDA call.

    Raises
    ------
    MissingExtra
        There are NVIDIA device files but NVML's Python package is missing.
    """
    return look_at_gpus(environ)[0]


def look_at_gpus(
    environ: Mapping[str, str] | None = None, *, every: bool = False
) -> tuple[list[Gpu], list[Gpu]]:
    """`visible_gpus`, and what NVML was asked about: all of the node with `every`, else the same.

    Of the other GPUs no more is asked than their UUIDs: where each of N processes on a node has one
    of N GPUs, as jobs may, the rest would keep the CUDA contexts of all waiting.
    """
    environ = os.environ if environ is None else environ
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and wanted.strip() in NONE_VISIBLE:
        return [], []
    try:
        import pynvml
    except ImportError:
        if has_nvidia_driver():
            raise MissingExtra(
                "nvidia-ml-py",
                cuda_extra(),
                "this machine has NVIDIA GPUs, and using them (--device cpu does without)",
            ) from None
        return [], []
    with _nvml(pynvml) as there:
        if not there:
            return [], []
        full, broken = _cards(pynvml)
        shown = [part for parts in full for part in parts]
        visible = shown if wanted is None else _select(wanted, full)
        # One that is left out by the user, or a queue, is no reason to stop
        if broken and (wanted is None or len(visible) < len(wanted.split(","))):
            raise broken[0]
        known = {part.uuid: _describe(pynvml, part) for part in (shown if every else visible)}
        return [known[part.uuid] for part in visible], list(known.values())


def foreseen_gpus(
    files: Sequence[DriverFile], environ: Mapping[str, str] | None = None, root: str = "/"
) -> list[Gpu]:
    """UUIDs of `visible_gpus`, as the driver's files tell them: at once, and not for certain.

    Empty where they do not tell, or a GPU is sliced (MIG).

    Parameters
    ----------
    files
        What `driver_files` gave.
    environ
        Environment of the worker; default: this process's.
    root
        Folder that stands for ``/``, with a slash at its end.
    """
    environ = os.environ if environ is None else environ
    usable = [gpu for gpu in files if gpu.accessible]
    sliced = glob.glob(f"{glob.escape(root)}proc/driver/nvidia/capabilities/gpu*/mig/gi*")
    if sliced or any("?" in gpu.uuid for gpu in usable):
        return []
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None:
        gone = wanted.strip() in NONE_VISIBLE
        usable = [] if gone else _select(wanted, [[gpu] for gpu in usable])
    return [Gpu(gpu.uuid, "", 0) for gpu in usable]


class _HasUuid(Protocol):
    @property
    def uuid(self) -> str: ...


Named = TypeVar("Named", bound=_HasUuid)


def _select(wanted: str, full: Sequence[Sequence[Named]]) -> list[Named]:
    """CUDA's rule: take entries until the first that does not exist."""
    chosen: list[Named] = []
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
            bus = _text(pynvml.nvmlDeviceGetPciInfo(card).busId)
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


def _parts(pynvml: Any, card: Any) -> Iterator[_Part]:
    """The MIG slices of a GPU, or the GPU itself where it is not sliced."""
    try:
        sliced = pynvml.nvmlDeviceGetMigMode(card)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:
        sliced = False
    if not sliced:
        yield _Part(_text(pynvml.nvmlDeviceGetUUID(card)), card, card)
        return
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index)
        except pynvml.NVMLError:
            continue
        yield _Part(_text(pynvml.nvmlDeviceGetUUID(part)), part, card)


def _describe(pynvml: Any, part: _Part) -> Gpu:
    try:
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(part.handle).total)
    except pynvml.NVMLError_NotSupported:  # it shares the host's
        import psutil

        memory = int(psutil.virtual_memory().total)
    name = _text(pynvml.nvmlDeviceGetName(part.handle))
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


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def complete(views: Sequence[View]) -> list[View]:
    """Fill in what ranks left to the first of their node, which asked NVML for them too.

    Raises
    ------
    DeviceError
        NVML shows none of a rank's GPUs.
    """
    shown = {gpu.uuid: gpu for view in views for gpu in view.shown or ()}
    whole = []
    for view in views:
        if view.shown is None:
            gpus = tuple(shown[gpu.uuid] for gpu in view.gpus if gpu.uuid in shown)
            if shown and not gpus:
                raise DeviceError(
                    f"rank {view.rank} sees GPUs on {view.host} that the first rank there does "
                    f"not: let all ranks of a node see the same ones, or set HPCDASK_PRESTART=0"
                )
            view = dataclasses.replace(view, gpus=gpus)
        whole.append(view)
    return whole


def assign(
    views: Sequence[View],
    *,
    device: str,
    oversubscribe: bool,
    job: str | None,
    every_gpu: bool = False,
) -> dict[int, list[Gpu | None]]:
    """Give each rank its device.

    Where the ranks of a node see the same GPUs, each takes one by its number on the node; where
    the launcher gave each its own (``--gpus-per-task=1``), it takes that.

    Parameters
    ----------
    views
        One per rank that gets a worker.
    device
        ``auto``, ``cuda`` or ``cpu``.
    oversubscribe
        Whether several workers may share a GPU.
    job
        Id of the queueing system's job, or None on a workstation.
    every_gpu
        Give a single rank all GPUs it sees, one worker each (no launcher).

    Returns
    -------
    dict of int to list of Gpu or None
        Per rank the devices of its workers; None stands for the CPU.

    Raises
    ------
    DeviceError
        No GPU where one is wanted, or too few distinct ones.
    """
    blind = [view for view in views if not view.gpus]
    if device == "cpu" or (device == "auto" and len(blind) == len(views) and job is None):
        return {view.rank: [None] for view in views}
    if blind:
        where = ", ".join(sorted({view.host for view in blind}))
        some = (
            "none of the ranks sees"
            if len(blind) == len(views)
            else (f"rank {blind[0].rank} does not see")
        )
        raise DeviceError(
            f"{some} a GPU on {where}. {how_to_request(job)}To compute on the CPU: --device cpu"
        )
    taken: dict[int, list[Gpu | None]] = {}
    for host in dict.fromkeys(view.host for view in views):
        ranks = sorted((view for view in views if view.host == host), key=lambda v: v.local_index)
        if every_gpu and len(ranks) == 1:
            taken[ranks[0].rank] = list(ranks[0].gpus)
            continue
        distinct = {gpu.uuid for view in ranks for gpu in view.gpus}
        matched = _match(ranks)
        if len({gpu.uuid for gpu in matched}) < len(ranks) and not oversubscribe:
            if len(distinct) >= len(ranks):
                raise DeviceError(
                    f"{host} has {len(ranks)} ranks and {len(distinct)} GPUs, but some see only "
                    f"the same ones: request one per rank (srun {EACH_A_GPU}), or let "
                    f"workers share a GPU with --oversubscribe"
                )
            raise DeviceError(
                f"{host} has {len(ranks)} ranks but only {len(distinct)} distinct "
                f"GPU{'s' * (len(distinct) != 1)}: start at most {len(distinct)} per node, or let "
                f"workers share a GPU with --oversubscribe"
            )
        for view, gpu in zip(ranks, matched, strict=True):
            taken[view.rank] = [gpu]
    return taken


def _match(ranks: Sequence[View]) -> list[Gpu]:
    """One GPU per rank of a node: all different where possible, fewest sharers else.

    A maximum bipartite matching by augmenting paths (Kuhn 1955); each rank's first wish is
    the GPU of its own number, so that rank i gets GPU i where all are visible.
    """
    wishes = [
        [view.gpus[(view.local_index + step) % len(view.gpus)] for step in range(len(view.gpus))]
        for view in ranks
    ]
    owner: dict[str, int] = {}

    def place(rank: int, tried: set[str]) -> bool:
        for gpu in wishes[rank]:
            if gpu.uuid not in tried:
                tried.add(gpu.uuid)
                if gpu.uuid not in owner or place(owner[gpu.uuid], tried):
                    owner[gpu.uuid] = rank
                    return True
        return False

    placed = [place(rank, set()) for rank in range(len(ranks))]
    by_uuid = {gpu.uuid: gpu for wish in wishes for gpu in wish}
    result = {rank: by_uuid[uuid] for uuid, rank in owner.items()}
    sharers = Counter(gpu.uuid for gpu in result.values())
    for rank, alone in enumerate(placed):
        if not alone:
            result[rank] = min(wishes[rank], key=lambda gpu: sharers[gpu.uuid])
            sharers[result[rank].uuid] += 1
    return [result[rank] for rank in range(len(ranks))]


def worker_cores(owned: Sequence[int], gpu: Gpu | None) -> list[int]:
    """The cores a worker should run on: the job's that are near its GPU, else all the job's."""
    near = sorted(set(owned) & set(gpu.cores)) if gpu else []
    return near or sorted(owned)
