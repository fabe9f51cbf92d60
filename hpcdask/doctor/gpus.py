"""GPUs that the ranks of a node see: their state by NVML, without a CUDA call, and its meaning."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes

from hpcdask.comm.transport import NodeLinks, confined
from hpcdask.gpu import driver, nvml
from hpcdask.gpu.devices import EACH_A_GPU, Gpu, visible_gpus
from hpcdask.gpu.nvml import Device
from hpcdask.logs import some, spans
from hpcdask.queues.environment import granted
from hpcdask.spec.records import Record

from .findings import Finding, Reporter

if TYPE_CHECKING:
    from .nodes import Node

say = Reporter("GPUs")
#: Part of the command lines of the doctor's own processes on a GPU.
OWN = "hpcdask.doctor"
#: Compute modes in which a GPU is not for every process.
MODES = {1: "exclusive (thread)", 2: "prohibited", 3: "exclusive (process)"}
#: Clock limits that heat or a weak supply cause (NVML's clocks event reasons).
SLOWDOWNS = {0x8: "hardware slowdown", 0x60: "heat", 0x80: "power brake"}
LEAVE_OUT = "Tell the site's staff, and leave the GPU out with CUDA_VISIBLE_DEVICES"
OTHER_NODE = "Tell the site's staff, or choose another node"
#: Fraction of free device memory below which somebody else uses the GPU.
LEAST_FREE = 0.9


@dataclass(frozen=True)
class GpuProcess(Record):
    """Process with a context on a GPU; without a name if it is outside of this container."""

    pid: int
    name: str | None = None
    user: str | None = None
    memory: int | None = None


@dataclass(frozen=True)
class GpuFacts(Gpu):
    """GPU or MIG slice with its state by NVML; None where NVML does not tell."""

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
            capability=capability and tuple(capability),
            processes=tuple(_processes(device)),
        )


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


def _numa_node(bus: str) -> int | None:
    """Return the NUMA node of a PCI device, whose domain has eight digits, the kernel's four."""
    number = driver.read(f"/sys/bus/pci/devices/{bus[-12:]}/numa_node")
    return int(number) if number.isdigit() else None


def _processes(device: Device) -> Iterator[GpuProcess]:
    """Yield the processes on a GPU, without the doctor's own."""
    import psutil

    for pid, nbytes in device.processes().items():
        known: dict[str, Any] = {}
        with contextlib.suppress(psutil.Error):
            known = psutil.Process(pid).as_dict(["cmdline", "name", "username"])
        if not any(OWN in word for word in known.get("cmdline") or ()):
            yield GpuProcess(pid, known.get("name"), known.get("username"), nbytes)


Gpus = Sequence[GpuFacts]


def check(known: GpusFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the GPUs of one node."""
    gpus = node.gpus
    if not gpus:
        yield _none(known, node)
        return
    kinds = Counter((gpu.name, format_bytes(gpu.memory)) for gpu in gpus)
    names = [f"{count} x {name}, {memory}" for (name, memory), count in kinds.items()]
    yield say.ok("driver", f"{known.driver}, runs CUDA {'.'.join(map(str, known.cuda))}")
    yield say.ok("GPUs", ", ".join(names))
    yield from _confined(node)
    yield from _health(gpus)
    yield from _pcie(gpus)
    yield from _modes(gpus)
    yield from _clocks(gpus)
    yield from _links(gpus)
    yield from _nvlink(node)
    yield from _free(gpus)
    yield _tenants(gpus)
    yield from _cores(node)


def which(gpus: Gpus, chosen: Gpus) -> str:
    """Return the numbers in nvidia-smi of some of the GPUs; empty for all."""
    return f"GPU {spans(gpu.index for gpu in chosen)}: " if len(chosen) < len(gpus) else ""


def _none(known: GpusFacts, node: Node) -> Finding:
    queue, get = node.facts.queue, "Check nvidia-smi and CUDA_VISIBLE_DEVICES here"
    if queue and queue.request:
        get = f"Request them, for example {queue.request}"
    if known.device_files:
        visible = next(iter(node.processes.values())).env.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        return say.warning("GPUs", f"none of this node's may be used{hidden}", get)
    if queue and (given := granted(queue.gpus)):
        value = f"the NVIDIA driver was not found, but the job has GPUs ({given})"
        advice = "Pass them into the container: apptainer exec --nv, or docker run --gpus all. "
        advice += (
            f"Outside of one, see nvidia-smi, and whether the step has them: srun {EACH_A_GPU}"
        )
        return say.warning("GPUs", value, advice)
    if queue and queue.job:
        advice = f"{get}. To compute on the CPU: hpcdask doctor --device cpu"
        return say.warning("GPUs", "no NVIDIA GPU here, inside a job", advice)
    hint = f"Run it where the workers will be: srun {EACH_A_GPU} hpcdask doctor"
    return say.ok("GPUs", "no NVIDIA GPU here", hint)


def _confined(node: Node) -> Iterator[Finding]:
    """Yield a finding on GPUs that a cgroup keeps from a rank, or from the whole job."""
    fabrics = node.fabrics.values()
    if confined([NodeLinks("", node.gpus, fabric) for fabric in fabrics]):
        value = "a cgroup keeps the ranks from each other's GPUs"
        advice = "NVLink is not used between them (no CUDA IPC): let jobs have whole nodes, or "
        yield say.slow("confined", value, f"{advice}start the ranks with --gpu-bind=none")
    elif hidden := max((one.hidden_gpus for one in fabrics), default=0):
        hint = "NVLink is not used between such jobs (no CUDA IPC): let each have a whole node"
        yield say.ok("confined", f"{hidden} of this node's GPUs belong to other jobs", hint)


def _health(gpus: Gpus) -> Iterator[Finding]:
    topic, is_well = "memory errors", True
    for make, text, faulty, advice in (
        (say.error, "memory rows could not be remapped", "remap_failed", LEAVE_OUT),
        (say.warning, "memory waits to be retired, at a reset", "retirement_pending", OTHER_NODE),
        (say.warning, "{} uncorrected since the driver started", "ecc_uncorrected", LEAVE_OUT),
    ):
        if found := [gpu for gpu in gpus if getattr(gpu, faulty)]:
            value = text.format(sum(getattr(gpu, faulty) for gpu in found))
            yield make(topic, f"{which(gpus, found)}{value}", advice)
            is_well = False
    if is_well:
        on = any(gpu.ecc_uncorrected is not None for gpu in gpus)
        yield say.ok(topic, "no uncorrected memory errors" if on else "no ECC counters")


def _pcie(gpus: Gpus) -> Iterator[Finding]:
    known = [gpu for gpu in gpus if gpu.pcie_width]
    if narrow := [gpu for gpu in known if (gpu.pcie_width or 0) < (gpu.pcie_max_width or 0)]:
        lanes = f"x{narrow[0].pcie_width} of x{narrow[0].pcie_max_width} lanes in use"
        yield say.slow("PCIe", f"{which(gpus, narrow)}{lanes}", OTHER_NODE)
    elif known:
        links = (f"gen {gpu.pcie_max_gen or '?'} x{gpu.pcie_width}" for gpu in known)
        yield say.ok("PCIe", ", ".join(dict.fromkeys(links)))


def _modes(gpus: Gpus) -> Iterator[Finding]:
    for number, words in MODES.items():
        found = [gpu for gpu in gpus if gpu.compute_mode == number]
        value = f"{which(gpus, found)}{words}"
        if found and words == "prohibited":
            yield say.error("compute mode", value, "Use another node or GPU")
        elif found:
            advice = "One process only can use such a GPU, not so with ucx or --oversubscribe: "
            advice += "nvidia-smi -c 0, or SLURM's --gpu_cmode=shared where the site allows it"
            yield say.warning("compute mode", value, advice)
    if off := [gpu for gpu in gpus if gpu.persistence == 0]:
        hint = "The first use of an idle GPU takes some seconds more"
        yield say.ok("persistence mode", f"{which(gpus, off)}off", hint)


def _clocks(gpus: Gpus) -> Iterator[Finding]:
    for bits, cause in SLOWDOWNS.items():
        if slow := [gpu for gpu in gpus if (gpu.clock_limits or 0) & bits]:
            value = f"{which(gpus, slow)}slowed down by the driver ({cause})"
            yield say.slow("clocks", value, OTHER_NODE)


def _links(gpus: Gpus) -> Iterator[Finding]:
    topic = "NVLink links"
    known = [gpu for gpu in gpus if gpu.nvlinks and not gpu.sliced]
    most: dict[str, int] = {}
    for gpu in known:
        most[gpu.name] = max(most.get(gpu.name, 0), gpu.nvlinks)
    if lacking := [gpu for gpu in known if gpu.nvlinks < most[gpu.name]]:
        links = f"{lacking[0].nvlinks} of {most[lacking[0].name]} links up"
        yield say.slow(topic, f"{which(gpus, lacking)}{links}", LEAVE_OUT)
    elif known:
        counts = " or ".join(map(str, dict.fromkeys(most.values())))
        yield say.ok(topic, f"{which(gpus, known)}{counts} up on each")


def _nvlink(node: Node) -> Iterator[Finding]:
    gpus, fabric = node.gpus, node.facts.fabric
    number, sliced = {gpu.uuid: gpu.index for gpu in gpus}, any(gpu.sliced for gpu in gpus)
    if len(gpus) < 2 or fabric is None or (number.keys() - set(fabric.gpus) and not sliced):
        return  # no rank sees all
    every = len(gpus) * (len(gpus) - 1) // 2
    joined = [(number[a], number[b]) for a, b in fabric.nvlink if {a, b} <= number.keys()]
    value = "not between these GPUs"
    if sliced:
        value = "not between MIG slices"
    elif len(joined) == every:
        value = "between all GPUs"
    elif joined:
        firsts = sorted({first for first, _ in joined})
        pairs = (f"{one} to {spans(b for a, b in joined if a == one)}" for one in firsts)
        value = f"between {len(joined)} of {every} pairs of GPUs: {', '.join(pairs)}"
    yield say.ok("NVLink", value)


def _free(gpus: Gpus) -> Iterator[Finding]:
    least = min(gpus, key=lambda gpu: gpu.free / gpu.memory)
    if full := [gpu for gpu in gpus if gpu.free < LEAST_FREE * gpu.memory]:
        value = f"{which(gpus, full)}{format_bytes(least.free)} of {format_bytes(least.memory)}"
        advice = "An RMM pool may find no room: end what is left over, or request the GPU for "
        yield say.warning("free memory", value, f"{advice}yourself. nvidia-smi lists processes")
    else:
        yield say.ok("free memory", f"at least {least.free / least.memory:.0%} of each GPU")


def _tenants(gpus: Gpus) -> Finding:
    found: dict[int, list[tuple[int, GpuProcess]]] = {}
    for gpu in gpus:
        for process in gpu.processes:
            found.setdefault(process.pid, []).append((gpu.index, process))
    if not found:
        return say.ok("other processes", "none on these GPUs")
    texts = []
    for pid, uses in found.items():
        one = uses[0][1]
        user = f" of {one.user}" if one.user else ""
        nbytes = sum(process.memory or 0 for _, process in uses)
        memory = f", {format_bytes(nbytes)}" if nbytes else ""
        where = spans(index for index, _ in uses)
        texts.append(f"{pid} ({one.name or 'not visible here'}{user}{memory}, on GPU {where})")
    advice = "They share the GPUs' memory and time: if yours are left from an earlier run, end "
    return say.warning("other processes", some(texts, 8, "; "), f"{advice}them with kill PID")


def _cores(node: Node) -> Iterator[Finding]:
    owned, placed = node.cores, [gpu for gpu in node.gpus if gpu.cores]
    if far := [gpu for gpu in placed if not owned & set(gpu.cores)]:
        value = f"{which(node.gpus, far)}none of the {len(owned)} cores that may be used "
        value += f"({spans(owned)}) is near (near: {spans(far[0].cores)})"
        advice = "Copies between host and GPU cross the node: request cores near the GPUs (srun "
        yield say.slow("NUMA", value, f"{advice}--gpu-bind=closest), or all cores of the node")
    elif placed:
        nodes = sorted({gpu.numa for gpu in placed if gpu.numa is not None})
        where = f" (NUMA nodes {spans(nodes)})" if nodes else ""
        yield say.ok("NUMA", f"every GPU has cores near it{where}")
