"""Findings on a node's GPUs: those that its ranks see, taken together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dask.utils import format_bytes

from hpcdask.comm.transport import NodeLinks, confined
from hpcdask.gpu.devices import EACH_A_GPU
from hpcdask.logs import some, spans
from hpcdask.queues.environment import granted

from .findings import Finding, Reporter
from .gpu_facts import GpuFacts, GpusFacts

if TYPE_CHECKING:
    from .nodes import Node

say = Reporter("GPUs")
Gpus = Sequence[GpuFacts]
#: Modes in which a GPU is not for every process.
MODES = {1: "exclusive (thread)", 2: "prohibited", 3: "exclusive (process)"}
#: Clock limits that heat or a weak supply cause (NVML's clocks event reasons).
SLOWDOWNS = {0x8: "hardware slowdown", 0x60: "heat", 0x80: "power brake"}
RESET = "Tell the site's staff, and leave the GPU out with CUDA_VISIBLE_DEVICES until then"
#: Free device memory, as a fraction, below which somebody else is using the GPU.
LEAST_FREE = 0.9


def check(known: GpusFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the GPUs of one node."""
    gpus = node.gpus
    if not gpus:
        yield _none_that_is_used(node) if known.device_files else _none_here(node)
        return
    kinds = Counter((gpu.name, format_bytes(gpu.memory)) for gpu in gpus)
    names = [f"{count} x {name}, {memory}" for (name, memory), count in kinds.items()]
    yield say.ok("driver", f"{known.driver}, runs CUDA {'.'.join(map(str, known.cuda))}")
    yield say.ok("GPUs", ", ".join(names))
    yield from _confined(node)
    yield from _health(gpus)
    yield from _pcie(gpus)
    yield from _mode(gpus)
    if off := [gpu for gpu in gpus if gpu.persistence == 0]:
        hint = "The first use of an idle GPU takes some seconds more"
        yield say.ok("persistence mode", f"{which(gpus, off)}off", hint)
    yield from _clocks(gpus)
    yield from _links(gpus)
    yield from _nvlink(node)
    yield from _free(gpus)
    yield _tenants(gpus)
    yield from _cores(node)


def which(gpus: Gpus, chosen: Gpus) -> str:
    """Name some of the GPUs by their number in nvidia-smi; empty for all."""
    return f"GPU {spans(gpu.index for gpu in chosen)}: " if len(chosen) < len(gpus) else ""


def _how_to_get(node: Node) -> str:
    """Return advice on how to get a GPU, in the queueing system's words."""
    if node.facts.queue and (request := node.facts.queue.request):
        return f"Request them, for example {request}"
    return "Check nvidia-smi and CUDA_VISIBLE_DEVICES here"


def _none_that_is_used(node: Node) -> Finding:
    visible = next(iter(node.processes.values())).env.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return say.warning("GPUs", f"none of this node's may be used{hidden}", _how_to_get(node))


def _none_here(node: Node) -> Finding:
    queue = node.facts.queue
    if queue and (given := granted(queue.gpus)):
        return say.warning(
            "GPUs",
            f"the NVIDIA driver was not found, but the job has GPUs ({given})",
            "Pass them into the container: apptainer exec --nv, or docker run --gpus all. Outside "
            "of one, see nvidia-smi on this node, and whether the step has them "
            f"(srun {EACH_A_GPU})",
        )
    if queue and queue.job:
        advice = f"{_how_to_get(node)}. To compute on the CPU: hpcdask doctor --device cpu"
        return say.warning("GPUs", "no NVIDIA GPU here, inside a job", advice)
    hint = f"Run it where the workers will be: srun {EACH_A_GPU} hpcdask doctor"
    return say.ok("GPUs", "no NVIDIA GPU here", hint)


def _confined(node: Node) -> Iterator[Finding]:
    """Yield a finding on GPUs that a cgroup keeps from a rank, or from the whole job."""
    fabrics = node.fabrics.values()
    if confined([NodeLinks("", node.gpus, fabric) for fabric in fabrics]):
        yield say.slow(
            "confined",
            "a cgroup keeps the ranks from each other's GPUs",
            "NVLink is not used between them (no CUDA IPC): let jobs have whole nodes, or start "
            "the ranks with --gpu-bind=none",
        )
    elif hidden := max((one.hidden_gpus for one in fabrics), default=0):
        yield say.ok(
            "confined",
            f"{hidden} of this node's GPUs belong to other jobs",
            "Between such jobs NVLink is not used (no CUDA IPC): for a cluster of jobs, let each "
            "have a whole node",
        )


def _health(gpus: Gpus) -> Iterator[Finding]:
    topic = "memory errors"
    pending = [gpu for gpu in gpus if gpu.retirement_pending]
    failed = [gpu for gpu in gpus if gpu.remap_failed]
    errors = [gpu for gpu in gpus if gpu.ecc_uncorrected]
    if failed:
        yield say.error(topic, f"{which(gpus, failed)}memory rows could not be remapped", RESET)
    if pending:
        value = f"{which(gpus, pending)}memory waits to be retired"
        yield say.warning(topic, value, "The GPU needs a reset: tell the site's staff")
    if errors:
        count = sum(gpu.ecc_uncorrected or 0 for gpu in errors)
        value = f"{which(gpus, errors)}{count} uncorrected since the driver started"
        yield say.warning(topic, value, RESET)
    if not (failed or pending or errors):
        on = any(gpu.ecc_uncorrected is not None for gpu in gpus)
        yield say.ok(topic, "no uncorrected memory errors" if on else "no ECC counters")


def _pcie(gpus: Gpus) -> Iterator[Finding]:
    known = [gpu for gpu in gpus if gpu.pcie_width]
    if narrow := [gpu for gpu in known if (gpu.pcie_width or 0) < (gpu.pcie_max_width or 0)]:
        yield say.slow(
            "PCIe",
            f"{which(gpus, narrow)}x{narrow[0].pcie_width} of x{narrow[0].pcie_max_width} lanes "
            f"in use",
            "Copies between host and GPU are slower by as much: tell the site's staff, or choose "
            "another node",
        )
    elif known:
        links = (f"gen {gpu.pcie_max_gen or '?'} x{gpu.pcie_width}" for gpu in known)
        yield say.ok("PCIe", ", ".join(dict.fromkeys(links)))


def _mode(gpus: Gpus) -> Iterator[Finding]:
    for number, words in MODES.items():
        there = [gpu for gpu in gpus if gpu.compute_mode == number]
        value = f"{which(gpus, there)}{words}"
        if there and words == "prohibited":
            yield say.error("compute mode", value, "Use another node or GPU")
        elif there:
            yield say.warning(
                "compute mode",
                value,
                "Only one process can use such a GPU: with ucx, or --oversubscribe, others fail. "
                "Ask for the default mode (nvidia-smi -c 0; SLURM: --gpu_cmode=shared where the "
                "site allows it)",
            )


def _clocks(gpus: Gpus) -> Iterator[Finding]:
    for bits, cause in SLOWDOWNS.items():
        if slow := [gpu for gpu in gpus if (gpu.clock_limits or 0) & bits]:
            yield say.slow(
                "clocks",
                f"{which(gpus, slow)}slowed down by the driver ({cause})",
                "It computes slower than its peers: tell the site's staff, or choose another node",
            )


def _links(gpus: Gpus) -> Iterator[Finding]:
    topic = "NVLink links"
    known = [gpu for gpu in gpus if gpu.nvlinks and not gpu.sliced]
    most: dict[str, int] = {}
    for gpu in known:
        most[gpu.name] = max(most.get(gpu.name, 0), gpu.nvlinks)
    if lacking := [gpu for gpu in known if gpu.nvlinks < most[gpu.name]]:
        yield say.slow(
            topic,
            f"{which(gpus, lacking)}{lacking[0].nvlinks} of {most[lacking[0].name]} links up",
            "It exchanges data slower than its peers: tell the site's staff, or leave the GPU out "
            "with CUDA_VISIBLE_DEVICES",
        )
    elif known:
        counts = " or ".join(map(str, dict.fromkeys(most.values())))
        yield say.ok(topic, f"{which(gpus, known)}{counts} up on each")


def _nvlink(node: Node) -> Iterator[Finding]:
    gpus, fabric = node.gpus, node.facts.fabric
    seen, sliced = {gpu.uuid for gpu in gpus}, any(gpu.sliced for gpu in gpus)
    if len(seen) < 2 or fabric is None or (seen - set(fabric.gpus) and not sliced):
        return  # no rank sees all
    every = len(seen) * (len(seen) - 1) // 2
    joined = [pair for pair in fabric.nvlink if seen.issuperset(pair)]
    value = "not between these GPUs"
    if sliced:
        value = "not between MIG slices"
    elif len(joined) == every:
        value = "between all GPUs"
    elif joined:
        number = {gpu.uuid: gpu.index for gpu in gpus}
        peers: dict[int, set[int]] = {}
        for first, second in joined:
            peers.setdefault(number[first], set()).add(number[second])
        pairs = ", ".join(f"{index} to {spans(there)}" for index, there in sorted(peers.items()))
        value = f"between {len(joined)} of {every} pairs of GPUs: {pairs}"
    yield say.ok("NVLink", value)


def _free(gpus: Gpus) -> Iterator[Finding]:
    least = min(gpus, key=lambda gpu: gpu.free / gpu.memory)
    if full := [gpu for gpu in gpus if gpu.free < LEAST_FREE * gpu.memory]:
        yield say.warning(
            "free memory",
            f"{which(gpus, full)}{format_bytes(least.free)} of {format_bytes(least.memory)}",
            "Others use the GPU, and an RMM pool may find no room: end what is left over "
            "(nvidia-smi lists it), or request the GPU for yourself",
        )
    else:
        yield say.ok("free memory", f"at least {least.free / least.memory:.0%} of each GPU")


def _tenants(gpus: Gpus) -> Finding:
    on: dict[int, list[int]] = {}
    known = {one.pid: replace(one, memory=0) for gpu in gpus for one in gpu.processes}
    for gpu in gpus:
        for one in gpu.processes:
            on.setdefault(one.pid, []).append(gpu.index)
            total = (known[one.pid].memory or 0) + (one.memory or 0)
            known[one.pid] = replace(one, memory=total)
    if not known:
        return say.ok("other processes", "none on these GPUs")
    texts = [
        f"{one.pid} ({one.name or 'cannot be seen from here'}"
        + (f" of {one.user}" if one.user else "")
        + (f", {format_bytes(one.memory)}" if one.memory else "")
        + f", on GPU {spans(on[one.pid])})"
        for one in known.values()
    ]
    return say.warning(
        "other processes",
        some(texts, 8, "; "),
        "They share the GPUs' memory and time: if yours are left from an earlier run, end them "
        "with kill PID",
    )


def _cores(node: Node) -> Iterator[Finding]:
    owned, placed = node.cores, [gpu for gpu in node.gpus if gpu.cores]
    if far := [gpu for gpu in placed if not owned & set(gpu.cores)]:
        yield say.slow(
            "NUMA",
            f"{which(node.gpus, far)}none of the {len(owned)} cores that may be used "
            f"({spans(owned)}) is near (near: {spans(far[0].cores)})",
            "Copies between host and GPU cross the node: request cores near the GPUs "
            "(srun --gpu-bind=closest), or all cores of the node",
        )
    elif placed:
        nodes = sorted({gpu.numa for gpu in placed if gpu.numa is not None})
        where = f" (NUMA nodes {spans(nodes)})" if nodes else ""
        yield say.ok("NUMA", f"every GPU has cores near it{where}")
