"""GPUs that the ranks of a node see: their state by NVML, without a CUDA call, and its meaning."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dask.utils import format_bytes

from hpcdask.comm.transport import NodeLinks, confined
from hpcdask.gpu import driver, nvml
from hpcdask.gpu.devices import EACH_A_GPU, Gpu, visible_gpus
from hpcdask.gpu.nvml import Device
from hpcdask.gpu.samples import REASONS
from hpcdask.logs import some, spans
from hpcdask.spec.records import Record

from . import report
from .report import Finding, together

if TYPE_CHECKING:
    from .nodes import Node

finding, slow = partial(Finding, "GPUs"), partial(report.slow, "GPUs")
#: Part of the command lines of the doctor's own processes on a GPU.
OWN = "hpcdask.doctor"
#: Compute modes of GPUs that are not for several processes, by NVML's numbers.
MODES = {1: "exclusive", 2: "prohibited", 3: "exclusive"}
#: Reasons that hold the clocks of sound GPUs back, by NVML's bits: a power cap, and sync boost.
USUAL = 0x4 | 0x10
LEAVE_OUT = "Tell the site's staff, and leave the GPU out with CUDA_VISIBLE_DEVICES"
OTHER_NODE = "Tell the site's staff, or choose another node"
#: Fraction of free device memory below which somebody else uses the GPU.
LEAST_FREE = 0.9


@dataclass(frozen=True)
class GpuFacts(Gpu):
    """GPU or MIG slice with its state by NVML; None where NVML does not tell.

    `processes` are those that compute on it, each with its id, name, user and memory.
    """

    index: int = 0
    free: int = 0
    compute_mode: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_max_gen: int | None = None
    clock_limits: int | None = None
    nvlinks: int = 0
    ecc_uncorrected: int | None = None
    retirement_pending: bool = False
    remap_failed: bool = False
    capability: tuple[int, int] | None = None
    processes: tuple[str, ...] = ()

    @classmethod
    def of(cls, gpu: Gpu, device: Device) -> GpuFacts:
        """Ask NVML about a visible GPU."""
        import psutil

        ask, memory = device.ask_card, device.memory()
        remapped = ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
        capability = ask("nvmlDeviceGetCudaComputeCapability")
        free = int(psutil.virtual_memory().available) if memory is None else memory.free
        return cls(
            **gpu.__dict__,
            index=ask("nvmlDeviceGetIndex") or 0,
            free=free,
            compute_mode=ask("nvmlDeviceGetComputeMode"),
            pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_max_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
            pcie_max_gen=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            clock_limits=device.clock_limits(),
            nvlinks=device.links_up(),
            ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", 1, 0),  # since the driver's start
            retirement_pending=bool(ask("nvmlDeviceGetRetiredPagesPendingStatus") or remapped[2]),
            remap_failed=bool(remapped[3]),
            capability=capability and tuple(capability),
            processes=tuple(_processes(device)),
        )

    @property
    def sliced(self) -> bool:
        """Return whether this is a MIG slice."""
        return self.uuid.startswith("MIG-")

    @property
    def kind(self) -> str:
        """Return the model with its memory and links."""
        words = [self.name, format_bytes(self.memory)]
        words += [f"PCIe gen {self.pcie_max_gen} x{self.pcie_width}"] if self.pcie_width else []
        words += [f"{self.nvlinks} NVLinks"] if self.nvlinks else []
        return ", ".join(words)


@dataclass(frozen=True)
class GpusFacts(Record):
    """GPUs that a rank may use; `device_files` tells whether there is a driver."""

    device_files: bool
    gpus: tuple[GpuFacts, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)

    @classmethod
    def read(cls) -> GpusFacts:
        """Ask NVML. Raises DeviceError if there are device files and NVML does not start."""
        visible = visible_gpus()
        if (versions := nvml.versions()) is None:
            return cls(driver.has_nvidia_driver())
        devices = ((gpu, nvml.device(gpu.uuid)) for gpu in visible)
        gpus = tuple(GpuFacts.of(gpu, device) for gpu, device in devices if device)
        return cls(True, gpus, *versions)


def _processes(device: Device) -> Iterator[str]:
    """Yield the processes on a GPU, without the doctor's own."""
    import psutil

    for pid, nbytes in device.processes().items():
        command, words = [], ["not visible here"]  # such as one outside of this container
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            command, words = process.cmdline(), [f"{process.name()} of {process.username()}"]
        if not any(OWN in word for word in command):
            words += [format_bytes(nbytes)] if nbytes else []
            yield f"{pid} ({', '.join(words)})"


def check(known: GpusFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the GPUs of one node."""
    gpus = node.gpus
    if not gpus:
        yield _none(known, node)
        return
    kinds = Counter(gpu.kind for gpu in gpus)
    yield finding("driver", "ok", f"{known.driver}, runs CUDA {'.'.join(map(str, known.cuda))}")
    yield finding("GPUs", "ok", "; ".join(f"{count} x {kind}" for kind, count in kinds.items()))
    flaws = together((flaw, gpu.index) for gpu in gpus for flaw in _flaws(gpu, node))
    for flaw, numbers in flaws.items():
        where = f" (GPU {spans(numbers)})" if len(numbers) < len(gpus) else ""
        yield replace(flaw, value=f"{flaw.value}{where}")
    yield from _confined(node)
    yield from _nvlink(node)
    yield from _ranks(node)


def _none(known: GpusFacts, node: Node) -> Finding:
    queue = node.facts.queue
    if known.device_files:
        visible = next(iter(node.processes.values())).env.get("CUDA_VISIBLE_DEVICES", "not set")
        value = f"none of this node's may be used (CUDA_VISIBLE_DEVICES: {visible or 'empty'})"
    elif queue and queue.job:
        value = "no NVIDIA GPU here, inside a job"
    else:
        hint = f"Run it where the workers will be: srun {EACH_A_GPU} hpcdask doctor"
        return finding("GPUs", "ok", "no NVIDIA GPU here", hint)
    advice = f"{queue.request if queue else ''}To compute on the CPU: hpcdask doctor --device cpu"
    return finding("GPUs", "warning", value, advice)


def _flaws(gpu: GpuFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on one GPU, in words that others with the same flaw share."""
    if gpu.remap_failed:
        yield finding("memory errors", "error", "memory rows could not be remapped", LEAVE_OUT)
    if gpu.retirement_pending:
        value = "memory waits to be retired, at a reset"
        yield finding("memory errors", "warning", value, OTHER_NODE)
    if gpu.ecc_uncorrected:
        value = f"{gpu.ecc_uncorrected} uncorrected since the driver started"
        yield finding("memory errors", "warning", value, LEAVE_OUT)
    if (gpu.pcie_width or math.inf) < (gpu.pcie_max_width or 0):
        lanes = f"x{gpu.pcie_width} of x{gpu.pcie_max_width} lanes in use"
        yield slow("PCIe", lanes, OTHER_NODE)
    if mode := MODES.get(gpu.compute_mode or 0):
        advice = "It is not for several processes: nvidia-smi -c 0, or srun --gpu_cmode=shared"
        yield finding("compute mode", "error" if mode == "prohibited" else "warning", mode, advice)
    if causes := [text for bit, text in REASONS.items() if (gpu.clock_limits or 0) & bit & ~USUAL]:
        yield slow("clocks", f"slowed down by the driver: {', '.join(causes)}", OTHER_NODE)
    most = max(other.nvlinks for other in node.gpus if other.name == gpu.name)
    if 0 < gpu.nvlinks < most and not gpu.sliced:
        yield slow("NVLink links", f"{gpu.nvlinks} of {most} links up", LEAVE_OUT)
    if gpu.free < LEAST_FREE * gpu.memory:
        value = f"{format_bytes(gpu.free)} of {format_bytes(gpu.memory)}"
        advice = "RMM's pool may not fit: end what is left over, or request the GPU for yourself"
        yield finding("free memory", "warning", value, advice)
    if gpu.processes:
        advice = "They share its memory and time. If they are left from a run of yours: kill PID"
        yield finding("other processes", "warning", some(gpu.processes, 8, "; "), advice)
    if gpu.cores and not node.cores.intersection(gpu.cores):
        value = f"none of the usable cores ({spans(node.cores)}) is near (near: {spans(gpu.cores)})"
        advice = "Request cores near the GPUs (srun --gpu-bind=closest), or all cores of the node"
        yield slow("NUMA", value, advice)


def _confined(node: Node) -> Iterator[Finding]:
    """Yield a finding on GPUs that a cgroup keeps from a rank, or from the whole job."""
    fabrics = node.fabrics.values()
    hidden = max((one.hidden_gpus for one in fabrics), default=0)
    if confined([NodeLinks("", node.gpus, fabric) for fabric in fabrics]):
        value = "a cgroup keeps the ranks from each other's GPUs: NVLink is not used"
        advice = "Let jobs have whole nodes, or start the ranks with --gpu-bind=none"
        yield slow("confined", value, advice)
    elif hidden:
        hint = "NVLink is not used between such jobs (no CUDA IPC): let each have a whole node"
        yield finding("confined", "ok", f"{hidden} of this node's GPUs belong to other jobs", hint)


def _nvlink(node: Node) -> Iterator[Finding]:
    """Yield a finding on the pairs of GPUs that NVLink joins, where a rank sees all of them."""
    uuids, fabric = {gpu.uuid for gpu in node.gpus}, node.facts.fabric
    if len(uuids) < 2 or fabric is None:
        return
    if any(gpu.sliced for gpu in node.gpus):
        yield finding("NVLink", "ok", "not between MIG slices")
    elif uuids.issubset(fabric.gpus):
        joined = sum(uuids.issuperset(pair) for pair in fabric.nvlink)
        every = len(uuids) * (len(uuids) - 1) // 2
        value = f"between {joined} of {every} pairs of GPUs (nvidia-smi topo -m)"
        yield finding("NVLink", "ok", "between all GPUs" if joined == every else value)


def _ranks(node: Node) -> Iterator[Finding]:
    """Yield a finding on whether each rank of the node gets a GPU of its own."""
    topic, gpus, ranks = "GPU of each rank", node.gpus, node.reports
    if len(ranks) < 2:
        return
    _, error = node.assign()
    idle = len(gpus) - len(ranks)
    if error:
        value, _, advice = error.partition(": ")
        yield finding(topic, "error", value, advice or f"Request one for each: {EACH_A_GPU}")
    elif idle:
        value = f"{len(ranks)} ranks for {len(gpus)} GPUs: {idle} without work"
        yield finding(topic, "warning", value, f"Start {len(gpus)} ranks on each node")
    else:
        every = all(len(seen) == len(gpus) for seen in node.seen.values())
        value = "each sees all and takes its own" if every else "each sees its own"
        yield finding(topic, "ok", value)
